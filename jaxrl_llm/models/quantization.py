"""8-bit quantization: weights (int8, fp8) and the KV cache (fp8).

Weights are quantized symmetrically with one scale per output channel. The scales are applied to the
result of the matmul, so a decode step reads only the 8-bit weights. Keys and values have no scales:
float8's exponent range is enough for attention.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

Params = dict[str, Any]
Quantization = Literal["none", "int8", "fp8", "nf4"]

# Not quantized: kernels below these names, which are small or choose tokens and experts, or how a
# state decays ("a", "b"), and all parameters that are not kernels (norms, biases, sinks).
UNQUANTIZED = ("embed", "head", "score", "router", "shared_gate", "a", "b")
SCALES = "kernel_steps"  # name of the scales [..., O], float32, beside a kernel [..., I, O]


class _Format(NamedTuple):
    dtype: Any
    largest: float


_FORMATS: Mapping[str, _Format] = {
    "int8": _Format(jnp.int8, 127.0),
    "fp8": _Format(jnp.float8_e4m3fn, 448.0),
}
CACHE_DTYPES: Mapping[str, str] = {"fp8": "float8_e4m3fn"}  # in the config -> in JAX


def quantized_dtype(quantization: str) -> Any:
    """The dtype of weights in 8 bits; None for "none"."""
    return _FORMATS[quantization].dtype if quantization != "none" else None


def is_quantized_dtype(dtype: Any) -> bool:
    """Whether this is the dtype of quantized weights (uint8: 4-bit codes) or of an 8-bit cache."""
    return is_8bit_dtype(dtype) or jnp.dtype(dtype) == jnp.uint8


def is_8bit_dtype(dtype: Any) -> bool:
    """Whether this is the dtype of weights or a cache in 8 bits."""
    return any(jnp.dtype(dtype) == format.dtype for format in _FORMATS.values())


def quantize_layer(layer: Params, quantization: Quantization, compute_dtype: str) -> Params:
    """Quantizes the kernels [.., I, O] of a layer; their scales are beside them.

        scales = max_i |kernel| / largest;    kernel ~ round(kernel / scales) * scales

    `kernel` is first cast to `compute_dtype`, as in training. A channel of zeros has scale 1.
    """
    if quantization == "none":
        return layer
    leaves = flatten_dict(layer)
    for path, kernel in list(leaves.items()):
        if path[-1] == "kernel" and not set(path) & set(UNQUANTIZED):
            values, scales = quantized_kernel(kernel.astype(compute_dtype), quantization)
            leaves |= {path: values, (*path[:-1], SCALES): scales}
    return unflatten_dict(leaves)


def quantized_kernel(
    kernel: Float[Array, "*E I O"], quantization: str
) -> tuple[Array, Float[Array, "*E O"]]:
    """The 8-bit values of kernels, and their scales; see `quantize_layer`."""
    to = _FORMATS[quantization]
    kernel32 = kernel.astype(jnp.float32)
    max_abs = jnp.abs(kernel32).max(-2)
    scales = jnp.where(max_abs > 0, max_abs / to.largest, 1.0)
    scaled = kernel32 / scales[..., None, :]
    if jnp.issubdtype(to.dtype, jnp.integer):
        scaled = jnp.round(scaled)
    return jnp.clip(scaled, -to.largest, to.largest).astype(to.dtype), scales


def to_cache_dtype(x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """Casts keys or values to the cache's dtype, clipped to its range.

    Without the clip, values beyond the range of float8 would become NaN.
    """
    if is_8bit_dtype(dtype):
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)


def to_16bit(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Casts 8-bit numbers to bfloat16; others stay as they are."""
    return x.astype(jnp.bfloat16) if is_8bit_dtype(x.dtype) else x


def apply_scales(y: Float[Array, "... O"], scales: Float[Array, "... O"]) -> Float[Array, "... O"]:
    """Dequantizes the result of a matmul with a quantized kernel."""
    return (y * scales).astype(y.dtype)
