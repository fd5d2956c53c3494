"""Bytes and counts of a network's parameters on each device, without making one.

The split is computed by the rules that the run itself uses (`sharding/mesh.py`).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax

from jaxrl_llm.config import LoraConfig
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


_Leaf = tuple[str, tuple[int, ...], tuple[str, ...]]  # group, shape, names of its dims


@functools.lru_cache(maxsize=256)
def _leaves(network: Network, adapters: bool) -> tuple[_Leaf, ...]:
    tree = network.abstract_adapters() if adapters else network.abstract()
    axes = network.adapter_axes() if adapters else network.logical_axes()
    names = jax.tree.leaves(axes, is_leaf=lambda n: isinstance(n, tuple))
    return tuple(
        (str(path[0].key), leaf.shape, dims)
        for (path, leaf), dims in zip(jax.tree.leaves_with_path(tree), names, strict=True)
    )


@functools.lru_cache(maxsize=4096)
def _counts(
    network: Network, adapters: bool, rules: tuple[tuple[str, tuple[str, ...]], ...], mesh: tuple
) -> Counts:
    sizes = dict(mesh)
    held = {"layers": 0, "embed": 0, "rest": 0}
    for group, dims, names in _leaves(network, adapters):
        spec = partition_spec(dims, names, dict(rules), sizes, network.units)
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
    network = Network(shape, head="scalar" if head == "scalar" else "lm")
    return _counts(network, False, tuple(sorted(rules.items())), tuple(sorted(mesh.items())))


def num_adapters(shape: Shape, lora: LoraConfig, rules: Rules, mesh: Mapping[str, int]) -> int:
    """Returns how many parameters of adapters each device holds under sharding rules."""
    network = Network(shape, lora=lora)
    return _counts(network, True, tuple(sorted(rules.items())), tuple(sorted(mesh.items()))).all


def num_params(shape: Shape, head: str = "lm") -> int:
    """Returns the parameters of a network."""
    return counts(shape, head, {}, {}).all
