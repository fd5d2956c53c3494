"""A lock on the folder of a run: one writing process at a time.

In a local folder it is a file lock, which ends with the process; on a file system without locks it
logs a warning and protects nothing. In a bucket it is a lease (`storage/lease.py`).
"""

import contextlib
import errno
import fcntl
import os
import pathlib
import socket
from collections.abc import Callable, Iterator
from typing import IO

from absl import logging

from jaxrl_llm.errors import UserError
from jaxrl_llm.storage import files, lease
from jaxrl_llm.storage.lease import OccupiedError

LOCK_FILE = "lock"
_UNSUPPORTED_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


class LockError(UserError, RuntimeError):
    """The lock of a folder cannot be tested; the message says why."""


@contextlib.contextmanager
def exclusive_lock(folder: pathlib.Path) -> Iterator[Callable[[], None]]:
    """Holds the lock of `folder`, which is created if missing, for this process.

    Yields a function that raises OccupiedError once another process has taken the lock, as it can
    after an outage of a bucket. Raises OccupiedError if another process, or another run in this
    one, holds it.
    """
    if files.in_bucket(folder):
        with lease.held_lease(folder) as held:
            yield held.check
        return
    path = folder / LOCK_FILE
    with _acquire_lock(path) as file:
        try:
            yield lambda: None
        finally:
            if _is_same_file(file, path):
                path.unlink(missing_ok=True)


def is_held(folder: pathlib.Path) -> bool:
    """Whether a process holds the lock of `folder`.

    Raises LockError if that cannot be tested: the file is unreadable, or the file system has no
    locks.
    """
    if files.in_bucket(folder):
        return lease.is_held(folder)
    path = folder / LOCK_FILE
    try:
        with path.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        remedy = "make it readable for this user"
        if error.errno in _UNSUPPORTED_ERRNOS:
            remedy = "use a --workdir on a file system with locks (flock)"
        raise LockError(
            f"{path}: {error.strerror}; so it is unknown whether a run writes into {folder};"
            f" {remedy}"
        ) from error


def _acquire_lock(path: pathlib.Path) -> IO[str]:
    with files.naming_file(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        with file:
            holder = file.read().strip() or "another process"
        raise OccupiedError(
            f"{path.parent}: {holder} is writing into it (it holds {path}); wait until that has"
            " ended, end it, or use another --workdir"
        ) from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED_ERRNOS:
            file.close()
            raise
        logging.warning("%s: no locks here (%s); start one run at a time in it", path, error)
        return file
    if not _is_same_file(file, path):  # its holder has released and removed it meanwhile
        file.close()
        return _acquire_lock(path)
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
    return file


def _is_same_file(file: IO[str], path: pathlib.Path) -> bool:
    """Whether `path` still names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False
