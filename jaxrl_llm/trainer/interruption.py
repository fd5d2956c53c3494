"""Stops a run before its last step, on a signal or an alert, without losing work.

SIGTERM, SIGINT and SIGUSR1 ask the run to stop within the grace time. Until the weights of a step
start to change, the step is abandoned and the state before it saved; after that the step is
completed first. Either way the next start takes the same steps as an uninterrupted run. Several
processes agree between steps: a signal may reach only some, yet all must join the collectives.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
from absl import logging

from jaxrl_llm.errors import EXIT_ALERT, EXIT_INTERRUPTED, Interrupted
from jaxrl_llm.sharding import multihost

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class InterruptionHandler:
    """Turns a stop request into `Interrupted`, raised only where nothing is lost.

    A context manager that handles signals; when `Interrupted` leaves it, the last resume point is
    saved. `grace_s` seconds after a signal the process exits, saved or not.
    """

    def __init__(self, grace_s: float):
        self._grace_s = grace_s
        self._exit_code = 0  # 0: no stop requested
        self._reason = ""
        self._may_raise = True
        self._save: Callable[[], None] = lambda: None
        self._step = -1  # completed steps; -1: before the first resume point
        self._committed_at = math.nan  # from then on a request waits for the end of the step
        self._num_timed_steps = 0
        self._is_slow = False
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._watchdog = threading.Timer(0.0, lambda: None)

    def __enter__(self) -> "InterruptionHandler":
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {
                number: signal.signal(number, self._on_signal) for number in SIGNALS
            }
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self._may_raise = False
        try:
            if kind is not None and issubclass(kind, Interrupted):
                self._save()
                stopped_at = (
                    f"after step {self._step}" if self._step >= 0 else "before a step was taken"
                )
                logging.warning(
                    "%s: ended %s; start again with the same --workdir to go on",
                    self._reason,
                    stopped_at,
                )
        finally:
            self._watchdog.cancel()
            for number, handler in self._previous_handlers.items():
                signal.signal(number, handler)

    def request_stop(self, reason: str, exit_code: int = EXIT_ALERT) -> None:
        """Requests that the run stop once the step is complete."""
        if not self._exit_code:
            self._reason, self._exit_code = reason, exit_code

    def set_resume_point(self, step: int, save: Callable[[], None]) -> None:
        """Sets the state to resume from, after `step` steps; may raise `Interrupted`.

        `save` writes that state unless it is saved already, and returns once it is on disk. It must
        stay callable until `commit_step`.
        """
        self._step, self._save = step, save
        if jax.process_count() > 1:
            self._committed_at = time.monotonic()
            if code := max(multihost.allgather(self._exit_code)):
                self.request_stop("another process was asked to end", code)
                self._raise()
        else:
            self._may_raise = True
            if self._exit_code:
                self._raise()

    def commit_step(self) -> None:
        """From here on the step must be completed before a stop; may raise `Interrupted`."""
        if self._exit_code and self._may_raise:
            self._raise()
        if jax.process_count() == 1:
            self._committed_at = time.monotonic()
        self._may_raise = False
        self._save = lambda: None  # its arrays are about to be donated

    def step_exceeds_grace(self, saving: bool) -> bool:
        """Whether to save after this step as steps exceed the grace time; same on all processes.

        True once a step took longer than the grace time: a request during the next one could not
        wait for its end. The first step of a start compiles and does not count. False while another
        save is being written (`saving`).
        """
        is_over = time.monotonic() - self._committed_at > self._grace_s
        if jax.process_count() > 1:
            is_over, saving = map(any, zip(*multihost.allgather([is_over, saving]), strict=True))
        self._num_timed_steps += 1
        self._is_slow |= is_over and self._num_timed_steps > 1
        return self._is_slow and not saving

    def _raise(self) -> None:
        self._may_raise = False
        raise Interrupted(self._reason, self._exit_code)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._exit_code:
            if number == signal.SIGINT and self._reason == name:
                self._exit_now("a second SIGINT")
            return
        self.request_stop(name, EXIT_INTERRUPTED)
        logging.warning("%s: saving and ending within %g s", name, self._grace_s)
        if self._grace_s < threading.TIMEOUT_MAX:
            reason = f"the grace time of {self._grace_s:g} s is over"
            self._watchdog = threading.Timer(self._grace_s, self._exit_now, (reason,))
            self._watchdog.daemon = True
            self._watchdog.start()
        if self._may_raise and jax.process_count() == 1:
            self._raise()

    def _exit_now(self, reason: str) -> None:
        logging.error("%s: ended at once; the next start goes on from the last checkpoint", reason)
        os._exit(EXIT_INTERRUPTED)
