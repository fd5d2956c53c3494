"""Context parallelism: attention of rows whose length is sharded over the mesh's sequence axis.

`all_to_all` (Ulysses, arXiv:2309.14509) reshards from the length to the heads, attends to whole
rows, and reshards back; heads must divide. `ring` (arXiv:2310.01889) passes keys and values around
the devices: any number of heads, and no device holds a whole row.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.attention import KeyIndex
from jaxrl_llm.sharding import mesh as mesh_lib

ContextParallelForm = Literal["all_to_all", "ring"]
SEQUENCE_AXIS = "sequence"
_MASKED_SCORE = -1e30  # below every score, and finite
_BLOCK = 512  # tokens of a query or key block of the ring
_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def context_parallel_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K value"],
    segment_ids: Int[Array, "B T"],
    form: ContextParallelForm,
    whole_rows: Callable[..., Array],
    sinks: Float[Array, " N"] | None = None,
    index: KeyIndex | None = None,
) -> Float[Array, "B T N value"]:
    """Causal attention within each segment; segment 0 is padding.

    `whole_rows(q, k, v, segment_ids, sinks, index)` is attention of unsharded rows: without a
    sequence axis, and of each device's local heads in the form "all_to_all". The ring supports only
    plain attention: scores scaled by H ** -0.5, no window, cap, sinks or index, values as wide as
    keys.

    Raises:
      ValueError: If length or heads do not divide; see `padded_row_width` and `sharding_problem`.
    """
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    shards = sizes.get(SEQUENCE_AXIS, 1)
    if shards == 1:
        return whole_rows(q, k, v, segment_ids, sinks, index)
    num_heads, length = q.shape[2], q.shape[1]
    if length % (2 * shards):
        raise ValueError(f"rows of {length} tokens over {shards} sequence shards: see `row_width`")
    head_shards = sizes.get("tensor", 1) if num_heads % sizes.get("tensor", 1) == 0 else 1
    ways = head_shards * shards if form == "all_to_all" else head_shards
    if num_heads % ways:
        raise ValueError(f"{num_heads} heads over {ways} devices: see `problem`")
    # Every device needs the key heads of its local query heads; repeat as little as possible.
    repeats = ways // math.gcd(k.shape[2], ways)
    if repeats > 1:
        k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
    rows = mesh_lib.activation_spec(q.shape, ("batch", "length", "heads", None))
    tokens = mesh_lib.activation_spec(segment_ids.shape, ("batch", "length"))
    local = {
        "all_to_all": functools.partial(_all_to_all_attention, whole_rows),
        "ring": functools.partial(_ring_attention, shards),
    }[form]
    # Prefixes of the trees of `sinks` and `index`, which may be None.
    specs = rows, rows, rows, tokens, P(_head_axes(rows[2])), P(*tokens)
    mapped = jax.shard_map(local, in_specs=specs, out_specs=rows, check_vma=False)
    return mapped(q, k, v, segment_ids, sinks, index)


def _head_axes(axes) -> tuple[str, ...]:
    """The mesh axes of heads in "all_to_all": the tensor axis, then the sequence axis."""
    return (*((axes,) if isinstance(axes, str) else axes or ()), SEQUENCE_AXIS)


def sharding_problem(
    form: ContextParallelForm,
    num_heads: int,
    tensor: int,
    sequence: int,
    supports_ring: bool = True,
) -> str:
    """The reason why query heads cannot be sharded over such a mesh; "" if they can.

    `supports_ring`: whether the ring supports the model's attention (`Architecture.supports_ring`).
    """
    if form == "ring" and sequence > 1 and not supports_ring:
        return (
            "the ring has no windows, caps, sinks or scales of their own, as this model's layers"
            " have; use mesh.sequence_attention='all_to_all'"
        )
    tensor = tensor if num_heads % tensor == 0 else 1
    if form == "ring" or num_heads % (tensor * sequence) == 0:
        return ""
    fits = next(s for s in range(sequence, 0, -1) if num_heads % (tensor * s) == 0)
    return (
        f"{num_heads} query heads do not divide by {tensor} tensor x {sequence} sequence shards;"
        f" use mesh.sequence={fits} or mesh.sequence_attention='ring'"
    )


def padded_row_width(width: int, shards: int) -> int:
    """The row width, rounded up so that shards can split it into pieces and blocks."""
    if shards == 1:
        return width
    # Two pieces a shard; long pieces must divide into blocks of nearly `_BLOCK` tokens.
    piece = -(-width // (2 * shards))
    blocks = -(-piece // _BLOCK)
    multiple = 2 * shards * (blocks * 8 if blocks > 1 else 1)
    return -(-width // multiple) * multiple


def _all_to_all_attention(whole_rows, q, k, v, segment_ids, sinks, index):
    exchange = functools.partial(lax.all_to_all, axis_name=SEQUENCE_AXIS, tiled=True)
    q, k, v = (exchange(x, split_axis=2, concat_axis=1) for x in (q, k, v))
    gather = functools.partial(lax.all_gather, axis_name=SEQUENCE_AXIS, axis=1, tiled=True)
    # Each device selects the keys of whole rows again: every head needs the same ones.
    whole_ids, index = jax.tree.map(gather, (segment_ids, index))
    mixed = whole_rows(q, k, v, whole_ids, sinks, index)
    return exchange(mixed, split_axis=1, concat_axis=2)


# The ring. S devices hold 2S pieces of a row as (0, 1), (2, 3), ...: with a causal mask, the last
# device would do almost all the work. So pieces are exchanged first (zigzag): device d gets d and
# 2S-1-d, and has work in two of four pairs of its own and another device's pieces, in every step.


def _ring_attention(shards: int, q, k, v, segment_ids, sinks, index):
    assert sinks is None and index is None
    zigzag = functools.partial(_zigzag, shards)
    num_kv_heads, size = k.shape[2:]
    blocks = _num_blocks(q.shape[1])
    q, k, v, ids = (_to_blocks(zigzag(x), blocks) for x in (q, k, v, segment_ids))
    q = q.reshape(*q.shape[:3], num_kv_heads, -1, size)
    out = _ring(shards, q, k, v, ids)
    return zigzag(_from_blocks(out.reshape(*out.shape[:3], -1, size)), inverse=True)


def _zigzag(shards: int, x: Array, inverse: bool = False) -> Array:
    """Exchanges the two local pieces, from contiguous to zigzag order or back."""
    moved = []
    for odd, half in enumerate(jnp.split(x, 2, axis=1)):
        pieces = [2 * i + odd for i in range(shards)]
        route = [(i, min(p, 2 * shards - 1 - p)) for i, p in enumerate(pieces)]
        moved.append(
            lax.ppermute(half, SEQUENCE_AXIS, [(b, a) for a, b in route] if inverse else route)
        )
    return jnp.concatenate(moved, axis=1)


def _num_blocks(length: int) -> int:
    """The number of blocks of the local tokens, half of them in each piece."""
    piece = length // 2
    return 2 * next(n for n in range(-(-piece // _BLOCK), piece + 1) if piece % n == 0)


def _to_blocks(x: Array, blocks: int) -> Array:
    return jnp.moveaxis(x.reshape(x.shape[0], blocks, -1, *x.shape[2:]), 1, 0)


def _from_blocks(x: Array) -> Array:
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _block_starts(device, shards: int, blocks: int, size: int) -> Int[Array, " blocks"]:
    """The position in the row where each block of a device begins; even pieces are first."""
    pair = jnp.stack([device, 2 * shards - 1 - device])
    pieces = jnp.where(device % 2 == 0, pair, pair[::-1])
    blocks_per_piece = blocks // 2
    return ((pieces[:, None] * blocks_per_piece + jnp.arange(blocks_per_piece)) * size).reshape(-1)


def _block_mask(queries, keys) -> Bool[Array, "B queries keys"]:
    """The mask between a block of queries and one of keys, each given as (start, ids)."""
    (q_start, q_ids), (k_start, k_ids) = queries, keys
    past = (q_start + jnp.arange(q_ids.shape[1]))[:, None] >= k_start + jnp.arange(k_ids.shape[1])
    same = (q_ids[:, :, None] == k_ids[:, None, :]) & (k_ids != 0)[:, None, :]
    return same & past


def _scores(
    q: Float[Array, "B queries K group H"], k: Float[Array, "B keys K H"]
) -> Float[Array, "B K group queries keys"]:
    return _einsum("bqkgh,bskh->bkgqs", q, k) * (q.shape[-1] ** -0.5)


def _run_ring(shards: int, ids, work, result, moving, visitors):
    """Applies `work` to the local blocks and those of every device; the final (result, moving).

    `work(visitors, pair, mask, (result, moving))` is called for each pair of a local and a
    visiting block with an unmasked key. Visitors (keys and values) are passed along the ring in all
    steps but the last; `moving` (their gradients) makes one more step, so that it ends at home.
    """
    # Masks depend on ids only, so XLA hoists them out of a scan over layers and holds all of them,
    # broadcast to heads. The barrier makes them depend on the keys, which differ between layers;
    # the temporary memory of a compiled step shows the difference.
    device, ids, visitors = lax.optimization_barrier((lax.axis_index(SEQUENCE_AXIS), ids, visitors))
    blocks, _, size = ids.shape
    # [shards, blocks, B, size]: too small to send in turns
    all_ids = lax.all_gather(ids, SEQUENCE_AXIS)
    local_starts = _block_starts(device, shards, blocks, size)
    send_to_next = functools.partial(
        lax.ppermute, axis_name=SEQUENCE_AXIS, perm=[(i, (i + 1) % shards) for i in range(shards)]
    )

    def attend_to_visitors(step, result, moving, visitors):
        source = (device - step) % shards
        visitor_starts, visitor_ids = _block_starts(source, shards, blocks, size), all_ids[source]

        def body(carry, pair):
            a, b = pair
            mask = _block_mask((local_starts[a], ids[a]), (visitor_starts[b], visitor_ids[b]))
            step = functools.partial(work, visitors, pair, mask)
            return lax.cond(mask.any(), step, lambda c: c, carry), None

        pairs = np.stack(np.meshgrid(np.arange(blocks), np.arange(blocks)), -1).reshape(-1, 2)
        return lax.scan(body, (result, moving), pairs)[0]

    def ring_step(carry, step):
        result, moving, visitors = carry
        # Sent before the work on the current visitors, so that both overlap.
        next_visitors = jax.tree.map(send_to_next, visitors)
        result, moving = attend_to_visitors(step, result, moving, visitors)
        return (result, jax.tree.map(send_to_next, moving), next_visitors), None

    carry, _ = lax.scan(ring_step, (result, moving, visitors), jnp.arange(shards - 1))
    result, moving = attend_to_visitors(shards - 1, *carry)
    return result, jax.tree.map(send_to_next, moving)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(shards: int, q, k, v, ids):
    """Attention of [blocks, B, size, K, group, H] queries; keys and values have no group."""
    return _ring_forward(shards, q, k, v, ids)[0]


def _ring_forward(shards: int, q, k, v, ids):
    p, b, c, heads, group, size = q.shape
    score_shape = (p, b, heads, group, c)
    start = (
        jnp.full(score_shape, _MASKED_SCORE, jnp.float32),  # largest score so far
        jnp.zeros(score_shape, jnp.float32),  # sum of exp(score - largest)
        jnp.zeros((*score_shape, size), jnp.float32),  # that sum, weighted with values
    )

    def work(visitors, pair, mask, carry):
        (top, total, mixed), moving = carry
        (k, v), (a, b) = visitors, pair
        scores = jnp.where(mask[:, None, None], _scores(q[a], k[b]), _MASKED_SCORE)
        new_top = jnp.maximum(top[a], scores.max(-1))
        weights = jnp.where(mask[:, None, None], jnp.exp(scores - new_top[..., None]), 0.0)
        decay = jnp.exp(top[a] - new_top)
        values = _einsum("bkgqs,bskh->bkgqh", weights.astype(v.dtype), v[b])
        total = total.at[a].set(total[a] * decay + weights.sum(-1))
        mixed = mixed.at[a].set(mixed[a] * decay[..., None] + values)
        return (top.at[a].set(new_top), total, mixed), moving

    (top, total, mixed), _ = _run_ring(shards, ids, work, start, (), (k, v))
    total = jnp.where(total == 0, 1.0, total)  # padding attends to nothing
    out = jnp.moveaxis(mixed / total[..., None], 4, 2).astype(q.dtype)
    return out, (q, k, v, ids, out, top + jnp.log(total))


def _ring_backward(shards: int, residuals, out_bar):
    q, k, v, ids, out, log_sum = residuals
    zeros32 = lambda x: jnp.zeros(x.shape, jnp.float32)  # noqa: E731
    # D = rowsum(dO * O) of the softmax gradient, arXiv:2205.14135, Appendix B.2.
    softmax_term = jnp.moveaxis(jnp.sum(out_bar.astype(jnp.float32) * out, -1), 2, -1)

    def work(visitors, pair, mask, carry):
        q_bar, (k_bar, v_bar) = carry
        (k, v), (a, b) = visitors, pair
        weights = jnp.exp(_scores(q[a], k[b]) - log_sum[a][..., None])
        weights = jnp.where(mask[:, None, None], weights, 0.0)
        weights_bar = _einsum("bqkgh,bskh->bkgqs", out_bar[a], v[b])
        scores_bar = weights * (weights_bar - softmax_term[a][..., None]) * (q.shape[-1] ** -0.5)
        scores_bar = scores_bar.astype(q.dtype)
        q_bar = q_bar.at[a].add(_einsum("bkgqs,bskh->bqkgh", scores_bar, k[b]))
        k_bar = k_bar.at[b].add(_einsum("bkgqs,bqkgh->bskh", scores_bar, q[a]))
        v_bar = v_bar.at[b].add(_einsum("bkgqs,bqkgh->bskh", weights.astype(v.dtype), out_bar[a]))
        return q_bar, (k_bar, v_bar)

    q_bar, (k_bar, v_bar) = _run_ring(
        shards, ids, work, zeros32(q), (zeros32(k), zeros32(v)), (k, v)
    )
    ids_bar: Any = np.zeros(ids.shape, jax.dtypes.float0)
    return q_bar.astype(q.dtype), k_bar.astype(k.dtype), v_bar.astype(v.dtype), ids_bar


_ring.defvjp(_ring_forward, _ring_backward)
