"""Attention of decode steps: a few queries per slot over its KV-cache pages and recent tokens."""

import functools
import importlib.util
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.attention import (
    DEFAULT_SCORING,
    AttentionScoring,
    index_scores,
    soft_capped,
    softmax_with_sinks,
    top_visible_keys,
)
from jaxrl_llm.models.attention_modules import AttentionInputs
from jaxrl_llm.models.recurrent.sequence_memory import paged_layers
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout.engine import kv_cache, paged_attention_tpu
from jaxrl_llm.rollout.engine.kv_cache import Cache, CacheSharding, ContiguousView, PagedView
from jaxrl_llm.rollout.engine.paged_attention_tpu import (
    AttentionWindow,
    OnlineSoftmax,
    PagedQueries,
)

AttentionKind = tuple[int, int]  # sliding window and chunk size of a layer; 0: none
# How decode steps read the KV cache. "gather": sequences are copied out of their pages once per
# chunk of steps. Else pages are read in place: by our CPU kernel ("own"), a Pallas kernel for TPUs
# or GPUs, or a loop in plain JAX.
CacheReader = Literal["gather", "own", "tpu", "gpu", "loop"]


def cache_reader_for(network: Network, device: Any) -> CacheReader:
    """The way decode steps read the KV cache on this kind of device."""
    if network.decode_attention:
        return "own"
    # The selection of keys needs the scores of all keys of a sequence side by side.
    if network.shape.indexer:
        return "gather"
    # On a CPU a matmul with a slice of an array copies the slice, so pages are gathered once.
    if device.platform in ("cpu", "tpu"):
        return {"cpu": "gather", "tpu": "tpu"}[device.platform]  # type: ignore[return-value]
    # Triton needs Ampere (8.0), for 8-bit caches Ada (8.9). AMD GPUs report "gfx942". A later JAX
    # will drop Triton.
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return "loop"
    capability = re.fullmatch(r"(\d+)\.(\d)", getattr(device, "compute_capability", ""))
    least = (8, 9) if jnp.dtype(network.cached_dtype).itemsize == 1 else (8, 0)
    return "gpu" if capability and (*map(int, capability.groups()),) >= least else "loop"


class Visibility(NamedTuple):
    """Visibility masks for the queries of a step, keyed by the attention kinds of the network."""

    query_positions: Int[Array, "S Q"]  # positions of the queries
    first_visible: Mapping[AttentionKind, Int[Array, "S Q"]]  # first visible position in the cache
    # one past the last position in the cache; 0: nothing is visible there
    cached_ends: Int[Array, " S"]
    recent_mask: Mapping[AttentionKind, Bool[Array, "S Q recent"]]
    # gathered positions; {}: pages are read
    cached_mask: Mapping[AttentionKind, Bool[Array, "S Q window"]]


def make_visibility(
    shape: Architecture,
    query_positions: Int[Array, "S Q"],
    cached_ends: Int[Array, " S"],
    recent_positions: Int[Array, "S recent"],
    cache_view: ContiguousView | PagedView,
) -> Visibility:
    """Visibility of cached and recent tokens to queries at `query_positions`."""
    firsts = {kind: AttentionWindow(*kind).first_visible(query_positions) for kind in _kinds(shape)}

    def in_range(at, start, end):
        return (at >= start[..., None]) & (at < end)

    return Visibility(
        query_positions,
        firsts,
        cached_ends,
        {
            k: in_range(recent_positions[:, None], f, query_positions[..., None] + 1)
            for k, f in firsts.items()
        },
        {
            kind: in_range(positions[:, None], firsts[kind], cached_ends[:, None, None])
            for kind, positions in _gathered_positions(shape, cache_view, cached_ends).items()
        },
    )


def _gathered_positions(
    shape: Architecture, cache_view: ContiguousView | PagedView, cached_ends: Int[Array, " S"]
) -> dict[AttentionKind, Int[Array, "S _"]]:
    """Positions of the gathered entries of layers of each kind; {}: pages are read in place."""
    if isinstance(cache_view, PagedView):
        return {}
    widths = zip(_paged_kinds(shape), (keys.shape[3] for keys in cache_view.keys), strict=True)
    return {
        kind: kv_cache.gathered_positions(width, cached_ends)
        for kind, width in dict(widths).items()
    }


def _paged_kinds(shape: Architecture) -> list[AttentionKind]:
    """The attention kinds of the layers with pages, in layer order."""
    kinds = (shape.layer_types[i] for i in paged_layers(shape))
    return [(kind.window, kind.chunk) for kind in kinds]


def _kinds(shape: Architecture) -> list[AttentionKind]:
    return sorted({(kind.window, kind.chunk) for kind in shape.layer_types})


