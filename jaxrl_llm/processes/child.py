"""A process of the project's own that runs users' code, away from the devices of the run."""

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
_KILL_TIMEOUT_S = 10.0  # for its descendants to be gone
MAX_SHOWN_BYTES = 1 << 16  # of what one process prints; the rest is read and dropped

# Variables of the environment that an interpreter needs to start.
_NEEDED = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "SYSTEMROOT")


class Child:
    """A fresh interpreter that calls `main(FD)` of a module, FD the other end of `connection`.

    `multiprocessing` would import the main module of the run, and jax. What the process prints is
    passed on, up to a bound. It ends with its owner, and all that it has started ends with it.
    """

    def __init__(self, module: str, visible: Sequence[str] = ()):
        """`visible` are the environment variables of this process that it may see."""
        self.connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", supervisor.__name__),
                    *(str(theirs.fileno()), module),
                ],
                # It finds the same modules as this process. A user's function that imports jax
                # cannot take the devices of the run, and cannot see the run's secrets.
                env={
                    **{n: os.environ[n] for n in (*_NEEDED, *visible) if n in os.environ},
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                    "JAX_PLATFORMS": "cpu",
                },
                stdin=subprocess.PIPE,  # closes when this process ends, however it ends
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # deaf to Ctrl-C
            )
        assert self._process.stdout
        self._reader = threading.Thread(target=_show, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def end(self, patience_s: float) -> str:
        """Ends the process, by force after `patience_s`; returns how it ended."""
        assert self._process.stdin
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        self._process.stdin.close()  # its supervisor ends it and all that it has started
        try:
            code = self._process.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self.connection.close()
        self._reader.join(CLOSE_TIMEOUT_S)  # it closes the pipe
        return supervisor.ending(code)


def _show(pipe: IO[bytes]) -> None:
    """Passes on what a process prints, up to a bound, until it ends."""
    room = MAX_SHOWN_BYTES
    with pipe:
        while block := os.read(pipe.fileno(), 1 << 16):
            if room > 0:
                sys.stderr.write(block[:room].decode(errors="replace"))
                if len(block) >= room:
                    sys.stderr.write(f"\n... more than {MAX_SHOWN_BYTES} bytes: dropped\n")
                room -= len(block)
