"""Episodes that share a process: what keeps their random numbers and their time apart."""

import asyncio
import random
import signal
import sys
import time
from collections.abc import Coroutine, Generator
from typing import Any

_LOOK_S = 0.05  # between two looks at the loop


class Randomness:
    """The random numbers of Python and numpy, as one episode sees them."""

    def __init__(self) -> None:
        self._python: Any = None
        self._numpy: Any = None

    def put(self) -> None:
        """Makes the state that of this episode."""
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def keep(self) -> None:
        """Keeps the state for the next time."""
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy else None


class Own:
    """Awaits a coroutine whose random numbers are those of its episode, whatever runs in between.

    Tasks that it creates run outside of it and see those of the process.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], randomness: Randomness):
        self._coroutine, self._randomness = coroutine, randomness

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._coroutine.__await__()
        go_on, given = steps.send, None
        while True:
            self._randomness.put()
            try:
                awaited = go_on(given)
            except StopIteration as end:
                return end.value
            finally:
                self._randomness.keep()
            try:
                go_on, given = steps.send, (yield awaited)
            except BaseException as error:
                go_on, given = steps.throw, error


class BlockedError(BaseException):
    """A step of a coroutine took longer than a call may; no Exception, so that it gets through."""


class Watch:
    """Ends a step that holds up the loop of this process, by an exception within it.

    That works for Python code and for system calls that signals interrupt, not for other code that
    does not return. A step that changes the handler or the timer of SIGALRM is not watched.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float):
        """Begins to watch; the loop is to run in this thread, the main one."""
        self._loop, self._limit_s = loop, limit_s
        self._last = time.monotonic()  # that the loop was seen to run
        self.held_s = 0.0  # by steps that took long: for others it does not count
        signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
        loop.call_soon(self._run)

    def _run(self) -> None:
        now = time.monotonic()
        late = now - self._last - _LOOK_S
        if late > _LOOK_S:
            self.held_s += late
        self._last = now
        self._loop.call_later(_LOOK_S, self._run)

    def _look(self, *_: Any) -> None:
        since = time.monotonic() - self._last
        if since > self._limit_s + _LOOK_S and asyncio.current_task(self._loop):
            self.held_s += since
            self._last = time.monotonic()  # if it goes on all the same it has the limit again
            raise BlockedError
