"""Asynchronous rollouts: sampling runs ahead of learning, within the staleness bound.

    begin      start prompts while no sample can exceed the bound   (so nothing is thrown away)
    play       run the engine chunk by chunk                        (also during the update)
    buffer     keep finished groups
    take       form the next step: groups about to expire, then in order of completion

The learner's version v is the number of completed steps. No token of its batch is from a version
below v - K, K = `config.trainer.max_staleness`. Prompts of the first n steps may start once version
n - K - 1 is the engine's, so K = 0 samples exactly what `SyncSource` does.
"""

import copy
import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from jaxrl_llm.config import RLConfig
from jaxrl_llm.data.prompt_stream import PromptIterator
from jaxrl_llm.metrics import staleness
from jaxrl_llm.metrics.timers import Clock
from jaxrl_llm.rollout import episodes
from jaxrl_llm.rollout.engine.requests import EngineStatistics
from jaxrl_llm.sampling import source
from jaxrl_llm.sampling.async_checkpoint import PromptGroup
from jaxrl_llm.sampling.async_schedule import AsyncSchedule
from jaxrl_llm.sampling.episodes_in_flight import make_episodes_in_flight
from jaxrl_llm.sampling.policy_sampler import PolicySampler
from jaxrl_llm.sampling.source import BeginScoring, ScoredRollouts, ScoreRollouts, SyncSource
from jaxrl_llm.sharding import multihost
from jaxrl_llm.types import EpisodeLog, PromptBatch, Rollouts, Weights


