"""Parallel ahead-of-time compilation of a run's programs in threads.

XLA compiles without the GIL, so each program gets a thread, while others are traced, weights are
loaded and samples are drawn. The later call of the same jitted function uses the compiled program.
A call whose arguments differ from those compiled for compiles as usual.
"""

import atexit
import collections
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from absl import logging

CompileFn = Callable[[], Any]  # lowers and compiles a program; raises the compiler's error


class CompilePool:
    """Thread pool that compiles the programs submitted by `submit`, in order, one per CPU.

    At exit, the process waits for running compilations and starts no others.
    """

    def __init__(self, num_threads: int = 0):
        self._idle = num_threads or max(2, os.cpu_count() or 2)
        self._lock = threading.Lock()
        self._waiting: collections.deque[tuple[str, CompileFn]] = collections.deque()
        self._futures: dict[str, Future[float]] = {}
        self._start_time = time.perf_counter()
        self._is_logged = False
        _INSTANCES.add(self)

    def submit(self, name: str, compile_program: CompileFn) -> None:
        """Submits a program for compilation; `name` is unique and appears in errors and the log."""
        with self._lock:
            self._futures[name] = Future()
            self._waiting.append((name, compile_program))
            if self._idle:
                self._idle -= 1
                threading.Thread(target=self._compile_loop, name="compiler", daemon=True).start()

    def _compile_loop(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._idle += 1
                    return
                name, compile_program = self._waiting.popleft()
            start_time = time.perf_counter()
            try:
                compile_program()
            except BaseException as error:
                self._futures[name].set_exception(error)
            else:
                self._futures[name].set_result(time.perf_counter() - start_time)
            del compile_program

    def wait(self, *names: str) -> None:
        """Waits for submitted programs (default: all); unknown names are ignored.

        Raises the error of the first that failed, with the program's name as a note.
        """
        for name in names or tuple(self._futures):
            if future := self._futures.get(name):
                try:
                    future.result()
                except Exception as error:
                    error.add_note(f"while compiling the program {name!r} of the run")
                    raise
        is_done = bool(self._futures) and all(future.done() for future in self._futures.values())
        if (
            is_done
            and not self._is_logged
            and not any(f.exception() for f in self._futures.values())
        ):
            self._is_logged = True
            durations = ", ".join(f"{name} {f.result():.1f}" for name, f in self._futures.items())
            total = time.perf_counter() - self._start_time
            logging.info("programs compiled side by side in %.1f s: %s", total, durations)

    def shutdown(self) -> None:
        """Cancels waiting programs, and waits for those that are being compiled."""
        with self._lock:
            waiting = {name for name, _ in self._waiting}
            self._waiting.clear()
        for name, future in self._futures.items():
            if name not in waiting:
                future.exception()


_INSTANCES: weakref.WeakSet[CompilePool] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Ends all pools: a compiling thread that outlives the interpreter would crash the process."""
    for instance in _INSTANCES:
        instance.shutdown()
