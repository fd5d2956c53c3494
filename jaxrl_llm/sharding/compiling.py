"""The programs of a run, compiled side by side before a step needs them.

XLA compiles without Python's lock, so each program has a thread, while others are traced, weights
are read and samples are drawn. What a thread has compiled is what the later call of the same jitted
function uses. A call whose arguments turn out to be others compiles on its own, as without this.
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

Compile = Callable[[], Any]  # lowers and compiles a program; raises what the compiler says


class Ahead:
    """Compiles what `begin` is given, in the order of these calls, a program on each CPU.

    A process that ends waits for the programs that are being compiled, and begins no others.
    """

    def __init__(self, num_threads: int = 0):
        self._idle = num_threads or max(2, os.cpu_count() or 2)
        self._lock = threading.Lock()
        self._waiting: collections.deque[tuple[str, Compile]] = collections.deque()
        self._found: dict[str, Future[float]] = {}
        self._began = time.perf_counter()
        self._is_told = False
        _ALL.add(self)

    def begin(self, name: str, make: Compile) -> None:
        """Begins to compile a program; `name` is of it alone and stands in errors and the log."""
        with self._lock:
            self._found[name] = Future()
            self._waiting.append((name, make))
            if self._idle:
                self._idle -= 1
                threading.Thread(target=self._work, name="compiler", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._idle += 1
                    return
                name, make = self._waiting.popleft()
            began = time.perf_counter()
            try:
                make()
            except BaseException as error:
                self._found[name].set_exception(error)
            else:
                self._found[name].set_result(time.perf_counter() - began)
            del make

    def wait(self, *names: str) -> None:
        """Waits for programs (default: all) that have begun; others are no error.

        Raises what the first of them raised, with its name as a note.
        """
        for name in names or tuple(self._found):
            if found := self._found.get(name):
                try:
                    found.result()
                except Exception as error:
                    error.add_note(f"while compiling the program {name!r} of the run")
                    raise
        done = bool(self._found) and all(found.done() for found in self._found.values())
        if done and not self._is_told and not any(f.exception() for f in self._found.values()):
            self._is_told = True
            spent = ", ".join(f"{name} {f.result():.1f}" for name, f in self._found.items())
            total = time.perf_counter() - self._began
            logging.info("programs compiled side by side in %.1f s: %s", total, spent)

    def end(self) -> None:
        """Begins no other program, and waits for those that are being compiled."""
        with self._lock:
            names = {name for name, _ in self._waiting}
            self._waiting.clear()
        for name, found in self._found.items():
            if name not in names:
                found.exception()


_ALL: weakref.WeakSet[Ahead] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A compiler's thread must not outlive the interpreter: it would end the process by a fault."""
    for each in _ALL:
        each.end()
