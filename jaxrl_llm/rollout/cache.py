"""KV cache of all slots: a long part that decode steps only read, a short one they write.

A step writes one token a slot, each at its own position: in the cache, a scatter per layer and
step. A program that writes an array also copies what it reads of it. So the tokens of a chunk of
steps are kept in order of the steps, and join the cache when the chunk ends.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.config.samples import chosen_slots
from jaxrl_llm.models import low_precision
from jaxrl_llm.models.attention import PLAIN, Scoring, capped, softmax_with_sinks
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.sharding import mesh as mesh_lib

AXES = ("batch", "kv_heads", None, None)  # of keys and of values
NOWHERE = np.iinfo(np.int32).max  # the position of no token: past every query
_LOGITS_HELD = 3  # float32 arrays of a decode step as large as its logits, those among them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values by position: for each layer, blocks of consecutive positions.

    The position is the last dim of keys, so that a matmul reads them in the order of memory.
    Latent attention has one head of keys and no values, see `Shape.cached`.
    """

    keys: tuple[tuple[Float[Array, "S K H _"], ...], ...]
    values: tuple[tuple[Float[Array, "S K _ value"], ...], ...]  # (): the first dims of keys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recent:
    """Keys and values of tokens of each slot that have not joined the cache."""

    keys: tuple[Float[Array, "S K H recent"], ...]  # one per layer
    values: tuple[Float[Array, "S K recent value"], ...]
    positions: Int[Array, "S recent"]  # `NOWHERE`: no token, or one that does not count


def empty(shape: Shape, num_slots: int, blocks: Sequence[int], dtype) -> Cache:
    """Returns a cache of zeros; `blocks` are the sizes of a layer's, in positions."""

    heads, of_key, of_value = shape.cached

    def zeros(*dims: int) -> Array:
        return mesh_lib.constrain(jnp.zeros((num_slots, heads, *dims), dtype), *AXES)

    layers = range(shape.num_layers)
    return Cache(
        tuple(tuple(zeros(of_key, positions) for positions in blocks) for _ in layers),
        tuple(tuple(zeros(positions, of_value) for positions in blocks) for _ in layers)
        if of_value
        else (),
    )


def no_recent(shape: Shape, num_slots: int, num_tokens: int, dtype) -> Recent:
    """Returns room for so many tokens a slot."""
    room = empty(shape, num_slots, [num_tokens], dtype)
    nowhere = jnp.full((num_slots, num_tokens), NOWHERE, jnp.int32)
    return Recent(tuple(k for (k,) in room.keys), tuple(v for (v,) in room.values), nowhere)


def _changed(
    cache: Cache,
    change: Callable[[Array, int, int, Any], Array | None],
    keys: Sequence[Any],
    values: Sequence[Any],
) -> Cache:
    """Returns the cache of `change(block, its first position, axis of positions, rows)`.

    `rows` are the entry of the block's layer in `keys` or `values`; None drops the block.
    """

    def layer(blocks, rows, axis):
        firsts = np.cumsum([0, *(block.shape[axis] for block in blocks)]).tolist()
        found = [change(b, first, axis, rows) for b, first in zip(blocks, firsts, strict=False)]
        return tuple(block for block in found if block is not None)

    return Cache(
        tuple(layer(blocks, rows, 3) for blocks, rows in zip(cache.keys, keys, strict=True)),
        tuple(layer(blocks, rows, 2) for blocks, rows in zip(cache.values, values, strict=True)),
    )


def fill(
    cache: Cache,
    slots: Int[Array, " n"],
    keys: Sequence[Float[Array, "n K W H"]],
    values: Sequence[Float[Array, "n K W H"]],
) -> Cache:
    """Returns the cache with W tokens in these slots; slots past the last one are dropped."""

    def put(block, first, axis, rows):
        end = min(first + block.shape[axis], rows.shape[axis])
        if first >= end:
            return block
        part = low_precision.narrow(lax.slice_in_dim(rows, first, end, axis=axis), block.dtype)
        index = (slots, *(slice(None),) * (axis - 1), slice(end - first))
        return block.at[index].set(part, mode="drop")

    return _changed(cache, put, [rows.swapaxes(2, 3) for rows in keys], values)


def front(cache: Cache, num_slots: int, window: int) -> Cache:
    """Returns the first slots and positions."""

    def cut(block, first, axis, _):
        if first >= window:
            return None
        end = min(block.shape[axis], window - first)
        return lax.slice_in_dim(block[:num_slots], 0, end, axis=axis)

    return _changed(cache, cut, cache.keys, cache.values)


def add(
    recent: Recent,
    layer: int,
    start: Int[Array, ""],
    cached: tuple[Float[Array, "S Q K _"], ...],
) -> tuple[Float[Array, "S K _ _"], ...]:
    """Returns a layer's recent keys, and values if it has any, with Q more from `start` on."""
    orders = (0, 2, 3, 1), (0, 2, 1, 3)
    kept = recent.keys[layer], *recent.values[layer : layer + 1]
    return tuple(
        lax.dynamic_update_slice_in_dim(
            into, low_precision.narrow(new.transpose(order), into.dtype), start, axis=order.index(1)
        )
        for into, new, order in zip(kept, cached, orders, strict=False)
    )


def of_slots(cache: Cache, slots: Int[Array, " n"], window: int) -> Cache:
    """Returns the first positions of these slots; those past the last one get any row."""
    last = jax.tree.leaves(cache)[0].shape[0] - 1
    # In this order: a CPU would copy the positions of all slots first.
    taken = jax.tree.map(lambda block: block[jnp.minimum(slots, last)], cache)
    return front(taken, len(slots), window)


