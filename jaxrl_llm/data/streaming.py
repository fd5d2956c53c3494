"""Rows of files that need not fit in memory, read piece by piece.

A piece is a row group of a parquet file, about 8 MB of lines of a JSON lines file, or some of the
rows that came from Python. A pass takes the pieces in a random order, a window of them at a time,
and the rows of a window in a random order. The order depends on the files and the seed alone, not
on the number of processes: each reads its share of the pieces of a window, and all get all rows.
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
from jaxrl_llm.data import files, rows_as_text
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.files import Row
from jaxrl_llm.sharding import hosts

T = TypeVar("T")
Row_co = TypeVar("Row_co", covariant=True)
U = TypeVar("U")

_WINDOW_BYTES = 64 << 20  # of pieces that are shuffled together, as they lie in the files
_LINES_BYTES = 8 << 20  # of a piece of a JSON lines file
_GIVEN_ROWS = 10_000  # of a piece of rows from Python
_LARGE_BYTES = 1 << 30  # a row group that is larger is reported

logger = logging.getLogger(__name__)


class Piece(NamedTuple):
    """Some rows of a file, side by side."""

    path: str
    start: int  # row group, byte, or row from Python
    first: int  # row of the file, or line, from 0
    num_rows: int  # blank lines count
    num_bytes: int


# made(row, where, index): the sequences that a row gives, in order; none leaves the row out.
Made = Callable[[Row, str, int], Sequence[T]]


class StreamedRows(Generic[Row_co]):
    """The rows of files, or folders of them, each made when it is asked for.

    `made` returns the sequences that a row, its origin and its number become, none to leave it out.
    `longest` is the maximum tokens of one, and `rule` says why rows are left out.
    """

    def __init__(self, paths: Sequence[str], made: Made[Row_co], longest: int, rule: str):
        names = list(itertools.chain.from_iterable(map(files.files_in, paths)))
        # Each process looks at its part of the files.
        mine = lambda: [list(_pieces(names[i])) for i in hosts.own_part(len(names))]  # noqa: E731
        with console.work("looking through the files"):
            of_files = itertools.chain.from_iterable(hosts.together(mine))
            self.pieces = [Piece(*piece) for pieces in of_files for piece in pieces]
        self.made = made
        self.longest = longest
        self.rule = rule

    def __len__(self) -> int:
        return sum(piece.num_rows for piece in self.pieces)

    def map(self, change: Callable[[Row_co], U | None]) -> "StreamedRows[U]":
        """Returns the same rows, each sequence changed when it is asked for; None leaves it out."""
        found: Any = copy.copy(self)

        def made(row: Row, where: str, index: int) -> tuple[U, ...]:
            changed = map(change, self.made(row, where, index))
            return tuple(sequence for sequence in changed if sequence is not None)

        found.made = made
        return found

    def first(self, count: int) -> list[Row_co]:
        """Returns the sequences of the first rows of the first piece, in order."""
        table, piece = _read(self.pieces[0]), self.pieces[0]
        rows = (self._row(piece, table, i, i) for i in range(min(count, piece.num_rows)))
        return list(itertools.chain.from_iterable(rows))

    def _row(self, piece: Piece, content: Any, offset: int, index: int) -> tuple[Row_co, ...]:
        where = f"{piece.path}, row {piece.first + offset + 1}"
        row = _READERS[_kind(piece.path)].row(content, offset, where)
        return () if row is None else tuple(self.made(files.as_row(row, where), where, index))


class Passes(Generic[T]):
    """Endless passes over streamed rows, by position: a random-access source for Grain.

    An entry is whether this process made the row, and its sequences; none was left out. `windows`
    are held in memory at the same time: more than one where threads read ahead.
    """

    def __init__(self, rows: StreamedRows[T], seed: int, shuffle: bool, windows: int = 1):
        self._rows = rows
        self._length = len(rows)
        self._seed = seed
        self._shuffle = shuffle
        sizes = [piece.num_rows for piece in rows.pieces]
        self._indices = [0, *itertools.accumulate(sizes)]  # of the first row of each piece
        self._most = windows
        self._order: tuple[int, list[list[int]], list[int]] = (-1, [], [])
        self._open: dict[tuple[int, int], _Window] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return sys.maxsize // self._length * self._length

    def __getitem__(self, position: int) -> tuple[bool, tuple[T, ...]]:
        with self._lock:
            window, offset = self._window(position)
            piece, row = window.places[offset]
            mine = bool(window.in_pass[piece] % jax.process_count() == jax.process_index())
            number = window.pieces[piece]
            found = self._rows.pieces[number]
            if mine and piece not in window.contents:
                window.contents[piece] = _read(found)
        if not mine:
            return False, ()
        index = self._indices[number] + int(row)
        return True, self._rows._row(found, window.contents[piece], int(row), index)

    def _window(self, position: int) -> tuple["_Window", int]:
        """Returns the window of a position, and where in it that is."""
        number, place = divmod(position, self._length)
        if self._order[0] != number:
            pieces = self._rows.pieces
            draw = np.random.default_rng((self._seed, number))
            order = draw.permutation(len(pieces)) if self._shuffle else np.arange(len(pieces))
            windows = list(_windows(pieces, order.tolist()))
            counts = (sum(pieces[i].num_rows for i in window) for window in windows)
            self._order = number, windows, [0, *itertools.accumulate(counts)]
        _, windows, ends = self._order
        which = bisect.bisect_right(ends, place) - 1
        if (number, which) not in self._open:
            while len(self._open) >= self._most:
                del self._open[next(iter(self._open))]
            sizes = [self._rows.pieces[i].num_rows for i in windows[which]]
            of_rows = [np.arange(size, dtype=np.int32) for size in sizes]
            of_pieces = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
            places = np.stack([of_pieces, np.concatenate(of_rows)], axis=1)
            if self._shuffle:
                np.random.default_rng((self._seed, number, which)).shuffle(places)
            first = sum(len(window) for window in windows[:which])
            in_pass = range(first, first + len(sizes))
            self._open[number, which] = _Window(windows[which], in_pass, places, {})
        return self._open[number, which], place - ends[which]


class _Window(NamedTuple):
    pieces: list[int]  # their numbers
    in_pass: range  # their places in the order of the pass
    places: np.ndarray  # [rows, 2]: piece of the window, row of the piece
    contents: dict[int, Any]  # of the pieces that were read


def agreed(take: Callable[[], Iterable[tuple[bool, Any]]]) -> list[Any]:
    """Returns the sequences of each row of the entries that `take` gives.

    All processes must call it, with the same positions; each gives the rows that it made.
    """

    def mine() -> str:
        made = {i: row for i, (is_mine, row) in enumerate(take()) if is_mine}
        return rows_as_text.written(made)

    if jax.process_count() == 1:
        return [row for _, row in take()]
    found: dict[int, Any] = {}
    for text in hosts.together(mine):
        found |= rows_as_text.read(text)
    return [found[i] for i in range(len(found))]


def _windows(pieces: Sequence[Piece], order: Sequence[int]) -> Iterator[list[int]]:
    """Yields the pieces that are open at the same time: one, or more while they are small."""
    window: list[int] = []
    num_bytes = 0
    for i in order:
        if window and num_bytes + pieces[i].num_bytes > _WINDOW_BYTES:
            yield window
            window, num_bytes = [], 0
        window.append(i)
        num_bytes += pieces[i].num_bytes
    yield window


def _pieces(path: str) -> Iterator[Piece]:
    """Yields the pieces of a file; a DataError if it cannot be read in pieces or has no row."""
    found = [piece for piece in _READERS[_kind(path)].pieces(path) if piece.num_rows]
    if not found:
        raise DataError(f"{path}: no rows in this file; leave it out, or save it again")
    yield from found


def _kind(path: str) -> str:
    if path in files.given_rows:
        return ""
    suffix = pathlib.Path(path).suffix.lower()
    if not suffix or suffix not in _READERS:
        raise DataError(
            f"{path}: data.stream reads .parquet and .jsonl files; write it as one of these, or set"
            " data.stream=False"
        )
    if not pathlib.Path(path).is_file():
        raise DataError(f"{path}: no such file")
    return suffix


def _read(piece: Piece) -> Any:
    return _READERS[_kind(piece.path)].content(piece)


def _row_groups(path: str) -> Iterator[Piece]:
    with files.told(path), parquet.ParquetFile(path) as file:
        files.check_names(path, file)
        first = 0
        for number in range(file.num_row_groups):
            found = file.metadata.row_group(number)
            yield Piece(path, number, first, found.num_rows, found.total_byte_size)
            first += found.num_rows
            if found.total_byte_size > _LARGE_BYTES:
                logger.warning(
                    "%s: row group %d has %.1f GiB and is read as a whole; write smaller ones"
                    " (row_group_size=100_000)",
                    path,
                    number,
                    found.total_byte_size / 2**30,
                )


def _row_group(piece: Piece) -> Any:
    with files.told(piece.path), parquet.ParquetFile(piece.path) as file:
        return file.read_row_group(piece.start, use_threads=False)


def _row_of_group(table: Any, offset: int, where: str) -> Row:
    (row,) = files.rows_of(table.slice(offset, 1), where)
    return row


def _line_ranges(path: str) -> Iterator[Piece]:
    """Yields parts of a JSON lines file that begin and end with whole lines."""
    with files.told(path), open(path, "rb") as file:
        start = first = 0
        while block := file.read(_LINES_BYTES):
            block += file.readline()
            num_rows = block.count(b"\n") + (not block.endswith(b"\n"))
            if block.strip():
                yield Piece(path, start, first, num_rows, len(block))
            start, first = start + len(block), first + num_rows


class _Lines(NamedTuple):
    content: bytes
    ends: np.ndarray  # of the lines, one after the other


def _lines(piece: Piece) -> _Lines:
    with files.told(piece.path), open(piece.path, "rb") as file:
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
    return files.row_of_line(line, where) if line.strip() else None


def _given_parts(name: str) -> Iterator[Piece]:
    count = len(files.given_rows[name])
    for start in range(0, count, _GIVEN_ROWS):
        num_rows = min(_GIVEN_ROWS, count - start)
        yield Piece(name, start, start, num_rows, _WINDOW_BYTES // 8)


def _given_part(piece: Piece) -> Sequence[Any]:
    return files.given_rows[piece.path][piece.start : piece.start + piece.num_rows]


class _Reader(NamedTuple):
    pieces: Callable[[str], Iterator[Piece]]
    content: Callable[[Piece], Any]
    row: Callable[[Any, int, str], Any]  # None for a blank line


_READERS: Mapping[str, _Reader] = {
    ".parquet": _Reader(_row_groups, _row_group, _row_of_group),
    ".jsonl": _Reader(_line_ranges, _lines, _row_of_line),
    "": _Reader(_given_parts, _given_part, lambda rows, offset, where: rows[offset]),
}
