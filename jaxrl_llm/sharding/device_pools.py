"""Device pools: a mesh per role, moving arrays between pools, and offload to host memory.

A pool has equally many devices of every host, or whole hosts (`placement.hosts`). An array that
moves to another pool is first resharded within its own to match the target, then copied from
device to device within each host, where `jax.device_put` alone would go through host memory.
Between hosts it goes by collectives (`cross_host_transfer.py`).
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
from jaxrl_llm.sharding import cross_host_transfer, kv_store_broadcast
from jaxrl_llm.sharding import mesh as mesh_lib

_COPIES = "copies"  # mesh axis over devices with the same shard
_HOST = "pinned_host"


def role_meshes(
    placement: PlacementConfig, config: MeshConfig, used: Collection[str], devices: Sequence[Any]
) -> dict[str, Mesh]:
    """The mesh of each role; axis sizes that a pool leaves open come from `config`."""
    hosts: dict[int, list[Any]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(device)
    pools, role_pools = pool_sizes(placement, config, used, len(devices), len(hosts))
    pool_meshes, start = {}, 0
    for name, axes in pools.items():
        if placement.hosts == "own":
            pool_share, device_groups = (
                math.prod(axes.values()),
                [list(itertools.chain(*hosts.values()))],
            )
        else:
            pool_share, device_groups = math.prod(axes.values()) // len(hosts), list(hosts.values())
        pool_devices = [
            device for devices in device_groups for device in devices[start : start + pool_share]
        ]
        start += pool_share
        pool_meshes[name] = mesh_lib.make_mesh(dataclasses.replace(config, **axes), pool_devices)
    return {role: pool_meshes[pool] for role, pool in role_pools.items()}


def pool_sizes(
    placement: PlacementConfig,
    config: MeshConfig,
    used: Collection[str],
    num_devices: int,
    num_hosts: int,
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The mesh axes of each pool and the pool of each role; raises ConfigError."""
    pools, role_pools = placement.pools_and_roles(used)
    counts = [pool.devices for pool in pools.values()]
    num_open = counts.count(-1)
    open_count, remainder = divmod(num_devices - sum(counts) - num_open, max(num_open, 1))
    if open_count < bool(num_open) or remainder or (not num_open and open_count):
        raise ConfigError(
            f"config.placement: {placement.choice!r} does not share the {num_devices} devices"
            f" out to {len(pools)} pools ({', '.join(pools)}); choose"
            " placement.choice='by_hand' and devices for each pool that add up"
        )
    pool_axes, problems = {}, []
    for name, pool in pools.items():
        count = open_count if pool.devices == -1 else pool.devices
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
            pool_axes[name] = mesh_lib.mesh_sizes(dataclasses.replace(config, **axes), count)
        except ConfigError as error:
            problems += [f"config.placement: pool {name!r}: {each}" for each in error.problems]
    if placement.hosts == "own" and role_pools["policy"] != next(iter(pools)):
        problems.append(
            f"config.placement.pools: {next(iter(pools))!r} is first, but process 0 must have the"
            f" policy, whose numbers it writes; name the pool {role_pools['policy']!r} first"
        )
    critic_pool = role_pools["critic"]
    on_one_host = math.prod(pool_axes.get(critic_pool, {}).values()) <= num_devices // num_hosts
    is_separate = num_hosts > 1 and "critic" in used and critic_pool != role_pools["policy"]
    if placement.hosts == "own" and is_separate and on_one_host:
        problems.append(
            f"config.placement.pools.{critic_pool}: a critic on one host that the policy is not on"
            " cannot be saved; give it the policy's pool, or more hosts"
        )
    if problems:
        raise ConfigError(problems)
    return pool_axes, role_pools


def staging_mesh(source: Mesh, target: Mesh) -> Mesh:
    """A mesh over the source's devices whose shards can be copied to the target one to one.

    It has the target's axes; if the source has n times as many devices, each shard has n copies. If
    the numbers do not divide, it is the source itself: arrays must then be replicated.
    """
    if not supports_staging(source, target):
        return source
    shape, names, types = target.devices.shape, target.axis_names, target.axis_types
    if source.size > target.size:
        shape, names, types = (*shape, -1), (*names, _COPIES), (*types, types[0])
    return Mesh(source.devices.reshape(shape), names, axis_types=types)


def supports_staging(source: Mesh, target: Mesh) -> bool:
    """Whether `staging_mesh` supports every sharding of the target."""
    return source.size % target.size == 0


