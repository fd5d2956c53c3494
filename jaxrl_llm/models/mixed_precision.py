"""Mixed precision: weights cast layer by layer, and gradients in the compute dtype.

This avoids two copies of all layers: XLA would hoist the cast of stacked weights out of the loop
over layers, and the gradient of a cast has the wide dtype although its numbers are narrow.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from jaxrl_llm.models import quantization
from jaxrl_llm.models.quantized import kernels
from jaxrl_llm.sharding import mesh as mesh_lib

Params = dict[str, Any]

_TILE = 128  # lanes of a TPU's memory tile
# Never cast: a rounded router chooses other experts, quantization has dtypes of its own, and a
# rounded decay rate changes a recurrent state more with every token.
_NEVER_CAST = "router", *kernels.SCALE_NAMES, "decay"


def cast(tree: Params, dtype) -> Params:
    """The tree in a dtype; routers and quantized weights keep theirs."""
    return jax.tree.map(lambda a, new: a.astype(new), tree, cast_dtypes(tree, dtype))


def cast_dtypes(tree: Params, dtype) -> Params:
    """The tree of dtypes that `cast` converts to."""
    chosen = jnp.dtype(dtype)

    def leaf_dtype(path, a: Any) -> Any:
        keeps_dtype = _is_never_cast(path) or quantization.is_quantized_dtype(a.dtype)
        return a.dtype if keeps_dtype else chosen

    return jax.tree.map_with_path(leaf_dtype, tree)


def _is_never_cast(path) -> bool:
    return any(isinstance(key, jax.tree_util.DictKey) and key.key in _NEVER_CAST for key in path)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ProxiedWeight:
    """A wide weight, and the proxy `proxy` of the compute dtype that receives its gradient."""

    weight: Array
    proxy: Array


def grad_proxies(params: Params, compute_dtype: str) -> Params:
    """The tree to differentiate with respect to, for gradients in the compute dtype.

    Each matrix of layers wider than the compute dtype has a proxy of zeros in that dtype; all
    others are the parameters themselves. `attach_grad_proxies` attaches the proxies to the weights.
    """
    num_bytes = jnp.dtype(compute_dtype).itemsize

    def proxy(path, w: Array) -> Array:
        needs_cast = w.ndim > 2 and num_bytes < w.dtype.itemsize and not _is_never_cast(path)
        return jnp.zeros(w.shape, compute_dtype) if needs_cast else w

    return {**params, "layers": jax.tree.map_with_path(proxy, params["layers"])}


def attach_grad_proxies(params: Params, proxies: Params) -> Params:
    """The parameters for the forward pass: each one that is cast with its gradient proxy."""
    return jax.tree.map(
        lambda w, v: v if w.dtype == v.dtype else ProxiedWeight(w, v), params, proxies
    )


def cast_layer(layer: Params, index: Int[Array, ""], compute_dtype: str) -> Params:
    """Casts the matrices of one layer inside the loop over layers; `index` is the loop's counter.

    `layer` are parameters, or the result of `attach_grad_proxies`.
    """
    # XLA hoists a bare cast out of the loop, even through an optimization barrier, and holds a
    # second copy of all layers. A factor of 1 that depends on the loop's counter keeps it inside;
    # tests/learner/test_update_memory.py measures the memory of a layer.
    unit = index >= 0

    def cast_leaf(path, w: Array | ProxiedWeight) -> Array:
        if isinstance(w, ProxiedWeight):
            return _cast_to_proxy(
                _with_stack_layout(w.weight) * unit.astype(w.weight.dtype), w.proxy
            )
        if w.ndim < 2 or _is_never_cast(path) or quantization.is_quantized_dtype(w.dtype):
            return w
        w = _with_stack_layout(w)
        return w if w.dtype == compute_dtype else (w * unit.astype(w.dtype)).astype(compute_dtype)

    return jax.tree.map_with_path(cast_leaf, layer, is_leaf=lambda w: isinstance(w, ProxiedWeight))


def cast_stage_weight(
    path, layers: Float[Array, "n *I"], index: Int[Array, ""], compute_dtype: str
) -> Array:
    """Casts a stacked parameter of one stage's layers in round `index`, as `cast_layer` would."""
    if layers.ndim < 3 or _is_never_cast(path) or layers.dtype == compute_dtype:
        return layers
    return (layers * (index >= 0).astype(layers.dtype)).astype(compute_dtype)


def _with_stack_layout(w: Float[Array, "*E I O"]) -> Float[Array, "*E I O"]:
    """Constrains a matrix of one layer to the row-major layout of its stack.

    Otherwise XLA transposes all layers before the loop, as column-major ones are cheapest to
    all-gather. Shards whose rows do not fill whole tiles are column-major from the start.
    """
    devices = jax.sharding.get_abstract_mesh().size
    if devices <= 1 or mesh_lib.is_in_stages() or w.shape[-1] % (devices * _TILE):
        return w
    return _row_major(w)


def _row_major(w: Float[Array, "..."]) -> Float[Array, "..."]:
    """Constrains an array to a row-major layout, on accelerators."""
    return jax.lax.platform_dependent(
        w, tpu=_row_major_layout, cuda=_row_major_shards, default=lambda a: a
    )


def _row_major_layout(w: Array) -> Array:
    return with_layout_constraint(w, Layout(tuple(range(w.ndim))))


@jax.custom_vjp
def _row_major_shards(w: Array) -> Array:
    """`_row_major_layout` per shard; XLA on GPU would gather the whole array for the constraint."""
    return _row_major_partitioned(w)


_row_major_shards.defvjp(lambda w: (_row_major_partitioned(w), None), lambda _, bar: (bar,))
_row_major_partitioned: Any = custom_partitioning(_row_major_layout)
_row_major_partitioned.def_partition(
    infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
    partition=lambda mesh, args, result: (
        mesh,
        _row_major_layout,
        args[0].sharding,
        (args[0].sharding,),
    ),
    sharding_rule="... -> ...",
)


@jax.custom_vjp
def _cast_to_proxy(weight: Float[Array, "..."], proxy: Float[Array, "..."]) -> Float[Array, "..."]:
    return weight.astype(proxy.dtype)


def _cast_to_proxy_forward(weight, proxy):
    return weight.astype(proxy.dtype), None


def _cast_to_proxy_backward(_, bar):
    return None, bar


_cast_to_proxy.defvjp(_cast_to_proxy_forward, _cast_to_proxy_backward)


@jax.custom_vjp
def row_major_gradient(table: Float[Array, "V D"]) -> Float[Array, "V D"]:
    """The identity, with a gradient in row-major layout.

    An all-to-all between devices prefers a column-major result; without the constraint XLA would
    transpose the table and both of its Adam moments to column-major and back.
    """
    return table


def _row_major_forward(table):
    return table, None


def _row_major_backward(_, bar):
    return (_row_major(bar),)


row_major_gradient.defvjp(_row_major_forward, _row_major_backward)
