"""Endless seeded iterators of rows: in memory, streamed from files, and mixtures of them."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import grain

from jaxrl_llm.data.errors import DataError, check_saved
from jaxrl_llm.data.mixtures import MixedIterator, MixtureSchedule
from jaxrl_llm.data.streaming import EpochSource, StreamedRows, gather_rows

T = TypeVar("T")
Row_co = TypeVar("Row_co", covariant=True)
U = TypeVar("U")


@dataclasses.dataclass(frozen=True)
class MixedRows(Generic[Row_co]):
    """Rows of several sources with the share of each."""

    parts: tuple["Sequence[Row_co] | StreamedRows[Row_co]", ...]
    shares: MixtureSchedule


Rows = Sequence[T] | StreamedRows[T] | MixedRows[T]


def map_rows(rows: Rows[T], change: Callable[[T], U]) -> Rows[U]:
    """Applies `change` to all sequences: to those in memory now, to streamed ones when drawn."""
    if isinstance(rows, MixedRows):
        parts: Any = tuple(map_rows(part, change) for part in rows.parts)
        return MixedRows(parts, rows.shares)
    return rows.map(change) if isinstance(rows, StreamedRows) else [change(row) for row in rows]


def max_size(rows: Rows[T], size: Callable[[T], int]) -> int:
    """The largest size of a row; for streamed rows, the configured maximum."""
    if isinstance(rows, MixedRows):
        return max(max_size(part, size) for part in rows.parts)
    return rows.max_tokens if isinstance(rows, StreamedRows) else max(map(size, rows), default=0)


def streamed_parts(rows: Rows[T]) -> list[StreamedRows[T]]:
    """The sources of these rows that are streamed from files."""
    parts = rows.parts if isinstance(rows, MixedRows) else (rows,)
    return [part for part in parts if isinstance(part, StreamedRows)]


class _ReadRows(NamedTuple):
    """Rows read together, some of whose sequences are still to be returned."""

    position: Mapping[str, Any]  # before them
    num_rows: int
    num_taken: int  # sequences


class Stream(Generic[T]):
    """Endless epochs over rows, with a position to save and restore.

    A streamed row may give several sequences, returned one after the other. A position inside a row
    is the position before the rows read with it, plus the number of their sequences returned.

    The order of each epoch depends only on the seed, in [0, 2**32): neither on the number of rows
    taken at a time nor on `num_workers`, the number of threads that prefetch.

    Raises:
      DataError: If there are no rows.
    """

    def __init__(self, rows: Rows[T], seed: int, shuffle: bool = True, num_workers: int = 0):
        self._mixed: MixedIterator[T] | None = None
        if isinstance(rows, MixedRows):
            streams = [
                Stream(part, (seed + i) % 2**32, shuffle, num_workers)
                for i, part in enumerate(rows.parts)
            ]
            self._mixed = MixedIterator(streams, rows.shares)
            return
        if not len(rows):
            raise DataError("a stream needs at least one row")
        self._identity = {"num_rows": len(rows), "seed": seed, "shuffle": shuffle}
        self._streamed = rows if isinstance(rows, StreamedRows) else None
        if isinstance(rows, StreamedRows):
            passes = EpochSource(rows, seed, shuffle, windows=1 + bool(num_workers))
            pipeline = grain.MapDataset.source(passes)
        else:
            pipeline = grain.MapDataset.source(rows).seed(seed)
            pipeline = (pipeline.shuffle() if shuffle else pipeline).repeat()
        options = grain.ReadOptions(num_threads=num_workers, prefetch_buffer_size=2 * num_workers)
        self._rows = iter(pipeline.to_iter_dataset(options))
        self._remaining: list[T] = []  # sequences of rows read, not yet returned
        self._read = _ReadRows({}, 0, 0)  # those rows; none: all their sequences were returned

    def take(self, count: int) -> tuple[T, ...]:
        """Draws the next `count` rows."""
        if self._mixed:
            return self._mixed.take(count)
        if self._streamed:
            return self._take_streamed(count, self._streamed)
        return tuple(next(self._rows) for _ in range(count))

    def _take_streamed(self, count: int, rows: StreamedRows[T]) -> tuple[T, ...]:
        """Sequences of streamed rows, of which each process reads its part and all get all."""
        if self._read.num_rows and not self._remaining:  # a restored position inside a row
            self._remaining = self._sequences(self._read.num_rows)[self._read.num_taken :]
        sequences: list[T] = []
        since_last = 0
        while True:
            missing = count - len(sequences)
            taken, self._remaining = self._remaining[:missing], self._remaining[missing:]
            sequences += taken
            num_taken = self._read.num_taken + len(taken)
            self._read = (
                self._read._replace(num_taken=num_taken) if self._remaining else _ReadRows({}, 0, 0)
            )
            if len(sequences) == count:
                return tuple(sequences)
            missing -= len(taken)
            self._read = _ReadRows(self._rows.get_state(), missing, 0)
            self._remaining = self._sequences(missing)
            since_last = 0 if self._remaining else since_last + missing
            if since_last > len(rows):
                raise DataError(f"config.data.train_files: all {len(rows)} rows {rows.rule}")

    def _sequences(self, num_rows: int) -> list[T]:
        """The sequences of the next rows, without those left out."""
        read = functools.partial(itertools.islice, self._rows, num_rows)
        return list(itertools.chain.from_iterable(gather_rows(read)))

    def get_state(self) -> dict[str, Any]:
        """The position as JSON-compatible state."""
        if self._mixed:
            return self._mixed.get_state()
        if not self._read.num_rows:
            return {**self._identity, "position": self._rows.get_state()}
        position, num_rows, num_taken = self._read
        inside = {"num_rows_read": num_rows, "num_taken": num_taken}
        return {**self._identity, "position": position, "inside": inside}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a position that `get_state` returned for the same rows, seed and order."""
        if self._mixed:
            return self._mixed.set_state(state)
        remedy = "the position would be another row; restore the data and the config of the"
        check_saved("data position", state, self._identity, f"{remedy} saved run")
        self._rows.set_state(dict(state["position"]))
        self._remaining, self._read = [], _ReadRows({}, 0, 0)
        if inside := state.get("inside"):
            self._read = _ReadRows(
                dict(state["position"]), inside["num_rows_read"], inside["num_taken"]
            )
