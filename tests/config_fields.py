"""Every field that the configs declare, values for it, and configs of a few changed fields."""

import copy
import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.config.job import JobConfig
from jaxrl_llm.config.validation import Range, TextField, field_rules

_TEXTS = {"'package.module:function' or 'path/file.py:function'": "none.py:f"}
_TEXTS["an address, http:// or https://"] = "http://localhost:1/"


class DeclaredField(NamedTuple):
    """A field that is no group; entries of a mapping of groups are called NAME."""

    key: str  # dotted, from the job's config
    hint: Any
    rule: Range | TextField | None  # a choice of `Literal` and a bool declare nothing more
    default: Any

    def __str__(self) -> str:
        return self.key

    @property
    def is_tuple(self) -> bool:
        return typing.get_origin(self.hint) is tuple

    @property
    def kind(self) -> Any:
        """The type of the value, or of a tuple's items; None for a choice of `Literal`."""
        kind = typing.get_args(self.hint)[0] if self.is_tuple else self.hint
        return kind if isinstance(kind, type) else None


def declared(cls: Any, path: str = "", default: Any = None) -> Iterator[DeclaredField]:
    """The fields of a group and of the groups below it."""
    default = cls() if default is None else default
    rules = {name: rule for name, rule, _ in field_rules(cls)}
    for name, hint in typing.get_type_hints(cls).items():
        entries = typing.get_args(hint)[1] if typing.get_origin(hint) is Mapping else None
        if dataclasses.is_dataclass(hint):
            yield from declared(hint, f"{path}{name}.", getattr(default, name))
        elif dataclasses.is_dataclass(entries):
            yield from declared(entries, f"{path}{name}.NAME.")
        else:
            yield DeclaredField(path + name, hint, rules.get(name), getattr(default, name))


def value_at(config: Any, key: str) -> Any:
    """The value of a dotted key of a config or of nested mappings."""
    return functools.reduce(
        lambda at, name: at[name] if isinstance(at, Mapping) else getattr(at, name),
        key.split("."),
        config,
    )


def other_value(field: DeclaredField, now: Any) -> Any:
    """A value that the field admits beside the present one."""
    if typing.get_origin(field.hint) is Literal:
        candidates: Any = typing.get_args(field.hint)
    elif typing.get_origin(field.hint) is Mapping:
        candidates = [{"NAME": 0.5 if typing.get_args(field.hint)[1] is float else "none"}]
    elif field.kind is bool:
        candidates = [not now]
    elif field.kind is str:
        candidates = [_TEXTS.get(getattr(field.rule, "kind", ""), "none"), "other"]
    else:
        near = [] if field.is_tuple else [now + 1, 2 * now, now - 1]
        candidates = [
            field.kind(value) for value in ([0.5, 0.25] if field.kind is float else []) + near
        ]
        candidates = [value for value in [*candidates, field.kind(3)] if value in field.rule]
    if field.is_tuple:
        candidates = [(candidate,) for candidate in candidates]
    return next(candidate for candidate in candidates if candidate != now)


def nested(settings: Mapping[str, Any], base: Mapping[str, Any] = {}) -> dict[str, Any]:
    """The description of a config as a file has it, from values by dotted key over others."""
    values = copy.deepcopy(dict(base))
    for key, value in settings.items():
        *groups, name = key.split(".")
        group = values
        for part in groups:
            group = group.setdefault(part, {})
        group[name] = copy.deepcopy(value)
    return values


def build(settings: Mapping[str, Any], places: Mapping[str, str] = {}) -> JobConfig:
    """The config of values by dotted key; `places` says what some texts stand for."""

    def placed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(placed, value))
        return places.get(value, value) if isinstance(value, str) else value

    return from_config_dict(nested({key: placed(value) for key, value in settings.items()}))
