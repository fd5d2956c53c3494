"""Checkpoints whose layers were stacked for other stages than those of this run.

A checkpoint says which layers each of its stacks has (`numbers`). They are read as they were
saved, and then put in the order of the stacks here (`Shape.stacks`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.models.shape import Shape

Tree = Any
Numbers = Mapping[str, Sequence[int]]
KEY = "layers"  # of the stacks in a checkpoint's JSON, and of a network's layers in its parameters


def numbers(shape: Shape) -> dict[str, list[int]]:
    """Returns the layers of each stack, as JSON can hold them."""
    return {name: list(stack.numbers) for name, stack in shape.stacks.items()}


def restored(
    read: Callable[[Callable[[Mapping[str, Any]], Tree]], tuple], abstract: Tree, shape: Shape
) -> Any:
    """Returns what `read(abstract)` gives, a tuple of tree, JSON and more, as `abstract` wants it.

    `read` is `Saver.restore` or `load_tree`. `shape` is of all networks in the tree.
    """
    here = numbers(shape)
    # Before there were stages, nothing was said.
    alone = numbers(dataclasses.replace(shape, stages=1, rounds=1))

    def saved(extra: Mapping[str, Any]) -> Numbers:
        return extra.get(KEY, alone)

    def as_saved(extra: Mapping[str, Any]) -> Tree:
        there = saved(extra)
        change = functools.partial(_before, there, here)
        return abstract if there == here else _mapped(change, abstract)

    tree, extra, *rest = read(as_saved)
    if (there := saved(extra)) != here:
        wanted = iter(_found(abstract))
        tree = _mapped(lambda layers: _arranged(there, here, layers, next(wanted)), tree)
    return tree, extra, *rest


def _has_layers(node: Any) -> bool:
    return isinstance(node, dict) and isinstance(node.get(KEY), dict)


def _mapped(change: Callable[[dict], dict], tree: Tree) -> Tree:
    """Returns a tree with the stacks of each network in it changed."""

    def one(node: Any) -> Any:
        return {**node, KEY: change(node[KEY])} if _has_layers(node) else node

    return jax.tree.map(one, tree, is_leaf=_has_layers)


def _found(tree: Tree) -> list[dict]:
    nodes = jax.tree.leaves(tree, is_leaf=_has_layers)
    return [node[KEY] for node in nodes if _has_layers(node)]


def _before(there: Numbers, here: Numbers, layers: dict) -> dict:
    """Returns the shapes of stacks as they were saved, of those wanted now."""
    owner = {number: name for name, of in here.items() for number in of}

    def saved(count: int, a: Any) -> Any:
        spec = a.sharding.spec
        whole = NamedSharding(a.sharding.mesh, PartitionSpec(None, *spec[1:]))
        sharding = whole.with_memory_kind(a.sharding.memory_kind)
        return jax.ShapeDtypeStruct((count, *a.shape[1:]), a.dtype, sharding=sharding)

    return {
        name: jax.tree.map(functools.partial(saved, len(of)), layers[owner[of[0]]])
        for name, of in there.items()
        if owner[of[0]] in layers
    }


def _arranged(there: Numbers, here: Numbers, layers: dict, wanted: dict) -> dict:
    """Returns stacks as wanted now, of those that were saved."""
    place = {number: (name, i) for name, of in there.items() for i, number in enumerate(of)}

    def made(name: str, wanted: Any) -> Any:
        of = here[name]
        sources = list(dict.fromkeys(place[number][0] for number in of))
        sizes = np.cumsum([0, *(len(there[source]) for source in sources[:-1])])
        starts = dict(zip(sources, sizes, strict=True))
        order = np.array([starts[place[n][0]] + place[n][1] for n in of])

        def one(wanted: Any, *parts: jax.Array) -> jax.Array:
            taken = jax.jit(
                lambda *parts: jnp.concatenate(parts)[order], out_shardings=wanted.sharding
            )
            return taken(*parts)

        return jax.tree.map(one, wanted, *(layers[source] for source in sources))

    return {name: made(name, of) for name, of in wanted.items()}
