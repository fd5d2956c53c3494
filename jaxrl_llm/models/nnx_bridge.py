"""Bridge between Flax modules and plain parameter trees."""

import functools
from typing import Any, Protocol

import jax
from flax import nnx

from jaxrl_llm.models.architecture import UNIFORM_LAYER, LayerType

Params = dict[str, Any]  # nested dict of arrays


class ModuleFactory(Protocol):
    """A hashable description of a network that can create its modules."""

    def __hash__(self) -> int: ...

    def module(self, part: str, kind: LayerType, /) -> nnx.Module:
        """A part of the network (for layers, one of a kind), only to read shapes from."""
        ...


def module_params(module: nnx.Module) -> Params:
    """The parameters of a module as a nested dict."""
    return nnx.to_pure_dict(nnx.split(module)[1])


def logical_axes(state, prefix: tuple[str, ...] = ()) -> Params:
    """The logical dim names of each parameter of a state, with `prefix` in front."""
    flat = nnx.to_flat_state(state)
    return nnx.traversals.unflatten_mapping(
        {path: prefix + variable.get_metadata("logical_axes") for path, variable in flat}
    )


# Cached: a run creates equal networks several times, and each trace takes time.


@functools.lru_cache(maxsize=256)
def graph_and_state(factory: ModuleFactory, part: str, kind: LayerType = UNIFORM_LAYER):
    """The graph definition and abstract state of a part of the network."""
    with nnx.use_eager_sharding(False):
        return nnx.split(nnx.eval_shape(lambda: factory.module(part, kind)))


def merge_module(
    factory: ModuleFactory, part: str, params: Params, kind: LayerType = UNIFORM_LAYER
) -> Any:
    """The module of a part of the network, with these parameters."""
    graph, state = graph_and_state(factory, part, kind)
    state = jax.tree.map(lambda v: v, state)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)