class AsyncSource(SyncSource):
    """Rollout source that samples ahead; buffer and requests in flight are checkpointed."""

    def __init__(
        self,
        config: RLConfig,
        sampler: PolicySampler,
        prompts: PromptIterator,
        score: ScoreRollouts,
        schedule: AsyncSchedule,
        begin_scoring: BeginScoring | None = None,
    ):
        super().__init__(config, sampler, prompts, score, begin_scoring)
        self._schedule = schedule
        # Evaluation uses the sampler's engine; this one keeps its requests in flight meanwhile.
        self._engine = sampler.engine.clone()
        self._in_flight = make_episodes_in_flight(self._engine, self._sampling_params, sampler)
        if not self._in_flight.has_single_rows:
            self._begin_scoring = None
        self._on_own_devices = sampler.has_own_devices
        self._engine_weights: Weights | None = None  # the weights of the engine
        self._newest_weights: Weights | None = None
        self._groups: dict[int, PromptGroup] = {}  # by number, in the order of their start
        # Groups whose samples have all ended, in order of completion.
        self._finished: list[int] = []
        self._num_started = 0  # prompts
        self._num_planned = 0  # of them, without replacements of dropped groups
        self._restored = False
        self._statistics = EngineStatistics()  # engine statistics up to the last batch
        # Groups of this step: number, oldest and newest weight version.
        self._step_groups: list[tuple[int, int, int]] = []
        self._staleness = staleness.StalenessMeter()

    @property
    def _max_staleness(self) -> int:
        return self._config.max_staleness

    def next_batch(self, weights: Weights, key: jax.Array, clock: Clock) -> ScoredRollouts:
        """Scored rollouts for the next step; see `SyncSource.next_batch`."""
        step = weights.version + 1
        self._newest_weights, self._step_groups = weights, []
        if self._schedule.begin_step(step, self._restored):
            self._resume(weights)
        elif self._engine_weights is None:
            self._engine_weights = weights
            self._engine.reset()
        with self._staleness.time_wait(), clock("gen"):
            self._refresh_weights()
            self._start_allowed_prompts()
        samples = super().next_batch(weights, key, clock)
        self._schedule.record_groups(self._step_groups)
        self._staleness.record_samples(
            samples.rollouts, weights.version, self._current_weights.version
        )
        return samples

    def on_wait(self, pending: Any) -> None:
        """Keeps sampling with the current engine weights.

        On devices of its own until `pending` is ready; on shared devices for one chunk, queued
        behind the work that the learner has already dispatched to them.
        """
        if not self._on_own_devices and self._in_flight.is_running and self._weights_alive:
            self._decode_chunk(wait=False)
        while (
            self._on_own_devices
            and self._in_flight.is_running
            and not self._schedule.decide(lambda: _all_ready(pending))
        ):
            self._decode_chunk(wait=False)

    def metrics(self) -> Mapping[str, float]:
        """Metrics `training/off_policy/...`, idle time shares, and those of `SyncSource`."""
        counts = {
            "buffer": len(self._finished),
            "in_flight": len(self._groups) - len(self._finished),
        }
        numbers = {f"training/off_policy/{name}": float(n) for name, n in counts.items()}
        return {
            **super().metrics(),
            **self._staleness.metrics(idle=self._on_own_devices),
            **numbers,
        }

    def get_state(self) -> Mapping[str, Any]:
        """All prompts that were started and not trained on yet, with their tokens so far."""
        self._schedule.end_step()
        return {
            "prompts": self._prompts.get_state(),
            "begun": self._num_started,
            "planned": self._num_planned,
            "groups": self._in_flight.group_texts(self._groups),
            "ended": list(self._finished),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that `get_state` returned, its requests in flight again."""
        self._prompts.set_state(state["prompts"])
        self._num_started, self._num_planned = state["begun"], state["planned"]
        self._finished, self._groups, self._restored = list(state["ended"]), {}, True
        for text in state["groups"]:
            number, group = self._in_flight.restore_group(text)
            self._groups[number] = group

    def _resume(self, weights: Weights) -> None:
        """Resumes requests in flight in a new process, or replays such a start: recompute all."""
        self._engine_weights = weights
        if self._restored:
            self._engine.reset()
            self._restored = False
        else:
            self._record_ended(self._in_flight.pause())
        # With "drain" the older weights that should have finished them no longer exist.
        self._in_flight.resume(restart=self._config.trainer.new_weights == "drain")

    def _refresh_weights(self) -> None:
        """Switches the engine to the newest weights, unless requests must be drained first."""
        mode, newest = self._config.trainer.new_weights, self._newest_weights
        assert newest is not None
        if newest.version == self._current_weights.version or (
            mode == "drain" and self._in_flight.is_running
        ):
            return
        if mode == "recompute":
            self._record_ended(self._in_flight.pause())
            self._in_flight.resume()
        self._engine_weights = newest

    @property
    def _current_weights(self) -> Weights:
        assert self._engine_weights is not None, "take gives weights"
        return self._engine_weights

    @property
    def _weights_alive(self) -> bool:
        """Whether the engine's weights are still in memory, not donated to newer ones."""
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self._current_weights.params))

    def _start_allowed_prompts(self) -> None:
        """Starts as many prompts as the staleness bound allows."""
        size, num_steps = self._config.trainer.prompts_per_step, self._schedule.num_steps
        max_planned = min(self._current_weights.version + self._max_staleness + 1, num_steps) * size
        while self._num_planned < max_planned:
            step, position = divmod(self._num_planned, size)
            count = min(size - position, max_planned - self._num_planned)
            self._start_prompts(step + 1, 0, position, count)
            self._num_planned += count

    def _start_prompts(self, step: int, wave: int, position: int, count: int) -> None:
        """Starts prompts with the same random keys that synchronous sampling would use."""
        n, size = len(self._sampling_params), self._config.trainer.prompts_per_step
        key = jax.random.fold_in(source.step_keys(self._config.seed, step)[0], wave)
        keys = episodes.sample_keys(key, (count if wave else size) * n)
        prompts = self._prompts.next_batch(count).prompts
        if jax.process_count() > 1:
            multihost.assert_equal("sampling", {"the prompts": prompts, "the random keys": keys})
        for place, prompt in enumerate(prompts, start=position):
            number, self._num_started = self._num_started, self._num_started + 1
            self._groups[number] = PromptGroup(prompt, self._current_weights.version, n)
            self._in_flight.start(prompt, number * n, keys[place * n : (place + 1) * n])

    def _decode_chunk(self, *, ahead: bool = False, wait: bool = True) -> None:
        """Decodes one chunk; `wait`: for an agent, if there is nothing to sample."""
        with self._staleness.time_generation():
            ended = self._in_flight.step(self._current_weights, ahead=ahead, wait=wait)
            self._record_ended(ended)

    def _record_ended(self, episodes_ended: Sequence[int]) -> None:
        """Counts samples that ended; starts scoring the groups that they complete."""
        for episode in episodes_ended:
            number = episode // len(self._sampling_params)
            self._groups[number].num_unfinished -= 1
            if not self._groups[number].num_unfinished:
                self._finished.append(number)
                if self._begin_scoring is not None:
                    self._begin_scoring(self._group_rollouts(number), 0)

    def _sample_wave(
        self, weights: Weights, num_prompts: int, wave: int, key: jax.Array, clock: Clock
    ) -> tuple[Rollouts, EngineStatistics]:
        """Waits for finished groups for a step; later waves start replacements of dropped ones."""
        del key
        step, size = weights.version + 1, self._config.trainer.prompts_per_step
        with self._staleness.time_wait(), clock("gen"):
            if wave:
                self._start_prompts(step, wave, 0, num_prompts)
            while True:
                last_versions = {
                    n: g.oldest_version + self._max_staleness for n, g in self._groups.items()
                }
                chosen = select_groups(
                    last_versions, self._finished, weights.version, size, num_prompts
                )
                if chosen is not None:
                    break
                assert self._in_flight.is_running, "what may begin is enough for a step"
                # If this step takes all groups in flight, no other can start before it is done.
                self._decode_chunk(ahead=len(self._groups) == num_prompts)
                self._refresh_weights()
                self._start_allowed_prompts()
            rollouts = self._take_groups(chosen)
            previous, self._statistics = (
                self._statistics,
                copy.copy(self._engine.statistics),
            )
        return rollouts, self._statistics - previous

    def _group_rollouts(self, number: int) -> Rollouts:
        n, tokenizer = len(self._sampling_params), self._sampler.models.tokenizer
        sequences = [self._in_flight.sequence(number * n + i) for i in range(n)]
        return episodes.prompt_rollouts(
            self._engine, tokenizer, self._groups[number].prompt, sequences
        )

    def _take_groups(self, numbers: Sequence[int]) -> Rollouts:
        """Removes finished groups from the buffer and returns their rollouts."""
        n, sequences, prompts = len(self._sampling_params), [], []
        logs: list[EpisodeLog] = []
        for place, number in enumerate(numbers):
            group = self._groups.pop(number)
            versions = [group.oldest_version]
            for i in range(n):
                episode_sequences, log = self._in_flight.take(number * n + i)
                logs += [log] if log is not None else []
                for s in episode_sequences:
                    sequences.append(dataclasses.replace(s, episode=place * n + i))
                    versions += itertools.compress(s.versions, s.sampled)
            sampled_versions = versions[1:] or versions  # no agent may have sampled a token
            self._step_groups.append((number, min(sampled_versions), max(sampled_versions)))
            prompts.append(group.prompt)
            self._finished.remove(number)
        batch = PromptBatch(tuple(prompts), self._prompts.max_prompt_tokens)
        tokenizer, max_tokens = self._sampler.models.tokenizer, self._engine.max_tokens
        width = max_tokens
        if self._sampler.world is None:
            width = episodes.sequence_width(
                batch.max_prompt_tokens, self._sampling_params[0].max_tokens, max_tokens
            )
        return episodes.to_rollouts(self._engine, tokenizer, batch, n, sequences, logs, width=width)


