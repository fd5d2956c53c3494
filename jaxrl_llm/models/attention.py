"""Attention of whole rows, as in training, scoring and prefill: one function, several kernels.

"xla" works everywhere, in blocks of queries so that long rows need little memory; "splash" on TPUs
skips what no query sees; "cudnn" is for GPUs.
"""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash_kernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.sharding import AxisType
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.sharding.mesh import ACTIVATIONS, partition_spec

Implementation = Literal["xla", "splash", "cudnn"]

# `prefix_ids` of rows in which no sequences share a prefix.
NOTHING_SHARED = np.zeros((1, 0), np.int32)
# `key_blocks` of rows whose queries are compared with all keys.
ALL_BLOCKS = np.zeros((1, 0, 0), np.int32)
KEY_BLOCK = 64  # keys that queries see together, or together do not

QUERY_BLOCK = 512  # queries whose scores exist at one time
MOST_KEYS = QUERY_BLOCK  # of the blocks that a query sees: their scores exist at one time
_SPLASH_LANES = 128  # splash works on rows of a multiple of it
_SPLASH_BLOCK = 512
_NEVER = -0.7 * float(jnp.finfo(jnp.float32).max)  # score of a key that is not seen


def implementation_for(
    wanted: Literal["auto", "xla", "splash", "cudnn"],
    platform: str,
    compute_dtype: str,
    head_size: int,
) -> Implementation:
    """Returns the kernel of a run.

    "auto" is splash on TPUs, and cuDNN on GPUs with bfloat16 and head sizes of at most 128 that
    divide by 8.
    """
    if wanted != "auto":
        return wanted
    if platform == "tpu":
        return "splash"
    fits = compute_dtype == "bfloat16" and head_size % 8 == 0 and head_size <= 128
    return "cudnn" if platform in ("gpu", "cuda") and fits else "xla"


def shares_prefixes(implementation: Implementation) -> bool:
    """Returns whether a kernel can use `prefix_ids`; splash compares one number a token."""
    return implementation != "splash"


def segment_causal_mask(
    segment_ids: Int[Array, "B T"],
    first: int | Int[Array, ""] = 0,
    length: int = 0,
    window: int = 0,
    prefix_ids: Int[Array | np.ndarray, "_ prefix"] = NOTHING_SHARED,
) -> Bool[Array, "B 1 queries keys"]:
    """Returns which key each query may see: its own segment, not the future.

    Args:
      first, length: Of the queries; length 0: the whole row.
      window: Tokens back from the query, itself included, that it sees; 0: all.
      prefix_ids: The earlier segment of the row that each token continues and sees as well; its
        own segment where it continues none.
    """
    length = length or segment_ids.shape[1]
    queries = (first + jnp.arange(length))[:, None]
    keys = jnp.arange(segment_ids.shape[1])
    sees = keys <= queries
    if window:
        sees &= keys > queries - window
    same = _of_segment(segment_ids, segment_ids, first, length)
    if prefix_ids.shape[1]:
        same |= _of_segment(prefix_ids, segment_ids, first, length)
    return (same & sees)[:, None]


def _of_segment(wanted, segment_ids, first, length: int) -> Bool[Array, "B queries keys"]:
    of_queries = jax.lax.dynamic_slice_in_dim(wanted, first, length, axis=1)
    return of_queries[:, :, None] == segment_ids[:, None, :]


def full_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"],
    implementation: Implementation = "xla",
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    interpret: bool = False,
    prefix_ids: Int[Array | np.ndarray, "_ prefix"] = NOTHING_SHARED,
    key_blocks: Int[Array | np.ndarray, "_ blocks seen"] = ALL_BLOCKS,
) -> Float[Array, "B T N H"]:
    """Returns softmax(q k / sqrt(H)) v inside each segment, causally.

    Groups of N/K query heads share a key and value head, which is not repeated in memory (splash
    repeats it where the mesh splits heads further than there are key heads). Segment 0 is padding,
    whose results mean nothing.

    Args:
      q, k, v: Rotated by their positions.
      window: Tokens back, itself included, that a query sees; 0: all.
      soft_cap: Scores become `soft_cap * tanh(score / soft_cap)`; 0: unchanged. cuDNN has none.
      interpret: Runs splash without a TPU, slowly.
      prefix_ids: As of `segment_causal_mask`; not with splash or a window.
      key_blocks: For each of several equal blocks of queries, the numbers of all blocks of keys
        that it sees; the number of blocks fills the rest. Saves work for "xla" with prefixes.
    """
    if prefix_ids.shape[1] and (window or not shares_prefixes(implementation)):
        raise ValueError(
            f"full_attention: prefix_ids with {implementation} and a window of {window}; rows"
            " of whole sequences have none"
        )
    if implementation == "splash":
        return _splash(q, k, v, segment_ids, window, soft_cap, interpret)
    if implementation == "cudnn" and not soft_cap:
        mask = segment_causal_mask(segment_ids, window=window, prefix_ids=prefix_ids)
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="cudnn")
    if prefix_ids.shape[1] and key_blocks.shape[2]:
        return _in_key_blocks(q, k, v, segment_ids, prefix_ids, key_blocks, soft_cap)
    return _in_blocks(q, k, v, segment_ids, prefix_ids, window, soft_cap)


