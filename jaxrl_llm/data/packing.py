"""Packed rows [R, W], which models read, of sequences [B, T], which losses read.

Which sequences share a row and which rows a device gets: host code on lengths. The map between
both: a `PackedBatch`, made on the host, which holds no array of the step itself.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.sharding.mesh import constrain

# At this length attention costs as much as the other matmuls of a token.
ATTENTION_PARITY_TOKENS = 24_576

_Part = tuple[float, list[int]]  # sum of costs; items


def workload(lengths: Int[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
    """Returns the relative cost of training on sequences: length + length**2 / 24576."""
    lengths = np.asarray(lengths, np.float64)
    return lengths + lengths**2 / ATTENTION_PARITY_TOKENS


def balanced_partition(
    costs: Sequence[float] | Float[np.ndarray, " items"], num_parts: int
) -> list[list[int]]:
    """Returns the items of parts of one size whose sums of costs are close to each other.

    Karmarkar and Karp's largest differencing method: begin with a division into parts for each
    `num_parts` items; merge the two divisions with the largest differences, heaviest part with
    lightest, until one is left. Parts and their items ascend. Costs that are negative or not
    finite, and a number of items that `num_parts` does not divide, are a ValueError.
    """
    costs = np.asarray(costs, np.float64)
    if num_parts < 1:
        raise ValueError(f"balanced_partition: num_parts must be at least 1, got {num_parts}")
    if not np.all(np.isfinite(costs) & (costs >= 0)):
        raise ValueError("balanced_partition: costs must be finite and not negative")
    if len(costs) % num_parts:
        raise ValueError(
            f"balanced_partition: {len(costs)} items cannot form {num_parts} parts of equal size;"
            " add items of no cost"
        )
    order = np.argsort(-costs, kind="stable").tolist()
    ties = itertools.count()
    heap: list[tuple[float, int, list[_Part]]] = []

    def push(parts: list[_Part]) -> None:
        parts.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], next(ties), parts))

    for start in range(0, len(order), num_parts):
        push([(float(costs[i]), [i]) for i in order[start : start + num_parts]])
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        push([(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)])
    parts = heap[0][2] if heap else [(0.0, [])] * num_parts
    return sorted(sorted(items) for _, items in parts)


def pack(
    lengths: Sequence[int] | Int[np.ndarray, " B"],
    row_tokens: int,
    scored: Sequence[int] | Int[np.ndarray, " B"] = (),
    most_scored: int = 0,
) -> list[list[int]]:
    """Returns which sequences share each row of at most `row_tokens` tokens.

    First fit decreasing: the longest first, each into the first row with room for it. It needs at
    most 11/9 of the fewest possible rows, plus one. A row holds at most `most_scored` of the
    `scored` tokens of each sequence (empty: no limit); no sequence may have more. A sequence that
    is empty or longer than a row is a ValueError.
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Microbatch:
    """Packed rows and the sequences in them. With a leading dim M: all microbatches of a batch.

    A prefix that several sequences share may stand once, before the rest of each; its segment id
    is minus that of the first of them.
    """

    segment_ids: Int[Array, "*M R W"]  # 1 + number of the sequence in the step; 0: padding
    # Segment of the shared prefix, or the own one; [R, 0] where nothing is shared.
    prefix_ids: Int[Array, "*M R W"] | Int[Array, "*M R 0"]
    key_blocks: Int[Array, "*M R blocks kept"]  # as `full_attention` takes them
    positions: Int[Array, "*M R W"]  # of each token in its own sequence
    sequences: Int[Array, "*M b"]  # which sequences of the step; B: none
    rows: Int[Array, "*M b"]  # row of each sequence
    starts: Int[Array, "*M b"]  # column of its token 0, were its prefix not shared
    beginnings: Int[Array, "*M b"]  # column of its shared prefix
    shared: Int[Array, "*M b"]  # tokens of that prefix
    scored: Int[Array, "*M R scored"]  # columns of tokens that the policy chose; W: none
    before: Int[Array, "*M R scored"]  # column of the token before each of them
    # Experts that tokens visited before, as `Rollouts.routes`; [R, W, 0]: not known.
    routes: Int[Array, "*M R W routes"]
    # What a teacher says of each token, as `types.Lessons`; [R, W, 0]: nothing.
    listed: Int[Array, "*M R W k"]
    listed_log_probs: Float[Array, "*M R W k"]
    # Of rows with images, see `models.sights.Sights`; [R, W, 0]: there are none.
    parts: Int[Array, "*M R W parts"]  # rotary positions
    seen: Int[Array, "*M R W one"]  # which of `PackedBatch.vectors` stands there; -1: none
    vectors: Float[Array, "*M vectors D"]  # those of the batch, once it is one microbatch; else 0
    # `pipeline.Passed`: what stages made of the rows before the rest of the network reads them.
    passed: Any = ()

    @property
    def scores_everything(self) -> bool:
        """Whether every token that follows another one in the row is scored."""
        return self.scored.shape == self.segment_ids.shape and not self.prefix_ids.shape[-1]

    def packed(self, tokens: Shaped[Array, "B T"]) -> Shaped[Array, "R W"]:
        """Returns the packed rows of a [B, T] array; zero at padding."""
        values = tokens[jnp.maximum(jnp.abs(self.segment_ids) - 1, 0), self.positions]
        return constrain(jnp.where(self.segment_ids != 0, values, 0), "batch", "length")

    def unpacked(
        self, packed: Shaped[Array, "R W"], lengths: Int[Array, " B"], width: int
    ) -> Shaped[Array, "b T"]:
        """Returns packed values by sequence, zero past each sequence's end."""
        positions = jnp.arange(width)
        inside = positions < self.take(lengths)[:, None]
        begins = self.starts[:, None]
        if self.prefix_ids.shape[-1]:
            begins = jnp.where(positions < self.shared[:, None], self.beginnings[:, None], begins)
        columns = jnp.where(inside, begins + positions, 0)
        return jnp.where(inside, packed[self.rows[:, None], columns], 0)

    def take(self, values: Array) -> Array:
        """Returns the entries of this microbatch's sequences of a [B, ...] array, else zero."""
        return jnp.take(values, self.sequences, axis=0, mode="fill", fill_value=0)

    def put(self, target: Array, values: Array) -> Array:
        """Returns the [B, ...] `target` with this microbatch's sequences set to `values`."""
        return target.at[self.sequences].set(values, mode="drop")


