"""The target tokens of packed rows, and the hidden states that predict them."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrl_llm.sharding.mesh import constrain


@dataclasses.dataclass(frozen=True)
class AllTargets:
    """All tokens are targets, except the first of each sequence."""

    segment_ids: Int[Array, "B T"]

    @property
    def valid(self) -> Bool[Array, "B T"]:
        """Mask of hidden states with a target: token t+1 is of the same sequence as token t."""
        next_ids = jnp.pad(self.segment_ids[:, 1:], ((0, 0), (0, 1)))
        return (self.segment_ids == next_ids) & (self.segment_ids != 0)

    def gather_hidden(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The hidden states that predict the targets."""
        return hidden

    def gather(self, x: Shaped[Array, "B T *n"]) -> Shaped[Array, "B T *n"]:
        """Gathers an array about tokens at the targets: aligned with `gather_hidden`."""
        return jnp.pad(x[:, 1:], ((0, 0), (0, 1), *((0, 0),) * (x.ndim - 2)))

    def scatter(self, x: Shaped[Array, "B T *n"]) -> Shaped[Array, "B T *n"]:
        """Scatters an array aligned with `gather_hidden` back to the positions of the targets; else
        0.
        """
        x = jnp.pad(x[:, :-1], ((0, 0), (1, 0), *((0, 0),) * (x.ndim - 2)))
        return constrain(x, "batch", "length", *(None,) * (x.ndim - 2))


@dataclasses.dataclass(frozen=True)
class SelectedTargets:
    """Selected targets in each row, none the first token of its sequence."""

    positions: Int[Array, "B chosen"]  # of the targets, each at most once in a row; T: padding
    # position of the token before each target, in the same row
    predecessors: Int[Array, "B chosen"]
    length: int  # T

    @property
    def valid(self) -> Bool[Array, "B chosen"]:
        """Which entries are targets, not padding."""
        return self.positions < self.length

    def gather_hidden(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B chosen D"]:
        """The hidden states that predict the targets."""
        return jnp.take_along_axis(hidden, self.predecessors[..., None], axis=1)

    def gather(self, x: Shaped[Array, "B T *n"]) -> Shaped[Array, "B chosen *n"]:
        """Gathers an array about tokens at the targets: aligned with `gather_hidden`."""
        clipped = jnp.minimum(self.positions, self.length - 1)
        return jnp.take_along_axis(x, clipped.reshape(*clipped.shape, *[1] * (x.ndim - 2)), axis=1)

    def scatter(self, x: Shaped[Array, "B chosen *n"]) -> Shaped[Array, "B T *n"]:
        """Scatters an array aligned with `gather_hidden` back to the positions of the targets; else
        0.
        """

        def scatter_row(positions: Array, values: Array) -> Array:
            zeros = jnp.zeros((self.length, *values.shape[1:]), values.dtype)
            return zeros.at[positions].set(values, mode="drop")

        # By vmap: with the row as an index of one scatter, XLA would all-gather the rows first.
        scattered = jax.vmap(scatter_row)(self.positions, x)
        return constrain(scattered, "batch", "length", *(None,) * (x.ndim - 2))


TargetPositions = AllTargets | SelectedTargets
