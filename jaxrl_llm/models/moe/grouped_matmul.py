"""Grouped matmul (`lax.ragged_dot`) under the vmap over stages (`sharding.mesh.vmap_over_stages`).

The batched form of `lax.ragged_dot` is slow. The vmap is over stages and a device has one of them,
so a sequential loop over the batch costs nothing.
"""

import jax
from jax import lax
from jaxtyping import Array, Float, Int


@jax.custom_batching.sequential_vmap
def _sequential_ragged_dot(x, kernel, sizes):
    return lax.ragged_dot(x, kernel, sizes)


@jax.custom_batching.sequential_vmap
def _sequential_ragged_dot_vjp(x, kernel, sizes, bar):
    return jax.vjp(lambda x, kernel: lax.ragged_dot(x, kernel, sizes), x, kernel)[1](bar)


@jax.custom_vjp
def staged_ragged_dot(
    x: Float[Array, "rows I"], kernel: Float[Array, "E I O"], sizes: Int[Array, " E"]
) -> Float[Array, "rows O"]:
    """`lax.ragged_dot`: rows are sorted by group, `sizes` are the rows of each group."""
    return _sequential_ragged_dot(x, kernel, sizes)


def _forward(x, kernel, sizes):
    return _sequential_ragged_dot(x, kernel, sizes), (x, kernel, sizes)


def _backward(residuals, bar):
    return *_sequential_ragged_dot_vjp(*residuals, bar), None


staged_ragged_dot.defvjp(_forward, _backward)
