"""Every field of a config, with what it may be."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.config.validation import Range, TextField, field_rules


def listed(cls: Any, path: str = "config") -> Iterator[tuple[str, Any, Range | TextField | None]]:
    """Yields (key, type, what it may be) of every field of a group and of the groups below it.

    Entries of a mapping are called NAME; a choice of `Literal` and a bool declare nothing more.
    """
    rules = {name: rule for name, rule, _ in field_rules(cls)}
    for name, hint in typing.get_type_hints(cls).items():
        where = f"{path}.{name}"
        entries = typing.get_args(hint)[1] if typing.get_origin(hint) is Mapping else None
        if dataclasses.is_dataclass(hint):
            yield from listed(hint, where)
        elif dataclasses.is_dataclass(entries):
            yield from listed(entries, f"{where}.NAME")
        else:
            yield where, hint, rules.get(name)
