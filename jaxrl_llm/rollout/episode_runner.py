"""Multi-turn episodes: submits turns to the engine and feeds environment replies back.

Episodes may start at any time. Running episodes can be paused and resumed with other weights, which
recompute their KV cache.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from typing import Protocol

import numpy as np

from jaxrl_llm.models.image_inputs import ImageInputs
from jaxrl_llm.rollout.engine.grammars import Grammar
from jaxrl_llm.rollout.engine.requests import Completion, Request, SamplingParams
from jaxrl_llm.rollout.engine_api import SamplingEngine, WeightsReceiver
from jaxrl_llm.types import EpisodeLog, Prompt, PromptBatch, PromptImage, Weights

# Constrain(episode, tokens): the grammar of the turn that follows these tokens; None: any text.
Constrain = Callable[[int, Several[int]], Grammar | None]
# See(images, num_tokens): image inputs of a sequence; None for a sequence without images.
MakeImageInputs = Callable[[Several[PromptImage], int], ImageInputs | None]


class Reply(Protocol):
    """The reply to a turn of the policy."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens to append; none: the episode has ended."""
        ...

    @property
    def rewrites(self) -> bool:
        """Whether the tokens replace the whole dialogue, which starts a new sequence."""
        ...

    @property
    def images(self) -> tuple[PromptImage, ...]:
        """Images in the tokens, with their positions in them."""
        ...


class EpisodeEnvironment(Protocol):
    """Replies to the policy. Episodes are numbered prompt-major; all hosts get the same replies."""

    def begin(self, prompts: PromptBatch, num_samples: int, /) -> PromptBatch:
        """Starts `num_samples` episodes of each prompt; returns their initial prompts."""
        ...

    def submit_turn(self, number: int, tokens: list[int], stopped: bool, /) -> bool:
        """Submits a turn of an episode; returns whether `collect_replies` will return a reply."""
        ...

    def collect_replies(self, wait: bool) -> Several[tuple[int, Reply]]:
        """The replies that are ready, as (episode, reply); with `wait` blocks for at least one."""
        ...

    def end(self, number: int, /) -> None:
        """Ends an episode whose next turn does not fit."""
        ...

    def finish(self) -> list[EpisodeLog]:
        """The logs of all episodes, once all have ended."""
        ...


@dataclasses.dataclass
class EpisodeSequence:
    """A sequence in progress; the lists describe the tokens after the prompt."""

    episode: int
    prompt: tuple[int, ...]
    params: SamplingParams
    key: np.ndarray
    images: tuple[PromptImage, ...] = ()  # in prompt and tokens
    tokens: list[int] = dataclasses.field(default_factory=list)
    sampled: list[bool] = dataclasses.field(default_factory=list)  # sampled, not appended
    log_probs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    stopped: bool = False
    routes: np.ndarray | None = None  # of prompt and tokens, see `Rollouts.routed_experts`
    # [tokens, support_tokens], of `tokens`, see `Rollouts.support`
    support: np.ndarray | None = None
    last_turn: tuple[int, int] = (0, 0)  # its last turn: request number, index of the sample in it

    @property
    def num_partial(self) -> int:
        """Number of trailing tokens that belong to an interrupted turn."""
        return len(list(itertools.takewhile(bool, reversed(self.sampled))))

    def restarted(self) -> "EpisodeSequence":
        """A copy without any response token."""
        return EpisodeSequence(self.episode, self.prompt, self.params, self.key, self.images)

    def append_turn(self, sampled: Completion) -> None:
        """Appends a sampled turn or a part of one."""
        self.tokens += sampled.tokens
        self.sampled += [True] * len(sampled.tokens)
        self.log_probs += sampled.log_probs
        self.versions += sampled.versions
        self.stopped = sampled.is_stopped
        if sampled.routes:
            self.routes = np.concatenate(sampled.routes)[: len(self.prompt) + len(self.tokens)]
        if sampled.support:
            self._append_support(np.concatenate(sampled.support)[: len(sampled.tokens)])

    def append_reply(self, tokens: Several[int], images: Several[PromptImage] = ()) -> None:
        """Appends the reply to a turn; image positions are relative to `tokens`."""
        count, begin = len(tokens), len(self.prompt) + len(self.tokens)
        self.images += tuple(dataclasses.replace(i, start=begin + i.start) for i in images)
        self.tokens += tokens
        self.sampled += [False] * count
        self.log_probs += [0.0] * count
        self.versions += [0] * count
        if self.support is not None:
            self._append_support(np.full((count, self.support.shape[1]), -1, np.int32))

    def _append_support(self, support: np.ndarray) -> None:
        parts = [support] if self.support is None else [self.support, support]
        self.support = np.concatenate(parts)

    def routes_so_far(self) -> np.ndarray | None:
        """Expert routes of all tokens so far, -1 where unknown."""
        if self.routes is None:
            return None
        unknown = len(self.prompt) + len(self.tokens) - len(self.routes)
        return np.pad(self.routes, ((0, unknown), (0, 0)), constant_values=-1)


