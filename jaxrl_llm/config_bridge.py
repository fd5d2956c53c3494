"""The bridge between config files and the typed `Config`.

`configs/*.py` start from `default_config_dict()`; `launch/` reads the command line
with `parse_flags` and calls `from_config_dict` once. A run's folder keeps its config
in `config.json` (`claim_workdir`), so that it can be resumed only as the same run.
What a field means and what is allowed stands in `config.py`, not here.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import os
import pathlib
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from absl import app
from ml_collections import config_dict as ml_config
from ml_collections.config_flags import config_flags

from jaxrl_llm.config import AlgorithmConfig, Config, ConfigError
from jaxrl_llm.errors import naming
from jaxrl_llm.recipes import RECIPES

# What a resumed run may change: how long it goes on, what is reported and saved, and how the
# work is laid out on the machine. The rest decides which numbers are computed.
RESUMABLE = (
    "trainer.num_steps",
    "trainer.max_tokens_per_microbatch",
    "evaluation",
    "checkpoint",
    "metrics",
    "alerts",
    "profiler",
    "mesh",
    "placement",
    "model.remat",
    "model.attention",
    "rollout.num_slots",
    "rollout.chunk_steps",
    "rollout.speculation",
    "rewards.num_workers",
    "rewards.timeout_s",
    "rewards.memory_gib",
    "rewards.environment",
)

# What a run writes beside its config; never into a folder that had it before.
OUTPUTS = ("checkpoints", "metrics.jsonl", "rollouts", "tensorboard")


def default_config_dict() -> ml_config.ConfigDict:
    """Returns every key of `Config`, for a config file to change.

    Fields of `algorithm` are unset placeholders, because a recipe may set them; all other
    fields hold their defaults. Groups of named entries (`rewards.functions`) are empty and
    take entries as dicts or ConfigDicts.
    """
    return _defaults(Config())


def _defaults(group: Any) -> ml_config.ConfigDict:
    hints = typing.get_type_hints(type(group))
    # A wrong type is no exception in the user's file; `from_config_dict` reports it with the rest.
    values = ml_config.ConfigDict(type_safe=False)
    for name, value in _values(group).items():
        if dataclasses.is_dataclass(value):
            values[name] = _defaults(value)
        elif isinstance(value, Mapping):
            values[name] = ml_config.ConfigDict()
        elif isinstance(group, AlgorithmConfig):
            values[name] = ml_config.placeholder(_runtime_type(hints[name]))
        else:
            values[name] = value
    return values


def _values(group: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass instance by name."""
    return {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}


def _runtime_type(expected: Any) -> type:
    """Returns the class of the values that a scalar or tuple annotation admits."""
    origin = typing.get_origin(expected)
    if origin is Literal:
        return type(typing.get_args(expected)[0])
    return origin or expected


def from_config_dict(values: Mapping[str, Any] | ml_config.ConfigDict) -> Config:
    """Returns the typed, validated config.

    A field that is missing or None takes the value of the recipe named by
    `algorithm.recipe`, then the default of its dataclass; an explicit value wins over both.

    Args:
      values: Nested groups, as a ConfigDict or plain dicts (`to_dict` is undone).

    Raises:
      ConfigError: Listing every problem: unknown fields, wrong types, values outside their
        range, and fields that contradict each other (checked once all groups could be built).
    """
    errors: list[str] = []
    config = _build(Config, values, "config", errors, _class_defaults(Config))
    if errors:
        raise ConfigError(errors)
    return config


_INVALID: Any = object()


def _build(cls: Any, values: Any, path: str, errors: list[str], defaults: Mapping[str, Any]) -> Any:
    """Returns an instance of dataclass `cls`, or `_INVALID` after reporting to `errors`."""
    if not isinstance(values, (Mapping, ml_config.ConfigDict)):
        errors.append(f"{path}: expected a group of {cls.__name__} fields, got {values!r}")
        return _INVALID
    hints = typing.get_type_hints(cls)
    errors.extend(_unknown(name, hints, path) for name in values if name not in hints)
    given = {name: value for name, value in values.items() if value is not None}
    if cls is AlgorithmConfig:
        recipe = given.get("recipe", defaults["recipe"])
        given = {**(RECIPES.get(recipe, {}) if isinstance(recipe, str) else {}), **given}
    fields = {}
    for name, expected in hints.items():
        where = f"{path}.{name}"
        if dataclasses.is_dataclass(expected):
            # Built even when not given: a recipe may say what no default says.
            nested = _values(defaults[name]) if name in defaults else _class_defaults(expected)
            fields[name] = _build(expected, given.get(name, {}), where, errors, nested)
        elif name in given:
            fields[name] = _convert(expected, given[name], where, errors)
        elif name in defaults:
            fields[name] = defaults[name]
        else:
            errors.append(f"{where}: required {_describe(expected)}, not set")
            fields[name] = _INVALID
    if any(value is _INVALID for value in fields.values()):
        return _INVALID
    built = cls(**fields)
    errors.extend(f"{path}.{name}: {message}" for name, message in built.problems())
    return built


