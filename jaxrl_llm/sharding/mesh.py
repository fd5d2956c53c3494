"""The device mesh, and the rules that map logical dim names to its axes.

Parameters and activations name their dims; the tables below say which mesh axes each name is
split over. An axis that does not divide a dim is left out of it, as is one that the mesh lacks.

Axes: `data` (replicas of the weights), `fsdp` (rows, and weights split for memory alone),
`sequence` (the length of rows, and weights split as by fsdp), `tensor` (heads, MLP, vocabulary).
"""

import contextvars
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config import ConfigError, MeshConfig

AXES = ("data", "fsdp", "sequence", "tensor")

Rules = Mapping[str, tuple[str, ...]]

# A rollout rule is a prefix of the training rule of the same name: resharding is then an
# all-gather over the axes left out, and the bytes moved are the least possible.
TRAIN: Rules = {
    name: ("tensor", "fsdp", "sequence") for name in ("vocab", "heads", "kv_heads", "mlp")
}
ROLLOUT: Rules = {name: ("tensor",) for name in TRAIN}

# Rollout weights by `config.mesh.rollout`.
LAYOUTS: Mapping[str, Rules] = {
    "tensor": ROLLOUT,
    "train": TRAIN,
    "all_tensor": TRAIN,
    "replicas": {},
}
# Axes that split heads in the arithmetic itself, so that a device must hold whole ones.
COMPUTING: Mapping[str, tuple[str, ...]] = {
    "tensor": ("tensor",),
    "train": ("tensor",),
    "all_tensor": ("tensor", "fsdp", "sequence"),
    "replicas": (),
}


def _activations(batch: tuple[str, ...], length: tuple[str, ...], wide: tuple[str, ...]) -> Rules:
    return {"batch": batch, "length": length, **{name: wide for name in TRAIN}}


# In training and scoring.
ACTIVATIONS = _activations(("data", "fsdp"), ("sequence",), ("tensor",))
# In sampling, by `config.mesh.rollout`: one token at a time has no length to split.
ROLLOUT_ACTIVATIONS: Mapping[str, Rules] = {
    "tensor": _activations(("data", "fsdp", "sequence"), (), ("tensor",)),
    "train": _activations(("data", "fsdp", "sequence"), (), ("tensor",)),
    "all_tensor": _activations(("data",), (), ("tensor", "fsdp", "sequence")),
    "replicas": _activations(("data", "fsdp", "sequence", "tensor"), (), ()),
}

_rules: contextvars.ContextVar[Rules] = contextvars.ContextVar("rules", default=ACTIVATIONS)


def mesh_sizes(config: MeshConfig, num_devices: int) -> dict[str, int]:
    """Returns the size of every mesh axis; raises ConfigError if they do not fill the devices."""
    sizes = {axis: getattr(config, axis) for axis in AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    found = {a: num_devices // fixed if size == -1 else size for a, size in sizes.items()}
    if math.prod(found.values()) != num_devices:
        given = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ConfigError(
            [
                f"config.mesh: {given} does not fill the {num_devices} devices;"
                " set one axis to -1 for the rest"
            ]
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
    """Returns how an array is split.

    Args:
      names: Logical name of each dim, or None.
      rules: Mesh axes of each name, major first.
      units: Name -> what must stay whole, e.g. a head's size in a dim of several heads.
      computing: Axes that respect units, as they split the computation there.
    """
    spec = []
    for dim, name in zip(shape, names, strict=True):
        axes: list[str] = []
        for axis in rules.get(name or "", ()):
            size = axis_sizes.get(axis, 1)
            parts = math.prod(axis_sizes[a] for a in axes) * size
            unit = units.get(name or "", 1) if axis in computing else 1
            if size == 1 or dim % parts:
                continue
            if dim % (parts * unit) == 0:
                axes.append(axis)
            elif axis != "tensor":
                # Training splits here, its units whole or not: what follows would be no prefix.
                break
        spec.append(tuple(axes) if len(axes) > 1 else axes[0] if axes else None)
    return PartitionSpec(*spec)


def shardings(
    abstract,
    logical_axes,
    mesh: Mesh,
    rules: Rules,
    units: Mapping[str, int],
    computing: tuple[str, ...] = ("tensor",),
):
    """Returns a tree of `NamedSharding` for a tree of shapes and a tree of logical names."""

    def split(a, names):
        spec = partition_spec(a.shape, names, rules, dict(mesh.shape), units, computing)
        return NamedSharding(mesh, spec)

    return jax.tree.map(split, abstract, logical_axes)


def under(rules: Rules, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, traced with these rules for its activations instead of `ACTIVATIONS`."""

    @functools.wraps(function)
    def ruled(*args, **kwargs):
        token = _rules.set(rules)
        try:
            return function(*args, **kwargs)
        finally:
            _rules.reset(token)

    return ruled


def activation_spec(shape: tuple[int, ...], names: tuple[str | None, ...]) -> PartitionSpec:
    """Returns how an activation is split by the current rules on the mesh of `jax.set_mesh`."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    return partition_spec(shape, names, _rules.get(), sizes, {})


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Returns `x` with the constraint of `activation_spec`; unchanged inside a `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Manual in mesh.axis_types or math.prod(mesh.axis_sizes) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, activation_spec(x.shape, names))


def constrain_as_weight(x: jax.Array, *names: str | None) -> jax.Array:
    """Returns `x`, constrained to be split as `TRAIN` says on the mesh of `jax.set_mesh`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or all(size == 1 for size in mesh.shape.values()):
        return x
    spec = partition_spec(x.shape, names, TRAIN, dict(mesh.shape), {})
    return jax.lax.with_sharding_constraint(x, spec)


def sharding_of(shape: tuple[int, ...], names: tuple[str | None, ...], mesh: Mesh) -> NamedSharding:
    """Returns how an activation of this shape with these dim names is split."""
    return NamedSharding(mesh, partition_spec(shape, names, _rules.get(), dict(mesh.shape), {}))


def row_shards(mesh: Mesh | AbstractMesh) -> tuple[int, int]:
    """Returns over how many devices packed rows are split, and their length."""
    return mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["sequence"]


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that keeps a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())
