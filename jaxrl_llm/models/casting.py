"""Weights cast to the compute dtype layer by layer, with gradients in the compute dtype.

This avoids two copies of all layers: the compiler would cast stacked weights before the loop over
layers, and the gradient of a cast has the wide dtype although its numbers are narrow.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from jaxrl_llm.models import low_precision
from jaxrl_llm.sharding import mesh as mesh_lib

Params = dict[str, Any]

_TILE = 128  # numbers side by side in a TPU's memory
# Never cast: a rounded router chooses other experts, and low precision has dtypes of its own.
_WIDE = "router", low_precision.STEPS


def cast(tree: Params, dtype) -> Params:
    """Returns the tree in a dtype; routers, and weights of low precision, stay as they are."""
    return jax.tree.map(lambda a, wanted: a.astype(wanted), tree, dtypes(tree, dtype))


def dtypes(tree: Params, dtype) -> Params:
    """Returns the dtypes that `cast` gives the arrays of a tree."""
    chosen = jnp.dtype(dtype)

    def of(path, a: Any) -> Any:
        return a.dtype if _wide(path) or low_precision.is_rounded(a.dtype) else chosen

    return jax.tree.map_with_path(of, tree)


def _wide(path) -> bool:
    return any(isinstance(key, jax.tree_util.DictKey) and key.key in _WIDE for key in path)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cast:
    """A weight without a gradient, and the `variable` of the compute dtype that gets it instead."""

    weight: Array
    variable: Array


def variables(params: Params, compute_dtype: str) -> Params:
    """Returns what to differentiate by: zeros of the compute dtype for wider matrices of layers.

    All else is the parameter itself. See `bound`.
    """
    bits = jnp.dtype(compute_dtype).itemsize

    def variable(path, w: Array) -> Array:
        narrower = w.ndim > 2 and bits < w.dtype.itemsize and not _wide(path)
        return jnp.zeros(w.shape, compute_dtype) if narrower else w

    return {**params, "layers": jax.tree.map_with_path(variable, params["layers"])}


def bound(params: Params, found: Params) -> Params:
    """Returns the parameters, each with its variable for the gradient."""
    return jax.tree.map(lambda w, v: v if w.dtype == v.dtype else Cast(w, v), params, found)


def computed(layer: Params, index: Int[Array, ""], compute_dtype: str) -> Params:
    """Returns layer `index` of parameters, or of `bound` ones, with its matrices cast."""
    # A factor that depends on the loop: a cast alone would be moved out of it, even through an
    # optimization barrier, and done for all layers at once.
    one = index >= 0

    def narrow(path, w: Array | Cast) -> Array:
        if isinstance(w, Cast):
            return _as_variable(_as_stored(w.weight) * one.astype(w.weight.dtype), w.variable)
        if w.ndim < 2 or _wide(path):
            return w
        w = _as_stored(w)
        return w if w.dtype == compute_dtype else (w * one.astype(w.dtype)).astype(compute_dtype)

    return jax.tree.map_with_path(narrow, layer, is_leaf=lambda w: isinstance(w, Cast))


def of_stage(
    path, layers: Float[Array, "n *I"], index: Int[Array, ""], compute_dtype: str
) -> Array:
    """Returns a parameter of the layers of part `index` as `computed` would cast each of them."""
    if layers.ndim < 3 or _wide(path) or layers.dtype == compute_dtype:
        return layers
    return (layers * (index >= 0).astype(layers.dtype)).astype(compute_dtype)


def _as_stored(w: Float[Array, "*E I O"]) -> Float[Array, "*E I O"]:
    """Returns a matrix of one layer, constrained to lie in memory by rows, as its stack does.

    Otherwise the compiler transposes all layers before the loop, as columns are cheapest to gather.
    Shards whose rows do not fill whole tiles lie by columns from the start.
    """
    devices = jax.sharding.get_abstract_mesh().size
    if devices <= 1 or mesh_lib.is_in_stages() or w.shape[-1] % (devices * _TILE):
        return w
    return _row_major(w)


def _row_major(w: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns an array that lies by rows in an accelerator's memory."""
    return jax.lax.platform_dependent(w, tpu=_by_rows, cuda=_shard_by_rows, default=lambda a: a)


def _by_rows(w: Array) -> Array:
    return with_layout_constraint(w, Layout(tuple(range(w.ndim))))


@jax.custom_vjp
def _shard_by_rows(w: Array) -> Array:
    """Returns what `_by_rows` does; a GPU's compiler would first gather the whole array for it."""
    return _pinned(w)


_shard_by_rows.defvjp(lambda w: (_pinned(w), None), lambda _, bar: (bar,))
_pinned: Any = custom_partitioning(_by_rows)
_pinned.def_partition(
    infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
    partition=lambda mesh, args, result: (mesh, _by_rows, args[0].sharding, (args[0].sharding,)),
    sharding_rule="... -> ...",
)


@jax.custom_vjp
def _as_variable(weight: Float[Array, "..."], variable: Float[Array, "..."]) -> Float[Array, "..."]:
    return weight.astype(variable.dtype)


def _forward(weight, variable):
    return weight.astype(variable.dtype), None


def _backward(_, bar):
    return None, bar


_as_variable.defvjp(_forward, _backward)


@jax.custom_vjp
def row_major_gradient(table: Float[Array, "V D"]) -> Float[Array, "V D"]:
    """Returns `table`; its gradient lies in memory by rows.

    An exchange between devices leaves columns that are cheap to read; the compiler would transpose
    the table and both of its moments, to columns and back.
    """
    return table


def _row_major_forward(table):
    return table, None


def _row_major_backward(_, bar):
    return (_row_major(bar),)


row_major_gradient.defvjp(_row_major_forward, _row_major_backward)
