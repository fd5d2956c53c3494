"""Rows as text, for other processes: JSON, with the values that parquet has and JSON has not."""

import base64
import dataclasses
import datetime
import decimal
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.data.errors import DataError
from jaxrl_llm.types import Example, Pair, Picture, Prompt


class _Kind(NamedTuple):
    """A type, as text and back."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


_KINDS: Mapping[type, _Kind] = {
    bytes: _Kind(lambda b: base64.b64encode(b).decode(), base64.b64decode),
    decimal.Decimal: _Kind(str, decimal.Decimal),
    datetime.datetime: _Kind(datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: _Kind(datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: _Kind(datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.timedelta: _Kind(
        lambda d: [d.days, d.seconds, d.microseconds], lambda parts: datetime.timedelta(*parts)
    ),
    Picture: _Kind(
        lambda p: [p.contents, p.digest, p.grid, p.start],
        lambda parts: Picture(parts[0], parts[1], tuple(parts[2]), parts[3]),
    ),
}
_NAMES = {f"{kind.__name__} of a row": kind for kind in _KINDS}


def written(rows: Mapping[int, Any]) -> str:
    """Returns numbered rows (`Prompt`, `Example`, `Pair`, tuples of them or None) as text.

    Raises:
      DataError: If a prompt holds a value of a type that files of rows cannot have.
    """
    return json.dumps({number: _fields(row) for number, row in rows.items()}, default=_tagged)


def read(text: str) -> dict[int, Any]:
    """Returns the rows of `written`; tuples in what a prompt's row holds become lists."""
    found = json.loads(text, object_hook=_untagged)
    return {int(number): _row(fields) for number, fields in found.items()}


def _fields(row: Any) -> list[Any]:
    if type(row) is tuple:
        return ["tuple", *map(_fields, row)]
    return ["Prompt", *vars(row).values()] if isinstance(row, Prompt) else [
        type(row).__name__, *(row or ())
    ]  # fmt: skip


def _row(fields: list[Any]) -> Any:
    name, *values = fields
    if name == "tuple":
        return tuple(map(_row, values))
    if name == "Prompt":
        names = [field.name for field in dataclasses.fields(Prompt)]
        return Prompt.of(dict(zip(names, values, strict=True)))
    if name == "Pair":
        return Pair(*(Example(*map(tuple, value)) for value in values))
    return Example(*map(tuple, values)) if name == "Example" else None


def _tagged(value: Any) -> dict[str, Any]:
    kind = _KINDS.get(type(value))
    if kind is None:
        raise DataError(
            f"a row holds {value!r:.100} of type {type(value).__name__}, which processes cannot"
            " send each other; store numbers, texts, dates, lists or dicts of them"
        )
    return {f"{type(value).__name__} of a row": kind.write(value)}


def _untagged(found: dict[str, Any]) -> Any:
    name = next(iter(found), "")
    return _KINDS[_NAMES[name]].read(found[name]) if name in _NAMES and len(found) == 1 else found
