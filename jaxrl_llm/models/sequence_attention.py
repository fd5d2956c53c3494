"""Attention of rows whose length is split over the mesh's sequence axis.

`all_to_all` (Ulysses, arXiv:2309.14509) splits the heads instead of the length, attends to whole
rows, and swaps back; heads must divide. `ring` (arXiv:2310.01889) sends keys and values around:
any number of heads, and no device holds a whole row.
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

from jaxrl_llm.sharding import mesh as mesh_lib

Form = Literal["all_to_all", "ring"]
AXIS = "sequence"
_NEVER = -1e30  # score of a key that is not seen
_BLOCK = 512  # tokens of a query or key block of the ring
_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K value"],
    segment_ids: Int[Array, "B T"],
    form: Form,
    whole_rows: Callable[..., Array],
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N value"]:
    """Returns causal attention inside each segment; segment 0 is padding.

    `whole_rows(q, k, v, segment_ids, sinks)` is attention of rows that are not split: without
    a sequence axis, and of each device's own heads in the form "all_to_all". The ring is for plain
    attention: scores scaled by H ** -0.5, no window, cap or sinks, values as long as keys.

    Raises:
      ValueError: If length or heads do not divide; see `row_width` and `problem`.
    """
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    shards = sizes.get(AXIS, 1)
    if shards == 1:
        return whole_rows(q, k, v, segment_ids, sinks)
    num_heads, length = q.shape[2], q.shape[1]
    if length % (2 * shards):
        raise ValueError(f"rows of {length} tokens over {shards} sequence shards: see `row_width`")
    head_shards = sizes.get("tensor", 1) if num_heads % sizes.get("tensor", 1) == 0 else 1
    ways = head_shards * shards if form == "all_to_all" else head_shards
    if num_heads % ways:
        raise ValueError(f"{num_heads} heads over {ways} devices: see `problem`")
    # Every device gets the key heads of its own query heads, repeated as little as possible.
    repeats = ways // math.gcd(k.shape[2], ways)
    if repeats > 1:
        k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
    rows = mesh_lib.activation_spec(q.shape, ("batch", "length", "heads", None))
    tokens = mesh_lib.activation_spec(segment_ids.shape, ("batch", "length"))
    local = {
        "all_to_all": functools.partial(_over_heads, whole_rows),
        "ring": functools.partial(_around, shards),
    }[form]
    given = () if sinks is None else (sinks,)
    specs = rows, rows, rows, tokens, *(P(_and_sequence(rows[2])) for _ in given)
    mapped = jax.shard_map(local, in_specs=specs, out_specs=rows, check_vma=False)
    return mapped(q, k, v, segment_ids, *given)


def _and_sequence(axes) -> tuple[str, ...]:
    """Returns the axes of heads during an exchange: those of the tensor axis, then the row's."""
    return (*((axes,) if isinstance(axes, str) else axes or ()), AXIS)


def problem(form: Form, num_heads: int, tensor: int, sequence: int, rings: bool = True) -> str:
    """Returns why this many query heads cannot be attended to on such a mesh; "" if they can.

    `rings` says whether the ring can do what the layers do, see `Shape.rings`.
    """
    if form == "ring" and sequence > 1 and not rings:
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


