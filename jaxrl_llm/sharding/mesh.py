"""The device mesh, and the rules that map logical dim names to its axes.

Sharding is data: parameters and activations name their dims, the tables below say which
mesh axes each name is split over. An axis that does not divide a dim is left out of it.
All meshes over the same devices use the same flat device order.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config import ConfigError, MeshConfig

AXES = ("data", "fsdp", "sequence", "tensor")

Rules = Mapping[str, tuple[str, ...]]

# A rollout rule is a prefix of the training rule of the same name: resharding is then an
# all-gather over the axes left out, and the bytes moved are the least possible.
TRAIN: Rules = {
    "vocab": ("tensor", "fsdp"),
    "heads": ("tensor", "fsdp"),
    "kv_heads": ("tensor", "fsdp"),
    "mlp": ("tensor", "fsdp"),
}
ROLLOUT: Rules = {name: ("tensor",) for name in TRAIN}

# Rollout weights by `config.mesh.rollout`.
LAYOUTS: Mapping[str, Rules] = {"tensor": ROLLOUT, "train": TRAIN, "replicas": {}}

ACTIVATIONS: Rules = {
    "batch": ("data", "fsdp"),
    "length": ("sequence",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}


def make_mesh(config: MeshConfig, devices: list[Any] | None = None) -> Mesh:
    """Returns the mesh over `devices` (all of them if None), axes `AXES`.

    Raises:
      ConfigError: If the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {axis: getattr(config, axis) for axis in AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    rest, left = divmod(len(devices), fixed)
    wild = [axis for axis, size in sizes.items() if size == -1]
    if left or (not wild and rest != 1):
        raise ConfigError(
            [
                f"config.mesh: {' x '.join(f'{a} {s}' for a, s in sizes.items())} does not fill the"
                f" {len(devices)} devices; set one axis to -1 for the rest"
            ]
        )
    sizes.update({axis: rest for axis in wild})
    grid = np.array(devices).reshape([sizes[axis] for axis in AXES])
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def partition_spec(
    shape: tuple[int, ...],
    names: tuple[str | None, ...],
    rules: Rules,
    axis_sizes: Mapping[str, int],
    units: Mapping[str, int],
) -> PartitionSpec:
    """Returns how an array of `shape` is split.

    Args:
      shape: Dims of the array.
      names: Logical name of each dim, or None.
      rules: Mesh axes of each name, major first.
      axis_sizes: Sizes of the mesh axes.
      units: Name -> what must stay whole, e.g. a head's size in a dim of several heads;
        only the "tensor" axis respects it, as only it splits the computation there.
    """
    spec = []
    for dim, name in zip(shape, names, strict=True):
        axes: list[str] = []
        for axis in rules.get(name or "", ()):
            parts = math.prod(axis_sizes[a] for a in axes) * axis_sizes[axis]
            unit = units.get(name or "", 1) if axis == "tensor" else 1
            if axis_sizes[axis] > 1 and dim % (parts * unit) == 0:
                axes.append(axis)
        spec.append(tuple(axes) if len(axes) > 1 else axes[0] if axes else None)
    return PartitionSpec(*spec)


def shardings(abstract, logical_axes, mesh: Mesh, rules: Rules, units: Mapping[str, int]):
    """Returns a tree of `NamedSharding` for a tree of shapes and a tree of logical names."""
    sizes = dict(mesh.shape)
    return jax.tree.map(
        lambda a, names: NamedSharding(mesh, partition_spec(a.shape, names, rules, sizes, units)),
        abstract,
        logical_axes,
    )


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Returns `x`, told to be split as `ACTIVATIONS` says on the mesh of `jax.set_mesh`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or all(size == 1 for size in mesh.shape.values()):
        return x
    spec = partition_spec(x.shape, names, ACTIVATIONS, dict(mesh.shape), {})
    return jax.lax.with_sharding_constraint(x, spec)


def constrain_as_weight(x: jax.Array, *names: str | None) -> jax.Array:
    """Returns `x`, told to be split as `TRAIN` says on the mesh of `jax.set_mesh`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or all(size == 1 for size in mesh.shape.values()):
        return x
    spec = partition_spec(x.shape, names, TRAIN, dict(mesh.shape), {})
    return jax.lax.with_sharding_constraint(x, spec)


def sharding_of(shape: tuple[int, ...], names: tuple[str | None, ...], mesh: Mesh) -> NamedSharding:
    """Returns how an activation of this shape with these dim names is split."""
    return NamedSharding(mesh, partition_spec(shape, names, ACTIVATIONS, dict(mesh.shape), {}))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that keeps a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())
