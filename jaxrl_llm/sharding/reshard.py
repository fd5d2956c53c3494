"""Weights from the training layout to the rollout layout.

One jitted program a layer: take the layer out of the stack, cast, split as rollout wants
it. XLA puts the cast before the collective, so the wire carries the rollout dtype. The old
rollout weights are donated, so no second copy is held; one layer at a time bounds what is
in flight.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.sharding import traffic

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Report:
    """What one reshard of all weights costs each device.

    Attributes:
      bytes_moved: Received from others, by the collectives of the compiled programs.
      lower_bound_bytes: What it needs and does not hold, in the rollout dtype.
      extra_bytes: Most that is held beside the weights of both layouts at any time.
      dtypes: Of what travels.
    """

    bytes_moved: int
    lower_bound_bytes: int
    extra_bytes: int
    dtypes: tuple[str, ...]

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of the report by the names of metrics."""
        names = ("bytes_moved", "lower_bound_bytes", "extra_bytes")
        return {f"reshard/{name}": float(getattr(self, name)) for name in names}

    def __str__(self) -> str:
        return (
            f"{self.bytes_moved / 1e6:.3f} MB to each device"
            f" ({', '.join(self.dtypes) or 'nothing'} on the wire;"
            f" lower bound {self.lower_bound_bytes / 1e6:.3f} MB),"
            f" {self.extra_bytes / 1e6:.3f} MB held beside the weights"
        )


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
        convert: Callable[[Params], Params] = lambda layer: layer,
        rollout_axes: Params | None = None,
    ):
        """
        Args:
          abstract: Shapes of the training parameters, `layers` stacked as [L, ...].
          logical_axes: Dim names of the same tree.
          units: See `mesh.partition_spec`.
          mesh: Where both layouts live.
          dtype: Of the rollout weights.
          layout: "tensor": split over the tensor axis alone, a replica on the rest; "train":
            as in training; "all_tensor": over tensor, fsdp and sequence; "replicas": whole on
            every device.
          convert: Makes a rollout layer from a training layer, before the cast: it may merge
            adapters or transpose kernels.
          rollout_axes: Dim names of the stacked rollout parameters; None: `logical_axes`.
        """
        rules, computing = mesh_lib.LAYOUTS[layout], mesh_lib.COMPUTING[layout]
        self._train = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            abstract,
            mesh_lib.shardings(abstract, logical_axes, mesh, mesh_lib.TRAIN, units),
        )
        self._given = self._train
        self._report: Report | None = None
        cast = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
        ends = {k: v for k, v in abstract.items() if k != "layers"}
        self._ends = jax.tree.map(lambda a: cast(a.shape), ends)
        self._num_layers = jax.tree.leaves(abstract["layers"])[0].shape[0]
        self._mesh = mesh
        self._replicated = mesh_lib.replicated(mesh)
        end_axes = {k: v for k, v in logical_axes.items() if k != "layers"}
        layer_axes = jax.tree.map(
            lambda names: names[1:],
            (rollout_axes or logical_axes)["layers"],
            is_leaf=lambda names: isinstance(names, tuple),
        )
        one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), abstract["layers"])
        self._layer = jax.tree.map(lambda a: cast(a.shape), jax.eval_shape(convert, one))
        self._end_shardings = mesh_lib.shardings(
            self._ends, end_axes, mesh, rules, units, computing
        )
        self._layer_shardings = mesh_lib.shardings(
            self._layer, layer_axes, mesh, rules, units, computing
        )
        # How training splits what a rollout layer holds.
        self._given_layer = mesh_lib.shardings(self._layer, layer_axes, mesh, mesh_lib.TRAIN, units)
        # Old buffers are donated for their memory alone; unused arguments must stay arguments.
        reuse = functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
        self._move_ends = reuse(
            lambda old, new: _cast(new, dtype), out_shardings=self._end_shardings
        )
        self._move_layer = reuse(
            lambda old, new, i: _cast(convert(jax.tree.map(lambda a: a[i], new)), dtype),
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

    def report(self) -> Report:
        """Returns what the compiled programs do to the weights that `reshard` was given.

        Before the first of them, to plain weights in the training layout. Compiled once.
        """
        if self._report is None:
            self._report = self._measured()
        return self._report

    def _measured(self) -> Report:
        target = self.abstract()
        ends, train_ends, given_ends = (
            {k: v for k, v in tree.items() if k != "layers"}
            for tree in (target, self._train, self._given)
        )
        layer = target["layers"][0]
        index = jax.ShapeDtypeStruct((), np.int32, sharding=self._replicated)
        with jax.set_mesh(self._mesh):
            programs = [
                (
                    self._move_layer.lower(layer, self._given["layers"], index).compile(),
                    self._num_layers,
                ),
                (self._move_ends.lower(ends, given_ends).compile(), 1),
            ]
        moved, dtypes, extra = 0, set(), 0
        for program, times in programs:
            for collective in traffic.collectives(program.as_text() or ""):
                moved += times * collective.received_bytes
                dtypes |= set(collective.dtypes)
            memory: Any = program.memory_analysis()
            fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
            extra = max(extra, memory.temp_size_in_bytes + max(0, fresh))

        def missing(into, source):
            return traffic.missing_elements(into.shape, source, into.sharding) * into.dtype.itemsize

        held = {k: jax.tree.map(lambda a: a.sharding, v) for k, v in train_ends.items()}
        least = self._num_layers * sum(
            jax.tree.leaves(jax.tree.map(missing, layer, self._given_layer))
        ) + sum(jax.tree.leaves(jax.tree.map(missing, ends, held)))
        return Report(moved, round(least), extra, tuple(sorted(dtypes)))

    def empty(self) -> Params:
        """Returns zeros in the rollout layout, to be donated to the first `reshard`."""
        make = jax.jit(lambda: _zeros(self._layer), out_shardings=self._layer_shardings)
        ends = jax.jit(lambda: _zeros(self._ends), out_shardings=self._end_shardings)
        return {**ends(), "layers": tuple(make() for _ in self._indices)}

    def reshard(self, old: Params, params: Params) -> Params:
        """Returns `params` in the rollout layout and dtype, in the memory of `old`."""
        if self._given is self._train:
            self._given = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), params
            )
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
