"""A step's sequences as the update reads them: whole, or in minibatches of packed rows."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from jaxrl_llm.config import RLConfig
from jaxrl_llm.data import packing
from jaxrl_llm.data.packing import PackedBatch
from jaxrl_llm.models import sequence_attention
from jaxrl_llm.planning import filling
from jaxrl_llm.types import Estimates, Minibatch, Predictions, Rollouts

# Of each update of a step: which sequences it reads, in ascending order, and its key.
Order = Sequence[tuple[Int[np.ndarray, " b"], jax.Array]]
# What `Packer.pack` scores by default, whatever the step.
EVERY_TOKEN = np.ones((1, 1), bool)
_MOST_PLACES = 1 << 22  # tokens of a microbatch's sequences side by side; fewer cost little


@dataclasses.dataclass(eq=False)
class Packer:
    """Packs sequences into rows on the host, in few shapes: every new one is a compilation.

    `settle` decides for a run of RL: all its steps have the shapes of one whose sequences are as
    long as may be, and fill some of its microbatches, which are four where that is not slow. Else
    the first step of its kind decides. Where it fills several microbatches, they get as many rows
    each; later steps fill more or fewer of the same, unless that would waste an eighth. Where it
    fits into one, that is rounded up to the most rows that such sequences have needed so far, or
    to a half, quarter, ... of it. A row holds no more scored tokens than the head looks at. All
    this is state: a resumed run restores it and repeats the same shapes.

    Sequences may share the tokens of a common prefix. Rows are then as wide as pays: a wider row
    holds more of a group, but attention looks at all of it.
    """

    max_tokens: int  # of a device in one microbatch
    num_shards: int  # devices that rows are split over
    length_shards: int = 1  # devices that share each row; with more than 1 no prefix is shared
    # Tokens of a row at which attention costs as much as the rest of the network; 0: no prefix is
    # shared.
    attention_parity: int = 0
    max_scored: int = 0  # most scored tokens of a sequence; 0: not known
    fewest_tokens: int = 3072  # on a device, below which a microbatch is slow
    stages: int = 1  # of the layers; as many microbatches are made at least, some of padding
    _most_rows: dict[str, int] = dataclasses.field(default_factory=dict)

    def get_state(self) -> dict[str, int]:
        """Returns the shapes so far, as JSON can hold them."""
        return dict(self._most_rows)

    def set_state(self, state: Mapping[str, int]) -> None:
        """Goes on from a state that `get_state` returned."""
        self._most_rows = dict(state)

    @property
    def _is_settled(self) -> bool:
        return self._settled in self._most_rows

    @property
    def _settled(self) -> str:
        return f"settled over {self.num_shards}"

    @property
    def _may_share(self) -> bool:
        return bool(self.attention_parity) and self.length_shards == 1

    def settle(
        self, counts: Sequence[int], *, samples: int, prompt: int, usual: int, width: int
    ) -> list[PackedBatch]:
        """Returns a batch of each of so many sequences, with the shapes that all others will have.

        Later batches fill more or fewer microbatches of these. Nothing changes if the state is that
        of a run which has begun; none is returned if that has not settled. Rows are as wide, and
        have as many scored tokens, as pays for prompts of the usual length: most steps have such.

        Args:
          counts: Sequences of each kind of batch, those of a step first.
          samples: Sequences of one prompt, beside each other in a step.
          prompt: Tokens of the longest prompt.
          usual: Tokens of a prompt in the mean, from 1 to `prompt`.
          width: Tokens of a row; a sequence has at most as many.
        """
        has_begun = self._most_rows and not any(k.startswith("settled") for k in self._most_rows)
        if has_begun:
            return []
        if self._settled not in self._most_rows:
            for count in counts:
                self._settle_rows(count, samples, usual, width - prompt, width)
        self._most_rows[self._settled] = 1
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
                common=packing.Beginnings(groups, np.full(counts[0], prompt)),
            )
            for count in counts
        ]

    def _settle_rows(
        self, count: int, samples: int, prompt: int, response: int, width: int
    ) -> None:
        """Decides the width of rows, and their scored columns, by prompts of this length."""
        shared_width = 0
        if self._may_share and samples > 1:
            common = packing.Beginnings(np.arange(count) // samples, np.full(count, prompt))
            lengths = np.full(count, prompt + response)
            shared_width = self._shared_width(lengths, common, width)
        responses = response * (samples if shared_width else 1)
        room = -(-8 * responses // (prompt + responses))
        kind = f"scored in rows of {shared_width or width}"
        self._most_rows[kind] = max(room, self._most_rows.get(kind, 0))

    def _shared_width(
        self, lengths: Int[np.ndarray, " b"], common: packing.Beginnings, width: int
    ) -> int:
        """Returns the width of rows in which prefixes are shared; 0 if that does not pay."""
        kind = f"shared by {len(lengths)} of {width} over {self.num_shards}"
        found = self._most_rows.get(kind, -1)
        if not 0 <= found <= self.max_tokens:
            found = filling.best_width(
                lengths, common, width, self.max_tokens, self.num_shards, self.attention_parity
            )
            self._most_rows[kind] = found
        return found

    def _num_rows(self, needed: int, num_sequences: int, width: int, growing: bool) -> int:
        """Returns the rows of a microbatch, a multiple of the shards."""
        shards = self.num_shards
        cap = self.max_tokens * self.length_shards // width * shards
        # A run may go on on another mesh, whose rows divide otherwise.
        kind = f"{num_sequences} in rows of {width} over {shards}"
        several = f"microbatches of {kind}"
        fewest = self.fewest_tokens // width
        if several not in self._most_rows:
            if self._is_settled:  # most steps are shorter than this one, and leave some of four out
                cap = min(cap, max(-(-needed // (4 * shards)), fewest, 1) * shards)
            if self.stages > 1:
                cap = min(cap, max(1, needed // (self.stages * shards)) * shards)
        if needed > cap or several in self._most_rows:
            even = -(-needed // (-(-needed // cap) * shards)) * shards
            thin = filling.thin(needed, even, shards, fewest)
            rows = self._most_rows.get(several, thin)
            wasted = -(-needed // rows) * rows - -(-needed // even) * even
            wasteful = not self._is_settled and wasted > max(needed // 8, fewest, shards)
            if rows > cap or wasteful:
                rows = even
            self._most_rows[several] = rows
            return rows
        if needed > self._most_rows.get(kind, 0):
            # Some room for the next step, but no more rows than sequences can fill.
            roomy = min(needed + max(needed // 16, growing), num_sequences)
            self._most_rows[kind] = min(cap, -(-roomy // shards) * shards)
        rows = min(cap, self._most_rows[kind])
        while not self._is_settled and rows % (2 * shards) == 0 and rows // 2 >= needed:
            rows //= 2
        return rows

    def _num_microbatches(
        self, groups: list[list[list[packing.Piece]]], num_sequences: int, num_rows: int, width: int
    ) -> tuple[int, int]:
        """Returns how many microbatches, and sequences in each, later steps may have too."""
        count = len(groups)
        held = max(sum(len(piece.members) for row in group for piece in row) for group in groups)
        most = self._most_rows.get(f"microbatches of {num_sequences}", 1)
        if count > most:
            room = min(count + max(1, count // 4), -(-num_sequences // num_rows))
            most = packing.bucket(max(count, room))
            self._most_rows[f"microbatches of {num_sequences}"] = most
        kind = f"places of {num_sequences} in {num_rows} rows"
        if held > self._most_rows.get(kind, 0):
            room = min(2 * held, num_sequences)
            if self._is_settled and num_sequences * width <= _MOST_PLACES:
                room = num_sequences  # short ones may all share a microbatch
            self._most_rows[kind] = packing.bucket(room)
        return -(-most // self.stages) * self.stages, self._most_rows[kind]

    def _num_scored(self, needed: int, width: int) -> int:
        """Returns the columns of a row that the head looks at, in eighths; it never shrinks."""
        kind = f"scored in rows of {width}"
        eighths = min(8, -(-max(needed, self.max_scored) * 8 // width))
        self._most_rows[kind] = max(eighths, self._most_rows.get(kind, 0))
        return -(-width * self._most_rows[kind] // 8)

    def _num_seen(self, needed: int, width: int) -> int:
        """Returns the blocks of keys that queries are compared with (0: all); it never shrinks."""
        kind = f"blocks seen in rows of {width}"
        if needed > self._most_rows.get(kind, 0):
            self._most_rows[kind] = filling.with_room(width, needed)
        most = self._most_rows.get(kind, 0)
        return most if filling.keys_compared(width, most) < width else 0

    def _balanced(
        self, packed: list[list[int]], lengths: Int[np.ndarray, " b"], num_rows: int
    ) -> list[list[list[int]]]:
        """Returns the rows of each microbatch, shard after shard, of about the same cost each."""
        num_groups = -(-len(packed) // num_rows)
        rows = packed + [[]] * (num_groups * num_rows - len(packed))
        if self.num_shards == 1:
            return [rows[i : i + num_rows] for i in range(0, len(rows), num_rows)]
        costs = np.array([packing.workload(lengths[row]).sum() for row in rows])
        num_parts = num_groups * self.num_shards
        parts = packing.balanced_partition(costs, num_parts)
        parts.sort(key=lambda part: -costs[part].sum())
        order = [row for part in parts for row in part]
        return [[rows[r] for r in order[i : i + num_rows]] for i in range(0, len(order), num_rows)]

    def shares(self, packed: PackedBatch) -> list[list[int]]:
        """Returns the sequences that each device works on, of those that rows are split over."""
        microbatches = packed.microbatches
        shares: list[list[int]] = [[] for _ in range(self.num_shards)]
        local_rows = microbatches.segment_ids.shape[1] // self.num_shards
        for sequences, rows in zip(microbatches.sequences, microbatches.rows, strict=True):
            for sequence, row in zip(sequences.tolist(), rows.tolist(), strict=True):
                if sequence < len(packed.chosen):
                    shares[row // local_rows].append(sequence)
        return shares

    def pack(
        self,
        lengths: Int[np.ndarray, " B"],
        chosen: Int[np.ndarray, " b"],
        *,
        width: int,
        scored: Bool[np.ndarray, "#B #T"] = EVERY_TOKEN,
        common: packing.Beginnings = packing.NOTHING_COMMON,
    ) -> PackedBatch:
        """Returns the sequences `chosen` of a step, whose `lengths` are of all, in rows.

        Args:
          width: Tokens of a row; at least those of a sequence, at most a device's budget.
          scored: Tokens whose log-probs are wanted, none the first of its sequence.
          common: Prefixes that sequences have in common. Shared where that pays and `scored` is
            given.
        """
        if self.length_shards > 1:
            width = sequence_attention.row_width(width, self.length_shards)
        everywhere = scored.size == 1
        alone = packing.nothing_common(len(chosen))
        share = self._may_share and not everywhere and bool(common.lengths.any())
        alike = common.of(chosen) if share or common.together else alone
        shared_width = self._shared_width(lengths[chosen], alike, width) if share else 0
        growing = bool(lengths[chosen].min() < width)
        width = shared_width or width
        asked = np.broadcast_to(scored, (len(lengths), width)) if everywhere else scored
        of_sequences = np.zeros(len(chosen), np.int64) if everywhere else asked[chosen].sum(-1)
        room = self._most_rows.get(f"scored in rows of {width}", 0)
        room = self._num_scored(int(of_sequences.max()), width) if room else width
        grouped = shared_width or common.together
        pieces, in_rows = filling.rows(
            lengths[chosen], alike if grouped else alone, width, of_sequences, room
        )
        num_rows = self._num_rows(len(in_rows), len(chosen), width, growing)
        groups = self._balanced(in_rows, np.array([piece.length for piece in pieces]), num_rows)
        batches = [[[pieces[p] for p in row] for row in group] for group in groups]
        most, held = self._num_microbatches(batches, len(chosen), num_rows, width)
        # Host arrays: they go to the device with the program that uses them.
        made: Any = filling.filled(batches, (most, num_rows, width), held, lengths, chosen, asked)
        looked_at = width
        if not everywhere:
            looked_at = self._num_scored(filling.most_listed(made.scored), width)
        seen = 0
        if shared_width:
            seen = self._num_seen(filling.most_listed(made.key_blocks), width)
        microbatches = dataclasses.replace(
            made,
            prefix_ids=made.prefix_ids[..., :shared_width],
            key_blocks=made.key_blocks[..., : None if seen else 0, :seen],
            scored=made.scored[..., :looked_at],
            before=made.before[..., :looked_at],
        )
        count: Any = np.array(len(groups), np.int32)
        is_chosen: Any = np.isin(np.arange(len(lengths)), chosen)
        return PackedBatch(microbatches, count, is_chosen)

    def pack_rollouts(
        self,
        rollouts: Rollouts,
        chosen: Int[np.ndarray, " b"] | None = None,
        common: packing.Beginnings | None = None,
    ) -> PackedBatch:
        """Returns sampled sequences (by default all) in rows, the tokens of responses scored.

        `common` is `common_prompts(rollouts)`, where that is known.
        """
        return self.pack(
            rollouts.lengths,
            np.arange(len(rollouts.lengths)) if chosen is None else chosen,
            width=rollouts.tokens.shape[1],
            # Choosing tokens of a row would gather over a dim that the sequence axis splits.
            scored=EVERY_TOKEN if self.length_shards > 1 else rollouts.response_mask,
            common=common_prompts(rollouts) if common is None else common,
        )


def common_prompts(rollouts: Rollouts) -> packing.Beginnings:
    """Returns what the samples of each prompt have in common before their own tokens."""
    return packing.beginnings(
        rollouts.tokens, rollouts.lengths, rollouts.response_mask, rollouts.group_ids
    )


def padding_share(packed: PackedBatch) -> float:
    """Returns the share of packed columns that hold no token."""
    used = packed.microbatches.segment_ids[: int(packed.count)]
    return float((used == 0).mean())


def assemble(rollouts: Rollouts, predictions: Predictions, estimates: Estimates) -> Minibatch:
    """Returns all sequences of the step, ready for the loss."""
    known = {**vars(rollouts), **vars(predictions), **vars(estimates)}
    names = [field.name for field in dataclasses.fields(Minibatch)]
    return Minibatch(**{name: jnp.asarray(known[name]) for name in names})


def order(config: RLConfig, count: int, key: jax.Array) -> Order:
    """Returns each update's sequences and key: every epoch, all `count` of the step in a new order.

    What comes of a key is computed on a device, one thing after the other, and the host waits for
    it here: so this is called before the devices have other work.
    """
    # Episodes in several rows make minibatches larger, not more.
    number = config.sequences_per_step // config.minibatch_size
    size = -(-count // number) if count > config.sequences_per_step else config.minibatch_size
    found = []
    for epoch in range(config.trainer.epochs):
        epoch_key = jax.random.fold_in(key, epoch)
        shuffled = np.asarray(jax.random.permutation(epoch_key, count))
        for start in range(0, count, size):
            chosen = np.sort(shuffled[start : start + size])
            found.append((chosen, jax.random.fold_in(epoch_key, start)))
    return found


def minibatches(
    packer: Packer, rollouts: Rollouts, order: Order
) -> Iterator[tuple[PackedBatch, jax.Array]]:
    """Yields the packed sequences of each update, and its key."""
    common = common_prompts(rollouts)  # once a step: it reads every token
    for chosen, key in order:
        yield packer.pack_rollouts(rollouts, chosen, common), key
