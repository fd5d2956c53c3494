"""Mixtures: rows of several sources, drawn in shares that may move."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.errors import check_saved

T = TypeVar("T")
Row = TypeVar("Row", covariant=True)


class Cursor(Protocol[Row]):
    """Endless rows with a position to save and restore."""

    def take(self, count: int) -> tuple[Row, ...]: ...
    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: Mapping[str, Any], /) -> None: ...


@dataclasses.dataclass(frozen=True)
class Shares:
    """How often rows of each source come, relative to the others.

    The weights move in a line from `first` to `last` while `num_rows` rows are drawn; 0: they stay.
    """

    first: tuple[float, ...]
    last: tuple[float, ...]
    num_rows: int

    @classmethod
    def of(cls, config: DataConfig) -> "Shares":
        """Returns the shares of `config.train_files`."""
        first, last = config.train_weights, config.last_train_weights
        return cls(first, last or first, config.last_train_weights_after if last else 0)

    def at(self, drawn: int) -> list[float]:
        """Returns the shares after so many rows; they sum to 1."""
        moved = min(1.0, drawn / self.num_rows) if self.num_rows else 0.0
        weights = [a + (b - a) * moved for a, b in zip(self.first, self.last, strict=True)]
        return [weight / sum(weights) for weight in weights]


class Mixed(Generic[T]):
    """Rows of several sources. The next row is of the source that lacks most of its share.

    So no source is ever a whole row ahead of its share.
    """

    def __init__(self, sources: Sequence[Cursor[T]], shares: Shares):
        self._sources = sources
        self._shares = shares
        self._drawn = 0
        self._lacking = [0.0] * len(sources)  # rows that each source is due

    def take(self, count: int) -> tuple[T, ...]:
        """Returns the next `count` rows and moves past them."""
        chosen = []
        for _ in range(count):
            shares = self._shares.at(self._drawn)
            due = [a + b for a, b in zip(self._lacking, shares, strict=True)]
            # A source without a share is not drawn, whatever rounding makes of what it is due.
            which = max((i for i, share in enumerate(shares) if share), key=due.__getitem__)
            due[which] -= 1.0
            self._lacking = due
            self._drawn += 1
            chosen.append(which)
        rows = [iter(source.take(chosen.count(i))) for i, source in enumerate(self._sources)]
        return tuple(next(rows[which]) for which in chosen)

    def get_state(self) -> dict[str, Any]:
        """Returns the position; JSON can hold it."""
        sources = [source.get_state() for source in self._sources]
        mixture = dataclasses.asdict(self._shares)
        return {**mixture, "drawn": self._drawn, "lacking": self._lacking, "sources": sources}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a position that `get_state` returned for the same sources and shares."""
        remedy = "restore data.train_weights and what belongs to it"
        check_saved("mixture", state, dataclasses.asdict(self._shares), remedy)
        self._drawn, self._lacking = state["drawn"], list(state["lacking"])
        for source, position in zip(self._sources, state["sources"], strict=True):
            source.set_state(position)
