"""Attention of decode steps over pages where they lie, by a Pallas kernel for GPUs of NVIDIA.

Each program reads some pages of one slot, one after another, and only those that its queries see.
Triton, which compiles it, wants arrays whose sizes are powers of two: other sizes of heads are read
in parts, and rows that are not there are masked.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.attention import Scoring
from jaxrl_llm.rollout.paged_attention import Reach, Sums, added, nothing, of_page

_PROGRAMS = 1024  # of a call, if there are so many pages: all cores are busy until its end
_KEPT = 8192  # sums of values of a program: 64 registers of each thread of four warps
_SMALL = 32  # sums of programs that share a slot are at most this part of the longest slot
_LEAST = 16  # of each dim of a product


def fits(pools: Sequence[Array | jax.ShapeDtypeStruct], value_size: int) -> bool:
    """Returns whether `by_kernel` reads pages [pages, K, H, page] of keys, and values if any.

    Not if a size of heads is no multiple of 16, or that of pages no power of two from 16 on. Nor
    more numbers of eight bits than 31 bits count: Pallas sees only that they are less than 4 GiB.
    """
    page = pools[0].shape[3]
    sizes = page, value_size, *(pool.shape[2] for pool in pools)
    counted = all(pool.dtype.itemsize > 1 or pool.size < 1 << 31 for pool in pools)
    return counted and page & (page - 1) == 0 and all(size % _LEAST == 0 for size in sizes)


def _parts(size: int, start: int = 0) -> list[Any]:
    """Returns slices of powers of two that are `size` together, as Triton wants them.

    >>> [part.size for part in _parts(576)]
    [512, 64]
    """
    found = []
    for bit in reversed(range(size.bit_length())):
        if size >> bit & 1:
            found.append(pl.ds(start, 1 << bit))
            start += 1 << bit
    return found


def _kernel(
    places, ends, table, q, keys, *refs,
    group: int, reach: Reach, scoring: Scoring, rows: int, key_parts, value_parts, splits: int,
):  # fmt: skip
    """One program of the grid: a share of a slot's pages, for some rows of a head."""
    values, outs = refs[:-3], refs[-3:]
    block, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(3)
    count, page, end = q.shape[0], keys.shape[3], ends[...]
    row = block * count + lax.broadcasted_iota(jnp.int32, (count, 1), 0)
    place = places[...]
    # The earliest query of these sees the earliest page.
    begin = jnp.minimum(reach.first(place + block * count // group), end) // page
    held = pl.cdiv(end, page)
    share = pl.cdiv(held - begin, splits)
    begin += split * share
    first = reach.first(place + row // group)
    queries = [plgpu.load(q.at[:, part], mask=row < rows, other=0.0) for part in key_parts]

    def read(number, sums):
        here = table[number]
        k = [keys[here, head, part].astype(q.dtype) for part in key_parts]
        # Where there are none, the first parts of keys.
        v = [pool[here, head, part].astype(q.dtype) for pool in values for part in value_parts]
        v = v or k[: len(value_parts)]
        at = number * page + lax.broadcasted_iota(jnp.int32, (1, page), 1)
        return added(sums, of_page(queries, k, v, (at >= first) & (at < end), scoring))

    sums = nothing(count, sizes=[part.size for part in value_parts])
    sums = lax.fori_loop(begin, jnp.minimum(begin + share, held), read, sums)
    for part, mixed in zip(value_parts, sums.mixed, strict=True):
        plgpu.store(outs[0].at[:, part], mixed, mask=row < rows)
    for out, found in zip(outs[1:], sums[1:], strict=True):
        plgpu.store(out, found, mask=row < rows)


def by_kernel(
    rows: Float[Array, "S K rows H"],
    keys: Float[Array, "pages K H page"],
    values: Float[Array, "pages K value page"] | None,
    table: Int[Array, "S pages_of_slot"],
    places: Int[Array, " S"],
    ends: Int[Array, " S"],
    *,
    group: int,
    reach: Reach,
    scoring: Scoring,
    value_size: int,
    interpret: bool = False,
) -> Sums:
    """Returns the sums of queries over pages as `paged_attention.by_kernel`.

    Where slots and heads are few, several programs share the pages of a slot, and their sums are
    added.
    """
    num_slots, heads, num_rows, size = rows.shape
    pools = [keys] if values is None else [keys, values]
    count = min(pl.next_power_of_2(num_rows), _KEPT // pl.next_power_of_2(value_size))
    count = max(_LEAST, count)  # rows of a program
    blocks = pl.cdiv(num_rows, count)
    splits = pl.cdiv(_PROGRAMS, num_slots * heads * blocks)
    # Sums are written, and read to be added.
    sums_bytes = 2 * num_rows * value_size * 4
    slot_bytes = table.shape[1] * sum(a.shape[2] * a.shape[3] * a.dtype.itemsize for a in pools)
    splits = max(1, min(splits, slot_bytes // (_SMALL * sums_bytes)))
    # Values that are the first dims of keys are parts of their own.
    of_values = _parts(value_size)
    of_keys = of_values + _parts(size - value_size, value_size) if values is None else _parts(size)

    def of_slot(*dims):
        return pl.BlockSpec((None, *dims), lambda b, k, s, i: (s, *(0 for _ in dims)))

    widths = value_size, 1, 1
    found = pl.pallas_call(
        functools.partial(
            _kernel,
            group=group,
            reach=reach,
            scoring=scoring,
            rows=num_rows,
            key_parts=of_keys,
            value_parts=of_values,
            splits=splits,
        ),
        grid=(blocks, heads, num_slots, splits),
        in_specs=[
            of_slot(),
            of_slot(),
            of_slot(table.shape[1]),
            pl.BlockSpec((None, None, count, size), lambda b, k, s, i: (s, k, b, 0)),
            *(pl.BlockSpec(pool.shape, lambda *_: (0,) * 4) for pool in pools),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, count, w), lambda b, k, s, i: (i, s, k, b, 0))
            for w in widths
        ],
        out_shape=[
            jax.ShapeDtypeStruct((splits, num_slots, heads, num_rows, w), jnp.float32)
            for w in widths
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
    )(places, ends, table, rows, *pools)
    mixed, total, top = found
    most = top.max(axis=0)
    kept = jnp.exp(top - most)
    return Sums((mixed * kept).sum(axis=0), (total * kept).sum(axis=0), most)
