"""Endless seeded streams of rows: of memory, of files piece by piece, and mixtures of them."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import grain

from jaxrl_llm.data.errors import DataError, check_saved
from jaxrl_llm.data.mixtures import Mixed, Shares
from jaxrl_llm.data.streaming import Passes, StreamedRows, agreed

T = TypeVar("T")
Row_co = TypeVar("Row_co", covariant=True)
U = TypeVar("U")


@dataclasses.dataclass(frozen=True)
class MixedRows(Generic[Row_co]):
    """Rows of several sources, of which each has its share."""

    parts: tuple["Sequence[Row_co] | StreamedRows[Row_co]", ...]
    shares: Shares


Rows = Sequence[T] | StreamedRows[T] | MixedRows[T]


def mapped(rows: Rows[T], change: Callable[[T], U]) -> Rows[U]:
    """Returns all sequences changed: those of memory now, streamed ones when asked for."""
    if isinstance(rows, MixedRows):
        parts: Any = tuple(mapped(part, change) for part in rows.parts)
        return MixedRows(parts, rows.shares)
    return rows.map(change) if isinstance(rows, StreamedRows) else [change(row) for row in rows]


def longest(rows: Rows[T], size: Callable[[T], int]) -> int:
    """Returns the largest size of a row; of streamed rows, the largest that they may have."""
    if isinstance(rows, MixedRows):
        return max(longest(part, size) for part in rows.parts)
    return rows.longest if isinstance(rows, StreamedRows) else max(map(size, rows), default=0)


def streamed_parts(rows: Rows[T]) -> list[StreamedRows[T]]:
    """Returns the sources of these rows that are read when they are needed."""
    parts = rows.parts if isinstance(rows, MixedRows) else (rows,)
    return [part for part in parts if isinstance(part, StreamedRows)]


class _Read(NamedTuple):
    """Rows that were read together, of whose sequences some are not taken yet."""

    position: Mapping[str, Any]  # before them
    num_rows: int
    num_taken: int  # sequences


class Stream(Generic[T]):
    """Endless passes over rows, with a position to save and restore.

    A streamed row may give several sequences, which come one after the other. A position inside a
    row is that of the rows that were read with it, and how many of their sequences were taken.

    The seed, in [0, 2**32), alone decides the order of each pass, not how many rows are taken at a
    time nor `num_workers`, the threads that read ahead. No rows are a DataError.
    """

    def __init__(self, rows: Rows[T], seed: int, shuffle: bool = True, num_workers: int = 0):
        self._mixed: Mixed[T] | None = None
        if isinstance(rows, MixedRows):
            streams = [
                Stream(part, (seed + i) % 2**32, shuffle, num_workers)
                for i, part in enumerate(rows.parts)
            ]
            self._mixed = Mixed(streams, rows.shares)
            return
        if not len(rows):
            raise DataError("a stream needs at least one row")
        self._identity = {"num_rows": len(rows), "seed": seed, "shuffle": shuffle}
        self._streamed = rows if isinstance(rows, StreamedRows) else None
        if isinstance(rows, StreamedRows):
            passes = Passes(rows, seed, shuffle, windows=1 + bool(num_workers))
            pipeline = grain.MapDataset.source(passes)
        else:
            pipeline = grain.MapDataset.source(rows).seed(seed)
            pipeline = (pipeline.shuffle() if shuffle else pipeline).repeat()
        options = grain.ReadOptions(num_threads=num_workers, prefetch_buffer_size=2 * num_workers)
        self._rows = iter(pipeline.to_iter_dataset(options))
        self._left: list[T] = []  # sequences of rows that were read, not taken
        self._read = _Read({}, 0, 0)  # those rows; none: all their sequences were taken

    def take(self, count: int) -> tuple[T, ...]:
        """Returns the next `count` rows and moves past them."""
        if self._mixed:
            return self._mixed.take(count)
        if self._streamed:
            return self._agreed(count, self._streamed)
        return tuple(next(self._rows) for _ in range(count))

    def _agreed(self, count: int, rows: StreamedRows[T]) -> tuple[T, ...]:
        """Returns sequences of rows that all processes have read, each its part."""
        if self._read.num_rows and not self._left:  # a restored position inside a row
            self._left = self._sequences(self._read.num_rows)[self._read.num_taken :]
        found: list[T] = []
        since_last = 0
        while True:
            missing = count - len(found)
            taken, self._left = self._left[:missing], self._left[missing:]
            found += taken
            num_taken = self._read.num_taken + len(taken)
            self._read = self._read._replace(num_taken=num_taken) if self._left else _Read({}, 0, 0)
            if len(found) == count:
                return tuple(found)
            missing -= len(taken)
            self._read = _Read(self._rows.get_state(), missing, 0)
            self._left = self._sequences(missing)
            since_last = 0 if self._left else since_last + missing
            if since_last > len(rows):
                raise DataError(f"config.data.train_files: all {len(rows)} rows {rows.rule}")

    def _sequences(self, num_rows: int) -> list[T]:
        """Returns the sequences of the next rows, without those left out."""
        read = functools.partial(itertools.islice, self._rows, num_rows)
        return list(itertools.chain.from_iterable(agreed(read)))

    def get_state(self) -> dict[str, Any]:
        """Returns the position; JSON can hold it."""
        if self._mixed:
            return self._mixed.get_state()
        if not self._read.num_rows:
            return {**self._identity, "position": self._rows.get_state()}
        position, num_rows, num_taken = self._read
        inside = {"num_rows_read": num_rows, "num_taken": num_taken}
        return {**self._identity, "position": position, "inside": inside}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a position that `get_state` returned for the same rows, seed and order."""
        if self._mixed:
            return self._mixed.set_state(state)
        remedy = "the position would be another row; restore the data and the config of the"
        check_saved("data position", state, self._identity, f"{remedy} saved run")
        self._rows.set_state(dict(state["position"]))
        self._left, self._read = [], _Read({}, 0, 0)
        if inside := state.get("inside"):
            self._read = _Read(
                dict(state["position"]), inside["num_rows_read"], inside["num_taken"]
            )
