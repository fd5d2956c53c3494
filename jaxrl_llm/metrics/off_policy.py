"""How old the samples of an asynchronous step are, and who waited for whom."""

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np

from jaxrl_llm.types import Rollouts


def of_samples(rollouts: Rollouts, version: int) -> dict[str, float]:
    """Returns numbers of the samples that version `version` of the weights learns from.

    `staleness/mean` and `max` are over tokens: versions since the weights that drew them.
    `spans/mean` and `max` are over samples: how many versions drew each; `partial_ratio` is the
    share of them that more than one drew.
    """
    mask = rollouts.response_mask
    ages = (version - rollouts.versions)[mask]
    rows = zip(rollouts.versions, mask, strict=True)
    spans = np.array([len(np.unique(versions[of_row])) for versions, of_row in rows])
    found = {
        "staleness/mean": ages.mean() if ages.size else 0.0,
        "staleness/max": ages.max(initial=0),
        "spans/mean": spans.mean(),
        "spans/max": spans.max(),
        "partial_ratio": (spans > 1).mean(),
    }
    return {f"training/off_policy/{name}": float(value) for name, value in found.items()}


class Watch:
    """Measures the time in which the engine plays, and that in which the learner waits for it."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now, self._since = now, now()
        self._playing_s = self._waiting_s = 0.0
        self._numbers: dict[str, float] = {}

    @contextlib.contextmanager
    def playing(self) -> Iterator[None]:
        """The engine is at work."""
        began = self._now()
        yield
        self._playing_s += self._now() - began

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The learner has no samples."""
        began = self._now()
        yield
        self._waiting_s += self._now() - began

    def took(self, rollouts: Rollouts, version: int, served: int) -> None:
        """Takes in the samples of a step that `version` learns from, while `served` samples."""
        self._numbers = of_samples(rollouts, version)
        self._numbers["training/off_policy/weights_age"] = float(version - served)

    def metrics(self, idle: bool) -> dict[str, float]:
        """Returns the numbers of the step, with `idle` shares of its time; a step ends here."""
        now = self._now()
        seconds = max(now - self._since, 1e-9)
        shares = {
            "perf/idle_share/rollout": 1.0 - self._playing_s / seconds,
            "perf/idle_share/learner": self._waiting_s / seconds,
        }
        self._since, self._playing_s, self._waiting_s = now, 0.0, 0.0
        return {**self._numbers, **(shares if idle else {})}
