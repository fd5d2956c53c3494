"""Flax modules of a network: what they hold, and modules with given parameters inside a trace."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxrl_llm.models.shape import EVERYWHERE, Layer

Params = dict[str, Any]  # nested dict of arrays


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
def definition(network: Any, part: str, kind: Layer = EVERYWHERE):
    """Returns the graph definition and the state of one of the parts of a `Network`."""
    make: dict[str, Callable[[], nnx.Module]] = {
        "block": lambda: network._block(kind, nnx.Rngs(0)),
        "ends": lambda: network._ends(nnx.Rngs(0)),
        "adapted": lambda: network._block(kind, nnx.Rngs(0), network.lora),
        "tower block": lambda: network._tower("block", nnx.Rngs(0)),
        "tower ends": lambda: network._tower("ends", nnx.Rngs(0)),
    }
    with nnx.use_eager_sharding(False):
        return nnx.split(nnx.eval_shape(make[part]))


def merged(network: Any, part: str, params: Params, kind: Layer = EVERYWHERE) -> Any:
    """Returns a module of a network, see `definition`, with these parameters."""
    graph, state = definition(network, part, kind)
    state = jax.tree.map(lambda v: v, state)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)
