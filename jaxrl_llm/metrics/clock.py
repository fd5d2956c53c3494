"""Seconds of the phases of a step, and a profile of some steps."""

import collections
import concurrent.futures
import contextlib
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from absl import logging

from jaxrl_llm.config import ProfilerConfig

Tree = TypeVar("Tree")


class Clock:
    """Measures phases: `with clock("gen"): ...` adds to `timing_s/gen`.

    Times are the host's. A phase that only hands work to the devices watches its results:

        with clock("ref") as watch:
            log_probs = watch(of_reference(tokens))

    Its time then ends when they are ready; until then they must not be donated. It begins with the
    `with`, or when the phase watched before it on the same devices ended, whichever is later.
    Threads wait for the results, not the loop. Phases on different devices may overlap: their sum
    may be more than the step.

    >>> times = iter([0.0, 1.0, 3.5, 5.0])
    >>> clock = Clock(now=lambda: next(times))
    >>> with clock("gen"):
    ...     pass
    >>> clock.seconds()
    {'timing_s/gen': 2.5, 'timing_s/step': 5.0}
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now, self._start = now, now()
        self._phases: dict[str, float] = collections.defaultdict(float)
        # A thread for each set of devices: none waits for the results of others.
        self._waiters: dict[frozenset[Any], concurrent.futures.Executor] = collections.defaultdict(
            lambda: concurrent.futures.ThreadPoolExecutor(max_workers=1)
        )
        self._waits: list[concurrent.futures.Future[None]] = []
        self._lock = threading.Lock()
        self._last_ready: dict[Any, float] = {}  # by device

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[Callable[[Tree], Tree]]:
        """Adds the time of the `with` block to `phase`, also when it raises; yields `watch`."""
        begin = self._now()
        watched: list[Any] = []

        def watch(tree: Tree) -> Tree:
            watched.append(tree)
            return tree

        try:
            with jax.profiler.TraceAnnotation(phase):
                yield watch
        finally:
            if watched:
                devices = _devices(watched)
                waiter = self._waiters[devices]
                self._waits.append(waiter.submit(self._wait, phase, begin, watched, devices))
            else:
                with self._lock:
                    self._phases[phase] += self._now() - begin

    def _wait(self, phase: str, begin: float, watched: list[Any], devices: frozenset[Any]) -> None:
        jax.block_until_ready(watched)
        with self._lock:
            ready = self._now()
            last = max(self._last_ready.get(device, begin) for device in devices)
            self._phases[phase] += ready - max(begin, last)
            self._last_ready |= dict.fromkeys(devices, ready)

    def seconds(self) -> dict[str, float]:
        """Ends the clock: waits for what is watched, returns `timing_s/PHASE`, `timing_s/step`."""
        for wait in self._waits:
            wait.result()
        for waiter in self._waiters.values():
            waiter.shutdown()
        phases = {f"timing_s/{phase}": seconds for phase, seconds in self._phases.items()}
        return {**phases, "timing_s/step": self._now() - self._start}


def _devices(tree: Any) -> frozenset[Any]:
    """Returns the devices of all arrays in a tree; without arrays, of None."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return frozenset(device for a in arrays for device in a.devices()) or frozenset([None])


class Profiler(contextlib.AbstractContextManager["Profiler"]):
    """Records a window of steps, and the memory at its end; a folder for each process."""

    def __init__(self, config: ProfilerConfig, folder: pathlib.Path):
        self._first, self._last = config.first_step, config.first_step + config.num_steps - 1
        self._folder = folder / f"process_{jax.process_index()}"
        self._on = False

    def begin(self, step: int) -> None:
        if self._on and step > self._last:
            self.close()
        if self._first and self._first <= step <= self._last and not self._on:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # else the loop's own lines fill the file
            jax.profiler.start_trace(str(self._folder), profiler_options=options)
            self._on = True

    def close(self) -> None:
        if self._on:
            self._on = False
            jax.profiler.stop_trace()
            jax.profiler.save_device_memory_profile(str(self._folder / "memory.prof"))
            logging.info("the profile of steps %d on is in %s", self._first, self._folder)

    def __exit__(self, *exception: Any) -> None:
        self.close()
