"""Sequence packing: rows [R, W], which models read, of sequences [B, T], which losses read.

Host code decides by lengths which sequences share a row, and which rows a device gets. The result
is a `PackedBatch`, the map between both, which holds no array of the step itself.
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
    """The relative cost of training on sequences: length + length**2 / 24576."""
    lengths = np.asarray(lengths, np.float64)
    return lengths + lengths**2 / ATTENTION_PARITY_TOKENS


def balanced_partition(
    costs: Sequence[float] | Float[np.ndarray, " items"], num_parts: int
) -> list[list[int]]:
    """Divides items into parts of the same number of items and about the same sum of costs.

    Karmarkar and Karp's largest differencing method: begin with a division into parts for each
    `num_parts` items; merge the two divisions with the largest differences, heaviest part with
    lightest, until one is left. Parts and their items are in ascending order. Raises ValueError
    for costs that are negative or not finite, or if `num_parts` does not divide the items.
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
    max_scored: int = 0,
) -> list[list[int]]:
    """The sequences of each row of at most `row_tokens` tokens.

    First fit decreasing: the longest first, each into the first row with room for it. It needs at
    most 11/9 of the fewest possible rows, plus one. `scored_columns` counts the scored tokens of
    each sequence (empty: no limit): a row holds at most `max_scored`, and no sequence may have
    more. Raises ValueError for a sequence that is empty or longer than a row.
    """
    lengths = np.asarray(lengths, np.int64)
    unfit = np.flatnonzero((lengths < 1) | (lengths > row_tokens))
    if len(unfit):
        raise ValueError(
            f"pack: sequence {unfit[0]} has {lengths[unfit[0]]} tokens, a row holds 1 to"
            f" {row_tokens}; use longer rows or shorter sequences"
        )
    rows: list[list[int]] = []
    room = np.full(len(lengths), row_tokens)  # of all rows that may be opened
    num_scored = np.asarray(scored if len(scored) else np.zeros(len(lengths)), np.int64)
    scored_left = np.full(len(lengths), max_scored)
    for index in np.argsort(-lengths, kind="stable").tolist():
        row = int(np.argmax((room >= lengths[index]) & (scored_left >= num_scored[index])))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        room[row] -= lengths[index]
        scored_left[row] -= num_scored[index]
    return [sorted(row) for row in rows]


@dataclasses.dataclass(frozen=True)
class SharedPrefixes:
    """The number of first tokens that sequences share, as the samples of one prompt do."""

    groups: Int[np.ndarray, " B"]  # sequences of one group have a common beginning
    lengths: Int[np.ndarray, " B"]  # tokens in common, fewer than the sequence has; 0: none
    same_row: bool = False  # the sequences of a group must share a row

    def subset(self, chosen: Int[np.ndarray, " b"]) -> "SharedPrefixes":
        """The shared prefixes of some of the sequences."""
        return SharedPrefixes(self.groups[chosen], self.lengths[chosen], self.same_row)


def no_shared_prefixes(num_sequences: int) -> SharedPrefixes:
    """The shared prefixes of sequences that share none."""
    return SharedPrefixes(np.arange(num_sequences), np.zeros(num_sequences, np.int64))


NO_SHARED_PREFIXES = no_shared_prefixes(0)  # for any number of sequences


def shared_prefixes(
    tokens: Int[np.ndarray, "B T"],
    lengths: Int[np.ndarray, " B"],
    own: Bool[np.ndarray, "B T"],
    groups: Int[np.ndarray, " B"],
) -> SharedPrefixes:
    """The prefixes that the sequences of each group share before their `own` tokens."""
    max_common = np.where(own.any(1), own.argmax(1), lengths - 1)
    num_common = np.zeros(len(lengths), np.int64)
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        heads = tokens[rows, : max_common[rows].min()]
        is_different = (heads != heads[0]).any(0)
        num_common[rows] = is_different.argmax() if is_different.any() else len(is_different)
    return SharedPrefixes(np.asarray(groups), num_common)


@dataclasses.dataclass(frozen=True)
class PrefixPiece:
    """Sequences that follow each other in a row, after their shared prefix."""

    members: tuple[int, ...]
    prefix_length: int  # tokens of the shared prefix; 0: one whole sequence
    length: int  # tokens of the piece


