"""Weights from the training layout to the rollout layout.

One jitted program takes a layer out of the stack, casts it and splits it as rollout wants it. XLA
casts before the collective, so the wire carries the rollout dtype. The memory of the old rollout
weights is used again. Of layers on stages it takes one from each stage: gathering those moves no
byte that is not wanted, and sending one from its stage to all others would leave most links idle.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        abstract: Params,  # shapes of the training parameters, `layers` by stack as [L, ...]
        logical_axes: Params,  # dim names of the same tree
        units,
        mesh: Mesh,
        dtypes: Callable[[Params], Params],  # dtypes of the rollout parameters of any tree
        layout: str,  # as `config.mesh.rollout`
        numbers: Mapping[str, Sequence[int]],  # which layers each stack has
        # Makes a rollout layer of a stack before the cast: it may merge adapters, or transpose.
        convert: Callable[[str, Params], Params] = lambda stack, layer: layer,
        rollout_axes: Params | None = None,  # of the stacked rollout layers, if they are others
    ):
        def one(name: str, stacked: Params) -> Params:
            first = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stacked)
            return jax.eval_shape(functools.partial(convert, name), first)

        whole = {**abstract, "layers": {n: one(n, of) for n, of in abstract["layers"].items()}}
        shapes = jax.tree.map(
            lambda a, dtype: jax.ShapeDtypeStruct(a.shape, dtype), whole, dtypes(whole)
        )
        stacked = (rollout_axes or logical_axes)["layers"]
        of_one = jax.tree.map(lambda _, names: names[1:], shapes["layers"], stacked)
        axes = {**logical_axes, "layers": of_one}
        rules, computing = mesh_lib.ROLLOUT_WEIGHTS[layout], mesh_lib.COMPUTING[layout]
        # A layer of each stack and the ends: as rollout wants them, and as training splits them.
        self._target = _abstract(
            shapes, mesh_lib.shardings(shapes, axes, mesh, rules, units, computing)
        )
        # As many layers of each stack as one program takes: one of each stage.
        self._ways = {
            n: mesh.shape[mesh_lib.STAGE] if _first_dim(of) == "staged" else 1
            for n, of in stacked.items()
        }

        def several(name: str, a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self._ways[name], *a.shape), a.dtype)

        taken = {
            name: jax.tree.map(functools.partial(several, name), of)
            for name, of in shapes["layers"].items()
        }
        together = {**shapes, "layers": taken}, {**logical_axes, "layers": stacked}
        self._held = mesh_lib.shardings(*together, mesh, mesh_lib.TRAIN, units)
        self._wanted = mesh_lib.shardings(*together, mesh, rules, units, computing)
        self._together = together[0]
        # What `reshard` is given; until then plain weights in the training layout.
        self._given = _abstract(
            abstract, mesh_lib.shardings(abstract, logical_axes, mesh, mesh_lib.TRAIN, units)
        )
        self._seen = False
        self._report: Report | None = None
        # Of each layer: its stack, and where it stands there.
        places = {layer: (n, i) for n, of in numbers.items() for i, layer in enumerate(of)}
        self._places = [places[layer] for layer in sorted(places)]
        self._numbers = numbers
        self.mesh = mesh
        self._replicated = mesh_lib.replicated(mesh)
        into = jax.tree.map(lambda a: a.sharding, self._target)
        # Old buffers are donated for their memory alone; unused arguments must stay arguments.
        reuse = functools.partial(jax.jit, donate_argnums=0, keep_unused=True)

        def layers(name: str, old, new, i):
            if self._ways[name] == 1:
                return [_cast(convert(name, jax.tree.map(lambda a: a[i], new)), dtypes)]

            def of_stages(a):
                return a.reshape(self._ways[name], -1, *a.shape[1:])[:, i]

            # Cast where they are, then gathered.
            made = jax.vmap(functools.partial(convert, name))(jax.tree.map(of_stages, new))
            made = jax.lax.with_sharding_constraint(_cast(made, dtypes), self._held["layers"][name])
            made = jax.lax.with_sharding_constraint(made, self._wanted["layers"][name])
            structure = jax.tree.structure(made)
            apart = zip(*map(tuple, jax.tree.leaves(made)), strict=True)
            return [jax.tree.unflatten(structure, layer) for layer in apart]

        # Programs of the ends `(old, ends)`, and by stack of one layer, or one of each stage,
        # `([old], layers, i)`.
        self.ends: Any = reuse(lambda old, new: _cast(new, dtypes), out_shardings=_ends(into))
        self.layers: dict[str, Any] = {
            name: reuse(
                functools.partial(layers, name),
                out_shardings=[into["layers"][name]] * self._ways[name],
            )
            for name in numbers
        }

    @functools.cached_property
    def _indices(self) -> list[jax.Array]:
        """Numbers of layers in a stack, on the devices."""
        most = max(i for _, i in self._places) + 1
        return [mesh_lib.everywhere(np.int32(i), self.mesh) for i in range(most)]

    @functools.cached_property
    def _rooms(self) -> tuple[dict[str, Callable[[], Params]], Callable[[], Params]]:
        """Programs that return zeros in the rollout layout: of a stack's layer, and of the ends."""

        def zeros(tree):
            make = lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)  # noqa: E731
            return jax.jit(make, out_shardings=jax.tree.map(lambda a: a.sharding, tree))

        layers = {name: zeros(of) for name, of in self._target["layers"].items()}
        return layers, zeros(_ends(self._target))

    def abstract(self) -> Params:
        """Returns shapes and shardings of the rollout parameters."""
        layers = self._target["layers"]
        return {**self._target, "layers": tuple(layers[name] for name, _ in self._places)}

    def lowered(self, params: Params) -> dict[str, Callable[[], jax.stages.Lowered]]:
        """Returns what lowers each program for training parameters like these, by stack."""
        index = jax.ShapeDtypeStruct((), np.int32, sharding=self._replicated)
        layers = {
            name: functools.partial(
                program.lower,
                [self._target["layers"][name]] * self._ways[name],
                params["layers"][name],
                index,
            )
            for name, program in self.layers.items()
        }
        ends = functools.partial(self.ends.lower, _ends(self._target), _ends(params))
        return {"ends": ends, **layers}

    def report(self) -> Report:
        """Returns the costs of the compiled programs, compiled once; of plain weights at first."""
        if self._report:
            return self._report
        with jax.set_mesh(self.mesh):
            programs = {n: lower().compile() for n, lower in self.lowered(self._given).items()}
        times = {name: len(of) // self._ways[name] for name, of in self._numbers.items()}
        moved, dtypes, extra = 0, set(), 0
        for name, program in programs.items():
            for collective in collectives(program.as_text() or ""):
                moved += times.get(name, 1) * collective.received_bytes
                dtypes |= set(collective.dtypes)
            memory: Any = program.memory_analysis()
            fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
            extra = max(extra, memory.temp_size_in_bytes + max(0, fresh))

        def missing(a, held, wanted):
            return missing_elements(a.shape, held, wanted) * a.dtype.itemsize

        least = jax.tree.map(missing, self._together, self._held, self._wanted)
        total = sum(jax.tree.leaves(_ends(least)))
        total += sum(times[n] * sum(jax.tree.leaves(of)) for n, of in least["layers"].items())
        self._report = Report(moved, round(total), extra, tuple(sorted(dtypes)))
        return self._report

    def empty(self) -> Params:
        """Returns zeros in the rollout layout, to be donated to a `reshard`."""
        layers, ends = self._rooms
        made = tuple(layers[name]() for name, _ in self._places)
        jax.block_until_ready(self._indices)  # now: `reshard` moves nothing from the host
        return {**ends(), "layers": made}

    def reshard(self, old: Params, params: Params) -> Params:
        """Returns `params` in the rollout layout and dtype, in the memory of `old`."""
        if not self._seen:
            self._given = _abstract(params, jax.tree.map(lambda a: a.sharding, params))
            self._seen = True
        with jax.set_mesh(self.mesh):
            layers = list(old["layers"])
            for name, i in self._places:
                of = self._numbers[name]
                apart = len(of) // self._ways[name]
                if i >= apart:  # taken with that of the first stage
                    continue
                mine = of[i::apart]
                before = [layers[number] for number in mine]
                found = self.layers[name](before, params["layers"][name], self._indices[i])
                for number, layer in zip(mine, found, strict=True):
                    layers[number] = layer
            return {**self.ends(_ends(old), _ends(params)), "layers": tuple(layers)}


def _first_dim(axes: Params) -> str:
    """Returns the name of the dim of layers in a tree of dim names."""
    return jax.tree.leaves(axes, is_leaf=lambda names: isinstance(names, tuple))[0][0]


def _ends(tree: Params) -> Params:
    return {k: v for k, v in tree.items() if k != "layers"}


def _abstract(tree: Params, shardings: Params) -> Params:
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings
    )


def _cast(tree: Params, dtypes: Callable[[Params], Params]) -> Params:
    return jax.tree.map(lambda a, dtype: a.astype(dtype), tree, dtypes(tree))


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
