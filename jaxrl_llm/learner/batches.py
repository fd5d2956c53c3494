"""The sequences of a step as inputs of the update: whole, or in minibatches of packed rows."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl_llm.config import RLConfig
from jaxrl_llm.models import context_parallel
from jaxrl_llm.packing import packed_batch, row_layout
from jaxrl_llm.packing.packed_batch import PackedBatch
from jaxrl_llm.types import Estimates, Minibatch, Predictions, Rollouts

# For each update of a step: the sequences it reads, in ascending order, and its key.
UpdateOrder = Sequence[tuple[Int[np.ndarray, " b"], jax.Array]]
# The `scored` argument of `Packer.pack` that scores all tokens, whatever the step's shape.
EVERY_TOKEN = np.ones((1, 1), bool)
# Of a microbatch's sequences padded to one width, in tokens: below, room for all costs little.
_MAX_PADDED_TOKENS = 1 << 22


class BatchKind(NamedTuple):
    """The sizes that decide how many rows a batch needs. Another mesh may split its rows anew."""

    num_sequences: int
    width: int  # tokens of a row
    num_shards: int


@dataclasses.dataclass
class ShapeMemo:
    """The largest sizes of a run's batches so far; later batches get them too."""

    # 1 if `Packer.fix_shapes` has fixed the shapes for this number of shards.
    fixed: dict[int, int] = dataclasses.field(default_factory=dict)
    # Width of rows with shared prefixes, by the width of those without; 0: sharing does not pay.
    shared_width: dict[BatchKind, int] = dataclasses.field(default_factory=dict)
    # Rows of a microbatch: of a batch that fits into one, and of each of several.
    rows: dict[BatchKind, int] = dataclasses.field(default_factory=dict)
    several_rows: dict[BatchKind, int] = dataclasses.field(default_factory=dict)
    # Microbatches by num_sequences; sequences of a microbatch by num_sequences and its rows.
    microbatches: dict[int, int] = dataclasses.field(default_factory=dict)
    slots: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    # By the width of a row: eighths of it that the head computes, blocks of keys of a query.
    scored_eighths: dict[int, int] = dataclasses.field(default_factory=dict)
    key_blocks: dict[int, int] = dataclasses.field(default_factory=dict)

    def grow_scored(self, width: int, eighths: int) -> int:
        """The most eighths of a row of this width that were scored so far."""
        self.scored_eighths[width] = max(eighths, self.scored_eighths.get(width, 0))
        return self.scored_eighths[width]

    def to_json(self) -> dict[str, int]:
        """One flat table, as checkpoints store it."""
        return {
            text.format(*(key if isinstance(key, tuple) else (key,))): size
            for field, text in _MEMO_KEYS.items()
            for key, size in getattr(self, field).items()
        }

    @classmethod
    def from_json(cls, state: Mapping[str, int]) -> "ShapeMemo":
        """The memo that `to_json` turned into this table; keys of other versions are dropped."""
        memo = cls()
        for text, size in state.items():
            for field, pattern in _MEMO_KEYS.items():
                if match := re.fullmatch(pattern.replace("{}", r"(\d+)"), text):
                    numbers = tuple(map(int, match.groups()))
                    key = BatchKind(*numbers) if len(numbers) == 3 else numbers
                    getattr(memo, field)[key if len(key) > 1 else key[0]] = size
        return memo


_MEMO_KEYS = {
    "fixed": "settled over {}",
    "shared_width": "shared by {} of {} over {}",
    "rows": "{} in rows of {} over {}",
    "several_rows": "microbatches of {} in rows of {} over {}",
    "microbatches": "microbatches of {}",
    "slots": "places of {} in {} rows",
    "scored_eighths": "scored in rows of {}",
    "key_blocks": "blocks seen in rows of {}",
}


