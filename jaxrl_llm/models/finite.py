"""Whether weights are finite."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxrl_llm.errors import UserError
from jaxrl_llm.sharding import pools, telling


class NotFiniteError(UserError, ValueError):
    """Weights with NaN or infinities: where they are, which, and what to do."""


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Returns whether no number of a tree is NaN or infinite."""
    leaves = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    return jnp.stack([jnp.array(True), *leaves]).all()


_leaf_is_finite = jax.jit(all_finite)


def check(tree: Any, where: str, remedy: str) -> None:
    """Raises NotFiniteError, which begins with `where`, if weights are not finite.

    Arrays in host memory are brought to the devices one at a time.
    """
    # One after the other: on CPUs, sums over processes that run at one time block each other.
    bad = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, leaf in jax.tree.leaves_with_path(tree)
        if not telling.fetched(_leaf_is_finite(pools.working(leaf)))
    ]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise NotFiniteError(
            f"{where}: NaN or infinite numbers in {', '.join(bad[:3])}{more};"
            f" nothing can be learned from them; {remedy}"
        )