def _in_key_blocks(q, k, v, segment_ids, prefix_ids, key_blocks, soft_cap: float):
    """Returns attention of every block of queries to the blocks of keys that it sees."""
    batch, length = segment_ids.shape
    count = key_blocks.shape[1]
    is_block = jnp.repeat(key_blocks < count, length // count, axis=-1)
    blocks = jnp.minimum(key_blocks, count - 1)

    def cut(x):
        return x.reshape(batch, count, length // count, *x.shape[2:])

    def found(x):
        """Returns the keys of each block of queries, [B, blocks, keys, ...]."""
        chosen = jax.vmap(lambda row, wanted: row[wanted])(cut(x), blocks)
        return chosen.reshape(batch, count, -1, *x.shape[2:])

    positions = jnp.broadcast_to(jnp.arange(length), segment_ids.shape)
    ids = found(segment_ids)[:, :, None]
    sees = (cut(segment_ids)[..., None] == ids) | (cut(prefix_ids)[..., None] == ids)
    sees &= found(positions)[:, :, None] <= cut(positions)[..., None]
    sees &= is_block[:, :, None]
    together = lambda x: x.reshape(batch * count, *x.shape[2:])  # noqa: E731
    attend = _xla(soft_cap)
    queries, keys, values = (together(x) for x in (cut(q), found(k), found(v)))
    return attend(queries, keys, values, mask=together(sees)[:, None]).reshape(q.shape)


def _in_blocks(q, k, v, segment_ids, prefix_ids, window: int, soft_cap: float):
    """Returns attention of one block of queries after another.

    The backward pass computes scores again, so that only one block's exist at a time.
    """
    batch, length, num_heads, size = q.shape
    attend = _xla(soft_cap)
    if length <= QUERY_BLOCK:
        mask = segment_causal_mask(segment_ids, window=window, prefix_ids=prefix_ids)
        return attend(q, k, v, mask=mask)
    count = -(-length // QUERY_BLOCK)
    width = -(-length // count)
    more = count * width - length  # queries without a token, at the end
    ids = jnp.pad(segment_ids, ((0, 0), (0, more)))
    prefixes = jnp.pad(prefix_ids, ((0, 0), (0, more))) if prefix_ids.shape[1] else prefix_ids

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block(queries, number):
        mask = segment_causal_mask(ids, number * width, width, window, prefixes)[..., :length]
        return attend(queries, k, v, mask=mask)

    queries = jnp.pad(q, ((0, 0), (0, more), (0, 0), (0, 0)))
    queries = jnp.moveaxis(queries.reshape(batch, count, width, num_heads, size), 1, 0)
    mixed = jax.lax.map(lambda piece: block(*piece), (queries, jnp.arange(count)))
    return jnp.moveaxis(mixed, 0, 1).reshape(batch, -1, num_heads, size)[:, :length]


def _xla(soft_cap: float):
    if soft_cap:
        return functools.partial(_capped, soft_cap=soft_cap)
    return functools.partial(jax.nn.dot_product_attention, implementation="xla")


def _capped(q, k, v, mask: Bool[Array, "B 1 queries keys"], soft_cap: float):
    batch, queries, _, size = q.shape
    grouped = q.reshape(batch, queries, k.shape[2], -1, size)
    scores = jnp.einsum("bqkgh,bskh->bkgqs", grouped, k, preferred_element_type=jnp.float32)
    scores = soft_cap * jnp.tanh(scores * (size**-0.5 / soft_cap))
    weights = jax.nn.softmax(jnp.where(mask[:, :, None], scores, _NEVER), -1).astype(v.dtype)
    return jnp.einsum("bkgqs,bskh->bqkgh", weights, v).reshape(q.shape)


def _splash(q, k, v, segment_ids, window: int, soft_cap: float, interpret: bool):
    local = functools.partial(_splash_local, window=window, soft_cap=soft_cap, interpret=interpret)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Manual in mesh.axis_types or math.prod(mesh.axis_sizes) == 1:
        return local(q, k, v, segment_ids)
    # The kernel gets local arrays: its own rows, and the key heads of its own query heads.
    sizes = dict(mesh.shape)
    spec = functools.partial(partition_spec, rules=ACTIVATIONS, axis_sizes=sizes, units={})
    rows = spec(q.shape, ("batch", None, "heads", None))
    ways = sizes.get("tensor", 1) if rows[2] else 1
    if repeats := ways // math.gcd(k.shape[2], ways) - 1:
        k, v = (jnp.repeat(x, repeats + 1, axis=2) for x in (k, v))
    tokens = spec(segment_ids.shape, ("batch", None))
    return jax.shard_map(
        local, in_specs=(rows, rows, rows, tokens), out_specs=rows, check_vma=False
    )(q, k, v, segment_ids)


def _splash_local(q, k, v, segment_ids, *, window: int, soft_cap: float, interpret: bool):
    length, num_heads, size = q.shape[1:]
    padded = -(-length // _SPLASH_LANES) * _SPLASH_LANES
    block = math.gcd(padded, _SPLASH_BLOCK)
    one_head = (
        splash_mask.LocalMask((padded, padded), (window - 1, 0), 0)
        if window
        else splash_mask.CausalMask((padded, padded))
    )
    kernel = splash_kernel.make_splash_mha(
        splash_mask.MultiHeadMask([one_head] * num_heads),
        block_sizes=splash_kernel.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=soft_cap or None,
        interpret=interpret,
    )
    more = padded - length
    heads_first = lambda x: jnp.swapaxes(  # noqa: E731
        jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))), 1, 2
    )
    ids = jnp.pad(segment_ids, ((0, 0), (0, more)))
    mixed = jax.vmap(kernel)(
        heads_first(q * size**-0.5),
        heads_first(k),
        heads_first(v),
        splash_kernel.SegmentIds(ids, ids),
    )
    return jnp.swapaxes(mixed, 1, 2)[:, :length].astype(q.dtype)
