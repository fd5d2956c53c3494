"""KV cache: pages that decode steps only read, and recent tokens, which they write.

A page holds some positions of one sequence, or of several that begin alike; a table names the
pages of each. A step writes one token a slot, each at its own position: in the cache, a scatter
per layer and step. A program that writes an array also copies what it reads of it. So the tokens
of a chunk of steps are kept in order of the steps, and join the cache when the chunk ends.
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

from jaxrl_llm.config.room import Lengths, chosen_room
from jaxrl_llm.models import low_precision
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.sharding import mesh as mesh_lib

AXES = ("batch", "kv_heads", None, None)  # of keys and of values
_LOGITS_HELD = 3  # float32 arrays of a decode step as large as its logits, those among them
NOWHERE = np.iinfo(np.int32).max  # the position of no token: past every query


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of all pages, one array per layer.

    The position is the last dim of keys, so that a matmul reads them in the order of memory.
    Latent attention has one head of keys and no values, see `Shape.cached`. Slots and pages are
    split over devices alike; the pages of a shard are those of its slots.
    """

    keys: tuple[Float[Array, "pages K H page"], ...]
    values: tuple[Float[Array, "pages K _ _"], ...]  # (): the first dims of keys
    # Whether the position is the last dim of values too, as accelerators want it: their lines of
    # 128 numbers are full, whatever the size of a head. Else it comes before it.
    turned: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def page_tokens(self) -> int:
        return self.keys[0].shape[3]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gathered:
    """Keys and values of some sequences by position, copied out of their pages."""

    keys: tuple[Float[Array, "S K H window"], ...]
    values: tuple[Float[Array, "S K window value"], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Paged:
    """Keys and values of some sequences in their pages."""

    cache: Cache
    table: Int[Array, "S pages"]
    works: dict[tuple[int, int], Any]  # what a TPU's kernel reads, by kind of layer; else {}
    reader: str = dataclasses.field(metadata={"static": True})  # as of `attending`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recent:
    """Keys and values of tokens of each slot that have not joined the cache."""

    keys: tuple[Float[Array, "S K H recent"], ...]  # one per layer
    values: tuple[Float[Array, "S K recent value"], ...]
    positions: Int[Array, "S recent"]  # `NOWHERE`: no token, or one that does not count


class Split(NamedTuple):
    """Mesh axes that split pages with slots, and heads."""

    slots: Any = None
    heads: Any = None

    @property
    def arrays(self) -> PartitionSpec:  # of keys and values
        return PartitionSpec(self.slots, self.heads)


WHOLE = Split()


def split_of(shape: Shape, num_slots: int, mesh: Mesh) -> Split:
    """Returns how the cache of so many slots is split by the current rules."""
    spec = mesh_lib.sharding_of((num_slots, shape.cached[0]), AXES[:2], mesh).spec
    return Split(*spec)


def empty(shape: Shape, num_pages: int, page_tokens: int, dtype, *, turned: bool = False) -> Cache:
    """Returns a cache of zeros."""
    heads, of_key, of_value = shape.cached
    layers, page = range(shape.num_layers), (num_pages, heads)
    of_values = (of_value, page_tokens) if turned else (page_tokens, of_value)
    return Cache(
        tuple(jnp.zeros((*page, of_key, page_tokens), dtype) for _ in layers),
        tuple(jnp.zeros((*page, *of_values), dtype) for _ in layers) if of_value else (),
        turned,
    )


def no_recent(shape: Shape, num_slots: int, num_tokens: int, dtype) -> Recent:
    """Returns room for so many tokens a slot."""
    heads, of_key, of_value = shape.cached

    def zeros(*dims: int) -> Array:
        return mesh_lib.constrain(jnp.zeros((num_slots, heads, *dims), dtype), *AXES)

    layers = range(shape.num_layers)
    return Recent(
        tuple(zeros(of_key, num_tokens) for _ in layers),
        tuple(zeros(num_tokens, of_value) for _ in layers) if of_value else (),
        jnp.full((num_slots, num_tokens), NOWHERE, jnp.int32),
    )


def num_shards(mesh: Mesh | AbstractMesh, axes: str | tuple[str, ...] | None) -> int:
    """Returns the parts of a dim that these axes split, as an entry of a `PartitionSpec`."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(mesh.shape[axis] for axis in names)


def on_shards(function: Callable, takes: Sequence[Any], gives: Any) -> Callable:
    """Returns `function`, which then gets the arrays of its own shard of the mesh.

    `takes` and `gives` are partition specs of its arguments and results.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function
    return jax.shard_map(function, in_specs=tuple(takes), out_specs=gives, check_vma=False)


def local(pages: Int[Array, "..."], num_pages: int, split: Split) -> Int[Array, "..."]:
    """Returns numbers of pages in this shard's arrays of `num_pages`, which stands for others.

    Only inside a function of `on_shards`.
    """
    if not split.slots:
        return pages
    here = pages - lax.axis_index(split.slots) * num_pages
    return jnp.where((here >= 0) & (here < num_pages), here, num_pages)


def fill(
    cache: Cache,
    split: Split,
    pages: Int[Array, " n"],
    starts: Int[Array, " n"],
    keys: Sequence[Float[Array, "K tokens H"]],
    values: Sequence[Float[Array, "K tokens value"]],
) -> Cache:
    """Returns the cache with a page's tokens from each start on; pages past the last are dropped.

    What lies past the end of the tokens is filled with any.
    """
    size = cache.page_tokens

    def write(cache, pages, starts, keys, values):
        here = local(pages, cache.keys[0].shape[0], split)
        at = starts[:, None] + jnp.arange(size)

        def put(into, rows, order):
            new = low_precision.narrow(rows.at[:, at].get(mode="clip"), into.dtype)
            return into.at[here].set(new.transpose(order), mode="drop")  # from [K, n, page, H]

        last = 1, 0, 3, 2
        of_values = last if cache.turned else (1, 0, 2, 3)
        return dataclasses.replace(
            cache,
            keys=tuple(put(*pair, last) for pair in zip(cache.keys, keys, strict=True)),
            values=tuple(put(*pair, of_values) for pair in zip(cache.values, values, strict=True)),
        )

    rows = PartitionSpec(split.heads)
    takes = split.arrays, PartitionSpec(), PartitionSpec(), rows, rows
    mapped = on_shards(write, takes, split.arrays)
    return mapped(cache, pages, starts, tuple(keys), tuple(values))


def gathered(
    cache: Cache, split: Split, table: Int[Array, "S pages"], window: int, *, by_slot: bool
) -> Gathered:
    """Returns the first positions of sequences with these pages.

    `by_slot`: the rows of the table are all slots; else they are any, of any shard.
    """
    size = cache.page_tokens
    table = table[:, : -(-window // size)]
    elsewhere = bool(split.slots) and not by_slot

    def read(cache, table):
        here = local(table, cache.keys[0].shape[0], split)

        def cut(array, order, axis):
            how = {"mode": "fill", "fill_value": 0} if elsewhere else {"mode": "clip"}
            found = array.at[here].get(**how).transpose(order)  # a page next to its positions
            dims = *found.shape[:axis], -1, *found.shape[axis + 2 :]
            found = lax.slice_in_dim(found.reshape(dims), 0, window, axis=axis)
            if elsewhere:  # in 16 bits, as devices do not add numbers of 8
                wide = low_precision.widened(found)
                found = lax.psum(wide, split.slots).astype(found.dtype)
            return found

        def cut_values(array):
            if cache.turned:
                return cut(array, (0, 2, 3, 1, 4), 3).swapaxes(2, 3)
            return cut(array, (0, 2, 1, 3, 4), 2)

        return Gathered(
            tuple(cut(array, (0, 2, 3, 1, 4), 3) for array in cache.keys),
            tuple(map(cut_values, cache.values)),
        )

    rows = PartitionSpec(split.slots if by_slot else None)
    gives = PartitionSpec(split.slots if by_slot else None, split.heads)
    return on_shards(read, (split.arrays, rows), gives)(cache, table)


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


def join(
    cache: Cache,
    split: Split,
    recent: Recent,
    table: Int[Array, "S pages"],
    *,
    by_slot: bool,
) -> Cache:
    """Returns the cache with recent tokens in the pages of their slots; as `gathered`.

    Where values are turned, whole pages are written: a TPU would copy the cache to scatter tokens
    that are a column of a page each. The positions of a slot must follow one another.
    """
    size = cache.page_tokens

    def write(cache, recent, table):
        positions = recent.positions
        count = positions.size
        page = jnp.minimum(positions // size, table.shape[1] - 1)
        end = cache.keys[0].shape[0]
        here = local(jnp.take_along_axis(table, page, axis=1), end, split)
        # What is dropped goes past the end, each to another place.
        outside = end + jnp.arange(count).reshape(positions.shape)
        here = jnp.where((positions == NOWHERE) | (here >= end), outside, here)[:, None]
        heads = jnp.arange(cache.keys[0].shape[1])[None, :, None]
        at = (positions % size)[:, None]

        def put(into, rows, index):
            return into.at[index].set(rows, mode="drop", unique_indices=True)

        def put_keys(into, rows):
            return put(into, rows.swapaxes(2, 3), (here, heads, slice(None), at))

        def put_values(into, rows):
            return put(into, rows, (here, heads, at))

        return dataclasses.replace(
            cache,
            keys=tuple(map(put_keys, cache.keys, recent.keys)),
            values=tuple(map(put_values, cache.values, recent.values)),
        )

    def write_pages(cache, recent, table):
        rows = [*recent.keys, *(values.swapaxes(2, 3) for values in recent.values)]
        positions = recent.positions
        joined: list[Array] = []
        for into, new in zip((*cache.keys, *cache.values), rows, strict=True):
            # One after the other: each needs memory for its pages. So what is written first adds 0
            # to the next one's places; compilers drop a barrier before they choose the order.
            if joined:
                after = joined[-1][0, 0, 0, 0].astype(jnp.float32) > jnp.inf
                table, positions = table + after, positions + after
            joined.append(_in_whole_pages(into, new, positions, table, split))
        keys, values = joined[: len(cache.keys)], joined[len(cache.keys) :]
        return dataclasses.replace(cache, keys=tuple(keys), values=tuple(values))

    slots = split.slots if by_slot else None
    rows, arrays = PartitionSpec(slots), PartitionSpec(slots, split.heads)
    takes = split.arrays, Recent(arrays, arrays, rows), rows  # type: ignore[arg-type]
    how = write_pages if cache.turned else write
    return on_shards(how, takes, split.arrays)(cache, recent, table)


def _in_whole_pages(
    into: Float[Array, "pages K H page"],
    rows: Float[Array, "S K H recent"],
    positions: Int[Array, "S recent"],
    table: Int[Array, "S pages_of_slot"],
    split: Split,
) -> Float[Array, "pages K H page"]:
    size, count = into.shape[3], positions.shape[1]
    touched = (count - 2) // size + 2 if count > 1 else 1  # pages of a slot, at the most
    first = jnp.min(positions, axis=1, keepdims=True) // size
    numbers = first + jnp.arange(touched)
    at = (numbers[:, :, None] * size + jnp.arange(size)).reshape(len(table), -1)
    # [S, recent, positions of pages]. A slot without tokens has a page too that ends at `NOWHERE`.
    is_from = (positions[:, :, None] == at[:, None]) & (positions[:, :, None] != NOWHERE)
    # Exact: every sum has one product at most that is not zero, which is with one.
    wide = low_precision.widened(rows)
    how: Any = {"precision": "highest", "preferred_element_type": wide.dtype}
    new = jnp.einsum("skhr,srp->skhp", wide, is_from.astype(wide.dtype), **how).astype(into.dtype)
    new = new.reshape(*new.shape[:3], touched, size).transpose(0, 3, 1, 2, 4)
    is_new = is_from.any(axis=1).reshape(len(table), touched, size)
    here = jnp.take_along_axis(table, jnp.minimum(numbers, table.shape[1] - 1), axis=1)
    here = jnp.where(is_new.any(axis=2), local(here, into.shape[0], split), into.shape[0])
    merged = jnp.where(is_new[:, :, None, None], new, into.at[here].get(mode="clip"))
    return into.at[here].set(merged, mode="drop")


def fitting(
    network: Network,
    mesh: Mesh,
    lengths: Lengths,
    num_sequences: int,
    draft_tokens: int = 0,
    num_slots: int = 0,
) -> tuple[int, int]:
    """Returns the slots and the tokens of an engine's cache if the run does not say.

    See `chosen_room`. Each guess of `draft_tokens` has its own logits. Devices that are not
    present, or do not tell their memory, set no limit.
    """
    device: Any = mesh.devices.flat[0]
    try:
        stats = device.memory_stats() or {}
    except (NotImplementedError, RuntimeError, AttributeError):  # a device that is not present
        stats = {}
    return chosen_room(
        num_sequences,
        lengths,
        device.platform,
        mesh.devices.size,
        mesh_lib.row_shards(mesh)[0] * mesh.shape.get(mesh_lib.STAGE, 1),
        stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0),
        lambda tokens, slots: cache_bytes(network, mesh, tokens, slots),
        lambda slots: _LOGITS_HELD * logits_bytes(network, mesh, slots * (1 + draft_tokens)),
        num_slots,
    )


def cache_bytes(network: Network, mesh: Mesh, num_tokens: int, num_slots: int) -> int:
    """Returns the bytes on one device of keys and values of so many tokens of all slots."""
    heads, of_key, of_value = network.shape.cached
    array = (num_slots, heads, of_key + of_value)
    of_one_each = _bytes(mesh, array, AXES[:3], network.cached_dtype)
    return network.shape.num_layers * of_one_each * num_tokens // num_slots


def logits_bytes(network: Network, mesh: Mesh, rows: int) -> int:
    """Returns the bytes of that many rows of logits on one device."""
    return _bytes(mesh, (rows, network.shape.vocab_size), ("batch", "vocab"), jnp.float32)


def _bytes(mesh: Mesh, array: tuple[int, ...], dims: tuple[str | None, ...], dtype: Any) -> int:
    shard = mesh_lib.sharding_of(array, dims, mesh).shard_shape(array)
    return math.prod(shard) * jnp.dtype(dtype).itemsize
