"""Sequences laid out for the models: packed rows, cut into microbatches.

Losses see sequences as [B, T]; models see packed rows [R, W] that hold several sequences
each. A `Plan` is the map between the two and nothing else: packing is decided once on the
host, and no array of the step is moved or copied for it.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.data import packing
from jaxrl_llm.models import sequence_attention
from jaxrl_llm.planning import filling
from jaxrl_llm.sharding.mesh import constrain

# What `Layout.plan` scores by default, whatever the step.
EVERY_TOKEN = np.ones((1, 1), bool)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Microbatch:
    """Packed rows and the sequences in them. With a leading dim M: all microbatches of a plan.

    What several sequences begin with may stand once, before what is their own; the segment of
    such a beginning is minus that of the first of them.
    """

    segment_ids: Int[Array, "R W"]  # 1 + number of the sequence in the step; 0 is padding
    prefix_ids: Int[Array, "R W | R 0"]  # segment continued, or its own; [R, 0]: nothing shared
    key_blocks: Int[Array, "R Q C"]  # of each block of queries what `full_attention` asks for
    positions: Int[Array, "R W"]  # of each token in its own sequence
    sequences: Int[Array, " b"]  # which sequences of the step; B where the place is empty
    rows: Int[Array, " b"]  # row of each sequence
    starts: Int[Array, " b"]  # its first position in that row, were its own tokens all it has
    beginnings: Int[Array, " b"]  # where the beginning that it shares stands
    shared: Int[Array, " b"]  # tokens of that beginning
    scored: Int[Array, "R K"]  # positions that the policy chose; W where there is none
    before: Int[Array, "R K"]  # position of the token before each of them

    @property
    def scores_everything(self) -> bool:
        """Whether every token that follows another one in the row is scored."""
        return self.scored.shape == self.segment_ids.shape and not self.prefix_ids.shape[-1]

    def packed(self, tokens: Int[Array, "B T"]) -> Int[Array, "R W"]:
        """Returns the packed rows of a [B, T] array; zero at padding."""
        values = tokens[jnp.maximum(jnp.abs(self.segment_ids) - 1, 0), self.positions]
        return constrain(jnp.where(self.segment_ids != 0, values, 0), "batch", "length")

    def unpacked(
        self, packed: Float[Array, "R W"], lengths: Int[Array, " B"], width: int
    ) -> Float[Array, "b T"]:
        """Returns packed values by sequence, zero past each sequence's end."""
        places = jnp.arange(width)
        inside = places < self.take(lengths)[:, None]
        begins = self.starts[:, None]
        if self.prefix_ids.shape[-1]:
            begins = jnp.where(places < self.shared[:, None], self.beginnings[:, None], begins)
        columns = jnp.where(inside, begins + places, 0)
        return jnp.where(inside, packed[self.rows[:, None], columns], 0)

    def take(self, values: Array) -> Array:
        """Returns the entries of this microbatch's sequences of a [B, ...] array, else zero."""
        return jnp.take(values, self.sequences, axis=0, mode="fill", fill_value=0)

    def put(self, target: Array, values: Array) -> Array:
        """Returns the [B, ...] `target` with this microbatch's sequences set to `values`."""
        return target.at[self.sequences].set(values, mode="drop")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """How some sequences of a step are laid out."""

    microbatches: Microbatch  # every field with a leading dim M
    count: Int[Array, ""]  # microbatches that hold anything; the rest of M is padding
    chosen: Bool[Array, " B"]  # sequences of this plan

    def padding_share(self) -> float:
        """Returns the share of packed positions that hold no token."""
        used = self.microbatches.segment_ids[: int(self.count)]
        return float((used == 0).mean())


