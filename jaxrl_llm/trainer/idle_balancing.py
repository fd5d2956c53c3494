"""Rebalances the devices that sample and that learn, by how long each waited for the other."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jaxrl_llm.config import RLConfig
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.sharding import multihost

_IDLE_METRICS = ("perf/idle_share/learner", "perf/idle_share/rollout")
_MAX_RELATIVE_TIME = (
    0.9  # predicted share of a step's time above which a change does not pay for compiling
)


class IdleTimeBalancer:
    """Collects idle times and proposes splits; process 0's numbers decide for all processes."""

    def __init__(self, config: RLConfig):
        self._interval = config.placement.balance_every
        self._idle_shares: list[tuple[float, float]] = []

    def observe(self, numbers: Mapping[str, Any]) -> None:
        """Records the metrics of a step; steps without idle times do not count."""
        if self._interval and all(name in numbers for name in _IDLE_METRICS):
            learner, rollout = (float(numbers[name]) for name in _IDLE_METRICS)
            self._idle_shares.append((learner, rollout))

    @property
    def is_due(self) -> bool:
        """Whether enough steps were recorded since the last call of `candidate_layouts`."""
        return 0 < self._interval <= len(self._idle_shares)

    def candidate_layouts(self, config: RLConfig) -> Iterator[str]:
        """Yields layouts predicted faster than that of `config`, best first; some may not fit."""
        means = [
            sum(shares) / len(self._idle_shares) for shares in zip(*self._idle_shares, strict=True)
        ]
        self._idle_shares = []
        learner_idle, rollout_idle = multihost.broadcast_from_host0(means)
        names = list(config.placement.pools)
        rollout_pool = config.placement.roles["rollout"]
        (learner_pool,) = (name for name in names if name != rollout_pool)
        count, num_processes = len(mesh_lib.run_devices()), jax.process_count()
        sizes = {name: pool.devices for name, pool in config.placement.pools.items()}
        sizes = {n: count - sum(sizes.values()) - 1 if d == -1 else d for n, d in sizes.items()}
        splits = faster_splits(
            learner_idle, rollout_idle, sizes[learner_pool], sizes[rollout_pool], num_processes
        )
        for learners, samplers in splits:
            sizes_by_pool = {learner_pool: learners, rollout_pool: samplers}
            yield " ".join(
                f"placement.pools.{name}.devices={sizes_by_pool[name]}" for name in names
            )


def faster_splits(
    learner_idle: float, rollout_idle: float, learners: int, samplers: int, unit: int
) -> list[tuple[int, int]]:
    """Splits (learners, samplers) that shorten a step, the shortest step first.

    Assumes linear scaling: twice the devices take half the time. Devices move in multiples of
    `unit`.

    >>> faster_splits(0.6, 0.0, 4, 4, 1)  # the learner waits: rollout gets two of its devices
    [(2, 6), (3, 5)]
    >>> faster_splits(0.0, 0.05, 4, 4, 1)
    []
    """
    work = (1.0 - learner_idle) * learners, (1.0 - rollout_idle) * samplers
    total = learners + samplers
    splits = [(total - n, n) for n in range(unit, total, unit)]
    seconds = {split: max(w / n for w, n in zip(work, split, strict=True)) for split in splits}
    faster = [split for split in splits if seconds[split] < _MAX_RELATIVE_TIME]
    return sorted(faster, key=lambda split: (seconds[split], split))
