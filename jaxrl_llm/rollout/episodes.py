"""Prompts in, sequences out, of one turn or of many: what follows an answer is appended, and read.

A sequence holds the prompt, sampled tokens, and appended ones; nothing is tokenized again.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.config import RolloutConfig
from jaxrl_llm.data.packing import bucket
from jaxrl_llm.models.transformer import ROUTE_DTYPE
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.requests import Completion, Request, SamplingParams, Statistics
from jaxrl_llm.types import EpisodeLog, Prompt, PromptBatch, Rollouts, Weights


class Following(Protocol):
    """What follows a turn of the policy."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """To be read next; none: the episode has ended."""
        ...

    @property
    def rewrites(self) -> bool:
        """Whether the tokens are the whole dialogue anew: another sequence begins with them."""
        ...


class World(Protocol):
    """What answers the policy. Episodes are numbered prompt-major; all hosts get the same."""

    def begin(self, prompts: PromptBatch, num_samples: int, /) -> PromptBatch:
        """Begins so many episodes of each prompt; returns the prompts that they begin with."""
        ...

    def take(self, number: int, tokens: list[int], stopped: bool, /) -> bool:
        """Takes in a turn of an episode; returns whether `answers` will tell what follows."""
        ...

    def answers(self, wait: bool) -> Sequence[tuple[int, Following]]:
        """Returns (episode, what follows), as far as that is known; waits for one if asked to."""
        ...

    def end(self, number: int, /) -> None:
        """Ends an episode whose next turn does not fit."""
        ...

    def finish(self) -> list[EpisodeLog]:
        """Returns what happened in each episode, when all have ended."""
        ...


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
    """One sequence so far; the lists are about the tokens after the prompt."""

    episode: int
    prompt: tuple[int, ...]
    params: SamplingParams
    key: np.ndarray
    tokens: list[int] = dataclasses.field(default_factory=list)
    chosen: list[bool] = dataclasses.field(default_factory=list)  # sampled, not appended
    log_probs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    stopped: bool = False
    routes: np.ndarray | None = None  # of prompt and tokens, see `Rollouts.routes`
    place: tuple[int, int] = (0, 0)  # its last turn: number of the request, index in that

    def take(self, sampled: Completion) -> None:
        """Takes in a turn."""
        self.tokens += sampled.tokens
        self.chosen += [True] * len(sampled.tokens)
        self.log_probs += sampled.log_probs
        self.versions += sampled.versions
        self.stopped = sampled.stopped
        if sampled.routes:
            self.routes = np.concatenate(sampled.routes)[: len(self.prompt) + len(self.tokens)]

    def append(self, tokens: Sequence[int]) -> None:
        """Takes in what follows a turn."""
        count = len(tokens)
        self.tokens += tokens
        self.chosen += [False] * count
        self.log_probs += [0.0] * count
        self.versions += [0] * count

    def routes_so_far(self) -> np.ndarray | None:
        """Returns the experts that tokens so far visited, -1 where that is not known."""
        if self.routes is None:
            return None
        unknown = len(self.prompt) + len(self.tokens) - len(self.routes)
        return np.pad(self.routes, ((0, unknown), (0, 0)), constant_values=-1)


def rollout(
    engine: Engine,
    weights: Weights,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptBatch,
    samples: Sequence[SamplingParams],
    key: jax.Array,
    world: World | None = None,
    max_turn_tokens: int = 0,
) -> tuple[Rollouts, Statistics]:
    """Returns `len(samples)` episodes of every prompt, prompt-major, and the work for all turns.

    An episode is one sequence, or several where its template rewrites the dialogue.

    Args:
      samples: How each sample of a prompt is drawn; `max_tokens` bounds all turns together.
      key: Sample i of prompt p uses `fold_in(key, p * len(samples) + i)`.
      world: What answers the policy; without it every episode has one turn.
      max_turn_tokens: Most tokens of one turn; 0: those of the whole response.
    """
    n = len(samples)
    count = len(prompts.prompts) * n
    keys = np.asarray(_fold_in_each(key, np.arange(count, dtype=np.uint32)))
    if world is not None:
        prompts = world.begin(prompts, n)
    play = _Play(engine, weights, samples, world, max_turn_tokens)
    with engine.session(prompts.longest):
        for p, prompt in enumerate(prompts.prompts):
            play.begin(prompt, p * n, keys[p * n : (p + 1) * n])
        play.to_the_end()
        done = engine.statistics
    logs = world.finish() if world is not None else []
    sequences = [sequence for episode in play.sequences for sequence in episode]
    return _as_rollouts(engine, tokenizer, prompts, n, sequences, logs), done


class _Play:
    """The turns of all episodes: while some wait for an answer, the others are sampled."""

    def __init__(
        self,
        engine: Engine,
        weights: Weights,
        samples: Sequence[SamplingParams],
        world: World | None,
        max_turn_tokens: int,
    ):
        self._engine, self._weights, self._world = engine, weights, world
        self._samples, self._max_turn_tokens = samples, max_turn_tokens
        self.sequences: list[list[_Sequence]] = []  # of each episode
        self._running: dict[tuple[int, int], tuple[_Sequence, Completion]] = {}
        self._num_answering = 0  # episodes that wait for their world

    def begin(self, prompt: Prompt, number: int, keys: np.ndarray) -> None:
        """Submits the first turns of a prompt's episodes, which read it once."""
        together = [
            _Sequence(number + i, prompt.tokens, params, key)
            for i, (params, key) in enumerate(zip(self._samples, keys, strict=True))
        ]
        self.sequences += [[sequence] for sequence in together]
        self._submit(together)

    def to_the_end(self) -> None:
        """Plays all episodes."""
        engine, world = self._engine, self._world
        while self._running or self._num_answering:
            if self._running:
                step = engine.step(self._weights.params, self._weights.version, ahead=world is None)
                for progress in step:
                    if progress.error is not None:
                        raise progress.error
                    if progress.finish_reason:
                        self._take(progress.request, progress.sample)
            if world is not None and self._num_answering:
                for number, following in world.answers(wait=not self._running):
                    self._num_answering -= 1
                    self._follow(self.sequences[number], following)

    def _take(self, request: int, index: int) -> None:
        sequence, sampled = self._running.pop((request, index))
        sequence.place = request, index
        sequence.take(sampled)
        world = self._world
        if world is not None and world.take(sequence.episode, sampled.tokens, sampled.stopped):
            self._num_answering += 1
        else:
            self._engine.forget(request, index)

    def _follow(self, episode: list[_Sequence], following: Following) -> None:
        assert self._world is not None
        last = episode[-1]
        fits = len(following.tokens) < self._room(last, following.rewrites)
        if not following.tokens or not fits:
            if following.tokens:
                self._world.end(last.episode)
            self._engine.forget(*last.place)
        elif following.rewrites:
            self._engine.forget(*last.place)
            params = dataclasses.replace(last.params, max_tokens=self._left(episode))
            episode.append(_Sequence(last.episode, following.tokens, params, last.key))
            self._submit(episode[-1:])
        else:
            last.append(following.tokens)
            self._submit([last])

    def _left(self, episode: Sequence[_Sequence]) -> int:
        """Returns the tokens by which the response of an episode may still grow."""
        limit = self._samples[episode[0].episode % len(self._samples)].max_tokens
        return limit - sum(len(sequence.tokens) for sequence in episode)

    def _room(self, last: _Sequence, rewrites: bool) -> int:
        """Returns how many tokens may follow, one sampled token included."""
        left = self._left(self.sequences[last.episode])
        # Of a dialogue that is read anew, only the policy's own words count as its response.
        return self._engine.max_tokens if rewrites and left > 0 else left

    def _submit(self, together: Sequence[_Sequence]) -> None:
        """Asks for the next turn of sequences with the same tokens so far."""
        first = together[0]
        begun = (*first.prompt, *first.tokens)
        room = self._engine.max_tokens - len(begun)

        def params_of(sequence: _Sequence) -> SamplingParams:
            most = min(room, self._left(self.sequences[sequence.episode]))
            if self._max_turn_tokens:
                most = min(most, self._max_turn_tokens)
            return dataclasses.replace(sequence.params, max_tokens=most)

        request = Request(
            begun,
            np.stack([sequence.key for sequence in together]),
            tuple(params_of(sequence) for sequence in together),
            first.routes_so_far(),
            keeps=self._world is not None,
            continues=first.place if first.tokens else None,
        )
        number = self._engine.submit(request)
        completions = self._engine.completions(number)
        for index, pair in enumerate(zip(together, completions, strict=True)):
            self._running[number, index] = pair


def _as_rollouts(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptBatch,
    n: int,
    sequences: Sequence[_Sequence],
    logs: Sequence[EpisodeLog],
) -> Rollouts:
    text = lambda s: str(tokenizer.decode(s.tokens, skip_special_tokens=True))  # noqa: E731
    starts = [len(s.prompt) for s in sequences]
    ends = [start + len(s.tokens) for start, s in zip(starts, sequences, strict=True)]
    shape = (len(sequences), bucket(max(ends), smallest=32, largest=engine.max_tokens))
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
