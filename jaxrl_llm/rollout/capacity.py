"""How many slots an engine gets when the run does not say."""

import math
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout import cache
from jaxrl_llm.sharding import mesh as mesh_lib

# Of what is free on a device when the engine is made: weights, optimizer state and the update's
# activations are still to come.
_SHARE = 0.25
_CPU_BYTES = 4 << 30  # what the devices of a CPU, which do not tell, have free together
_MOST = {"cpu": 64}  # more slots do not decode faster
_MOST_ELSEWHERE = 256
_LOGITS_HELD = 3  # float32 arrays of a decode step as large as its logits, those among them


def num_slots(
    network: Network, mesh: Mesh, max_tokens: int, num_sequences: int, draft_tokens: int = 0
) -> int:
    """Returns how many sequences are decoded at one time.

    As many as a step has, up to 64 on a CPU and 256 elsewhere, halved until the cache and the
    logits of a decode step fit a quarter of the memory that is free (of 4 GiB on a CPU).

    Args:
      network: Its `compute_dtype` is the cache's.
      mesh: Its devices need not be present; those that do not tell their memory set no limit.
      max_tokens: The cache's length.
      num_sequences: Of a step.
      draft_tokens: Guesses of a decode step; each has logits of its own.
    """
    device = mesh.devices.flat[0]
    slots = min(num_sequences, _MOST.get(device.platform, _MOST_ELSEWHERE))
    room = _SHARE * _free_bytes(device, mesh.devices.size)

    def needed(slots: int) -> int:
        logits = logits_bytes(network, mesh, slots * (1 + draft_tokens))
        return cache_bytes(network, mesh, slots, max_tokens) + _LOGITS_HELD * logits

    while slots > 1 and needed(slots) > room:
        slots = -(-slots // 2)
    return slots


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


def _free_bytes(device: Any, num_devices: int) -> float:
    if device.platform == "cpu":
        return _CPU_BYTES / num_devices
    try:
        stats = device.memory_stats() or {}
    except (NotImplementedError, RuntimeError, AttributeError):  # a device that is not present
        stats = {}
    if "bytes_limit" not in stats:
        return math.inf
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
