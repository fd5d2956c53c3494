"""Isolation of episodes that share a process: random state per episode, and a stall watchdog."""

import asyncio
import random
import signal
import sys
import time
from collections.abc import Coroutine, Generator
from typing import Any

_CHECK_INTERVAL_S = 0.05  # between two checks of the event loop


class RngState:
    """The random state of Python and numpy that belongs to one episode."""

    def __init__(self) -> None:
        self._python: Any = None
        self._numpy: Any = None

    def restore(self) -> None:
        """Sets the global random state to that of this episode."""
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def save(self) -> None:
        """Saves the global random state for the next step of the episode."""
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy else None


class RngScopedAwaitable:
    """Awaits a coroutine that sees the random state of its episode, whatever runs in between.

    Tasks that it creates run outside of it and see the random state of the process.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], rng_state: RngState):
        self._coroutine, self._rng_state = coroutine, rng_state

    def __await__(self) -> Generator[Any, Any, Any]:
        # Steps the coroutine by hand, as `await` would: other episodes run between two steps and
        # draw from the same global generators, so the state is swapped in and out at each step.
        steps = self._coroutine.__await__()
        resume, value = steps.send, None
        while True:
            self._rng_state.restore()
            try:
                awaited = resume(value)
            except StopIteration as end:
                return end.value
            finally:
                self._rng_state.save()
            try:
                resume, value = steps.send, (yield awaited)
            except BaseException as error:
                resume, value = steps.throw, error


class BlockedError(BaseException):
    """A step of a coroutine exceeded the time limit of a call.

    A BaseException, so that `except Exception` in a tool does not swallow it.
    """


class StallWatchdog:
    """Interrupts a step that blocks the event loop of this process, by raising an exception in it.

    This works for Python code and for system calls that signals interrupt, not for other code that
    does not return. A step that changes the handler or the timer of SIGALRM is not watched.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float):
        """Starts watching; the loop must run in this thread, the main thread."""
        self._loop, self._limit_s = loop, limit_s
        self._last_heartbeat = time.monotonic()  # when the loop last ran a callback
        self.stalled_s = 0.0  # by blocking steps; not charged to the other episodes
        signal.signal(signal.SIGALRM, self._check_stall)
        signal.setitimer(signal.ITIMER_REAL, _CHECK_INTERVAL_S, _CHECK_INTERVAL_S)
        loop.call_soon(self._heartbeat)

    def _heartbeat(self) -> None:
        now = time.monotonic()
        late_s = now - self._last_heartbeat - _CHECK_INTERVAL_S
        if late_s > _CHECK_INTERVAL_S:
            self.stalled_s += late_s
        self._last_heartbeat = now
        self._loop.call_later(_CHECK_INTERVAL_S, self._heartbeat)

    def _check_stall(self, *_: Any) -> None:
        blocked_s = time.monotonic() - self._last_heartbeat
        if blocked_s > self._limit_s + _CHECK_INTERVAL_S and asyncio.current_task(self._loop):
            self.stalled_s += blocked_s
            self._last_heartbeat = time.monotonic()  # a step that catches it has the limit again
            raise BlockedError
