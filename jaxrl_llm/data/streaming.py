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
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from jaxrl_llm import console
from jaxrl_llm.config.datasets.slices import split_slice
from jaxrl_llm.data import files
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.files import Row
from jaxrl_llm.data.rows import row_json
from jaxrl_llm.data.rows.row_files import (
    file_format,
    listed_files,
    open_file,
    open_parquet,
    read_errors,
)
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
    wanted: tuple[int, int]  # of these rows, from 0: the first in a slice, and the end

    @property
    def num_wanted(self) -> int:
        """The number of its rows that are in the slice."""
        return self.wanted[1] - self.wanted[0]


def _file_range(path: str, start: int, first: int, num_rows: int, num_bytes: int) -> FileRange:
    """All rows of a range."""
    return FileRange(path, start, first, num_rows, num_bytes, (0, num_rows))


# made(row, where, index): the sequences made of a row, in order; none leaves the row out.
MakeSequences = Callable[[Row, str, int], Sequence[T]]


class StreamedRows(Generic[Row_co]):
    """The rows of files or folders, each processed when it is drawn.

    `make_sequences` turns a row, its origin and its number into sequences, none to leave it out.
    `max_tokens` is their maximum length in tokens; `rule` completes the error if all rows are left
    out.
    """

    def __init__(
        self, entries: Sequence[str], made: MakeSequences[Row_co], longest: int, rule: str
    ):
        paths_of_entries = [_entry_files(entry) for entry in entries]
        paths = list(itertools.chain.from_iterable(paths_of_entries))
        # Each process scans its part of the files.
        local_pieces = lambda: [list(_pieces(paths[i])) for i in multihost.local_rows(len(paths))]  # noqa: E731
        with console.show_progress("looking through the files"):
            gathered = multihost.run_on_all_hosts(local_pieces)
        of_files = iter(
            [FileRange(*fields)._replace(wanted=tuple(fields[-1])) for fields in pieces]
            for pieces in itertools.chain.from_iterable(gathered)
        )
        self.pieces: list[FileRange] = []
        for entry, names in zip(entries, paths_of_entries, strict=True):
            self.pieces += _sliced(entry, [next(of_files) for _ in names])
        self.make_sequences = made
        self.max_tokens = longest
        self.rule = rule

    def __len__(self) -> int:
        return sum(piece.num_wanted for piece in self.pieces)

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
        rows = (self._row(piece, table, i, i) for i in range(min(count, piece.num_wanted)))
        return list(itertools.chain.from_iterable(rows))

    def _row(self, piece: FileRange, content: Any, offset: int, index: int) -> tuple[Row_co, ...]:
        """The sequences of a row by its number in the wanted part of a piece."""
        offset += piece.wanted[0]
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
        sizes = [piece.num_wanted for piece in rows.pieces]
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
            counts = (sum(pieces[i].num_wanted for i in window) for window in windows)
            self._epoch_order = epoch, windows, [0, *itertools.accumulate(counts)]
        _, windows, ends = self._epoch_order
        index = bisect.bisect_right(ends, place) - 1
        if (epoch, index) not in self._open_windows:
            while len(self._open_windows) >= self._max_windows:
                del self._open_windows[next(iter(self._open_windows))]
            sizes = [self._rows.pieces[i].num_wanted for i in windows[index]]
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


def _entry_files(entry: str) -> list[str]:
    """The files of an entry, without its slice."""
    return [entry] if entry in files.registered_rows else listed_files(split_slice(entry)[0])


def _pieces(path: str) -> Iterator[FileRange]:
    """Yields the pieces of a file; raises DataError if it cannot be streamed or has no rows."""
    pieces = [piece for piece in _FORMATS[_suffix(path)].pieces(path) if piece.num_rows]
    if not pieces:
        raise DataError(f"{path}: no rows in this file; leave it out, or save it again")
    yield from pieces


