"""Frozen kernels stored in few bits: their formats, and the matmul that dequantizes them.

A kernel [I, O] is several arrays of the parameter tree side by side, named `kernel` and
`kernel_...`. `Linear` hands them to `matmul` as one `QuantizedKernel`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

from jaxrl_llm.models import quantization
from jaxrl_llm.models.quantized import nf4

Params = dict[str, Any]


class StoredArray(NamedTuple):
    """One array of a quantized kernel."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]  # logical dims
    dtype: Any


class KernelFormat(NamedTuple):
    """How kernels are stored in few bits."""

    # Arrays of a kernel by name, from its sizes (inputs, outputs) and their logical dims.
    arrays: Callable[[tuple[int, int], tuple[str, str]], dict[str, StoredArray]]
    quantize: Callable[[Float[Array, "I O"]], dict[str, Array]]
    # A matrix [I, O] in a dtype and float32 scales of its outputs, whose product is the kernel.
    factors: Callable[[Mapping[str, Array], Any], tuple[Array, Array | None]]
    block: int  # inputs that share a scale; 0: all


def _per_channel(name: Literal["int8", "fp8"]) -> KernelFormat:
    """One scale per output channel, see `quantization`."""

    def arrays(sizes, axes):
        return {
            "kernel": StoredArray(sizes, axes, quantization.quantized_dtype(name)),
            quantization.SCALES: StoredArray(sizes[1:], axes[1:], jnp.float32),
        }

    def quantize(kernel):
        values, scales = quantization.quantized_kernel(kernel, name)
        return {"kernel": values, quantization.SCALES: scales}

    def factors(stored, dtype):
        return stored["kernel"].astype(dtype), stored[quantization.SCALES]

    return KernelFormat(arrays, quantize, factors, 0)


_NF4_NAMES = {
    "kernel": "codes",
    "kernel_absmax": "absmax",
    "kernel_absmax_steps": "absmax_steps",
    "kernel_absmax_mean": "absmax_mean",
}


