"""Pools of devices: a mesh for each, and arrays that move from one to another.

A pool takes equally many devices of every host. An array that moves is first split in its own pool
as in the other, then copied from device to device within each host; `jax.device_put` alone would
pass it through the host's memory.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config import ConfigError, MeshConfig, PlacementConfig
from jaxrl_llm.sharding import mesh as mesh_lib

_COPIES = "copies"  # mesh axis over devices that hold the same


def meshes(
    placement: PlacementConfig, config: MeshConfig, used: Collection[str], devices: Sequence[Any]
) -> dict[str, Mesh]:
    """Returns the mesh of each role that the run has; roles of one pool share theirs.

    `config` has the sizes of the axes where a pool names none.

    Raises:
      ConfigError: If the devices cannot be divided so.
    """
    hosts: dict[int, list[Any]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(device)
    pools, homes = sizes(placement, config, used, len(devices), len(hosts))
    found, start = {}, 0
    for name, axes in pools.items():
        share = math.prod(axes.values()) // len(hosts)
        own = [device for of_host in hosts.values() for device in of_host[start : start + share]]
        start += share
        found[name] = mesh_lib.make_mesh(dataclasses.replace(config, **axes), own)
    return {role: found[pool] for role, pool in homes.items()}


def sizes(
    placement: PlacementConfig,
    config: MeshConfig,
    used: Collection[str],
    num_devices: int,
    num_hosts: int,
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Returns the mesh axes of each pool and the pool of each role; raises as `meshes`."""
    pools, homes = placement.divided(used)
    counts = {name: pool.devices for name, pool in pools.items()}
    wild = [name for name, count in counts.items() if count == -1]
    fixed = sum(counts.values()) + len(wild)
    rest, left = divmod(num_devices - fixed, max(len(wild), 1))
    if rest < bool(wild) or left or (not wild and rest):
        raise ConfigError(
            [
                f"config.placement: {placement.choice!r} does not share the {num_devices} devices"
                f" out to {len(pools)} pools ({', '.join(pools)}); choose"
                " placement.choice='by_hand' and devices for each pool that add up"
            ]
        )
    found, problems = {}, []
    for name, pool in pools.items():
        count = rest if name in wild else counts[name]
        axes = {axis: getattr(pool, axis) or getattr(config, axis) for axis in mesh_lib.AXES}
        if count % num_hosts:
            problems.append(
                f"config.placement.pools.{name}: {count} devices cannot be as many of each of"
                f" {num_hosts} hosts; use a multiple of {num_hosts}"
            )
        try:
            found[name] = mesh_lib.mesh_sizes(dataclasses.replace(config, **axes), count)
        except ConfigError as error:
            problems += [f"config.placement: pool {name!r}: {each}" for each in error.problems]
    if problems:
        raise ConfigError(problems)
    return found, homes


def staging(source: Mesh, target: Mesh) -> Mesh:
    """Returns a mesh over the source's devices whose parts can be copied to the target.

    It has the target's axes; if the source has n times as many devices, each part is held n times.
    If the numbers do not divide, it is the source: arrays must then be whole on each device.
    """
    if not fits(source, target):
        return source
    shape, names, types = target.devices.shape, target.axis_names, target.axis_types
    if source.size > target.size:
        shape, names, types = (*shape, -1), (*names, _COPIES), (*types, types[0])
    return Mesh(source.devices.reshape(shape), names, axis_types=types)


def fits(source: Mesh, target: Mesh) -> bool:
    """Returns whether `staging` can hold every sharding of the target."""
    return source.size % target.size == 0


def move(tree: Any, shardings: Any) -> Any:
    """Returns arrays on another pool; `shardings` is a tree, or one for all.

    Arrays that are there already, or not committed to any mesh, are returned as they are. To be
    called outside of `jax.set_mesh`, as two meshes take part.
    """
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(_moved, tree, shardings)


def _moved(array: Any, target: NamedSharding) -> Any:
    if not isinstance(array, jax.Array) or not array.committed:
        return array
    source = array.sharding
    if source.device_set == target.device_set:
        return array
    if not isinstance(source, NamedSharding):
        raise TypeError(f"an array that crosses pools must have a mesh, got {source}")
    here, there = source.mesh, target.mesh
    assert isinstance(here, Mesh) and isinstance(there, Mesh), "arrays have devices"
    spec = target.spec if fits(here, there) else PartitionSpec()
    return _copied(_split(NamedSharding(staging(here, there), spec))(array), target)


@functools.lru_cache(maxsize=256)
def _split(sharding: NamedSharding):
    return jax.jit(lambda array: array, out_shardings=sharding)


def _copied(array: jax.Array, target: NamedSharding) -> jax.Array:
    """Copies each part from a device of the same host that holds it or the whole array."""

    def bounds(index: Any) -> tuple:
        return tuple(part.indices(size) for part, size in zip(index, array.shape, strict=True))

    held = {bounds(shard.index): shard.data for shard in array.addressable_shards}
    pieces = []
    for device, index in target.addressable_devices_indices_map(array.shape).items():
        part = held.get(bounds(index))
        if part is None:
            part = held[bounds([slice(None)] * array.ndim)][index or ()]
        pieces.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(array.shape, target, pieces)


def devices(meshes: Collection[Mesh]) -> list[Any]:
    """Returns the devices of all meshes, each once, in their order."""
    return list(dict.fromkeys(device for mesh in meshes for device in mesh.devices.flat))