def select_groups(
    last_versions: Mapping[int, int], finished: Collection[int], version: int, size: int, count: int
) -> list[int] | None:
    """Selects `count` finished groups for the step of learner version `version`, None if too few.

    First the groups that must go now so that no later step gets more expiring groups than it can
    take, then the others, each in the order of `finished`.

    Args:
      last_versions: For each group in flight or buffer, the last version that may train on it.
      size: Groups of a step.

    >>> select_groups({0: 1, 1: 1, 2: 2}, finished=[2, 1], version=0, size=1, count=1)
    [1]
    >>> select_groups({0: 0, 1: 1}, finished=[1], version=0, size=1, count=1) is None
    True
    >>> select_groups({0: 0, 1: 1}, finished=[1, 0], version=0, size=1, count=1)
    [0]
    """
    chosen: list[int] = []
    for limit in sorted(set(last_versions.values())):
        expiring = [number for number, latest in last_versions.items() if latest <= limit]
        num_needed = (
            len(expiring) - max(0, limit - version) * size - len(set(expiring) & set(chosen))
        )
        ready = [number for number in finished if number in set(expiring) - set(chosen)]
        if num_needed > len(ready):
            return None
        chosen += ready[: max(0, num_needed)]
    chosen += [number for number in finished if number not in chosen][: count - len(chosen)]
    return sorted(chosen) if len(chosen) == count else None


def _all_ready(tree: Any) -> bool:
    arrays: list[Any] = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return all(array.is_ready() for array in arrays)
