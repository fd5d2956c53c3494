"""Matmuls of decode steps on a CPU, where XLA's plain ones are slow.

All that only a CPU needs in decoding is in this folder. `transformer.DECODE_PRODUCTS` chooses it.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxrl_llm.models import layers
from jaxrl_llm.models.on_cpu import kernels

_MOST_ROWS = 256  # with more, as in prefill, XLA's products are as fast or faster


def decode_products(mesh: Mesh, dtype: str) -> layers.Products:
    """Returns our own kernels where they can be used (see `kernels`), else `WEIGHT_FIRST`."""
    alone = mesh.size == 1 and dtype == "float32"
    return OWN_KERNELS if alone and kernels.available() else WEIGHT_FIRST


def weight_first(
    x: Float[Array, "... I"], kernel: Float[Array, "O I"], dtype=None
) -> Float[Array, "... O"]:
    """Returns `x @ kernel.T` of this dtype (None: of the operands), the kernel as first operand.

    XLA on CPU copies the second operand into tiles. If that is the weight, and `x` has few rows,
    the copy takes as long as the arithmetic.
    """
    y = jnp.einsum("oi,...i->o...", kernel, x, preferred_element_type=dtype)
    # Without the barrier the compiler swaps the operands again.
    return jnp.moveaxis(jax.lax.optimization_barrier(y), 0, -1)


def _float32_logits(hidden: Float[Array, "... D"], weight: Float[Array, "V D"]):
    return weight_first(hidden, weight, jnp.float32)


def _product(x: Float[Array, "... I"], kernel: Float[Array, "O I"]) -> Float[Array, "... O"]:
    return kernels.product(x, kernel) if _few_rows(x) else x @ kernel.T


def _mlp(x: Float[Array, "... D"], gate, up, down) -> Float[Array, "... D"]:
    if _few_rows(x):
        return kernels.mlp(x, gate, up, down)
    return layers.gated(x @ gate.T, x @ up.T) @ down.T


def _few_rows(x: Float[Array, "... I"]) -> bool:
    return x.size // x.shape[-1] <= _MOST_ROWS


# Transposing small results costs more than is gained.
WEIGHT_FIRST = layers.Products(weight_first, _float32_logits, min_transposed=256)
OWN_KERNELS = layers.Products(_product, _product, _mlp, kernels.attention, min_transposed=1)
