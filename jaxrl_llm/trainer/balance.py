"""How many devices sample and how many learn, by how long each waited for the other."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jaxrl_llm.config import RLConfig
from jaxrl_llm.sharding import hosts

_IDLE = ("perf/idle_share/learner", "perf/idle_share/rollout")
_WORTH = 0.9  # of a step's time: what a change must save, as its programs are compiled


class Balance:
    """Watches idle times; process 0's count for all processes."""

    def __init__(self, config: RLConfig):
        self._every = config.placement.balance_every
        self._seen: list[tuple[float, float]] = []

    def see(self, numbers: Mapping[str, Any]) -> None:
        """Takes in the numbers of a step; those without idle times do not count."""
        if self._every and all(name in numbers for name in _IDLE):
            learner, rollout = (float(numbers[name]) for name in _IDLE)
            self._seen.append((learner, rollout))

    @property
    def is_due(self) -> bool:
        """Whether enough steps were seen since `layouts` was asked."""
        return 0 < self._every <= len(self._seen)

    def layouts(self, config: RLConfig) -> Iterator[str]:
        """Yields better layouts than that of `config`, the best first; not all need be possible."""
        means = [sum(shares) / len(self._seen) for shares in zip(*self._seen, strict=True)]
        self._seen = []
        learner_idle, rollout_idle = hosts.told_by_first(means)
        names = list(config.placement.pools)
        of_rollout = config.placement.roles["rollout"]
        (of_learner,) = (name for name in names if name != of_rollout)
        count, unit = jax.device_count(), jax.process_count()
        sizes = {name: pool.devices for name, pool in config.placement.pools.items()}
        sizes = {n: count - sum(sizes.values()) - 1 if d == -1 else d for n, d in sizes.items()}
        found = better(learner_idle, rollout_idle, sizes[of_learner], sizes[of_rollout], unit)
        for learners, samplers in found:
            parts = {of_learner: learners, of_rollout: samplers}
            yield " ".join(f"placement.pools.{name}.devices={parts[name]}" for name in names)


def better(
    learner_idle: float, rollout_idle: float, learners: int, samplers: int, unit: int
) -> list[tuple[int, int]]:
    """Returns splits (learners, samplers) with which a step is shorter, the shortest first.

    Work is taken to be shared out evenly: twice the devices do it in half the time. `unit` is what
    devices move by.

    >>> better(0.6, 0.0, 4, 4, 1)  # the learner waits: rollout gets two of its devices
    [(2, 6), (3, 5)]
    >>> better(0.0, 0.05, 4, 4, 1)
    []
    """
    work = (1.0 - learner_idle) * learners, (1.0 - rollout_idle) * samplers
    total = learners + samplers
    splits = [(total - n, n) for n in range(unit, total, unit)]
    seconds = {split: max(w / n for w, n in zip(work, split, strict=True)) for split in splits}
    worth = [split for split in splits if seconds[split] < _WORTH]
    return sorted(worth, key=lambda split: (seconds[split], split))
