"""Streaming datasets: rows of files that need not fit in memory, with a window shuffle.

A piece is a row group of a parquet file, about 8 MB of lines of a JSON lines file, or a slice of
in-memory rows. An epoch visits the pieces in random order, a window of them at a time, and shuffles
the rows within a window. The order depends only on the files and the seed, not on the number of
processes: each reads its share of the pieces of a window, and all get all rows.
"""

import bisect
import copy
import itertools
import logging
import pathlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from pyarrow import parquet

from jaxrl_llm import console
from jaxrl_llm.data import files, row_json
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.files import Row
from jaxrl_llm.sharding import multihost

T = TypeVar("T")
Row_co = TypeVar("Row_co", covariant=True)
U = TypeVar("U")

_WINDOW_BYTES = 64 << 20  # size on disk of the pieces shuffled together
_LINES_BYTES = 8 << 20  # size of a piece of a JSON lines file
_MEMORY_ROWS = 10_000  # rows of a piece of in-memory rows
_LARGE_BYTES = 1 << 30  # larger row groups are reported

logger = logging.getLogger(__name__)


class FileRange(NamedTuple):
    """A contiguous range of rows of a file, read as a unit."""

    path: str
    start: int  # row group, byte offset, or index of an in-memory row
    first: int  # number of its first row or line in the file, from 0
    num_rows: int  # including blank lines
    num_bytes: int


# made(row, where, index): the sequences made of a row, in order; none leaves the row out.
MakeSequences = Callable[[Row, str, int], Sequence[T]]


class StreamedRows(Generic[Row_co]):
    """The rows of files or folders, each processed when it is drawn.

    `make_sequences` turns a row, its origin and its number into sequences, none to leave it out.
    `max_tokens` is their maximum length in tokens; `rule` completes the error if all rows are left
    out.
    """

    def __init__(self, paths: Sequence[str], made: MakeSequences[Row_co], longest: int, rule: str):
        names = list(itertools.chain.from_iterable(map(files.data_files, paths)))
        # Each process scans its part of the files.
        local_pieces = lambda: [list(_pieces(names[i])) for i in multihost.local_rows(len(names))]  # noqa: E731
        with console.show_progress("looking through the files"):
            of_files = itertools.chain.from_iterable(multihost.run_on_all_hosts(local_pieces))
            self.pieces = [FileRange(*piece) for pieces in of_files for piece in pieces]
        self.make_sequences = made
        self.max_tokens = longest
        self.rule = rule

    def __len__(self) -> int:
        return sum(piece.num_rows for piece in self.pieces)

    def map(self, change: Callable[[Row_co], U | None]) -> "StreamedRows[U]":
        """The same rows with `change` applied to each sequence when it is drawn; None drops it."""
        mapped: Any = copy.copy(self)

        def make_changed(row: Row, where: str, index: int) -> tuple[U, ...]:
            changed = map(change, self.make_sequences(row, where, index))
            return tuple(sequence for sequence in changed if sequence is not None)

        mapped.make_sequences = make_changed
        return mapped

    def first(self, count: int) -> list[Row_co]:
        """The sequences of the first `count` rows of the first piece."""
        table, piece = _piece_content(self.pieces[0]), self.pieces[0]
        rows = (self._row(piece, table, i, i) for i in range(min(count, piece.num_rows)))
        return list(itertools.chain.from_iterable(rows))

    def _row(self, piece: FileRange, content: Any, offset: int, index: int) -> tuple[Row_co, ...]:
        where = f"{piece.path}, row {piece.first + offset + 1}"
        row = _FORMATS[_suffix(piece.path)].row(content, offset, where)
        return (
            ()
            if row is None
            else tuple(self.make_sequences(files.as_row(row, where), where, index))
        )


