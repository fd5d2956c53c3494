"""The device mesh, and the logical axis rules that map dim names to its axes.

Parameters and activations name their dims; the tables below say over which mesh axes each name is
sharded. An axis is skipped if it does not divide the dim, or if the mesh does not have it.

Axes: `data` (replicas of the weights), `fsdp` (rows, and weights sharded to save memory),
`sequence` (context parallelism; weights are sharded as by fsdp), `tensor` (heads, MLP, vocabulary),
`expert` (experts; elsewhere as fsdp), `stage` (pipeline parallelism; first, so that stages are
connected by the slowest links).
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config import ConfigError, MeshConfig

STAGE = "stage"
AXES = (STAGE, "data", "fsdp", "expert", "sequence", "tensor")

_used_devices: contextvars.ContextVar[tuple[Any, ...]]
_used_devices = contextvars.ContextVar("used_devices", default=())

Rules = Mapping[str, tuple[str, ...]]

# A rollout rule is a prefix of the training rule of the same name: resharding is then an
# all-gather over the remaining axes, which moves the fewest bytes.
_TENSOR_PARALLEL_DIMS = (
    "vocab",
    "heads",
    "kv_heads",
    "key_value_heads",
    "value_heads",
    "mlp",
    "tower_heads",
    "gated_heads",
    "delta_keys",
    "delta_values",
)
_FSDP_AXES = ("fsdp", "sequence", "expert", STAGE)
TRAIN: Rules = {
    "staged": (STAGE,),  # stacked layers of all stages
    "experts": (
        "expert",
    ),  # first: an axis shards one dim of an array, the first whose rule has it
    **{name: ("tensor", *_FSDP_AXES) for name in _TENSOR_PARALLEL_DIMS},
    "whole": ("tensor", *_FSDP_AXES),  # of matrices whose other dim is too narrow to shard
}
ROLLOUT: Rules = {
    "staged": (),
    "experts": ("expert",),
    "whole": (),
    **dict.fromkeys(_TENSOR_PARALLEL_DIMS, ("tensor",)),
}

# Rules for rollout weights by `config.mesh.rollout`.
ROLLOUT_WEIGHTS: Mapping[str, Rules] = {
    "tensor": ROLLOUT,
    "train": TRAIN,
    "all_tensor": {
        **ROLLOUT,
        **dict.fromkeys(_TENSOR_PARALLEL_DIMS, ("tensor", "fsdp", "sequence")),
    },
    "replicas": {},
}
# Axes over which computation is sharded by heads: a device must hold whole heads.
COMPUTE_AXES: Mapping[str, tuple[str, ...]] = {
    "tensor": ("tensor",),
    "train": ("tensor",),
    "all_tensor": ("tensor", "fsdp", "sequence"),
    "replicas": (),
}
# Rules for activations in training and scoring.
ACTIVATIONS: Rules = {
    "batch": ("data", "fsdp", "expert"),
    "length": ("sequence",),
    **ROLLOUT,
}
# Rules for activations in sampling: one token at a time, so there is no length to shard.
ROLLOUT_ACTIVATIONS: Mapping[str, Rules] = {
    layout: {
        "batch": tuple(axis for axis in AXES if axis not in computing),
        "experts": () if layout == "replicas" else ("expert",),
        **dict.fromkeys(_TENSOR_PARALLEL_DIMS, computing),
    }
    for layout, computing in COMPUTE_AXES.items()
}

_rules: contextvars.ContextVar[Rules] = contextvars.ContextVar("rules", default=ACTIVATIONS)
_in_stages: contextvars.ContextVar[bool] = contextvars.ContextVar("in_stages", default=False)


def mesh_sizes(config: MeshConfig, num_devices: int) -> dict[str, int]:
    """The size of every mesh axis; raises ConfigError if they do not fill the devices."""
    sizes = {axis: getattr(config, axis) for axis in AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    resolved = {a: num_devices // fixed if size == -1 else size for a, size in sizes.items()}
    if math.prod(resolved.values()) != num_devices:
        shape = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ConfigError(
            f"config.mesh: {shape} does not fill the {num_devices} devices; set one axis to -1 for"
            " the rest"
        )
    return resolved


def run_devices() -> list[Any]:
    """The devices of a run: those of `use_devices`, or else all devices of all processes."""
    return list(_used_devices.get() or jax.devices())


@contextlib.contextmanager
def use_devices(devices: Sequence[Any]) -> Iterator[None]:
    """Gives runs that are planned and started inside these devices instead of all."""
    token = _used_devices.set(tuple(devices))
    try:
        yield
    finally:
        _used_devices.reset(token)


def make_mesh(config: MeshConfig, devices: list[Any] | None = None) -> Mesh:
    """The mesh over `devices` (None: `run_devices`), in their order; raises as `mesh_sizes`."""
    devices = run_devices() if devices is None else devices
    sizes = mesh_sizes(config, len(devices))
    grid = np.array(devices).reshape([sizes[axis] for axis in AXES])
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def partition_spec(
    shape: tuple[int, ...],
    names: tuple[str | None, ...],
    rules: Rules,
    axis_sizes: Mapping[str, int],
    units: Mapping[str, int],
    compute_axes: tuple[str, ...] = ("tensor",),
) -> PartitionSpec:
    """The sharding of an array whose dims have these logical names (None: not sharded).

    `rules` map names to mesh axes, major first. `units` are sizes that must stay whole, e.g. the
    head size in a dim of several heads; only axes in `compute_axes` respect them. An axis shards
    only the first dim whose rule has it.
    """
    spec = []
    used_axes: set[str] = set()
    for dim, name in zip(shape, names, strict=True):
        axes: list[str] = []
        for axis in rules.get(name or "", ()):
            size = 1 if axis in used_axes else axis_sizes.get(axis, 1)
            num_shards = size * math.prod(axis_sizes[a] for a in axes)
            unit = units.get(name or "", 1) if axis in compute_axes else 1
            if size == 1 or dim % num_shards:
                continue
            if dim % (num_shards * unit) == 0:
                axes.append(axis)
            elif axis != "tensor":
                # Training shards within units here; with later axes, the rollout spec would no
                # longer be a prefix of the training spec.
                break
        used_axes.update(axes)
        spec.append(tuple(axes) if len(axes) > 1 else axes[0] if axes else None)
    return PartitionSpec(*spec)


def shardings(
    abstract,
    logical_axes,
    mesh: Mesh | AbstractMesh,
    rules: Rules,
    units: Mapping[str, int],
    compute_axes: tuple[str, ...] = ("tensor",),
):
    """A tree of `NamedSharding` for a tree of shapes and a tree of logical names."""

    def array_sharding(a, names):
        spec = partition_spec(a.shape, names, rules, mesh.shape, units, compute_axes)
        return NamedSharding(mesh, spec)

    return jax.tree.map(array_sharding, abstract, logical_axes)


@contextlib.contextmanager
def axis_rules(rules: Rules) -> Iterator[None]:
    """Context manager or decorator: traces with these rules for activations."""
    token = _rules.set(rules)
    try:
        yield
    finally:
        _rules.reset(token)


@contextlib.contextmanager
def in_stages() -> Iterator[None]:
    """Context for tracing the work of one pipeline stage: no array is sharded over stages.

    Gradients must be traced in it too.
    """
    token = _in_stages.set(True)
    try:
        yield
    finally:
        _in_stages.reset(token)


def is_in_stages() -> bool:
    """Whether this is traced under `in_stages`."""
    return _in_stages.get()


def vmap_over_stages(function: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
    """`jax.vmap` over a leading dim of stages: each stage applies `function` to its own entry.

    The function is traced under `in_stages`.
    """
    mapped = jax.vmap(function, in_axes=in_axes, spmd_axis_name=STAGE)
    return in_stages()(mapped)


def axis_sizes() -> dict[str, int]:
    """Sizes of the axes of the current mesh that arrays can be sharded over."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    return {axis: size for axis, size in sizes.items() if axis != STAGE or not _in_stages.get()}


