"""Endless seeded streams of rows: of memory, of files piece by piece, and mixtures of them."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

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
    """Returns all rows changed: those of memory now, streamed ones when they are asked for."""
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


class Stream(Generic[T]):
    """Endless passes over rows, with a position to save and restore.

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

    def take(self, count: int) -> tuple[T, ...]:
        """Returns the next `count` rows and moves past them."""
        if self._mixed:
            return self._mixed.take(count)
        if self._streamed:
            return self._agreed(count, self._streamed)
        return tuple(next(self._rows) for _ in range(count))

    def _agreed(self, count: int, rows: StreamedRows[T]) -> tuple[T, ...]:
        """Returns rows that all processes have read, each its part, past those left out."""
        found: list[T] = []
        since_last = 0
        while missing := count - len(found):
            read = functools.partial(itertools.islice, self._rows, missing)
            made = [row for row in agreed(read) if row is not None]
            since_last = 0 if made else since_last + missing
            if since_last > len(rows):
                raise DataError(f"config.data.train_files: all {len(rows)} rows {rows.rule}")
            found += made
        return tuple(found)

    def get_state(self) -> dict[str, Any]:
        """Returns the position; JSON can hold it."""
        if self._mixed:
            return self._mixed.get_state()
        return {**self._identity, "position": self._rows.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a position that `get_state` returned for the same rows, seed and order."""
        if self._mixed:
            return self._mixed.set_state(state)
        remedy = "the position would be another row; restore the data and the config of the"
        check_saved("data position", state, self._identity, f"{remedy} saved run")
        self._rows.set_state(dict(state["position"]))
