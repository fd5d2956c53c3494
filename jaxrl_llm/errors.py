"""The root of all errors that a user can mend, and what they must name."""

import contextlib
import pathlib
from collections.abc import Iterator

Problem = tuple[str, str]  # (field path below a group, what is wrong and what to do)


class UserError(Exception):
    """Something about the run, its files or its machine is wrong; the message says what to do.

    Programs in `launch/` show the message without a traceback.
    """


@contextlib.contextmanager
def naming(path: pathlib.Path) -> Iterator[None]:
    """Puts `path` into an OSError raised inside: that of a failed write does not name the file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
