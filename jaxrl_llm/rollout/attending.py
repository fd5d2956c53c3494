"""Attention of decode steps: a few queries a slot, over its pages and its recent tokens."""

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

from jaxrl_llm.models.attention import PLAIN, Scoring, capped, softmax_with_sinks
from jaxrl_llm.models.attention_layers import Attention
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout import cache as cache_lib
from jaxrl_llm.rollout import paged_attention
from jaxrl_llm.rollout.cache import Cache, Gathered, Paged, Split
from jaxrl_llm.rollout.paged_attention import Reach, Sums

Kind = tuple[int, int]  # window and chunk of a layer
# How decode steps read the cache: the sequences are copied out of their pages once a chunk; or
# pages are read where they lie, by our own kernel for CPUs, one for TPUs, one for GPUs, or a loop.
Reader = Literal["gather", "own", "tpu", "gpu", "loop"]


def reader_for(network: Network, device: Any) -> Reader:
    """Returns how decode steps read the cache on a kind of device."""
    if network.decode_kernel:
        return "own"
    # On a CPU each product with a part of an array copies that part.
    if device.platform in ("cpu", "tpu"):
        return {"cpu": "gather", "tpu": "tpu"}[device.platform]  # type: ignore[return-value]
    # Triton wants Ampere, for numbers of eight bits what came after it. AMD's GPUs say "gfx942". A
    # later jax will have no Triton.
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return "loop"
    capability = re.fullmatch(r"(\d+)\.(\d)", getattr(device, "compute_capability", ""))
    least = (8, 9) if jnp.dtype(network.cached_dtype).itemsize == 1 else (8, 0)
    return "gpu" if capability and (*map(int, capability.groups()),) >= least else "loop"


class Sight(NamedTuple):
    """What the queries of a step see. Dicts are by the kinds of layers that a network has."""

    places: Int[Array, "S Q"]  # of the queries
    firsts: Mapping[Kind, Int[Array, "S Q"]]  # the first position in the cache
    ends: Int[Array, " S"]  # behind the last position in the cache; 0: a slot sees nothing there
    recent: Mapping[Kind, Bool[Array, "S Q recent"]]
    cached: Mapping[Kind, Bool[Array, "S Q window"]]  # of what was gathered; else {}


def sight(
    shape: Shape,
    places: Int[Array, "S Q"],
    ends: Int[Array, " S"],
    recent: Int[Array, "S recent"],
    window: int,
) -> Sight:
    """Returns what queries at `places` see; `recent` are the positions of recent tokens.

    `window` positions of the cache were gathered; 0: its pages are read.
    """
    firsts = {kind: Reach(*kind).first(places) for kind in _kinds(shape)}

    def between(at, start, end):
        return (at >= start[..., None]) & (at < end)

    return Sight(
        places,
        firsts,
        ends,
        {k: between(recent[:, None], f, places[..., None] + 1) for k, f in firsts.items()},
        {k: between(jnp.arange(window), f, ends[:, None, None]) for k, f in firsts.items()}
        if window
        else {},
    )


def _kinds(shape: Shape) -> list[Kind]:
    return sorted({(kind.window, kind.chunk) for kind in shape.kinds})


def held(
    shape: Shape,
    cache: Cache,
    split: Split,
    table: Int[Array, "S pages"],
    places: Int[Array, " S"],
    window: int,
    reader: Reader,
) -> Gathered | Paged:
    """Returns what steps read whose first queries are at `places`, each with the pages before."""
    if reader == "gather":
        return cache_lib.gathered(cache, split, table, window, by_slot=True)
    if reader != "tpu":
        return Paged(cache, table, {}, reader)
    count = paged_attention.step_pages(cache.keys[0], shape.cached[2])
    shards = cache_lib.num_shards(jax.sharding.get_abstract_mesh(), split.slots)
    num_pages = cache.keys[0].shape[0] // shards

    def works(table, places):
        here = cache_lib.local(table, num_pages, split)
        sizes = cache.page_tokens, count
        return {
            kind: paged_attention.work(here, Reach(*kind).first(places), places, *sizes)
            for kind in _kinds(shape)
        }

    rows = PartitionSpec(split.slots)
    work = cache_lib.on_shards(works, (rows, rows), rows)(table, places)
    return Paged(cache, table, work, reader)


