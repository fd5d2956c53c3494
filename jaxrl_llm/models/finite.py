"""Whether weights are numbers at all."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxrl_llm.errors import UserError
from jaxrl_llm.sharding import resting

Tree = Any


class NotFiniteError(UserError, ValueError):
    """Weights with NaN or infinities: where they are, which, and what to do."""


def all_finite(tree: Tree) -> Bool[Array, ""]:
    """Returns whether no number of a tree is NaN or infinite."""
    leaves = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    return jnp.stack([jnp.array(True), *leaves]).all()


_leaf_is_finite = jax.jit(all_finite)


def check(tree: Tree, where: str, remedy: str) -> None:
    """Raises NotFiniteError, with these words at its ends, if weights are not finite.

    Arrays in host memory are brought to the devices one at a time.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    # One after the other: several programs in flight, each with a sum over processes of a CPU run,
    # wait for each other without end.
    bad = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, leaf in leaves
        if not _leaf_is_finite(resting.working(leaf))
    ]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise NotFiniteError(
            f"{where}: NaN or infinite numbers in {', '.join(bad[:3])}{more};"
            f" nothing can be learned from them; {remedy}"
        )