def join(cache: Cache, recent: Recent, end: int, slots: Int[Array, " S"] | None = None) -> Cache:
    """Returns the cache with recent tokens, all at positions below `end`.

    They are of these slots, all different, and dropped if past the last one; None: the first.
    """
    num_slots, num_heads, _, num_tokens = recent.keys[0].shape
    slots = (jnp.arange(num_slots) if slots is None else slots)[:, None, None]
    heads = jnp.arange(num_heads)[None, :, None]

    def put(block, first, axis, rows):
        if first >= end:
            return block
        size = block.shape[axis]
        at = recent.positions - first
        # Tokens of other blocks get indices past the end, all different: dropped.
        outside = size + jnp.arange(num_tokens)
        at = jnp.where((at >= 0) & (at < size), at, outside)[:, None]  # [S, 1, recent]
        index = (slots, heads, slice(None), at) if axis == 3 else (slots, heads, at)
        return block.at[index].set(rows, mode="drop", unique_indices=True)

    return _changed(cache, put, [rows.swapaxes(2, 3) for rows in recent.keys], recent.values)


def attention(
    q: Float[Array, "S Q N H"],
    keys: Sequence[Float[Array, "S K H _"]],
    values: Sequence[Float[Array, "S K _ value"]],
    seen: Bool[Array, "S Q window"],
    scoring: Scoring = PLAIN,
    value_size: int = 0,
) -> Float[Array, "S Q N value"]:
    """Returns attention of a few queries a slot, with the same rounding as `full_attention`.

    Without `values` they are the first `value_size` dims of the keys.
    """
    slots, width, num_heads, size = q.shape
    heads = keys[0].shape[1]
    # The queries of all heads that share keys, and of all positions, are the rows of one matmul.
    grouped = q.reshape(slots, width, heads, -1, size).swapaxes(1, 2)
    rows = grouped.reshape(slots, heads, -1, size)
    wide = {"preferred_element_type": jnp.float32}
    as_computed = lambda block: block.astype(q.dtype)  # noqa: E731
    keys, values = [*map(as_computed, keys)], [*map(as_computed, values)]
    scores = [jnp.einsum("skrh,skhw->skrw", rows, block, **wide) for block in keys]
    may_see = jnp.repeat(seen, num_heads // heads, axis=1)[:, None]
    together = jnp.concatenate(scores, axis=-1)
    if scoring.scale:
        scaled = together * scoring.scale
    else:
        scaled = together / jnp.sqrt(size).astype(jnp.float32)
    scaled = jnp.where(may_see, capped(scaled, scoring.cap), -1e30)
    sinks = scoring.sinks
    of_rows = None if sinks is None else jnp.tile(sinks.reshape(heads, -1), width)
    probabilities = softmax_with_sinks(scaled, of_rows).astype(keys[0].dtype)
    ends = np.cumsum([block.shape[3] for block in keys])[:-1]
    shares = jnp.split(probabilities, ends, axis=-1)
    equation = "skrw,skwh->skrh" if values else "skrw,skhw->skrh"
    blocks = values or [block[:, :, :value_size] for block in keys]
    parts = [
        jnp.einsum(equation, share, block, **wide)
        for share, block in zip(shares, blocks, strict=True)
    ]
    mixed = functools.reduce(jnp.add, parts)
    mixed = mixed.reshape(*grouped.shape[:-1], mixed.shape[-1]).swapaxes(1, 2)
    return mixed.reshape(slots, width, num_heads, mixed.shape[-1]).astype(q.dtype)


def fitting_slots(
    network: Network, mesh: Mesh, max_tokens: int, num_sequences: int, draft_tokens: int = 0
) -> int:
    """Returns how many slots an engine gets if the run does not say; see `chosen_slots`.

    `max_tokens` is the cache's length; each guess of `draft_tokens` has its own logits. Devices
    that are not present, or do not tell their memory, set no limit.
    """

    def needed(slots: int) -> int:
        logits = logits_bytes(network, mesh, slots * (1 + draft_tokens))
        return cache_bytes(network, mesh, slots, max_tokens) + _LOGITS_HELD * logits

    device: Any = mesh.devices.flat[0]
    try:
        stats = device.memory_stats() or {}
    except (NotImplementedError, RuntimeError, AttributeError):  # a device that is not present
        stats = {}
    free_bytes = stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)
    return chosen_slots(num_sequences, device.platform, mesh.devices.size, free_bytes, needed)


def cache_bytes(network: Network, mesh: Mesh, slots: int, max_tokens: int) -> int:
    """Returns the bytes of keys and values on one device."""
    shape = network.shape
    heads, of_key, of_value = shape.cached
    array = (slots, heads, max_tokens, of_key + of_value)
    return shape.num_layers * _bytes(mesh, array, AXES, network.cached_dtype)


def logits_bytes(network: Network, mesh: Mesh, rows: int) -> int:
    """Returns the bytes of that many rows of logits on one device."""
    return _bytes(mesh, (rows, network.shape.vocab_size), ("batch", "vocab"), jnp.float32)


def _bytes(mesh: Mesh, array: tuple[int, ...], dims: tuple[str | None, ...], dtype: Any) -> int:
    shard = mesh_lib.sharding_of(array, dims, mesh).shard_shape(array)
    return math.prod(shard) * jnp.dtype(dtype).itemsize
