"""The root of all errors that a user can mend."""

import contextlib
import importlib
import pathlib
from collections.abc import Iterator, Sequence

EXIT_MENDABLE = 1  # of a program that ends with the message of a `UserError`
EXIT_ALERT = 3  # an alert stopped the run after a save
EXIT_INTERRUPTED = 75  # a signal ended the run; to be started again, as EX_TEMPFAIL says

Problem = tuple[str, str]  # (field path below a group, what is wrong and what to do)


class UserError(Exception):
    """Something about the run, its files or its machine is wrong; the message says what to do.

    Programs in `launch/` show the message without a traceback.
    """


class ConfigError(UserError, ValueError):
    """A run description that cannot work; the message lists every problem."""

    def __init__(self, problems: str | Sequence[str]):
        """Keeps one problem or several, a line each in the message."""
        problems = (problems,) if isinstance(problems, str) else tuple(problems)
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{count} in this config:", *(f"  {p}" for p in problems)]))


def check_package(package: str, extra: str, where: str) -> None:
    """Raises ConfigError if the package of an extra, which the setting `where` needs, is absent."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        remedy = f"pip install 'jaxrl_llm[{extra}]', or leave it out"
        raise ConfigError([f"{where} needs the package {package} ({error}); {remedy}"]) from error


class Interrupted(KeyboardInterrupt):
    """The run was asked to end before its last step.

    Not an `Exception`: nothing on the way may handle it as a failure of its own.
    """

    def __init__(self, reason: str, exit_code: int):
        super().__init__(reason)
        self.exit_code = exit_code


@contextlib.contextmanager
def naming(path: pathlib.Path) -> Iterator[None]:
    """Adds `path` to an OSError raised inside: that of a failed write names no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
