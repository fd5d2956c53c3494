"""Rows of parquet, JSON and JSON lines files, and those of prompts in verl's schema, checked."""

import codecs
import collections
import contextlib
import itertools
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow
from pyarrow import parquet

from jaxrl_llm import console
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.messages import NO_ALIASES, Roles, checked_messages
from jaxrl_llm.text import MAX_DEPTH, is_text, text_fault

Row = dict[str, Any]

# Rows that came from Python, by the name that stands for them among the files.
given_rows: dict[str, Sequence[Any]] = {}

_TOKEN = re.compile(
    r'(?P<text>"[^"\\]*(?:\\.[^"\\]*)*")(?P<colon>\s*:)?'
    r"|(?P<opening>[\[{])|(?P<closing>[\]}])|-?(?:NaN|Infinity)|-?\d[\d.eE+-]*"
)


def read_rows(paths: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yields the origin `FILE, row N` and the content of each row, file after file.

    N counts from 1 and is the line number in a JSON lines file, whose blank lines are skipped. Of a
    folder, all files in it and below are read, in the order of their names. A file that is missing,
    empty, broken or unsupported, or a line that is no object, is a DataError.
    """
    for path in itertools.chain.from_iterable(map(files_in, paths)):
        if path in given_rows:
            for number, row in enumerate(given_rows[path], start=1):
                where = f"{path}, row {number}"
                yield where, as_row(row, where)
            continue
        suffix = pathlib.Path(path).suffix.lower()
        if suffix not in READERS:
            known = ", ".join(sorted(READERS))
            raise DataError(f"{path}: unsupported suffix {suffix!r}; known: {known}")
        if not pathlib.Path(path).is_file():
            raise DataError(
                f"{path}: no such file; give a path from {pathlib.Path.cwd()}, or a whole one"
            )
        number = 0
        with console.work(f"reading {path}"):
            for number, row in READERS[suffix](path):
                where = f"{path}, row {number}"
                yield where, as_row(row, where)
        if not number:
            raise DataError(f"{path}: no rows in this file; leave it out, or save it again")


def as_row(value: Any, where: str) -> Row:
    """Returns a row as a dict of its own; a DataError that begins with `where` if it is none."""
    if not isinstance(value, Mapping):
        rule = f"must be a mapping of columns, got {type(value).__name__}"
        raise DataError(f"{where}: {rule}; write it as {{column: value}}")
    if fault := text_fault(value):
        keys, problem = fault
        raise DataError(f"{where}: {'.'.join(keys)} {problem}; correct it, or leave the row out")
    return dict(value)


@contextlib.contextmanager
def given(rows: Mapping[str, Iterable[Mapping[str, Any]]]) -> Iterator[dict[str, str]]:
    """Lets rows of splits be read like files; gives the names that stand for them, by split.

    A list or tuple is not copied. Of another iterable all rows are kept in memory.
    """
    if "train" not in rows or set(rows) - {"train", "eval"}:
        raise DataError(f"rows: the splits are 'train' and, if wanted, 'eval', got {sorted(rows)}")
    names = {split: f"rows of {split}" for split in rows}
    try:
        for split, name in names.items():
            found = rows[split]
            if isinstance(found, (str, bytes)) or not isinstance(found, Iterable):
                rule = "must be an iterable of mappings (dicts)"
                raise DataError(f"{name}: {rule}, got {type(found).__name__}")
            given_rows[name] = found if isinstance(found, (list, tuple)) else _listed(found)
            if not given_rows[name]:
                raise DataError(f"{name}: no rows; give some, or leave the split out")
        yield names
    finally:
        for name in names.values():
            given_rows.pop(name, None)


def _listed(rows: Iterable[Any]) -> list[Any]:
    """The rows of an iterable; those of Hugging Face's Datasets come from Arrow."""
    if not hasattr(rows, "features"):
        return list(rows)
    return [
        {name: without_filling(value) for name, value in row.items()}
        if isinstance(row, Mapping)
        else row
        for row in rows
    ]


def files_in(path: str) -> list[str]:
    """Returns the files of known suffix in a folder and below, by name; of a file, itself."""
    if path in given_rows or not pathlib.Path(path).is_dir():
        return [path]
    below = sorted(pathlib.Path(path).rglob("*"))
    found = [str(each) for each in below if each.suffix.lower() in READERS and each.is_file()]
    if not found:
        known = ", ".join(sorted(READERS))
        raise DataError(f"{path}: no files with rows in this folder; known: {known}")
    return found


def checked_row(
    row: Mapping[str, Any], where: str, prompt_column: str = "prompt", roles: Roles = NO_ALIASES
) -> Row:
    """Returns the row in verl's schema with `prompt` as a list of messages.

    Plain text becomes one message of the user. Without `reward_model` the `ground_truth` is None,
    without `extra_info` that is empty. Other columns and other keys of `reward_model` go to
    `extra_info`, where reward functions see them, under their names, or as `row/NAME` if it already
    has the name. `roles` are aliases of roles in the prompt. Errors begin with `where`.
    """
    data_source = row.get("data_source")
    if not is_text(data_source) or not data_source:
        raise DataError(
            f"{where}: data_source must be a text that names the row's origin, got {data_source!r}"
        )
    reward_model = _mapping(row, "reward_model", where)
    ground_truth = reward_model.pop("ground_truth", None)
    used = {"data_source", prompt_column, "reward_model", "extra_info", "images"}
    others = {name: row[name] for name in row if name not in used} | {"reward_model": reward_model}
    extra_info = _mapping(row, "extra_info", where)
    for name, value in others.items():
        if value is not None and value != {}:
            extra_info[f"row/{name}" if name in extra_info else name] = value
    prompt = checked_messages(row.get(prompt_column), f"{where}: {prompt_column}", roles=roles)
    return {
        "data_source": data_source,
        "prompt": prompt,
        "reward_model": {"ground_truth": ground_truth},
        "extra_info": extra_info,
        **({"images": row["images"]} if row.get("images") is not None else {}),
    }


def _mapping(row: Mapping[str, Any], column: str, where: str) -> dict[str, Any]:
    value = row.get(column)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: {column} must be a mapping, got {type(value).__name__}")
    return dict(value)


def without_filling(value: Any) -> Any:
    """The value without the nulls that Arrow holds for keys that only other rows have.

    Arrow has one set of keys for all rows of a column, so that a null there says nothing. JSON's
    nulls are what somebody wrote, and stay.
    """
    if isinstance(value, Mapping):
        return {key: without_filling(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_filling(each) for each in value]
    return value


def _json_lines(path: str) -> Iterator[tuple[int, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, row_of_line(line, f"{path}, row {number}")


def row_of_line(line: bytes, where: str) -> Any:
    """Returns the value of a line of a JSON lines file; errors begin with `where`."""
    try:
        return _json_value(line)
    except ValueError as error:
        rule = "each line must hold one whole JSON object"
        raise DataError(f"{where}: broken JSON {error}; {rule}") from error


def _json_array(path: str) -> Iterator[tuple[int, Any]]:
    """Yields the elements of the array that a file holds; a file of lines is read as such."""
    with open(path, "rb") as file:
        content = file.read()
    if not content.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from _json_lines(path)
        return
    try:
        rows = _json_value(content)
    except ValueError as error:
        rule = "; the file must hold one array of objects, or an object in each line"
        raise DataError(f"{path}: broken JSON {error}{rule}") from error
    yield from enumerate(rows, start=1)


def _json_value(line: bytes) -> Any:
    """Returns the value of a line; a ValueError has column, reason and remedy.

    Refused are bytes that are not UTF-8 (a byte order mark is skipped), a key twice in one object,
    numbers that no float holds, and brackets deeper than `MAX_DEPTH`.
    """
    try:
        text = line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        column = len(line[: error.start].decode(errors="replace")) + 1
        raise ValueError(f"in column {column}: {error.reason}; save the file as UTF-8") from error
    if text.count("{") + text.count("[") > MAX_DEPTH and "deeper" in (fault := _fault(text)):
        raise ValueError(fault)
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"in {_place(text, error.pos)}: {error.msg}") from error
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


def _place(text: str, position: int) -> str:
    """Returns the column of a character, and its line if that is not the first."""
    column = position - text.rfind("\n", 0, position)
    line = text.count("\n", 0, position) + 1
    return f"line {line}, column {column}" if line > 1 else f"column {column}"


def _fault(text: str) -> str:
    """Returns column, reason and remedy of the first thing that is JSON but refused here."""
    open_keys: list[set[str]] = []  # keys of each open bracket
    for token in _TOKEN.finditer(text):
        word, at = token[0], f"in {_place(text, token.start())}: "
        if token["opening"]:
            open_keys.append(set())
            if len(open_keys) > MAX_DEPTH:
                return f"{at}brackets deeper than {MAX_DEPTH}; write what they hold as a text"
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
    with told(path), parquet.ParquetFile(path) as file:
        check_names(path, file)
        batches = file.iter_batches()
        while True:
            where = f"{path}, after row {number}"
            with told(where):
                if (batch := next(batches, None)) is None:
                    return
            for row in rows_of(batch, where):
                number += 1
                yield number, row


def check_names(path: str, file: parquet.ParquetFile) -> None:
    """Raises a DataError if two columns of a parquet file have the same name."""
    for name, count in collections.Counter(file.schema_arrow.names).items():
        if count > 1:
            raise DataError(f"{path}: {count} columns are named {name!r}; rename or drop them")


@contextlib.contextmanager
def told(where: str) -> Iterator[None]:
    """Makes a DataError that begins with `where` of what reading a file raises."""
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{where}: cannot be read: {error}; is the file complete? Save it again"
        ) from error


def rows_of(batch: pyarrow.RecordBatch | pyarrow.Table, where: str) -> list[Row]:
    """Returns the rows of a part of a parquet file; errors begin with `where`."""
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns.append([without_filling(value) for value in column.to_pylist()])
        except (ValueError, OverflowError) as error:  # text of no UTF-8, times of no datetime
            raise DataError(
                f"{where}, column {name!r} ({column.type}): {error}; write it as another type or"
                " drop the column"
            ) from error
    names = batch.schema.names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


Reader = Callable[[str], Iterator[tuple[int, Any]]]
READERS: Mapping[str, Reader]
READERS = {".json": _json_array, ".jsonl": _json_lines, ".parquet": _parquet}
