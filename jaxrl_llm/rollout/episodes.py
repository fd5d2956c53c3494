"""Rollouts of prompts: single-turn or multi-turn episodes as token sequences.

A sequence holds the prompt, sampled tokens and appended replies; nothing is re-tokenized.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.config import RolloutConfig
from jaxrl_llm.models.transformer import ROUTE_DTYPE
from jaxrl_llm.packing.packed_batch import bucket
from jaxrl_llm.rollout import episode_runner
from jaxrl_llm.rollout.engine.requests import EngineStatistics, SamplingParams
from jaxrl_llm.rollout.engine_api import SamplingEngine
from jaxrl_llm.rollout.episode_runner import EpisodeEnvironment, EpisodeRunner
from jaxrl_llm.types import EpisodeLog, Prompt, PromptBatch, Rollouts, Weights


def sampling_params(config: RolloutConfig, eos_tokens: Sequence[int]) -> SamplingParams:
    """Sampling parameters of a run's training responses."""
    return SamplingParams(
        max_tokens=config.max_response_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        support_tokens=config.support_tokens,
        stop_tokens=tuple(dict.fromkeys((*eos_tokens, *config.stop_tokens))),
        stop_strings=config.stop_strings,
    )


def rollout(
    engine: SamplingEngine,
    weights: Weights,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptBatch,
    samples: Sequence[SamplingParams],
    key: jax.Array,
    world: EpisodeEnvironment | None = None,
    max_turn_tokens: int = 0,
    ended: Callable[[Rollouts, int], None] | None = None,
    see: episode_runner.MakeImageInputs | None = None,
    constrain: episode_runner.Constrain | None = None,
) -> tuple[Rollouts, EngineStatistics]:
    """Samples `len(samples)` episodes of every prompt, prompt-major, with the engine's statistics.

    An episode is one sequence, or several where the chat template rewrites the dialogue.

    Args:
      samples: Sampling parameters of each sample of a prompt; `max_tokens` bounds all turns
        together.
      key: Sample i of prompt p uses `fold_in(key, p * len(samples) + i)`.
      world: Replies to the policy; without it every episode has one turn.
      max_turn_tokens: Maximum tokens of one turn; 0: the limit of the whole response.
      ended: Callback for single-turn episodes: called with the rows of a prompt once all its
        samples have ended, and the number of the first row, while other samples continue.
      see: Makes the image inputs of sequences; needed for prompts with images.
      constrain: The grammar of each turn; without it turns are any text.
    """
    n = len(samples)
    keys = sample_keys(key, len(prompts.prompts) * n)
    if world is not None:
        prompts = world.begin(prompts, n)
    play = EpisodeRunner(engine, samples, world, max_turn_tokens, see, constrain)
    with engine.session():
        for p, prompt in enumerate(prompts.prompts):
            play.start(prompt, p * n, keys[p * n : (p + 1) * n])
        num_unfinished = [n] * len(prompts.prompts)  # unfinished samples of each prompt
        for episode in play.run(weights):
            p = episode // n
            num_unfinished[p] -= 1
            if ended is not None and world is None and not num_unfinished[p]:
                siblings = [play.sequences[p * n + i][0] for i in range(n)]
                ended(prompt_rollouts(engine, tokenizer, prompts.prompts[p], siblings), p * n)
        statistics = engine.statistics
    logs = world.finish() if world is not None else []
    sequences = [sequence for episode in play.sequences.values() for sequence in episode]
    width = engine.max_tokens
    if world is None:
        response = max(params.max_tokens for params in samples)
        width = sequence_width(prompts.max_prompt_tokens, response, width)
    return to_rollouts(engine, tokenizer, prompts, n, sequences, logs, width), statistics


def sample_keys(key: jax.Array, count: int) -> np.ndarray:
    """Raw random keys of all samples, prompt-major: `fold_in(key, i)`."""
    padded_count = bucket(count, smallest=1024)  # one program for a step and an evaluation
    return np.asarray(_fold_in_each(key, np.arange(padded_count, dtype=np.uint32)))[:count]


def prompt_rollouts(
    engine: SamplingEngine,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    sequences: Sequence[episode_runner.EpisodeSequence],
) -> Rollouts:
    """Rollouts of one prompt."""
    renumbered = [dataclasses.replace(s, episode=i) for i, s in enumerate(sequences)]
    return to_rollouts(engine, tokenizer, PromptBatch((prompt,)), len(renumbered), renumbered)


def to_rollouts(
    engine: SamplingEngine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptBatch,
    n: int,
    sequences: Sequence[episode_runner.EpisodeSequence],
    logs: Sequence[EpisodeLog] = (),
    width: int = 0,
) -> Rollouts:
    """Packs sequences of episodes, numbered prompt-major with `n` a prompt, into `Rollouts`.

    T is `width`, or more if the longest sequence needs it.
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
        routed_experts=np.full((*shape, num_routes), -1, ROUTE_DTYPE)
        if (num_routes := engine.limits.num_routes)
        else None,
        support=np.full((*shape, max_support), -1, np.int32)
        if (max_support := max(s.params.support_tokens for s in sequences))
        else None,
        episode_logs=tuple(logs[s.episode] for s in sequences) if logs else (),
        images=tuple(s.images for s in sequences),
    )
    for row, s in enumerate(sequences):
        response = slice(starts[row], ends[row])
        rollouts.tokens[row, : ends[row]] = (*s.prompt, *s.tokens)
        rollouts.response_mask[row, response] = s.sampled
        rollouts.rollout_log_probs[row, response] = s.log_probs
        rollouts.versions[row, response] = s.versions
        if rollouts.routed_experts is not None and s.routes is not None:
            rollouts.routed_experts[row, : len(s.routes)] = s.routes
        if rollouts.support is not None and s.support is not None:
            rollouts.support[row, response, : s.support.shape[1]] = s.support
    return rollouts


@jax.jit
def _fold_in_each(key, indices):
    return jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(key, i)))(indices)


def sequence_width(longest_prompt: int, max_response: int, most: int) -> int:
    """T of all single-turn rollouts of a run: one shape, so that few programs are compiled.

    `most` bounds all sequences; `longest_prompt` is 0 if unknown.
    """
    return padded_width(min(longest_prompt + max_response, most), most) if longest_prompt else 0


def padded_width(longest: int, most: int) -> int:
    """T of rollouts [B, T] whose longest sequence has `longest` tokens, at most `most`."""
    return bucket(longest, smallest=32, largest=most)
