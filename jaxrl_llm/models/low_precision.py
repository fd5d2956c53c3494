"""Numbers of eight bits that only sampling uses: weights, and keys and values.

Weights are rounded symmetrically, with a step for each output of a matmul; its result is multiplied
with the steps, so the rounded weights are all that a decode step reads. Keys and values have no
steps: float8's exponent covers what attention needs.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

Params = dict[str, Any]
Quantization = Literal["none", "int8", "fp8"]

# What stays in the dtype of sampling: few numbers, or those that choose tokens and experts. Kernels
# below these names are not rounded, nor is anything that is no kernel (norms, biases, sinks).
KEPT = ("embed", "head", "score", "router")
STEPS = "kernel_steps"  # beside a kernel [..., I, O], [..., O] float32


class _Format(NamedTuple):
    dtype: Any
    largest: float


_FORMATS: Mapping[str, _Format] = {
    "int8": _Format(jnp.int8, 127.0),
    "fp8": _Format(jnp.float8_e4m3fn, 448.0),
}
CACHE_DTYPES: Mapping[str, str] = {"fp8": "float8_e4m3fn"}  # in the config -> in JAX


def dtype_of(quantization: Quantization) -> Any:
    """Returns the dtype of rounded weights; None for "none"."""
    return _FORMATS[quantization].dtype if quantization != "none" else None


def is_rounded(dtype: Any) -> bool:
    """Returns whether numbers of this dtype are ours: of eight bits, and not text or truth."""
    return any(jnp.dtype(dtype) == each.dtype for each in _FORMATS.values())


def quantized(layer: Params, quantization: Quantization, compute_dtype: str) -> Params:
    """Returns a layer [.., I, O] whose kernels are rounded, with their steps beside them.

        steps = max_i |kernel| / largest;    kernel ~ round(kernel / steps) * steps

    `kernel` is what training computes with: rounded to `compute_dtype` first. An output whose
    weights are all zero has step 1.
    """
    if quantization == "none":
        return layer
    found = flatten_dict(layer)
    for path, kernel in list(found.items()):
        if path[-1] == "kernel" and not set(path) & set(KEPT):
            rounded, steps = _rounded(kernel, _FORMATS[quantization], compute_dtype)
            found |= {path: rounded, (*path[:-1], STEPS): steps}
    return unflatten_dict(found)


def _rounded(
    kernel: Float[Array, "*E I O"], to: _Format, compute_dtype: str
) -> tuple[Array, Float[Array, "*E O"]]:
    wide = kernel.astype(compute_dtype).astype(jnp.float32)
    most = jnp.abs(wide).max(-2)
    steps = jnp.where(most > 0, most / to.largest, 1.0)
    scaled = wide / steps[..., None, :]
    if jnp.issubdtype(to.dtype, jnp.integer):
        scaled = jnp.round(scaled)
    return jnp.clip(scaled, -to.largest, to.largest).astype(to.dtype), steps


def narrow(x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """Returns keys or values in the cache's dtype; those beyond its range are its largest.

    Without the limit float8 would make them NaN.
    """
    if is_rounded(dtype):
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)


def widened(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the same numbers in 16 bits, if they have eight."""
    return x.astype(jnp.bfloat16) if is_rounded(x.dtype) else x


def multiplied(y: Float[Array, "... O"], steps: Float[Array, "... O"]) -> Float[Array, "... O"]:
    """Returns a product with a rounded kernel as one with the kernel itself."""
    return (y * steps).astype(y.dtype)
