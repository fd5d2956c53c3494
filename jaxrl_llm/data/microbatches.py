"""The map between sequences [B, T], which losses read, and packed rows [R, W], which models read.

A `PackedBatch` holds no array of the step itself. It is made on the host.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from jaxrl_llm.sharding.mesh import constrain


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """Some sequences of a step in packed rows."""

    microbatches: Microbatch  # every field with a leading dim M
    count: Int[Array, ""]  # microbatches that hold tokens; the rest is padding
    chosen: Bool[Array, " B"]  # sequences of this batch


def accumulate(packed: PackedBatch, function, like):
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


def by_sequence(packed: PackedBatch, function, num_sequences: int, width: int):
    """Returns the [b, T] arrays of `function(microbatch)` as one [B, T], zero elsewhere."""
    first = jax.tree.map(lambda a: a[0], packed.microbatches)
    shapes = jax.eval_shape(function, first)
    blank = jax.tree.map(lambda a: jnp.zeros((num_sequences, width), a.dtype), shapes)

    def body(i, total):
        microbatch = jax.tree.map(lambda a: a[i], packed.microbatches)
        return jax.tree.map(microbatch.put, total, function(microbatch))

    return jax.lax.fori_loop(0, packed.count, body, blank)
