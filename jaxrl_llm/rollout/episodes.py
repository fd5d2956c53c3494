"""Prompts in, sequences out: an episode appends tokens to each answer of the policy, or ends.

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
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.requests import Completion, Request, SamplingParams, Statistics
from jaxrl_llm.types import Prompt, PromptBatch, Rollouts, Weights


class Episode:
    """One sample of a row, from its prompt to its end; here of one answer."""

    def advance(self, sampled: Completion) -> Sequence[int]:
        """Returns the tokens that follow what was sampled; none: the episode has ended."""
        return ()


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


@dataclasses.dataclass
class _Sequence:
    """One episode so far; the lists are about the tokens after the prompt."""

    prompt: Prompt
    params: SamplingParams
    key: np.ndarray
    episode: Episode
    tokens: list[int] = dataclasses.field(default_factory=list)
    chosen: list[bool] = dataclasses.field(default_factory=list)  # sampled, not appended
    log_probs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    stopped: bool = False
    routes: np.ndarray | None = None  # of prompt and tokens, see `Rollouts.routes`

    def take(self, sampled: Completion) -> bool:
        """Takes in a turn; returns whether the policy goes on."""
        self.tokens += sampled.tokens
        self.chosen += [True] * len(sampled.tokens)
        self.log_probs += sampled.log_probs
        self.versions += sampled.versions
        self.stopped = sampled.stopped
        if sampled.routes:
            self.routes = np.concatenate(sampled.routes)[
                : len(self.prompt.tokens) + len(self.tokens)
            ]
        following = self.episode.advance(sampled)
        count = len(following)
        if not 0 < count < self.room:
            return False
        self.tokens += following
        self.chosen += [False] * count
        self.log_probs += [0.0] * count
        self.versions += [0] * count
        return True

    def routes_so_far(self) -> np.ndarray | None:
        """Returns the experts that tokens so far visited, -1 where that is not known."""
        if self.routes is None:
            return None
        unknown = len(self.prompt.tokens) + len(self.tokens) - len(self.routes)
        return np.pad(self.routes, ((0, unknown), (0, 0)), constant_values=-1)

    @property
    def room(self) -> int:
        """Tokens that the response may still grow by."""
        return self.params.max_tokens - len(self.tokens)


def rollout(
    engine: Engine,
    weights: Weights,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptBatch,
    samples: Sequence[SamplingParams],
    key: jax.Array,
    begin: Callable[[Prompt, int], Episode] = lambda prompt, sample: Episode(),
) -> tuple[Rollouts, Statistics]:
    """Returns `len(samples)` sequences of every prompt, prompt-major, and the work for all turns.

    Args:
      samples: How each sample of a prompt is drawn; `max_tokens` bounds all turns together.
      key: Sample i of prompt p uses `fold_in(key, p * len(samples) + i)`.
      begin: Begins the episode of a prompt's i-th sample.
    """
    n = len(samples)
    keys = np.asarray(_fold_in_each(key, np.arange(len(prompts.prompts) * n, dtype=np.uint32)))
    sequences = [
        _Sequence(prompt, params, keys[p * n + i], begin(prompt, i))
        for p, prompt in enumerate(prompts.prompts)
        for i, params in enumerate(samples)
    ]
    groups = [sequences[i : i + n] for i in range(0, len(sequences), n)]
    done = Statistics()
    while groups:
        # Sequences of a group continue the same tokens.
        requests = [
            Request(
                (*group[0].prompt.tokens, *group[0].tokens),
                np.stack([s.key for s in group]),
                tuple(
                    dataclasses.replace(s.params, max_tokens=s.room) if s.tokens else s.params
                    for s in group
                ),
                group[0].routes_so_far(),
            )
            for group in groups
        ]
        turns = engine.generate(weights.params, requests, weights.version, prompts.longest)
        done += engine.statistics
        groups = [
            [sequence]
            for group, completions in zip(groups, turns, strict=True)
            for sequence, completion in zip(group, completions, strict=True)
            if sequence.take(completion)
        ]
    text = lambda s: str(tokenizer.decode(s.tokens, skip_special_tokens=True))  # noqa: E731
    starts = [len(s.prompt.tokens) for s in sequences]
    ends = [start + len(s.tokens) for start, s in zip(starts, sequences, strict=True)]
    shape = (len(sequences), bucket(max(ends), smallest=32, largest=engine.max_tokens))
    rollouts = Rollouts(
        tokens=np.zeros(shape, np.int32),
        response_mask=np.zeros(shape, bool),
        rollout_log_probs=np.zeros(shape, np.float32),
        versions=np.zeros(shape, np.int32),
        lengths=np.array(ends, np.int32),
        group_ids=np.repeat(np.arange(len(prompts.prompts), dtype=np.int32), n),
        stopped=np.array([s.stopped for s in sequences]),
        prompts=prompts.prompts,
        responses=tuple(map(text, sequences)),
        routes=np.full((*shape, num_routes), -1, ROUTE_DTYPE)
        if (num_routes := engine.limits.num_routes)
        else None,
    )
    for row, s in enumerate(sequences):
        response = slice(starts[row], ends[row])
        rollouts.tokens[row, : ends[row]] = (*s.prompt.tokens, *s.tokens)
        rollouts.response_mask[row, response] = s.chosen
        rollouts.rollout_log_probs[row, response] = s.log_probs
        rollouts.versions[row, response] = s.versions
        if rollouts.routes is not None and s.routes is not None:
            rollouts.routes[row, : len(s.routes)] = s.routes
    return rollouts, done


@jax.jit
def _fold_in_each(key, indices):
    return jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(key, i)))(indices)
