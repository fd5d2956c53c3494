"""Attention of a whole sequence at once, as in training, scoring and prefill."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def segment_causal_mask(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B 1 T T"]:
    """Returns which key each query may see: its own segment, not the future. 0 is padding."""
    length = segment_ids.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return (same & jnp.tril(jnp.ones((length, length), bool)))[:, None]


def full_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"],
    implementation: Literal["xla", "cudnn"] = "xla",
) -> Float[Array, "B T N H"]:
    """Returns softmax(q k / sqrt(H)) v inside each segment, causally.

    Key and value heads are shared by groups of N/K query heads and never repeated in memory.
    Rows of padding attend to padding; what they hold is of no consequence.
    """
    return jax.nn.dot_product_attention(
        q, k, v, mask=segment_causal_mask(segment_ids), implementation=implementation
    )
