"""Which sequences share a packed row, and which rows a device gets; host code on lengths."""

import dataclasses
import heapq
import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

# At this length attention costs as much as the other matmuls of a token.
ATTENTION_PARITY_TOKENS = 24_576

_Part = tuple[float, list[int]]  # sum of costs; items


def workload(lengths: Int[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
    """Returns the relative cost of training on sequences: length + length**2 / 24576."""
    lengths = np.asarray(lengths, np.float64)
    return lengths + lengths**2 / ATTENTION_PARITY_TOKENS


def balanced_partition(
    costs: Sequence[float] | Float[np.ndarray, " items"], num_parts: int, equal_size: bool = False
) -> list[list[int]]:
    """Returns the items of each part, so that the parts' sums of costs are close to each other.

    Karmarkar and Karp's largest differencing method: begin with one division into parts for each
    item; merge the two divisions with the largest differences, heaviest part with lightest, until
    one is left. No part is empty if there are enough items; with `equal_size` all have the same
    number of items. Parts and their items ascend, empty parts come last.

    Raises:
      ValueError: Costs are negative or infinite, or the items cannot form the parts.
    """
    costs = np.asarray(costs, np.float64)
    if num_parts < 1:
        raise ValueError(f"balanced_partition: num_parts must be at least 1, got {num_parts}")
    if not np.all(np.isfinite(costs) & (costs >= 0)):
        raise ValueError("balanced_partition: costs must be finite and not negative")
    if equal_size and len(costs) % num_parts:
        raise ValueError(
            f"balanced_partition: {len(costs)} items cannot form {num_parts} parts of equal size;"
            " add items of no cost or set equal_size=False"
        )
    # Blocks of `num_parts` items, one in each part, keep the sizes equal in every merge.
    block = num_parts if equal_size else 1
    order = np.argsort(-costs, kind="stable").tolist()
    ties = itertools.count()
    heap: list[tuple[float, int, list[_Part]]] = []

    def push(parts: list[_Part]) -> None:
        # Of two parts without cost the one with items counts as heavier: empty parts get filled.
        parts.sort(key=lambda part: (-part[0], -len(part[1]), part[1]))
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], next(ties), parts))

    for start in range(0, len(order), block):
        items = order[start : start + block]
        push([(float(costs[i]), [i]) for i in items] + [(0.0, [])] * (num_parts - block))
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        push([(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)])
    parts = heap[0][2] if heap else [(0.0, [])] * num_parts
    return sorted((sorted(items) for _, items in parts), key=lambda items: (not items, items))


def pack(
    lengths: Sequence[int] | Int[np.ndarray, " B"],
    row_tokens: int,
    scored: Sequence[int] | Int[np.ndarray, " B"] = (),
    most_scored: int = 0,
) -> list[list[int]]:
    """Returns which sequences share each row of at most `row_tokens` tokens.

    First fit decreasing: the longest first, each into the first row with room for it. It needs at
    most 11/9 of the fewest possible rows, plus one.

    Args:
      scored: Scored tokens of each sequence, of which a row holds at most `most_scored`; empty: no
        limit. No sequence may have more.

    Raises:
      ValueError: A sequence is empty or longer than a row.
    """
    lengths = np.asarray(lengths, np.int64)
    wrong = np.flatnonzero((lengths < 1) | (lengths > row_tokens))
    if len(wrong):
        raise ValueError(
            f"pack: sequence {wrong[0]} has {lengths[wrong[0]]} tokens, a row holds 1 to"
            f" {row_tokens}; use longer rows or shorter sequences"
        )
    rows: list[list[int]] = []
    room = np.full(len(lengths), row_tokens)  # of all rows that may be opened
    counted = np.asarray(scored if len(scored) else np.zeros(len(lengths)), np.int64)
    left = np.full(len(lengths), most_scored)
    for index in np.argsort(-lengths, kind="stable").tolist():
        row = int(np.argmax((room >= lengths[index]) & (left >= counted[index])))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        room[row] -= lengths[index]
        left[row] -= counted[index]
    return [sorted(row) for row in rows]


@dataclasses.dataclass(frozen=True)
class Beginnings:
    """How many first tokens sequences have in common, as the samples of one prompt do."""

    groups: Int[np.ndarray, " B"]  # sequences of one group have a common beginning
    lengths: Int[np.ndarray, " B"]  # tokens in common, fewer than the sequence has; 0: none
    together: bool = False  # the sequences of a group must share a row

    def of(self, chosen: Int[np.ndarray, " b"]) -> "Beginnings":
        """Returns the beginnings of some of the sequences."""
        return Beginnings(self.groups[chosen], self.lengths[chosen], self.together)


def nothing_common(num_sequences: int) -> Beginnings:
    """Returns the beginnings of sequences that share none."""
    return Beginnings(np.arange(num_sequences), np.zeros(num_sequences, np.int64))


NOTHING_COMMON = nothing_common(0)  # stands for that of any number of sequences


def beginnings(
    tokens: Int[np.ndarray, "B T"],
    lengths: Int[np.ndarray, " B"],
    own: Bool[np.ndarray, "B T"],
    groups: Int[np.ndarray, " B"],
) -> Beginnings:
    """Returns how much the sequences of each group have in common before their `own` tokens."""
    limits = np.where(own.any(1), own.argmax(1), lengths - 1)
    common = np.zeros(len(lengths), np.int64)
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        heads = tokens[rows, : limits[rows].min()]
        differs = (heads != heads[0]).any(0)
        common[rows] = differs.argmax() if differs.any() else len(differs)
    return Beginnings(np.asarray(groups), common)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Sequences that follow each other in a row, after their common beginning."""

    members: tuple[int, ...]
    shared: int  # tokens of the common beginning; 0: one whole sequence
    length: int  # tokens of the piece


def pieces(
    lengths: Int[np.ndarray, " B"],
    common: Beginnings,
    row_tokens: int,
    scored: Sequence[int] | Int[np.ndarray, " B"] = (),
    most_scored: int = 0,
) -> list[Piece]:
    """Returns the sequences as pieces that fit into rows, few for each group; see `pack`."""
    found = []
    counted = np.asarray(scored if len(scored) else np.zeros(len(lengths)), np.int64)
    for group in np.unique(common.groups):
        rows = np.flatnonzero(common.groups == group)
        shared = int(common.lengths[rows].min())
        own = lengths[rows] - shared
        if common.together:
            parts = [list(range(len(rows)))]
        elif shared:
            parts = pack(own, row_tokens - shared, counted[rows], most_scored)
        else:
            parts = [[i] for i in range(len(rows))]
        for part in parts:
            members = tuple(rows[part].tolist())
            # One sequence alone is whole: it shares its beginning with no other.
            kept = shared if len(members) > 1 else 0
            found.append(Piece(members, kept, shared + int(own[part].sum())))
    return found


def bucket(size: int, *, smallest: int = 1, largest: int = 1 << 62) -> int:
    """Returns the least of smallest, 2 * smallest, 4 * smallest, ..., `largest` >= `size`.

    Few sizes mean few compiled programs. No `size` may exceed `largest`.
    """
    width = smallest
    while width < size:
        width *= 2
    return min(width, largest)