def move_to_pool(tree: Any, shardings: Any) -> Any:
    """Moves arrays to another pool; `shardings` is a tree, or one for all.

    Arrays already there, or not committed to any mesh, are returned unchanged. Call it outside of
    `jax.set_mesh`, as two meshes take part.
    """
    return jax.tree.map(_transfer, tree, jax.tree.broadcast(shardings, tree))


def replicate_on_pool(tree: Any, mesh: Mesh) -> Any:
    """Replicates arrays over the devices of a pool, as `move_to_pool` does.

    With one process, uncommitted arrays too get this sharding, so that programs can be compiled
    ahead of time.
    """
    sharding = mesh_lib.replicated(mesh)
    moved = move_to_pool(tree, sharding)
    return jax.device_put(moved, sharding) if jax.process_count() == 1 else moved


def _transfer(array: Any, target: NamedSharding) -> Any:
    if not isinstance(array, jax.Array) or not array.committed:
        return array
    source = array.sharding
    if source.device_set == target.device_set:
        return array
    if not isinstance(source, NamedSharding):
        raise TypeError(f"an array that crosses pools must have a mesh, got {source}")
    source_mesh, target_mesh = source.mesh, target.mesh
    assert isinstance(source_mesh, Mesh) and isinstance(target_mesh, Mesh), "arrays have devices"
    spec = target.spec if supports_staging(source_mesh, target_mesh) else PartitionSpec()
    staged = _reshard_program(NamedSharding(staging_mesh(source_mesh, target_mesh), spec))(array)
    if kv_store_broadcast.hosts_of(source) != kv_store_broadcast.hosts_of(target):
        return cross_host_transfer.cross_host_device_put(staged, target)
    return _copy_within_hosts(staged, target)


@functools.lru_cache(maxsize=256)
def _reshard_program(sharding: NamedSharding):
    return jax.jit(lambda array: array, out_shardings=sharding)


def _copy_within_hosts(array: jax.Array, target: NamedSharding) -> jax.Array:
    """Copies each shard from a device of the same host that holds it or the whole array."""

    def bounds(index: Any) -> tuple:
        return tuple(part.indices(size) for part, size in zip(index, array.shape, strict=True))

    local_shards = {bounds(shard.index): shard.data for shard in array.addressable_shards}
    shards = []
    for device, index in target.addressable_devices_indices_map(array.shape).items():
        part = local_shards.get(bounds(index))
        if part is None:
            part = local_shards[bounds([slice(None)] * array.ndim)][index or ()]
        shards.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(array.shape, target, shards)


def localize_inputs(tree: Any, mesh: Mesh) -> Any:
    """Makes uncommitted arrays of a tree valid inputs, on every process, of programs on this mesh.

    JAX does so implicitly only on processes that have devices of the mesh.
    """
    if len({device.process_index for device in mesh.devices.flat}) == jax.process_count():
        return tree

    def replicate(array: Any) -> Any:
        if not isinstance(array, jax.Array) or array.committed:
            return array
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(replicate(jax.random.key_data(array)))
        return mesh_lib.replicate_host_value(array, mesh)

    return jax.tree.map(replicate, tree)


def all_devices(meshes: Collection[Mesh]) -> list[Any]:
    """The devices of all meshes, each once, in order."""
    return list(dict.fromkeys(device for mesh in meshes for device in mesh.devices.flat))


def host_offload_problem(mesh: Mesh) -> str:
    """Why arrays of this mesh cannot be offloaded to host memory; "" if they can."""
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if _HOST in kinds:
        return ""
    return f"{device.platform} devices have no {_HOST} memory here (they have {', '.join(kinds)})"


def to_host_memory(tree: Any) -> Any:
    """Offloads arrays to pinned host memory; scalars stay on the device."""
    to_host = lambda a: jax.device_put(a, a.sharding.with_memory_kind(_HOST))  # noqa: E731
    return jax.tree.map(lambda a: to_host(a) if a.ndim else a, tree)


def to_device_memory(tree: Any) -> Any:
    """Loads arrays back to device memory; those already there are not copied."""
    return jax.tree.map(lambda a: jax.device_put(a, device_sharding(a.sharding)), tree)


def device_sharding(sharding: Any) -> Any:
    """The same sharding in device memory."""
    if sharding.memory_kind != _HOST:
        return sharding
    device = next(iter(sharding.device_set))
    return sharding.with_memory_kind(device.default_memory().kind)
