"""The device mesh, and the rules that map logical dim names to its axes.

Parameters and activations name their dims; the tables below say which mesh axes each name is
split over. An axis is left out if it does not divide the dim, or if the mesh does not have it.

Axes: `data` (replicas of the weights), `fsdp` (rows, and weights split for memory alone),
`sequence` (the length of rows, and weights split as by fsdp), `tensor` (heads, MLP, vocabulary),
`expert` (experts; elsewhere as fsdp), `stage` (layers that microbatches pass one after another; it
comes first, so that stages are those devices that have the slowest links).
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config import ConfigError, MeshConfig

STAGE = "stage"
AXES = (STAGE, "data", "fsdp", "expert", "sequence", "tensor")

Rules = Mapping[str, tuple[str, ...]]

# A rollout rule is a prefix of the training rule of the same name: resharding is then an
# all-gather over the axes left out, which moves the fewest bytes.
_COMPUTED = ("vocab", "heads", "kv_heads", "key_value_heads", "value_heads", "mlp", "tower_heads")
_FOR_MEMORY = ("fsdp", "sequence", "expert", STAGE)
TRAIN: Rules = {
    "staged": (STAGE,),  # layers of all stages
    "experts": ("expert",),  # first: an axis splits one dim of an array, the first that wants it
    **{name: ("tensor", *_FOR_MEMORY) for name in _COMPUTED},
    "whole": ("tensor", *_FOR_MEMORY),  # of matrices whose other dim is too narrow to split
}
ROLLOUT: Rules = {
    "staged": (),
    "experts": ("expert",),
    "whole": (),
    **dict.fromkeys(_COMPUTED, ("tensor",)),
}

# Rules of rollout weights by `config.mesh.rollout`.
ROLLOUT_WEIGHTS: Mapping[str, Rules] = {
    "tensor": ROLLOUT,
    "train": TRAIN,
    "all_tensor": {**ROLLOUT, **dict.fromkeys(_COMPUTED, ("tensor", "fsdp", "sequence"))},
    "replicas": {},
}
# Axes over which heads are computed: a device must hold whole ones.
COMPUTING: Mapping[str, tuple[str, ...]] = {
    "tensor": ("tensor",),
    "train": ("tensor",),
    "all_tensor": ("tensor", "fsdp", "sequence"),
    "replicas": (),
}
# Activations in training and scoring.
ACTIVATIONS: Rules = {
    "batch": ("data", "fsdp", "expert"),
    "length": ("sequence",),
    **ROLLOUT,
}
# Activations in sampling, which computes one token at a time: there is no length to split.
ROLLOUT_ACTIVATIONS: Mapping[str, Rules] = {
    layout: {
        "batch": tuple(axis for axis in AXES if axis not in computing),
        "experts": () if layout == "replicas" else ("expert",),
        **dict.fromkeys(_COMPUTED, computing),
    }
    for layout, computing in COMPUTING.items()
}

_rules: contextvars.ContextVar[Rules] = contextvars.ContextVar("rules", default=ACTIVATIONS)
_in_stages: contextvars.ContextVar[bool] = contextvars.ContextVar("in_stages", default=False)


def mesh_sizes(config: MeshConfig, num_devices: int) -> dict[str, int]:
    """Returns the size of every mesh axis; raises ConfigError if they do not fill the devices."""
    sizes = {axis: getattr(config, axis) for axis in AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    found = {a: num_devices // fixed if size == -1 else size for a, size in sizes.items()}
    if math.prod(found.values()) != num_devices:
        given = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ConfigError(
            f"config.mesh: {given} does not fill the {num_devices} devices; set one axis to -1 for"
            " the rest"
        )
    return found


def make_mesh(config: MeshConfig, devices: list[Any] | None = None) -> Mesh:
    """Returns the mesh over `devices` (None: all), in their order; raises as `mesh_sizes`."""
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(config, len(devices))
    grid = np.array(devices).reshape([sizes[axis] for axis in AXES])
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def partition_spec(
    shape: tuple[int, ...],
    names: tuple[str | None, ...],
    rules: Rules,
    axis_sizes: Mapping[str, int],
    units: Mapping[str, int],
    computing: tuple[str, ...] = ("tensor",),
) -> PartitionSpec:
    """Returns how an array is split whose dims have these logical names (None: not split).

    `rules` have the mesh axes of each name, major first; `units` what must stay whole, e.g. a
    head's size in a dim of several heads. Axes in `computing` respect units. An axis splits the
    first dim alone that wants it.
    """
    spec = []
    used: set[str] = set()
    for dim, name in zip(shape, names, strict=True):
        axes: list[str] = []
        for axis in rules.get(name or "", ()):
            size = 1 if axis in used else axis_sizes.get(axis, 1)
            parts = size * math.prod(axis_sizes[a] for a in axes)
            unit = units.get(name or "", 1) if axis in computing else 1
            if size == 1 or dim % parts:
                continue
            if dim % (parts * unit) == 0:
                axes.append(axis)
            elif axis != "tensor":
                # Training splits here also within units; later axes would not be its prefix.
                break
        used.update(axes)
        spec.append(tuple(axes) if len(axes) > 1 else axes[0] if axes else None)
    return PartitionSpec(*spec)


def shardings(
    abstract,
    logical_axes,
    mesh: Mesh | AbstractMesh,
    rules: Rules,
    units: Mapping[str, int],
    computing: tuple[str, ...] = ("tensor",),
):
    """Returns a tree of `NamedSharding` for a tree of shapes and a tree of logical names."""

    def split(a, names):
        spec = partition_spec(a.shape, names, rules, mesh.shape, units, computing)
        return NamedSharding(mesh, spec)

    return jax.tree.map(split, abstract, logical_axes)


@contextlib.contextmanager
def under(rules: Rules) -> Iterator[None]:
    """A function decorated so is traced with these rules for its activations."""
    token = _rules.set(rules)
    try:
        yield
    finally:
        _rules.reset(token)


@contextlib.contextmanager
def in_stages() -> Iterator[None]:
    """What is traced here is work of one stage: no array of it is split over stages.

    Gradients are to be traced here too.
    """
    token = _in_stages.set(True)
    try:
        yield
    finally:
        _in_stages.reset(token)


def is_in_stages() -> bool:
    """Returns whether this is traced under `in_stages`."""
    return _in_stages.get()


def on_stages(function: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
    """Returns what applies a function on each stage to its entry of a leading dim; as `jax.vmap`.

    The function is traced under `in_stages`.
    """
    mapped = jax.vmap(function, in_axes=in_axes, spmd_axis_name=STAGE)
    return in_stages()(mapped)


def axis_sizes() -> dict[str, int]:
    """Returns the axes of the mesh of `jax.set_mesh` that arrays can be split over here."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    return {axis: size for axis, size in sizes.items() if axis != STAGE or not _in_stages.get()}


