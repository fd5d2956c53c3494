"""Packed rows on the devices: sequences of a step as models read them, microbatch by microbatch.

Losses see sequences as [B, T]; models see packed rows [R, W] that hold several sequences
each. A `PackedBatch` is the map between the two and nothing else: no array of the step is moved or
copied for it. `batches.Packer` makes it on the host.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.sharding.mesh import constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Microbatch:
    """Packed rows and the sequences in them. With a leading dim M: all microbatches of a batch.

    What several sequences begin with may stand once, before what is their own; the segment of
    such a beginning is minus that of the first of them.
    """

    segment_ids: Int[Array, "*M R W"]  # 1 + number of the sequence in the step; 0 is padding
    # Segment continued, or its own; [R, 0] where nothing is shared.
    prefix_ids: Int[Array, "*M R W"] | Int[Array, "*M R 0"]
    key_blocks: Int[Array, "*M R Q C"]  # of each block of queries what `full_attention` asks for
    positions: Int[Array, "*M R W"]  # of each token in its own sequence
    sequences: Int[Array, "*M b"]  # which sequences of the step; B where the place is empty
    rows: Int[Array, "*M b"]  # row of each sequence
    starts: Int[Array, "*M b"]  # its first position in that row, were its own tokens all it has
    beginnings: Int[Array, "*M b"]  # where the beginning that it shares stands
    shared: Int[Array, "*M b"]  # tokens of that beginning
    scored: Int[Array, "*M R K"]  # positions that the policy chose; W where there is none
    before: Int[Array, "*M R K"]  # position of the token before each of them

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
class PackedBatch:
    """Where some sequences of a step stand in packed rows."""

    microbatches: Microbatch  # every field with a leading dim M
    count: Int[Array, ""]  # microbatches that hold anything; the rest of M is padding
    chosen: Bool[Array, " B"]  # sequences of this batch

    def padding_share(self) -> float:
        """Returns the share of packed positions that hold no token."""
        used = self.microbatches.segment_ids[: int(self.count)]
        return float((used == 0).mean())


def add_up(packed: PackedBatch, function, like):
    """Returns the sum of `function(microbatch)` over a batch, shaped and typed as `like`."""
    microbatches = packed.microbatches
    if microbatches.rows.shape[0] == 1:
        part = function(jax.tree.map(lambda a: a[0], microbatches))
        return jax.tree.map(lambda a, b: a.astype(b.dtype), part, like)

    def body(i, total):
        part = function(jax.tree.map(lambda a: a[i], microbatches))
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part)

    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
    return jax.lax.fori_loop(0, packed.count, body, zeros)


def collect(packed: PackedBatch, function, num_sequences: int, width: int):
    """Returns `function(microbatch)`'s [b, T] arrays put together as [B, T], zero elsewhere."""
    first = jax.tree.map(lambda a: a[0], packed.microbatches)
    shapes = jax.eval_shape(function, first)
    blank = jax.tree.map(lambda a: jnp.zeros((num_sequences, width), a.dtype), shapes)

    def body(i, total):
        microbatch = jax.tree.map(lambda a: a[i], packed.microbatches)
        return jax.tree.map(
            functools.partial(Microbatch.put, microbatch), total, function(microbatch)
        )

    return jax.lax.fori_loop(0, packed.count, body, blank)
