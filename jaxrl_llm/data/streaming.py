"""Rows of parquet files that need not fit in memory.

A pass takes the row groups in a random order, a window of them at a time, and the rows of a window
in a random order. The order depends on the files and the seed alone, not on the number of
processes: each reads its share of the groups of a window, and all of them get all rows.
"""

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
import pyarrow
from pyarrow import parquet

from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.files import Row, files_in, rows_of, told
from jaxrl_llm.sharding import hosts
from jaxrl_llm.types import Example, Pair

T = TypeVar("T", Example, Pair)

_WINDOW_BYTES = 64 << 20  # of row groups that are shuffled together, as parquet counts them


class _Group(NamedTuple):
    path: str
    number: int  # in its file
    first: int  # row of the file, from 0
    num_rows: int
    num_bytes: int


class StreamedRows(Generic[T]):
    """The rows of parquet files, or folders of them, each made when it is asked for.

    `made` returns what a row and its origin become, None to leave it out. `longest` is the maximum
    tokens of what it returns.
    """

    def __init__(self, paths: Sequence[str], made: Callable[[Row, str], T | None], longest: int):
        self.groups = [
            group for path in paths for file in files_in(path) for group in _groups(file)
        ]
        self.made = made
        self.longest = longest

    def __len__(self) -> int:
        return sum(group.num_rows for group in self.groups)


class Cursor(Generic[T]):
    """Endless passes over streamed rows, at a position that an integer says."""

    def __init__(self, rows: StreamedRows[T], seed: int, shuffle: bool):
        self.position = 0
        self._rows = rows
        self._length = len(rows)
        self._seed = seed
        self._shuffle = shuffle
        self._pass = -1
        self._window = range(0)  # positions of the rows that are open
        self._tables: dict[int, pyarrow.Table] = {}

    def take(self, count: int) -> tuple[T, ...]:
        """Returns the next `count` rows and moves past them, and past what is left out."""
        found: list[T] = []
        since_last = 0
        while len(found) < count:
            positions = range(self.position, self.position + count - len(found))
            new = [row for row in self._made(positions) if row is not None]
            self.position = positions.stop
            since_last = 0 if new else since_last + len(positions)
            if since_last > self._length:
                raise DataError(
                    f"config.data.train_files: all {self._length} rows have more tokens than"
                    f" trainer.max_sequence_tokens={self._rows.longest}, or no answer after"
                    " data.long_rows has cut them; raise it"
                )
            found += new
        return tuple(found)

    def _made(self, positions: range) -> list[T | None]:
        """Returns what the rows at these positions become; every process makes its part of them."""
        index, number = jax.process_index(), jax.process_count()

        def mine() -> list[tuple[int, T | None]]:
            places = ((position, *self._place(position)) for position in positions)
            return [
                (position, self._row(group, offset))
                for position, group, offset in places
                if group % number == index
            ]

        if number == 1:
            return [row for _, row in mine()]
        everyone = itertools.chain.from_iterable(hosts.together(mine))
        return [_restored(row) for _, row in sorted(everyone, key=lambda pair: pair[0])]

    def _place(self, position: int) -> tuple[int, int]:
        """Returns the group (in the order of the pass) and the row in it; opens their window."""
        if position not in self._window:
            self._open(position)
        return self._places[position - self._window.start]

    def _open(self, position: int) -> None:
        groups = self._rows.groups
        if (number := position // self._length) != self._pass:
            self._pass = number
            draw = np.random.default_rng((self._seed, number))
            order = draw.permutation(len(groups)) if self._shuffle else range(len(groups))
            self._groups = [groups[i] for i in order]
            self._windows = list(_windows(self._groups))
        ends = [0, *itertools.accumulate(self._num_rows(window) for window in self._windows)]
        which = bisect.bisect_right(ends, position % self._length) - 1
        window, start = self._windows[which], self._pass * self._length + ends[which]
        sizes = [self._groups[i].num_rows for i in window]
        places = np.stack(
            [
                np.repeat(np.array(window, np.int32), sizes),
                np.concatenate([np.arange(size, dtype=np.int32) for size in sizes]),
            ],
            axis=1,
        )
        if self._shuffle:
            np.random.default_rng((self._seed, number, which)).shuffle(places)
        self._window, self._places = range(start, start + len(places)), places
        self._tables.clear()

    def _num_rows(self, window: range) -> int:
        return sum(self._groups[i].num_rows for i in window)

    def _row(self, group: int, offset: int) -> T | None:
        path, number, first, *_ = self._groups[group]
        if group not in self._tables:
            with told(path), parquet.ParquetFile(path) as file:
                self._tables[group] = file.read_row_group(number, use_threads=False)
        where = f"{path}, row {first + int(offset) + 1}"
        (row,) = rows_of(self._tables[group].slice(offset, 1), where)
        return self._rows.made(row, where)


def _groups(path: str) -> Iterator[_Group]:
    if not path.lower().endswith(".parquet"):
        raise DataError(
            f"{path}: data.stream reads parquet files; write it as one, or switch it off"
        )
    with told(path), parquet.ParquetFile(path) as file:
        first = 0
        for number in range(file.num_row_groups):
            found = file.metadata.row_group(number)
            if found.num_rows:
                yield _Group(path, number, first, found.num_rows, found.total_byte_size)
            first += found.num_rows
    if not first:
        raise DataError(f"{path}: no rows in this file")


def _windows(groups: Sequence[_Group]) -> Iterator[range]:
    """Yields ranges of groups that are open at the same time: one, or more while they are small."""
    start = num_bytes = 0
    for i, group in enumerate(groups):
        if i > start and num_bytes + group.num_bytes > _WINDOW_BYTES:
            yield range(start, i)
            start, num_bytes = i, 0
        num_bytes += group.num_bytes
    yield range(start, len(groups))


def _restored(row: Any) -> Any:
    """Returns an example or a pair that came from another process as lists."""
    if row is None:
        return None
    if row[0] and isinstance(row[0][0], Sequence):
        return Pair(*(_restored(one) for one in row))
    return Example(*map(tuple, row))