def activation_spec(shape: tuple[int, ...], names: tuple[str | None, ...]) -> PartitionSpec:
    """Returns how an activation is split by the current rules on the mesh of `jax.set_mesh`."""
    return partition_spec(shape, names, _rules.get(), axis_sizes(), {})


def constrain(x: jax.Array, *names: str | None, rules: Rules | None = None) -> jax.Array:
    """Returns `x`, split by `rules` or, as `activation_spec`, the current ones.

    Inside a `shard_map` it is unchanged.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Manual in mesh.axis_types or mesh.size == 1:
        return x
    spec = partition_spec(x.shape, names, rules or _rules.get(), axis_sizes(), {})
    return jax.lax.with_sharding_constraint(x, spec)


def constrain_as_weight(x: jax.Array, *names: str | None) -> jax.Array:
    """Returns `x`, constrained to be split as `TRAIN` says on the mesh of `jax.set_mesh`."""
    return constrain(x, *names, rules=TRAIN)


def weight_spec(shape: tuple[int, ...], names: tuple[str | None, ...]) -> PartitionSpec:
    """Returns how a weight arrives where it is used: as in training, or as the current rules say.

    Sampling computes with weights as they are split for its activations.
    """
    rules = _rules.get()
    return partition_spec(shape, names, TRAIN if rules is ACTIVATIONS else rules, axis_sizes(), {})


def sharding_of(shape: tuple[int, ...], names: tuple[str | None, ...], mesh: Mesh) -> NamedSharding:
    """Returns how an activation of this shape with these dim names is split."""
    return NamedSharding(mesh, partition_spec(shape, names, _rules.get(), mesh.shape, {}))


def row_shards(mesh: Mesh | AbstractMesh) -> tuple[int, int]:
    """Returns the number of devices that split packed rows, and that split the length of a row."""
    rows = math.prod(mesh.shape[axis] for axis in ("data", "fsdp", "expert"))
    return rows, mesh.shape["sequence"]


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that keeps a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def everywhere(value: Any, mesh: Mesh) -> jax.Array:
    """Returns what every process has on its host, the same on all, whole on every device.

    `jax.device_put` compares it by a collective of all devices, which may be at work: see
    `hosts.share`.
    """
    held = np.asarray(value)
    here = replicated(mesh)
    return jax.make_array_from_callback(held.shape, here, lambda index: held[index], held.dtype)
