"""Prompts in, sequences out, of one turn or of many: what follows an answer is appended, and read.

A sequence holds the prompt, sampled tokens, and appended ones; nothing is tokenized again.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.config import RolloutConfig
from jaxrl_llm.data.packing import bucket
from jaxrl_llm.models.transformer import ROUTE_DTYPE
from jaxrl_llm.rollout import play as play_lib
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.play import Play, World
from jaxrl_llm.rollout.requests import SamplingParams, Statistics
from jaxrl_llm.types import EpisodeLog, Prompt, PromptBatch, Rollouts, Weights


def sampling_params(config: RolloutConfig, eos_tokens: Sequence[int]) -> SamplingParams:
    """Returns how a run samples its training responses."""
    return SamplingParams(
        max_tokens=config.max_response_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        stop_tokens=tuple(dict.fromkeys((*eos_tokens, *config.stop_tokens))),
        stop_strings=config.stop_strings,
    )


def rollout(
    engine: Engine,
    weights: Weights,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptBatch,
    samples: Sequence[SamplingParams],
    key: jax.Array,
    world: World | None = None,
    max_turn_tokens: int = 0,
    ended: Callable[[Rollouts, int], None] | None = None,
    see: play_lib.See | None = None,
) -> tuple[Rollouts, Statistics]:
    """Returns `len(samples)` episodes of every prompt, prompt-major, and the work for all turns.

    An episode is one sequence, or several where its template rewrites the dialogue.

    Args:
      samples: How each sample of a prompt is drawn; `max_tokens` bounds all turns together.
      key: Sample i of prompt p uses `fold_in(key, p * len(samples) + i)`.
      world: What answers the policy; without it every episode has one turn.
      max_turn_tokens: Most tokens of one turn; 0: those of the whole response.
      ended: Without a world, is called with the rows of a prompt whose samples have all ended, and
        the number of the first, while other samples go on.
      see: What images are to sequences; needed for prompts with images.
    """
    n = len(samples)
    keys = sample_keys(key, len(prompts.prompts) * n)
    if world is not None:
        prompts = world.begin(prompts, n)
    play = Play(engine, samples, world, max_turn_tokens, see)
    with engine.session():
        for p, prompt in enumerate(prompts.prompts):
            play.begin(prompt, p * n, keys[p * n : (p + 1) * n])
        left = [n] * len(prompts.prompts)  # samples of each prompt that go on
        for episode in play.to_the_end(weights):
            p = episode // n
            left[p] -= 1
            if ended is not None and world is None and not left[p]:
                own = [play.sequences[p * n + i][0] for i in range(n)]
                ended(of_prompt(engine, tokenizer, prompts.prompts[p], own), p * n)
        done = engine.statistics
    logs = world.finish() if world is not None else []
    sequences = [sequence for episode in play.sequences.values() for sequence in episode]
    width = engine.max_tokens
    if world is None:
        response = max(params.max_tokens for params in samples)
        width = sequence_width(prompts.longest, response, width)
    return as_rollouts(engine, tokenizer, prompts, n, sequences, logs, width), done


def sample_keys(key: jax.Array, count: int) -> np.ndarray:
    """Returns the raw random keys of the samples of a wave, prompt-major: `fold_in(key, i)`."""
    most = bucket(count, smallest=1024)  # one program for a step and an evaluation
    return np.asarray(_fold_in_each(key, np.arange(most, dtype=np.uint32)))[:count]


def of_prompt(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    sequences: Sequence[play_lib.Sequence],
) -> Rollouts:
    """Returns the samples of one prompt alone."""
    alone = [dataclasses.replace(s, episode=i) for i, s in enumerate(sequences)]
    return as_rollouts(engine, tokenizer, PromptBatch((prompt,)), len(alone), alone)


def as_rollouts(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptBatch,
    n: int,
    sequences: Sequence[play_lib.Sequence],
    logs: Sequence[EpisodeLog] = (),
    width: int = 0,
) -> Rollouts:
    """Returns sequences of episodes, which are numbered prompt-major, `n` of each prompt.

    T is `width`, or what the longest of them needs if that is more.
    """
    text = lambda s: str(tokenizer.decode(s.tokens, skip_special_tokens=True))  # noqa: E731
    starts = [len(s.prompt) for s in sequences]
    ends = [start + len(s.tokens) for start, s in zip(starts, sequences, strict=True)]
    shape = (len(sequences), max(width, padded_width(max(ends), engine.max_tokens)))
    rollouts = Rollouts(
        tokens=np.zeros(shape, np.int32),
        response_mask=np.zeros(shape, bool),
        rollout_log_probs=np.zeros(shape, np.float32),
        versions=np.zeros(shape, np.int32),
        lengths=np.array(ends, np.int32),
        group_ids=np.array([s.episode // n for s in sequences], np.int32),
        stopped=np.array([s.stopped for s in sequences]),
        prompts=prompts.prompts,
        responses=tuple(map(text, sequences)),
        routes=np.full((*shape, num_routes), -1, ROUTE_DTYPE)
        if (num_routes := engine.limits.num_routes)
        else None,
        logs=tuple(logs[s.episode] for s in sequences) if logs else (),
        images=tuple(s.images for s in sequences),
    )
    for row, s in enumerate(sequences):
        response = slice(starts[row], ends[row])
        rollouts.tokens[row, : ends[row]] = (*s.prompt, *s.tokens)
        rollouts.response_mask[row, response] = s.chosen
        rollouts.rollout_log_probs[row, response] = s.log_probs
        rollouts.versions[row, response] = s.versions
        if rollouts.routes is not None and s.routes is not None:
            rollouts.routes[row, : len(s.routes)] = s.routes
    return rollouts


@jax.jit
def _fold_in_each(key, indices):
    return jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(key, i)))(indices)


def sequence_width(longest_prompt: int, max_response: int, most: int) -> int:
    """Returns T of all rollouts of a run without a world: one shape, so that programs are few.

    `most` bounds all sequences; the longest prompt is 0 where it is not known.
    """
    return padded_width(min(longest_prompt + max_response, most), most) if longest_prompt else 0


def padded_width(longest: int, most: int) -> int:
    """Returns T of rollouts [B, T] whose longest sequence has so many tokens, of `most` at most."""
    return bucket(longest, smallest=32, largest=most)
