"""Low-rank adapters (arXiv:2106.09685) in a parameter tree; `layers` computes with them.

The adapters of a projection are beside its kernel: `lora_a` [in, rank] and `lora_b` [rank, out],
stacked as the kernel is.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]

FACTORS = ("lora_a", "lora_b")


def present(tree: Mapping[str, Any]) -> bool:
    """Returns whether there are adapters anywhere in a tree."""
    return any(
        name in FACTORS or (isinstance(value, Mapping) and present(value))
        for name, value in tree.items()
    )


def only(tree: Mapping[str, Any]) -> Params:
    """Returns the adapters of a tree, and the branches that lead to them."""
    found: Params = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            if inner := only(value):
                found[name] = inner
        elif name in FACTORS:
            found[name] = value
    return found


def joined(base: Mapping[str, Any], adapters: Mapping[str, Any]) -> Params:
    """Returns the tree with both; without a base (`{}`) it is `adapters`, whatever they are."""
    both = dict(base)
    for name, value in adapters.items():
        inner = base.get(name)
        both[name] = joined(inner, value) if isinstance(inner, Mapping) else value
    return both


def merged(tree: Mapping[str, Any], scale: float) -> Params:
    """Returns a tree, stacked or not, of plain kernels `kernel + scale * lora_a @ lora_b`.

    The sum is in float32. A tree without adapters comes back as it is.
    """
    found: Params = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found[name] = merged(value, scale)
        elif name not in FACTORS:
            found[name] = value
    if "lora_a" in tree:
        kernel = found["kernel"]
        a, b = (tree[name].astype(jnp.float32) for name in FACTORS)
        change = scale * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
        found["kernel"] = (kernel.astype(jnp.float32) + change).astype(kernel.dtype)
    return found
