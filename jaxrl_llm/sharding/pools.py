"""Pools of devices: a mesh for each, and arrays that move from one to another.

A pool takes equally many devices of every host. An array that moves is first laid out in its own
pool as the other wants it, then copied device to device within each host; `jax.device_put` alone
would pass it through the host's memory.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config import ConfigError, MeshConfig, PlacementConfig, PoolConfig
from jaxrl_llm.sharding import mesh as mesh_lib

_COPIES = "copies"  # mesh axis over devices that hold the same


def meshes(
    placement: PlacementConfig,
    config: MeshConfig,
    used: Collection[str],
    devices: Sequence[Any],
) -> dict[str, Mesh]:
    """Returns the mesh of each role that the run has; roles of one pool share theirs.

    `config` has the sizes of the axes where a pool names none.

    Raises:
      ConfigError: If the devices cannot be divided so.
    """
    pools, homes = placement.divided(used)
    hosts: dict[int, list[Any]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(device)
    shares = sizes(placement, pools, len(devices), len(hosts))
    found, start = {}, 0
    for name, pool in pools.items():
        share = shares[name] // len(hosts)
        own = [device for of_host in hosts.values() for device in of_host[start : start + share]]
        start += share
        axes = {axis: getattr(pool, axis) or getattr(config, axis) for axis in mesh_lib.AXES}
        try:
            found[name] = mesh_lib.make_mesh(dataclasses.replace(config, **axes), own)
        except ConfigError as error:
            raise ConfigError(
                [f"config.placement: pool {name!r}: {problem}" for problem in error.problems]
            ) from error
    return {role: found[pool] for role, pool in homes.items()}


def sizes(
    placement: PlacementConfig, pools: Mapping[str, PoolConfig], num_devices: int, num_hosts: int
) -> dict[str, int]:
    """Returns the number of devices of each pool; raises ConfigError as `meshes` does."""
    found = {name: pool.devices for name, pool in pools.items()}
    fixed = sum(size for size in found.values() if size != -1)
    wild = [name for name, size in found.items() if size == -1]
    rest, left = divmod(num_devices - fixed, max(len(wild), 1))
    if rest < bool(wild) or left or (not wild and rest):
        raise ConfigError(
            [
                f"config.placement: {placement.choice!r} does not share the {num_devices} devices"
                f" out to {len(pools)} pools ({', '.join(pools)}); choose"
                " placement.choice='by_hand' and devices for each pool that add up"
            ]
        )
    found.update({name: rest for name in wild})
    if uneven := [name for name, size in found.items() if size % num_hosts]:
        raise ConfigError(
            [
                f"config.placement.pools.{name}: {found[name]} devices cannot be as many of each of"
                f" {num_hosts} hosts; use a multiple of {num_hosts}"
                for name in uneven
            ]
        )
    return found


def staging(source: Mesh, target: Mesh) -> Mesh:
    """Returns a mesh over the source's devices whose layouts can be copied to the target.

    It has the target's axes; if the source has n times as many devices, each part is held n times.
    If the numbers do not divide, it is the source: arrays must then be whole on each device.
    """
    if source == target:
        return source
    times, left = divmod(source.size, target.size)
    if left or not times:
        return source
    if times == 1:
        return Mesh(
            source.devices.reshape(target.devices.shape),
            target.axis_names,
            axis_types=target.axis_types,
        )
    return Mesh(
        source.devices.reshape(*target.devices.shape, times),
        (*target.axis_names, _COPIES),
        axis_types=(*target.axis_types, target.axis_types[0]),
    )


def fits(source: Mesh, target: Mesh) -> bool:
    """Returns whether `staging` can hold every layout of the target."""
    return source.size % target.size == 0


def move(tree: Any, shardings: Any) -> Any:
    """Returns arrays in another pool's layout; `shardings` is a tree, or one for all.

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
    if fits(here, there):
        staged = NamedSharding(staging(here, there), target.spec)
    else:
        staged = NamedSharding(here, PartitionSpec())
    laid_out = _laid_out(staged)(array)
    return _copied(laid_out, target)


@functools.lru_cache(maxsize=256)
def _laid_out(sharding: NamedSharding):
    return jax.jit(lambda array: array, out_shardings=sharding)


def _copied(array: jax.Array, target: NamedSharding) -> jax.Array:
    """Copies each part from a device of the same host that holds it or the whole array."""
    held = {_bounds(shard.index, array.shape): shard.data for shard in array.addressable_shards}
    whole = _bounds((), array.shape)
    pieces = []
    for device, index in target.addressable_devices_indices_map(array.shape).items():
        index = index or ()
        part = held.get(_bounds(index, array.shape))
        if part is None:
            part = held[whole][index]
        pieces.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(array.shape, target, pieces)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Returns (start, stop) of every dim, whole where the index says nothing."""
    slices = [*index, *[slice(None)] * (len(shape) - len(index))]
    return tuple(s.indices(size)[:2] for s, size in zip(slices, shape, strict=True))


def devices(meshes: Collection[Mesh]) -> list[Any]:
    """Returns the devices that the meshes have together, each once, in their order."""
    return list(dict.fromkeys(device for mesh in meshes for device in mesh.devices.flat))
