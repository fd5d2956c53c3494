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

    Args:
      network: Its `compute_dtype` is the cache's.
      mesh: Devices that are not present, or do not tell their memory, set no limit.
      max_tokens: The cache's length.
      draft_tokens: Guesses of a decode step; each has logits of its own.
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
    split = mesh_lib.sharding_of(array, cache.AXES, mesh)
    entries = math.prod(split.shard_shape(array))
    return 2 * shape.num_layers * entries * jnp.dtype(network.compute_dtype).itemsize


def logits_bytes(network: Network, mesh: Mesh, rows: int) -> int:
    """Returns the bytes of that many rows of logits on one device."""
    array = (rows, network.shape.vocab_size)
    split = mesh_lib.sharding_of(array, ("batch", "vocab"), mesh)
    return math.prod(split.shard_shape(array)) * jnp.dtype(jnp.float32).itemsize


def _free_bytes(device: Any) -> float:
    try:
        stats = device.memory_stats() or {}
    except (NotImplementedError, RuntimeError, AttributeError):  # a device that is not present
        stats = {}
    return stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)
