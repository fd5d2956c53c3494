"""Seconds of the named phases of a step."""

import contextlib
import time
from collections.abc import Callable, Iterator


class Clock:
    """Measures phases: `with clock("gen"): ...` adds to `timing_s/gen`.

    Times are the host's: work that a phase only dispatches is counted where the host waits
    for it, so a phase that shall count its own device work ends by reading a result.

    >>> times = iter([0.0, 1.0, 3.5, 5.0])
    >>> clock = Clock(now=lambda: next(times))
    >>> with clock("gen"):
    ...     pass
    >>> clock.seconds()
    {'timing_s/gen': 2.5, 'timing_s/step': 5.0}
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        """Starts the step.

        Args:
          now: Returns seconds on a clock that never goes back.
        """
        self._now = now
        self._start = now()
        self._phases: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the time of the `with` block to `phase`, also when the block raises."""
        begin = self._now()
        try:
            yield
        finally:
            self._phases[phase] = self._phases.get(phase, 0.0) + self._now() - begin

    def seconds(self) -> dict[str, float]:
        """Returns `timing_s/PHASE` for every phase and `timing_s/step` since the start."""
        phases = {f"timing_s/{phase}": seconds for phase, seconds in self._phases.items()}
        return {**phases, "timing_s/step": self._now() - self._start}
