"""Base classes of errors that a user can fix, and exit codes."""

import difflib
import importlib
from collections.abc import Iterable, Sequence

EXIT_USER_ERROR = 1  # the program ended with the message of a `UserError`
EXIT_FAILED = (
    70  # the machine, a service or the program failed; another start may go on (EX_SOFTWARE)
)
EXIT_ALERT = 3  # an alert stopped the run after a save
EXIT_INTERRUPTED = 75  # a signal stopped the run; restart it (EX_TEMPFAIL)

Problem = tuple[str, str]  # (field path below a group, fault and remedy)


class UserError(Exception):
    """A fault of the run, its files or its machine; programs show the message, no traceback."""

    exit_code = EXIT_USER_ERROR  # EXIT_FAILED, if the same command may succeed the next time


class ConfigError(UserError, ValueError):
    """An invalid config; the message lists every problem."""

    def __init__(self, problems: str | Sequence[str]):
        problems = (problems,) if isinstance(problems, str) else tuple(problems)
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{count} in this config:", *(f"  {p}" for p in problems)]))


def raise_flag_problems(problems: Iterable[Problem]) -> None:
    """Raises `ConfigError` if there are problems with the flags of a command."""
    if messages := [f"--{name}: {message}" for name, message in problems]:
        raise ConfigError(messages)


def check_package(package: str, extra: str, where: str) -> None:
    """Raises ConfigError if `package` of an extra, needed by the setting `where`, is missing."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        remedy = f"pip install 'jaxrl_llm[{extra}]', or leave it out"
        raise ConfigError(f"{where} needs the package {package} ({error}); {remedy}") from error


def name_hint(name: str, known: Iterable[str], listing: str, cutoff: float = 0.5) -> str:
    """Which known names an unknown one may mean; if none is near, the command that lists them.

    >>> name_hint("chess", ["Chess-v0", "Nim-v0"], "envs --names=games")
    'did you mean Chess-v0?'
    """
    similar = difflib.get_close_matches(name, list(known), n=3, cutoff=cutoff)
    return f"did you mean {', '.join(similar)}?" if similar else f"{listing} lists all"


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop. Not an `Exception`: no code may handle it as its own failure."""

    def __init__(self, reason: str, exit_code: int):
        super().__init__(reason)
        self.exit_code = exit_code
