"""Runs the processes of a job on this host, and starts them again when they fail.

Without a finished step between them, failures in a row are a fault that no restart mends, so their
number is limited, and the pauses between them double.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from jaxrl_llm.errors import EXIT_ALERT, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER_ERROR
from jaxrl_llm.processes import progress, supervisor

# Endings that a restart would only repeat, or that were asked for; the first that occurs counts.
_FINAL_CODES = (EXIT_USER_ERROR, EXIT_ALERT, EXIT_INTERRUPTED)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_MAX_PAUSE_S = 60.0
_POLL_S = 0.1
# After one process has ended, until the others are killed: they complete their copies in memory, or
# report why they end.
_END_S = 5.0


@dataclasses.dataclass(frozen=True)
class Limits:
    """When the supervisor gives up, and when it takes a process for stuck."""

    failures: int = 5  # in a row without a finished step; then it gives up
    pause_s: float = 1.0  # after the first failure
    hang_s: float = 1800.0  # without progress; start and compilation count too


class JobSupervisor:
    """Runs one job to its end; `run` returns its exit code."""

    def __init__(self, command: Sequence[str], num_processes: int = 1, limits: Limits = Limits()):
        """`command` is started `num_processes` times; each finds the others by its environment."""
        self._command, self._count, self._limits = list(command), num_processes, limits
        self._stop: signal.Signals | None = None  # what was asked of this process
        self._processes: list[subprocess.Popen[bytes]] = []
        self.num_failures = 0  # of the whole run

    def run(self) -> int:
        """Runs the job until it is done or cannot go on; returns its exit code.

        EXIT_FAILED after too many failures. A signal to this process is passed on, once, and the
        job's answer to it is the end.
        """
        previous = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        in_a_row = last_step = 0
        try:
            with tempfile.TemporaryDirectory(prefix="jaxrl_llm_progress_") as folder:
                while True:
                    code, cause, step = self._run_once(pathlib.Path(folder))
                    if code is not None:
                        return code
                    self.num_failures += 1
                    in_a_row = 1 if step > last_step else in_a_row + 1
                    last_step = max(step, last_step)
                    if in_a_row > self._limits.failures:
                        _say(f"{cause}; given up after {in_a_row} failures without a finished step")
                        return EXIT_FAILED
                    pause = min(self._limits.pause_s * 2 ** (in_a_row - 1), _MAX_PAUSE_S)
                    _say(f"{cause} (failure {self.num_failures}); starting again in {pause:g} s")
                    self._pause(pause)
                    if self._stop is not None:
                        return EXIT_INTERRUPTED
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _run_once(self, folder: pathlib.Path) -> tuple[int | None, str, int]:
        """Starts all processes and waits; (final exit code, if it is final; cause; newest step)."""
        for path in folder.iterdir():
            path.unlink()
        reports = [folder / str(process) for process in range(self._count)]
        began = time.time()
        environments = _environments(self._count)
        self._processes = [
            _start(self._command, {**environment, progress.VARIABLE: str(path)})
            for environment, path in zip(environments, reports, strict=True)
        ]
        cause = ""
        try:
            while any(process.poll() is None for process in self._processes):
                if failed := [p for p in self._processes if p.poll() not in (None, 0)]:
                    self._end_all(_END_S)
                    cause = cause or self._cause(failed[0])
                    break
                newest = max([began, *(progress.read(path)[1] for path in reports)])
                if time.time() - newest > self._limits.hang_s and self._stop is None:
                    cause = f"no progress for {self._limits.hang_s:g} s; its processes were killed"
                    self._end_all(0.0)
                    break
                time.sleep(_POLL_S)
        finally:
            self._end_all(0.0)
        codes = [process.returncode for process in self._processes]
        step = max(progress.read(path)[0] for path in reports)
        if not any(codes):
            return 0, "", step
        if not cause:
            cause = self._cause(next(p for p in self._processes if p.returncode))
        if self._stop is not None:
            return next((code for code in codes if code), EXIT_INTERRUPTED), cause, step
        final = next((code for code in _FINAL_CODES if code in codes), None)
        return final, cause, step

    def _cause(self, process: "subprocess.Popen[bytes]") -> str:
        end = supervisor.exit_description(process.returncode)
        name = f"process {self._processes.index(process)}" if self._count > 1 else "the process"
        return f"{name} ended with {end}"

    def _end_all(self, grace_s: float) -> None:
        """Kills the processes that are left after `grace_s`, and reaps all."""
        deadline = time.monotonic() + grace_s
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.poll() is None:
                process.kill()  # also one that is stopped
                process.wait()

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._stop is None and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_S))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop = signal.Signals(number)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)


def _start(command: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    parent = os.getpid()

    def end_with_parent() -> None:
        supervisor.libc.prctl(supervisor.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    # A session of its own: Ctrl-C reaches it once, through this process.
    return subprocess.Popen(
        command,
        env={**os.environ, **environment},
        preexec_fn=end_with_parent,
        start_new_session=True,
    )


def _environments(count: int) -> list[dict[str, str]]:
    """The variables by which several processes on this host find each other."""
    if count == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    common = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count)}
    return [{**common, "JAX_PROCESS_ID": str(process)} for process in range(count)]


def _say(message: Any) -> None:
    print(f"jaxrl_llm run: {message}", file=sys.stderr, flush=True)
