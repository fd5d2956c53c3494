"""Readers of parquet, JSON, JSON lines and CSV files; the check of prompt rows in verl's schema."""

import bisect
import codecs
import contextlib
import csv
import io
import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow
from pyarrow import parquet

from jaxrl_llm import console
from jaxrl_llm.config.datasets.slices import RowSlice, split_slice
from jaxrl_llm.data.chat.messages import NO_ALIASES, Roles, checked_messages
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.rows.row_files import (
    file_format,
    listed_files,
    open_file,
    open_parquet,
    read_errors,
)
from jaxrl_llm.text import MAX_DEPTH, is_text, text_fault

Row = dict[str, Any]

T = TypeVar("T")

csv.field_size_limit(sys.maxsize)  # a field may be a long text

# Rows passed from Python, keyed by the name that stands for them among the file paths.
registered_rows: dict[str, Sequence[Any]] = {}

_TOKEN = re.compile(
    r'(?P<text>"[^"\\]*(?:\\.[^"\\]*)*")(?P<colon>\s*:)?'
    r"|(?P<opening>[\[{])|(?P<closing>[\]}])|-?(?:NaN|Infinity)|-?\d[\d.eE+-]*"
)


def read_rows(entries: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yields the origin `FILE, row N` and the content of each row, entry after entry.

    An entry is a file, a folder (read recursively, its files sorted by name) or a glob, with a
    slice of its rows if wanted (`rows.jsonl[:90%]`). N counts from 1 and is the line number in a
    JSON lines file, whose blank lines are skipped, but count in a slice.

    Raises:
      DataError: If a file is missing, empty, broken or unsupported, or a line is not an object.
    """
    for entry in entries:
        num_rows = 0
        for path, wanted in data_files(entry):
            with console.show_progress(f"reading {path}"):
                for number, row in _rows_of_file(path, wanted):
                    num_rows += 1
                    where = f"{path}, row {number}"
                    yield where, as_row(row, where)
            if wanted is None and not num_rows:
                raise DataError(f"{path}: no rows in this file; leave it out, or save it again")
            num_rows = 0 if wanted is None else num_rows
        if wanted is not None and not num_rows:
            raise DataError(f"{entry}: all lines of this slice are blank; choose another one")


def data_files(entry: str) -> list[tuple[str, range | None]]:
    """The files of an entry and, if it has a slice, the numbers, from 0, of their rows in it.

    Raises:
      DataError: If there are none, or the slice holds no rows.
    """
    if entry in registered_rows:
        return [(entry, None)]
    address, rows = split_slice(entry)
    paths = listed_files(address)
    if rows is None:
        return [(path, None) for path in paths]
    counts = [_num_rows(path) for path in paths]
    wanted = slice_rows(entry, rows, sum(counts))
    parts: list[tuple[str, range | None]] = []
    first = 0
    for path, count in zip(paths, counts, strict=True):
        if part := overlap(wanted, first, count):
            parts.append((path, part))
        first += count
    return parts


def slice_rows(entry: str, rows: RowSlice, num_rows: int) -> range:
    """The numbers of the rows in a slice of an entry; raises DataError if there are none."""
    if not (wanted := rows.rows(num_rows)):
        raise DataError(f"{entry}: no row of {num_rows} is in this slice; choose another one")
    return wanted


def overlap(wanted: range, first: int, count: int) -> range:
    """The part of `wanted` in `count` rows from number `first` on, numbered from there."""
    return range(max(wanted.start - first, 0), min(wanted.stop - first, count))


def _rows_of_file(path: str, wanted: range | None) -> Iterator[tuple[int, Any]]:
    if path in registered_rows:
        return enumerate(registered_rows[path], start=1)
    return READERS[file_format(path).suffix](path, wanted)


def _num_rows(path: str) -> int:
    """The number of rows of a file; lines of JSON lines, blank ones too."""
    suffix = file_format(path).suffix
    if suffix == ".parquet":
        with read_errors(path), open_parquet(path) as file:
            return int(file.metadata.num_rows)
    if suffix == ".jsonl":
        with read_errors(path), open_file(path) as lines:
            return sum(1 for _ in lines)
    return max((number for number, _ in READERS[suffix](path, None)), default=0)


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
            f"{where}: data_source must be a text that names the row's origin, got {data_source!r};"
            " add it, or set data.data_source"
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


def _json_lines(path: str, wanted: range | None) -> Iterator[tuple[int, Any]]:
    with read_errors(path), open_file(path) as file:
        for number, line in enumerate(_part(file, wanted), start=wanted.start + 1 if wanted else 1):
            if line.strip():
                yield number, parse_line(line, f"{path}, row {number}")


def _part(rows: Iterable[T], wanted: range | None) -> Iterator[T]:
    return itertools.islice(rows, wanted.start, wanted.stop) if wanted else iter(rows)


def parse_line(line: bytes, where: str) -> Any:
    """Parses one line of a JSON lines file; errors begin with `where`."""
    try:
        return _json_value(line)
    except ValueError as error:
        rule = "each line must hold one whole JSON object"
        raise DataError(f"{where}: broken JSON {error}; {rule}") from error


def _json_array(path: str, wanted: range | None) -> Iterator[tuple[int, Any]]:
    """Yields the elements of a JSON array; a file with one object a line is read as JSON lines."""
    with read_errors(path), open_file(path) as file:
        content = file.read()
    if not content.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from _json_lines(path, wanted)
        return
    try:
        rows = _json_value(content)
    except ValueError as error:
        rule = "; the file must hold one array of objects, or an object in each line"
        raise DataError(f"{path}: broken JSON {error}{rule}") from error
    yield from _part(enumerate(rows, start=1), wanted)


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


def _csv(path: str, wanted: range | None) -> Iterator[tuple[int, Any]]:
    """Yields the records below the header, all values as texts; quoted ones may hold line ends."""
    with read_errors(path), open_file(path) as binary:
        records = csv.reader(io.TextIOWrapper(binary, "utf-8-sig", newline=""), strict=True)
        number = 0
        try:
            names = next(records, [])
            if repeated := [name for name, count in Counter(names).items() if count > 1]:
                raise DataError(
                    f"{path}: {names.count(repeated[0])} columns are named {repeated[0]!r}; rename"
                    " or drop them"
                )
            for number, record in _part(enumerate(filter(None, records), start=1), wanted):
                if len(record) != len(names):
                    raise DataError(
                        f"{path}, row {number}: {len(record)} fields for {len(names)} columns;"
                        " quote a field that holds a comma"
                    )
                yield number, dict(zip(names, record, strict=True))
        except (csv.Error, UnicodeDecodeError) as error:
            rule = "save the file as UTF-8, with closed quotes"
            raise DataError(f"{path}, after row {number}: {error}; {rule}") from error


def _parquet(path: str, wanted: range | None) -> Iterator[tuple[int, Any]]:
    with read_errors(path), open_parquet(path) as file:
        check_column_names(path, file)
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        ends = list(itertools.accumulate(sizes))
        wanted = range(sum(sizes)) if wanted is None else wanted
        first = bisect.bisect_right(ends, wanted.start)  # the group of the first row
        number = ends[first] - sizes[first] if wanted else 0
        batches = file.iter_batches(row_groups=range(first, len(sizes)))
        while number < wanted.stop:
            where = f"{path}, after row {number}"
            with read_errors(where):
                batch = next(batches)
            part = range(max(wanted.start - number, 0), min(wanted.stop - number, len(batch)))
            for i, row in enumerate(batch_rows(batch[part.start : part.stop], where), part.start):
                yield number + i + 1, row
            number += len(batch)


def check_column_names(path: str, file: parquet.ParquetFile) -> None:
    """Raises a DataError if two columns of a parquet file have the same name."""
    for name, count in Counter(file.schema_arrow.names).items():
        if count > 1:
            raise DataError(f"{path}: {count} columns are named {name!r}; rename or drop them")


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


Reader = Callable[[str, range | None], Iterator[tuple[int, Any]]]
READERS: Mapping[str, Reader]
READERS = {".csv": _csv, ".json": _json_array, ".jsonl": _json_lines, ".parquet": _parquet}