def _nf4_arrays(sizes, axes):
    in_size, out_size = sizes
    num_blocks = nf4.num_absmax_blocks(in_size, out_size)
    return {
        "kernel": StoredArray((in_size // 2, out_size), axes, jnp.uint8),
        "kernel_absmax": StoredArray((in_size // nf4.BLOCK, out_size), axes, jnp.uint8),
        # Blocks of absmax values run across outputs; their steps are few, and on every device.
        "kernel_absmax_steps": StoredArray((num_blocks,), ("absmax_block",), jnp.float32),
        "kernel_absmax_mean": StoredArray((), (), jnp.float32),
    }


def _nf4_quantize(kernel):
    arrays = nf4.quantize(kernel)
    return {name: arrays[part] for name, part in _NF4_NAMES.items()}


def _nf4_factors(stored, dtype):
    codes, absmax, steps, mean = (stored[name] for name in _NF4_NAMES)
    return nf4.dequantize(codes, absmax, steps, mean, dtype), None


FORMATS: Mapping[str, KernelFormat] = {
    "int8": _per_channel("int8"),
    "fp8": _per_channel("fp8"),
    "nf4": KernelFormat(_nf4_arrays, _nf4_quantize, _nf4_factors, nf4.BLOCK),
}
# Names of all arrays that no cast may touch, whatever their dtype.
SCALE_NAMES = (quantization.SCALES, "kernel_absmax_steps", "kernel_absmax_mean")
_ARRAY_NAMES = frozenset({"kernel", "kernel_absmax", *SCALE_NAMES})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedKernel:
    """A kernel [I, O] in a format of `FORMATS`."""

    arrays: dict[str, Array]
    format: str = dataclasses.field(metadata={"static": True})

    def factors(self, dtype) -> tuple[Float[Array, "I O"], Float[Array, " O"] | None]:
        """A matrix, and scales of its outputs unless they are part of it."""
        return FORMATS[self.format].factors(self.arrays, dtype)

    def dequantize(self, dtype) -> Float[Array, "I O"]:
        """The whole kernel."""
        matrix, scales = self.factors(dtype)
        if scales is None:
            return matrix
        return (matrix.astype(jnp.float32) * scales).astype(dtype)


@jax.custom_vjp
def matmul(x: Float[Array, "... I"], kernel: QuantizedKernel) -> Float[Array, "... O"]:
    """`x @ kernel`, dequantized for this product alone and again in the backward pass.

    The kernel is frozen: its gradient is zero, and neither `x` nor the dequantized kernel is saved
    for the backward pass.
    """
    matrix, scales = _factors_beside(x, kernel)
    y = x @ matrix
    return y if scales is None else quantization.apply_scales(y, scales)


def _forward(x, kernel):
    return matmul(x, kernel), kernel


def _backward(kernel, bar):
    matrix, scales = _factors_beside(bar, kernel)
    bar = bar if scales is None else quantization.apply_scales(bar, scales)
    return bar @ matrix.T, None


matmul.defvjp(_forward, _backward)


def _factors_beside(x: Array, kernel: QuantizedKernel) -> tuple[Array, Array | None]:
    """The factors of a kernel, which do not exist before `x` does.

    Weights are invariant in loops over decode steps and microbatches, so XLA would move their
    dequantization out of the loop: all layers would exist in full, for the whole loop. Behind a
    barrier with an activation they are not invariant.

    XLA on CPU drops barriers before it orders the instructions of a loop's body, and would
    dequantize all layers of a decode step first. There the codes depend on a bit of `x`. Where `x`
    is sharded that would cost a broadcast, so there is only the barrier.
    """
    x, kernel = jax.lax.optimization_barrier((x, kernel))
    if jax.sharding.get_abstract_mesh().size <= 1:
        codes = kernel.arrays["kernel"]
        zero = jax.lax.platform_dependent(
            x, cpu=_opaque_zero, default=lambda x: jnp.zeros((), jnp.uint8)
        )
        arrays = {**kernel.arrays, "kernel": codes + zero.astype(codes.dtype)}
        kernel = dataclasses.replace(kernel, arrays=arrays)
    return kernel.factors(x.dtype)


def _opaque_zero(x: Array) -> Array:
    """Zero, whatever `x` is, in a form that no compiler simplifies."""
    bits = jax.lax.bitcast_convert_type(x.ravel()[0].astype(jnp.float32), jnp.uint32)
    return (bits >> 31 >> 1).astype(jnp.uint8)


def is_quantizable(path: tuple[str, ...]) -> bool:
    """Whether a parameter of a layer is a kernel that is quantized."""
    return path[-1] == "kernel" and not set(path) & set(quantization.UNQUANTIZED)


def quantize_stack(kernels: Float[Array, "L *E I O"], format: str) -> dict[str, Array]:
    """The arrays of a stack of kernels, quantized layer by layer."""
    return jax.lax.map(FORMATS[format].quantize, kernels)


def quantize_layers(layers: Params, format: str) -> Params:
    """A tree of stacked layers with quantized kernels in place of its kernels."""
    leaves = flatten_dict(layers)
    for path in [path for path in leaves if is_quantizable(path)]:
        arrays = quantize_stack(leaves.pop(path), format)
        leaves |= {(*path[:-1], name): array for name, array in arrays.items()}
    return unflatten_dict(leaves)


def dequantize_layers(layers: Params, format: str, dtype) -> Params:
    """The inverse of `quantize_layers`, with kernels in a dtype."""
    leaves = flatten_dict(layers)
    for path in [path for path in leaves if is_quantizable(path)]:
        names = [name for name in _ARRAY_NAMES if (*path[:-1], name) in leaves]
        arrays = {name: leaves.pop((*path[:-1], name)) for name in names}
        leaves[path] = jax.lax.map(
            lambda stored: QuantizedKernel(stored, format).dequantize(dtype), arrays
        )
    return unflatten_dict(leaves)
