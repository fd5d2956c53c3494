"""Muon's direction of a momentum: its nearest orthogonal matrix, by Newton-Schulz iterations.

For matrices that are sharded over a mesh. No device holds a whole one: the longer of its two dims
is sharded over all axes of its layer's weights, and what is gathered are the squares of the shorter
dim, `X X^T` and its own square. `layer_loop.py` has one layer of a stack at a time.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.sharding import mesh as mesh_lib

# Of `a X + b (X X^T) X + c (X X^T)^2 X`; maximizes the slope at zero.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5
# Root mean square of an update: that of AdamW's, so that both have one learning rate.
_UPDATE_RMS = 0.2
_EPS = 1e-8


def is_muon_matrix(path: tuple[Any, ...]) -> bool:
    """Whether a parameter is a stack of matrices in layers; embeddings, heads and towers are not.

    Stacks are [L, I, O], of experts [L, E, I, O].
    """
    return path[0].key == "layers" and path[-1].key == "kernel"


def muon_direction(
    gradient: Float[Array, "S ... I O"],
    momentum: Float[Array, "S ... I O"],
    beta: float,
    corrections: tuple[Float[Array, ""], Float[Array, ""]],
) -> Float[Array, "S ... I O"]:
    """The direction of an update, with Nesterov's momentum (arXiv:2502.16982, Eq. 4).

        0.2 sqrt(max(I, O)) orthogonal(beta m / (1 - beta**(n + 1)) + (1 - beta) g / (1 - beta**n))

    Deviation: the authors have no `1 - beta**n`; with it, as in `optax.contrib.muon`, the first
    updates weigh the gradient as later ones do.

    Args:
      momentum: With this gradient, `beta * earlier + (1 - beta) * gradient`, in float32.
      corrections: `1 - beta**n` and `1 - beta**(n + 1)` of update n, from 1 on.
    """
    now, ahead = corrections
    nesterov = beta * (momentum / ahead) + (1 - beta) * (gradient / now)
    scale = _UPDATE_RMS * max(gradient.shape[-2:]) ** 0.5
    return scale * orthogonal_factors(nesterov)


def orthogonal_factors(matrices: Float[Array, "S ... I O"]) -> Float[Array, "S ... I O"]:
    """About `U V^T` of each matrix `U S V^T`, with singular values in 0.7 to 1.2; of 0 it is 0.

    `S` are layers, or the entries of one layer loop: the stages of a pipeline.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    batch = ("staged", "experts")[: x.ndim - 2]
    x = mesh_lib.constrain_as_weight(x, *batch, None, "whole")
    x /= jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + _EPS
    a, b, c = _COEFFICIENTS
    for _ in range(_NUM_ITERATIONS):
        # The product of two squares is split over the devices that would else all compute it.
        square = mesh_lib.constrain_as_weight(x @ x.mT, *batch, None, None)
        fourth = mesh_lib.constrain_as_weight(square @ square, *batch, "whole", None)
        polynomial = mesh_lib.constrain_as_weight(b * square + c * fourth, *batch, None, None)
        x = mesh_lib.constrain_as_weight(a * x + polynomial @ x, *batch, None, "whole")
    return x.mT if is_tall else x
