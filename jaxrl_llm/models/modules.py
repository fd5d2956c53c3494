"""Flax modules of a network: what they hold, and modules with given parameters inside a trace."""

import functools
from typing import Any, Protocol

import jax
from flax import nnx

from jaxrl_llm.models.shape import EVERYWHERE, Layer

Params = dict[str, Any]  # nested dict of arrays


class Maker(Protocol):
    """A description of networks; hashable."""

    def __hash__(self) -> int: ...

    def module(self, part: str, kind: Layer, /) -> nnx.Module:
        """Returns a part of it, of layers one of a kind, for its shapes alone."""
        ...


def pure(module: nnx.Module) -> Params:
    """Returns the parameters of a module."""
    return nnx.to_pure_dict(nnx.split(module)[1])


def axes(state, prefix: tuple[str, ...] = ()) -> Params:
    """Returns the logical dim names of each parameter of a state, after those of `prefix`."""
    flat = nnx.to_flat_state(state)
    return nnx.traversals.unflatten_mapping(
        {path: prefix + variable.get_metadata("logical_axes") for path, variable in flat}
    )


# Traced once for equal networks: a run makes the same one several times.


@functools.lru_cache(maxsize=256)
def definition(maker: Maker, part: str, kind: Layer = EVERYWHERE):
    """Returns the graph definition and the state of one of the parts that `maker` makes."""
    with nnx.use_eager_sharding(False):
        return nnx.split(nnx.eval_shape(lambda: maker.module(part, kind)))


def merged(maker: Maker, part: str, params: Params, kind: Layer = EVERYWHERE) -> Any:
    """Returns a part that `maker` makes, with these parameters."""
    graph, state = definition(maker, part, kind)
    state = jax.tree.map(lambda v: v, state)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)