class Layout:
    """Chooses the shapes of plans, few of them: every new one is a compilation.

    The first step of its kind decides. What fills several microbatches is spread over them evenly;
    steps after it fill more or fewer of the same, unless that would waste an eighth. What fits
    into one is rounded up to the most rows that as many sequences in rows as wide have needed so
    far, or to a half, quarter, ... of it. Rows take no more scored tokens than the head looks at.
    That memory is state: a resumed run restores it and so repeats the same shapes.

    Sequences that begin alike may share their beginning's tokens. Rows are then as wide as pays:
    a wider row holds more of a group, and attention looks at all of it. The first step of its
    kind decides for those after it.
    """

    def __init__(
        self,
        max_tokens: int,
        num_shards: int,
        length_shards: int = 1,
        attention_parity: int = 0,
        max_scored: int = 0,
        fewest_tokens: int = 3072,
    ):
        """
        Args:
          max_tokens: Tokens that a device may hold in one microbatch.
          num_shards: Devices that rows are split over.
          length_shards: Devices that share each row; beginnings are shared with one alone.
          attention_parity: Tokens of a row at which attention costs as much as the rest of the
            network; 0: no sequences share their beginnings.
          max_scored: Tokens of a sequence that may be scored at most; 0: not known.
          fewest_tokens: On a device, below which a microbatch is slow.
        """
        self._max_tokens = max_tokens * length_shards
        self._num_shards = num_shards
        self._length_shards = length_shards
        self._parity = attention_parity if length_shards == 1 else 0
        self._max_scored = max_scored
        self._fewest_tokens = fewest_tokens
        self._most_rows: dict[str, int] = {}

    def get_state(self) -> dict[str, int]:
        """Returns what has been seen, as JSON can hold it."""
        return dict(self._most_rows)

    def set_state(self, state: Mapping[str, int]) -> None:
        """Goes on from a state that `get_state` returned."""
        self._most_rows = dict(state)

    def _shared_width(
        self, lengths: Int[np.ndarray, " b"], common: packing.Beginnings, width: int
    ) -> int:
        """Returns the tokens of rows in which beginnings are shared; 0 if that does not pay."""
        kind = f"shared by {len(lengths)} of {width} over {self._num_shards}"
        found = self._most_rows.get(kind, -1)
        if not 0 <= found <= self._max_tokens:
            found = filling.best_width(
                lengths, common, width, self._max_tokens, self._num_shards, self._parity
            )
            self._most_rows[kind] = found
        return found

    def _num_rows(self, needed: int, num_sequences: int, width: int, growing: bool) -> int:
        """Returns the rows of a microbatch, a multiple of the shards."""
        shards = self._num_shards
        cap = self._max_tokens // width * shards
        # A run may go on on another mesh, whose rows divide otherwise.
        kind = f"{num_sequences} in rows of {width} over {shards}"
        several = f"microbatches of {kind}"
        if needed > cap or several in self._most_rows:
            fewest = self._fewest_tokens // width
            even = -(-needed // (-(-needed // cap) * shards)) * shards
            thin = filling.thin(needed, even, shards, fewest)
            rows = self._most_rows.get(several, thin)
            wasted = -(-needed // rows) * rows - -(-needed // even) * even
            if rows > cap or wasted > max(needed // 8, fewest, shards):
                rows = even
            self._most_rows[several] = rows
            return rows
        if needed > self._most_rows.get(kind, 0):
            # Some room for the next step, but no more rows than sequences can fill.
            roomy = min(needed + max(needed // 16, growing), num_sequences)
            self._most_rows[kind] = min(cap, -(-roomy // shards) * shards)
        rows = min(cap, self._most_rows[kind])
        while rows % (2 * shards) == 0 and rows // 2 >= needed:
            rows //= 2
        return rows

    def _num_microbatches(
        self, groups: list[list[list[packing.Piece]]], num_sequences: int, num_rows: int
    ) -> tuple[int, int]:
        """Returns places for microbatches, and for the sequences of each, with room for others."""
        count = len(groups)
        held = max(sum(len(piece.members) for row in group for piece in row) for group in groups)
        most = self._most_rows.get(f"microbatches of {num_sequences}", 1)
        if count > most:
            room = min(count + max(1, count // 4), -(-num_sequences // num_rows))
            most = packing.bucket(max(count, room))
            self._most_rows[f"microbatches of {num_sequences}"] = most
        kind = f"places of {num_sequences} in {num_rows} rows"
        if held > self._most_rows.get(kind, 0):
            self._most_rows[kind] = packing.bucket(min(2 * held, num_sequences))
        return most, self._most_rows[kind]

    def _num_scored(self, needed: int, width: int) -> int:
        """Returns the positions of a row that the head looks at: eighths of it, never fewer."""
        kind = f"scored in rows of {width}"
        eighths = min(8, -(-max(needed, self._max_scored) * 8 // width))
        self._most_rows[kind] = max(eighths, self._most_rows.get(kind, 0))
        return -(-width * self._most_rows[kind] // 8)

    def _num_seen(self, needed: int, width: int) -> int:
        """Returns the blocks of keys that queries are compared with, never fewer; 0: all."""
        kind = f"blocks seen in rows of {width}"
        if needed > self._most_rows.get(kind, 0):
            self._most_rows[kind] = filling.with_room(needed)
        most = self._most_rows.get(kind, 0)
        return most if filling.keys_compared(width, most) < width else 0

    def _balanced(
        self, packed: list[list[int]], lengths: Int[np.ndarray, " b"], num_rows: int
    ) -> list[list[list[int]]]:
        """Returns the rows of each microbatch, in the order in which its shards take them.

        Shards get as many rows each; the cost is spread evenly over all shards of all
        microbatches, and shards that work at one time cost about the same.
        """
        num_groups = -(-len(packed) // num_rows)
        rows = packed + [[]] * (num_groups * num_rows - len(packed))
        if self._num_shards == 1:
            return [rows[i : i + num_rows] for i in range(0, len(rows), num_rows)]
        costs = np.array([packing.workload(lengths[row]).sum() for row in rows])
        num_parts = num_groups * self._num_shards
        parts = packing.balanced_partition(costs, num_parts, equal_size=True)
        parts.sort(key=lambda part: -costs[part].sum())
        order = [row for part in parts for row in part]
        return [[rows[r] for r in order[i : i + num_rows]] for i in range(0, len(order), num_rows)]

    def shares(self, plan: Plan) -> list[list[int]]:
        """Returns the sequences that each of the devices that rows are split over works on."""
        microbatches = plan.microbatches
        shares: list[list[int]] = [[] for _ in range(self._num_shards)]
        local_rows = microbatches.segment_ids.shape[1] // self._num_shards
        for sequences, rows in zip(microbatches.sequences, microbatches.rows, strict=True):
            for sequence, row in zip(sequences.tolist(), rows.tolist(), strict=True):
                if sequence < len(plan.chosen):
                    shares[row // local_rows].append(sequence)
        return shares

    def plan(
        self,
        lengths: Int[np.ndarray, " B"],
        chosen: Int[np.ndarray, " b"],
        *,
        width: int,
        scored: Bool[np.ndarray, "#B #T"] = EVERY_TOKEN,
        common: packing.Beginnings = packing.NOTHING_COMMON,
    ) -> Plan:
        """Returns the layout of the sequences `chosen`.

        Args:
          lengths: Tokens of every sequence of the step.
          chosen: Numbers of the sequences to lay out.
          width: Tokens of a row; no sequence is longer, no device's budget shorter.
          scored: Tokens whose log-probs are wanted, none of them the first of its sequence; by
            default all of them.
          common: What sequences begin with alike. Shared in a row where that pays and `scored`
            names tokens.
        """
        width = sequence_attention.row_width(width, self._length_shards)
        everywhere = scored.size == 1
        alone = packing.nothing_common(len(chosen))
        share = bool(self._parity) and not everywhere and bool(common.lengths.any())
        alike = common.of(chosen) if share else alone
        shared_width = self._shared_width(lengths[chosen], alike, width) if share else 0
        growing = bool(lengths[chosen].min() < width)
        width = shared_width or width
        asked = np.broadcast_to(scored, (len(lengths), width)) if everywhere else scored
        of_sequences = np.zeros(len(chosen), np.int64) if everywhere else asked[chosen].sum(-1)
        room = self._most_rows.get(f"scored in rows of {width}", 0)
        room = self._num_scored(int(of_sequences.max()), width) if room else width
        pieces, packed = filling.rows(
            lengths[chosen], alike if shared_width else alone, width, of_sequences, room
        )
        num_rows = self._num_rows(len(packed), len(chosen), width, growing)
        groups = self._balanced(packed, np.array([piece.length for piece in pieces]), num_rows)
        batches = [[[pieces[p] for p in row] for row in group] for group in groups]
        most, places = self._num_microbatches(batches, len(chosen), num_rows)
        laid = filling.filled(batches, (most, num_rows, width), places, lengths, chosen, asked)
        needed = width if everywhere else self._num_scored(int(laid.asked.sum(-1).max()), width)
        heads = filling.places(laid.asked, needed)
        seen = self._num_seen(laid.most_seen(), width) if shared_width else 0

        mask = np.zeros(len(lengths), bool)
        mask[chosen] = True
        # Host arrays: they go to the device with the program that uses them.
        fields: dict[str, Any] = {
            "segment_ids": laid.segment_ids,
            "prefix_ids": laid.prefix_ids if shared_width else laid.prefix_ids[..., :0],
            "key_blocks": filling.places(laid.sees if seen else laid.sees[..., :0, :0], seen),
            "positions": laid.positions,
            "sequences": laid.sequences,
            "rows": laid.rows,
            "starts": laid.starts,
            "beginnings": laid.beginnings,
            "shared": laid.shared,
            "scored": heads,
            "before": np.take_along_axis(laid.before, np.minimum(heads, width - 1), axis=-1),
        }
        of_plan: list[Any] = [np.int32(len(groups)), mask]
        return Plan(Microbatch(**fields), *of_plan)


def add_up(plan: Plan, function, like):
    """Returns the sum of `function(microbatch)` over a plan, in the shapes and dtypes of `like`."""
    microbatches = plan.microbatches
    if microbatches.rows.shape[0] == 1:
        part = function(jax.tree.map(lambda a: a[0], microbatches))
        return jax.tree.map(lambda a, b: a.astype(b.dtype), part, like)

    def body(i, total):
        part = function(jax.tree.map(lambda a: a[i], microbatches))
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part)

    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
    return jax.lax.fori_loop(0, plan.count, body, zeros)


def collect(plan: Plan, function, num_sequences: int, width: int):
    """Returns `function(microbatch)`'s [b, T] arrays put together as [B, T], zero elsewhere."""
    first = jax.tree.map(lambda a: a[0], plan.microbatches)
    shapes = jax.eval_shape(function, first)
    blank = jax.tree.map(lambda a: jnp.zeros((num_sequences, width), a.dtype), shapes)

    def body(i, total):
        microbatch = jax.tree.map(lambda a: a[i], plan.microbatches)
        return jax.tree.map(
            functools.partial(Microbatch.put, microbatch), total, function(microbatch)
        )

    return jax.lax.fori_loop(0, plan.count, body, blank)
