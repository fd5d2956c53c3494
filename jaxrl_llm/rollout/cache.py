"""KV cache of all slots: a long part that decode steps only read, a short one they write.

A step writes one token a slot, each at its own position: in the cache, a scatter per layer and
step. A program that writes an array also copies what it reads of it. So the tokens of a chunk of
steps are kept in order of the steps, and join the cache when the chunk ends.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.shape import Shape
from jaxrl_llm.sharding.mesh import constrain

AXES = ("batch", "kv_heads", None, None)  # of keys and of values
NOWHERE = np.iinfo(np.int32).max  # the position of no token: past every query


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values by position: for each layer, blocks of consecutive positions.

    The position is the last dim of keys, so that a matmul reads them in the order of memory.
    """

    keys: tuple[tuple[Float[Array, "S K H _"], ...], ...]
    values: tuple[tuple[Float[Array, "S K _ H"], ...], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recent:
    """Keys and values of tokens of each slot that have not joined the cache."""

    keys: tuple[Float[Array, "S K H recent"], ...]  # one per layer
    values: tuple[Float[Array, "S K recent H"], ...]
    positions: Int[Array, "S recent"]  # `NOWHERE`: no token, or one that does not count


def empty(shape: Shape, num_slots: int, blocks: Sequence[int], dtype) -> Cache:
    """Returns a cache of zeros; `blocks` are the sizes of a layer's, in positions."""
    layers = [
        zip(*(_zeros(shape, num_slots, n, dtype) for n in blocks), strict=True)
        for _ in range(shape.num_layers)
    ]
    return Cache(*zip(*layers, strict=True))


def no_recent(shape: Shape, num_slots: int, num_tokens: int, dtype) -> Recent:
    """Returns room for so many tokens a slot."""
    layers = [_zeros(shape, num_slots, num_tokens, dtype) for _ in range(shape.num_layers)]
    keys, values = zip(*layers, strict=True)
    return Recent(keys, values, jnp.full((num_slots, num_tokens), NOWHERE, jnp.int32))


def _zeros(
    shape: Shape, num_slots: int, num_tokens: int, dtype
) -> tuple[Float[Array, "S K H tokens"], Float[Array, "S K tokens H"]]:
    """Returns keys and values of a layer."""
    keys = jnp.zeros((num_slots, shape.num_kv_heads, shape.head_size, num_tokens), dtype)
    values = jnp.zeros((num_slots, shape.num_kv_heads, num_tokens, shape.head_size), dtype)
    return constrain(keys, *AXES), constrain(values, *AXES)


def _with_positions(blocks: Sequence[Array], axis: int) -> Iterator[tuple[Array, int]]:
    """Yields each block of a layer with the position of its first entry."""
    first = 0
    for block in blocks:
        yield block, first
        first += block.shape[axis]


def fill(
    cache: Cache,
    slots: Int[Array, " n"],
    keys: Sequence[Float[Array, "n K W H"]],
    values: Sequence[Float[Array, "n K W H"]],
) -> Cache:
    """Returns the cache with W tokens in these slots; slots past the last one are dropped."""

    def put(blocks, rows, axis):
        written = []
        for block, first in _with_positions(blocks, axis):
            end = min(first + block.shape[axis], rows.shape[axis])
            if first < end:
                part = lax.slice_in_dim(rows, first, end, axis=axis).astype(block.dtype)
                index = (slots, *(slice(None),) * (axis - 1), slice(end - first))
                block = block.at[index].set(part, mode="drop")
            written.append(block)
        return tuple(written)

    turned = [rows.swapaxes(2, 3) for rows in keys]
    return Cache(
        tuple(put(b, rows, 3) for b, rows in zip(cache.keys, turned, strict=True)),
        tuple(put(b, rows, 2) for b, rows in zip(cache.values, values, strict=True)),
    )


def front(cache: Cache, num_slots: int, window: int) -> Cache:
    """Returns the first slots and positions."""

    def cut(blocks, axis):
        return tuple(
            lax.slice_in_dim(
                block[:num_slots], 0, min(block.shape[axis], window - first), axis=axis
            )
            for block, first in _with_positions(blocks, axis)
            if first < window
        )

    return Cache(
        tuple(cut(blocks, 3) for blocks in cache.keys),
        tuple(cut(blocks, 2) for blocks in cache.values),
    )


def add(
    recent: Recent,
    layer: int,
    start: Int[Array, ""],
    keys: Float[Array, "S Q K H"],
    values: Float[Array, "S Q K H"],
) -> tuple[Float[Array, "S K H recent"], Float[Array, "S K recent H"]]:
    """Returns a layer's recent keys and values with Q more, from entry `start` on."""
    into_k, into_v = recent.keys[layer], recent.values[layer]
    new_k = keys.transpose(0, 2, 3, 1).astype(into_k.dtype)
    new_v = values.transpose(0, 2, 1, 3).astype(into_v.dtype)
    return (
        lax.dynamic_update_slice_in_dim(into_k, new_k, start, axis=3),
        lax.dynamic_update_slice_in_dim(into_v, new_v, start, axis=2),
    )


def join(cache: Cache, recent: Recent, end: int) -> Cache:
    """Returns the cache with the recent tokens of its first slots, all at positions below `end`."""
    num_slots, num_heads, _, num_tokens = recent.keys[0].shape
    slots = jnp.arange(num_slots)[:, None, None]
    heads = jnp.arange(num_heads)[None, :, None]

    def put(blocks, rows, axis):
        written = []
        for block, first in _with_positions(blocks, axis):
            if first < end:
                size = block.shape[axis]
                at = recent.positions - first
                # Tokens of other blocks get indices past the end, all different: dropped.
                outside = size + jnp.arange(num_tokens)
                at = jnp.where((at >= 0) & (at < size), at, outside)[:, None]  # [S, 1, recent]
                index = (slots, heads, slice(None), at) if axis == 3 else (slots, heads, at)
                block = block.at[index].set(rows, mode="drop", unique_indices=True)
            written.append(block)
        return tuple(written)

    turned = [rows.swapaxes(2, 3) for rows in recent.keys]
    return Cache(
        tuple(put(b, rows, 3) for b, rows in zip(cache.keys, turned, strict=True)),
        tuple(put(b, rows, 2) for b, rows in zip(cache.values, recent.values, strict=True)),
    )


def attention(
    q: Float[Array, "S Q N H"],
    keys: Sequence[Float[Array, "S K H _"]],
    values: Sequence[Float[Array, "S K _ H"]],
    seen: Bool[Array, "S Q window"],
) -> Float[Array, "S Q N H"]:
    """Returns attention of a few queries a slot, with the same rounding as `full_attention`."""
    slots, width, num_heads, size = q.shape
    heads = keys[0].shape[1]
    # The queries of all heads that share keys, and of all positions, are the rows of one matmul.
    grouped = q.reshape(slots, width, heads, -1, size).swapaxes(1, 2)
    rows = grouped.reshape(slots, heads, -1, size)
    wide = {"preferred_element_type": jnp.float32}
    scores = jnp.concatenate(
        [jnp.einsum("skrh,skhw->skrw", rows, block, **wide) for block in keys], axis=-1
    )
    may_see = jnp.repeat(seen, num_heads // heads, axis=1)[:, None]
    scores = jnp.where(may_see, scores / jnp.sqrt(size).astype(jnp.float32), -1e30)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(values[0].dtype)
    ends = np.cumsum([block.shape[2] for block in values])[:-1]
    shares = jnp.split(probabilities, ends, axis=-1)
    mixed = functools.reduce(
        jnp.add,
        (
            jnp.einsum("skrw,skwh->skrh", share, block, **wide)
            for share, block in zip(shares, values, strict=True)
        ),
    )
    mixed = mixed.reshape(grouped.shape).swapaxes(1, 2)
    return mixed.reshape(q.shape).astype(q.dtype)
