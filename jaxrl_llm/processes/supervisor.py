"""The process between an owner and one worker; no descendant of the worker outlives it.

Its owner runs it as `python -m jaxrl_llm.processes.supervisor FD MODULE` (`child.py`). It forks the
worker, which calls `main(FD)` of the module, and waits. When the worker ends, or the owner closes
this process's stdin, it kills all descendants of the worker, in any session or group, and ends as
the worker did. If the owner wrote END_SOON before, the worker first has END_SOON_S to end by
itself. It needs no privilege: a child subreaper adopts every orphan below it.
"""

import contextlib
import ctypes
import importlib
import os
import pathlib
import resource
import signal
import sys
import threading
import time
from typing import NoReturn

END_SOON, END_SOON_S = b".", 2.0
PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
libc = ctypes.CDLL(None, use_errno=True)  # loaded here: not safe between fork and exec


def main(connection_fd: int) -> None:
    """Forks and returns in the worker; this process exits after the worker and its descendants."""
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    supervisor = os.getpid()
    worker = os.fork()
    if not worker:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:
            os._exit(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return
    os.close(connection_fd)  # else the owner would not see the worker close it
    threading.Thread(target=_kill_with_owner, args=(worker,), daemon=True).start()
    pid = 0
    while pid != worker:  # `wait` returns adopted orphans too
        pid, status = os.wait()
    kill_descendants()
    exit_as(os.waitstatus_to_exitcode(status))


def exit_description(code: int) -> str:
    """A text of how a process ended: "exit code 3", "signal SIGKILL"."""
    names = {number.value: number.name for number in signal.Signals}
    return f"exit code {code}" if code >= 0 else f"signal {names.get(-code, -code)}"


def exit_as(code: int) -> NoReturn:
    """Exits with this code; if negative, by that signal, as the other process did."""
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _kill_with_owner(worker: int) -> None:
    if os.read(0, 1):
        time.sleep(END_SOON_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)


def kill_descendants() -> None:
    """Kills every descendant of this process, a subreaper; returns when none is left."""
    while True:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def descendants(ancestor: int) -> list[int]:
    """The pids of all descendants of `ancestor`, parents first."""
    children: dict[int, list[int]] = {}
    for entry in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has just ended
            parent = int(entry.read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    pids = [ancestor]
    for pid in pids:  # grows
        pids += children.get(pid, [])
    return pids[1:]


if __name__ == "__main__":
    main(int(sys.argv[1]))
    # Imported in the worker only: the supervisor stays small.
    importlib.import_module(sys.argv[2]).main(int(sys.argv[1]))
