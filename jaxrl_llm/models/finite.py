"""Whether weights are finite."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxrl_llm.errors import UserError
from jaxrl_llm.sharding import pools, telling


class NotFiniteError(UserError, ValueError):
    """Weights with NaN or infinities: where they are, which, and what to do."""


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Returns whether no number of a tree is NaN or infinite."""
    leaves = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    return jnp.stack([jnp.array(True), *leaves]).all()


_on_devices = jax.jit(all_finite)


def _leaf_is_finite(leaf: Any) -> bool:
    here = isinstance(leaf, jax.Array) and jax.process_count() == 1
    if here and all(device.platform == "cpu" for device in leaf.devices()):
        return bool(np.isfinite(np.asarray(leaf)).all())  # compiles nothing
    return bool(telling.fetched(_on_devices(pools.working(leaf))))


def check(
    tree: Any, where: str, remedy: str, stored_name: Callable[[str], str] = lambda path: ""
) -> None:
    """Raises NotFiniteError, which begins with `where`, if weights are not finite.

    Arrays in host memory are brought to the devices one at a time. `stored_name` gives the name in
    a file of the first tensor of a parameter, by its dotted path, that is not finite; "" if it is
    not known.
    """
    # One after the other: on CPUs, sums over processes that run at one time block each other.
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
