"""Resharding of weights from the training layout to the rollout layout.

A jitted program slices a layer out of the stack, casts it and reshards it. XLA casts before the
collective, so the rollout dtype goes over the wire. The memory of the old rollout weights is
donated. With pipeline stages, a program takes one layer from each: gathering them moves no
unnecessary byte, while sending one layer from its stage to all others would leave most links idle.
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
class ReshardReport:
    """Cost per device of resharding all weights once."""

    bytes_moved: int  # received in the collectives of the compiled programs
    lower_bound_bytes: int  # needed but not local, in the rollout dtype
    extra_bytes: int  # peak memory beside the weights of both layouts
    dtypes: tuple[str, ...]  # on the wire

    def metrics(self) -> dict[str, float]:
        """The numbers of the report by metric name."""
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
    """Reshards stacked training parameters into per-layer rollout parameters."""

    def __init__(
        self,
        # shapes of the training parameters, `layer_programs` by stack as [L, ...]
        abstract: Params,
        logical_axes: Params,  # of the same tree
        units,
        mesh: Mesh,
        dtypes: Callable[[Params], Params],  # dtypes of the rollout parameters of any tree
        layout: str,  # `config.mesh.rollout`
        layer_numbers: Mapping[str, Sequence[int]],  # layer numbers of each stack
        # Converts a layer of a stack before the cast: it may merge adapters, or transpose.
        convert: Callable[[str, Params], Params] = lambda stack, layer: layer,
        rollout_axes: Params | None = None,  # of the stacked rollout layers, if they differ
    ):
        def layer_shapes(name: str, stacked: Params) -> Params:
            first_layer = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stacked
            )
            return jax.eval_shape(functools.partial(convert, name), first_layer)

        rollout_shapes = {
            **abstract,
            "layers": {n: layer_shapes(n, of) for n, of in abstract["layers"].items()},
        }
        shapes = jax.tree.map(
            lambda a, dtype: jax.ShapeDtypeStruct(a.shape, dtype),
            rollout_shapes,
            dtypes(rollout_shapes),
        )
        stacked = (rollout_axes or logical_axes)["layers"]
        layer_axes = jax.tree.map(lambda _, names: names[1:], shapes["layers"], stacked)
        axes = {**logical_axes, "layers": layer_axes}
        rules, computing = mesh_lib.ROLLOUT_WEIGHTS[layout], mesh_lib.COMPUTE_AXES[layout]
        # Rollout shapes and shardings: one layer of each stack, and the parameters outside layers.
        self._target = _abstract(
            shapes, mesh_lib.shardings(shapes, axes, mesh, rules, units, computing)
        )
        # Layers of each stack that one program takes: one of each pipeline stage.
        self._layers_per_program = {
            n: mesh.shape[mesh_lib.STAGE] if _first_dim(of) == "staged" else 1
            for n, of in stacked.items()
        }

        def stack_layers(name: str, a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self._layers_per_program[name], *a.shape), a.dtype)

        group_layers = {
            name: jax.tree.map(functools.partial(stack_layers, name), of)
            for name, of in shapes["layers"].items()
        }
        together = {**shapes, "layers": group_layers}, {**logical_axes, "layers": stacked}
        self._source_shardings = mesh_lib.shardings(*together, mesh, mesh_lib.TRAIN, units)
        self._target_shardings = mesh_lib.shardings(*together, mesh, rules, units, computing)
        self._group_shapes = together[0]
        # Inputs of the first `reshard`; until then plain weights in the training layout.
        self._input_params = _abstract(
            abstract, mesh_lib.shardings(abstract, logical_axes, mesh, mesh_lib.TRAIN, units)
        )
        self._has_input = False
        self._report: ReshardReport | None = None
        # Per layer: its stack, and its index there.
        positions = {layer: (n, i) for n, of in layer_numbers.items() for i, layer in enumerate(of)}
        self._positions = [positions[layer] for layer in sorted(positions)]
        self._numbers = layer_numbers
        self.mesh = mesh
        self._replicated = mesh_lib.replicated(mesh)
        out_shardings = jax.tree.map(lambda a: a.sharding, self._target)
        # Old buffers are donated only for their memory: without `keep_unused` jit would drop them.
        jit_in_place = functools.partial(jax.jit, donate_argnums=0, keep_unused=True)

        def layers(name: str, old, new, i):
            if self._layers_per_program[name] == 1:
                return [_cast(convert(name, jax.tree.map(lambda a: a[i], new)), dtypes)]

            def stage_layers(a):
                return a.reshape(self._layers_per_program[name], -1, *a.shape[1:])[:, i]

            # Two constraints: cast on the source devices first, then gather.
            converted = jax.vmap(functools.partial(convert, name))(jax.tree.map(stage_layers, new))
            converted = jax.lax.with_sharding_constraint(
                _cast(converted, dtypes), self._source_shardings["layers"][name]
            )
            converted = jax.lax.with_sharding_constraint(
                converted, self._target_shardings["layers"][name]
            )
            structure = jax.tree.structure(converted)
            layer_leaves = zip(*map(tuple, jax.tree.leaves(converted)), strict=True)
            return [jax.tree.unflatten(structure, layer) for layer in layer_leaves]

        # Programs for the parameters outside layers, `(old, params)`, and per stack for one layer,
        # or one of each stage, `([old], layer_programs, i)`.
        self.non_layer_program: Any = jit_in_place(
            lambda old, new: _cast(new, dtypes), out_shardings=_non_layer_params(out_shardings)
        )
        self.layer_programs: dict[str, Any] = {
            name: jit_in_place(
                functools.partial(layers, name),
                out_shardings=[out_shardings["layers"][name]] * self._layers_per_program[name],
            )
            for name in layer_numbers
        }

    @functools.cached_property
    def _indices(self) -> list[jax.Array]:
        """Layer indices as device arrays."""
        num_indices = max(i for _, i in self._positions) + 1
        return [mesh_lib.replicate_host_value(np.int32(i), self.mesh) for i in range(num_indices)]

    @functools.cached_property
    def _zeros_programs(self) -> tuple[dict[str, Callable[[], Params]], Callable[[], Params]]:
        """Programs that allocate zeros in the rollout layout: a layer per stack, and the rest."""

        def zeros(tree):
            make_zeros = lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)  # noqa: E731
            return jax.jit(make_zeros, out_shardings=jax.tree.map(lambda a: a.sharding, tree))

        layers = {name: zeros(of) for name, of in self._target["layers"].items()}
        return layers, zeros(_non_layer_params(self._target))

    def abstract(self) -> Params:
        """Shapes and shardings of the rollout parameters."""
        layers = self._target["layers"]
        return {**self._target, "layers": tuple(layers[name] for name, _ in self._positions)}

    def lowerings(self, params: Params) -> dict[str, Callable[[], jax.stages.Lowered]]:
        """Functions that lower each program for training parameters like these, by stack."""
        index = jax.ShapeDtypeStruct((), np.int32, sharding=self._replicated)
        layers = {
            name: functools.partial(
                program.lower,
                [self._target["layers"][name]] * self._layers_per_program[name],
                params["layers"][name],
                index,
            )
            for name, program in self.layer_programs.items()
        }
        ends = functools.partial(
            self.non_layer_program.lower, _non_layer_params(self._target), _non_layer_params(params)
        )
        return {"ends": ends, **layers}

    def report(self) -> ReshardReport:
        """Cost of the compiled programs, computed once; before any `reshard`, for plain weights."""
        if self._report:
            return self._report
        with jax.set_mesh(self.mesh):
            programs = {
                n: lower().compile() for n, lower in self.lowerings(self._input_params).items()
            }
        num_calls = {
            name: len(of) // self._layers_per_program[name] for name, of in self._numbers.items()
        }
        bytes_moved, dtypes, extra_bytes = 0, set(), 0
        for name, program in programs.items():
            for collective in collectives(program.as_text() or ""):
                bytes_moved += num_calls.get(name, 1) * collective.received_bytes
                dtypes |= set(collective.dtypes)
            memory: Any = program.memory_analysis()
            new_bytes = memory.output_size_in_bytes - memory.alias_size_in_bytes
            extra_bytes = max(extra_bytes, memory.temp_size_in_bytes + max(0, new_bytes))

        def device_missing_bytes(a, source_sharding, target_sharding):
            return missing_elements(a.shape, source_sharding, target_sharding) * a.dtype.itemsize

        missing_bytes = jax.tree.map(
            device_missing_bytes, self._group_shapes, self._source_shardings, self._target_shardings
        )
        total = sum(jax.tree.leaves(_non_layer_params(missing_bytes)))
        total += sum(
            num_calls[n] * sum(jax.tree.leaves(of)) for n, of in missing_bytes["layers"].items()
        )
        self._report = ReshardReport(bytes_moved, round(total), extra_bytes, tuple(sorted(dtypes)))
        return self._report

    def zeros(self) -> Params:
        """Zeros in the rollout layout, to be donated to the first `reshard`."""
        layers, ends = self._zeros_programs
        layer_params = tuple(layers[name]() for name, _ in self._positions)
        jax.block_until_ready(self._indices)  # now, so that `reshard` makes no host transfer
        return {**ends(), "layers": layer_params}

    def reshard(self, old: Params, params: Params) -> Params:
        """`params` in the rollout layout and dtype, in the memory of `old`, which is donated."""
        if not self._has_input:
            self._input_params = _abstract(params, jax.tree.map(lambda a: a.sharding, params))
            self._has_input = True
        with jax.set_mesh(self.mesh):
            layers = list(old["layers"])
            for name, i in self._positions:
                layer_numbers = self._numbers[name]
                layers_per_stage = len(layer_numbers) // self._layers_per_program[name]
                if i >= layers_per_stage:  # resharded with the layer of the first stage
                    continue
                group = layer_numbers[i::layers_per_stage]
                old_layers = [layers[number] for number in group]
                new_layers = self.layer_programs[name](
                    old_layers, params["layers"][name], self._indices[i]
                )
                for number, layer in zip(group, new_layers, strict=True):
                    layers[number] = layer
            return {
                **self.non_layer_program(_non_layer_params(old), _non_layer_params(params)),
                "layers": tuple(layers),
            }


def _first_dim(axes: Params) -> str:
    """Logical name of the leading (layer) dim in a tree of dim names."""
    return jax.tree.leaves(axes, is_leaf=lambda names: isinstance(names, tuple))[0][0]


def _non_layer_params(tree: Params) -> Params:
    return {k: v for k, v in tree.items() if k != "layers"}


def _abstract(tree: Params, shardings: Params) -> Params:
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings
    )


def _cast(tree: Params, dtypes: Callable[[Params], Params]) -> Params:
    return jax.tree.map(lambda a, dtype: a.astype(dtype), tree, dtypes(tree))


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of a compiled program."""

    kind: str  # XLA's name, e.g. "all-gather"
    dtypes: tuple[str, ...]  # on the wire
    received_bytes: int  # by each device; an all-reduce is a reduce-scatter and an all-gather


