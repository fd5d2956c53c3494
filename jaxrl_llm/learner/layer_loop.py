"""A loop over the layers of stacked arrays, so that temporaries exist for one layer at a time.

With pipeline stages all stages go through the loop at once, each on its own devices.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxrl_llm.sharding import mesh as mesh_lib

Tree = Any


def is_stacked(path: tuple[Any, ...]) -> bool:
    """Whether a parameter is a stack of layers [L, ...], of a network or of its vision tower."""
    return any(getattr(key, "key", "") == "layers" for key in path)


def map_layers(function: Callable[[Tree, Int[Array, " S"]], Tree], stacks: Tree) -> Tree:
    """`function` applied to each layer of stacks [L, ...], and its results stacked.

    Args:
      function: (arrays [S, ...], numbers of their layers in the stack) -> arrays [S, ...]. S is 1,
        or the number of stages.
    """
    num_layers = jax.tree.leaves(stacks)[0].shape[0]
    stages = mesh_lib.axis_sizes().get(mesh_lib.STAGE, 1)
    if num_layers % stages:
        stages = 1

    def split_stages(stack: Array) -> Array:
        return jnp.moveaxis(stack.reshape(stages, -1, *stack.shape[1:]), 1, 0)

    def restack(layers: Array) -> Array:
        return jnp.moveaxis(layers, 0, 1).reshape(num_layers, *layers.shape[2:])

    inputs = jax.tree.map(split_stages, (stacks, jnp.arange(num_layers)))
    return jax.tree.map(restack, lax.map(lambda entry: function(*entry), inputs))
