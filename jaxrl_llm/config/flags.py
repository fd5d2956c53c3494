"""Config flags: `--config=FILE` and `--config.key=value`, with early checks."""

import dataclasses
import difflib
import os
import re
import runpy
import traceback
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import config_dict as ml_config
from ml_collections import config_flags

from jaxrl_llm.config import starters, yaml_file
from jaxrl_llm.config.bridge import JOBS, default_config_dict, type_description, unknown_field
from jaxrl_llm.config.job import RLConfig
from jaxrl_llm.config.validation import ConfigGroup
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.storage import files


def load(file: str) -> Any:
    """Loads a config file, or a starter config by name.

    A YAML file, which may be in a bucket, gives settings over the defaults; a Python file the
    result of its `get_config`, to which text after a colon is passed. Entries of named groups are
    completed with their defaults, so that the command line can set every field.

    Raises:
      ConfigError: If the file is missing or defines no config; names the line.
    """
    if files.in_bucket(file):
        if not file.endswith(yaml_file.SUFFIXES):
            kinds = ", ".join(yaml_file.SUFFIXES)
            raise ConfigError(f"--config: {file}: in a bucket only {kinds} are read; copy the file")
        values = _over_defaults(yaml_file.read(file))
        _fill_entries(values, _job_class(values))
        return values
    path, *argument = file.split(":", 1)
    if not os.path.isfile(path):  # `isfile` does not raise for impossible names
        starter = starters.find(path)
        if starter is None:
            raise ConfigError(f"--config: {path}: no such file; {starters.hint(path)}")
        path = str(starter)
    if path.endswith(yaml_file.SUFFIXES):
        values = _over_defaults(yaml_file.read(path))
        _fill_entries(values, _job_class(values))
        return values
    try:
        namespace = runpy.run_path(path, run_name="config_file")
        values = namespace["get_config"](*argument) if "get_config" in namespace else None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--config: {_error_with_line(error, path)}; mend the file") from error
    where = f"--config: {path}"
    if "get_config" not in namespace:
        raise ConfigError(f"{where}: has no function get_config(); see configs/grpo_tiny.py")
    if not isinstance(values, (dict, ml_config.ConfigDict)):
        raise ConfigError(f"{where}: get_config() returned {values!r}; return the config")
    _fill_entries(values, _job_class(values))
    return values


def _job_class(values: Any) -> Any:
    job = values.get("job")
    return JOBS.get(job, RLConfig) if isinstance(job, str) else RLConfig


