"""Bytes and counts of a network's parameters on each device, without making one.

The split is computed by the rules that the run itself uses (`sharding/mesh.py`).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax

from jaxrl_llm.models.shape import Shape
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.sharding.mesh import Rules, partition_spec

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class Counts:
    """Parameters that one device holds."""

    layers: int
    embed: int
    rest: int  # head, final norm

    @property
    def all(self) -> int:
        return self.layers + self.embed + self.rest


@functools.lru_cache(maxsize=256)
def _leaves(shape: Shape, head: str) -> tuple[tuple[str, tuple[int, ...], tuple[str, ...]], ...]:
    network = Network(shape, head="scalar" if head == "scalar" else "lm")
    shapes = jax.tree.leaves_with_path(network.abstract())
    names = jax.tree.leaves(network.logical_axes(), is_leaf=lambda n: isinstance(n, tuple))
    return tuple(
        (str(path[0].key), leaf.shape, axes)
        for (path, leaf), axes in zip(shapes, names, strict=True)
    )


@functools.lru_cache(maxsize=4096)
def _counts(
    shape: Shape, head: str, rules: tuple[tuple[str, tuple[str, ...]], ...], mesh: tuple
) -> Counts:
    sizes = dict(mesh)
    units = {"heads": shape.head_size, "kv_heads": shape.head_size}
    held = {"layers": 0, "embed": 0, "rest": 0}
    for group, dims, names in _leaves(shape, head):
        spec = partition_spec(dims, names, dict(rules), sizes, units)
        local = 1
        for dim, axes in zip(dims, spec, strict=True):
            axes = (axes,) if isinstance(axes, str) else axes or ()
            local *= dim // math.prod(sizes[axis] for axis in axes)
        held[group if group in held else "rest"] += local
    return Counts(**held)


def counts(shape: Shape, head: str, rules: Rules, mesh: Mapping[str, int]) -> Counts:
    """Returns how many parameters each device holds under sharding rules.

    Args:
      shape: Of the network.
      head: "lm" or "scalar".
      rules: E.g. `sharding.mesh.TRAIN`; `{}` is a whole copy.
      mesh: Sizes of the mesh axes.
    """
    return _counts(shape, head, tuple(sorted(rules.items())), tuple(sorted(mesh.items())))


def num_params(shape: Shape, head: str = "lm") -> int:
    """Returns the parameters of a network."""
    return counts(shape, head, {}, {}).all
