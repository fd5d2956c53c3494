"""A lock on the folder of a run: one writing process at a time; it ends with the process.

On a file system without locks it logs a warning and protects nothing.
"""

import contextlib
import errno
import fcntl
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import IO

from absl import logging

from jaxrl_llm.config.workdir import naming_file
from jaxrl_llm.errors import UserError

LOCK_FILE = "lock"
_UNSUPPORTED_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


class OccupiedError(UserError, RuntimeError):
    """Another process is writing into the folder; the message says which."""


class LockError(UserError, RuntimeError):
    """The lock of a folder cannot be tested; the message says why."""


@contextlib.contextmanager
def exclusive_lock(folder: pathlib.Path) -> Iterator[None]:
    """Holds the lock of `folder`, which is created if missing, for this process.

    Raises OccupiedError if another process, or another run in this one, holds it.
    """
    path = folder / LOCK_FILE
    with _acquire_lock(path) as file:
        try:
            yield
        finally:
            if _is_same_file(file, path):
                path.unlink(missing_ok=True)


def is_held(folder: pathlib.Path) -> bool:
    """Whether a process holds the lock of `folder`.

    Raises LockError if that cannot be tested: the file is unreadable, or the file system has no
    locks.
    """
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
    with naming_file(path):
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
