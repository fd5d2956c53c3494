"""How many slots an engine gets when the run does not say."""

import math
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.config.rollout import chosen_slots
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout import cache
from jaxrl_llm.sharding import mesh as mesh_lib

_LOGITS_HELD = 3  # float32 arrays of a decode step as large as its logits, those among them


def num_slots(
    network: Network, mesh: Mesh, max_tokens: int, num_sequences: int, draft_tokens: int = 0
) -> int:
    """Returns how many sequences are decoded at one time; see `chosen_slots`.

    `max_tokens` is the cache's length; each guess of `draft_tokens` has its own logits. Devices
    that are not present, or do not tell their memory, set no limit.
    """

    def needed(slots: int) -> int:
        logits = logits_bytes(network, mesh, slots * (1 + draft_tokens))
        return cache_bytes(network, mesh, slots, max_tokens) + _LOGITS_HELD * logits

    device, count = mesh.devices.flat[0], mesh.devices.size
    return chosen_slots(num_sequences, device.platform, count, _free_bytes(device), needed)


def cache_bytes(network: Network, mesh: Mesh, slots: int, max_tokens: int) -> int:
    """Returns the bytes of keys and values on one device."""
    shape = network.shape
    array = (slots, shape.num_kv_heads, max_tokens, shape.head_size)
    keys = _bytes(mesh, array, cache.AXES, network.compute_dtype)
    return 2 * shape.num_layers * keys


def logits_bytes(network: Network, mesh: Mesh, rows: int) -> int:
    """Returns the bytes of that many rows of logits on one device."""
    return _bytes(mesh, (rows, network.shape.vocab_size), ("batch", "vocab"), jnp.float32)


def _bytes(mesh: Mesh, array: tuple[int, ...], dims: tuple[str | None, ...], dtype: Any) -> int:
    """Returns the bytes of an array on one device."""
    shard = mesh_lib.sharding_of(array, dims, mesh).shard_shape(array)
    return math.prod(shard) * jnp.dtype(dtype).itemsize


def _free_bytes(device: Any) -> float:
    try:
        stats = device.memory_stats() or {}
    except (NotImplementedError, RuntimeError, AttributeError):  # a device that is not present
        stats = {}
    return stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)
