"""One process at a time writes into the folder of a run, by a lock that ends with the process.

On a file system without locks there is a warning and no protection.
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

from jaxrl_llm.config.folder import naming
from jaxrl_llm.errors import UserError

NAME = "lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


class OccupiedError(UserError, RuntimeError):
    """Another process is writing into the folder; the message says which."""


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Holds `folder`, made if missing, for this process while in the context.

    Raises OccupiedError if another process, or another run in this one, holds it.
    """
    path = folder / NAME
    with _taken(path) as file:
        try:
            yield
        finally:
            if _is_at(file, path):
                path.unlink(missing_ok=True)


def is_held(folder: pathlib.Path) -> bool:
    """Whether a process holds `folder`; true also where the file system cannot tell."""
    try:
        with (folder / NAME).open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except OSError:  # it is locked, or there are no locks here
        return True


def _taken(path: pathlib.Path) -> IO[str]:
    with naming(path):
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
        if error.errno not in _NO_LOCKS:
            file.close()
            raise
        logging.warning("%s: no locks here (%s); start one run at a time in it", path, error)
        return file
    if not _is_at(file, path):  # its holder released and removed it meanwhile
        file.close()
        return _taken(path)
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
    return file


def _is_at(file: IO[str], path: pathlib.Path) -> bool:
    """Returns whether the open file is the one that `path` names now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False