def _over_defaults(settings: Mapping[str, Any]) -> ml_config.ConfigDict:
    """Merges values into the defaults of a job; unknown keys are kept and reported later."""
    job = settings.get("job")
    values = default_config_dict(job if isinstance(job, str) and job in JOBS else "rl")

    def merge(group: ml_config.ConfigDict, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if "." in name:
                top = name.partition(".")[0]
                raise ConfigError(f"--config: {name!r} in the file: nest it, below `{top}:`")
            inner = group.get(name)
            if isinstance(value, dict) and isinstance(inner, ml_config.ConfigDict):
                merge(inner, value)
            else:
                # As in Python files, so that the command line can set lists.
                group[name] = tuple(value) if isinstance(value, list) else value

    with values.unlocked():
        merge(values, settings)
    return values


def _error_with_line(error: BaseException, path: str) -> str:
    """File, line and message of an exception raised by a config file."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename:
        path, lines = error.filename, [error.lineno]
        error = SyntaxError(error.msg)
    line = f", line {lines[-1]}" if lines else ""
    return f"{path}{line}: {type(error).__name__}: {error}"


def _fill_entries(values: Any, cls: Any) -> None:
    """Completes entries of named groups with the defaults of their class."""
    for name, hint in typing.get_type_hints(cls).items():
        group = values.get(name)
        if not isinstance(group, (dict, ml_config.ConfigDict)):
            continue
        if dataclasses.is_dataclass(hint):
            _fill_entries(group, hint)
        elif typing.get_origin(hint) is Mapping:
            kind = typing.get_args(hint)[1]
            for entry in group.values():
                if issubclass(kind, ConfigGroup) and isinstance(entry, ml_config.ConfigDict):
                    with entry.unlocked():
                        entry.update({**vars(kind()), **entry})


class _ConfigFile(flags.ArgumentParser):
    def __init__(self, argv: tuple[str, ...]):
        self._argv = argv

    def parse(self, file: str) -> Any:
        values = load(file)
        _add_overridden_entries(values, self._argv)
        return values.lock() if isinstance(values, ml_config.ConfigDict) else values

    def flag_type(self) -> str:
        return "config object"


def _overridden_keys(argv: Sequence[str]) -> Iterator[list[str]]:
    """The parts of KEY of each `--config.KEY=value`."""
    for argument in argv:
        if override := re.match(r"--?(?:no)?config\.([^=]+)", argument):
            yield override[1].split(".")


def _add_overridden_entries(values: Any, argv: Sequence[str]) -> None:
    """Adds entries that the command line sets to mappings of numbers or texts.

    A flag's type is that of the present value, so an entry that the file does not have is a
    placeholder, and a whole number of the file in a mapping of floats becomes a float.
    """
    for *groups, name in _overridden_keys(argv):
        expected, group = _job_class(values), values
        for part in groups:
            is_group = dataclasses.is_dataclass(expected)
            expected = typing.get_type_hints(expected).get(part) if is_group else None
            group = group.get(part) if isinstance(group, ml_config.ConfigDict) else None
        if _takes_new_entries(expected, group):
            kind = typing.get_args(expected)[1]
            with group.unlocked(), group.ignore_type():
                if group.get(name) is None:
                    group[name] = ml_config.placeholder(kind)
                elif kind is float and type(group[name]) is int:
                    group[name] = float(group[name])


def _takes_new_entries(expected: Any, group: Any) -> bool:
    """Whether the command line can add entries: numbers or texts, not groups of fields."""
    is_mapping = typing.get_origin(expected) is Mapping
    if not is_mapping or not isinstance(group, ml_config.ConfigDict):
        return False
    return not dataclasses.is_dataclass(typing.get_args(expected)[1])


def unknown_overrides(argv: Sequence[str]) -> list[str]:
    """Problems of `--config=FILE` and of the keys in `--config.key=value`."""
    match = re.search(r"^--?config[=\n](.+)$", "\n".join(argv), re.MULTILINE)
    try:
        values = load(match[1]) if match else {}
    except ConfigError as error:
        return list(error.problems)
    cls = _job_class(values)
    return [e for parts in _overridden_keys(argv) for e in _unknown_key(parts, cls, values)]


def _unknown_key(parts: Sequence[str], expected: Any, values: Any) -> Iterator[str]:
    path = "config"
    for part in parts:
        if dataclasses.is_dataclass(expected):
            hints = typing.get_type_hints(expected)
            if part not in hints:
                yield unknown_field(part, hints, path)
                return
            expected = hints[part]
        elif typing.get_origin(expected) is Mapping:
            if part not in values and not _takes_new_entries(expected, values):
                has = f"the config file has no such entry (it has: {', '.join(values) or 'none'})"
                entry = "{...}" if dataclasses.is_dataclass(typing.get_args(expected)[1]) else "..."
                remedy = f"set the whole group, --{path}=\"{{'{part}': {entry}}}\""
                yield f"{path}.{part}: {has}; {remedy}"
                return
            expected = typing.get_args(expected)[1]
        else:
            yield f"{path}.{part}: {path} is {type_description(expected)} and has no fields"
            return
        values = values.get(part, {}) if hasattr(values, "get") else {}
        path = f"{path}.{part}"


def define(name: str, values: flags.FlagValues, argv: Sequence[str]) -> None:
    """Defines the flag of a config and of those of its keys that `argv` sets."""
    config_flags.DEFINE_config_file(name, flag_values=values, sys_argv=list(argv))
    values[name].parser = _ConfigFile(tuple(argv))


def unknown_flag_message(argument: str, known: flags.FlagValues) -> str:
    """Error message for an argument that is not a flag, with the most similar flag."""
    name, equals, value = argument.lstrip("-").partition("=")
    top, dot, key = name.partition(".")
    near = [top] if top in known else difflib.get_close_matches(top, list(known), n=1)
    if not near:
        return f"{argument!r} is no flag; write --flag=value, --help lists the flags"
    return f"{argument!r} is no flag; did you mean --{near[0]}{dot}{key}{equals}{value}?"
