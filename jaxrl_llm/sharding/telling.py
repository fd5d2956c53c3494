"""What one process says to all others, without devices: these may be at work for long."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # no public name has the client; orbax does the same

_FOLDER = "jaxrl_llm/told/"  # keys of the coordination service
_KEPT = 256  # tellings, before the service forgets them
_PART_BYTES = 1 << 20  # of a message to the service
_WAIT_MS = 24 * 3600 * 1000  # the watch ends a process whose teller is gone

_tellings = itertools.count()


def fetched(tree: Any) -> Any:
    """Returns a tree with its arrays on the host of each process, as `jax.device_get`.

    What only other processes hold, because a pool has hosts of its own, is told by the first of
    them. All processes must call it, in the same order, with arrays of the same meshes.
    """
    if jax.process_count() == 1:
        return jax.device_get(tree)
    leaves, structure = jax.tree.flatten(tree)
    by_teller: dict[int, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array) and leaf.committed:
            of_leaf = holders(leaf.sharding)
            if len(of_leaf) < jax.process_count():
                by_teller.setdefault(min(of_leaf), []).append(place)
    for teller, places in by_teller.items():
        own = [leaves[place] for place in places]

        def content(own: Sequence[Any] = own) -> bytes:
            return b"".join(np.asarray(array).tobytes() for array in jax.device_get(own))

        data, start = told(teller, content), 0
        for place, array in zip(places, own, strict=True):
            end = start + array.size * array.dtype.itemsize
            leaves[place] = np.frombuffer(data[start:end], array.dtype).reshape(array.shape)
            start = end
    return jax.device_get(jax.tree.unflatten(structure, leaves))


def holders(sharding: Any) -> set[int]:
    """Returns the processes that have devices of a sharding."""
    return {device.process_index for device in sharding.device_set}


def told(teller: int, content: Callable[[], bytes]) -> bytes:
    """Returns the content of one process, without devices; all must call it, in the same order."""
    client: Any = distributed.global_state.client
    number = next(_tellings)
    if number % _KEPT == 0:  # all have read what was told before
        client.wait_at_barrier(f"{_FOLDER}{number}", _WAIT_MS)
        if jax.process_index() == 0:
            client.key_value_delete(_FOLDER)
        client.wait_at_barrier(f"{_FOLDER}{number}/clean", _WAIT_MS)
    key = f"{_FOLDER}{number}/"
    if teller != jax.process_index():
        count = int(client.blocking_key_value_get(key, _WAIT_MS))
        names = [f"{key}{part}" for part in range(count)]
        return b"".join(client.blocking_key_value_get_bytes(name, _WAIT_MS) for name in names)
    data = content()
    parts = [data[at : at + _PART_BYTES] for at in range(0, len(data), _PART_BYTES)]
    for part, piece in enumerate(parts):
        client.key_value_set_bytes(f"{key}{part}", piece)
    client.key_value_set(key, str(len(parts)))
    return data