def _sliced(entry: str, of_files: Sequence[Sequence[FileRange]]) -> list[FileRange]:
    """The pieces of the files of an entry, reduced to the rows in its slice."""
    pieces = list(itertools.chain.from_iterable(of_files))
    rows = None if entry in files.registered_rows else split_slice(entry)[1]
    if rows is None:
        return pieces
    selected = files.slice_rows(entry, rows, sum(piece.num_rows for piece in pieces))
    sliced, first = [], 0
    for piece in pieces:
        part = files.overlap(selected, first, piece.num_rows)
        if part:
            sliced.append(piece._replace(wanted=(part.start, part.stop)))
        first += piece.num_rows
    return sliced


def _suffix(path: str) -> str:
    """The key of a path in `_FORMATS`."""
    if path in files.registered_rows:
        return ""
    suffix = file_format(path).suffix
    if suffix not in _FORMATS:
        raise DataError(
            f"{path}: data.stream reads .parquet and .jsonl files; write it as one of these, the"
            " latter also as .gz or .zst, or set data.stream=False"
        )
    return suffix


def _piece_content(piece: FileRange) -> Any:
    return _FORMATS[_suffix(piece.path)].content(piece)


def _row_groups(path: str) -> Iterator[FileRange]:
    with read_errors(path), open_parquet(path) as file:
        files.check_column_names(path, file)
        first = 0
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            yield _file_range(path, number, first, group.num_rows, group.total_byte_size)
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
    with read_errors(piece.path), open_parquet(piece.path) as file:
        return file.read_row_group(piece.start, use_threads=False)


def _row_of_group(table: Any, offset: int, where: str) -> Row:
    (row,) = files.batch_rows(table.slice(offset, 1), where)
    return row


def _line_ranges(path: str) -> list[FileRange]:
    """Byte ranges of a JSON lines file that hold whole lines; none if all lines are blank.

    A range of a compressed file is in its contents, from whose beginning they are read each time,
    so that those are larger.
    """
    codec = file_format(path).codec
    ranges, is_blank = [], True
    with read_errors(path), open_file(path) as file:
        start = first = 0
        while block := file.read(_WINDOW_BYTES if codec else _LINES_BYTES):
            block += file.readline()
            num_rows = block.count(b"\n") + (not block.endswith(b"\n"))
            is_blank = is_blank and not block.strip()
            ranges.append(_file_range(path, start, first, num_rows, len(block)))
            start, first = start + len(block), first + num_rows
    if codec and start > _LARGE_BYTES:
        logger.warning(
            "%s: holds %.1f GiB, of which each part is read from the beginning; write several files"
            " or parquet",
            path,
            start / 2**30,
        )
    return [] if is_blank else ranges


class _Lines(NamedTuple):
    content: bytes
    ends: np.ndarray  # offset of the end of each line


def _lines(piece: FileRange) -> _Lines:
    with read_errors(piece.path), open_file(piece.path) as file:
        if file.seekable():
            file.seek(piece.start)
        else:
            for skipped in range(0, piece.start, _LINES_BYTES):
                file.read(min(_LINES_BYTES, piece.start - skipped))
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
        yield _file_range(name, start, start, num_rows, _WINDOW_BYTES // 8)


def _memory_rows(piece: FileRange) -> Sequence[Any]:
    return files.registered_rows[piece.path][piece.start : piece.start + piece.num_rows]


class _FileFormat(NamedTuple):
    pieces: Callable[[str], Iterable[FileRange]]
    content: Callable[[FileRange], Any]
    row: Callable[[Any, int, str], Any]  # None for a blank line


_FORMATS: Mapping[str, _FileFormat] = {
    ".parquet": _FileFormat(_row_groups, _row_group, _row_of_group),
    ".jsonl": _FileFormat(_line_ranges, _lines, _row_of_line),
    "": _FileFormat(_memory_pieces, _memory_rows, lambda rows, offset, where: rows[offset]),
}
