"""Weights from the training layout to the rollout layout.

One jitted program takes a layer out of the stack, casts it and splits it as rollout wants it. XLA
casts before the collective, so the wire carries the rollout dtype. The memory of the old rollout
weights is used again.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.sharding import mesh as mesh_lib

Params = dict[str, Any]

_COLLECTIVE = re.compile(
    r"= (?P<result>\(.*?\)|\S+) (?P<kind>all-gather|all-to-all|all-reduce|reduce-scatter"
    r"|collective-permute|ragged-all-to-all)(?P<start>-start)?\((?P<rest>.*)"
)
_ARRAY = re.compile(r"\b([a-z]+(\d+)\w*)\[([\d,]*)\]")
# `[2,4]<=[8]`: two groups of four; `{{0,1},{2,3}}`; `mesh['a'=4,'b'=2] {'b'}`: along those axes.
_GROUPS = re.compile(
    r"replica_groups=(?:\[\d+,(?P<size>\d+)\]|\{\{(?P<list>[\d,]*)\}"
    r"|\w*\[(?P<axes>[^\]]*)\][^{\n]*\{(?P<along>[^}]*)\})"
)


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
        abstract: Params,  # shapes of the training parameters, `layers` stacked as [L, ...]
        logical_axes: Params,  # dim names of the same tree
        units,
        mesh: Mesh,
        dtype,
        layout: str,  # as `config.mesh.rollout`
        # Makes a rollout layer before the cast: it may merge adapters or transpose kernels.
        convert: Callable[[Params], Params] = lambda layer: layer,
        rollout_axes: Params | None = None,  # of the stacked rollout layers, if they are others
    ):
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
        self.mesh = mesh
        self._replicated = mesh_lib.replicated(mesh)
        into = jax.tree.map(lambda a: a.sharding, self._target)
        # Old buffers are donated for their memory alone; unused arguments must stay arguments.
        reuse = functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
        self.jitted: dict[
            str, Any
        ] = {  # of the ends `(old, ends)`, of one layer `(old, layers, i)`
            "ends": reuse(lambda old, new: _cast(new, dtype), out_shardings=_ends(into)),
            "layer": reuse(
                lambda old, new, i: _cast(convert(jax.tree.map(lambda a: a[i], new)), dtype),
                out_shardings=into["layers"],
            ),
        }

    @functools.cached_property
    def _indices(self) -> list[jax.Array]:
        """Numbers of the layers, on the devices."""
        return [jax.device_put(np.int32(i), self._replicated) for i in range(self._num_layers)]

    def abstract(self) -> Params:
        """Returns shapes and shardings of the rollout parameters."""
        return {**self._target, "layers": (self._target["layers"],) * self._num_layers}

    def report(self) -> Report:
        """Returns the costs of the compiled programs, compiled once; of plain weights at first."""
        if self._report:
            return self._report
        index = jax.ShapeDtypeStruct((), np.int32, sharding=self._replicated)
        layer, given = self._target["layers"], self._given["layers"]
        with jax.set_mesh(self.mesh):
            programs = [
                (self.jitted["layer"].lower(layer, given, index).compile(), self._num_layers),
                (self.jitted["ends"].lower(_ends(self._target), _ends(self._given)).compile(), 1),
            ]
        moved, dtypes, extra = 0, set(), 0
        for program, times in programs:
            for collective in collectives(program.as_text() or ""):
                moved += times * collective.received_bytes
                dtypes |= set(collective.dtypes)
            memory: Any = program.memory_analysis()
            fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
            extra = max(extra, memory.temp_size_in_bytes + max(0, fresh))

        def missing(into, held):
            return missing_elements(into.shape, held, into.sharding) * into.dtype.itemsize

        least = jax.tree.map(missing, self._target, self._held)
        total = sum(jax.tree.leaves(_ends(least)))
        total += self._num_layers * sum(jax.tree.leaves(least["layers"]))
        self._report = Report(moved, round(total), extra, tuple(sorted(dtypes)))
        return self._report

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
        with jax.set_mesh(self.mesh):
            layers = tuple(
                self.jitted["layer"](layer, params["layers"], i)
                for i, layer in zip(self._indices, old["layers"], strict=True)
            )
            return {**self.jitted["ends"](_ends(old), _ends(params)), "layers": layers}


def _ends(tree: Params) -> Params:
    return {k: v for k, v in tree.items() if k != "layers"}


def _abstract(tree: Params, shardings: Params) -> Params:
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings
    )


def _cast(tree, dtype):
    return jax.tree.map(lambda a: a.astype(dtype), tree)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One exchange of a compiled program."""

    kind: str  # XLA's name, e.g. "all-gather"
    dtypes: tuple[str, ...]  # of what is sent
    received_bytes: int  # by each device; an all-reduce is a reduce-scatter and an all-gather


def collectives(hlo: str) -> Iterator[Collective]:
    """Yields the collectives in the text of a compiled program, each as often as it is written.

    >>> line = "%a = bf16[8,4]{1,0} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}"
    >>> [(c.kind, c.received_bytes) for c in collectives(line)]
    [('all-gather', 48)]
    """
    partitions = re.search(r"num_partitions=(\d+)", hlo)
    everybody = int(partitions[1]) if partitions else 1
    for found in _COLLECTIVE.finditer(hlo):
        arrays = [
            (dtype, math.prod(int(n) for n in dims.split(",") if n) * int(bits) // 8)
            for dtype, bits, dims in _ARRAY.findall(found["result"])
        ]
        kind, group = found["kind"], _group_size(found["rest"], everybody)
        total = sum(size for _, size in arrays)
        if found["start"]:  # its text has the inputs beside the outputs
            total = total * group // (group + 1) if kind == "all-gather" else total // 2
        received = {
            "all-gather": total * (group - 1) // group,
            "all-to-all": total * (group - 1) // group,
            "ragged-all-to-all": total,
            "all-reduce": 2 * total * (group - 1) // group,
            "reduce-scatter": total * (group - 1),
            "collective-permute": total,
        }
        yield Collective(kind, tuple(sorted({dtype for dtype, _ in arrays})), received[kind])


def _group_size(attributes: str, everybody: int) -> int:
    found = _GROUPS.search(attributes)
    if not found:
        return everybody
    if found["size"]:
        return int(found["size"])
    if found["list"] is not None:
        return len(found["list"].split(","))
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", found["axes"]))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found["along"]))


def missing_elements(shape: tuple[int, ...], source: NamedSharding, target: NamedSharding) -> float:
    """Returns the elements that a device has in the target but not in the source, on average."""
    held: Mapping = source.devices_indices_map(shape)
    wanted: Mapping = target.devices_indices_map(shape)

    def volume(*slices: tuple[slice, ...]) -> int:  # of what all of them have in common
        dims = zip(shape, *slices, strict=True)
        spans = [[range(size)[part] for part in parts] for size, *parts in dims]
        return math.prod(
            max(0, min(s.stop for s in of_dim) - max(s.start for s in of_dim)) for of_dim in spans
        )

    return float(np.mean([volume(part) - volume(part, held[d]) for d, part in wanted.items()]))
