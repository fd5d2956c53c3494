"""The command line: command, options, help. Imports no training library."""

import contextlib
import dataclasses
import difflib
import importlib
import importlib.metadata
import os
import sys
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NoReturn, TypeVar

from absl import flags

from jaxrl_llm.commands import completion
from jaxrl_llm.commands.options import COMMANDS, LAUNCH_ONLY_COMMANDS, JaxOptions, Options
from jaxrl_llm.config import JobConfig, ProcessesConfig
from jaxrl_llm.config import flags as config_flags
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.errors import EXIT_USER_ERROR, ConfigError, UserError, raise_flag_problems

_HELP_WORDS = ("-h", "--help", "help")
_PROCESS_FLAGS = frozenset(field.name for field in dataclasses.fields(ProcessesConfig))

Command = TypeVar("Command", bound=Options)


def main() -> None:
    """Runs `jaxrl_llm COMMAND ...`."""
    name, *words = sys.argv[1:] or ["help"]
    if name in _HELP_WORDS:
        with _exit_on_error():
            print(overview(), flush=True)
    elif name == "--version":
        print(importlib.metadata.version("jaxrl_llm"))
    elif name == "completion":
        with _exit_on_error():
            print(completion.completion_script(words), end="", flush=True)
    elif name in COMMANDS:
        run(name, words)
    else:
        similar = difflib.get_close_matches(name, [*COMMANDS, "completion"], n=1)
        hint = f"did you mean {similar[0]!r}?" if similar else f"known: {', '.join(COMMANDS)}"
        _exit_with_error(f"{name!r} is no command; {hint}")


def run(name: str, words: Sequence[str] | None = None) -> None:
    """Runs a command to its end; `words` are its arguments, by default those of the process."""
    command = COMMANDS.get(name) or LAUNCH_ONLY_COMMANDS[name]
    words = sys.argv[1:] if words is None else words
    with _exit_on_error():
        own, _ = _split(command, words)
        if any(word in _HELP_WORDS[:2] for word in own):
            print(usage(name, command), flush=True)
            return
        options = parse(command, words)
    command_main = importlib.import_module(f"jaxrl_llm.commands.{command.module}").main
    if isinstance(options, JaxOptions):
        from jaxrl_llm import program  # it imports jax

        program.run(lambda: command_main(options), options)
        return
    with _exit_on_error():
        command_main(options)


@contextlib.contextmanager
def _exit_on_error() -> Iterator[None]:
    """Ends the program with the message of a `UserError`; silently if stdout was closed."""
    try:
        yield
    except UserError as error:
        _exit_with_error(str(error))
    except BrokenPipeError:  # as by `head`; flushing the rest at exit would raise it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _exit_with_error(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(EXIT_USER_ERROR)


def parse(command: type[Command], words: Sequence[str]) -> Command:
    """The validated options of a command; raises ConfigError with all problems at once."""
    words, inner = _split(command, words)
    argv = [command.module, *words]
    if errors := config_flags.unknown_overrides(argv):
        raise ConfigError(errors)
    flag_values = flags.FlagValues()
    flag_values.set_gnu_getopt(True)  # also parse flags after a positional argument
    hints = typing.get_type_hints(command)
    fields = {field.name: field for field in dataclasses.fields(command)}
    flag_names = [name for name in fields if name != command.inner]
    for name in flag_names:
        _define(name, hints[name], fields[name], flag_values, argv)
    try:
        arguments = flag_values(argv)[1:]
    except flags.Error as error:
        raise ConfigError(str(error)) from error
    values_by_name: dict[str, Any] = {
        name: flag_values[name].value for name in flag_names if flag_values[name].present
    }
    required = [name for name, f in fields.items() if f.default is dataclasses.MISSING]
    if (
        arguments
        and (positional := command.positional)
        and (positional in values_by_name or positional in required)
    ):
        values_by_name[positional] = [*values_by_name.get(positional, ()), *arguments]
    elif arguments:
        raise ConfigError(
            [config_flags.unknown_flag_message(word, flag_values) for word in arguments]
        )
    if inner:
        values_by_name[command.inner] = inner
    missing = [name for name in required if values_by_name.get(name) in (None, "", [])]
    raise_flag_problems((name, f"required: {fields[name].metadata['help']}") for name in missing)
    for name, value in values_by_name.items():
        if _is_config(hints[name]):
            values_by_name[name] = from_config_dict(value)
        elif isinstance(value, list):
            values_by_name[name] = tuple(value)
    options = command(**values_by_name)
    raise_flag_problems(options.problems())
    return options


