"""Rows in verl's schema from parquet and JSON lines files, checked when they are read."""

import collections
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import pyarrow
from pyarrow import parquet

from jaxrl_llm.console import screen
from jaxrl_llm.data import json_line
from jaxrl_llm.data.errors import DataError

Row = dict[str, Any]


def read_rows(paths: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yields the origin and the content of each row, file after file.

    The origin is `FILE, row N`; N counts from 1 and is the line number in a JSON lines file, whose
    blank lines are skipped.

    Raises:
      DataError: A file is missing, empty, broken or unsupported, or a line is no JSON object.
    """
    for path in paths:
        suffix = pathlib.Path(path).suffix.lower()
        if suffix not in READERS:
            raise DataError(
                f"{path}: unsupported suffix {suffix!r}; known: {', '.join(sorted(READERS))}"
            )
        if not pathlib.Path(path).is_file():
            raise DataError(f"{path}: no such file")
        empty = True
        with screen.work(f"reading {path}"):
            for number, row in READERS[suffix](path):
                empty = False
                if not isinstance(row, Mapping):
                    rule = f"must be a mapping of columns, got {type(row).__name__}"
                    raise DataError(f"{path}, row {number}: {rule}")
                yield f"{path}, row {number}", dict(row)
        if empty:
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
    """Returns whether `value` is a string without half a surrogate pair, which JSON can hold."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


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
            if not line.strip():
                continue
            try:
                yield number, json_line.parse(line)
            except ValueError as error:
                raise DataError(f"{path}, row {number}: broken JSON {error}") from error


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


READERS: Mapping[str, Callable[[str], Iterator[tuple[int, Any]]]] = {
    ".jsonl": _json_lines,
    ".parquet": _parquet,
}
