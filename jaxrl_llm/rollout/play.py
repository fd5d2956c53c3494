"""The turns of episodes: what is asked of the engine, and what becomes of its answers.

Episodes may begin at any time, and those that run may be paused: they go on by other weights, which
read them again.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from typing import Protocol

import numpy as np

from jaxrl_llm.models.sights import Sights
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.requests import Completion, Request, SamplingParams
from jaxrl_llm.types import EpisodeLog, Picture, Prompt, PromptBatch, Weights

# See(images, tokens): what images are to a sequence of so many tokens; None: it has none.
See = Callable[[Several[Picture], int], Sights | None]


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

    @property
    def images(self) -> tuple[Picture, ...]:
        """Those in the tokens, with their places there."""
        ...


class World(Protocol):
    """What answers the policy. Episodes are numbered prompt-major; all hosts get the same."""

    def begin(self, prompts: PromptBatch, num_samples: int, /) -> PromptBatch:
        """Begins so many episodes of each prompt; returns the prompts that they begin with."""
        ...

    def take(self, number: int, tokens: list[int], stopped: bool, /) -> bool:
        """Takes in a turn of an episode; returns whether `answers` will tell what follows."""
        ...

    def answers(self, wait: bool) -> Several[tuple[int, Following]]:
        """Returns (episode, what follows), as far as that is known; waits for one if asked to."""
        ...

    def end(self, number: int, /) -> None:
        """Ends an episode whose next turn does not fit."""
        ...

    def finish(self) -> list[EpisodeLog]:
        """Returns what happened in each episode, when all have ended."""
        ...


@dataclasses.dataclass
class Sequence:
    """One sequence so far; the lists are about the tokens after the prompt."""

    episode: int
    prompt: tuple[int, ...]
    params: SamplingParams
    key: np.ndarray
    images: tuple[Picture, ...] = ()  # of prompt and tokens
    tokens: list[int] = dataclasses.field(default_factory=list)
    chosen: list[bool] = dataclasses.field(default_factory=list)  # sampled, not appended
    log_probs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    stopped: bool = False
    routes: np.ndarray | None = None  # of prompt and tokens, see `Rollouts.routes`
    place: tuple[int, int] = (0, 0)  # its last turn: number of the request, index in that

    @property
    def begun(self) -> int:
        """How many of its last tokens are the beginning of a turn that was interrupted."""
        return len(list(itertools.takewhile(bool, reversed(self.chosen))))

    def anew(self) -> "Sequence":
        """Returns it without a token of the response."""
        return Sequence(self.episode, self.prompt, self.params, self.key, self.images)

    def take(self, sampled: Completion) -> None:
        """Takes in a turn, or a part of one."""
        self.tokens += sampled.tokens
        self.chosen += [True] * len(sampled.tokens)
        self.log_probs += sampled.log_probs
        self.versions += sampled.versions
        self.stopped = sampled.stopped
        if sampled.routes:
            self.routes = np.concatenate(sampled.routes)[: len(self.prompt) + len(self.tokens)]

    def append(self, tokens: Several[int], images: Several[Picture] = ()) -> None:
        """Takes in what follows a turn; images have their places in `tokens`."""
        count, begin = len(tokens), len(self.prompt) + len(self.tokens)
        self.images += tuple(dataclasses.replace(i, start=begin + i.start) for i in images)
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


class Play:
    """The turns of all episodes: while some wait for an answer, the others are sampled."""

    def __init__(
        self,
        engine: Engine,
        samples: Several[SamplingParams],
        world: World | None = None,
        max_turn_tokens: int = 0,
        see: See | None = None,
    ):
        """
        Args:
          samples: How each sample of a prompt is drawn; `max_tokens` bounds all turns together.
          world: What answers the policy; without it every episode has one turn.
          max_turn_tokens: Most tokens of one turn; 0: those of the whole response.
          see: What images are to sequences; needed for prompts with images.
        """
        self._engine, self._world, self._see = engine, world, see
        self._samples, self._max_turn_tokens = samples, max_turn_tokens
        self.sequences: dict[int, list[Sequence]] = {}  # of each episode
        self._running: dict[tuple[int, int], tuple[Sequence, Completion]] = {}
        self._paused: dict[int, Sequence] = {}  # by episode
        self._num_answering = 0  # episodes that wait for their world
        self._ended: list[int] = []  # episodes, since the last step

    @property
    def is_running(self) -> bool:
        """Whether an episode has not ended."""
        return bool(self._running or self._num_answering)

    def begin(self, prompt: Prompt, number: int, keys: np.ndarray) -> None:
        """Submits the first turns of a prompt's episodes, from `number` on; they read it once."""
        together = [
            Sequence(number + i, prompt.tokens, params, key, prompt.images)
            for i, (params, key) in enumerate(zip(self._samples, keys, strict=True))
        ]
        self.sequences |= {sequence.episode: [sequence] for sequence in together}
        self._submit(together)

    def step(self, weights: Weights, *, ahead: bool = False) -> list[int]:
        """Plays on for a chunk of the engine or an answer of the world; returns who ended.

        `ahead` as in `Engine.step`.
        """
        engine, world = self._engine, self._world
        if self._running:
            for progress in engine.step(weights.params, weights.version, ahead=ahead):
                if progress.error is not None:
                    raise progress.error
                if progress.finish_reason:
                    self._take(progress.request, progress.sample)
        if world is not None and self._num_answering:
            for number, following in world.answers(wait=not self._running):
                self._num_answering -= 1
                self._follow(self.sequences[number], following)
        ended, self._ended = self._ended, []
        return ended

    def to_the_end(self, weights: Weights) -> Iterator[int]:
        """Plays all episodes by the same weights; yields their numbers when they have ended."""
        while self.is_running:
            yield from self.step(weights, ahead=self._world is None)

    def pause(self) -> None:
        """Stops what is sampled, without losing a token, until `go_on`."""
        running, self._running = self._running, {}
        for request in dict.fromkeys(request for request, _ in running):
            self._engine.abort(request)
        for sequence, sampled in running.values():
            sequence.take(sampled)
            self._paused[sequence.episode] = sequence

    def go_on(self, *, anew: bool = False) -> None:
        """Goes on with what is paused, which the weights of the next step read again.

        `anew`: from the beginning.
        """
        paused, self._paused = self._paused, {}
        if anew:
            paused = {number: sequence.anew() for number, sequence in paused.items()}
            self.sequences |= {number: [sequence] for number, sequence in paused.items()}
        n = len(self._samples)
        in_order = [paused[number] for number in sorted(paused)]
        same = lambda each: (each.episode // n, each.tokens)  # noqa: E731
        for _, together in itertools.groupby(in_order, same):
            self._submit(list(together))

    def so_far(self) -> dict[int, tuple[Sequence, bool]]:
        """Returns a copy of each episode's sequence as far as it came, and whether it ended.

        Of episodes of one turn.
        """
        parts = {sequence.episode: sampled for sequence, sampled in self._running.values()}
        found = {}
        for number, (sequence,) in self.sequences.items():
            has_ended = number not in parts and number not in self._paused
            found[number] = copy.deepcopy(sequence), has_ended
            if number in parts:
                found[number][0].take(parts[number])
        return found

    def put(self, sequence: Sequence, has_ended: bool) -> None:
        """Takes in an episode of `so_far`, paused if it has not ended."""
        self.sequences[sequence.episode] = [sequence]
        if not has_ended:
            self._paused[sequence.episode] = sequence

    def _take(self, request: int, index: int) -> None:
        sequence, sampled = self._running.pop((request, index))
        sequence.place = request, index
        sequence.take(sampled)
        world = self._world
        if world is not None and world.take(sequence.episode, sampled.tokens, sampled.stopped):
            self._num_answering += 1
        else:
            self._engine.forget(request, index)
            self._ended.append(sequence.episode)

    def _follow(self, episode: list[Sequence], following: Following) -> None:
        assert self._world is not None
        last = episode[-1]
        fits = len(following.tokens) < self._room(last, following.rewrites)
        if not following.tokens or not fits:
            if following.tokens:
                self._world.end(last.episode)
            self._engine.forget(*last.place)
            self._ended.append(last.episode)
        elif following.rewrites:
            self._engine.forget(*last.place)
            params = dataclasses.replace(last.params, max_tokens=self._left(episode))
            whole = following.tokens, params, last.key, following.images
            episode.append(Sequence(last.episode, *whole))
            self._submit(episode[-1:])
        else:
            last.append(following.tokens, following.images)
            self._submit([last], continues=last.place)

    def _left(self, episode: Several[Sequence]) -> int:
        """Returns the tokens by which the response of an episode may still grow."""
        limit = self._samples[episode[0].episode % len(self._samples)].max_tokens
        return limit - sum(len(sequence.tokens) for sequence in episode)

    def _room(self, last: Sequence, rewrites: bool) -> int:
        """Returns how many tokens may follow, one sampled token included."""
        left = self._left(self.sequences[last.episode])
        # Of a dialogue that is read anew, only the policy's own words count as its response.
        return self._engine.max_tokens if rewrites and left > 0 else left

    def _submit(
        self, together: Several[Sequence], continues: tuple[int, int] | None = None
    ) -> None:
        """Asks for more of sequences with the same tokens so far."""
        first = together[0]
        so_far = (*first.prompt, *first.tokens)
        room = self._engine.max_tokens - len(so_far)

        def params_of(sequence: Sequence) -> SamplingParams:
            most = min(room, self._left(self.sequences[sequence.episode]))
            if self._max_turn_tokens:
                most = min(most, self._max_turn_tokens - sequence.begun)
            return dataclasses.replace(sequence.params, max_tokens=most)

        request = Request(
            so_far,
            np.stack([sequence.key for sequence in together]),
            tuple(params_of(sequence) for sequence in together),
            first.routes_so_far(),
            keeps=self._world is not None,
            continues=continues,
            begun=first.begun,
            sights=self._see(first.images, len(so_far)) if self._see else None,
        )
        number = self._engine.submit(request)
        completions = self._engine.completions(number)
        for index, pair in enumerate(zip(together, completions, strict=True)):
            self._running[number, index] = pair
