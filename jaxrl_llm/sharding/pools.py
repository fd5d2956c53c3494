"""Where arrays are: in a pool of devices, which has a mesh, or in host memory between uses.

A pool takes equally many devices of every host, or whole hosts (`placement.hosts`). An array that
moves to another pool is first split in its own as in the other, then copied from device to device
within each host, where `jax.device_put` alone would pass it through the host's memory; to other
hosts it goes by collectives (`crossing.py`).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config import ConfigError, MeshConfig, PlacementConfig
from jaxrl_llm.sharding import crossing, telling
from jaxrl_llm.sharding import mesh as mesh_lib

_COPIES = "copies"  # mesh axis over devices that hold the same
_HOST = "pinned_host"


def meshes(
    placement: PlacementConfig, config: MeshConfig, used: Collection[str], devices: Sequence[Any]
) -> dict[str, Mesh]:
    """Returns the mesh of each role; where a pool names no size of an axis, `config` has it."""
    hosts: dict[int, list[Any]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(device)
    pools, homes = sizes(placement, config, used, len(devices), len(hosts))
    found, start = {}, 0
    for name, axes in pools.items():
        if placement.hosts == "own":
            share, every = math.prod(axes.values()), [list(itertools.chain(*hosts.values()))]
        else:
            share, every = math.prod(axes.values()) // len(hosts), list(hosts.values())
        own = [device for devices in every for device in devices[start : start + share]]
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
    """Returns the mesh axes of each pool and the pool of each role, or raises ConfigError."""
    pools, homes = placement.divided(used)
    counts = [pool.devices for pool in pools.values()]
    wild = counts.count(-1)
    rest, left = divmod(num_devices - sum(counts) - wild, max(wild, 1))
    if rest < bool(wild) or left or (not wild and rest):
        raise ConfigError(
            f"config.placement: {placement.choice!r} does not share the {num_devices} devices"
            f" out to {len(pools)} pools ({', '.join(pools)}); choose"
            " placement.choice='by_hand' and devices for each pool that add up"
        )
    found, problems = {}, []
    for name, pool in pools.items():
        count = rest if pool.devices == -1 else pool.devices
        axes = {axis: getattr(pool, axis) or getattr(config, axis) for axis in mesh_lib.AXES}
        if placement.hosts == "shared" and count % num_hosts:
            problems.append(
                f"config.placement.pools.{name}: {count} devices cannot be as many of each of"
                f" {num_hosts} hosts; use a multiple of {num_hosts}"
            )
        if placement.hosts == "own" and num_hosts > 1 and count % (num_devices // num_hosts):
            problems.append(
                f"config.placement.pools.{name}: {count} devices are not whole hosts of"
                f" {num_devices // num_hosts}; use a multiple of that, or placement.hosts='shared'"
            )
        try:
            found[name] = mesh_lib.mesh_sizes(dataclasses.replace(config, **axes), count)
        except ConfigError as error:
            problems += [f"config.placement: pool {name!r}: {each}" for each in error.problems]
    if placement.hosts == "own" and homes["policy"] != next(iter(pools)):
        problems.append(
            f"config.placement.pools: {next(iter(pools))!r} is first, but process 0 must have the"
            f" policy, whose numbers it writes; name the pool {homes['policy']!r} first"
        )
    of_critic = homes["critic"]
    alone = math.prod(found.get(of_critic, {}).values()) <= num_devices // num_hosts
    apart = num_hosts > 1 and "critic" in used and of_critic != homes["policy"]
    if placement.hosts == "own" and apart and alone:
        problems.append(
            f"config.placement.pools.{of_critic}: a critic on one host that the policy is not on"
            " cannot be saved; give it the policy's pool, or more hosts"
        )
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
    return jax.tree.map(_moved, tree, jax.tree.broadcast(shardings, tree))


def whole(tree: Any, mesh: Mesh) -> Any:
    """Returns arrays whole on each device of a pool, as `move` does.

    With one process this is said of all of them, so that programs can be compiled ahead.
    """
    here = mesh_lib.replicated(mesh)
    moved = move(tree, here)
    return jax.device_put(moved, here) if jax.process_count() == 1 else moved


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
    staged = _split(NamedSharding(staging(here, there), spec))(array)
    if telling.holders(source) != telling.holders(target):
        return crossing.crossed(staged, target)
    return _copied(staged, target)


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


def given(tree: Any, mesh: Mesh) -> Any:
    """Returns a tree whose arrays a program of this mesh takes on every process.

    A process that has no device of the mesh cannot give arrays of its own devices, as others do.
    """
    if len({device.process_index for device in mesh.devices.flat}) == jax.process_count():
        return tree

    def put(array: Any) -> Any:
        if not isinstance(array, jax.Array) or array.committed:
            return array
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put(jax.random.key_data(array)))
        return mesh_lib.everywhere(array, mesh)

    return jax.tree.map(put, tree)


def devices(meshes: Collection[Mesh]) -> list[Any]:
    """Returns the devices of all meshes, each once, in their order."""
    return list(dict.fromkeys(device for mesh in meshes for device in mesh.devices.flat))


def host_problem(mesh: Mesh) -> str:
    """Returns why arrays of this mesh cannot rest in host memory; "" if they can."""
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if _HOST in kinds:
        return ""
    return f"{device.platform} devices have no {_HOST} memory here (they have {', '.join(kinds)})"


def resting(tree: Any) -> Any:
    """Returns the arrays in the memory of each device's host; scalars stay where they are."""
    host = lambda a: jax.device_put(a, a.sharding.with_memory_kind(_HOST))  # noqa: E731
    return jax.tree.map(lambda a: host(a) if a.ndim else a, tree)


def working(tree: Any) -> Any:
    """Returns the arrays in device memory; those that are there already are not copied."""
    return jax.tree.map(lambda a: jax.device_put(a, in_use(a.sharding)), tree)


def in_use(sharding: Any) -> Any:
    """Returns the sharding that an array has in device memory."""
    if sharding.memory_kind != _HOST:
        return sharding
    device = next(iter(sharding.device_set))
    return sharding.with_memory_kind(device.default_memory().kind)