class EpochSource(Generic[T]):
    """Endless epochs over streamed rows as a random-access data source for Grain.

    An entry is (whether this process made the row, its sequences). `windows` is the number of
    windows held in memory at a time: more than one where threads prefetch.
    """

    def __init__(self, rows: StreamedRows[T], seed: int, shuffle: bool, windows: int = 1):
        self._rows = rows
        self._length = len(rows)
        self._seed = seed
        self._shuffle = shuffle
        sizes = [piece.num_rows for piece in rows.pieces]
        self._indices = [0, *itertools.accumulate(sizes)]  # index of the first row of each piece
        self._max_windows = windows
        self._epoch_order: tuple[int, list[list[int]], list[int]] = (-1, [], [])
        self._open_windows: dict[tuple[int, int], _Window] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return sys.maxsize // self._length * self._length

    def __getitem__(self, position: int) -> tuple[bool, tuple[T, ...]]:
        with self._lock:
            window, offset = self._window(position)
            piece, row = window.places[offset]
            is_local = bool(window.in_pass[piece] % jax.process_count() == jax.process_index())
            number = window.pieces[piece]
            piece_info = self._rows.pieces[number]
            if is_local and piece not in window.contents:
                window.contents[piece] = _piece_content(piece_info)
        if not is_local:
            return False, ()
        index = self._indices[number] + int(row)
        return True, self._rows._row(piece_info, window.contents[piece], int(row), index)

    def _window(self, position: int) -> tuple["_Window", int]:
        """The window that holds a position, and the offset in it."""
        epoch, place = divmod(position, self._length)
        if self._epoch_order[0] != epoch:
            pieces = self._rows.pieces
            draw = np.random.default_rng((self._seed, epoch))
            order = draw.permutation(len(pieces)) if self._shuffle else np.arange(len(pieces))
            windows = list(_windows(pieces, order.tolist()))
            counts = (sum(pieces[i].num_rows for i in window) for window in windows)
            self._epoch_order = epoch, windows, [0, *itertools.accumulate(counts)]
        _, windows, ends = self._epoch_order
        index = bisect.bisect_right(ends, place) - 1
        if (epoch, index) not in self._open_windows:
            while len(self._open_windows) >= self._max_windows:
                del self._open_windows[next(iter(self._open_windows))]
            sizes = [self._rows.pieces[i].num_rows for i in windows[index]]
            of_rows = [np.arange(size, dtype=np.int32) for size in sizes]
            of_pieces = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
            places = np.stack([of_pieces, np.concatenate(of_rows)], axis=1)
            if self._shuffle:
                np.random.default_rng((self._seed, epoch, index)).shuffle(places)
            first = sum(len(window) for window in windows[:index])
            in_pass = range(first, first + len(sizes))
            self._open_windows[epoch, index] = _Window(windows[index], in_pass, places, {})
        return self._open_windows[epoch, index], place - ends[index]


class _Window(NamedTuple):
    pieces: list[int]  # numbers of the pieces
    in_pass: range  # ranks of the pieces in the order of the epoch
    places: np.ndarray  # [rows, 2]: piece of the window, row of the piece
    contents: dict[int, Any]  # by index in `pieces`, of those read so far


def gather_rows(take: Callable[[], Iterable[tuple[bool, Any]]]) -> list[Any]:
    """Gathers the sequences of each row of `take()` from all processes.

    A collective: all processes must call it with the same positions; each contributes the rows that
    it made.
    """

    def local_rows() -> str:
        rows = {i: row for i, (is_mine, row) in enumerate(take()) if is_mine}
        return row_json.serialize(rows)

    if jax.process_count() == 1:
        return [row for _, row in take()]
    gathered: dict[int, Any] = {}
    for text in multihost.run_on_all_hosts(local_rows):
        gathered |= row_json.deserialize(text)
    return [gathered[i] for i in range(len(gathered))]


def _windows(pieces: Sequence[FileRange], order: Sequence[int]) -> Iterator[list[int]]:
    """Groups pieces into windows of at most `_WINDOW_BYTES`, or of one larger piece."""
    window: list[int] = []
    num_bytes = 0
    for i in order:
        if window and num_bytes + pieces[i].num_bytes > _WINDOW_BYTES:
            yield window
            window, num_bytes = [], 0
        window.append(i)
        num_bytes += pieces[i].num_bytes
    yield window


