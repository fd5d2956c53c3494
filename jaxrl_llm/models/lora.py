"""Low-rank adapters (arXiv:2106.09685) in a parameter tree; `layers` computes with them.

The adapters of a projection are beside its kernel: `lora_a` [in, rank] and `lora_b` [rank, out],
stacked as the kernel is.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

Params = dict[str, Any]

FACTORS = ("lora_a", "lora_b")


def present(tree: Params) -> bool:
    """Returns whether there are adapters anywhere in a tree."""
    return any(path[-1] in FACTORS for path in flatten_dict(tree))


def only(tree: Params) -> Params:
    """Returns the adapters of a tree, and the branches that lead to them."""
    return unflatten_dict({p: leaf for p, leaf in flatten_dict(tree).items() if p[-1] in FACTORS})


def joined(base: Params, adapters: Params) -> Params:
    """Returns the tree with both; without a base (`{}`) it is `adapters`, whatever they are."""
    return unflatten_dict(flatten_dict(base) | flatten_dict(adapters))


def merged(tree: Params, scale: float) -> Params:
    """Returns a tree of plain kernels `kernel + scale * lora_a @ lora_b`, summed in float32."""
    leaves = flatten_dict(tree)
    found = {path: leaf for path, leaf in leaves.items() if path[-1] not in FACTORS}
    for *place, name in leaves:
        if name == "lora_a":
            a, b = (leaves[*place, factor].astype(jnp.float32) for factor in FACTORS)
            change = scale * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
            kernel = found[*place, "kernel"]
            found[*place, "kernel"] = (kernel.astype(jnp.float32) + change).astype(kernel.dtype)
    return unflatten_dict(found)