def collectives(hlo: str, num_devices: int = 0) -> Iterator[Collective]:
    """Yields the collectives in the HLO text of a compiled program, once per occurrence.

    `num_devices` is for a part of a program; 0: the head of the text tells it.

    >>> line = "%a = bf16[8,4]{1,0} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}"
    >>> [(c.kind, c.received_bytes) for c in collectives(line)]
    [('all-gather', 48)]
    """
    if not num_devices:
        partitions = re.search(r"num_partitions=(\d+)", hlo)
        num_devices = int(partitions[1]) if partitions else 1
    for match in _COLLECTIVE.finditer(hlo):
        arrays = [
            (dtype, math.prod(int(n) for n in dims.split(",") if n) * int(bits) // 8)
            for dtype, bits, dims in _ARRAY.findall(match["result"])
        ]
        kind, group = match["kind"], _group_size(match["rest"], num_devices)
        total = sum(size for _, size in arrays)
        if match["start"]:  # an async start lists its inputs with its outputs
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


def _group_size(attributes: str, num_devices: int) -> int:
    match = _GROUPS.search(attributes)
    if not match:
        return num_devices
    if match["size"]:
        return int(match["size"])
    if match["list"] is not None:
        return len(match["list"].split(","))
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", match["axes"]))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", match["along"]))


def missing_elements(shape: tuple[int, ...], source: NamedSharding, target: NamedSharding) -> float:
    """Elements that a device has in the target but not in the source sharding, on average."""
    source_indices: Mapping = source.devices_indices_map(shape)
    target_indices: Mapping = target.devices_indices_map(shape)

    def volume(*slices: tuple[slice, ...]) -> int:  # of the intersection
        dims = zip(shape, *slices, strict=True)
        spans = [[range(size)[part] for part in parts] for size, *parts in dims]
        return math.prod(
            max(0, min(s.stop for s in spans_of_dim) - max(s.start for s in spans_of_dim))
            for spans_of_dim in spans
        )

    return float(
        np.mean(
            [volume(part) - volume(part, source_indices[d]) for d, part in target_indices.items()]
        )
    )
