"""Restores checkpoints whose layers were stacked for other pipeline stages than this run has.

A checkpoint records the layers of each of its stacks (`numbers`). Stacks are read as they were
saved, and then rearranged to those of this run (`Architecture.layer_stacks`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.models.architecture import Architecture

Tree = Any
LayersByStack = Mapping[str, Sequence[int]]
LAYERS_KEY = (
    "layers"  # of the stacks in a checkpoint's JSON, and of a network's layers in its parameters
)


def layers_by_stack(shape: Architecture) -> dict[str, list[int]]:
    """The layer numbers of each stack, for JSON."""
    return {name: list(stack.layer_indices) for name, stack in shape.layer_stacks.items()}


def restore_restacked(
    read: Callable[[Callable[[Mapping[str, Any]], Tree]], tuple],
    abstract: Tree,
    shape: Architecture,
) -> Any:
    """Restores a checkpoint and rearranges its layers to the stacks of `abstract`.

    `read` is `Saver.restore` or `load_tree`: its result, a tuple of tree, JSON and more, is
    returned with the tree rearranged. `shape` is of all networks in the tree.
    """
    current = layers_by_stack(shape)
    # Checkpoints from before there were stages record nothing.
    unstaged = layers_by_stack(dataclasses.replace(shape, stages=1, rounds=1))

    def saved_layers(extra: Mapping[str, Any]) -> LayersByStack:
        return extra.get(LAYERS_KEY, unstaged)

    def abstract_as_saved(extra: Mapping[str, Any]) -> Tree:
        saved = saved_layers(extra)
        restack = functools.partial(_abstract_as_saved, saved, current)
        return abstract if saved == current else _map_layers(restack, abstract)

    tree, extra, *rest = read(abstract_as_saved)
    if (saved := saved_layers(extra)) != current:
        targets = iter(_layer_dicts(abstract))
        tree = _map_layers(lambda layers: _restacked(saved, current, layers, next(targets)), tree)
    return tree, extra, *rest


def _has_layers(node: Any) -> bool:
    return isinstance(node, dict) and isinstance(node.get(LAYERS_KEY), dict)


def _map_layers(change: Callable[[dict], dict], tree: Tree) -> Tree:
    """A tree with `change` applied to the stacks of each network in it."""

    def changed_node(node: Any) -> Any:
        return {**node, LAYERS_KEY: change(node[LAYERS_KEY])} if _has_layers(node) else node

    return jax.tree.map(changed_node, tree, is_leaf=_has_layers)


def _layer_dicts(tree: Tree) -> list[dict]:
    nodes = jax.tree.leaves(tree, is_leaf=_has_layers)
    return [node[LAYERS_KEY] for node in nodes if _has_layers(node)]


def _abstract_as_saved(saved: LayersByStack, current: LayersByStack, layers: dict) -> dict:
    """The stacks of a checkpoint as shapes to restore into, derived from the current stacks."""
    current_stack = {
        number: name for name, layer_numbers in current.items() for number in layer_numbers
    }

    def saved_array(count: int, a: Any) -> Any:
        spec = a.sharding.spec
        unsplit = NamedSharding(a.sharding.mesh, PartitionSpec(None, *spec[1:]))
        sharding = unsplit.with_memory_kind(a.sharding.memory_kind)
        return jax.ShapeDtypeStruct((count, *a.shape[1:]), a.dtype, sharding=sharding)

    return {
        name: jax.tree.map(
            functools.partial(saved_array, len(layer_numbers)),
            layers[current_stack[layer_numbers[0]]],
        )
        for name, layer_numbers in saved.items()
        if current_stack[layer_numbers[0]] in layers
    }


def _restacked(saved: LayersByStack, current: LayersByStack, layers: dict, target: dict) -> dict:
    """The current stacks, gathered from the layers of the saved ones."""
    location = {
        number: (name, i)
        for name, layer_numbers in saved.items()
        for i, number in enumerate(layer_numbers)
    }

    def restacked_stack(name: str, target: Any) -> Any:
        layer_numbers = current[name]
        sources = list(dict.fromkeys(location[number][0] for number in layer_numbers))
        sizes = np.cumsum([0, *(len(saved[source]) for source in sources[:-1])])
        starts = dict(zip(sources, sizes, strict=True))
        order = np.array([starts[location[n][0]] + location[n][1] for n in layer_numbers])

        def gather(target: Any, *source_arrays: jax.Array) -> jax.Array:
            jit_gather = jax.jit(
                lambda *source_arrays: jnp.concatenate(source_arrays)[order],
                out_shardings=target.sharding,
            )
            return jit_gather(*source_arrays)

        return jax.tree.map(gather, target, *(layers[source] for source in sources))

    return {name: restacked_stack(name, layer_numbers) for name, layer_numbers in target.items()}
