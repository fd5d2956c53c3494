"""Readers of parquet, JSON and JSON lines files, and the check of prompt rows in verl's schema."""

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
from jaxrl_llm.data.chat.messages import NO_ALIASES, Roles, checked_messages
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.text import MAX_DEPTH, is_text, text_fault

Row = dict[str, Any]

# Rows passed from Python, keyed by the name that stands for them among the file paths.
registered_rows: dict[str, Sequence[Any]] = {}

_TOKEN = re.compile(
    r'(?P<text>"[^"\\]*(?:\\.[^"\\]*)*")(?P<colon>\s*:)?'
    r"|(?P<opening>[\[{])|(?P<closing>[\]}])|-?(?:NaN|Infinity)|-?\d[\d.eE+-]*"
)


def read_rows(paths: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yields the origin `FILE, row N` and the content of each row, file after file.

    N counts from 1 and is the line number in a JSON lines file, whose blank lines are skipped. A
    folder is read recursively, its files sorted by name.

    Raises:
      DataError: If a file is missing, empty, broken or unsupported, or a line is not an object.
    """
    for path in itertools.chain.from_iterable(map(data_files, paths)):
        if path in registered_rows:
            for number, row in enumerate(registered_rows[path], start=1):
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
        with console.show_progress(f"reading {path}"):
            for number, row in READERS[suffix](path):
                where = f"{path}, row {number}"
                yield where, as_row(row, where)
        if not number:
            raise DataError(f"{path}: no rows in this file; leave it out, or save it again")


def as_row(value: Any, where: str) -> Row:
    """Copies a row into a dict; raises DataError, naming `where`, unless it is a mapping."""
    if not isinstance(value, Mapping):
        rule = f"must be a mapping of columns, got {type(value).__name__}"
        raise DataError(f"{where}: {rule}; write it as {{column: value}}")
    if fault := text_fault(value):
        keys, problem = fault
        raise DataError(f"{where}: {'.'.join(keys)} {problem}; correct it, or leave the row out")
    return dict(value)


@contextlib.contextmanager
def in_memory_rows(rows: Mapping[str, Iterable[Mapping[str, Any]]]) -> Iterator[dict[str, str]]:
    """Registers in-memory rows so that they are read like files; yields their names by split.

    A list or tuple is not copied. Any other iterable is read into memory.
    """
    if "train" not in rows or set(rows) - {"train", "eval"}:
        raise DataError(f"rows: the splits are 'train' and, if wanted, 'eval', got {sorted(rows)}")
    names = {split: f"rows of {split}" for split in rows}
    try:
        for split, name in names.items():
            split_rows = rows[split]
            if isinstance(split_rows, (str, bytes)) or not isinstance(split_rows, Iterable):
                rule = "must be an iterable of mappings (dicts)"
                raise DataError(f"{name}: {rule}, got {type(split_rows).__name__}")
            registered_rows[name] = (
                split_rows if isinstance(split_rows, (list, tuple)) else _rows_in_memory(split_rows)
            )
            if not registered_rows[name]:
                raise DataError(f"{name}: no rows; give some, or leave the split out")
        yield names
    finally:
        for name in names.values():
            registered_rows.pop(name, None)


def _rows_in_memory(rows: Iterable[Any]) -> list[Any]:
    """Reads an iterable into a list, without the filler nulls of Hugging Face Datasets."""
    if not hasattr(rows, "features"):
        return list(rows)
    return [
        {name: without_arrow_nulls(value) for name, value in row.items()}
        if isinstance(row, Mapping)
        else row
        for row in rows
    ]


def data_files(path: str) -> list[str]:
    """The supported files under a folder, sorted by name; a single file is returned as is."""
    if path in registered_rows or not pathlib.Path(path).is_dir():
        return [path]
    below = sorted(pathlib.Path(path).rglob("*"))
    paths = [str(each) for each in below if each.suffix.lower() in READERS and each.is_file()]
    if not paths:
        known = ", ".join(sorted(READERS))
        raise DataError(f"{path}: no files with rows in this folder; known: {known}")
    return paths


def checked_row(
    row: Mapping[str, Any], where: str, prompt_column: str = "prompt", roles: Roles = NO_ALIASES
) -> Row:
    """Converts a row to verl's schema with `prompt` as a list of messages.

    A plain text becomes one user message. A missing `reward_model` gives `ground_truth` None, a
    missing `extra_info` an empty one. All other columns, and other keys of `reward_model`, are
    copied into `extra_info` for reward functions: under their own names, or as `row/NAME` if the
    name is taken. `roles` are aliases of roles in the prompt. Errors begin with `where`.
    """
    data_source = row.get("data_source")
    if not is_text(data_source) or not data_source:
        raise DataError(
            f"{where}: data_source must be a text that names the row's origin, got {data_source!r}"
        )
    reward_model = _mapping_column(row, "reward_model", where)
    ground_truth = reward_model.pop("ground_truth", None)
    used = {"data_source", prompt_column, "reward_model", "extra_info", "images"}
    others = {name: row[name] for name in row if name not in used} | {"reward_model": reward_model}
    extra_info = _mapping_column(row, "extra_info", where)
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


def _mapping_column(row: Mapping[str, Any], column: str, where: str) -> dict[str, Any]:
    value = row.get(column)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: {column} must be a mapping, got {type(value).__name__}")
    return dict(value)


def without_arrow_nulls(value: Any) -> Any:
    """Drops the nulls that Arrow fills in for keys that only other rows have.

    A column of structs has one set of keys for all rows, so a null there means "absent". A null in
    JSON was written on purpose and is kept.
    """
    if isinstance(value, Mapping):
        return {key: without_arrow_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_arrow_nulls(each) for each in value]
    return value


def _json_lines(path: str) -> Iterator[tuple[int, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, parse_line(line, f"{path}, row {number}")


def parse_line(line: bytes, where: str) -> Any:
    """Parses one line of a JSON lines file; errors begin with `where`."""
    try:
        return _json_value(line)
    except ValueError as error:
        rule = "each line must hold one whole JSON object"
        raise DataError(f"{where}: broken JSON {error}; {rule}") from error


def _json_array(path: str) -> Iterator[tuple[int, Any]]:
    """Yields the elements of a JSON array; a file with one object a line is read as JSON lines."""
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
    """Parses JSON strictly; the ValueError of bad input has column, reason and remedy.

    Refuses bytes that are not UTF-8 (a byte order mark is skipped), duplicate keys in an object,
    numbers beyond the range of a float, and nesting deeper than `MAX_DEPTH`.
    """
    try:
        text = line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        column = len(line[: error.start].decode(errors="replace")) + 1
        raise ValueError(f"in column {column}: {error.reason}; save the file as UTF-8") from error
    if text.count("{") + text.count("[") > MAX_DEPTH and "deeper" in (fault := _first_fault(text)):
        raise ValueError(fault)
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"in {_position_text(text, error.pos)}: {error.msg}") from error
    except ValueError as error:
        raise ValueError(_first_fault(text)) from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a key twice")
    return mapping


def _finite_float(number: str) -> float:
    if math.isinf(value := float(number)):
        raise ValueError("too large")
    return value


# The hooks above raise a ValueError without a position; `_first_fault` finds it.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_float=_finite_float, parse_constant=int
)


def _position_text(text: str, position: int) -> str:
    """Column of a character for error texts, with its line if that is not the first."""
    column = position - text.rfind("\n", 0, position)
    line = text.count("\n", 0, position) + 1
    return f"line {line}, column {column}" if line > 1 else f"column {column}"


def _first_fault(text: str) -> str:
    """Position, reason and remedy of the first construct that is valid JSON but refused here."""
    open_keys: list[set[str]] = []  # keys of each open bracket
    for token in _TOKEN.finditer(text):
        word, at = token[0], f"in {_position_text(text, token.start())}: "
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
            return f"{at}{word} is not a JSON number; write null or a string"
        elif word.removeprefix("-").isdigit():
            if len(word) > sys.get_int_max_str_digits():
                return f"{at}an integer of {len(word)} digits; write it as a text"
        elif math.isinf(float(word)):
            return f"{at}{word:.40} is more than a float holds; write it as a text"
    return "no JSON"


def _parquet(path: str) -> Iterator[tuple[int, Any]]:
    number = 0
    with read_errors(path), parquet.ParquetFile(path) as file:
        check_column_names(path, file)
        batches = file.iter_batches()
        while True:
            where = f"{path}, after row {number}"
            with read_errors(where):
                if (batch := next(batches, None)) is None:
                    return
            for row in batch_rows(batch, where):
                number += 1
                yield number, row


def check_column_names(path: str, file: parquet.ParquetFile) -> None:
    """Raises a DataError if two columns of a parquet file have the same name."""
    for name, count in collections.Counter(file.schema_arrow.names).items():
        if count > 1:
            raise DataError(f"{path}: {count} columns are named {name!r}; rename or drop them")


@contextlib.contextmanager
def read_errors(where: str) -> Iterator[None]:
    """Converts I/O and Arrow errors to DataErrors that begin with `where`."""
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{where}: cannot be read: {error}; is the file complete? Save it again"
        ) from error


def batch_rows(batch: pyarrow.RecordBatch | pyarrow.Table, where: str) -> list[Row]:
    """Rows of a parquet record batch or table as dicts; errors begin with `where`."""
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns.append([without_arrow_nulls(value) for value in column.to_pylist()])
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