def attend(
    network: Network,
    held: Gathered | Paged,
    split: Split,
    layer: int,
    a: Attention,
    recent: tuple[Float[Array, "S K _ _"], ...],
    seen: Sight,
) -> Float[Array, "S Q N value"]:
    """Returns attention of a layer's queries; `recent` are its keys, and values if it has any."""
    kind = a.window, a.chunk
    if isinstance(held, Gathered):
        visible = jnp.concatenate([seen.cached[kind], seen.recent[kind]], axis=-1)
        keys = held.keys[layer], recent[0]
        values = (held.values[layer], recent[1]) if held.values else ()
        return attention(a.q, keys, values, visible, a.scoring, a.value_size)
    pages = held.cache.keys[layer], *held.cache.values[layer : layer + 1]
    if network.decode_kernel:
        given = *pages, held.table, seen.firsts[kind], seen.ends
        return network.decode_kernel(a.q, *given, *recent, seen.recent[kind])
    return _over_pages(held, split, a, pages, recent, seen)


def _over_pages(
    held: Paged,
    split: Split,
    a: Attention,
    pages: tuple[Array, ...],
    recent: tuple[Float[Array, "S K _ _"], ...],
    seen: Sight,
) -> Float[Array, "S Q N value"]:
    """Returns attention as `attend`, by sums over pages and over recent tokens."""
    kind = a.window, a.chunk
    slots, width, num_heads, size = a.q.shape
    heads = recent[0].shape[1]
    group = num_heads // heads
    # The queries of all heads that share keys, and of all positions, are the rows of one matmul.
    grouped = a.q.reshape(slots, width, heads, group, size).swapaxes(1, 2)
    rows = grouped.reshape(slots, heads, -1, size)
    value_size = recent[1].shape[3] if len(recent) == 2 else a.value_size
    how: Any = {
        "group": group,
        "reach": Reach(*kind),
        "scoring": a.scoring._replace(sinks=None),
        "value_size": value_size,
    }

    def of_pages(rows, pages, table, work, places, ends) -> Sums:
        keys, values = pages if len(pages) == 2 else (*pages, None)
        if work is not None:
            return paged_attention.by_kernel(rows, keys, values, work, places, ends, **how)
        here = cache_lib.local(table, keys.shape[0], split)
        read = paged_attention.by_loop
        if held.reader == "gpu":
            from jaxrl_llm.rollout import paged_attention_gpu  # needs Triton

            if paged_attention_gpu.fits(pages, value_size):
                read = paged_attention_gpu.by_kernel
        return read(rows, keys, values, here, places, ends, **how)

    by_slot, arrays = PartitionSpec(split.slots), split.arrays
    takes = arrays, arrays, by_slot, by_slot, by_slot, by_slot
    mapped = cache_lib.on_shards(of_pages, takes, arrays)
    work = held.works.get(kind)
    found = mapped(rows, pages, held.table, work, seen.places[:, 0], seen.ends)
    recent = tuple(array.astype(rows.dtype) for array in recent)
    wide = {"preferred_element_type": jnp.float32}
    scores = jnp.einsum("skrh,skhw->skrw", rows, recent[0], **wide)
    scores = scores * (a.scoring.scale or size**-0.5)
    visible = jnp.repeat(seen.recent[kind], group, axis=1)[:, None]
    late = paged_attention.weighed(scores, visible, a.scoring, rows.dtype)
    if len(recent) == 2:
        mixed = jnp.einsum("skrw,skwh->skrh", late.mixed, recent[1], **wide)
    else:
        mixed = jnp.einsum("skrw,skhw->skrh", late.mixed, recent[0][:, :, :value_size], **wide)
    sinks = a.scoring.sinks
    of_rows = None if sinks is None else jnp.tile(sinks.reshape(heads, -1), width)
    mixed = paged_attention.together(found, late._replace(mixed=mixed), of_rows)
    mixed = mixed.reshape(slots, heads, width, group, value_size).swapaxes(1, 2)
    return mixed.reshape(slots, width, num_heads, value_size).astype(a.q.dtype)


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
