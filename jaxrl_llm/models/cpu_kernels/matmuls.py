"""Matmuls of decode steps on a CPU, where XLA's plain ones are slow.

This folder has all CPU-only code of decoding; `transformer.DECODE_PRODUCTS` selects it.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxrl_llm.models import layers
from jaxrl_llm.models.cpu_kernels import kernels

_MAX_ROWS = 256  # with more, as in prefill, XLA's matmuls are as fast or faster


def decode_products(mesh: Mesh, dtype: str) -> layers.MatmulImpl:
    """The custom kernels where they can be used (see `kernels`), else `WEIGHT_FIRST`."""
    is_supported = mesh.size == 1 and dtype == "float32"
    return CUSTOM_KERNELS if is_supported and kernels.is_available() else WEIGHT_FIRST


def weight_first(
    x: Float[Array, "... I"], kernel: Float[Array, "O I"], dtype=None
) -> Float[Array, "... O"]:
    """`x @ kernel.T` with the kernel as first operand, in this dtype (None: the operands').

    XLA on CPU repacks the second operand into tiles. If that is the weight, and `x` has few rows,
    the repacking takes as long as the arithmetic.
    """
    y = jnp.einsum("oi,...i->o...", kernel, x, preferred_element_type=dtype)
    # Without the barrier the compiler swaps the operands again.
    return jnp.moveaxis(jax.lax.optimization_barrier(y), 0, -1)


def _float32_logits(hidden: Float[Array, "... D"], weight: Float[Array, "V D"]):
    return weight_first(hidden, weight, jnp.float32)


def _kernel_product(x: Float[Array, "... I"], kernel: Float[Array, "O I"]) -> Float[Array, "... O"]:
    return kernels.product(x, kernel) if _has_few_rows(x) else x @ kernel.T


def _kernel_mlp(x: Float[Array, "... D"], gate, up, down) -> Float[Array, "... D"]:
    if _has_few_rows(x):
        return kernels.mlp(x, gate, up, down)
    return layers.swiglu(x @ gate.T, x @ up.T) @ down.T


def _has_few_rows(x: Float[Array, "... I"]) -> bool:
    return x.size // x.shape[-1] <= _MAX_ROWS


# Transposing small results costs more than is gained.
WEIGHT_FIRST = layers.MatmulImpl(weight_first, _float32_logits, min_transposed=256)
CUSTOM_KERNELS = layers.MatmulImpl(
    _kernel_product, _kernel_product, _kernel_mlp, kernels.attention, min_transposed=1
)
