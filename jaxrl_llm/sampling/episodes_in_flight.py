"""Episodes of an asynchronous run between their start and the step that trains on them.

Episodes whose dialogue the run keeps, and those of black-box agents, differ in what a checkpoint
holds of them and in how the engine is stepped. `AsyncSource` uses both in the same way.
"""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from jaxrl_llm.rollout.engine.requests import SamplingParams
from jaxrl_llm.rollout.engine_api import SamplingEngine
from jaxrl_llm.rollout.episode_runner import EpisodeRunner, EpisodeSequence
from jaxrl_llm.rollout.session_host import SessionHost
from jaxrl_llm.rollout.session_runner import SessionRunner
from jaxrl_llm.sampling import async_checkpoint, session_checkpoint
from jaxrl_llm.sampling.async_checkpoint import PromptGroup
from jaxrl_llm.sampling.policy_sampler import PolicySampler
from jaxrl_llm.types import EpisodeLog, Prompt, Weights


class EpisodesInFlight(Protocol):
    """Episodes that run, are paused, or have ended and wait; numbered prompt-major."""

    @property
    def is_running(self) -> bool:
        """Whether any episode is unfinished and not paused."""
        ...

    @property
    def has_single_rows(self) -> bool:
        """Whether each episode is one sequence, so that a group can be scored before its step."""
        ...

    def start(self, prompt: Prompt, number: int, keys: np.ndarray) -> None:
        """Starts the episodes of a prompt, from `number` on; `keys` is [G, 2]."""
        ...

    def step(self, weights: Weights, *, ahead: bool, wait: bool) -> list[int]:
        """Runs one engine chunk; returns the episodes that ended.

        `ahead` as in `SamplingEngine.step`; `wait`: for an agent, if there is nothing to sample.
        """
        ...

    def pause(self) -> list[int]:
        """Interrupts all sampling until `resume`; returns the episodes that ended with it."""
        ...

    def resume(self, *, restart: bool = False) -> None:
        """Resumes paused episodes, or restarts them; the KV cache is recomputed."""
        ...

    def group_texts(self, groups: dict[int, PromptGroup]) -> list[str]:
        """Groups of a checkpoint, each as text; those of ended groups are kept in the groups."""
        ...

    def restore_group(self, text: str) -> tuple[int, PromptGroup]:
        """Restores the episodes of a group, paused where they had not ended; returns the group."""
        ...

    def sequence(self, episode: int) -> EpisodeSequence:
        """The first sequence of an episode."""
        ...

    def take(self, episode: int) -> tuple[list[EpisodeSequence], EpisodeLog | None]:
        """Removes an ended episode; returns its sequences, and its log if it had an agent."""
        ...


def make_episodes_in_flight(
    engine: SamplingEngine, samples: Sequence[SamplingParams], sampler: PolicySampler
) -> EpisodesInFlight:
    """The episodes of a sampler, none yet; `samples` are the parameters of those of a prompt."""
    if isinstance(host := sampler.world, SessionHost):
        wave = host.open_wave()
        return _Sessions(SessionRunner(engine, samples, wave, sampler.max_turn_tokens), samples)
    runner = EpisodeRunner(engine, samples, constrain=lambda *_: sampler.grammar)
    return _Dialogues(runner, samples)


def _group_texts(groups: dict[int, PromptGroup], to_text) -> list[str]:
    """The texts of groups; an ended group does not change, so its text is made once."""
    texts = []
    for number, group in groups.items():
        text = group.checkpoint_text or to_text(number, group)
        group.checkpoint_text = "" if group.num_unfinished else text
        texts.append(text)
    return texts


_Runner = TypeVar("_Runner", EpisodeRunner, SessionRunner)


class _Episodes(Generic[_Runner]):
    """Starts, pauses and resumes episodes through their runner; base of both kinds below."""

    def __init__(self, runner: _Runner, samples: Sequence[SamplingParams]):
        self._runner: _Runner = runner
        self._samples = samples
        self.start, self.pause, self.resume = runner.start, runner.pause, runner.resume

    @property
    def is_running(self) -> bool:
        return self._runner.is_running

    def sequence(self, episode: int) -> EpisodeSequence:
        return self._runner.sequences[episode][0]


class _Dialogues(_Episodes[EpisodeRunner]):
    """Single-turn episodes."""

    has_single_rows = True

    def step(self, weights: Weights, *, ahead: bool, wait: bool) -> list[int]:
        del wait
        return self._runner.step(weights, ahead=ahead)

    def group_texts(self, groups: dict[int, PromptGroup]) -> list[str]:
        snapshot, n = self._runner.snapshot(), len(self._samples)

        def to_text(number: int, group: PromptGroup) -> str:
            sequences = [snapshot[number * n + i] for i in range(n)]
            return async_checkpoint.to_text(number, group, sequences)

        return _group_texts(groups, to_text)

    def restore_group(self, text: str) -> tuple[int, PromptGroup]:
        number, group, sequences = async_checkpoint.from_text(text, self._samples)
        for sequence, has_ended in sequences:
            self._runner.restore(sequence, has_ended)
        return number, group

    def take(self, episode: int) -> tuple[list[EpisodeSequence], EpisodeLog | None]:
        return self._runner.sequences.pop(episode), None


class _Sessions(_Episodes[SessionRunner]):
    """Episodes of black-box agents; an episode may have several sequences."""

    has_single_rows = False

    def step(self, weights: Weights, *, ahead: bool, wait: bool) -> list[int]:
        del ahead
        return self._runner.step(weights, wait=wait)

    def group_texts(self, groups: dict[int, PromptGroup]) -> list[str]:
        n = len(self._samples)

        def to_text(number: int, group: PromptGroup) -> str:
            snapshots = [self._runner.snapshot(number * n + i) for i in range(n)]
            return session_checkpoint.to_text(number, group, snapshots)

        return _group_texts(groups, to_text)

    def restore_group(self, text: str) -> tuple[int, PromptGroup]:
        number, group, snapshots = session_checkpoint.from_text(text, self._samples)
        for i, snapshot in enumerate(snapshots):
            self._runner.restore(number * len(self._samples) + i, group.prompt, snapshot)
        return number, group

    def take(self, episode: int) -> tuple[list[EpisodeSequence], EpisodeLog | None]:
        return self._runner.take(episode)
