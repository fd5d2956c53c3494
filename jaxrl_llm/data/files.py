"""Rows in verl's schema from parquet and JSON lines files, checked when they are read."""

import collections
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import pyarrow
from pyarrow import parquet

from jaxrl_llm import console
from jaxrl_llm.data.errors import DataError

Row = dict[str, Any]

_MAX_DEPTH = 64  # brackets within brackets; Python's limit differs between releases
_TOKEN = re.compile(
    r'(?P<text>"[^"\\]*(?:\\.[^"\\]*)*")(?P<colon>\s*:)?'
    r"|(?P<opening>[\[{])|(?P<closing>[\]}])|-?(?:NaN|Infinity)|-?\d[\d.eE+-]*"
)


def read_rows(paths: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yields the origin `FILE, row N` and the content of each row, file after file.

    N counts from 1 and is the line number in a JSON lines file, whose blank lines are skipped. A
    file that is missing, empty, broken or unsupported, or a line that is no object, is a DataError.
    """
    for path in paths:
        suffix = pathlib.Path(path).suffix.lower()
        if suffix not in READERS:
            known = ", ".join(sorted(READERS))
            raise DataError(f"{path}: unsupported suffix {suffix!r}; known: {known}")
        if not pathlib.Path(path).is_file():
            raise DataError(f"{path}: no such file")
        number = 0
        with console.work(f"reading {path}"):
            for number, row in READERS[suffix](path):
                if not isinstance(row, Mapping):
                    rule = f"must be a mapping of columns, got {type(row).__name__}"
                    raise DataError(f"{path}, row {number}: {rule}")
                yield f"{path}, row {number}", dict(row)
        if not number:
            raise DataError(f"{path}: no rows in this file")


def checked_row(row: Mapping[str, Any], where: str, prompt_column: str = "prompt") -> Row:
    """Returns the row in verl's schema with `prompt` as a list of messages.

    Plain text becomes one message of the user. Without `reward_model` the `ground_truth` is None,
    without `extra_info` that is empty. Other columns and other keys of `reward_model` go to
    `extra_info`, where reward functions see them, under their names, or as `row/NAME` if it already
    has the name. Errors begin with `where`.
    """
    data_source = row.get("data_source")
    if not is_text(data_source) or not data_source:
        raise DataError(
            f"{where}: data_source must be a text that names the row's origin, got {data_source!r}"
        )
    reward_model = _mapping(row, "reward_model", where)
    ground_truth = reward_model.pop("ground_truth", None)
    used = {"data_source", prompt_column, "reward_model", "extra_info"}
    others = {name: row[name] for name in row if name not in used} | {"reward_model": reward_model}
    extra_info = _mapping(row, "extra_info", where)
    for name, value in others.items():
        if value is not None and value != {}:
            extra_info[f"row/{name}" if name in extra_info else name] = value
    return {
        "data_source": data_source,
        "prompt": _messages(row.get(prompt_column), f"{where}: {prompt_column}"),
        "reward_model": {"ground_truth": ground_truth},
        "extra_info": extra_info,
    }


def is_text(value: Any) -> TypeGuard[str]:
    """Returns whether `value` is a string that UTF-8 can hold: JSON can hold half a character."""
    if not isinstance(value, str):
        return False
    return value.isascii() or value.encode("utf-8", "ignore").decode() == value


def _mapping(row: Mapping[str, Any], column: str, where: str) -> dict[str, Any]:
    value = row.get(column)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: {column} must be a mapping, got {type(value).__name__}")
    return dict(value)


def _messages(prompt: Any, where: str) -> list[dict[str, Any]]:
    rule = "must be a list of {role, content} messages or one text"
    if prompt is None:
        raise DataError(f"{where} is missing; it {rule}")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise DataError(f"{where} {rule}, got {type(prompt).__name__}")
    messages = []
    for number, message in enumerate(prompt, start=1):
        if not isinstance(message, Mapping):
            raise DataError(f"{where} {rule}, message {number} is {type(message).__name__}")
        for key in ("role", "content"):
            if not is_text(message.get(key)):
                raise DataError(
                    f"{where} {rule}, {key} of message {number} must be a text,"
                    f" got {message.get(key)!r:.60}"
                )
        # A template may read more (`tool_calls`, `name`); parquet holds null for what is missing.
        messages.append({key: value for key, value in message.items() if value is not None})
    if not any(message["content"].strip() for message in messages):
        raise DataError(f"{where} is empty")
    return messages


def _json_lines(path: str) -> Iterator[tuple[int, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield number, _json_value(line)
                except ValueError as error:
                    raise DataError(f"{path}, row {number}: broken JSON {error}") from error


def _json_value(line: bytes) -> Any:
    """Returns the value of a line; a ValueError has column, reason and remedy.

    Refused are bytes that are not UTF-8 (a byte order mark is skipped), a key twice in one object,
    numbers that no float holds, and brackets deeper than `_MAX_DEPTH`.
    """
    try:
        text = line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        column = len(line[: error.start].decode(errors="replace")) + 1
        raise ValueError(f"in column {column}: {error.reason}; save the file as UTF-8") from error
    if text.count("{") + text.count("[") > _MAX_DEPTH and "deeper" in (fault := _fault(text)):
        raise ValueError(fault)
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        rule = "each line must hold one whole JSON object"
        raise ValueError(f"in column {error.colno}: {error.msg}; {rule}") from error
    except ValueError as error:
        raise ValueError(_fault(text)) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key twice")
    return found


def _float(number: str) -> float:
    if math.isinf(value := float(number)):
        raise ValueError("too large")
    return value


# Its own functions raise a ValueError without a column; `_fault` finds the column.
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=int)


def _fault(text: str) -> str:
    """Returns column, reason and remedy of the first thing that is JSON but refused here."""
    open_keys: list[set[str]] = []  # keys of each open bracket
    for token in _TOKEN.finditer(text):
        word, at = token[0], f"in column {token.start() + 1}: "
        if token["opening"]:
            open_keys.append(set())
            if len(open_keys) > _MAX_DEPTH:
                return f"{at}brackets deeper than {_MAX_DEPTH}; write what they hold as a text"
        elif token["closing"]:
            open_keys = open_keys[:-1]
        elif token["colon"] and open_keys:
            if (key := json.loads(token["text"], strict=False)) in open_keys[-1]:
                return f"{at}the key {key!r:.60} a second time in one object; keep one of them"
            open_keys[-1].add(key)
        elif token["text"]:
            continue
        elif word.endswith(("NaN", "Infinity")):
            return f"{at}{word} is no number of JSON; write null or a text"
        elif word.removeprefix("-").isdigit():
            if len(word) > sys.get_int_max_str_digits():
                return f"{at}an integer of {len(word)} digits; write it as a text"
        elif math.isinf(float(word)):
            return f"{at}{word:.40} is more than a float holds; write it as a text"
    return "no JSON"


def _parquet(path: str) -> Iterator[tuple[int, Any]]:
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for name, count in collections.Counter(file.schema_arrow.names).items():
                if count > 1:
                    message = f"{count} columns are named {name!r}; rename or drop them"
                    raise DataError(f"{path}: {message}")
            for batch in file.iter_batches():
                for row in _rows(batch, f"{path}, after row {number}"):
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: cannot be read as parquet after row {number}: {error}; is it complete?"
        ) from error


def _rows(batch: pyarrow.RecordBatch, where: str) -> list[Row]:
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns.append(column.to_pylist())
        except (ValueError, OverflowError) as error:  # text of no UTF-8, times of no datetime
            raise DataError(
                f"{where}, column {name!r} ({column.type}): {error}; write it as another type or"
                " drop the column"
            ) from error
    names = batch.schema.names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


Reader = Callable[[str], Iterator[tuple[int, Any]]]
READERS: Mapping[str, Reader] = {".jsonl": _json_lines, ".parquet": _parquet}