def _split(command: type[Options], words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command, and those of the command behind "--" that it runs."""
    if not command.inner or "--" not in words:
        return list(words), []
    end = list(words).index("--")
    return list(words[:end]), list(words[end + 1 :])


def _is_config(hint: Any) -> bool:
    return JobConfig in (hint, *typing.get_args(hint))


def _define(
    name: str, hint: Any, field: Any, flag_values: flags.FlagValues, argv: Sequence[str]
) -> None:
    """Defines the flag of a field; ranges are checked by `Options.problems` later."""
    help_text, default = field.metadata.get("help", ""), field.default
    default = None if default is dataclasses.MISSING else default
    if _is_config(hint):
        config_flags.define(name, flag_values, argv)
    elif typing.get_origin(hint) is tuple:
        flags.DEFINE_multi_string(name, [], help_text, flag_values=flag_values)
    elif typing.get_origin(hint) is Literal:
        flags.DEFINE_enum(name, default, typing.get_args(hint), help_text, flag_values=flag_values)
    else:
        define_functions: dict[Any, Any] = {
            bool: flags.DEFINE_bool,
            int: flags.DEFINE_integer,
            float: flags.DEFINE_float,
            str: flags.DEFINE_string,
        }
        define_functions[hint](name, default, help_text, flag_values=flag_values)


def overview() -> str:
    """The help text of the program."""
    rows = {
        **{name: (command.__doc__ or "").partition("\n")[0] for name, command in COMMANDS.items()},
        "completion": "Prints what makes bash or zsh complete flags and keys.",
    }
    return "\n".join([
        "usage: jaxrl_llm COMMAND [--flag=value ...]", "",
        *(f"  {name:<11} {text}" for name, text in rows.items()), "",
        "jaxrl_llm COMMAND --help lists the flags of a command.",
    ])  # fmt: skip


def usage(name: str, command: type[Options]) -> str:
    """The help text of a command."""
    hidden = {*_PROCESS_FLAGS, command.inner}
    fields = [f for f in dataclasses.fields(command) if f.name not in hidden]
    hints = typing.get_type_hints(command)
    rows = []
    for field in sorted(fields, key=lambda field: field.default is not dataclasses.MISSING):
        default = field.default
        is_flag = hints[field.name] is bool
        left = f"--{field.name}" if is_flag else f"--{field.name}={_value_hint(hints[field.name])}"
        right = field.metadata["help"]
        if default is dataclasses.MISSING:
            right += " Required."
        elif default not in ("", 0, None, ()):
            right += f" Default: {default}."
        rows.append((left, right))
    if any(_is_config(hint) for hint in hints.values()):
        rows.append(("--config.KEY=VALUE", "Changes a setting of the config."))
    if issubclass(command, JaxOptions):
        rows.append(("--start, --coordinator, ...", "Several processes: docs/multihost.md."))
    width = max(len(left) for left, _ in rows) + 2
    description = [line.strip() for line in (command.__doc__ or "").strip().splitlines()]
    return "\n".join([
        f"usage: jaxrl_llm {name} [--flag=value ...]{' -- COMMAND ...' if command.inner else ''}",
        "", *description, "",
        *(f"  {left:<{width}}{right}".rstrip() for left, right in rows),
    ])  # fmt: skip


def _value_hint(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "|".join(filter(None, typing.get_args(hint)))
    if _is_config(hint):
        return "FILE"
    return {int: "N", float: "X"}.get(hint, "TEXT")