def _pieces(path: str) -> Iterator[FileRange]:
    """Yields the pieces of a file; raises DataError if it cannot be streamed or has no rows."""
    pieces = [piece for piece in _FORMATS[_suffix(path)].pieces(path) if piece.num_rows]
    if not pieces:
        raise DataError(f"{path}: no rows in this file; leave it out, or save it again")
    yield from pieces


def _suffix(path: str) -> str:
    if path in files.registered_rows:
        return ""
    suffix = pathlib.Path(path).suffix.lower()
    if not suffix or suffix not in _FORMATS:
        raise DataError(
            f"{path}: data.stream reads .parquet and .jsonl files; write it as one of these, or set"
            " data.stream=False"
        )
    if not pathlib.Path(path).is_file():
        raise DataError(f"{path}: no such file")
    return suffix


def _piece_content(piece: FileRange) -> Any:
    return _FORMATS[_suffix(piece.path)].content(piece)


def _row_groups(path: str) -> Iterator[FileRange]:
    with files.read_errors(path), parquet.ParquetFile(path) as file:
        files.check_column_names(path, file)
        first = 0
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            yield FileRange(path, number, first, group.num_rows, group.total_byte_size)
            first += group.num_rows
            if group.total_byte_size > _LARGE_BYTES:
                logger.warning(
                    "%s: row group %d has %.1f GiB and is read as a whole; write smaller ones"
                    " (row_group_size=100_000)",
                    path,
                    number,
                    group.total_byte_size / 2**30,
                )


def _row_group(piece: FileRange) -> Any:
    with files.read_errors(piece.path), parquet.ParquetFile(piece.path) as file:
        return file.read_row_group(piece.start, use_threads=False)


def _row_of_group(table: Any, offset: int, where: str) -> Row:
    (row,) = files.batch_rows(table.slice(offset, 1), where)
    return row


def _line_ranges(path: str) -> Iterator[FileRange]:
    """Yields byte ranges of a JSON lines file that hold whole lines."""
    with files.read_errors(path), open(path, "rb") as file:
        start = first = 0
        while block := file.read(_LINES_BYTES):
            block += file.readline()
            num_rows = block.count(b"\n") + (not block.endswith(b"\n"))
            if block.strip():
                yield FileRange(path, start, first, num_rows, len(block))
            start, first = start + len(block), first + num_rows


class _Lines(NamedTuple):
    content: bytes
    ends: np.ndarray  # offset of the end of each line


def _lines(piece: FileRange) -> _Lines:
    with files.read_errors(piece.path), open(piece.path, "rb") as file:
        file.seek(piece.start)
        content = file.read(piece.num_bytes)
    ends = np.flatnonzero(np.frombuffer(content, np.uint8) == ord("\n"))
    if len(content) == piece.num_bytes and not content.endswith(b"\n"):
        ends = np.append(ends, len(content))
    if len(ends) != piece.num_rows:
        raise DataError(f"{piece.path}: it was changed while it was read; start the run again")
    return _Lines(content, ends)


def _row_of_line(lines: _Lines, offset: int, where: str) -> Any:
    line = lines.content[lines.ends[offset - 1] + 1 if offset else 0 : lines.ends[offset]]
    return files.parse_line(line, where) if line.strip() else None


def _memory_pieces(name: str) -> Iterator[FileRange]:
    count = len(files.registered_rows[name])
    for start in range(0, count, _MEMORY_ROWS):
        num_rows = min(_MEMORY_ROWS, count - start)
        yield FileRange(name, start, start, num_rows, _WINDOW_BYTES // 8)


def _memory_rows(piece: FileRange) -> Sequence[Any]:
    return files.registered_rows[piece.path][piece.start : piece.start + piece.num_rows]


class _FileFormat(NamedTuple):
    pieces: Callable[[str], Iterator[FileRange]]
    content: Callable[[FileRange], Any]
    row: Callable[[Any, int, str], Any]  # None for a blank line


_FORMATS: Mapping[str, _FileFormat] = {
    ".parquet": _FileFormat(_row_groups, _row_group, _row_of_group),
    ".jsonl": _FileFormat(_line_ranges, _lines, _row_of_line),
    "": _FileFormat(_memory_pieces, _memory_rows, lambda rows, offset, where: rows[offset]),
}
