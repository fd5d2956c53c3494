"""Cross-host transfer: arrays from devices of some processes to devices of others.

`jax.device_put` does not reach the devices of other processes on every platform. A collective does;
all processes of the run must call it, even those without devices on either side.
"""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

_PAIRS = "pairs"  # mesh axis over senders, then receivers


def cross_host_device_put(array: jax.Array, target: NamedSharding) -> jax.Array:
    """Transfers an array to `target`, a sharding over other devices.

    Each target device receives its shard from a device that holds this shard or the whole array;
    a device sends to one other at a time, and devices send in parallel.
    """
    part_holders, full_holders = _holders(array)
    rounds: list[list[tuple[Any, Any, Any]]] = []
    sends: collections.Counter[Any] = collections.Counter()
    target_indices: dict[Any, Any] = dict(target.devices_indices_map(array.shape))
    for device in sorted(target_indices, key=lambda each: each.id):
        index = target_indices[device]
        exact_holders = part_holders.get(_bounds(index, array.shape), [])
        source = min(exact_holders or full_holders, key=lambda each: (sends[each], each.id))
        if sends[source] == len(rounds):
            rounds.append([])
        rounds[sends[source]].append((source, device, () if exact_holders else index))
        sends[source] += 1
    local_shards = {shard.device: shard.data for shard in array.addressable_shards}
    received: dict[Any, jax.Array] = {}
    for pairs in rounds:
        received |= _exchange(array, local_shards, pairs)
    shards = [received[device] for device in target.addressable_devices_indices_map(array.shape)]
    return jax.make_array_from_single_device_arrays(array.shape, target, shards, dtype=array.dtype)


def _bounds(index: Any, shape: tuple[int, ...]) -> tuple:
    return tuple(part.indices(size) for part, size in zip(index, shape, strict=True))


def _holders(array: jax.Array) -> tuple[dict[tuple, list[Any]], list[Any]]:
    """Devices that hold each part of an array, and those that hold the whole array."""
    parts: dict[tuple, list[Any]] = collections.defaultdict(list)
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        parts[_bounds(index, array.shape)].append(device)
    full_index = _bounds([slice(None)] * array.ndim, array.shape)
    return dict(parts), parts.get(full_index, [])


def _exchange(
    array: jax.Array, local_shards: dict[Any, jax.Array], pairs: list
) -> dict[Any, jax.Array]:
    """Sends from all sources at once; returns the shards that this process's devices received."""
    shard_shape = array.sharding.shard_shape(array.shape)
    devices = (*(source for source, _, _ in pairs), *(device for _, device, _ in pairs))
    program, sharding = _permute_program(devices)
    local = [
        local_shards[device][None]
        if device in local_shards
        else _receive_buffer(shard_shape, array.dtype, device)()
        for device in devices
        if device.process_index == jax.process_index()
    ]
    stacked = jax.make_array_from_single_device_arrays(
        (len(devices), *shard_shape), sharding, local, dtype=array.dtype
    )
    received = {shard.device: shard.data[0] for shard in program(stacked).addressable_shards}
    slices = {device: index for _, device, index in pairs if device in received}
    return {device: received[device][index] for device, index in slices.items()}


@functools.lru_cache(maxsize=64)
def _permute_program(devices: tuple[Any, ...]) -> tuple[Any, NamedSharding]:
    """Program that sends from the first half of `devices` to the second; its input's sharding."""
    mesh = Mesh(np.array(devices), (_PAIRS,), axis_types=(AxisType.Auto,))
    spec, half = PartitionSpec(_PAIRS), len(devices) // 2
    pairs = [(i, half + i) for i in range(half)]
    send = jax.shard_map(
        lambda a: jax.lax.ppermute(a, _PAIRS, pairs),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    return jax.jit(send, donate_argnums=0), NamedSharding(mesh, spec)


@functools.lru_cache(maxsize=256)
def _receive_buffer(shard_shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    """Program that allocates a buffer for a shard on a device of this process."""
    sharding = SingleDeviceSharding(device)
    return jax.jit(lambda: jnp.zeros((1, *shard_shape), dtype), out_shardings=sharding)
