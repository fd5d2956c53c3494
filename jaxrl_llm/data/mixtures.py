"""Mixtures of datasets: rows of several sources in given shares, which may change over time."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.errors import check_saved

T = TypeVar("T")
Row = TypeVar("Row", covariant=True)


class RowIterator(Protocol[Row]):
    """An endless iterator of rows whose position can be saved and restored."""

    def take(self, count: int) -> tuple[Row, ...]: ...
    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: Mapping[str, Any], /) -> None: ...


@dataclasses.dataclass(frozen=True)
class MixtureSchedule:
    """Sampling weights of the sources, as a schedule over the number of rows drawn.

    The weights move linearly from `first` to `last` over `num_rows` rows; 0: they are constant.
    """

    first: tuple[float, ...]
    last: tuple[float, ...]
    num_rows: int

    @classmethod
    def from_config(cls, config: DataConfig) -> "MixtureSchedule":
        """The schedule of `config.train_files`."""
        first, last = config.train_weights, config.last_train_weights
        return cls(first, last or first, config.last_train_weights_after if last else 0)

    def shares_at(self, drawn: int) -> list[float]:
        """Normalized shares after `drawn` rows."""
        moved = min(1.0, drawn / self.num_rows) if self.num_rows else 0.0
        weights = [a + (b - a) * moved for a, b in zip(self.first, self.last, strict=True)]
        return [weight / sum(weights) for weight in weights]


class MixedIterator(Generic[T]):
    """Iterates over several sources; the next row comes from the one furthest behind its share.

    So no source is ever a whole row ahead of its share.
    """

    def __init__(self, sources: Sequence[RowIterator[T]], shares: MixtureSchedule):
        self._sources = sources
        self._shares = shares
        self._drawn = 0
        self._deficits = [0.0] * len(sources)  # rows by which each source is behind its share

    def take(self, count: int) -> tuple[T, ...]:
        """Draws the next `count` rows."""
        chosen = []
        for _ in range(count):
            shares = self._shares.shares_at(self._drawn)
            deficits = [a + b for a, b in zip(self._deficits, shares, strict=True)]
            # A source of share 0 is never drawn, whatever rounding leaves in its deficit.
            which = max((i for i, share in enumerate(shares) if share), key=deficits.__getitem__)
            deficits[which] -= 1.0
            self._deficits = deficits
            self._drawn += 1
            chosen.append(which)
        rows = [iter(source.take(chosen.count(i))) for i, source in enumerate(self._sources)]
        return tuple(next(rows[which]) for which in chosen)

    def get_state(self) -> dict[str, Any]:
        """The position as JSON-compatible state."""
        sources = [source.get_state() for source in self._sources]
        mixture = dataclasses.asdict(self._shares)
        return {**mixture, "drawn": self._drawn, "lacking": self._deficits, "sources": sources}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a position that `get_state` returned for the same sources and shares."""
        remedy = "restore data.train_weights and what belongs to it"
        check_saved("mixture", state, dataclasses.asdict(self._shares), remedy)
        self._drawn, self._deficits = state["drawn"], list(state["lacking"])
        for source, position in zip(self._sources, state["sources"], strict=True):
            source.set_state(position)