def make_cache_view(
    shape: Architecture,
    cache: Cache,
    split: CacheSharding,
    table: Int[Array, "S pages"],
    query_positions: Int[Array, " S"],
    window: int,
    reader: CacheReader,
) -> ContiguousView | PagedView:
    """The KV cache as the attention of a chunk of decode steps reads it.

    `query_positions` are those of the chunk's first queries; each slot reads the pages before it.
    """
    if reader == "gather":
        return kv_cache.gather_pages(cache, split, table, window, by_slot=True)
    if reader != "tpu":
        return PagedView(cache, table, {}, reader)
    pages_per_step = paged_attention_tpu.pages_per_step(cache.keys[0], shape.kv_cache_sizes[2])
    shards = kv_cache.num_shards(jax.sharding.get_abstract_mesh(), split.slot_axes)
    # Layers of a kind have rings of the same size.
    layers = {kind: layer for layer, kind in enumerate(_paged_kinds(shape))}
    tables = {
        kind: kv_cache.ring_table(cache.layer_rings[layer], table) for kind, layer in layers.items()
    }

    def schedules(tables, query_positions):
        page_sizes = cache.page_tokens, pages_per_step
        return {
            kind: paged_attention_tpu.page_schedule(
                kv_cache.local_page_ids(tables[kind], cache.keys[layer].shape[0] // shards, split),
                AttentionWindow(*kind).first_visible(query_positions),
                query_positions,
                *page_sizes,
            )
            for kind, layer in layers.items()
        }

    rows = PartitionSpec(split.slot_axes)
    schedule = kv_cache.map_over_shards(schedules, (rows, rows), rows)(tables, query_positions)
    return PagedView(cache, table, schedule, reader)


def cached_attention(
    network: Network,
    cache_view: ContiguousView | PagedView,
    split: CacheSharding,
    layer: int,
    projected: AttentionInputs,
    recent: tuple[Float[Array, "S K _ _"], ...],
    visibility: Visibility,
) -> Float[Array, "S Q N value"]:
    """Attention of a layer's queries over the cache and recent tokens.

    `recent_mask` are the keys of the layer's recent tokens, and their values if it caches any.
    """
    kind = projected.window, projected.chunk
    if isinstance(cache_view, ContiguousView):
        visible = jnp.concatenate(
            [visibility.cached_mask[kind], visibility.recent_mask[kind]], axis=-1
        )
        keys: tuple[Array, ...] = (cache_view.keys[layer], recent[0])
        if projected.key_index is not None:
            size = projected.key_index.k.shape[-1]
            index_keys = [block[:, 0, -size:] for block in keys]
            keys = tuple(block[:, :, :-size] for block in keys)
            visible = _selected_keys(projected, index_keys, visible)
        values = (cache_view.values[layer], recent[1]) if cache_view.values else ()
        return gathered_attention(
            projected.q, keys, values, visible, projected.scoring, projected.value_size
        )
    assert projected.key_index is None, "see `cache_reader_for`"
    cache = cache_view.cache
    pages = cache.keys[layer], *cache.values[layer : layer + 1]
    ring = cache.layer_rings[layer]
    table = kv_cache.ring_table(ring, cache_view.table, cache_view.slots)
    if network.decode_attention:
        return network.decode_attention(
            projected.q,
            *pages,
            table,
            visibility.first_visible[kind],
            visibility.cached_ends,
            *recent,
            visibility.recent_mask[kind],
        )
    return _over_pages(cache_view, split, projected, pages, table, recent, visibility)


def _selected_keys(
    projected: AttentionInputs,
    index_keys: Sequence[Float[Array, "S size _"]],
    visible: Bool[Array, "S Q keys"],
) -> Bool[Array, "S Q keys"]:
    """The visible keys that sparse attention selects; the keys of the index come in blocks."""
    index = projected.key_index
    assert index is not None
    scores = [
        index_scores(index.q, index.weights, block.astype(index.q.dtype).swapaxes(1, 2))
        for block in index_keys
    ]
    return top_visible_keys(jnp.concatenate(scores, axis=-1), visible, projected.top_keys)


def _over_pages(
    cache_view: PagedView,
    split: CacheSharding,
    projected: AttentionInputs,
    pages: tuple[Array, ...],
    table: Int[Array, "S pages"],
    recent: tuple[Float[Array, "S K _ _"], ...],
    visibility: Visibility,
) -> Float[Array, "S Q N value"]:
    """`cached_attention` with pages read in place: merges partial softmaxes over pages and recent
    tokens.
    """
    kind = projected.window, projected.chunk
    slots, width, num_heads, size = projected.q.shape
    num_kv_heads = recent[0].shape[1]
    group = num_heads // num_kv_heads
    # The queries of all positions and of all heads that share a KV head are rows of one matmul.
    grouped = projected.q.reshape(slots, width, num_kv_heads, group, size).swapaxes(1, 2)
    rows = grouped.reshape(slots, num_kv_heads, -1, size)
    value_size = recent[1].shape[3] if len(recent) == 2 else projected.value_size

    def attend_pages(rows, pages, table, schedule, places, ends) -> OnlineSoftmax:
        queries = PagedQueries(
            rows=rows,
            keys=pages[0],
            values=pages[1] if len(pages) == 2 else None,
            query_positions=places,
            ends=ends,
            group=group,
            reach=AttentionWindow(*kind),
            scoring=projected.scoring._replace(sinks=None),
            value_size=value_size,
        )
        if schedule is not None:
            return paged_attention_tpu.tpu_partial_attention(queries, schedule)
        shard_table = kv_cache.local_page_ids(table, pages[0].shape[0], split)
        page_attention = paged_attention_tpu.loop_partial_attention
        if cache_view.reader == "gpu":
            from jaxrl_llm.rollout.engine import paged_attention_gpu

            if paged_attention_gpu.kernel_supports(pages, value_size):
                page_attention = paged_attention_gpu.gpu_partial_attention
        return page_attention(queries, shard_table)

    by_slot, array_spec = PartitionSpec(split.slot_axes), split.array_spec
    in_specs = array_spec, array_spec, by_slot, by_slot, by_slot, by_slot
    mapped = kv_cache.map_over_shards(attend_pages, in_specs, array_spec)
    schedule = cache_view.page_schedules.get(kind)
    page_sums = mapped(
        rows,
        pages,
        table,
        schedule,
        visibility.query_positions[:, 0],
        visibility.cached_ends,
    )
    recent = tuple(array.astype(rows.dtype) for array in recent)
    f32 = {"preferred_element_type": jnp.float32}
    scores = jnp.einsum("skrh,skhw->skrw", rows, recent[0], **f32)
    scores = scores * (projected.scoring.scale or size**-0.5)
    visible = jnp.repeat(visibility.recent_mask[kind], group, axis=1)[:, None]
    recent_sums = paged_attention_tpu.masked_softmax(scores, visible, projected.scoring, rows.dtype)
    if len(recent) == 2:
        output = jnp.einsum("skrw,skwh->skrh", recent_sums.weighted_values, recent[1], **f32)
    else:
        output = jnp.einsum(
            "skrw,skhw->skrh", recent_sums.weighted_values, recent[0][:, :, :value_size], **f32
        )
    sinks = projected.scoring.sinks
    row_sinks = None if sinks is None else jnp.tile(sinks.reshape(num_kv_heads, -1), width)
    output = paged_attention_tpu.merged_attention(
        page_sums, recent_sums._replace(weighted_values=output), row_sinks
    )
    output = output.reshape(slots, num_kv_heads, width, group, value_size).swapaxes(1, 2)
    return output.reshape(slots, width, num_heads, value_size).astype(projected.q.dtype)


def gathered_attention(
    q: Float[Array, "S Q N H"],
    keys: Sequence[Float[Array, "S K H _"]],
    values: Sequence[Float[Array, "S K _ value"]],
    visible: Bool[Array, "S Q window"],
    scoring: AttentionScoring = DEFAULT_SCORING,
    value_size: int = 0,
) -> Float[Array, "S Q N value"]:
    """Attention of a few queries per slot, with the same rounding as `full_attention`.

    `keys` and `values` come in blocks along the sequence. Without `values`, they are the first
    `value_size` dims of the keys (latent attention).
    """
    slots, width, num_heads, size = q.shape
    num_kv_heads = keys[0].shape[1]
    # The queries of all positions and of all heads that share a KV head are rows of one matmul.
    grouped = q.reshape(slots, width, num_kv_heads, -1, size).swapaxes(1, 2)
    rows = grouped.reshape(slots, num_kv_heads, -1, size)
    f32 = {"preferred_element_type": jnp.float32}
    to_compute_dtype = lambda block: block.astype(q.dtype)  # noqa: E731
    keys, values = [*map(to_compute_dtype, keys)], [*map(to_compute_dtype, values)]
    scores = [jnp.einsum("skrh,skhw->skrw", rows, block, **f32) for block in keys]
    row_mask = jnp.repeat(visible, num_heads // num_kv_heads, axis=1)[:, None]
    all_scores = jnp.concatenate(scores, axis=-1)
    if scoring.scale:
        scaled = all_scores * scoring.scale
    else:
        scaled = all_scores / jnp.sqrt(size).astype(jnp.float32)
    scaled = jnp.where(row_mask, soft_capped(scaled, scoring.cap), -1e30)
    sinks = scoring.sinks
    row_sinks = None if sinks is None else jnp.tile(sinks.reshape(num_kv_heads, -1), width)
    probabilities = softmax_with_sinks(scaled, row_sinks).astype(keys[0].dtype)
    ends = np.cumsum([block.shape[3] for block in keys])[:-1]
    block_weights = jnp.split(probabilities, ends, axis=-1)
    equation = "skrw,skwh->skrh" if values else "skrw,skhw->skrh"
    blocks = values or [block[:, :, :value_size] for block in keys]
    partial_outputs = [
        jnp.einsum(equation, weights, block, **f32)
        for weights, block in zip(block_weights, blocks, strict=True)
    ]
    outputs = functools.reduce(jnp.add, partial_outputs)
    outputs = outputs.reshape(*grouped.shape[:-1], outputs.shape[-1]).swapaxes(1, 2)
    return outputs.reshape(slots, width, num_heads, outputs.shape[-1]).astype(q.dtype)
