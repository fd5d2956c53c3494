"""Timing of the phases of a step, and profiler traces of some steps."""

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
from jaxrl_llm.storage import mirror

Tree = TypeVar("Tree")


class Clock:
    """Measures phases: `with clock("gen"): ...` adds to `timing_s/gen`.

    Times are wall-clock times of the host. A phase that only dispatches to devices watches its
    results:

        with clock("ref") as watch:
            log_probs = watch(of_reference(tokens))

    Its time then ends when they are ready; until then they must not be donated. It begins at the
    `with`, or when the phase watched before it on the same devices ended, whichever is later.
    Threads wait for the results, not the loop. Phases on different devices may overlap, so their
    sum may exceed the step.

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
        # A thread per set of devices, so that none waits for the results of another.
        self._executors: dict[frozenset[Any], concurrent.futures.Executor] = (
            collections.defaultdict(lambda: concurrent.futures.ThreadPoolExecutor(max_workers=1))
        )
        self._pending: list[concurrent.futures.Future[None]] = []
        self._lock = threading.Lock()
        self._last_ready: dict[Any, float] = {}  # by device

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[Callable[[Tree], Tree]]:
        """Adds the time of the `with` block to `phase`, even if it raises; yields `watch`."""
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
                executor = self._executors[devices]
                self._pending.append(
                    executor.submit(self._record_when_ready, phase, begin, watched, devices)
                )
            else:
                with self._lock:
                    self._phases[phase] += self._now() - begin

    def _record_when_ready(
        self, phase: str, begin: float, watched: list[Any], devices: frozenset[Any]
    ) -> None:
        jax.block_until_ready(watched)
        with self._lock:
            ready_s = self._now()
            last = max(self._last_ready.get(device, begin) for device in devices)
            self._phases[phase] += ready_s - max(begin, last)
            self._last_ready |= dict.fromkeys(devices, ready_s)

    def seconds(self) -> dict[str, float]:
        """Waits for all watched results, then gives `timing_s/PHASE` and `timing_s/step`."""
        for future in self._pending:
            future.result()
        for executor in self._executors.values():
            executor.shutdown()
        phases = {f"timing_s/{phase}": seconds for phase, seconds in self._phases.items()}
        return {**phases, "timing_s/step": self._now() - self._start}


def _devices(tree: Any) -> frozenset[Any]:
    """The devices of all arrays in a tree; {None} if it has no arrays."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return frozenset(device for a in arrays for device in a.devices()) or frozenset([None])


class Profiler(contextlib.AbstractContextManager["Profiler"]):
    """Records a profiler trace of a window of steps, and a memory profile at its end.

    Each process writes into a folder of its own, which is copied if `folder` is in a bucket.
    """

    def __init__(self, config: ProfilerConfig, folder: pathlib.Path):
        self._first, self._last = config.first_step, config.first_step + config.num_steps - 1
        self._target = folder / f"process_{jax.process_index()}"
        self._copying = contextlib.ExitStack()  # copies a finished trace to a bucket
        self._is_tracing = False

    def begin(self, step: int) -> None:
        if self._is_tracing and step > self._last:
            self.close()
        if self._first and self._first <= step <= self._last and not self._is_tracing:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # else Python frames of the loop fill the trace
            self._folder = self._copying.enter_context(mirror.mirrored_folder(self._target))
            jax.profiler.start_trace(str(self._folder), profiler_options=options)
            self._is_tracing = True

    def close(self) -> None:
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()
            jax.profiler.save_device_memory_profile(str(self._folder / "memory.prof"))
            self._copying.close()
            logging.info("the profile of steps %d on is in %s", self._first, self._target)

    def __exit__(self, *exception: Any) -> None:
        self.close()
