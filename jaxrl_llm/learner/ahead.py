"""Samples ahead of their step: rollout and learning each at their own pace, as far as allowed.

    begin      prompts, while no sample can become too old       (pace: nothing is thrown away)
    play       a chunk of the engine, again and again            (while the learner is at work, too)
    buffer     the groups that ended
    take       the next step: who must not wait, then who ended first

A step is learned by version v, the number of completed steps. No token of it is of a version below
v - K, `config.trainer.max_staleness`. Prompts of the first n steps may begin when version n - K - 1
serves, so K = 0 samples what `SampledNow` does.
"""

import copy
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from jaxrl_llm.config import RLConfig
from jaxrl_llm.data.prompt_stream import PromptIterator
from jaxrl_llm.learner import in_flight, source
from jaxrl_llm.learner.in_flight import Group
from jaxrl_llm.learner.sampler import Sampler
from jaxrl_llm.learner.schedule import Schedule
from jaxrl_llm.learner.source import Begin, SampledNow, Samples, Score
from jaxrl_llm.metrics import off_policy
from jaxrl_llm.metrics.clock import Clock
from jaxrl_llm.rollout import episodes
from jaxrl_llm.rollout.play import Play
from jaxrl_llm.rollout.requests import Statistics
from jaxrl_llm.sharding import hosts
from jaxrl_llm.types import PromptBatch, Rollouts, Weights


