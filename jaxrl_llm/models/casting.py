"""Weights of one dtype in arithmetic of another: cast layer by layer, differentiated as cast.

Two copies that a compiler would make of all layers are avoided. It casts stacked weights before
the loop over layers, whichever way it goes; and the gradient of a cast is as wide as what was cast,
though it holds no more than the narrow numbers that the backward pass makes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

Params = dict[str, Any]

_TILE = 128  # numbers side by side in a TPU's memory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cast:
    """A weight that takes no gradient, and what takes it instead, in the dtype of the arithmetic.

    Only the shape and dtype of `variable` count: it adds nothing to the weight.
    """

    weight: Array
    variable: Array


def variables(params: Params, compute_dtype: str) -> Params:
    """Returns what to differentiate by: matrices of layers as the arithmetic sees them.

    Where the arithmetic has fewer bits than they have, they are zeros of its dtype. All else is the
    parameter itself. See `bound`.
    """
    bits = jnp.dtype(compute_dtype).itemsize

    def variable(w: Array) -> Array:
        narrower = w.ndim > 2 and bits < w.dtype.itemsize
        return jnp.zeros(w.shape, compute_dtype) if narrower else w

    return {**params, "layers": jax.tree.map(variable, params["layers"])}


def bound(params: Params, found: Params) -> Params:
    """Returns the parameters, each with its variable for the gradient."""
    return jax.tree.map(lambda w, v: v if w.dtype == v.dtype else Cast(w, v), params, found)


def computed(layer: Params, index: Int[Array, ""], compute_dtype: str) -> Params:
    """Returns one layer of stacked parameters as the arithmetic reads it.

    Args:
      layer: Of `params` or of `bound` parameters; matrices are cast, vectors are left as they are.
      index: Number of the layer, from 0, as the loop counts them.
      compute_dtype: Of the matrices returned.
    """
    # A factor that depends on the loop: a cast alone is moved out of it, and so done for all layers
    # at once, through an optimization barrier too.
    one = index >= 0

    def cast(w: Array | Cast) -> Array:
        if isinstance(w, Cast):
            return _as_variable(_as_stored(w.weight) * one.astype(w.weight.dtype), w.variable)
        if w.ndim < 2:
            return w
        w = _as_stored(w)
        return w if w.dtype == compute_dtype else (w * one.astype(w.dtype)).astype(compute_dtype)

    return jax.tree.map(cast, layer, is_leaf=lambda w: isinstance(w, Cast))


def _as_stored(w: Float[Array, "I O"]) -> Float[Array, "I O"]:
    """Returns a matrix of one layer, told to lie in memory as all layers of it do: by rows.

    Columns are cheapest to gather from what lies by columns, and to have a slice so, the compiler
    would turn all layers ahead of the loop, a copy that lasts until the loop's end. Shards whose
    rows do not fill whole tiles lie by columns from the start and are left alone.
    """
    devices = jax.sharding.get_abstract_mesh().size
    if devices <= 1 or w.shape[-1] % (devices * _TILE):
        return w
    return with_layout_constraint(w, Layout((0, 1)))


@jax.custom_vjp
def _as_variable(weight: Float[Array, "..."], variable: Float[Array, "..."]) -> Float[Array, "..."]:
    return weight.astype(variable.dtype)


def _forward(weight, variable):
    return weight.astype(variable.dtype), None


def _backward(_, bar):
    return None, bar


_as_variable.defvjp(_forward, _backward)
