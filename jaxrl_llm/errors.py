"""The root of all errors that a user can mend."""

import importlib
from collections.abc import Iterable, Sequence

EXIT_MENDABLE = 1  # of a program that ends with the message of a `UserError`
EXIT_ALERT = 3  # an alert stopped the run after a save
EXIT_INTERRUPTED = 75  # a signal ended the run; to be started again, as EX_TEMPFAIL says

Problem = tuple[str, str]  # (field path below a group, what is wrong and what to do)


class UserError(Exception):
    """A fault of the run, its files or its machine; programs show its message, no traceback."""


class ConfigError(UserError, ValueError):
    """A run description that cannot work; the message lists every problem."""

    def __init__(self, problems: str | Sequence[str]):
        problems = (problems,) if isinstance(problems, str) else tuple(problems)
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{count} in this config:", *(f"  {p}" for p in problems)]))


def refuse(problems: Iterable[Problem]) -> None:
    """Raises `ConfigError` if there are problems with the flags of a command."""
    if found := [f"--{name}: {message}" for name, message in problems]:
        raise ConfigError(found)


def check_package(package: str, extra: str, where: str) -> None:
    """Raises ConfigError if the package of an extra, which the setting `where` needs, is absent."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        remedy = f"pip install 'jaxrl_llm[{extra}]', or leave it out"
        raise ConfigError(f"{where} needs the package {package} ({error}); {remedy}") from error


class Interrupted(KeyboardInterrupt):
    """The run was asked to end. Not an `Exception`: no code may handle it as its own failure."""

    def __init__(self, reason: str, exit_code: int):
        super().__init__(reason)
        self.exit_code = exit_code
