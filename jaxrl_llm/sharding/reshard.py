"""Weights from the training layout to the rollout layout.

One jitted program takes a layer out of the stack, casts it and splits it as rollout wants it. XLA
casts before the collective, so the wire carries the rollout dtype. The memory of the old rollout
weights is used again.
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
    """What one reshard of all weights costs each device."""

    bytes_moved: int  # received, by the collectives of the compiled programs
    lower_bound_bytes: int  # needed and not held, in the rollout dtype
    extra_bytes: int  # most memory at any time beside the weights of both layouts
    dtypes: tuple[str, ...]  # of what is sent

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
          layout: As `config.mesh.rollout`: "tensor" splits over the tensor axis alone; "train" as
            in training; "all_tensor" over tensor, fsdp and sequence; "replicas" not at all.
          convert: Makes a rollout layer from a training layer, before the cast: it may merge
            adapters or transpose kernels.
          rollout_axes: Dim names of the stacked rollout parameters; None: `logical_axes`.
        """
        one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), abstract["layers"])
        layer = jax.eval_shape(convert, one)
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, dtype), {**abstract, "layers": layer}
        )
        stacked = (rollout_axes or logical_axes)["layers"]
        axes = {**logical_axes, "layers": jax.tree.map(lambda _, names: names[1:], layer, stacked)}
        rules, computing = mesh_lib.ROLLOUT_WEIGHTS[layout], mesh_lib.COMPUTING[layout]
        # One layer and the ends: what rollout wants, and how training splits the same arrays.
        self._target = _abstract(
            shapes, mesh_lib.shardings(shapes, axes, mesh, rules, units, computing)
        )
        self._held = mesh_lib.shardings(shapes, axes, mesh, mesh_lib.TRAIN, units)
        # What `reshard` is given; until then plain weights in the training layout.
        self._given = _abstract(
            abstract, mesh_lib.shardings(abstract, logical_axes, mesh, mesh_lib.TRAIN, units)
        )
        self._seen = False
        self._report: Report | None = None
        self._num_layers = jax.tree.leaves(abstract["layers"])[0].shape[0]
        self._mesh = mesh
        self._replicated = mesh_lib.replicated(mesh)
        into = jax.tree.map(lambda a: a.sharding, self._target)
        # Old buffers are donated for their memory alone; unused arguments must stay arguments.
        reuse = functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
        self._move_ends = reuse(lambda old, new: _cast(new, dtype), out_shardings=_ends(into))
        self._move_layer = reuse(
            lambda old, new, i: _cast(convert(jax.tree.map(lambda a: a[i], new)), dtype),
            out_shardings=into["layers"],
        )

    @functools.cached_property
    def _indices(self) -> list[jax.Array]:
        """Numbers of the layers, on the devices."""
        return [jax.device_put(np.int32(i), self._replicated) for i in range(self._num_layers)]

    @property
    def jitted(self) -> dict[str, Any]:
        """The jitted functions: of one layer `(old, layers, i)` and of the ends `(old, ends)`."""
        return {"layer": self._move_layer, "ends": self._move_ends}

    def abstract(self) -> Params:
        """Returns shapes and shardings of the rollout parameters."""
        return {**self._target, "layers": (self._target["layers"],) * self._num_layers}

    def report(self) -> Report:
        """Returns the costs of the compiled programs; compiles them once.

        Before the first `reshard` they are those of plain weights in the training layout.
        """
        if self._report is None:
            self._report = self._measured()
        return self._report

    def _measured(self) -> Report:
        index = jax.ShapeDtypeStruct((), np.int32, sharding=self._replicated)
        layer, given = self._target["layers"], self._given["layers"]
        with jax.set_mesh(self._mesh):
            programs = [
                (self._move_layer.lower(layer, given, index).compile(), self._num_layers),
                (self._move_ends.lower(_ends(self._target), _ends(self._given)).compile(), 1),
            ]
        moved, dtypes, extra = 0, set(), 0
        for program, times in programs:
            for collective in traffic.collectives(program.as_text() or ""):
                moved += times * collective.received_bytes
                dtypes |= set(collective.dtypes)
            memory: Any = program.memory_analysis()
            fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
            extra = max(extra, memory.temp_size_in_bytes + max(0, fresh))

        def missing(into, held):
            return traffic.missing_elements(into.shape, held, into.sharding) * into.dtype.itemsize

        least = jax.tree.map(missing, self._target, self._held)
        total = sum(jax.tree.leaves(_ends(least)))
        total += self._num_layers * sum(jax.tree.leaves(least["layers"]))
        return Report(moved, round(total), extra, tuple(sorted(dtypes)))

    def empty(self) -> Params:
        """Returns zeros in the rollout layout, to be donated to the first `reshard`."""

        def zeros(tree):
            make = lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)  # noqa: E731
            return jax.jit(make, out_shardings=jax.tree.map(lambda a: a.sharding, tree))

        layer = zeros(self._target["layers"])
        return {**zeros(_ends(self._target))(), "layers": tuple(layer() for _ in self._indices)}

    def reshard(self, old: Params, params: Params) -> Params:
        """Returns `params` in the rollout layout and dtype, in the memory of `old`."""
        if not self._seen:
            self._given = _abstract(params, jax.tree.map(lambda a: a.sharding, params))
            self._seen = True
        layers = tuple(
            self._move_layer(layer, params["layers"], i)
            for i, layer in zip(self._indices, old["layers"], strict=True)
        )
        return {**self._move_ends(_ends(old), _ends(params)), "layers": layers}


def _ends(tree: Params) -> Params:
    return {k: v for k, v in tree.items() if k != "layers"}


def _abstract(tree: Params, shardings: Params) -> Params:
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings
    )


def _cast(tree, dtype):
    return jax.tree.map(lambda a: a.astype(dtype), tree)