def _class_defaults(cls: Any) -> dict[str, Any]:
    """Returns the defaults of a dataclass; fields without one are left out."""
    defaults = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    return defaults


def _convert(expected: Any, value: Any, path: str, errors: list[str]) -> Any:
    """Returns `value` as the annotation `expected` admits it, or `_INVALID`."""
    origin, args = typing.get_origin(expected), typing.get_args(expected)
    if dataclasses.is_dataclass(expected):
        return _build(expected, value, path, errors, _class_defaults(expected))
    if origin is Mapping:
        if isinstance(value, (Mapping, ml_config.ConfigDict)):
            entries = {
                name: _convert(args[1], entry, f"{path}.{name}", errors)
                for name, entry in value.items()
                if entry is not None
            }
            valid = all(entry is not _INVALID for entry in entries.values())
            return types.MappingProxyType(entries) if valid else _INVALID
    elif origin is tuple:
        if isinstance(value, (tuple, list)):
            items = [_convert(args[0], v, f"{path}[{i}]", errors) for i, v in enumerate(value)]
            return _INVALID if any(item is _INVALID for item in items) else tuple(items)
    elif origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in args):
            return value
        errors.append(
            f"{path}: expected one of {', '.join(map(repr, args))},"
            f" got {value!r}{_suggestion(value, args)}"
        )
        return _INVALID
    elif expected is float:
        if type(value) in (int, float):
            return float(value)
        if value in ("inf", "-inf"):  # how `to_dict` writes them; JSON has no infinity
            return float(value)
    elif type(value) is expected:
        return value
    errors.append(f"{path}: expected {_describe(expected)}, got {value!r}")
    return _INVALID


def _unknown(name: str, known: Mapping[str, Any] | Sequence[str], path: str) -> str:
    hint = _suggestion(name, list(known)) or f"; known: {', '.join(known)}"
    return f"{path}.{name}: unknown field{hint}"


def _suggestion(value: Any, known: Sequence[Any]) -> str:
    guess = difflib.get_close_matches(str(value), [str(choice) for choice in known], n=1)
    return f"; did you mean {guess[0]!r}?" if guess else ""


def _describe(expected: Any) -> str:
    origin, args = typing.get_origin(expected), typing.get_args(expected)
    if origin is tuple:
        return f"a tuple of {args[0].__name__}"
    if origin is Mapping:
        return f"named groups of {args[1].__name__} fields"
    return str(expected.__name__)


def unknown_overrides(argv: Sequence[str], name: str = "config") -> list[str]:
    """Returns what is wrong with `--config=FILE` and the keys of `--config.key=value`.

    Args:
      argv: Arguments of the process.
      name: Name of the config flag.
    """
    text = "\n".join(argv)
    match = re.search(rf"^--?{name}[=\n](.+)$", text, re.MULTILINE)
    file = match[1] if match else ""
    if match and not pathlib.Path(file.partition(":")[0]).is_file():
        return [f"--{name}: {file}: no such file"]
    errors: list[str] = []
    for argument in argv:
        if found := re.match(rf"--?(?:no)?{name}\.([^=]+)", argument):
            errors.extend(_unknown_key(found[1].split("."), Config, name, file))
    return errors


