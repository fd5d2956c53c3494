"""Paged KV cache: pages that decode steps only read, and a buffer of recent tokens they write.

A page holds consecutive positions of one sequence, or of several with a common prefix; a page
table lists the pages of each sequence. A step writes one token per slot, each at its own position:
written to the cache directly, that is a scatter per layer and step, and a program that writes an
array copies what it also reads of it. So the tokens of a chunk of steps go to a buffer, in the
order of the steps, and are flushed to the pages when the chunk ends.

A layer whose attention reads only the latest tokens can have a ring of pages for each slot instead:
logical page `i` of the slot's sequence is page `i` modulo their number, so that a token overwrites
one that no query sees any more. Readers take the table of such a layer as that of any other: what
an entry behind the window refers to is masked by its position.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_llm.config.kv_cache_sizing import (
    SequenceLengths,
    choose_slots,
    page_tokens,
)
from jaxrl_llm.models import quantization
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.recurrent.sequence_memory import layer_rings, paged_layers
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout.engine.layer_states import LayerStates, state_bytes
from jaxrl_llm.sharding import mesh as mesh_lib

KV_AXES = ("batch", "kv_heads", None, None)  # logical axes of keys and values
_LOGITS_HELD = 3  # live float32 arrays as large as the logits in a decode step, logits included
NO_POSITION = np.iinfo(np.int32).max  # position of an empty entry: past every query, never visible
NO_PAGE = np.iinfo(np.int32).max  # past the last page of any layer: writes are dropped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of all pages, one array for each layer that keeps them.

    The position is the last dim of keys, so that a matmul reads them contiguously. Latent
    attention caches one head of keys and no values, see `Architecture.kv_cache_sizes`. Pages are
    sharded like slots: a shard has the pages of its own slots. Pages of rings are in the order of
    the slots.
    """

    keys: tuple[Float[Array, "_ K H page"], ...]
    values: tuple[Float[Array, "_ K _ _"], ...]  # (): they are the first dims of keys
    # Whether the position is the last dim of values too, as accelerators prefer: their tiles of
    # 128 lanes are full whatever the head size. Else it is the last but one.
    transposed_values: bool = dataclasses.field(default=False, metadata={"static": True})
    # Of each layer, pages of a slot's ring; 0: pages of whole sequences. (): no layer has rings.
    rings: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def layer_rings(self) -> tuple[int, ...]:
        """`rings` with an entry for each layer."""
        return self.rings or (0,) * len(self.keys)

    @property
    def page_tokens(self) -> int:
        return self.keys[0].shape[3]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContiguousView:
    """Contiguous keys and values of some sequences by position, copied out of their pages."""

    # Of a ring, its pages in their order; see `gathered_positions`.
    keys: tuple[Float[Array, "S K H _"], ...]
    values: tuple[Float[Array, "S K _ value"], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedView:
    """Keys and values of some sequences, read in place through their page table."""

    cache: Cache
    table: Int[Array, "S pages"]
    # page schedules of the TPU kernel by attention kind; else {}
    page_schedules: dict[tuple[int, int], Any]
    reader: str = dataclasses.field(metadata={"static": True})  # `attending.CacheReader`
    slots: Int[Array, " S"] | None = None  # of the rows; None: they are the slots in order


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WriteBuffer:
    """Memory of each slot's tokens of a chunk of decode steps that is not in `DecodeState` yet.

    Keys and values are flushed to the pages when the chunk ends; states replace those of the slots.
    """

    keys: tuple[Float[Array, "S K H recent"], ...]  # one for each layer with pages
    values: tuple[Float[Array, "S K recent value"], ...]
    positions: Int[Array, "S recent"]  # `NO_POSITION`: empty, or an inactive slot's token
    states: LayerStates = ()  # after the last token of each slot


class CacheSharding(NamedTuple):
    """Mesh axes over which the KV cache is sharded: slots (and their pages), and KV heads."""

    slot_axes: Any = None
    head_axes: Any = None

    @property
    def array_spec(self) -> PartitionSpec:  # of keys and values
        return PartitionSpec(self.slot_axes, self.head_axes)


REPLICATED = CacheSharding()


def cache_sharding(shape: Architecture, num_slots: int, mesh: Mesh) -> CacheSharding:
    """Sharding of the cache of `num_slots` slots under the current logical axis rules."""
    spec = mesh_lib.activation_sharding(
        (num_slots, shape.kv_cache_sizes[0]), KV_AXES[:2], mesh
    ).spec
    return CacheSharding(*spec)


def empty_cache(
    shape: Architecture,
    num_pages: int,
    page_tokens: int,
    dtype,
    *,
    transposed_values: bool = False,
    rings: tuple[int, ...] = (),
    num_slots: int = 0,
) -> Cache:
    """A cache of zeros; `rings` as in `Cache`, for each of `num_slots` slots."""
    heads, key_size, value_size = shape.kv_cache_sizes
    value_dims = (value_size, page_tokens) if transposed_values else (page_tokens, value_size)
    layer_pages = [
        num_slots * ring or num_pages for ring in rings or (0,) * len(paged_layers(shape))
    ]
    return Cache(
        tuple(jnp.zeros((pages, heads, key_size, page_tokens), dtype) for pages in layer_pages),
        tuple(jnp.zeros((pages, heads, *value_dims), dtype) for pages in layer_pages)
        if value_size
        else (),
        transposed_values,
        rings,
    )


def ring_table(
    ring: int, table: Int[Array, "S pages"], slots: Int[Array, " S"] | None = None
) -> Int[Array, "S pages"]:
    """The page table of a layer with rings of this many pages; 0: `table` itself."""
    if not ring:
        return table
    slots = jnp.arange(len(table)) if slots is None else slots
    return slots[:, None] * ring + jnp.arange(table.shape[1]) % ring


def gathered_positions(width: int, ends: Int[Array, " S"]) -> Int[Array, "S width"]:
    """Positions of gathered entries of sequences that end at `ends`; negative: none.

    Entry `i` of a ring of `width` tokens has the last position that is `i` modulo `width`. Entry
    `i` of a whole sequence, of at most `width` tokens, has position `i`, which is the same.
    """
    last = ends[:, None] - 1
    return last - (last - jnp.arange(width)) % width


def empty_write_buffer(
    shape: Architecture, num_slots: int, num_tokens: int, dtype, states: LayerStates = ()
) -> WriteBuffer:
    """An empty buffer for `num_tokens` recent tokens per slot, whose states are `states`."""
    heads, key_size, value_size = shape.kv_cache_sizes

    def zeros(*dims: int) -> Array:
        return mesh_lib.constrain(jnp.zeros((num_slots, heads, *dims), dtype), *KV_AXES)

    layers = paged_layers(shape)
    return WriteBuffer(
        tuple(zeros(key_size, num_tokens) for _ in layers),
        tuple(zeros(num_tokens, value_size) for _ in layers) if value_size else (),
        jnp.full((num_slots, num_tokens), NO_POSITION, jnp.int32),
        states,
    )


def num_shards(mesh: Mesh | AbstractMesh, axes: str | tuple[str, ...] | None) -> int:
    """Number of shards of a dim whose `PartitionSpec` entry is `axes`."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(mesh.shape[axis] for axis in names)


def map_over_shards(function: Callable, in_specs: Sequence[Any], out_specs: Any) -> Callable:
    """`function` mapped over the shards of the current mesh; itself on a single device."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function
    return jax.shard_map(function, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False)


def local_page_ids(
    pages: Int[Array, "..."], num_pages: int, split: CacheSharding
) -> Int[Array, "..."]:
    """Page ids local to this shard's arrays; `num_pages` marks the pages of other shards.

    Only inside a function of `map_over_shards`.
    """
    if not split.slot_axes:
        return pages
    shard_pages = pages - lax.axis_index(split.slot_axes) * num_pages
    return jnp.where((shard_pages >= 0) & (shard_pages < num_pages), shard_pages, num_pages)


def write_prompt_pages(
    cache: Cache,
    split: CacheSharding,
    pages: Int[Array, " n"],
    starts: Int[Array, " n"],
    keys: Sequence[Float[Array, "K tokens H"]],
    values: Sequence[Float[Array, "K tokens value"]],
) -> Cache:
    """Writes one page of tokens from each start on; page ids past the last are dropped.

    Positions past the end of the tokens get arbitrary values. Layers with rings are left alone, see
    `write_prompt_rings`.
    """

    def write(cache, pages, starts, keys, values):
        layers = [i for i, ring in enumerate(cache.layer_rings) if not ring]
        return _with_pages(cache, split, layers, pages, starts, keys, values)

    rows = PartitionSpec(split.head_axes)
    in_specs = split.array_spec, PartitionSpec(), PartitionSpec(), rows, rows
    mapped = map_over_shards(write, in_specs, split.array_spec)
    return mapped(cache, pages, starts, tuple(keys), tuple(values))


def write_prompt_rings(
    cache: Cache,
    split: CacheSharding,
    slots: Int[Array, " n"],
    starts: Int[Array, " n"],
    lengths: Int[Array, " n"],
    keys: Sequence[Float[Array, "K tokens H"]],
    values: Sequence[Float[Array, "K tokens value"]],
) -> Cache:
    """Writes the last pages of prompts to the rings of their slots; a slot past the last one is
    dropped.

    Args:
      starts: Of the prompts in the tokens of `keys` and `values`.
    """
    sizes = sorted(set(cache.layer_rings) - {0})
    if not sizes:
        return cache
    page = cache.page_tokens

    def write_sample(i, cache, slots, starts, lengths, keys, values):
        for ring in sizes:
            layers = [j for j, each in enumerate(cache.layer_rings) if each == ring]
            numbers = gathered_positions(ring, -(-lengths[i][None] // page))[0]
            pages = slots[i] * ring + jnp.arange(ring)
            pages = jnp.where(numbers < 0, NO_PAGE, pages)
            cache = _with_pages(
                cache, split, layers, pages, starts[i] + numbers * page, keys, values
            )
        return cache

    def write(cache, slots, starts, lengths, keys, values):
        # Sample by sample: rings of all at once would be gathered into as much memory again.
        step = lambda i, cache: write_sample(  # noqa: E731
            i, cache, slots, starts, lengths, keys, values
        )
        return lax.fori_loop(0, len(slots), step, cache)

    rows = PartitionSpec(split.head_axes)
    in_specs = split.array_spec, *[PartitionSpec()] * 3, rows, rows
    mapped = map_over_shards(write, in_specs, split.array_spec)
    return mapped(cache, slots, starts, lengths, tuple(keys), tuple(values))


def move_rings(cache: Cache, sources: Int[Array, " n"], targets: Int[Array, " n"]) -> Cache:
    """The cache with the rings of some slots copied to others; a slot past the last is padding."""

    def copy(array, ring):
        if not ring:
            return array
        of_slots = lambda slots: (slots[:, None] * ring + jnp.arange(ring)).reshape(-1)  # noqa: E731
        return array.at[of_slots(targets)].set(
            array.at[of_slots(sources)].get(mode="clip"), mode="drop"
        )

    keys, values = (tuple(map(copy, a, cache.layer_rings)) for a in (cache.keys, cache.values))
    return dataclasses.replace(cache, keys=keys, values=values)


def _with_pages(cache, split, layers, pages, starts, keys, values) -> Cache:
    """A shard's cache with tokens from `starts` on in `pages` [n] of some layers."""
    token_indices = starts[:, None] + jnp.arange(cache.page_tokens)

    def write_array(array, rows, order):
        shard_pages = local_page_ids(pages, array.shape[0], split)
        # [K, n, page, H], with the dims then in the order of `array`.
        new = quantization.to_cache_dtype(rows.at[:, token_indices].get(mode="clip"), array.dtype)
        return array.at[shard_pages].set(new.transpose(order), mode="drop")

    def write_layers(arrays, rows, order):
        return tuple(
            write_array(array, rows[i], order) if i in layers else array
            for i, array in enumerate(arrays)
        )

    position_last = 1, 0, 3, 2
    value_order = position_last if cache.transposed_values else (1, 0, 2, 3)
    return dataclasses.replace(
        cache,
        keys=write_layers(cache.keys, keys, position_last),
        values=write_layers(cache.values, values, value_order),
    )


def gather_pages(
    cache: Cache,
    split: CacheSharding,
    table: Int[Array, "S pages"],
    window: int,
    *,
    by_slot: bool,
    slots: Int[Array, " S"] | None = None,
) -> ContiguousView:
    """Copies the first `window` positions of the sequences in `table` out of their pages, and
    all of their rings that these positions reach.

    `by_slot`: the rows of the table are the slots in order; else any sequences, of any shard, in
    `slots`.
    """
    size = cache.page_tokens
    any_shard = bool(split.slot_axes) and not by_slot
    tables = {
        ring: ring_table(ring, table, slots)[:, : min(-(-window // size), ring or window)]
        for ring in set(cache.layer_rings)
    }

    def read(cache, tables):
        def gather_array(array, ring, order, axis):
            shard_table = local_page_ids(tables[ring], array.shape[0], split)
            indexing = {"mode": "fill", "fill_value": 0} if any_shard else {"mode": "clip"}
            # The page comes next to its positions.
            sequences = array.at[shard_table].get(**indexing).transpose(order)
            dims = *sequences.shape[:axis], -1, *sequences.shape[axis + 2 :]
            sequences = sequences.reshape(dims)
            width = min(window, sequences.shape[axis])
            sequences = lax.slice_in_dim(sequences, 0, width, axis=axis)
            if any_shard:  # in 16 bits, as collectives do not add 8-bit floats
                summed = quantization.to_16bit(sequences)
                sequences = lax.psum(summed, split.slot_axes).astype(sequences.dtype)
            return sequences

        def gather_values(array, ring):
            if cache.transposed_values:
                return gather_array(array, ring, (0, 2, 3, 1, 4), 3).swapaxes(2, 3)
            return gather_array(array, ring, (0, 2, 1, 3, 4), 2)

        rings = cache.layer_rings
        return ContiguousView(
            tuple(
                gather_array(*pair, (0, 2, 3, 1, 4), 3)
                for pair in zip(cache.keys, rings, strict=True)
            ),
            tuple(gather_values(*pair) for pair in zip(cache.values, rings, strict=False)),
        )

    rows = PartitionSpec(split.slot_axes if by_slot else None)
    out_spec = PartitionSpec(split.slot_axes if by_slot else None, split.head_axes)
    return map_over_shards(read, (split.array_spec, rows), out_spec)(cache, tables)


def append_to_buffer(
    recent: WriteBuffer,
    layer: int,
    start: Int[Array, ""],
    cached: tuple[Float[Array, "S Q K _"], ...],
) -> tuple[Float[Array, "S K _ _"], ...]:
    """A layer's recent keys, and values if cached, with those of Q tokens written at `start`.

    `layer` counts the layers with pages.
    """
    orders = (0, 2, 3, 1), (0, 2, 1, 3)
    buffers = recent.keys[layer], *recent.values[layer : layer + 1]
    return tuple(
        lax.dynamic_update_slice_in_dim(
            buffer,
            quantization.to_cache_dtype(new.transpose(order), buffer.dtype),
            start,
            axis=order.index(1),
        )
        for buffer, new, order in zip(buffers, cached, orders, strict=False)
    )


def flush_buffer(
    cache: Cache,
    split: CacheSharding,
    recent: WriteBuffer,
    table: Int[Array, "S pages"],
    *,
    by_slot: bool,
    slots: Int[Array, " S"] | None = None,
) -> Cache:
    """The cache with recent tokens written to the pages of their slots; `by_slot` and `slots` as
    in `gather_pages`.

    With transposed values, whole pages are written: a TPU would copy the cache to scatter tokens
    that are one column of a page each. The positions of a slot must be consecutive.
    """
    size, rings = cache.page_tokens, cache.layer_rings
    targets = {
        ring: (
            ring_table(ring, table, slots),
            _kept_positions(recent.positions, (ring - 1) * size + 1 if ring else 0),
        )
        for ring in set(rings)
    }

    def indices(ring, targets, num_pages):
        """Page and offset of each token, [S, 1, recent]."""
        table, positions = targets[ring]
        count = positions.size
        page = jnp.minimum(positions // size, table.shape[1] - 1)
        shard_pages = local_page_ids(jnp.take_along_axis(table, page, axis=1), num_pages, split)
        # Dropped tokens go past the end, each to an index of its own: indices must be unique.
        dropped_pages = num_pages + jnp.arange(count).reshape(positions.shape)
        shard_pages = jnp.where(
            (positions == NO_POSITION) | (shard_pages >= num_pages), dropped_pages, shard_pages
        )[:, None]
        return shard_pages, (positions % size)[:, None]

    def write(cache, keys, values, targets):
        heads = jnp.arange(cache.keys[0].shape[1])[None, :, None]

        def scatter(array, rows, index):
            return array.at[index].set(rows, mode="drop", unique_indices=True)

        def write_keys(array, rows, ring):
            pages, offsets = indices(ring, targets, array.shape[0])
            return scatter(array, rows.swapaxes(2, 3), (pages, heads, slice(None), offsets))

        def write_values(array, rows, ring):
            pages, offsets = indices(ring, targets, array.shape[0])
            return scatter(array, rows, (pages, heads, offsets))

        return dataclasses.replace(
            cache,
            keys=tuple(map(write_keys, cache.keys, keys, rings)),
            values=tuple(map(write_values, cache.values, values, rings)),
        )

    def write_pages(cache, keys, values, targets):
        rows = [*keys, *(each.swapaxes(2, 3) for each in values)]
        arrays, written = (*cache.keys, *cache.values), list[Array]()
        for array, new_tokens, ring in zip(arrays, rows, rings * 2, strict=False):
            table, positions = targets[ring]
            # Written all at once, every array would need temporary pages at the same time. A fake
            # dependency (+ 0 from the array before) makes them sequential; an optimization barrier
            # does not, as compilers drop it before scheduling. Seen in the program's peak memory.
            if written:
                zero = written[-1][0, 0, 0, 0].astype(jnp.float32) > jnp.inf
                table, positions = table + zero, positions + zero
            written.append(_in_whole_pages(array, new_tokens, positions, table, split))
        keys, values = written[: len(cache.keys)], written[len(cache.keys) :]
        return dataclasses.replace(cache, keys=tuple(keys), values=tuple(values))

    slot_axes = split.slot_axes if by_slot else None
    rows, arrays = PartitionSpec(slot_axes), PartitionSpec(slot_axes, split.head_axes)
    in_specs = split.array_spec, arrays, arrays, rows
    writer = write_pages if cache.transposed_values else write
    mapped = map_over_shards(writer, in_specs, split.array_spec)
    return mapped(cache, recent.keys, recent.values, targets)


def _kept_positions(positions: Int[Array, "S recent"], count: int) -> Int[Array, "S recent"]:
    """The last `count` positions of each slot, `NO_POSITION` for those before; 0: all of them.

    So many fit the pages of a ring wherever they begin in a page: of more, two would be written to
    the same place.
    """
    if not count or count >= positions.shape[1]:
        return positions
    last = jnp.where(positions == NO_POSITION, -1, positions).max(axis=1, keepdims=True)
    return jnp.where(positions > last - count, positions, NO_POSITION)


def _in_whole_pages(
    array: Float[Array, "pages K H page"],
    rows: Float[Array, "S K H recent"],
    positions: Int[Array, "S recent"],
    table: Int[Array, "S pages_of_slot"],
    split: CacheSharding,
) -> Float[Array, "pages K H page"]:
    """`array` with `rows` at their positions, by reading, merging and writing whole pages."""
    size, count = array.shape[3], positions.shape[1]
    pages_touched = (count - 2) // size + 2 if count > 1 else 1  # by one slot, at most
    first = jnp.min(positions, axis=1, keepdims=True) // size
    page_indices = first + jnp.arange(pages_touched)
    page_positions = (page_indices[:, :, None] * size + jnp.arange(size)).reshape(len(table), -1)
    # [S, recent, positions of pages]. The page of a slot without tokens may end at `NO_POSITION`.
    one_hot = (positions[:, :, None] == page_positions[:, None]) & (
        positions[:, :, None] != NO_POSITION
    )
    # Exact: each sum has at most one nonzero product, with 1.
    wide = quantization.to_16bit(rows)
    exact: Any = {"precision": "highest", "preferred_element_type": wide.dtype}
    new = jnp.einsum("skhr,srp->skhp", wide, one_hot.astype(wide.dtype), **exact).astype(
        array.dtype
    )
    new = new.reshape(*new.shape[:3], pages_touched, size).transpose(0, 3, 1, 2, 4)
    is_new = one_hot.any(axis=1).reshape(len(table), pages_touched, size)
    shard_pages = jnp.take_along_axis(table, jnp.minimum(page_indices, table.shape[1] - 1), axis=1)
    shard_pages = jnp.where(
        is_new.any(axis=2), local_page_ids(shard_pages, array.shape[0], split), array.shape[0]
    )
    merged = jnp.where(is_new[:, :, None, None], new, array.at[shard_pages].get(mode="clip"))
    return array.at[shard_pages].set(merged, mode="drop")


def fitting_cache_size(
    network: Network,
    mesh: Mesh,
    lengths: SequenceLengths,
    num_sequences: int,
    draft_tokens: int = 0,
    num_slots: int = 0,
    *,
    window_cache: bool = False,
) -> tuple[int, int]:
    """Chooses (slots, cache tokens) of an engine whose config leaves them open, by device memory.

    See `choose_slots`. Each of `draft_tokens` drafts has its own logits. Devices that are not
    present, or do not report their memory, set no limit. `window_cache` as in `Engine`.
    """
    device: Any = mesh.devices.flat[0]
    try:
        stats = device.memory_stats() or {}
    except (NotImplementedError, RuntimeError, AttributeError):  # a device that is not present
        stats = {}
    page = page_tokens(device.platform)
    rings = layer_rings(network.shape, page, lengths.sequence) if window_cache else ()
    return choose_slots(
        num_sequences,
        lengths,
        device.platform,
        mesh.devices.size,
        mesh_lib.num_row_shards(mesh)[0] * mesh.shape.get(mesh_lib.STAGE, 1),
        stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0),
        lambda tokens, slots: cache_bytes(network, mesh, tokens, slots, rings, page),
        lambda slots: _LOGITS_HELD * logits_bytes(network, mesh, slots * (1 + draft_tokens)),
        num_slots,
    )


def cache_bytes(
    network: Network,
    mesh: Mesh,
    num_tokens: int,
    num_slots: int,
    rings: tuple[int, ...] = (),
    page: int = 0,
) -> int:
    """Bytes per device that layers keep of `num_tokens` tokens over all slots: pages, rings of
    `page` tokens a page (`Cache.rings`), and states.
    """
    heads, key_size, value_size = network.shape.kv_cache_sizes
    token_dims = (num_slots, heads, key_size + value_size)
    layer_bytes = mesh_lib.activation_bytes(
        token_dims, KV_AXES[:3], mesh, jnp.dtype(network.cached_dtype)
    )
    num_whole = len(paged_layers(network.shape)) - sum(map(bool, rings))
    pages = num_whole * layer_bytes * num_tokens // num_slots
    return pages + sum(rings) * page * layer_bytes + state_bytes(network, mesh, num_slots)


def logits_bytes(network: Network, mesh: Mesh, rows: int) -> int:
    """Bytes per device of `rows` rows of logits."""
    dims = (rows, network.shape.vocab_size)
    return mesh_lib.activation_bytes(dims, ("batch", "vocab"), mesh, jnp.float32)
