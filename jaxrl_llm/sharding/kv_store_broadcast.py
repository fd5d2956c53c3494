"""Broadcasts between hosts through JAX's coordination service (a key-value store).

It uses no devices, which may be busy for long.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # no public name has the client; orbax does the same

_FOLDER = "jaxrl_llm/told/"  # key prefix in the coordination service
_CLEANUP_INTERVAL = 256  # messages between two deletions of old ones
_PART_BYTES = 1 << 20  # per value in the store
_WAIT_MS = 24 * 3600 * 1000  # `hosts.HeartbeatThread` ends the process if the source dies

_message_ids = itertools.count()


def device_get(tree: Any) -> Any:
    """`jax.device_get` for a tree of arrays that this process may have no part of.

    If a pool has hosts of its own, the first of them broadcasts its arrays to the other processes.
    All processes must call it, in the same order, with arrays of the same meshes.
    """
    if jax.process_count() == 1:
        return jax.device_get(tree)
    leaves, structure = jax.tree.flatten(tree)
    by_source: dict[int, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array) and leaf.committed:
            leaf_hosts = hosts_of(leaf.sharding)
            if len(leaf_hosts) < jax.process_count():
                by_source.setdefault(min(leaf_hosts), []).append(index)
    for source, indices in by_source.items():
        arrays = [leaves[index] for index in indices]

        def array_bytes(arrays: Sequence[Any] = arrays) -> bytes:
            return b"".join(np.asarray(array).tobytes() for array in jax.device_get(arrays))

        data, start = broadcast(source, array_bytes), 0
        for index, array in zip(indices, arrays, strict=True):
            end = start + array.size * array.dtype.itemsize
            leaves[index] = np.frombuffer(data[start:end], array.dtype).reshape(array.shape)
            start = end
    return jax.device_get(jax.tree.unflatten(structure, leaves))


def hosts_of(sharding: Any) -> set[int]:
    """The processes that have devices of a sharding."""
    return {device.process_index for device in sharding.device_set}


def broadcast(source: int, make_content: Callable[[], bytes]) -> bytes:
    """Broadcasts bytes from the process `source`; all must call it, in the same order."""
    client: Any = distributed.global_state.client
    message_id = next(_message_ids)
    if message_id % _CLEANUP_INTERVAL == 0:  # all have read the earlier messages
        client.wait_at_barrier(f"{_FOLDER}{message_id}", _WAIT_MS)
        if jax.process_index() == 0:
            client.key_value_delete(_FOLDER)
        client.wait_at_barrier(f"{_FOLDER}{message_id}/clean", _WAIT_MS)
    key = f"{_FOLDER}{message_id}/"
    if source != jax.process_index():
        count = int(client.blocking_key_value_get(key, _WAIT_MS))
        names = [f"{key}{index}" for index in range(count)]
        return b"".join(client.blocking_key_value_get_bytes(name, _WAIT_MS) for name in names)
    data = make_content()
    chunks = [data[start : start + _PART_BYTES] for start in range(0, len(data), _PART_BYTES)]
    for index, chunk in enumerate(chunks):
        client.key_value_set_bytes(f"{key}{index}", chunk)
    client.key_value_set(key, str(len(chunks)))
    return data
