"""Staleness of the samples of an asynchronous step, and idle times of rollout and learner."""

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np

from jaxrl_llm.types import Rollouts


def staleness_metrics(rollouts: Rollouts, version: int) -> dict[str, float]:
    """Off-policy metrics of the samples that update the weights of version `version`.

    `staleness/mean` and `max` are over tokens: `version` minus the version that sampled each.
    `spans/mean` and `max` are over sequences: the number of versions that sampled each;
    `partial_ratio` is the share of sequences sampled by more than one.
    """
    mask = rollouts.response_mask
    ages = (version - rollouts.versions)[mask]
    sequences = zip(rollouts.versions, mask, strict=True)
    spans = np.array([len(np.unique(versions[sampled])) for versions, sampled in sequences])
    metrics = {
        "staleness/mean": ages.mean() if ages.size else 0.0,
        "staleness/max": ages.max(initial=0),
        "spans/mean": spans.mean(),
        "spans/max": spans.max(),
        "partial_ratio": (spans > 1).mean(),
    }
    return {f"training/off_policy/{name}": float(value) for name, value in metrics.items()}


class StalenessMeter:
    """Measures how long the engine generates, and how long the learner waits for samples."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now, self._step_start_s = now, now()
        self._generating_s = self._waiting_s = 0.0
        self._numbers: dict[str, float] = {}

    @contextlib.contextmanager
    def time_generation(self) -> Iterator[None]:
        """Counts the time of the block as generation by the engine."""
        start_s = self._now()
        yield
        self._generating_s += self._now() - start_s

    @contextlib.contextmanager
    def time_wait(self) -> Iterator[None]:
        """Counts the time of the block as the learner waiting for samples."""
        start_s = self._now()
        yield
        self._waiting_s += self._now() - start_s

    def record_samples(self, rollouts: Rollouts, version: int, served: int) -> None:
        """Records the samples that `version` learns from, while version `served` samples."""
        self._numbers = staleness_metrics(rollouts, version)
        self._numbers["training/off_policy/weights_age"] = float(version - served)

    def metrics(self, idle: bool) -> dict[str, float]:
        """The metrics of the step, which ends here; with `idle`, also its idle shares."""
        now = self._now()
        seconds = max(now - self._step_start_s, 1e-9)
        shares = {
            "perf/idle_share/rollout": 1.0 - self._generating_s / seconds,
            "perf/idle_share/learner": self._waiting_s / seconds,
        }
        self._step_start_s, self._generating_s, self._waiting_s = now, 0.0, 0.0
        return {**self._numbers, **(shares if idle else {})}
