"""Validation: ranges and kinds of text declared in a field's annotation, and their checks."""

import dataclasses
import functools
import re
import typing
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

from jaxrl_llm.config.datasets.slices import slice_problem
from jaxrl_llm.errors import Problem
from jaxrl_llm.storage.address import AddressError, parse_address

Problems = Iterator[Problem]
Group = TypeVar("Group", bound="ConfigGroup")

_MAX_CHARACTERS = 4096  # the limit of a path on Linux


@dataclasses.dataclass(frozen=True)
class Range:
    """The allowed numbers of a field."""

    # Numbers and intervals, such as "-1 or [1, 8]" or "(0, inf]". NaN is never allowed.
    text: str
    note: str = ""  # meaning of special numbers: "0: off"

    def __str__(self) -> str:
        """The range in words, for messages: "0 or in [1, 8] (0: off)"."""
        words = re.sub(r"[\[(]", r"in \g<0>", self.text)
        return f"{words} ({self.note})" if self.note else words

    @functools.cached_property
    def intervals(self) -> list[tuple[float, float, bool, bool]]:
        """(low, high, low is included, high is included) of each part."""
        intervals = []
        for part in self.text.split(" or "):
            low, _, high = part.strip("[()]").partition(", ")
            intervals.append((float(low), float(high or low), part[0] != "(", part[-1] != ")"))
        return intervals

    def __contains__(self, value: float) -> bool:
        """Whether the number is allowed; exact for integers of any size."""
        return any(
            low < value < high or (value == low and with_low) or (value == high and with_high)
            for low, high, with_low, with_high in self.intervals
        )

    def problems(self, value: float) -> Iterator[str]:
        if value not in self:
            yield f"must be {self}, got {value}"


@dataclasses.dataclass(frozen=True)
class TextField:
    """The kind of a text field: a folder, a file, a function, an address or a name."""

    kind: str = "a text"

    def problems(self, value: str) -> Iterator[str]:
        """Yields problems of a text; whether a path exists is checked where it is read."""
        if len(value) > _MAX_CHARACTERS:
            yield f"must have at most {_MAX_CHARACTERS} characters, got {len(value)}"
        elif "\0" in value:
            yield f"must hold no NUL character, got {value!r}"
        elif any("\ud800" <= character <= "\udfff" for character in value):
            yield f"must be Unicode text, got half of a character (a surrogate) in {value!r}"
        elif value and self == _FUNCTION and ":" not in value:
            yield f"must be 'package.module:function' or 'path/file.py:function', got {value!r}"
        elif value and self == _ADDRESS and not _is_address(value):
            yield f"must begin with http:// or https:// and name a host, got {value!r}"
        elif self == _ROW_FILES and (problem := slice_problem(value)):
            yield f"{value!r}: {problem}"
        elif value and self == _MODEL:
            try:
                parse_address(value, "model")
            except AddressError as error:
                yield str(error)


_FUNCTION = TextField("'package.module:function' or 'path/file.py:function'")
_ADDRESS = TextField("an address, http:// or https://")
_ROW_FILES = TextField("files of rows: a path, a folder or a glob, and a slice if wanted")
_MODEL = TextField("a model: a folder, org/name or another address")
_ANY = TextField()

Folder = Annotated[str, TextField("a folder")]
ModelPath = Annotated[str, _MODEL]
File = Annotated[str, TextField("a file")]
RowFiles = Annotated[str, _ROW_FILES]
Function = Annotated[str, _FUNCTION]
Address = Annotated[str, _ADDRESS]
Name = Annotated[str, TextField("a name")]

# Steps, tokens and sizes are int32 on devices.
INT32_MAX = 2**31 - 1
Tokens = Annotated[int, Range("[1, 1000000000]")]
Count = Annotated[int, Range("[1, 2147483647]")]
Every = Annotated[int, Range("[0, 2147483647]", "0: never")]
Share = Annotated[float, Range("[0, 1]")]
# Float32 overflows at 3.4e38; numbers up to a million may be multiplied a few times.
Coefficient = Annotated[float, Range("[0, 1000000]")]
Real = Annotated[float, Range("[-1000000, 1000000]")]
Bound = Annotated[float, Range("(0, inf]", "inf: off")]


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
class ConfigGroup:
    """Base class of all config groups; every subclass becomes a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def rules(self) -> Problems:
        """Yields contradictions between fields, each of which is valid on its own."""
        return iter(())

    def problems(self) -> Problems:
        """Yields problems of single fields or, if there are none, contradictions between fields."""
        yield from list(self._field_problems()) or self.rules()

    def _field_problems(self) -> Problems:
        cls: Any = type(self)
        for name, rule, is_tuple in field_rules(cls):
            value = getattr(self, name)
            for i, item in enumerate(value if is_tuple else [value]):
                for message in rule.problems(item):
                    yield f"{name}[{i}]" if is_tuple else name, message
        for name, value in vars(self).items():
            for entry, item in value.items() if isinstance(value, Mapping) else ():
                for message in _ANY.problems(entry) if entry else ["an entry needs a name"]:
                    yield name, message
                for message in _ANY.problems(item) if isinstance(item, str) else ():
                    yield f"{name}.{entry}", message


def with_models(group: Group, replace: Callable[[str, str], str], path: str = "config") -> Group:
    """A config group whose model addresses are replaced.

    Args:
      replace: (key, address) -> the new address; called for each that is not "", with keys such as
        "config.rewards.models.judge.path".
    """
    return _with_texts(group, _MODEL, replace, path)


def with_row_files(group: Group, replace: Callable[[str, str], str], path: str = "config") -> Group:
    """A config group whose addresses of files of rows are replaced, as `with_models` does."""
    return _with_texts(group, _ROW_FILES, replace, path)


def _with_texts(group: Any, kind: TextField, replace: Callable[[str, str], str], path: str) -> Any:
    """A config group whose texts of a kind are replaced, in itself and the groups below it."""
    changes: dict[str, Any] = {}
    cls: Any = type(group)
    rules = {name: rule for name, rule, _ in field_rules(cls)}
    for name in (field.name for field in dataclasses.fields(cls)):
        key, value = f"{path}.{name}", getattr(group, name)
        if rules.get(name) == kind and isinstance(value, tuple):
            changes[name] = tuple(replace(f"{key}[{i}]", each) for i, each in enumerate(value))
        elif rules.get(name) == kind and value:
            changes[name] = replace(key, value)
        elif isinstance(value, ConfigGroup):
            changes[name] = _with_texts(value, kind, replace, key)
        elif isinstance(value, Mapping):
            changes[name] = {
                entry: _with_texts(each, kind, replace, f"{key}.{entry}")
                if isinstance(each, ConfigGroup)
                else each
                for entry, each in value.items()
            }
    changed = {name: value for name, value in changes.items() if value != getattr(group, name)}
    replaced: Any = dataclasses.replace
    return replaced(group, **changed) if changed else group


@functools.cache
def field_rules(cls: Any) -> tuple[tuple[str, Range | TextField, bool], ...]:
    """(field, its rule, whether the rule applies to each item) for all text and number fields."""
    rules = []
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        is_tuple = typing.get_origin(hint) is tuple
        item = typing.get_args(hint)[0] if is_tuple else hint
        if typing.get_origin(item) is Annotated:
            rules.append((name, item.__metadata__[0], is_tuple))
        elif item is str:
            rules.append((name, _ANY, is_tuple))
    return tuple(rules)


def _is_address(value: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != -1
    except ValueError:  # a port or a bracket that cannot be read
        return False
