"""Arrays from devices of some processes to devices of others, by collectives of both.

`jax.device_put` does not reach the devices of other processes on every platform. A collective does;
all processes of the run call it, also those that have neither.
"""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

_PAIRS = "pairs"  # mesh axis over those who send, then those who receive


def crossed(array: jax.Array, target: NamedSharding) -> jax.Array:
    """Returns the array split as `target`, whose devices it has none of.

    Each device there gets its part from one that holds this part or the whole array; a device sends
    one thing at a time.
    """
    parts, whole = _holders(array)
    rounds: list[list[tuple[Any, Any, Any]]] = []
    used: collections.Counter[Any] = collections.Counter()
    wanted: dict[Any, Any] = dict(target.devices_indices_map(array.shape))
    for device in sorted(wanted, key=lambda each: each.id):
        index = wanted[device]
        exact = parts.get(_bounds(index, array.shape), [])
        source = min(exact or whole, key=lambda each: (used[each], each.id))
        if used[source] == len(rounds):
            rounds.append([])
        rounds[used[source]].append((source, device, () if exact else index))
        used[source] += 1
    held = {shard.device: shard.data for shard in array.addressable_shards}
    found: dict[Any, jax.Array] = {}
    for pairs in rounds:
        found |= _sent(array, held, pairs)
    pieces = [found[device] for device in target.addressable_devices_indices_map(array.shape)]
    return jax.make_array_from_single_device_arrays(array.shape, target, pieces, dtype=array.dtype)


def _bounds(index: Any, shape: tuple[int, ...]) -> tuple:
    return tuple(part.indices(size) for part, size in zip(index, shape, strict=True))


def _holders(array: jax.Array) -> tuple[dict[tuple, list[Any]], list[Any]]:
    """Returns the devices that hold each part, and those that hold the whole array."""
    parts: dict[tuple, list[Any]] = collections.defaultdict(list)
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        parts[_bounds(index, array.shape)].append(device)
    everything = _bounds([slice(None)] * array.ndim, array.shape)
    return dict(parts), parts.get(everything, [])


def _sent(array: jax.Array, held: dict[Any, jax.Array], pairs: list) -> dict[Any, jax.Array]:
    """Returns what devices of this process got, when each source sent what it holds."""
    piece = array.sharding.shard_shape(array.shape)
    devices = (*(source for source, _, _ in pairs), *(device for _, device, _ in pairs))
    program, sharding = _program(devices)
    local = [
        held[device][None] if device in held else _room(piece, array.dtype, device)()
        for device in devices
        if device.process_index == jax.process_index()
    ]
    stacked = jax.make_array_from_single_device_arrays(
        (len(devices), *piece), sharding, local, dtype=array.dtype
    )
    arrived = {shard.device: shard.data[0] for shard in program(stacked).addressable_shards}
    wanted = {device: index for _, device, index in pairs if device in arrived}
    return {device: arrived[device][index] for device, index in wanted.items()}


@functools.lru_cache(maxsize=64)
def _program(devices: tuple[Any, ...]) -> tuple[Any, NamedSharding]:
    """Returns what sends from the first half of the devices to the second, and how it is given."""
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
def _room(piece: tuple[int, ...], dtype: Any, device: Any) -> Any:
    """Returns what makes room for a piece on a device of this process."""
    place = SingleDeviceSharding(device)
    return jax.jit(lambda: jnp.zeros((1, *piece), dtype), out_shardings=place)
