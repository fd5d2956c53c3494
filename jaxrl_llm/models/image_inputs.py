"""Image inputs of a decoder: features in place of some embeddings, and M-RoPE positions."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class ImageInputs(NamedTuple):
    """Images of packed rows: features, where they go, and positions of three parts."""

    positions: Int[Array, "*M B T 3"]  # time, row and column, see `patches.mrope_positions`
    # index of the vector that replaces each embedding; -1: none
    feature_index: Int[Array, "*M B T"]
    features: Float[Array, "*M vectors D"]  # features of the vision encoder

    def replace_embeddings(
        self, embeddings: Float[Array, "B T width"], vectors: Float[Array, "vectors width"]
    ) -> Float[Array, "B T width"]:
        """Replaces embeddings of image tokens by vectors; `width` may be a slice of the dims."""
        gathered = vectors.astype(embeddings.dtype)[jnp.maximum(self.feature_index, 0)]
        return jnp.where((self.feature_index >= 0)[..., None], gathered, embeddings)