@dataclasses.dataclass(eq=False)
class Packer:
    """Packs sequences into rows on the host, in few shapes: every new one is a compilation.

    `fix_shapes` fixes the shapes of an RL run before its first step: all steps have the shapes of
    one whose sequences are as long as may be, and fill some of its microbatches, which are four
    where that is not slow. Without it the first step of its kind decides. Where that fills several
    microbatches, they get the same number of rows each; later steps fill more or fewer of them,
    unless that would waste an eighth. Where it fits into one, its rows are rounded up to the most
    that such sequences have needed so far, or to a half, quarter, ... of it. A row holds no more
    scored tokens than the head has columns for. All this is state: a resumed run restores it and
    repeats the same shapes.

    Sequences may share the tokens of a common prefix. Rows are then as wide as pays: a wider row
    holds more of a group, but its attention costs more.
    """

    max_tokens: int  # per device in one microbatch
    num_shards: int  # devices that rows are split over
    length_shards: int = 1  # devices that share each row; with more than 1 no prefix is shared
    # Tokens of a row at which attention costs as much as the rest of the network; 0: no prefix is
    # shared.
    attention_parity: int = 0
    max_scored: int = 0  # most scored tokens of a sequence; 0: not known
    min_efficient_tokens: int = 3072  # on a device, below which a microbatch is slow
    stages: int = 1  # pipeline stages: the least number of microbatches, some of them padding
    scores_observations: bool = False  # log-probs of tool results too, for a loss on them
    _memo: ShapeMemo = dataclasses.field(default_factory=ShapeMemo)

    def get_state(self) -> dict[str, int]:
        """The shapes so far, for JSON."""
        return self._memo.to_json()

    def set_state(self, state: Mapping[str, int]) -> None:
        """Restores a state of `get_state`."""
        self._memo = ShapeMemo.from_json(state)

    @property
    def _is_settled(self) -> bool:
        return self.num_shards in self._memo.fixed

    @property
    def _may_share(self) -> bool:
        return bool(self.attention_parity) and self.length_shards == 1

    def fix_shapes(
        self, counts: Sequence[int], *, samples: int, prompt: int, usual: int, width: int
    ) -> list[PackedBatch]:
        """Fixes the shapes of all batches of a run; an example of each kind, to compile with.

        Later batches fill more or fewer microbatches of these. A resumed run keeps the shapes of
        its state; if it began without `fix_shapes`, nothing is fixed and the list is empty. Row
        width and scored columns are those that pay for prompts of the usual length: most steps have
        such.

        Args:
          counts: Sequences of each kind of batch, those of a step first.
          samples: Sequences of one prompt, beside each other in a step.
          prompt: Tokens of the longest prompt.
          usual: Tokens of a prompt in the mean, from 1 to `prompt`.
          width: Tokens of a row; a sequence has at most as many.
        """
        if self._memo != ShapeMemo() and not self._memo.fixed:
            return []
        # Two lengths are at work. If the longest prompts decided the width of rows and the scored
        # columns, all steps would pay for a few of them: so the usual prompt decides these first.
        # Then a batch of the longest sequences is packed, and the rows it needs are remembered.
        if not self._is_settled:
            for count in counts:
                self._settle_rows(count, samples, usual, width - prompt, width)
        # From here `_is_settled`, which `_num_rows` reads while it packs the longest sequences.
        self._memo.fixed[self.num_shards] = 1
        lengths = np.full(counts[0], width)
        responses = np.tile(np.arange(width) >= prompt, (counts[0], 1))
        groups = np.arange(counts[0]) // samples
        return [
            self.pack(
                lengths,
                # A minibatch has a part of the samples of each prompt.
                np.arange(0, counts[0], max(1, counts[0] // count))[:count],
                width=width,
                scored=EVERY_TOKEN if self.length_shards > 1 else responses,
                common=packed_batch.SharedPrefixes(groups, np.full(counts[0], prompt)),
            )
            for count in counts
        ]

    def _settle_rows(
        self, count: int, samples: int, prompt: int, response: int, width: int
    ) -> None:
        """Fixes the width of rows, and their scored columns, for prompts of this length."""
        shared_width = 0
        if self._may_share and samples > 1:
            common = packed_batch.SharedPrefixes(
                np.arange(count) // samples, np.full(count, prompt)
            )
            lengths = np.full(count, prompt + response)
            shared_width = self._shared_width(lengths, common, width)
        responses = response * (samples if shared_width else 1)
        eighths = -(-8 * responses // (prompt + responses))
        self._memo.grow_scored(shared_width or width, eighths)

    def _shared_width(
        self, lengths: Int[np.ndarray, " b"], common: packed_batch.SharedPrefixes, width: int
    ) -> int:
        """The width of rows in which prefixes are shared; 0 if sharing does not pay."""
        kind = BatchKind(len(lengths), width, self.num_shards)
        shared_width = self._memo.shared_width.get(kind, -1)
        if not 0 <= shared_width <= self.max_tokens:
            shared_width = row_layout.best_row_width(
                lengths, common, width, self.max_tokens, self.num_shards, self.attention_parity
            )
            self._memo.shared_width[kind] = shared_width
        return shared_width

    def _num_rows(self, needed: int, num_sequences: int, width: int, growing: bool) -> int:
        """The rows R of each microbatch, a multiple of the shards, for a batch of `needed` rows.

        `growing`: some sequence is shorter than a row, so that a later batch may need more rows.
        """
        shards = self.num_shards
        # The most rows of one microbatch: a device's token budget, on all shards.
        cap = self.max_tokens * self.length_shards // width * shards
        kind, memo = BatchKind(num_sequences, width, shards), self._memo
        fewest = self.min_efficient_tokens // width
        # The first batch of its kind. While shapes are settled it is the longest there can be: in
        # one microbatch of its size every shorter step would compute its padding. In four smaller
        # ones a step leaves out those it does not fill (`PackedBatch.count`).
        if kind not in memo.several_rows:
            if self._is_settled:
                cap = min(cap, max(-(-needed // (4 * shards)), fewest, 1) * shards)
            if self.stages > 1:
                cap = min(cap, max(1, needed // (self.stages * shards)) * shards)
        if needed > cap or kind in memo.several_rows:
            # Several microbatches. `even` would divide these rows evenly over the fewest that fit,
            # but differs from step to step, and each size is a compilation. So the size of the
            # first step (`row_layout.rows_per_microbatch`) stays, unless it is over the budget, or,
            # in a run that is not settled, computes over an eighth of the rows in vain.
            even = -(-needed // (-(-needed // cap) * shards)) * shards
            thin = row_layout.rows_per_microbatch(needed, even, shards, fewest)
            rows = memo.several_rows.get(kind, thin)
            wasted = -(-needed // rows) * rows - -(-needed // even) * even
            wasteful = not self._is_settled and wasted > max(needed // 8, fewest, shards)
            if rows > cap or wasteful:
                rows = even
            memo.several_rows[kind] = rows
            return rows
        # One microbatch: the most rows that were needed so far. Where shapes are not settled, a
        # much smaller batch has a half, a quarter, ... of them: a few more compilations, but it
        # never computes twice the rows it needs (up to a multiple of the shards).
        if needed > memo.rows.get(kind, 0):
            # Some room for the next step, but no more rows than sequences can fill.
            roomy = min(needed + max(needed // 16, growing), num_sequences)
            memo.rows[kind] = min(cap, -(-roomy // shards) * shards)
        rows = min(cap, memo.rows[kind])
        while not self._is_settled and rows % (2 * shards) == 0 and rows // 2 >= needed:
            rows //= 2
        return rows

    def _num_microbatches(
        self,
        groups: list[list[list[packed_batch.PrefixPiece]]],
        num_sequences: int,
        num_rows: int,
        width: int,
    ) -> tuple[int, int]:
        """The number M of microbatches, and of sequences in each, with room for later steps."""
        count, memo = len(groups), self._memo
        per_microbatch = max(
            sum(len(piece.members) for row in group for piece in row) for group in groups
        )
        max_count = memo.microbatches.get(num_sequences, 1)
        if count > max_count:
            room = min(count + max(1, count // 4), -(-num_sequences // num_rows))
            max_count = packed_batch.bucket(max(count, room))
            memo.microbatches[num_sequences] = max_count
        kind = num_sequences, num_rows
        if per_microbatch > memo.slots.get(kind, 0):
            room = min(2 * per_microbatch, num_sequences)
            if self._is_settled and num_sequences * width <= _MAX_PADDED_TOKENS:
                room = num_sequences  # short ones may all share a microbatch
            memo.slots[kind] = packed_batch.bucket(room)
        return -(-max_count // self.stages) * self.stages, memo.slots[kind]

    def _num_scored(self, needed: int, width: int) -> int:
        """The columns of a row that the head computes, in eighths of a row; it never shrinks."""
        eighths = min(8, -(-max(needed, self.max_scored) * 8 // width))
        return -(-width * self._memo.grow_scored(width, eighths) // 8)

    def _num_key_blocks(self, needed: int, width: int) -> int:
        """The blocks of keys that a block of queries attends to (0: all); it never shrinks."""
        max_blocks = self._memo.key_blocks.get(width, 0)
        if needed > max_blocks:
            max_blocks = self._memo.key_blocks[width] = row_layout.with_slack(width, needed)
        return max_blocks if row_layout.keys_per_query(width, max_blocks) < width else 0

    def _balanced_microbatches(
        self, packed: list[list[int]], lengths: Int[np.ndarray, " b"], num_rows: int
    ) -> list[list[list[int]]]:
        """The rows of each microbatch, shard after shard, each shard at about the same cost."""
        num_groups = -(-len(packed) // num_rows)
        rows = packed + [[]] * (num_groups * num_rows - len(packed))
        if self.num_shards == 1:
            return [rows[i : i + num_rows] for i in range(0, len(rows), num_rows)]
        # Shards of a microbatch wait for each other. So all rows are divided into parts of equal
        # cost, one for each shard of each microbatch, and parts of similar cost stand together.
        costs = np.array([packed_batch.workload(lengths[row]).sum() for row in rows])
        num_parts = num_groups * self.num_shards
        parts = packed_batch.balanced_partition(costs, num_parts)
        parts.sort(key=lambda part: -costs[part].sum())
        row_order = [row for part in parts for row in part]
        return [
            [rows[r] for r in row_order[i : i + num_rows]]
            for i in range(0, len(row_order), num_rows)
        ]

    def sequences_by_device(self, packed: PackedBatch) -> list[list[int]]:
        """The sequences of each device, of those that rows are split over."""
        microbatches = packed.microbatches
        shares: list[list[int]] = [[] for _ in range(self.num_shards)]
        local_rows = microbatches.segment_ids.shape[1] // self.num_shards
        for sequences, rows in zip(microbatches.sequences, microbatches.rows, strict=True):
            for sequence, row in zip(sequences.tolist(), rows.tolist(), strict=True):
                if sequence < len(packed.is_member):
                    shares[row // local_rows].append(sequence)
        return shares

    def pack(
        self,
        lengths: Int[np.ndarray, " B"],
        chosen: Int[np.ndarray, " b"],
        *,
        width: int,
        scored: Bool[np.ndarray, "#B #T"] = EVERY_TOKEN,
        common: packed_batch.SharedPrefixes = packed_batch.NO_SHARED_PREFIXES,
    ) -> PackedBatch:
        """The sequences `is_member` of a step in packed rows; `lengths` are of all its sequences.

        Args:
          width: Tokens of a row; at least those of a sequence, at most a device's budget.
          scored: Tokens that need log-probs, none the first of its sequence.
          common: Prefixes that sequences have in common. Shared where that pays and `scored` is
            given.
        """
        if self.length_shards > 1:
            width = context_parallel.padded_row_width(width, self.length_shards)
        everywhere = scored.size == 1
        no_prefixes = packed_batch.no_shared_prefixes(len(chosen))
        share = self._may_share and not everywhere and bool(common.lengths.any())
        prefixes = common.subset(chosen) if share or common.same_row else no_prefixes
        shared_width = self._shared_width(lengths[chosen], prefixes, width) if share else 0
        growing = bool(lengths[chosen].min() < width)
        width = shared_width or width
        scored_mask = np.broadcast_to(scored, (len(lengths), width)) if everywhere else scored
        num_scored = np.zeros(len(chosen), np.int64) if everywhere else scored_mask[chosen].sum(-1)
        # Scored columns were fixed for rows of this width: then no row may hold more of them.
        max_scored = self._memo.scored_eighths.get(width, 0)
        max_scored = self._num_scored(int(num_scored.max()), width) if max_scored else width
        grouped = shared_width or common.same_row
        pieces, rows = row_layout.pack_pieces(
            lengths[chosen], prefixes if grouped else no_prefixes, width, num_scored, max_scored
        )
        num_rows = self._num_rows(len(rows), len(chosen), width, growing)
        groups = self._balanced_microbatches(
            rows, np.array([piece.length for piece in pieces]), num_rows
        )
        batches = [[[pieces[p] for p in row] for row in group] for group in groups]
        num_microbatches, num_slots = self._num_microbatches(batches, len(chosen), num_rows, width)
        # Host arrays: they go to the device with the program that uses them.
        shape = num_microbatches, num_rows, width
        arrays: Any = row_layout.build_rows(batches, shape, num_slots, lengths, chosen, scored_mask)
        scored_columns = width
        if not everywhere:
            scored_columns = self._num_scored(
                row_layout.max_listed_columns(arrays.scored_columns), width
            )
        key_blocks = 0
        if shared_width:
            key_blocks = self._num_key_blocks(
                row_layout.max_listed_columns(arrays.key_blocks), width
            )
        microbatches = dataclasses.replace(
            arrays,
            prefix_ids=arrays.prefix_ids[..., :shared_width],
            key_blocks=arrays.key_blocks[..., : None if key_blocks else 0, :key_blocks],
            scored_columns=arrays.scored_columns[..., :scored_columns],
            previous_columns=arrays.previous_columns[..., :scored_columns],
        )
        count: Any = np.array(len(groups), np.int32)
        is_chosen: Any = np.isin(np.arange(len(lengths)), chosen)
        return PackedBatch(microbatches, count, is_chosen)

    def _scored_tokens(self, rollouts: Rollouts) -> Bool[np.ndarray, "B T"]:
        if not self.scores_observations:
            return rollouts.response_mask
        begun = np.maximum.accumulate(rollouts.response_mask, axis=1)
        return begun & (np.arange(begun.shape[1]) < rollouts.lengths[:, None])

    def pack_rollouts(
        self,
        rollouts: Rollouts,
        chosen: Int[np.ndarray, " b"] | None = None,
        common: packed_batch.SharedPrefixes | None = None,
    ) -> PackedBatch:
        """Sampled sequences (by default all) in packed rows, the tokens of responses scored.

        With `scores_observations` all tokens after a row's first response token are.

        `common` is `shared_prompts(rollouts)`, where that is computed already.
        """
        return self.pack(
            rollouts.lengths,
            np.arange(len(rollouts.lengths)) if chosen is None else chosen,
            width=rollouts.tokens.shape[1],
            # Choosing tokens of a row would gather over a dim that the sequence axis splits.
            scored=EVERY_TOKEN if self.length_shards > 1 else self._scored_tokens(rollouts),
            common=shared_prompts(rollouts) if common is None else common,
        )


def shared_prompts(rollouts: Rollouts) -> packed_batch.SharedPrefixes:
    """The prefixes that the samples of each prompt share before their own tokens."""
    return packed_batch.shared_prefixes(
        rollouts.tokens, rollouts.lengths, rollouts.response_mask, rollouts.group_ids
    )


def padding_share(packed: PackedBatch) -> float:
    """The share of packed columns that hold no token."""
    used = packed.microbatches.segment_ids[: int(packed.count)]
    return float((used == 0).mean())


def assemble(rollouts: Rollouts, predictions: Predictions, estimates: Estimates) -> Minibatch:
    """All sequences of the step, ready for the loss."""
    arrays = {**vars(rollouts), **vars(predictions), **vars(estimates)}
    arrays["proximal_shares"] = np.zeros(rollouts.tokens.shape, np.float32)
    names = [field.name for field in dataclasses.fields(Minibatch)]
    return Minibatch(**{name: jnp.asarray(arrays[name]) for name in names})


def proximal_shares(rollouts: Rollouts, version: int) -> Float[np.ndarray, "B T"]:
    """The `Minibatch.proximal_shares` of a step whose policy begins with `version`."""
    ages = np.maximum(version - rollouts.versions, 0)
    return np.where(rollouts.response_mask, ages / (ages + 1.0), 0.0).astype(np.float32)


def update_order(config: RLConfig, count: int, key: jax.Array) -> UpdateOrder:
    """The sequences and key of each update: in every epoch all `count` of the step, reshuffled.

    Random numbers are drawn on a device, which works in order, and the host waits for them here: so
    this is called before the devices have other work.
    """
    # Episodes in several rows make minibatches larger, not more.
    num_minibatches = config.sequences_per_step // config.minibatch_size
    is_larger = count > config.sequences_per_step
    size = -(-count // num_minibatches) if is_larger else config.minibatch_size
    updates = []
    for epoch in range(config.trainer.epochs):
        epoch_key = jax.random.fold_in(key, epoch)
        shuffled = np.asarray(jax.random.permutation(epoch_key, count))
        for start in range(0, count, size):
            chosen = np.sort(shuffled[start : start + size])
            updates.append((chosen, jax.random.fold_in(epoch_key, start)))
    return updates


def minibatches(
    packer: Packer, rollouts: Rollouts, order: UpdateOrder
) -> Iterator[tuple[PackedBatch, jax.Array]]:
    """Yields the packed sequences of each update, and its key."""
    common = shared_prompts(rollouts)  # once a step: it reads every token
    for chosen, key in order:
        yield packer.pack_rollouts(rollouts, chosen, common), key
