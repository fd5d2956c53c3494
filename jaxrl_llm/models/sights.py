"""What images are to a decoder: vectors in place of some tokens, and positions of three parts."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Sights(NamedTuple):
    """What images give the tokens of rows."""

    positions: Int[Array, "*M B T 3"]  # time, row and column, see `patches.positions`
    at: Int[Array, "*M B T"]  # the vector in place of each token; -1: the token's own
    vectors: Float[Array, "*M vectors D"]  # of the tower

    def over(
        self, own: Float[Array, "B T width"], vectors: Float[Array, "vectors width"]
    ) -> Float[Array, "B T width"]:
        """Returns what stands in place of the tokens' own embeddings; some dims of all."""
        seen = vectors.astype(own.dtype)[jnp.maximum(self.at, 0)]
        return jnp.where((self.at >= 0)[..., None], seen, own)
