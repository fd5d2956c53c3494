"""Serialization of rows for other processes: JSON, with tags for types that only parquet has."""

import base64
import dataclasses
import datetime
import decimal
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.data.errors import DataError
from jaxrl_llm.types import Example, PreferencePair, Prompt, PromptImage


class _Codec(NamedTuple):
    """Conversion of a type to a JSON value and back."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


_CODECS: Mapping[type, _Codec] = {
    bytes: _Codec(lambda b: base64.b64encode(b).decode(), base64.b64decode),
    decimal.Decimal: _Codec(str, decimal.Decimal),
    datetime.datetime: _Codec(datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: _Codec(datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: _Codec(datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.timedelta: _Codec(
        lambda d: [d.days, d.seconds, d.microseconds], lambda parts: datetime.timedelta(*parts)
    ),
    PromptImage: _Codec(
        lambda p: [p.contents, p.digest, p.grid, p.start],
        lambda parts: PromptImage(parts[0], parts[1], tuple(parts[2]), parts[3]),
    ),
}
_NAMES = {f"{kind.__name__} of a row": kind for kind in _CODECS}


def serialize(rows: Mapping[int, Any]) -> str:
    """Serializes numbered rows (`Prompt`, `Example`, `PreferencePair`, tuples of them or None).

    Raises:
      DataError: If a prompt holds a value of a type that row files cannot have.
    """
    return json.dumps(
        {number: _fields(row) for number, row in rows.items()}, default=_with_type_tag
    )


def deserialize(text: str) -> dict[int, Any]:
    """Parses the text of `serialize`; tuples inside a prompt's extra fields become lists."""
    rows = json.loads(text, object_hook=_from_type_tag)
    return {int(number): _row(fields) for number, fields in rows.items()}


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
        return Prompt.from_fields(dict(zip(names, values, strict=True)))
    if name == "PreferencePair":
        return PreferencePair(*(_example(*value) for value in values))
    return _example(*values) if name == "Example" else None


def _example(tokens: Any, mask: Any, images: Any, desirable: bool) -> Example:
    return Example(tuple(tokens), tuple(mask), tuple(images), desirable)


def _with_type_tag(value: Any) -> dict[str, Any]:
    codec = _CODECS.get(type(value))
    if codec is None:
        raise DataError(
            f"a row holds {value!r:.100} of type {type(value).__name__}, which processes cannot"
            " send each other; store numbers, texts, dates, lists or dicts of them"
        )
    return {f"{type(value).__name__} of a row": codec.write(value)}


def _from_type_tag(value: dict[str, Any]) -> Any:
    name = next(iter(value), "")
    return _CODECS[_NAMES[name]].read(value[name]) if name in _NAMES and len(value) == 1 else value
