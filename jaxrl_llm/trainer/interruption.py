"""How a run ends before its last step: by a signal, or because an alert asks for it.

SIGTERM, SIGINT and SIGUSR1 ask it to end within the grace time. Before the weights of a step begin
to change, the step is given up and the state before it saved; afterwards the step is completed
first. Either way the next start takes the same steps as a run never interrupted. Several processes
agree between two steps: a signal may reach only some, and all take part in collective operations.
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
from jaxrl_llm.sharding import hosts

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Interruption:
    """Turns a request to end into `Interrupted`, raised where nothing is lost.

    A context manager that listens to signals; when `Interrupted` leaves it, the last resume point
    is saved. `grace_s` seconds after a signal the process ends, saved or not.
    """

    def __init__(self, grace_s: float):
        self._grace_s = grace_s
        self._exit_code = 0  # 0: no request
        self._reason = ""
        self._may_raise = True
        self._save: Callable[[], None] = lambda: None
        self._step = -1  # completed; -1: before the first step
        self._deaf_since = math.nan  # since when a request waits for the step's end
        self._num_measured = 0
        self._outlasts = False
        self._before: dict[signal.Signals, Any] = {}
        self._watchdog = threading.Timer(0.0, lambda: None)

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._notice) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self._may_raise = False
        try:
            if kind is not None and issubclass(kind, Interrupted):
                self._save()
                when = f"after step {self._step}" if self._step >= 0 else "before a step was taken"
                logging.warning(
                    "%s: ended %s; start again with the same --workdir to go on", self._reason, when
                )
        finally:
            self._watchdog.cancel()
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def request(self, reason: str, exit_code: int = EXIT_ALERT) -> None:
        """Asks for the end of the run when the step is complete."""
        if not self._exit_code:
            self._reason, self._exit_code = reason, exit_code

    def resume_point(self, step: int, save: Callable[[], None]) -> None:
        """Marks where a later start can go on, after `step` steps; may raise `Interrupted`.

        `save` saves that state unless it is saved, and returns when it is on disk. It must work
        until `hold`.
        """
        self._step, self._save = step, save
        if jax.process_count() > 1:
            self._deaf_since = time.monotonic()
            if code := max(hosts.share(self._exit_code)):
                self.request("another process was asked to end", code)
                self._raise()
        else:
            self._may_raise = True
            if self._exit_code:
                self._raise()

    def hold(self) -> None:
        """From here the step must be completed before the run may end; may raise `Interrupted`."""
        if self._exit_code and self._may_raise:
            self._raise()
        if jax.process_count() == 1:
            self._deaf_since = time.monotonic()
        self._may_raise = False
        self._save = lambda: None  # its arrays are about to be given away

    def outlasts_grace(self, saving: bool) -> bool:
        """Returns whether the state after this step should be saved; the same on every process.

        True once a step took longer than the grace time: a request in the next one could not wait
        for its end. The first step of a start compiles and does not count. False while another save
        is being written (`saving`).
        """
        over = time.monotonic() - self._deaf_since > self._grace_s
        if jax.process_count() > 1:
            over, saving = map(any, zip(*hosts.share([over, saving]), strict=True))
        self._num_measured += 1
        self._outlasts |= over and self._num_measured > 1
        return self._outlasts and not saving

    def _raise(self) -> None:
        self._may_raise = False
        raise Interrupted(self._reason, self._exit_code)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._exit_code:
            if number == signal.SIGINT and self._reason == name:
                self._leave("a second SIGINT")
            return
        self.request(name, EXIT_INTERRUPTED)
        logging.warning("%s: saving and ending within %g s", name, self._grace_s)
        if self._grace_s < threading.TIMEOUT_MAX:
            over = f"the grace time of {self._grace_s:g} s is over"
            self._watchdog = threading.Timer(self._grace_s, self._leave, (over,))
            self._watchdog.daemon = True
            self._watchdog.start()
        if self._may_raise and jax.process_count() == 1:
            self._raise()

    def _leave(self, why: str) -> None:
        logging.error("%s: ended at once; the next start goes on from the last checkpoint", why)
        os._exit(EXIT_INTERRUPTED)