def prefix_pieces(
    lengths: Int[np.ndarray, " B"],
    common: SharedPrefixes,
    row_tokens: int,
    scored: Sequence[int] | Int[np.ndarray, " B"] = (),
    max_scored: int = 0,
) -> list[PrefixPiece]:
    """The sequences as pieces that fit into rows, few for each group; see `pack`."""
    all_pieces = []
    num_scored = np.asarray(scored if len(scored) else np.zeros(len(lengths)), np.int64)
    for group in np.unique(common.groups):
        rows = np.flatnonzero(common.groups == group)
        shared = int(common.lengths[rows].min())
        own = lengths[rows] - shared
        if common.same_row:
            parts = [list(range(len(rows)))]
        elif shared:
            parts = pack(own, row_tokens - shared, num_scored[rows], max_scored)
        else:
            parts = [[i] for i in range(len(rows))]
        for part in parts:
            members = tuple(rows[part].tolist())
            # A sequence alone in its piece is whole: there is no other to share a prefix with.
            prefix_length = shared if len(members) > 1 else 0
            all_pieces.append(PrefixPiece(members, prefix_length, shared + int(own[part].sum())))
    return all_pieces


def bucket(size: int, *, smallest: int = 1, largest: int = 1 << 62) -> int:
    """The least of smallest, 2 * smallest, 4 * smallest, ..., `largest` that is >= `size`.

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
    starts: Int[Array, "*M b"]  # column of its token 0, if its prefix stood right before it
    prefix_starts: Int[Array, "*M b"]  # column of its shared prefix
    prefix_lengths: Int[Array, "*M b"]  # tokens of that prefix
    scored_columns: Int[Array, "*M R scored"]  # columns of tokens to score; W: none
    previous_columns: Int[Array, "*M R scored"]  # column of the token before each of them
    # Recorded expert routes of tokens, as `Rollouts.routed_experts`; [R, W, 0]: not known.
    routes: Int[Array, "*M R W routes"]
    # Tokens among which each was drawn, as `Rollouts.support`; [R, W, 0]: the whole vocabulary.
    support: Int[Array, "*M R W s"]
    # Tokens and log-probs of the teacher at each token, as `types.TeacherLogProbs`; [R, W, 0]:
    # nothing.
    teacher_tokens: Int[Array, "*M R W k"]
    teacher_log_probs: Float[Array, "*M R W k"]
    # For rows with images, see `models.image_inputs.ImageInputs`; [R, W, 0]: there are none.
    mrope_positions: Int[Array, "*M R W parts"]  # M-RoPE positions
    image_index: Int[Array, "*M R W one"]  # index into `PackedBatch.image_features`; -1: no image
    # of the whole batch, set by `PackedBatch.microbatch`; else empty
    image_features: Float[Array, "*M vectors D"]
    # `pipeline.StageOutputs`: the stage outputs, which the rest of the network reads.
    stage_outputs: Any = ()

    @property
    def scores_everything(self) -> bool:
        """Whether every token that follows another one in the row is scored."""
        return self.scored_columns.shape == self.segment_ids.shape and not self.prefix_ids.shape[-1]

    def to_rows(self, tokens: Shaped[Array, "B T"]) -> Shaped[Array, "R W"]:
        """A [B, T] array in packed rows; zero at padding."""
        values = tokens[jnp.maximum(jnp.abs(self.segment_ids) - 1, 0), self.positions]
        return constrain(jnp.where(self.segment_ids != 0, values, 0), "batch", "length")

    def to_sequences(
        self, packed: Shaped[Array, "R W"], lengths: Int[Array, " B"], width: int
    ) -> Shaped[Array, "b T"]:
        """Packed values by sequence; zero past the end of each."""
        positions = jnp.arange(width)
        is_token = positions < self.take(lengths)[:, None]
        offsets = self.starts[:, None]
        if self.prefix_ids.shape[-1]:
            offsets = jnp.where(
                positions < self.prefix_lengths[:, None], self.prefix_starts[:, None], offsets
            )
        columns = jnp.where(is_token, offsets + positions, 0)
        return jnp.where(is_token, packed[self.rows[:, None], columns], 0)

    def take(self, values: Array) -> Array:
        """The entries of a [B, ...] array for this microbatch's sequences; zero for empty slots."""
        return jnp.take(values, self.sequences, axis=0, mode="fill", fill_value=0)

    def put(self, target: Array, values: Array) -> Array:
        """The [B, ...] `target` with this microbatch's sequences set to `values`."""
        return target.at[self.sequences].set(values, mode="drop")