class SampledAhead(SampledNow):
    """Gives samples that began earlier; its buffer and what is in flight are in the checkpoint."""

    def __init__(
        self,
        config: RLConfig,
        sampler: Sampler,
        prompts: PromptIterator,
        score: Score,
        schedule: Schedule,
        begin: Begin | None = None,
    ):
        super().__init__(config, sampler, prompts, score, begin)
        self._schedule = schedule
        # The evaluation has the other one: what is in flight stays there.
        self._engine = sampler.engine.another()
        self._play = Play(self._engine, self._samples)
        self._apart = sampler.is_apart
        self._serving: Weights | None = None  # what the engine samples by
        self._newest: Weights | None = None
        self._groups: dict[int, Group] = {}  # by number, in the order of their beginnings
        self._ended: list[int] = []  # groups of whom all samples have ended, in that order
        self._num_begun = 0  # prompts
        self._num_planned = 0  # those of them that are not in the place of others
        self._is_restored = False
        self._counted = Statistics()  # what the engine did for steps that were taken
        self._met: list[tuple[int, int, int]] = []  # the groups of this step
        self._watch = off_policy.Watch()

    @property
    def _max_staleness(self) -> int:
        return self._config.max_staleness

    def take(self, weights: Weights, key: jax.Array, clock: Clock) -> Samples:
        """Returns the samples of the next step; see `SampledNow.take`."""
        step = weights.version + 1
        self._newest, self._met = weights, []
        if self._schedule.begin(step, self._is_restored):
            self._go_on(weights)
        elif self._serving is None:
            self._serving = weights
            self._engine.reset()
        with self._watch.waiting(), clock("gen"):
            self._renew()
            self._fill()
        samples = super().take(weights, key, clock)
        self._schedule.meet(self._met)
        self._watch.took(samples.rollouts, weights.version, self._served.version)
        return samples

    def meanwhile(self, pending: Any) -> None:
        """Plays on by the weights that serve.

        On devices of its own until `pending` is ready; on the learner's for a chunk, which their
        devices begin when they have done what they were given before.
        """
        if not self._apart and self._play.is_running and self._is_usable:
            self._advance()
        while (
            self._apart
            and self._play.is_running
            and not self._schedule.happened(lambda: _is_ready(pending))
        ):
            self._advance()

    def metrics(self) -> Mapping[str, float]:
        """Returns `training/off_policy/...`, shares of idle time, and those of `SampledNow`."""
        counts = {"buffer": len(self._ended), "in_flight": len(self._groups) - len(self._ended)}
        numbers = {f"training/off_policy/{name}": float(n) for name, n in counts.items()}
        return {**super().metrics(), **self._watch.metrics(idle=self._apart), **numbers}

    def get_state(self) -> Mapping[str, Any]:
        """Returns all prompts that began and are not learned from, with their tokens so far."""
        self._schedule.end()
        so_far, n = self._play.so_far(), len(self._samples)

        def saved(number: int, group: Group) -> str:
            if group.text:
                return group.text
            own = [so_far[number * n + i] for i in range(n)]
            text = in_flight.as_text(number, group, own)
            group.text = "" if group.left else text
            return text

        return {
            "prompts": self._prompts.get_state(),
            "begun": self._num_begun,
            "planned": self._num_planned,
            "groups": [saved(number, group) for number, group in self._groups.items()],
            "ended": list(self._ended),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state that `get_state` returned: in flight is what was in flight."""
        self._prompts.set_state(state["prompts"])
        self._num_begun, self._num_planned = state["begun"], state["planned"]
        self._ended, self._groups, self._is_restored = list(state["ended"]), {}, True
        for text in state["groups"]:
            number, group, sequences = in_flight.from_text(text, self._samples)
            self._groups[number] = group
            for sequence, has_ended in sequences:
                self._play.put(sequence, has_ended)

    def _go_on(self, weights: Weights) -> None:
        """Begins a step in a new process, or as one that did: all is read again."""
        self._serving = weights
        if self._is_restored:
            self._engine.reset()
            self._is_restored = False
        else:
            self._play.pause()
        # The weights that were to finish them are gone.
        self._play.go_on(anew=self._config.trainer.new_weights == "drain")

    def _renew(self) -> None:
        """Lets the newest weights serve, unless what is in flight is to be finished before."""
        how, newest = self._config.trainer.new_weights, self._newest
        assert newest is not None
        if newest.version == self._served.version or (how == "drain" and self._play.is_running):
            return
        if how == "recompute":
            self._play.pause()
            self._play.go_on()
        self._serving = newest

    @property
    def _served(self) -> Weights:
        assert self._serving is not None, "take gives weights"
        return self._serving

    @property
    def _is_usable(self) -> bool:
        """Whether the memory of the weights that serve is not yet that of newer ones."""
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self._served.params))

    def _fill(self) -> None:
        """Begins as many prompts as may begin: none of their samples can become too old."""
        size, num_steps = self._config.trainer.prompts_per_step, self._schedule.num_steps
        most = min(self._served.version + self._max_staleness + 1, num_steps) * size
        while self._num_planned < most:
            step, position = divmod(self._num_planned, size)
            count = min(size - position, most - self._num_planned)
            self._begin(step + 1, 0, position, count)
            self._num_planned += count

    def _begin(self, step: int, wave: int, position: int, count: int) -> None:
        """Begins prompts, with the random keys that they have if step and wave sample them now."""
        n, size = len(self._samples), self._config.trainer.prompts_per_step
        key = jax.random.fold_in(source.step_keys(self._config.seed, step)[0], wave)
        keys = episodes.sample_keys(key, (count if wave else size) * n)
        prompts = self._prompts.batch(count).prompts
        if jax.process_count() > 1:
            hosts.agree("sampling", {"the prompts": prompts, "the random keys": keys})
        for place, prompt in enumerate(prompts, start=position):
            number, self._num_begun = self._num_begun, self._num_begun + 1
            self._groups[number] = Group(prompt, self._served.version, n)
            self._play.begin(prompt, number * n, keys[place * n : (place + 1) * n])

    def _advance(self, *, ahead: bool = False) -> None:
        """Plays on for a chunk."""
        with self._watch.playing():
            for episode in self._play.step(self._served, ahead=ahead):
                number = episode // len(self._samples)
                self._groups[number].left -= 1
                if not self._groups[number].left:
                    self._ended.append(number)
                    if self._begin_score is not None:
                        self._begin_score(self._of_prompt(number), 0)

    def _drawn(
        self, weights: Weights, num_prompts: int, wave: int, key: jax.Array, clock: Clock
    ) -> tuple[Rollouts, Statistics]:
        """Returns the samples of so many prompts; in later waves others begin in their place."""
        del key
        step, size = weights.version + 1, self._config.trainer.prompts_per_step
        with self._watch.waiting(), clock("gen"):
            if wave:
                self._begin(step, wave, 0, num_prompts)
            while True:
                last = {n: g.oldest + self._max_staleness for n, g in self._groups.items()}
                chosen = choice(last, self._ended, weights.version, size, num_prompts)
                if chosen is not None:
                    break
                assert self._play.is_running, "what may begin is enough for a step"
                # If this step takes all that is in flight, nothing can begin before it is done.
                self._advance(ahead=len(self._groups) == num_prompts)
                self._renew()
                self._fill()
            rollouts = self._taken(chosen)
            before, self._counted = self._counted, copy.copy(self._engine.statistics)
        return rollouts, self._counted - before

    def _of_prompt(self, number: int) -> Rollouts:
        n, tokenizer = len(self._samples), self._sampler.models.tokenizer
        own = [self._play.sequences[number * n + i][0] for i in range(n)]
        return episodes.of_prompt(self._engine, tokenizer, self._groups[number].prompt, own)

    def _taken(self, numbers: Sequence[int]) -> Rollouts:
        """Returns the samples of groups, which it forgets."""
        n, sequences, prompts = len(self._samples), [], []
        for place, number in enumerate(numbers):
            own = [self._play.sequences.pop(number * n + i)[0] for i in range(n)]
            versions = [version for sequence in own for version in sequence.versions]
            self._met.append((number, min(versions), max(versions)))
            sequences += [dataclasses.replace(s, episode=place * n + i) for i, s in enumerate(own)]
            prompts.append(self._groups.pop(number).prompt)
            self._ended.remove(number)
        batch = PromptBatch(tuple(prompts), self._prompts.longest)
        tokenizer, most = self._sampler.models.tokenizer, self._engine.max_tokens
        width = most
        if self._sampler.world is None:
            width = episodes.sequence_width(batch.longest, self._samples[0].max_tokens, most)
        return episodes.as_rollouts(self._engine, tokenizer, batch, n, sequences, width=width)


def choice(
    last: Mapping[int, int], ended: Collection[int], version: int, size: int, count: int
) -> list[int] | None:
    """Returns `count` groups for the step that version `version` learns from, None if not yet.

    Of those that `ended`, in this order, first the ones without which a later step would get more
    groups that must not wait than it takes; then the ones that ended first.

    Args:
      last: Of each group in flight or buffer, the last version that may learn from it.
      size: Groups of a step.

    >>> choice({0: 1, 1: 1, 2: 2}, ended=[2, 1], version=0, size=1, count=1)
    [1]
    >>> choice({0: 0, 1: 1}, ended=[1], version=0, size=1, count=1) is None
    True
    >>> choice({0: 0, 1: 1}, ended=[1, 0], version=0, size=1, count=1)
    [0]
    """
    chosen: list[int] = []
    for limit in sorted(set(last.values())):
        due = [number for number, latest in last.items() if latest <= limit]
        needed = len(due) - max(0, limit - version) * size - len(set(due) & set(chosen))
        ready = [number for number in ended if number in set(due) - set(chosen)]
        if needed > len(ready):
            return None
        chosen += ready[: max(0, needed)]
    chosen += [number for number in ended if number not in chosen][: count - len(chosen)]
    return sorted(chosen) if len(chosen) == count else None


def _is_ready(tree: Any) -> bool:
    arrays: list[Any] = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return all(array.is_ready() for array in arrays)
