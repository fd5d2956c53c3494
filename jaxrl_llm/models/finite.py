"""Checks weights for NaN and infinities."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxrl_llm.errors import UserError
from jaxrl_llm.sharding import device_pools, kv_store_broadcast


class NotFiniteError(UserError, ValueError):
    """Weights hold NaN or infinities; the message names place, parameters and remedy."""


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Whether a tree has no NaN or infinity."""
    leaves = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    return jnp.stack([jnp.array(True), *leaves]).all()


_all_finite_jit = jax.jit(all_finite)


def _leaf_is_finite(leaf: Any) -> bool:
    is_local = isinstance(leaf, jax.Array) and jax.process_count() == 1
    if is_local and all(device.platform == "cpu" for device in leaf.devices()):
        return bool(np.isfinite(np.asarray(leaf)).all())  # avoids a compilation
    return bool(kv_store_broadcast.device_get(_all_finite_jit(device_pools.to_device_memory(leaf))))


def check(
    tree: Any, where: str, remedy: str, stored_name: Callable[[str], str] = lambda path: ""
) -> None:
    """Raises NotFiniteError if weights hold NaN or infinities; the message begins with `where`.

    Arrays in host memory move to the devices one at a time. `stored_name` maps the dotted path of a
    parameter to the file name of its first tensor that is not finite; "" if unknown.
    """
    # Sequential: on CPUs, concurrent reductions over processes deadlock.
    bad = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, leaf in jax.tree.leaves_with_path(tree)
        if not _leaf_is_finite(leaf)
    ]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        if name := stored_name(bad[0]):
            more += f" (in the file: {name})"
        raise NotFiniteError(
            f"{where}: NaN or infinite numbers in {', '.join(bad[:3])}{more};"
            f" nothing can be learned from them; {remedy}"
        )