def _unknown_key(parts: Sequence[str], expected: Any, path: str, file: str) -> Iterator[str]:
    for part in parts:
        if dataclasses.is_dataclass(expected):
            hints = typing.get_type_hints(expected)
            if part not in hints:
                yield _unknown(part, hints, path)
                return
            expected = hints[part]
        elif typing.get_origin(expected) is Mapping:
            entries: Any = config_flags.ConfigFileFlagParser(name="config").parse(file)
            for parent in path.split(".")[1:]:
                entries = entries[parent]
            if part not in entries:
                yield (
                    f"{path}.{part}: the config file has no such entry (it has:"
                    f" {', '.join(entries) or 'none'}); set the whole group,"
                    f" --{path}=\"{{'{part}': {{...}}}}\""
                )
                return
            expected = typing.get_args(expected)[1]
            if parts[-1] in typing.get_type_hints(expected) and parts[-1] not in entries[part]:
                yield (
                    f"{path}.{part}.{parts[-1]}: the config file leaves it out, and what it leaves"
                    f" out cannot be set here; add it to {part!r} in the config file, or set the"
                    f" whole entry, --{path}=\"{{'{part}': {{...}}}}\""
                )
                return
        else:
            yield f"{path}.{part}: {path} is {_describe(expected)} and has no fields"
            return
        path = f"{path}.{part}"


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Parses flags for `app.run(main, flags_parser=parse_flags)`.

    An unknown `--config.key` ends the program with all such keys named, each with the
    nearest known one, where ml_collections alone would show a KeyError's traceback.
    """
    if errors := unknown_overrides(argv):
        print(f"FATAL {ConfigError(errors)}", file=sys.stderr)
        raise SystemExit(1)
    return app.parse_flags_with_usage(list(argv))


def to_dict(config: Config) -> dict[str, Any]:
    """Returns `config` as plain nested dicts that JSON can hold.

    Tuples become lists, infinities the strings "inf" and "-inf"; `from_config_dict` undoes it.
    """
    return _plain(config)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        value = _values(value)
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    return value


def _leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted path, value) of everything in nested dicts that is not a dict."""
    for name, value in values.items():
        where = f"{path}.{name}" if path else name
        if isinstance(value, Mapping):
            yield from _leaves(value, where)
        else:
            yield where, value


def differences(config: Config, other: Config) -> list[str]:
    """Returns `path: value in config, value in other` of fields that a resume must not change.

    Fields in `RESUMABLE` are left out.
    """
    here, there = dict(_leaves(to_dict(config))), dict(_leaves(to_dict(other)))
    return [
        f"config.{path}: {here.get(path, 'not set')!r} here, {there.get(path, 'not set')!r} there"
        for path in sorted(here.keys() | there.keys())
        if not _resumable(path) and here.get(path) != there.get(path)
    ]


def _resumable(path: str) -> bool:
    return any(path == name or path.startswith(name + ".") for name in RESUMABLE)


def fingerprint(config: Config) -> str:
    """Returns 16 hex digits that two configs share if one may resume the other."""
    decisive = {path: v for path, v in _leaves(to_dict(config)) if not _resumable(path)}
    text = json.dumps(decisive, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def claim_workdir(config: Config, workdir: str | os.PathLike[str], write: bool = True) -> None:
    """Makes `workdir` the folder of this run: `config.json` in it describes the run.

    Args:
      config: The run.
      workdir: Its folder; made if missing.
      write: Whether this process writes the file (one process of a run does).

    Raises:
      ConfigError: If the folder belongs to a run with other settings than may change between
        resumes (`RESUMABLE`), or holds outputs that no run described; names them.
    """
    path = pathlib.Path(workdir) / "config.json"
    if not path.exists() and (found := [n for n in OUTPUTS if (path.parent / n).exists()]):
        raise ConfigError(
            [
                f"{workdir} holds {', '.join(found)} but no config.json, so it is no run that can"
                " go on; use another --workdir"
            ]
        )
    if path.exists() and (changed := differences(config, load_config(workdir))):
        raise ConfigError(
            [
                f"{path} belongs to another run; use another --workdir, or the same settings",
                *changed,
            ]
        )
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            with naming(path):
                partial.write_text(json.dumps(to_dict(config), indent=2, allow_nan=False) + "\n")
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def load_config(workdir: str | os.PathLike[str]) -> Config:
    """Returns the config of the run in folder `workdir`.

    Raises:
      ConfigError: If the folder has no readable `config.json`.
    """
    path = pathlib.Path(workdir) / "config.json"
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError([f"{path}: cannot be read ({error}); is this a run's folder?"]) from error
    return from_config_dict(values)
