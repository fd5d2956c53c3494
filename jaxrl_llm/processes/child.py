"""A child process that runs users' code, without access to the devices of the run."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

from jaxrl_llm.processes import supervisor

START_TIMEOUT_S = 120.0  # to import a user's module
CLOSE_TIMEOUT_S = 2.0
_KILL_TIMEOUT_S = 10.0  # until its descendants are gone
MAX_FORWARDED_BYTES = 1 << 16  # printed by one process; the rest is read and dropped

# Variables of the environment that an interpreter needs to start.
_INHERITED_VARIABLES = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "SYSTEMROOT")


class ChildProcess:
    """A fresh interpreter that calls `main(FD)` of a module, FD the other end of `connection`.

    Not `multiprocessing`, which would import the main module of the run, and jax. The output of the
    process is forwarded to stderr, up to a limit. It ends with its owner, and its descendants with
    it.
    """

    def __init__(self, module: str, visible: Sequence[str] = ()):
        """`visible`: names of the environment variables that are passed on to it."""
        self.connection, child_connection = multiprocessing.Pipe()
        with child_connection:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", supervisor.__name__),
                    *(str(child_connection.fileno()), module),
                ],
                # Same module path as this process. A user's function that imports jax cannot claim
                # the devices of the run, and the run's secrets are not in its environment.
                env={
                    **{
                        name: os.environ[name]
                        for name in (*_INHERITED_VARIABLES, *visible)
                        if name in os.environ
                    },
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                    "JAX_PLATFORMS": "cpu",
                },
                stdin=subprocess.PIPE,  # closes when this process ends, however it ends
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[child_connection.fileno()],
                start_new_session=True,  # not interrupted by Ctrl-C
            )
        assert self._process.stdout
        self._reader = threading.Thread(
            target=_forward_output, args=(self._process.stdout,), daemon=True
        )
        self._reader.start()

    def end(self, patience_s: float) -> str:
        """Waits up to `patience_s` for the process, then kills it; returns a text of its end."""
        assert self._process.stdin
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        self._process.stdin.close()  # its supervisor then kills it and its descendants
        try:
            code = self._process.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self.connection.close()
        self._reader.join(CLOSE_TIMEOUT_S)  # the thread closes the pipe
        return supervisor.exit_description(code)


def _forward_output(pipe: IO[bytes]) -> None:
    """Forwards the output of a process to stderr, up to a limit, until it ends."""
    bytes_left = MAX_FORWARDED_BYTES
    with pipe:
        while block := os.read(pipe.fileno(), 1 << 16):
            if bytes_left > 0:
                sys.stderr.write(block[:bytes_left].decode(errors="replace"))
                if len(block) >= bytes_left:
                    sys.stderr.write(f"\n... more than {MAX_FORWARDED_BYTES} bytes: dropped\n")
                bytes_left -= len(block)
