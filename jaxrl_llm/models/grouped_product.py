"""Products of rows with the matrix of their group, on stages (`sharding.mesh.on_stages`).

`lax.ragged_dot` has no good form with a leading dim. A device has one entry of it, so that a loop
over the entries costs nothing.
"""

import jax
from jax import lax
from jaxtyping import Array, Float, Int


@jax.custom_batching.sequential_vmap
def _one_by_one(x, kernel, sizes):
    return lax.ragged_dot(x, kernel, sizes)


@jax.custom_batching.sequential_vmap
def _back_one_by_one(x, kernel, sizes, bar):
    return jax.vjp(lambda x, kernel: lax.ragged_dot(x, kernel, sizes), x, kernel)[1](bar)


@jax.custom_vjp
def on_stages(
    x: Float[Array, "rows I"], kernel: Float[Array, "E I O"], sizes: Int[Array, " E"]
) -> Float[Array, "rows O"]:
    """Returns `lax.ragged_dot`: rows come in order of groups, `sizes` of them each."""
    return _one_by_one(x, kernel, sizes)


def _forward(x, kernel, sizes):
    return _one_by_one(x, kernel, sizes), (x, kernel, sizes)


def _backward(residuals, bar):
    return *_back_one_by_one(*residuals, bar), None


on_stages.defvjp(_forward, _backward)
