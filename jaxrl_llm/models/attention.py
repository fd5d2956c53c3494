"""Attention of whole rows, as in training, scoring and prefill: one function, several kernels.

"xla" works everywhere, in blocks of queries so that long rows need little memory; "splash" on TPUs
skips blocks that are masked out; "cudnn" is for GPUs.
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

AttentionImplementation = Literal["xla", "splash", "cudnn"]

# `prefix_ids` of rows in which no sequences share a prefix.
NO_PREFIXES = np.zeros((1, 0), np.int32)
# `key_blocks` of rows whose queries are compared with all keys.
ALL_KEY_BLOCKS = np.zeros((1, 0, 0), np.int32)
KEY_BLOCK = 64  # keys per block of `key_blocks`

QUERY_BLOCK = 512  # queries whose scores are in memory at one time
MAX_BLOCK_KEYS = QUERY_BLOCK  # keys of a query's blocks; their scores are in memory at one time
_SPLASH_LANES = 128  # splash needs a row length that is a multiple of it
_SPLASH_BLOCK = 512
_MASKED_SCORE = -0.7 * float(jnp.finfo(jnp.float32).max)  # below every score


class AttentionScoring(NamedTuple):
    """How products of queries and keys become attention weights."""

    scale: float = 0.0  # 0: H ** -0.5
    cap: float = 0.0  # scores become cap * tanh(score / cap); 0: they stay
    sinks: Float[Array, " N"] | None = None  # attention sink: a logit without a key, per head


DEFAULT_SCORING = AttentionScoring()


class KeyIndex(NamedTuple):
    """Index queries, keys and head weights of a sparse attention layer (DSA)."""

    q: Float[Array, "B T heads size"]
    k: Float[Array, "B keys size"]
    weights: Float[Array, "B T heads"]  # of each head's scores, float32


def implementation_for(
    requested: Literal["auto", "xla", "splash", "cudnn"],
    platform: str,
    compute_dtype: str,
    head_size: int,
) -> AttentionImplementation:
    """The attention kernel to use.

    "auto" is splash on TPUs, and cuDNN on GPUs with bfloat16 and head sizes of at most 128 that
    divide by 8.
    """
    if requested != "auto":
        return requested
    if platform == "tpu":
        return "splash"
    fits = compute_dtype == "bfloat16" and head_size % 8 == 0 and head_size <= 128
    return "cudnn" if platform in ("gpu", "cuda") and fits else "xla"


def supports_prefixes(implementation: AttentionImplementation) -> bool:
    """Whether a kernel supports `prefix_ids`; splash compares one segment id per token."""
    return implementation != "splash"


def chunked_segment_ids(
    chunk: int, ids: Int[Array | np.ndarray, "_ ids"], positions: Int[Array, "B T"]
) -> Any:
    """Segment ids [B, T] cut at every multiple of `chunk` positions, for chunked attention."""
    if not chunk or not ids.shape[1]:
        return ids
    max_chunks = positions.shape[1] // chunk + 1
    return jnp.where(ids != 0, ids * max_chunks + positions // chunk, 0)


def segment_causal_mask(
    segment_ids: Int[Array, "B T"],
    first: int | Int[Array, ""] = 0,
    length: int = 0,
    window: int = 0,
    prefix_ids: Int[Array | np.ndarray, "_ prefix"] = NO_PREFIXES,
    positions: Int[Array, "B T"] | None = None,
) -> Bool[Array, "B 1 queries keys"]:
    """The causal mask within segments: which keys each query may attend to.

    Args:
      first, length: Range of the queries; length 0: the whole row.
      window: Sliding window in tokens, the query included; 0: none.
      positions: In each token's own sequence; needed for a window with `prefix_ids`.
      prefix_ids: The earlier segment of the row that each token continues and attends to as well
        (a shared prefix); its own segment where it continues none.
    """
    length = length or segment_ids.shape[1]
    queries = (first + jnp.arange(length))[:, None]
    keys = jnp.arange(segment_ids.shape[1])
    visible = keys <= queries
    if window and positions is not None:
        query_positions = jax.lax.dynamic_slice_in_dim(positions, first, length, axis=1)
        visible = visible & (positions[:, None, :] > query_positions[:, :, None] - window)
    elif window:
        visible &= keys > queries - window
    same_segment = _segments_match(segment_ids, segment_ids, first, length)
    if prefix_ids.shape[1]:
        same_segment |= _segments_match(prefix_ids, segment_ids, first, length)
    return (same_segment & visible)[:, None]


def _segments_match(ids, segment_ids, first, length: int) -> Bool[Array, "B queries keys"]:
    query_ids = jax.lax.dynamic_slice_in_dim(ids, first, length, axis=1)
    return query_ids[:, :, None] == segment_ids[:, None, :]


def full_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K value"],
    segment_ids: Int[Array, "B T"],
    implementation: AttentionImplementation = "xla",
    *,
    window: int = 0,
    scoring: AttentionScoring = DEFAULT_SCORING,
    interpret: bool = False,
    prefix_ids: Int[Array | np.ndarray, "_ prefix"] = NO_PREFIXES,
    key_blocks: Int[Array | np.ndarray, "_ blocks seen"] = ALL_KEY_BLOCKS,
    positions: Int[Array, "B T"] | None = None,
    index: KeyIndex | None = None,
    top_keys: int = 0,
) -> Float[Array, "B T N value"]:
    """Causal attention within each segment: softmax(scale q k) v.

    Groups of N/K query heads share a key and value head, which is not repeated in memory (splash
    repeats it where the mesh splits heads further than there are key heads). Segment 0 is padding,
    and its results are undefined.

    Args:
      q, k, v: Rotated by their positions.
      window: Sliding window in tokens, the query included; 0: none.
      scoring: Scale, cap and sinks; cuDNN has neither caps nor sinks, XLA's attention replaces it.
      interpret: Runs splash without a TPU, slowly.
      prefix_ids: See `segment_causal_mask`; not with splash.
      key_blocks: For each of several equal blocks of queries, the indices of all blocks of keys
        that it attends to, padded with the number of blocks. Saves work for "xla" with prefixes.
      positions: In each token's own sequence; needed for a window with `prefix_ids`.
      index: Each query attends to its `top_keys` best keys only (sparse attention), with XLA's
        attention whatever the implementation.
    """
    has_prefixes = bool(prefix_ids.shape[1])
    if has_prefixes and (not supports_prefixes(implementation) or (window and positions is None)):
        raise ValueError(
            f"full_attention: prefix_ids with {implementation} and a window of {window}; rows"
            " of whole sequences have none, and a window needs positions"
        )
    if index is not None:
        attend = functools.partial(masked_attention, scoring=scoring)
        return _blockwise_attention(
            q, k, v, segment_ids, prefix_ids, attend, window, positions, index, top_keys
        )
    if implementation == "splash":
        return _splash(q, k, v, segment_ids, window, scoring, interpret)
    if not has_prefixes:
        positions = None
    if implementation == "cudnn" and _is_plain(scoring, q, v):
        mask = segment_causal_mask(
            segment_ids, window=window, prefix_ids=prefix_ids, positions=positions
        )
        return masked_attention(q, k, v, mask, scoring, "cudnn")
    attend = functools.partial(masked_attention, scoring=scoring)
    if has_prefixes and key_blocks.shape[2]:
        return _block_sparse_attention(
            q, k, v, segment_ids, prefix_ids, key_blocks, attend, window, positions
        )
    return _blockwise_attention(q, k, v, segment_ids, prefix_ids, attend, window, positions)


def _block_sparse_attention(
    q, k, v, segment_ids, prefix_ids, key_blocks, attend, window: int, positions
):
    """Attention of every block of queries to its own `key_blocks` only."""
    batch, length = segment_ids.shape
    count = key_blocks.shape[1]
    is_block = jnp.repeat(key_blocks < count, length // count, axis=-1)
    blocks = jnp.minimum(key_blocks, count - 1)

    def to_blocks(x):
        return x.reshape(batch, count, length // count, *x.shape[2:])

    def gather_keys(x):
        """The keys of each block of queries, [B, blocks, keys, ...]."""
        gathered = jax.vmap(lambda row, block_ids: row[block_ids])(to_blocks(x), blocks)
        return gathered.reshape(batch, count, -1, *x.shape[2:])

    row_index = jnp.broadcast_to(jnp.arange(length), segment_ids.shape)
    key_ids = gather_keys(segment_ids)[:, :, None]
    visible = (to_blocks(segment_ids)[..., None] == key_ids) | (
        to_blocks(prefix_ids)[..., None] == key_ids
    )
    visible &= gather_keys(row_index)[:, :, None] <= to_blocks(row_index)[..., None]
    visible &= is_block[:, :, None]
    if window:
        visible &= gather_keys(positions)[:, :, None] > to_blocks(positions)[..., None] - window
    merge_blocks = lambda x: x.reshape(batch * count, *x.shape[2:])  # noqa: E731
    queries, keys, values = (
        merge_blocks(x) for x in (to_blocks(q), gather_keys(k), gather_keys(v))
    )
    mixed = attend(queries, keys, values, mask=merge_blocks(visible)[:, None])
    return mixed.reshape(*q.shape[:-1], v.shape[-1])


def _blockwise_attention(
    q, k, v, segment_ids, prefix_ids, attend, window: int, positions, index=None, top_keys: int = 0
):
    """Attention of one block of queries after another.

    The backward pass recomputes scores, so that only those of one block are in memory at a time.
    """
    batch, length, num_heads, _ = q.shape
    mask_of = functools.partial(segment_causal_mask, window=window)
    index_queries = None if index is None else (index.q, index.weights)

    def selected(mask, index_queries):
        if index_queries is None:
            return mask
        index_q, weights = index_queries
        scores = index_scores(index_q, weights, index.k)
        return top_visible_keys(scores, mask[:, 0], top_keys)[:, None]

    if length <= QUERY_BLOCK:
        mask = mask_of(segment_ids, prefix_ids=prefix_ids, positions=positions)
        return attend(q, k, v, mask=selected(mask, index_queries))
    count = -(-length // QUERY_BLOCK)
    width = -(-length // count)
    num_padding = count * width - length  # queries without a token, at the end
    pad_row = lambda a: jnp.pad(a, ((0, 0), (0, num_padding)))  # noqa: E731
    padded_ids = pad_row(segment_ids)
    padded_prefixes = pad_row(prefix_ids) if prefix_ids.shape[1] else prefix_ids
    padded_positions = None if positions is None else pad_row(positions)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def attend_block(queries, index_queries, block):
        mask = mask_of(
            padded_ids, block * width, width, prefix_ids=padded_prefixes, positions=padded_positions
        )
        return attend(queries, k, v, mask=selected(mask[..., :length], index_queries))

    def to_blocks(a):
        a = jnp.pad(a, ((0, 0), (0, num_padding), *[(0, 0)] * (a.ndim - 2)))
        return jnp.moveaxis(a.reshape(batch, count, width, *a.shape[2:]), 1, 0)

    pieces = jax.tree.map(to_blocks, (q, index_queries))
    mixed = jax.lax.map(lambda piece: attend_block(*piece), (*pieces, jnp.arange(count)))
    return jnp.moveaxis(mixed, 0, 1).reshape(batch, -1, num_heads, v.shape[-1])[:, :length]


def index_scores(
    q: Float[Array, "B queries heads size"],
    weights: Float[Array, "B queries heads"],
    k: Float[Array, "B keys size"],
) -> Float[Array, "B queries keys"]:
    """The index scores of sparse attention, float32 (arXiv:2512.02556, Eq. 1).

    `sum_h weights_h relu(q_h k)`, one head after another: with all at once, the scores of a block
    of queries would be as many as those of the attention itself.
    """

    def add_head(total, head):
        head_q, weight = head
        products = jnp.einsum("bqd,bsd->bqs", head_q, k, preferred_element_type=jnp.float32)
        return total + weight[..., None] * jax.nn.relu(products), None

    heads = jnp.moveaxis(q, 2, 0), jnp.moveaxis(weights.astype(jnp.float32), 2, 0)
    total = jnp.zeros((*q.shape[:2], k.shape[1]), jnp.float32)
    return jax.lax.scan(add_head, total, heads)[0]


def top_visible_keys(
    scores: Float[Array, "B queries keys"],
    visible: Bool[Array, "_ queries keys"],
    top_keys: int,
) -> Bool[Array, "B queries keys"]:
    """The mask of the `top_keys` visible keys with the highest scores; of equal ones the first.

    All visible keys where they are fewer.
    """
    if scores.shape[-1] <= top_keys:
        return jnp.broadcast_to(visible, scores.shape)
    chosen = jax.lax.top_k(jnp.where(visible, scores, -jnp.inf), top_keys)[1]
    selected = jnp.zeros(scores.shape, bool)
    return jnp.put_along_axis(selected, chosen, True, axis=-1, inplace=False) & visible


def masked_attention(
    q: Float[Array, "B queries N H"],
    k: Float[Array, "B keys K H"],
    v: Float[Array, "B keys K value"],
    mask: Bool[Array, "B 1 queries keys"],
    scoring: AttentionScoring = DEFAULT_SCORING,
    implementation: Literal["xla", "cudnn"] = "xla",
) -> Float[Array, "B queries N value"]:
    """Attention of any queries to any keys under a mask; see `full_attention`."""
    if _is_plain(scoring, q, v):
        scale = scoring.scale or None
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask, scale=scale, implementation=implementation
        )
    batch, queries, num_heads, size = q.shape
    grouped = q.reshape(batch, queries, k.shape[2], -1, size)
    scores = jnp.einsum("bqkgh,bskh->bkgqs", grouped, k, preferred_element_type=jnp.float32)
    scores = soft_capped(scores * (scoring.scale or size**-0.5), scoring.cap)
    scores = jnp.where(mask[:, :, None], scores, _MASKED_SCORE)
    sinks = scoring.sinks
    head_sinks = None if sinks is None else sinks.reshape(k.shape[2], -1, 1)
    weights = softmax_with_sinks(scores, head_sinks).astype(v.dtype)
    mixed = jnp.einsum("bkgqs,bskh->bqkgh", weights, v)
    return mixed.reshape(batch, queries, num_heads, v.shape[-1])


def _is_plain(scoring: AttentionScoring, q: Array, v: Array) -> bool:
    return not scoring.cap and scoring.sinks is None and q.shape[-1] == v.shape[-1]


def soft_capped(x: Float[Array, "..."], cap: float) -> Float[Array, "..."]:
    """Soft cap: `cap * tanh(x / cap)` (arXiv:2408.00118, Sec. 2.1); `x` itself if `cap` is 0."""
    return cap * jnp.tanh(x / cap) if cap else x


def softmax_with_sinks(
    scores: Float[Array, "... keys"], sinks: Float[Array, "..."] | None
) -> Float[Array, "... keys"]:
    """The softmax over keys and a sink logit without a key (None: over keys only)."""
    if sinks is None:
        return jax.nn.softmax(scores, -1)
    sinks = sinks.astype(jnp.float32)[..., None]
    top = jnp.maximum(scores.max(-1, keepdims=True), sinks)
    weights = jnp.exp(scores - top)
    return weights / (weights.sum(-1, keepdims=True) + jnp.exp(sinks - top))


def _splash(q, k, v, segment_ids, window: int, scoring: AttentionScoring, interpret: bool):
    without_sinks = scoring._replace(sinks=None)
    local = functools.partial(
        _splash_local, window=window, scoring=without_sinks, interpret=interpret
    )
    sinks = () if scoring.sinks is None else (scoring.sinks,)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Manual in mesh.axis_types or math.prod(mesh.axis_sizes) == 1:
        return local(q, k, v, segment_ids, *sinks)
    # Under shard_map the kernel gets local rows, and the key heads of its local query heads.
    sizes = dict(mesh.shape)
    spec = functools.partial(partition_spec, rules=ACTIVATIONS, axis_sizes=sizes, units={})
    rows = spec(q.shape, ("batch", None, "heads", None))
    head_shards = sizes.get("tensor", 1) if rows[2] else 1
    if repeats := head_shards // math.gcd(k.shape[2], head_shards) - 1:
        k, v = (jnp.repeat(x, repeats + 1, axis=2) for x in (k, v))
    tokens = spec(segment_ids.shape, ("batch", None))
    specs = rows, rows, rows, tokens, *(PartitionSpec(rows[2]) for _ in sinks)
    mapped = jax.shard_map(local, in_specs=specs, out_specs=rows, check_vma=False)
    return mapped(q, k, v, segment_ids, *sinks)


def _splash_local(
    q, k, v, segment_ids, *sinks, window: int, scoring: AttentionScoring, interpret: bool
):
    length, num_heads, size = q.shape[1:]
    padded = -(-length // _SPLASH_LANES) * _SPLASH_LANES
    block = math.gcd(padded, _SPLASH_BLOCK)
    head_mask = (
        splash_mask.LocalMask((padded, padded), (window - 1, 0), 0)
        if window
        else splash_mask.CausalMask((padded, padded))
    )
    kernel = splash_kernel.make_splash_mha(
        splash_mask.MultiHeadMask([head_mask] * num_heads),
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
    num_padding = padded - length
    heads_first = lambda x: jnp.swapaxes(  # noqa: E731
        jnp.pad(x, ((0, 0), (0, num_padding), (0, 0), (0, 0))), 1, 2
    )
    ids = jnp.pad(segment_ids, ((0, 0), (0, num_padding)))
    attend_row = lambda q, k, v, ids: kernel(q, k, v, ids, *sinks)  # noqa: E731
    mixed = jax.vmap(attend_row)(
        heads_first(q * (scoring.scale or size**-0.5)),
        heads_first(k),
        heads_first(v),
        splash_kernel.SegmentIds(ids, ids),
    )
    return jnp.swapaxes(mixed, 1, 2)[:, :length].astype(q.dtype)