def activation_spec(shape: tuple[int, ...], names: tuple[str | None, ...]) -> PartitionSpec:
    """Sharding of an activation by the current rules on the current mesh."""
    return partition_spec(shape, names, _rules.get(), axis_sizes(), {})


def constrain(x: jax.Array, *names: str | None, rules: Rules | None = None) -> jax.Array:
    """`x` with a sharding constraint from `rules`, or from the current ones as `activation_spec`.

    Inside a `shard_map` it is unchanged.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Manual in mesh.axis_types or mesh.size == 1:
        return x
    spec = partition_spec(x.shape, names, rules or _rules.get(), axis_sizes(), {})
    return jax.lax.with_sharding_constraint(x, spec)


def constrain_as_weight(x: jax.Array, *names: str | None) -> jax.Array:
    """`x` with the sharding constraint of a weight in training (`TRAIN`)."""
    return constrain(x, *names, rules=TRAIN)


def weight_spec(shape: tuple[int, ...], names: tuple[str | None, ...]) -> PartitionSpec:
    """Sharding of a weight where it is used: as in training, or under other rules as they say.

    In sampling, weights are sharded by the same rules as its activations.
    """
    rules = _rules.get()
    return partition_spec(shape, names, TRAIN if rules is ACTIVATIONS else rules, axis_sizes(), {})


def activation_sharding(
    shape: tuple[int, ...], names: tuple[str | None, ...], mesh: Mesh
) -> NamedSharding:
    """Sharding on `mesh` of an activation with these dim names, by the current rules."""
    return NamedSharding(mesh, partition_spec(shape, names, _rules.get(), mesh.shape, {}))


def activation_bytes(
    shape: tuple[int, ...], names: tuple[str | None, ...], mesh: Mesh, dtype: Any
) -> int:
    """Bytes per device of an activation on `mesh`, see `activation_sharding`."""
    shard = activation_sharding(shape, names, mesh).shard_shape(shape)
    return math.prod(shard) * np.dtype(dtype).itemsize


def num_row_shards(mesh: Mesh | AbstractMesh) -> tuple[int, int]:
    """Numbers of shards of packed rows, and of the length of a row (context parallelism)."""
    rows = math.prod(mesh.shape[axis] for axis in ("data", "fsdp", "expert"))
    return rows, mesh.shape["sequence"]


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding with a full copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def replicate_host_value(value: Any, mesh: Mesh) -> jax.Array:
    """Replicates a host value, equal on all processes, over the devices of `mesh`.

    `jax.device_put` would check equality by a collective over all devices, which may be busy: see
    `hosts.allgather`.
    """
    host_array = np.asarray(value)
    sharding = replicated(mesh)
    return jax.make_array_from_callback(
        host_array.shape, sharding, lambda index: host_array[index], host_array.dtype
    )
