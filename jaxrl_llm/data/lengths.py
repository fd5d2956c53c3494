"""Rows with more tokens than allowed: dropped, refused or cut, as `data.long_rows` says."""

from collections.abc import Sequence
from typing import Literal, TypeVar

from jaxrl_llm.data.errors import DataError
from jaxrl_llm.types import Example, Pair

T = TypeVar("T")
LongRows = Literal["drop", "error", "left", "right", "middle"]


def cut(values: Sequence[T], most: int, side: LongRows) -> tuple[T, ...]:
    """Returns `most` values: without some at the left, the right, or in the middle.

    >>> cut("abcde", 3, "left"), cut("abcde", 3, "middle")
    (('c', 'd', 'e'), ('a', 'd', 'e'))
    """
    ahead = {"left": 0, "right": most, "middle": most // 2}[side]
    return (*values[:ahead], *values[len(values) - (most - ahead) :])


def shortened(row: Example, most: int, long_rows: LongRows, where: str) -> Example | None:
    """Returns an example of at most `most` tokens (0: any number), or None if it is dropped.

    One that bears no loss after the cut is dropped.
    """
    if not most or len(row.tokens) <= most:
        return row
    if long_rows == "error":
        raise DataError(
            f"{where}: {len(row.tokens)} tokens, more than {most}; raise"
            " trainer.max_sequence_tokens, or choose data.long_rows 'drop', 'left', 'right' or"
            " 'middle'"
        )
    if long_rows == "drop":
        return None
    found = Example(cut(row.tokens, most, long_rows), cut(row.mask, most, long_rows))
    return found if any(found.mask) else None


def shortened_pair(row: Pair, most: int, long_rows: LongRows, where: str) -> Pair | None:
    """Returns a pair of together at most `most` tokens (0: any number), or None; see `shortened`.

    The longer one is cut first, to half of `most` or what the other one leaves.
    """
    lengths = [len(one.tokens) for one in row]
    if not most or sum(lengths) <= most:
        return row
    room = [max(most // 2, most - other) for other in reversed(lengths)]
    kept = [shortened(one, m, long_rows, where) for one, m in zip(row, room, strict=True)]
    return None if None in kept else Pair(*(one for one in kept if one))