class Shown(NamedTuple):
    """Images as a tower that learns reads them, one group of rows after another."""

    pixels: Float[Array, "groups rows patches dims"]
    places: Int[Array, "groups rows patches 2"]  # row and column in the image
    images: Int[Array, "groups rows patches"]  # which of the row, from 1; 0: none
    # Which of the tower's vectors, of all rows end to end, is each of the batch; -1: none.
    order: Int[Array, " vectors"]


def _no_vectors() -> Any:  # the device takes them as they are
    return np.zeros((0, 0), np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """Some sequences of a step in packed rows."""

    microbatches: Microbatch  # every field with a leading dim M
    count: Int[Array, ""]  # microbatches that hold tokens; the rest is padding
    chosen: Bool[Array, " B"]  # sequences of this batch
    # Of the images of all its sequences.
    vectors: Float[Array, "vectors D"] = dataclasses.field(default_factory=_no_vectors)
    shown: Shown | None = None  # the images themselves, for a policy whose tower learns

    def at(self, index: int | Int[Array, ""]) -> Microbatch:
        """Returns one microbatch; of those in turns, one turn without vectors."""
        found = jax.tree.map(lambda a: a[index], self.microbatches)
        return found if self.in_turns else dataclasses.replace(found, vectors=self.vectors)

    @property
    def in_turns(self) -> bool:
        """Whether microbatches are [turns, stages, ...], as `on_stages` returns them."""
        return self.microbatches.rows.ndim == 3

    def on_stages(self, stages: int) -> "PackedBatch":
        """Returns the microbatches in turns: those of a turn are worked on at the same time."""

        def turned(a: Array) -> Array:
            return a.reshape(a.shape[0] // stages, stages, *a.shape[1:])

        microbatches = jax.tree.map(turned, self.microbatches)
        return PackedBatch(microbatches, -(-self.count // stages), self.chosen, self.vectors)


def accumulate(packed: PackedBatch, function, like=None):
    """Returns the sum of `function(microbatch)` over a batch, typed as `like`, if that is given."""
    if packed.in_turns:
        each = mesh_lib.on_stages(function)
        function = lambda m: jax.tree.map(lambda a: a.sum(0), each(m))  # noqa: E731
    like = jax.eval_shape(lambda: function(packed.at(0))) if like is None else like
    if packed.microbatches.rows.shape[0] == 1:
        return jax.tree.map(lambda a, b: a.astype(b.dtype), function(packed.at(0)), like)

    def body(i, total):
        part = function(packed.at(i))
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part)

    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
    return jax.lax.fori_loop(0, packed.count, body, zeros)


def by_sequence(packed: PackedBatch, function, num_sequences: int, width: int):
    """Returns the [b, T] arrays of `function(microbatch)` as one [B, T], zero elsewhere."""
    return both_ways(packed, lambda m: (function(m), ()), num_sequences, width)[0]


def both_ways(packed: PackedBatch, function, num_sequences: int, width: int):
    """Returns what `function(microbatch)` gives by sequence and what it gives by row.

    Of a pair of [b, T] and [R, W, _] arrays: the first as one [B, T], the second as [M, R, W, _],
    zero elsewhere.
    """
    if packed.in_turns:
        function = mesh_lib.on_stages(function)
    of_sequences, of_rows = jax.eval_shape(lambda: function(packed.at(0)))
    count = packed.microbatches.rows.shape[0]
    blank = (
        jax.tree.map(lambda a: jnp.zeros((num_sequences, width), a.dtype), of_sequences),
        jax.tree.map(lambda a: jnp.zeros((count, *a.shape), a.dtype), of_rows),
    )

    def body(i, total):
        microbatch = packed.at(i)
        of_sequences, of_rows = function(microbatch)
        return (
            jax.tree.map(microbatch.put, total[0], of_sequences),
            jax.tree.map(lambda whole, part: whole.at[i].set(part), total[1], of_rows),
        )

    of_sequences, of_rows = jax.lax.fori_loop(0, packed.count, body, blank)
    if packed.in_turns:
        of_rows = jax.tree.map(lambda a: jax.lax.collapse(a, 0, 2), of_rows)
    return of_sequences, of_rows
