"""Attention of whole rows, as in training, scoring and prefill: one function, several kernels.

"xla" works everywhere, in blocks of queries so that long rows need little memory; "splash" on TPUs
skips what no query sees; "cudnn" is for GPUs.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash_kernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.sharding import AxisType, PartitionSpec
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


class Scoring(NamedTuple):
    """How products of queries and keys become weights of values."""

    scale: float = 0.0  # 0: 1 / sqrt(H)
    cap: float = 0.0  # scores become cap * tanh(score / cap); 0: they stay
    sinks: Float[Array, " N"] | None = None  # a score of no key for each head


PLAIN = Scoring()


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


def by_chunk(
    chunk: int, ids: Int[Array | np.ndarray, "_ ids"], positions: Int[Array, "B T"]
) -> Any:
    """Returns ids [B, T] of segments that end where a position is a multiple of `chunk`."""
    if not chunk or not ids.shape[1]:
        return ids
    most = positions.shape[1] // chunk + 1
    return jnp.where(ids != 0, ids * most + positions // chunk, 0)


def segment_causal_mask(
    segment_ids: Int[Array, "B T"],
    first: int | Int[Array, ""] = 0,
    length: int = 0,
    window: int = 0,
    prefix_ids: Int[Array | np.ndarray, "_ prefix"] = NOTHING_SHARED,
    positions: Int[Array, "B T"] | None = None,
) -> Bool[Array, "B 1 queries keys"]:
    """Returns which key each query may see: its own segment, not the future.

    Args:
      first, length: Of the queries; length 0: the whole row.
      window: Tokens back from the query, itself included, that it sees; 0: all.
      positions: In each token's own sequence, for a window with `prefix_ids`.
      prefix_ids: The earlier segment of the row that each token continues and sees as well; its
        own segment where it continues none.
    """
    length = length or segment_ids.shape[1]
    queries = (first + jnp.arange(length))[:, None]
    keys = jnp.arange(segment_ids.shape[1])
    sees = keys <= queries
    if window and positions is not None:
        of_queries = jax.lax.dynamic_slice_in_dim(positions, first, length, axis=1)
        sees = sees & (positions[:, None, :] > of_queries[:, :, None] - window)
    elif window:
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
    v: Float[Array, "B T K value"],
    segment_ids: Int[Array, "B T"],
    implementation: Implementation = "xla",
    *,
    window: int = 0,
    scoring: Scoring = PLAIN,
    interpret: bool = False,
    prefix_ids: Int[Array | np.ndarray, "_ prefix"] = NOTHING_SHARED,
    key_blocks: Int[Array | np.ndarray, "_ blocks seen"] = ALL_BLOCKS,
    positions: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N value"]:
    """Returns softmax(q k scale) v inside each segment, causally.

    Groups of N/K query heads share a key and value head, which is not repeated in memory (splash
    repeats it where the mesh splits heads further than there are key heads). Segment 0 is padding,
    whose results mean nothing.

    Args:
      q, k, v: Rotated by their positions.
      window: Tokens back, itself included, that a query sees; 0: all.
      scoring: How products become weights. cuDNN has neither caps nor sinks.
      interpret: Runs splash without a TPU, slowly.
      prefix_ids: As of `segment_causal_mask`; not with splash.
      key_blocks: For each of several equal blocks of queries, the numbers of all blocks of keys
        that it sees; the number of blocks fills the rest. Saves work for "xla" with prefixes.
      positions: In each token's own sequence; needed for a window with `prefix_ids`.
    """
    shared = bool(prefix_ids.shape[1])
    if shared and (not shares_prefixes(implementation) or (window and positions is None)):
        raise ValueError(
            f"full_attention: prefix_ids with {implementation} and a window of {window}; rows"
            " of whole sequences have none, and a window needs positions"
        )
    if implementation == "splash":
        return _splash(q, k, v, segment_ids, window, scoring, interpret)
    if not shared:
        positions = None
    if implementation == "cudnn" and _is_plain(scoring, q, v):
        mask = segment_causal_mask(
            segment_ids, window=window, prefix_ids=prefix_ids, positions=positions
        )
        return masked_attention(q, k, v, mask, scoring, "cudnn")
    attend = functools.partial(masked_attention, scoring=scoring)
    if shared and key_blocks.shape[2]:
        return _in_key_blocks(
            q, k, v, segment_ids, prefix_ids, key_blocks, attend, window, positions
        )
    return _in_blocks(q, k, v, segment_ids, prefix_ids, attend, window, positions)


def _in_key_blocks(q, k, v, segment_ids, prefix_ids, key_blocks, attend, window: int, positions):
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

    places = jnp.broadcast_to(jnp.arange(length), segment_ids.shape)
    ids = found(segment_ids)[:, :, None]
    sees = (cut(segment_ids)[..., None] == ids) | (cut(prefix_ids)[..., None] == ids)
    sees &= found(places)[:, :, None] <= cut(places)[..., None]
    sees &= is_block[:, :, None]
    if window:
        sees &= found(positions)[:, :, None] > cut(positions)[..., None] - window
    together = lambda x: x.reshape(batch * count, *x.shape[2:])  # noqa: E731
    queries, keys, values = (together(x) for x in (cut(q), found(k), found(v)))
    mixed = attend(queries, keys, values, mask=together(sees)[:, None])
    return mixed.reshape(*q.shape[:-1], v.shape[-1])


def _in_blocks(q, k, v, segment_ids, prefix_ids, attend, window: int, positions):
    """Returns attention of one block of queries after another.

    The backward pass computes scores again, so that only one block's exist at a time.
    """
    batch, length, num_heads, size = q.shape
    masked = functools.partial(segment_causal_mask, window=window)
    if length <= QUERY_BLOCK:
        mask = masked(segment_ids, prefix_ids=prefix_ids, positions=positions)
        return attend(q, k, v, mask=mask)
    count = -(-length // QUERY_BLOCK)
    width = -(-length // count)
    more = count * width - length  # queries without a token, at the end
    longer = lambda a: jnp.pad(a, ((0, 0), (0, more)))  # noqa: E731
    ids = longer(segment_ids)
    prefixes = longer(prefix_ids) if prefix_ids.shape[1] else prefix_ids
    places = None if positions is None else longer(positions)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block(queries, number):
        mask = masked(ids, number * width, width, prefix_ids=prefixes, positions=places)
        return attend(queries, k, v, mask=mask[..., :length])

    queries = jnp.pad(q, ((0, 0), (0, more), (0, 0), (0, 0)))
    queries = jnp.moveaxis(queries.reshape(batch, count, width, num_heads, size), 1, 0)
    mixed = jax.lax.map(lambda piece: block(*piece), (queries, jnp.arange(count)))
    return jnp.moveaxis(mixed, 0, 1).reshape(batch, -1, num_heads, v.shape[-1])[:, :length]


def masked_attention(
    q: Float[Array, "B queries N H"],
    k: Float[Array, "B keys K H"],
    v: Float[Array, "B keys K value"],
    mask: Bool[Array, "B 1 queries keys"],
    scoring: Scoring = PLAIN,
    implementation: Literal["xla", "cudnn"] = "xla",
) -> Float[Array, "B queries N value"]:
    """Returns attention of any queries to the keys that the mask says; as `full_attention`."""
    if _is_plain(scoring, q, v):
        scale = scoring.scale or None
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask, scale=scale, implementation=implementation
        )
    batch, queries, num_heads, size = q.shape
    grouped = q.reshape(batch, queries, k.shape[2], -1, size)
    scores = jnp.einsum("bqkgh,bskh->bkgqs", grouped, k, preferred_element_type=jnp.float32)
    scores = capped(scores * (scoring.scale or size**-0.5), scoring.cap)
    scores = jnp.where(mask[:, :, None], scores, _NEVER)
    sinks = scoring.sinks
    of_heads = None if sinks is None else sinks.reshape(k.shape[2], -1, 1)
    weights = softmax_with_sinks(scores, of_heads).astype(v.dtype)
    mixed = jnp.einsum("bkgqs,bskh->bqkgh", weights, v)
    return mixed.reshape(batch, queries, num_heads, v.shape[-1])


def _is_plain(scoring: Scoring, q: Array, v: Array) -> bool:
    return not scoring.cap and scoring.sinks is None and q.shape[-1] == v.shape[-1]


def capped(x: Float[Array, "..."], cap: float) -> Float[Array, "..."]:
    """Returns `cap * tanh(x / cap)` (arXiv:2408.00118, Sec. 2.1); `x` itself if `cap` is 0."""
    return cap * jnp.tanh(x / cap) if cap else x


def softmax_with_sinks(
    scores: Float[Array, "... keys"], sinks: Float[Array, "..."] | None
) -> Float[Array, "... keys"]:
    """Returns the weights of keys beside a score of no key, `sinks` (None: there is none)."""
    if sinks is None:
        return jax.nn.softmax(scores, -1)
    sinks = sinks.astype(jnp.float32)[..., None]
    top = jnp.maximum(scores.max(-1, keepdims=True), sinks)
    weights = jnp.exp(scores - top)
    return weights / (weights.sum(-1, keepdims=True) + jnp.exp(sinks - top))


def _splash(q, k, v, segment_ids, window: int, scoring: Scoring, interpret: bool):
    plain = scoring._replace(sinks=None)
    local = functools.partial(_splash_local, window=window, scoring=plain, interpret=interpret)
    given = () if scoring.sinks is None else (scoring.sinks,)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Manual in mesh.axis_types or math.prod(mesh.axis_sizes) == 1:
        return local(q, k, v, segment_ids, *given)
    # The kernel gets local arrays: its own rows, and the key heads of its own query heads.
    sizes = dict(mesh.shape)
    spec = functools.partial(partition_spec, rules=ACTIVATIONS, axis_sizes=sizes, units={})
    rows = spec(q.shape, ("batch", None, "heads", None))
    ways = sizes.get("tensor", 1) if rows[2] else 1
    if repeats := ways // math.gcd(k.shape[2], ways) - 1:
        k, v = (jnp.repeat(x, repeats + 1, axis=2) for x in (k, v))
    tokens = spec(segment_ids.shape, ("batch", None))
    specs = rows, rows, rows, tokens, *(PartitionSpec(rows[2]) for _ in given)
    mapped = jax.shard_map(local, in_specs=specs, out_specs=rows, check_vma=False)
    return mapped(q, k, v, segment_ids, *given)


def _splash_local(q, k, v, segment_ids, *sinks, window: int, scoring: Scoring, interpret: bool):
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
        attn_logits_soft_cap=scoring.cap or None,
        interpret=interpret,
    )
    more = padded - length
    heads_first = lambda x: jnp.swapaxes(  # noqa: E731
        jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))), 1, 2
    )
    ids = jnp.pad(segment_ids, ((0, 0), (0, more)))
    one_row = lambda q, k, v, ids: kernel(q, k, v, ids, *sinks)  # noqa: E731
    mixed = jax.vmap(one_row)(
        heads_first(q * (scoring.scale or size**-0.5)),
        heads_first(k),
        heads_first(v),
        splash_kernel.SegmentIds(ids, ids),
    )
    return jnp.swapaxes(mixed, 1, 2)[:, :length].astype(q.dtype)
