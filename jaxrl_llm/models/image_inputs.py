"""Image inputs of a decoder: features in place of some embeddings, and M-RoPE positions."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class ImageInputs(NamedTuple):
    """Images of packed rows: features, where they go, and positions of three parts."""

    positions: Int[Array, "*M B T 3"]  # time, row and column, see `patches.mrope_positions`
    # index of the vector that replaces each embedding; -1: none
    feature_index: Int[Array, "*M B T"]
    # Of the vision encoder: embeddings, and behind them the features of deepstack layers.
    features: Float[Array, "*M vectors D_and_deepstack"]

    def embeddings(self, hidden_size: int) -> Float[Array, "vectors D"]:
        """The embeddings of image tokens, the first part of their features."""
        return self.features[:, :hidden_size]

    def add_deepstack(self, x: Float[Array, "B T D"], number: int) -> Float[Array, "B T D"]:
        """Adds the features of deepstack layer `number`, from 1, at image tokens.

        They go to the output of the decoder layer with that `LayerType.deepstack`
        (arXiv:2406.04334, Sec. 3.2).
        """
        size = x.shape[-1]
        vectors = jnp.asarray(self.features)[:, number * size : (number + 1) * size]
        vectors = vectors.astype(x.dtype)
        gathered = vectors[jnp.maximum(self.feature_index, 0)]
        return x + jnp.where((self.feature_index >= 0)[..., None], gathered, 0)

    def replace_embeddings(
        self, embeddings: Float[Array, "B T width"], vectors: Float[Array, "vectors width"]
    ) -> Float[Array, "B T width"]:
        """Replaces embeddings of image tokens by vectors; `width` may be a slice of the dims."""
        gathered = vectors.astype(embeddings.dtype)[jnp.maximum(self.feature_index, 0)]
        return jnp.where((self.feature_index >= 0)[..., None], gathered, embeddings)
