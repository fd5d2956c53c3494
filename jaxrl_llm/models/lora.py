"""LoRA adapters (arXiv:2106.09685) in a parameter tree; `layers` applies them.

The adapters of a projection are beside its kernel: `lora_a` [in, rank] and `lora_b` [rank, out],
stacked as the kernel is.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

Params = dict[str, Any]

FACTORS = ("lora_a", "lora_b")
_INDEX = "lora_index"  # entry of a tree, and of every adapted projection in a trace


def has_adapters(tree: Params) -> bool:
    """Whether there are adapters anywhere in a tree."""
    return any(path[-1] in FACTORS for path in flatten_dict(tree))


def adapter_params(tree: Params) -> Params:
    """The adapters of a tree, in its nested structure, without all other leaves."""
    return unflatten_dict({p: leaf for p, leaf in flatten_dict(tree).items() if p[-1] in FACTORS})


def combine_params(base: Params, adapters: Params) -> Params:
    """Merges the trees of base weights and adapters; with `{}` as base it is `adapters`."""
    return unflatten_dict(flatten_dict(base) | flatten_dict(adapters))


def merge_adapters(tree: Params, scale: float) -> Params:
    """Merges adapters into the kernels: `kernel + scale * lora_a @ lora_b`, summed in float32."""
    leaves = flatten_dict(tree)
    weights = {path: leaf for path, leaf in leaves.items() if path[-1] not in FACTORS}
    for *module_path, name in leaves:
        if name == "lora_a":
            a, b = (leaves[*module_path, factor].astype(jnp.float32) for factor in FACTORS)
            delta = scale * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
            kernel = weights[*module_path, "kernel"]
            weights[*module_path, "kernel"] = (kernel.astype(jnp.float32) + delta).astype(
                kernel.dtype
            )
    return unflatten_dict(weights)


def with_adapter_index(params: Params, index: Any) -> Params:
    """Adds the number of each token's adapter [B, T] to the parameters of a program's call.

    [B, 1]: all tokens of a row use the same adapter.
    """
    return {**params, _INDEX: index}


def assign_adapters(params: Params) -> Params:
    """Hands the numbers of `with_adapter_index` to every adapted projection, inside a trace.

    As parameters they reach the projections without an argument of every module on the way.
    """
    params = dict(params)
    index = params.pop(_INDEX)
    layers = []
    for layer in params["layers"]:
        leaves = flatten_dict(layer)
        indices = {(*path[:-1], _INDEX): index for path in leaves if path[-1] == FACTORS[0]}
        layers.append(unflatten_dict(leaves | indices))
    return {**params, "layers": tuple(layers)}