class EpisodeRunner:
    """Runs all episodes: while some wait for a reply, the others are sampled."""

    def __init__(
        self,
        engine: SamplingEngine,
        samples: Several[SamplingParams],
        world: EpisodeEnvironment | None = None,
        max_turn_tokens: int = 0,
        see: MakeImageInputs | None = None,
        constrain: Constrain | None = None,
    ):
        """
        Args:
          samples: Sampling parameters of each sample of a prompt; `max_tokens` bounds all turns
            together.
          world: Replies to the policy; without it every episode has one turn.
          max_turn_tokens: Maximum tokens of one turn; 0: the limit of the whole response.
          see: Makes the image inputs of sequences; needed for prompts with images.
          constrain: The grammar of each turn; without it turns are any text.
        """
        self._engine, self._world, self._see, self._constrain = engine, world, see, constrain
        self._receiver = engine if isinstance(engine, WeightsReceiver) else None
        self._received: int | None = None  # version of the weights that it has
        self._samples, self._max_turn_tokens = samples, max_turn_tokens
        self.sequences: dict[int, list[EpisodeSequence]] = {}  # by episode
        self._running: dict[tuple[int, int], tuple[EpisodeSequence, Completion]] = {}
        self._paused: dict[int, EpisodeSequence] = {}  # by episode
        self._num_answering = 0  # episodes waiting for a reply
        self._ended: list[int] = []  # episodes ended since the last step

    @property
    def is_running(self) -> bool:
        """Whether any episode is unfinished and not paused."""
        return bool(self._running or self._num_answering)

    def start(self, prompt: Prompt, number: int, keys: np.ndarray) -> None:
        """Submits the first turns of a prompt's episodes, from `number` on, with one prefill."""
        sequences = [
            EpisodeSequence(number + i, prompt.tokens, params, key, prompt.images)
            for i, (params, key) in enumerate(zip(self._samples, keys, strict=True))
        ]
        self.sequences |= {sequence.episode: [sequence] for sequence in sequences}
        self._submit(sequences)

    def step(self, weights: Weights, *, ahead: bool = False) -> list[int]:
        """Runs one engine chunk and handles replies; returns the episodes that ended.

        `ahead` as in `SamplingEngine.step`.
        """
        engine, world = self._engine, self._world
        if self._running:
            if self._receiver is not None and self._received != weights.version:
                self._receiver.receive_weights(weights.params, weights.version)
                self._received = weights.version
            for progress in engine.step(weights.params, weights.version, ahead=ahead):
                if progress.error is not None:
                    raise progress.error
                if progress.finish_reason:
                    self._finish_turn(progress.request, progress.sample)
        if world is not None and self._num_answering:
            for number, following in world.collect_replies(wait=not self._running):
                self._num_answering -= 1
                self._append_reply(self.sequences[number], following)
        ended, self._ended = self._ended, []
        return ended

    def run(self, weights: Weights) -> Iterator[int]:
        """Runs all episodes with the same weights; yields their numbers as they end."""
        while self.is_running:
            yield from self.step(weights, ahead=self._world is None)

    def pause(self) -> list[int]:
        """Interrupts all sampling of single-turn episodes without losing a token, until `resume`.

        Returns the episodes that ended with their last tokens.
        """
        running, self._running = self._running, {}
        for request in dict.fromkeys(request for request, _ in running):
            self._engine.abort(request)
        ended = []
        for sequence, sampled in running.values():
            sequence.append_turn(sampled)
            if sampled.finish_reason in ("stop", "length"):
                ended.append(sequence.episode)
            else:
                self._paused[sequence.episode] = sequence
        return ended

    def resume(self, *, restart: bool = False) -> None:
        """Resumes paused episodes; the weights of the next step recompute their KV cache.

        With `restart` responses restart from the beginning.
        """
        paused, self._paused = self._paused, {}
        if restart:
            paused = {number: sequence.restarted() for number, sequence in paused.items()}
            self.sequences |= {number: [sequence] for number, sequence in paused.items()}
        n = len(self._samples)
        in_order = [paused[number] for number in sorted(paused)]
        prompt_and_tokens = lambda each: (each.episode // n, each.tokens)  # noqa: E731
        for _, siblings in itertools.groupby(in_order, prompt_and_tokens):
            self._submit(list(siblings))

    def snapshot(self) -> dict[int, tuple[EpisodeSequence, bool]]:
        """A snapshot of all single-turn episodes: a copy of each sequence, and whether it ended."""
        parts = {sequence.episode: sampled for sequence, sampled in self._running.values()}
        snapshot = {}
        for number, (sequence,) in self.sequences.items():
            has_ended = number not in parts and number not in self._paused
            snapshot[number] = copy.deepcopy(sequence), has_ended
            if number in parts:
                snapshot[number][0].append_turn(parts[number])
        return snapshot

    def restore(self, sequence: EpisodeSequence, has_ended: bool) -> None:
        """Restores an episode of `snapshot`, paused if it has not ended."""
        self.sequences[sequence.episode] = [sequence]
        if not has_ended:
            self._paused[sequence.episode] = sequence

    def _finish_turn(self, request: int, index: int) -> None:
        sequence, sampled = self._running.pop((request, index))
        sequence.last_turn = request, index
        sequence.append_turn(sampled)
        world = self._world
        if world is not None and world.submit_turn(
            sequence.episode, sampled.tokens, sampled.is_stopped
        ):
            self._num_answering += 1
        else:
            self._engine.free(request, index)
            self._ended.append(sequence.episode)

    def _append_reply(self, episode: list[EpisodeSequence], following: Reply) -> None:
        assert self._world is not None
        last = episode[-1]
        fits = len(following.tokens) < self._reply_limit(last, following.rewrites)
        if not following.tokens or not fits:
            if following.tokens:
                self._world.end(last.episode)
            self._engine.free(*last.last_turn)
            self._ended.append(last.episode)
        elif following.rewrites:
            self._engine.free(*last.last_turn)
            params = dataclasses.replace(last.params, max_tokens=self._remaining_tokens(episode))
            episode.append(
                EpisodeSequence(last.episode, following.tokens, params, last.key, following.images)
            )
            self._submit(episode[-1:])
        else:
            last.append_reply(following.tokens, following.images)
            self._submit([last], continues=last.last_turn)

    def _remaining_tokens(self, episode: Several[EpisodeSequence]) -> int:
        """Number of tokens by which the response of an episode may still grow."""
        limit = self._samples[episode[0].episode % len(self._samples)].max_tokens
        return limit - sum(len(sequence.tokens) for sequence in episode)

    def _reply_limit(self, last: EpisodeSequence, rewrites: bool) -> int:
        """Maximum number of tokens that may follow, including one sampled token."""
        left = self._remaining_tokens(self.sequences[last.episode])
        # In a rewritten dialogue only the policy's own tokens count as its response.
        return self._engine.max_tokens if rewrites and left > 0 else left

    def _submit(
        self, sequences: Several[EpisodeSequence], continues: tuple[int, int] | None = None
    ) -> None:
        """Submits a request that continues sequences with equal tokens so far."""
        first = sequences[0]
        tokens = (*first.prompt, *first.tokens)
        before_turn = tokens[: len(tokens) - first.num_partial]
        room = self._engine.max_tokens - len(tokens)

        def params_of(sequence: EpisodeSequence) -> SamplingParams:
            limit = min(room, self._remaining_tokens(self.sequences[sequence.episode]))
            if self._max_turn_tokens:
                limit = min(limit, self._max_turn_tokens - sequence.num_partial)
            return dataclasses.replace(sequence.params, max_tokens=limit)

        request = Request(
            tokens,
            np.stack([sequence.key for sequence in sequences]),
            tuple(params_of(sequence) for sequence in sequences),
            first.routes_so_far(),
            retains_pages=self._world is not None,
            continues=continues,
            num_partial=first.num_partial,
            image_inputs=self._see(first.images, len(tokens)) if self._see else None,
            grammar=self._constrain(first.episode, before_turn) if self._constrain else None,
        )
        number = self._engine.submit(request)
        completions = self._engine.completions(number)
        for index, pair in enumerate(zip(sequences, completions, strict=True)):
            self._running[number, index] = pair
