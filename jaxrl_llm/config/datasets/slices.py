"""Slices of rows at the end of a file's address: `train.parquet[:90%]`."""

import re
from fractions import Fraction
from typing import NamedTuple

_BOUND = r"-?[0-9]+(?:\.[0-9]+)?%?"
_SLICE = re.compile(rf"(?P<address>.+)\[(?P<start>{_BOUND})?:(?P<stop>{_BOUND})?\]", re.DOTALL)
# Brackets at the end that cannot be a class of characters of a glob, or hold a colon as a slice.
_NEARLY = re.compile(r"\[(?:[^\[\]]*[:%][^\[\]]*)\]\Z")


class RowSlice(NamedTuple):
    """A contiguous part of N rows: `[start:stop]`, each a number of rows or a percentage.

    A percentage p is the row N p / 100, rounded down; a negative bound counts from the end, and -p%
    is (100 - p)%. So `[:p%]` and `[p%:]` share no row and leave none out, whatever N is.
    """

    start: str  # "" is the first row
    stop: str  # "" is the end

    def rows(self, num_rows: int) -> range:
        """The numbers, from 0, of the rows in the slice.

        >>> RowSlice("", "90%").rows(15), RowSlice("90%", "").rows(15), RowSlice("-2", "").rows(15)
        (range(0, 13), range(13, 15), range(13, 15))
        """
        start = _row(self.start, num_rows) if self.start else 0
        stop = _row(self.stop, num_rows) if self.stop else num_rows
        return range(start, max(start, stop))


def split_slice(address: str) -> tuple[str, RowSlice | None]:
    """The address of files without its slice, and the slice, None if there is none.

    >>> split_slice("a/*.parquet[:90%]")
    ('a/*.parquet', RowSlice(start='', stop='90%'))
    """
    if not (match := _SLICE.fullmatch(address)):
        return address, None
    return match["address"], RowSlice(match["start"] or "", match["stop"] or "")


def slice_problem(address: str) -> str:
    """The fault of the slice at the end of an address, and the remedy; "" if there is none."""
    _, rows = split_slice(address)
    if rows is None:
        if nearly := _NEARLY.search(address):
            return f"{nearly[0]} is no slice of rows; write [:90%], [90%:], [100:200] or [-100:]"
        return ""
    for bound in filter(None, rows):
        if "." in bound and not bound.endswith("%"):
            return f"{bound} is no number of rows; write a whole one, or a percentage"
        if bound.endswith("%") and abs(Fraction(bound[:-1])) > 100:
            return f"{bound} is outside [-100%, 100%]"
    start, stop = (_place(bound) if bound else None for bound in rows)
    is_crossed = start and stop and start[0] == stop[0] and start[1] >= stop[1]
    if is_crossed or stop in _FIRST or start in _LAST:
        return f"[{rows.start}:{rows.stop}] holds no rows; write the lower bound first"
    return ""


def overlap_problem(ours: str, theirs: str) -> str:
    """Why two slices of one address may share a row; "" if they share none, or are not both slices.

    >>> overlap_problem("a.jsonl[:90%]", "a.jsonl[90%:]")
    ''
    >>> overlap_problem("a.jsonl[:90%]", "a.jsonl[80%:]")
    'shares rows with a.jsonl[80%:]'
    """
    (address, first), (other, second) = split_slice(ours), split_slice(theirs)
    if first is None or second is None or address != other:
        return ""
    bounds = [_place(bound) for bound in (*first, *second) if bound]
    if len({unit for unit, _ in bounds}) > 1:
        return f"may share rows with {theirs}: write all bounds in rows, or all in percent"
    starts = [_place(rows.start)[1] for rows in (first, second) if rows.start]
    stops = [_place(rows.stop)[1] for rows in (first, second) if rows.stop]
    if starts and stops and max(starts) >= min(stops):
        return ""
    return f"shares rows with {theirs}"


# Bounds before and behind all rows.
_FIRST = (("rows", 0), ("percent", 0))
_LAST = (("from the end", 0), ("percent", 100))


def _place(bound: str) -> tuple[str, Fraction]:
    """Unit and position of a bound; two of one unit are in the order of their rows."""
    if bound.endswith("%"):
        percent = Fraction(bound[:-1])
        return "percent", 100 + percent if bound.startswith("-") else percent
    return "from the end" if bound.startswith("-") else "rows", Fraction(bound)


def _row(bound: str, num_rows: int) -> int:
    unit, position = _place(bound)
    if unit == "percent":
        return num_rows * position.numerator // (100 * position.denominator)
    row = int(position) + (num_rows if unit == "from the end" else 0)
    return min(max(row, 0), num_rows)