class ImageBatch(NamedTuple):
    """Image patches as inputs of a trainable tower, one group of rows after another."""

    pixels: Float[Array, "groups rows patches dims"]
    patch_positions: Int[Array, "groups rows patches 4"]  # as `PatchRows.coordinates`
    image_ids: Int[Array, "groups rows patches"]  # image of the row, from 1; 0: padding
    # For each feature of the batch, its index in the tower's outputs of all rows; -1: none.
    feature_order: Int[Array, " vectors"]


def _no_vectors() -> Any:  # a host array: no transfer of its own
    return np.zeros((0, 0), np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """Some sequences of a step in packed rows."""

    microbatches: Microbatch  # every field with a leading dim M
    count: Int[Array, ""]  # microbatches that hold tokens; the rest is padding
    is_member: Bool[Array, " B"]  # sequences of this batch
    # Features of the images of all its sequences.
    image_features: Float[Array, "vectors D"] = dataclasses.field(default_factory=_no_vectors)
    images: ImageBatch | None = None  # the images themselves, for a policy with a trainable tower

    def microbatch(self, index: int | Int[Array, ""]) -> Microbatch:
        """One microbatch; with pipeline stages one turn, without image features."""
        microbatch = jax.tree.map(lambda a: a[index], self.microbatches)
        return (
            microbatch
            if self.is_staged
            else dataclasses.replace(microbatch, image_features=self.image_features)
        )

    @property
    def is_staged(self) -> bool:
        """Whether microbatches are [turns, stages, ...], as `is_staged` returns them."""
        return self.microbatches.rows.ndim == 3

    def to_stages(self, stages: int) -> "PackedBatch":
        """The microbatches as [turns, stages, ...]: those of a turn are computed together."""

        def by_turn(a: Array) -> Array:
            return a.reshape(a.shape[0] // stages, stages, *a.shape[1:])

        microbatches = jax.tree.map(by_turn, self.microbatches)
        return PackedBatch(
            microbatches, -(-self.count // stages), self.is_member, self.image_features
        )


def accumulate(packed: PackedBatch, function, like=None):
    """The sum of `function(microbatch)` over a batch, with the dtypes of `like`, if given."""
    if packed.is_staged:
        stage_function = mesh_lib.vmap_over_stages(function)
        function = lambda m: jax.tree.map(lambda a: a.sum(0), stage_function(m))  # noqa: E731
    like = jax.eval_shape(lambda: function(packed.microbatch(0))) if like is None else like
    if packed.microbatches.rows.shape[0] == 1:
        return jax.tree.map(lambda a, b: a.astype(b.dtype), function(packed.microbatch(0)), like)

    def body(i, total):
        part = function(packed.microbatch(i))
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part)

    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
    return jax.lax.fori_loop(0, packed.count, body, zeros)


def map_to_sequences(packed: PackedBatch, function, num_sequences: int, width: int):
    """The [b, T] arrays of `function(microbatch)` as one [B, T]; zero elsewhere."""
    return map_to_sequences_and_rows(packed, lambda m: (function(m), ()), num_sequences, width)[0]


def map_to_sequences_and_rows(packed: PackedBatch, function, num_sequences: int, width: int):
    """The results of `function(microbatch)` over a batch, some by sequence and some by row.

    It returns a pair of [b, T] and [R, W, _] arrays: the first become one [B, T], the second
    [M, R, W, _]; zero elsewhere.
    """
    if packed.is_staged:
        function = mesh_lib.vmap_over_stages(function)
    sequence_arrays, row_arrays = jax.eval_shape(lambda: function(packed.microbatch(0)))
    count = packed.microbatches.rows.shape[0]
    zeros = (
        jax.tree.map(lambda a: jnp.zeros((num_sequences, width), a.dtype), sequence_arrays),
        jax.tree.map(lambda a: jnp.zeros((count, *a.shape), a.dtype), row_arrays),
    )

    def body(i, total):
        microbatch = packed.microbatch(i)
        sequence_arrays, row_arrays = function(microbatch)
        return (
            jax.tree.map(microbatch.put, total[0], sequence_arrays),
            jax.tree.map(lambda target, part: target.at[i].set(part), total[1], row_arrays),
        )

    sequence_arrays, row_arrays = jax.lax.fori_loop(0, packed.count, body, zeros)
    if packed.is_staged:
        row_arrays = jax.tree.map(lambda a: jax.lax.collapse(a, 0, 2), row_arrays)
    return sequence_arrays, row_arrays
