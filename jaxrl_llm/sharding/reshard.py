"""Weights from the training layout to the rollout layout.

One jitted program a layer: take the layer out of the stack, cast, split as rollout wants
it. XLA puts the cast before the collective, so the wire carries the rollout dtype. The old
rollout weights are donated, so no second copy is held; one layer at a time bounds what is
in flight.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.sharding import mesh as mesh_lib

Params = dict[str, Any]


class Resharder:
    """Turns stacked training parameters into per-layer rollout parameters."""

    def __init__(
        self,
        abstract: Params,
        logical_axes: Params,
        units,
        mesh: Mesh,
        dtype,
        layout: str,
        merge: Callable[[Params], Params] = lambda layer: layer,
    ):
        """
        Args:
          abstract: Shapes of the training parameters, `layers` stacked as [L, ...].
          logical_axes: Dim names of the same tree.
          units: See `mesh.partition_spec`.
          mesh: Where both layouts live.
          dtype: Of the rollout weights.
          layout: "tensor": split over the tensor axis alone, a replica on the rest; "train":
            as in training; "replicas": whole on every device.
          merge: What makes a layer as in `abstract` of one as `reshard` gets it, which may carry
            adapters.
        """
        rules = mesh_lib.LAYOUTS[layout]
        cast = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
        ends = {k: v for k, v in abstract.items() if k != "layers"}
        self._ends = jax.tree.map(lambda a: cast(a.shape), ends)
        self._layer = jax.tree.map(lambda a: cast(a.shape[1:]), abstract["layers"])
        self._num_layers = jax.tree.leaves(abstract["layers"])[0].shape[0]
        self._replicated = mesh_lib.replicated(mesh)
        end_axes = {k: v for k, v in logical_axes.items() if k != "layers"}
        layer_axes = jax.tree.map(
            lambda names: names[1:], logical_axes["layers"], is_leaf=lambda n: isinstance(n, tuple)
        )
        self._end_shardings = mesh_lib.shardings(self._ends, end_axes, mesh, rules, units)
        self._layer_shardings = mesh_lib.shardings(self._layer, layer_axes, mesh, rules, units)
        # Old buffers are donated for their memory alone; unused arguments must stay arguments.
        reuse = functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
        self._move_ends = reuse(
            lambda old, new: _cast(new, dtype), out_shardings=self._end_shardings
        )
        self._move_layer = reuse(
            lambda old, new, i: _cast(merge(jax.tree.map(lambda a: a[i], new)), dtype),
            out_shardings=self._layer_shardings,
        )

    @functools.cached_property
    def _indices(self) -> list[jax.Array]:
        """Numbers of the layers, on the devices once and for all."""
        return [jax.device_put(np.int32(i), self._replicated) for i in range(self._num_layers)]

    @property
    def jitted(self) -> dict[str, Any]:
        """The jitted functions: of one layer `(old, layers, i)` and of the ends `(old, ends)`."""
        return {"layer": self._move_layer, "ends": self._move_ends}

    def abstract(self) -> Params:
        """Returns shapes and shardings of the rollout parameters."""
        place = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)  # noqa: E731
        layer = jax.tree.map(place, self._layer, self._layer_shardings)
        ends = jax.tree.map(place, self._ends, self._end_shardings)
        return {**ends, "layers": (layer,) * self._num_layers}

    def empty(self) -> Params:
        """Returns zeros in the rollout layout, to be donated to the first `reshard`."""
        make = jax.jit(lambda: _zeros(self._layer), out_shardings=self._layer_shardings)
        ends = jax.jit(lambda: _zeros(self._ends), out_shardings=self._end_shardings)
        return {**ends(), "layers": tuple(make() for _ in self._indices)}

    def reshard(self, old: Params, params: Params) -> Params:
        """Returns `params` in the rollout layout and dtype, in the memory of `old`."""
        old_ends = {k: v for k, v in old.items() if k != "layers"}
        ends = {k: v for k, v in params.items() if k != "layers"}
        layers = tuple(
            self._move_layer(layer, params["layers"], i)
            for i, layer in zip(self._indices, old["layers"], strict=True)
        )
        return {**self._move_ends(old_ends, ends), "layers": layers}


def _cast(tree, dtype):
    return jax.tree.map(lambda a: a.astype(dtype), tree)


def _zeros(tree):
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)
