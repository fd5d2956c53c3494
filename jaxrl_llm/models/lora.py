"""Low-rank adapters (arXiv:2106.09685): their place in a parameter tree, and what they amount to.

The adapters of a projection lie beside its kernel: `lora_a` [in, rank] and `lora_b` [rank, out],
stacked as the kernel is. A tree of adapters alone holds nothing else; put on a frozen base
it is the tree that a network computes with. How a projection uses them stands in `layers`.
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
    """Returns the tree of plain kernels, `kernel + scale * lora_a @ lora_b`, summed in float32.

    Args:
      tree: Of one layer, of stacked layers, or of a whole network; without adapters it comes
        back as it is.
      scale: `LoraConfig.scale`.
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
