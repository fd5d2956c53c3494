"""Causal depthwise convolution over a few tokens, within packed segments."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def causal_convolution(
    x: Float[Array, "B T *channels"],
    kernel: Float[Array, "width *channels"],
    starts: Bool[Array, "B T"],
    tail: Float[Array, "B before *channels"] | None = None,
) -> Float[Array, "B T *channels"]:
    """`y_t = sum over d < width of kernel[width - 1 - d] * x_{t - d}`, in the dtype of `x`.

    Terms of tokens before the last start (up to t) are zero. `before` is `width - 1`.

    Args:
      x: Zero where there is no token.
      starts: The first tokens of segments.
      tail: The tokens before each row; None: there are none.
    """
    width = kernel.shape[0]
    if tail is None:
        tail = jnp.zeros((x.shape[0], width - 1, *x.shape[2:]), x.dtype)
    extended = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
    segments = jnp.cumsum(starts.astype(jnp.int32), axis=1)
    extended_segments = jnp.pad(segments, ((0, 0), (width - 1, 0)))
    length = x.shape[1]
    y = jnp.zeros_like(x)
    for i in range(width):
        is_same = extended_segments[:, i : i + length] == segments
        term = extended[:, i : i + length] * kernel[i].astype(x.dtype)
        y = y + jnp.where(is_same.reshape(*is_same.shape, *[1] * (x.ndim - 2)), term, 0)
    return y


def convolution_tail(
    x: Float[Array, "B T *channels"],
    tail: Float[Array, "B before *channels"],
    num_tokens: Int[Array, " B"],
) -> Float[Array, "B before *channels"]:
    """The last `before` tokens of each row of one segment, after the first `num_tokens` of `x`."""
    extended = jnp.concatenate([tail, x.astype(tail.dtype)], axis=1)
    index = num_tokens[:, None] + jnp.arange(tail.shape[1])
    index = index.reshape(*index.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(extended, index, axis=1)
