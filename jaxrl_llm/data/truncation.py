"""Truncation of rows with too many tokens, according to `data.long_rows`."""

from collections.abc import Sequence
from typing import Literal, TypeVar

from jaxrl_llm.data.errors import DataError
from jaxrl_llm.types import Example, PreferencePair

T = TypeVar("T")
LongRows = Literal["drop", "error", "left", "right", "middle"]


def truncate(values: Sequence[T], most: int, side: LongRows) -> tuple[T, ...]:
    """Truncates to `most` values by removing some at the left, the right, or in the middle.

    >>> truncate("abcde", 3, "left"), truncate("abcde", 3, "middle")
    (('c', 'd', 'e'), ('a', 'd', 'e'))
    """
    ahead = {"left": 0, "right": most, "middle": most // 2}[side]
    return (*values[:ahead], *values[len(values) - (most - ahead) :])


def truncate_example(row: Example, most: int, long_rows: LongRows, where: str) -> Example | None:
    """Truncates an example to at most `most` tokens (0: no limit); None if it is dropped.

    An example that bears no loss after truncation is dropped.
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
    truncated = row._replace(
        tokens=truncate(row.tokens, most, long_rows), mask=truncate(row.mask, most, long_rows)
    )
    return truncated if any(truncated.mask) else None


def truncate_pair(
    row: PreferencePair, most: int, long_rows: LongRows, where: str
) -> PreferencePair | None:
    """Truncates a pair to at most `most` tokens together (0: no limit); None if it is dropped.

    The longer answer is cut first, to half of `most` or to the room that the other one leaves.
    """
    lengths = [len(one.tokens) for one in row]
    if not most or sum(lengths) <= most:
        return row
    limits = [max(most // 2, most - other) for other in reversed(lengths)]
    truncated = [
        truncate_example(one, m, long_rows, where) for one, m in zip(row, limits, strict=True)
    ]
    return None if None in truncated else PreferencePair(*(one for one in truncated if one))