def row_width(width: int, shards: int) -> int:
    """Returns the smallest width from `width` on that the shards can divide into blocks."""
    if shards == 1:
        return width
    # Two pieces a shard; of long rows, pieces that divide into blocks of nearly `_BLOCK`.
    piece = -(-width // (2 * shards))
    blocks = -(-piece // _BLOCK)
    multiple = 2 * shards * (blocks * 8 if blocks > 1 else 1)
    return -(-width // multiple) * multiple


def _over_heads(whole_rows, q, k, v, segment_ids, sinks=None):
    exchange = functools.partial(lax.all_to_all, axis_name=AXIS, tiled=True)
    q, k, v = (exchange(x, split_axis=2, concat_axis=1) for x in (q, k, v))
    whole_ids = lax.all_gather(segment_ids, AXIS, axis=1, tiled=True)
    mixed = whole_rows(q, k, v, whole_ids, sinks)
    return exchange(mixed, split_axis=1, concat_axis=2)


# The ring. S devices hold 2S pieces of a row as (0, 1), (2, 3), ...: with a causal mask, the last
# device would do almost all the work. So device d gets the pieces d and 2S-1-d. Every device then
# sees two of four pairs of pieces of every other's.


def _around(shards: int, q, k, v, segment_ids):
    deal = functools.partial(_exchange, shards)
    num_kv_heads, size = k.shape[2:]
    blocks = _num_blocks(q.shape[1])
    q, k, v, ids = (_cut(deal(x), blocks) for x in (q, k, v, segment_ids))
    q = q.reshape(*q.shape[:3], num_kv_heads, -1, size)
    out = _ring(shards, q, k, v, ids)
    return deal(_joined(out.reshape(*out.shape[:3], -1, size)), inverse=True)


def _exchange(shards: int, x: Array, inverse: bool = False) -> Array:
    """Returns local pieces, exchanged from neighbouring ones to balanced ones, or back."""
    moved = []
    for odd, half in enumerate(jnp.split(x, 2, axis=1)):
        pieces = [2 * i + odd for i in range(shards)]
        route = [(i, min(p, 2 * shards - 1 - p)) for i, p in enumerate(pieces)]
        moved.append(lax.ppermute(half, AXIS, [(b, a) for a, b in route] if inverse else route))
    return jnp.concatenate(moved, axis=1)


def _num_blocks(length: int) -> int:
    """Returns how many blocks the local tokens are cut into, half of them to each piece."""
    piece = length // 2
    return 2 * next(n for n in range(-(-piece // _BLOCK), piece + 1) if piece % n == 0)


def _cut(x: Array, blocks: int) -> Array:
    return jnp.moveaxis(x.reshape(x.shape[0], blocks, -1, *x.shape[2:]), 1, 0)


def _joined(x: Array) -> Array:
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _starts(device, shards: int, blocks: int, size: int) -> Int[Array, " blocks"]:
    """Returns where in the row each block of a device begins; even pieces come first."""
    pair = jnp.stack([device, 2 * shards - 1 - device])
    pieces = jnp.where(device % 2 == 0, pair, pair[::-1])
    each = blocks // 2
    return ((pieces[:, None] * each + jnp.arange(each)) * size).reshape(-1)


def _sees(of_q, of_k) -> Bool[Array, "B queries keys"]:
    """Returns which keys of a block each query of another sees; both are (start, ids)."""
    (q_start, q_ids), (k_start, k_ids) = of_q, of_k
    past = (q_start + jnp.arange(q_ids.shape[1]))[:, None] >= k_start + jnp.arange(k_ids.shape[1])
    same = (q_ids[:, :, None] == k_ids[:, None, :]) & (k_ids != 0)[:, None, :]
    return same & past


def _scores(
    q: Float[Array, "B queries K group H"], k: Float[Array, "B keys K H"]
) -> Float[Array, "B K group queries keys"]:
    return _einsum("bqkgh,bskh->bkgqs", q, k) * (q.shape[-1] ** -0.5)


def _revolve(shards: int, ids, work, result, travels, stays):
    """Returns `result` and `travels` after `work` saw the blocks of every device.

    `work(stays, pair, sees, (result, travels))` is called for each pair of an own and a visiting
    block that see anything. `travels` goes once around the ring, `stays` all but the last step.
    """
    # A scan over layers would compute once, and keep, which key every query sees, broadcast to
    # heads. The barrier binds it to the keys, which differ between layers.
    me, ids, stays = lax.optimization_barrier((lax.axis_index(AXIS), ids, stays))
    blocks, _, size = ids.shape
    all_ids = lax.all_gather(ids, AXIS)  # [shards, blocks, B, size]: too small to send in turns
    own = _starts(me, shards, blocks, size)
    onward = functools.partial(
        lax.ppermute, axis_name=AXIS, perm=[(i, (i + 1) % shards) for i in range(shards)]
    )

    def visit(step, result, travels, stays):
        source = (me - step) % shards
        starts, visiting = _starts(source, shards, blocks, size), all_ids[source]

        def body(carry, pair):
            a, b = pair
            sees = _sees((own[a], ids[a]), (starts[b], visiting[b]))
            step = functools.partial(work, stays, pair, sees)
            return lax.cond(sees.any(), step, lambda c: c, carry), None

        pairs = np.stack(np.meshgrid(np.arange(blocks), np.arange(blocks)), -1).reshape(-1, 2)
        return lax.scan(body, (result, travels), pairs)[0]

    def turn(carry, step):
        result, travels, stays = carry
        coming = jax.tree.map(onward, stays)  # while the blocks that are here are worked on
        result, travels = visit(step, result, travels, stays)
        return (result, jax.tree.map(onward, travels), coming), None

    carry, _ = lax.scan(turn, (result, travels, stays), jnp.arange(shards - 1))
    result, travels = visit(shards - 1, *carry)
    return result, jax.tree.map(onward, travels)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(shards: int, q, k, v, ids):
    """Attention of [blocks, B, size, K, group, H] queries; keys and values have no group."""
    return _ring_forward(shards, q, k, v, ids)[0]


def _ring_forward(shards: int, q, k, v, ids):
    p, b, c, heads, group, size = q.shape
    of_query = (p, b, heads, group, c)
    begin = (
        jnp.full(of_query, _NEVER, jnp.float32),  # largest score so far
        jnp.zeros(of_query, jnp.float32),  # sum of exp(score - largest)
        jnp.zeros((*of_query, size), jnp.float32),  # that sum, weighted with values
    )

    def work(stays, pair, sees, carry):
        (top, total, mixed), travels = carry
        (k, v), (a, b) = stays, pair
        scores = jnp.where(sees[:, None, None], _scores(q[a], k[b]), _NEVER)
        higher = jnp.maximum(top[a], scores.max(-1))
        weights = jnp.where(sees[:, None, None], jnp.exp(scores - higher[..., None]), 0.0)
        fade = jnp.exp(top[a] - higher)
        values = _einsum("bkgqs,bskh->bkgqh", weights.astype(v.dtype), v[b])
        total = total.at[a].set(total[a] * fade + weights.sum(-1))
        mixed = mixed.at[a].set(mixed[a] * fade[..., None] + values)
        return (top.at[a].set(higher), total, mixed), travels

    (top, total, mixed), _ = _revolve(shards, ids, work, begin, (), (k, v))
    total = jnp.where(total == 0, 1.0, total)  # padding sees nothing
    out = jnp.moveaxis(mixed / total[..., None], 4, 2).astype(q.dtype)
    return out, (q, k, v, ids, out, top + jnp.log(total))


def _ring_backward(shards: int, residuals, out_bar):
    q, k, v, ids, out, log_sum = residuals
    wide = lambda x: jnp.zeros(x.shape, jnp.float32)  # noqa: E731
    # The softmax's own share of the gradient, arXiv:2205.14135, Appendix B.2.
    shared = jnp.moveaxis(jnp.sum(out_bar.astype(jnp.float32) * out, -1), 2, -1)

    def work(stays, pair, sees, carry):
        q_bar, (k_bar, v_bar) = carry
        (k, v), (a, b) = stays, pair
        weights = jnp.exp(_scores(q[a], k[b]) - log_sum[a][..., None])
        weights = jnp.where(sees[:, None, None], weights, 0.0)
        weights_bar = _einsum("bqkgh,bskh->bkgqs", out_bar[a], v[b])
        scores_bar = weights * (weights_bar - shared[a][..., None]) * (q.shape[-1] ** -0.5)
        scores_bar = scores_bar.astype(q.dtype)
        q_bar = q_bar.at[a].add(_einsum("bkgqs,bskh->bqkgh", scores_bar, k[b]))
        k_bar = k_bar.at[b].add(_einsum("bkgqs,bqkgh->bskh", scores_bar, q[a]))
        v_bar = v_bar.at[b].add(_einsum("bkgqs,bqkgh->bskh", weights.astype(v.dtype), out_bar[a]))
        return q_bar, (k_bar, v_bar)

    q_bar, (k_bar, v_bar) = _revolve(shards, ids, work, wide(q), (wide(k), wide(v)), (k, v))
    ids_bar: Any = np.zeros(ids.shape, jax.dtypes.float0)
    return q_bar.astype(q.dtype), k_bar.astype(k.dtype), v_bar.astype(v.dtype), ids_bar


_ring.defvjp(_ring_forward, _ring_backward)
