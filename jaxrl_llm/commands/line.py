"""The command line: which command, its options, its help. No library of a run is loaded here."""

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
from jaxrl_llm.commands.options import COMMANDS, OTHERS, OfDevices, Options
from jaxrl_llm.config import JobConfig, ProcessesConfig
from jaxrl_llm.config import flags as config_flags
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.errors import EXIT_MENDABLE, ConfigError, UserError, refuse

_HELP = ("-h", "--help", "help")
_OF_PROCESSES = frozenset(field.name for field in dataclasses.fields(ProcessesConfig))

Command = TypeVar("Command", bound=Options)


def main() -> None:
    """Runs `jaxrl_llm COMMAND ...`."""
    name, *words = sys.argv[1:] or ["help"]
    if name in _HELP:
        with _told():
            print(overview(), flush=True)
    elif name == "--version":
        print(importlib.metadata.version("jaxrl_llm"))
    elif name == "completion":
        with _told():
            print(completion.script(words), end="", flush=True)
    elif name in COMMANDS:
        run(name, words)
    else:
        near = difflib.get_close_matches(name, [*COMMANDS, "completion"], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(COMMANDS)}"
        _end(f"{name!r} is no command; {hint}")


def run(name: str, words: Sequence[str] | None = None) -> None:
    """Runs a command with these words, or those of the process, to its end."""
    command = COMMANDS.get(name) or OTHERS[name]
    words = sys.argv[1:] if words is None else words
    with _told():
        if any(word in _HELP[:2] for word in words):
            print(usage(name, command), flush=True)
            return
        options = parse(command, words)
    begin = importlib.import_module(f"jaxrl_llm.commands.{command.module}").main
    if isinstance(options, OfDevices):
        from jaxrl_llm import program  # it imports jax

        program.run(lambda: begin(options), options)
        return
    with _told():
        begin(options)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Ends the program with the message of a `UserError`, and without one if nobody reads on."""
    try:
        yield
    except UserError as error:
        _end(str(error))
    except BrokenPipeError:  # as `head` does; what is left would raise it again at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _end(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(EXIT_MENDABLE)


def parse(command: type[Command], words: Sequence[str]) -> Command:
    """Returns the options of a command, each checked; raises ConfigError with every problem."""
    argv = [command.module, *words]
    if errors := config_flags.unknown_overrides(argv):
        raise ConfigError(errors)
    values = flags.FlagValues()
    values.set_gnu_getopt(True)  # also read flags after an argument that is not a flag
    hints = typing.get_type_hints(command)
    fields = {field.name: field for field in dataclasses.fields(command)}
    for name, field in fields.items():
        _define(name, hints[name], field, values, argv)
    try:
        rest = values(argv)[1:]
    except flags.Error as error:
        raise ConfigError(str(error)) from error
    given: dict[str, Any] = {name: values[name].value for name in fields if values[name].present}
    required = [name for name, f in fields.items() if f.default is dataclasses.MISSING]
    if rest and (more := command.positional) and (more in given or more in required):
        given[more] = [*given.get(more, ()), *rest]
    elif rest:
        raise ConfigError([config_flags.meant(word, values) for word in rest])
    absent = [name for name in required if given.get(name) in (None, "", [])]
    refuse((name, f"required: {fields[name].metadata['help']}") for name in absent)
    for name, value in given.items():
        if _is_config(hints[name]):
            given[name] = from_config_dict(value)
        elif isinstance(value, list):
            given[name] = tuple(value)
    options = command(**given)
    refuse(options.problems())
    return options


def _is_config(hint: Any) -> bool:
    return JobConfig in (hint, *typing.get_args(hint))


def _define(
    name: str, hint: Any, field: Any, values: flags.FlagValues, argv: Sequence[str]
) -> None:
    """Defines the flag of a field; its range is checked with the others."""
    text, default = field.metadata.get("help", ""), field.default
    default = None if default is dataclasses.MISSING else default
    if _is_config(hint):
        config_flags.define(name, values, argv)
    elif typing.get_origin(hint) is tuple:
        flags.DEFINE_multi_string(name, [], text, flag_values=values)
    elif typing.get_origin(hint) is Literal:
        flags.DEFINE_enum(name, default, typing.get_args(hint), text, flag_values=values)
    else:
        kinds: dict[Any, Any] = {
            bool: flags.DEFINE_bool,
            int: flags.DEFINE_integer,
            float: flags.DEFINE_float,
            str: flags.DEFINE_string,
        }
        kinds[hint](name, default, text, flag_values=values)


def overview() -> str:
    """Returns the help of the program."""
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
    """Returns the help of a command."""
    fields = [f for f in dataclasses.fields(command) if f.name not in _OF_PROCESSES]
    hints = typing.get_type_hints(command)
    rows = []
    for field in sorted(fields, key=lambda field: field.default is not dataclasses.MISSING):
        default = field.default
        is_flag = hints[field.name] is bool
        left = f"--{field.name}" if is_flag else f"--{field.name}={_value(hints[field.name])}"
        right = field.metadata["help"]
        if default is dataclasses.MISSING:
            right += " Required."
        elif default not in ("", 0, None, ()):
            right += f" Default: {default}."
        rows.append((left, right))
    if any(_is_config(hint) for hint in hints.values()):
        rows.append(("--config.KEY=VALUE", "Changes a setting of the config."))
    if issubclass(command, OfDevices):
        rows.append(("--start, --coordinator, ...", "Several processes: docs/multihost.md."))
    width = max(len(left) for left, _ in rows) + 2
    about = [line.strip() for line in (command.__doc__ or "").strip().splitlines()]
    return "\n".join([
        f"usage: jaxrl_llm {name} [--flag=value ...]", "", *about, "",
        *(f"  {left:<{width}}{right}".rstrip() for left, right in rows),
    ])  # fmt: skip


def _value(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "|".join(filter(None, typing.get_args(hint)))
    if _is_config(hint):
        return "FILE"
    return {int: "N", float: "X"}.get(hint, "TEXT")
