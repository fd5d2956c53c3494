"""Paged attention for decode steps by a Pallas kernel for NVIDIA GPUs (split-K over pages).

Each program reads a run of consecutive pages of one slot, only those that its queries see. Triton,
which compiles it, requires array sizes that are powers of two: other head sizes are read in parts,
and missing rows are masked.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

from jaxrl_llm.models.attention import AttentionScoring
from jaxrl_llm.rollout.engine.paged_attention_tpu import (
    AttentionWindow,
    OnlineSoftmax,
    PagedQueries,
    empty_softmax,
    merge_softmax,
    page_softmax,
)

_TARGET_PROGRAMS = 1024  # per call, if there are enough pages: keeps all SMs busy to the end
_MAX_OUTPUTS = 8192  # float32 outputs per program: 64 registers per thread of four warps
_MERGE_RATIO = 32  # bytes of pages per byte of partial results when a slot is split
_MIN_DIM = 16  # of a matmul operand in Triton


def kernel_supports(pools: Sequence[Array | jax.ShapeDtypeStruct], value_size: int) -> bool:
    """Whether `gpu_partial_attention` can read these pages [pages, K, H, page] of keys, and of
    values if any.

    Head sizes must be multiples of 16, and the page size a power of two of at least 16. 8-bit pools
    must have less than 2^31 elements, as offsets are 32 bits: Pallas only checks for 4 GiB.
    """
    page = pools[0].shape[3]
    sizes = page, value_size, *(pool.shape[2] for pool in pools)
    is_addressable = all(pool.dtype.itemsize > 1 or pool.size < 1 << 31 for pool in pools)
    return is_addressable and page & (page - 1) == 0 and all(size % _MIN_DIM == 0 for size in sizes)


def _parts(size: int, start: int = 0) -> list[Any]:
    """Power-of-two slices that cover `size`, as Triton requires them.

    >>> [part.size for part in _parts(576)]
    [512, 64]
    """
    slices = []
    for bit in reversed(range(size.bit_length())):
        if size >> bit & 1:
            slices.append(pl.ds(start, 1 << bit))
            start += 1 << bit
    return slices


def _kernel(
    first_queries, ends, table, q, keys, *refs,
    group: int, reach: AttentionWindow, scoring: AttentionScoring, rows: int,
    key_parts, value_parts, splits: int,
):  # fmt: skip
    """One program of the grid: one split of a slot's pages, for a block of a head's rows."""
    values, outs = refs[:-3], refs[-3:]
    block, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(3)
    block_rows, page, end = q.shape[0], keys.shape[3], ends[...]
    row = block * block_rows + lax.broadcasted_iota(jnp.int32, (block_rows, 1), 0)
    first_query = first_queries[...]
    # The first query of the block sees the earliest page.
    first_page = (
        jnp.minimum(reach.first_visible(first_query + block * block_rows // group), end) // page
    )
    num_pages = pl.cdiv(end, page)
    pages_per_split = pl.cdiv(num_pages - first_page, splits)
    first_page += split * pages_per_split
    first_visible = reach.first_visible(first_query + row // group)
    queries = [plgpu.load(q.at[:, part], mask=row < rows, other=0.0) for part in key_parts]

    def add_page(page_index, sums):
        page_id = table[page_index]
        k = [keys[page_id, head, part].astype(q.dtype) for part in key_parts]
        # Without a pool of values, they are the first parts of keys.
        v = [pool[page_id, head, part].astype(q.dtype) for pool in values for part in value_parts]
        v = v or k[: len(value_parts)]
        key_positions = page_index * page + lax.broadcasted_iota(jnp.int32, (1, page), 1)
        return merge_softmax(
            sums,
            page_softmax(
                queries, k, v, (key_positions >= first_visible) & (key_positions < end), scoring
            ),
        )

    sums = empty_softmax(block_rows, sizes=[part.size for part in value_parts])
    sums = lax.fori_loop(
        first_page, jnp.minimum(first_page + pages_per_split, num_pages), add_page, sums
    )
    for part, mixed in zip(value_parts, sums.weighted_values, strict=True):
        plgpu.store(outs[0].at[:, part], mixed, mask=row < rows)
    for out, state in zip(outs[1:], sums[1:], strict=True):
        plgpu.store(out, state, mask=row < rows)


def gpu_partial_attention(
    queries: PagedQueries, table: Int[Array, "S pages_of_slot"], *, interpret: bool = False
) -> OnlineSoftmax:
    """Softmax state of queries over their pages, as from `tpu_partial_attention`.

    With few slots and heads, several programs split the pages of a slot (as in FlashDecoding), and
    their states are merged.
    """
    num_slots, heads, num_rows, size = queries.rows.shape
    pools, value_size = queries.pools, queries.value_size
    block_rows = min(pl.next_power_of_2(num_rows), _MAX_OUTPUTS // pl.next_power_of_2(value_size))
    block_rows = max(_MIN_DIM, block_rows)  # rows per program
    blocks = pl.cdiv(num_rows, block_rows)
    splits = pl.cdiv(_TARGET_PROGRAMS, num_slots * heads * blocks)
    # Partial results are written, then read to be merged.
    sums_bytes = 2 * num_rows * value_size * 4
    slot_bytes = table.shape[1] * sum(a.shape[2] * a.shape[3] * a.dtype.itemsize for a in pools)
    splits = max(1, min(splits, slot_bytes // (_MERGE_RATIO * sums_bytes)))
    # Values that are the first dims of keys need slices of their own.
    value_parts = _parts(value_size)
    key_parts = _parts(size)
    if queries.values is None:
        key_parts = value_parts + _parts(size - value_size, value_size)

    def slot_spec(*dims):
        return pl.BlockSpec((None, *dims), lambda b, k, s, i: (s, *(0 for _ in dims)))

    widths = value_size, 1, 1
    partials = pl.pallas_call(
        functools.partial(
            _kernel,
            group=queries.group,
            reach=queries.reach,
            scoring=queries.scoring,
            rows=num_rows,
            key_parts=key_parts,
            value_parts=value_parts,
            splits=splits,
        ),
        grid=(blocks, heads, num_slots, splits),
        in_specs=[
            slot_spec(),
            slot_spec(),
            slot_spec(table.shape[1]),
            pl.BlockSpec((None, None, block_rows, size), lambda b, k, s, i: (s, k, b, 0)),
            *(pl.BlockSpec(pool.shape, lambda *_: (0,) * 4) for pool in pools),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, block_rows, w), lambda b, k, s, i: (i, s, k, b, 0))
            for w in widths
        ],
        out_shape=[
            jax.ShapeDtypeStruct((splits, num_slots, heads, num_rows, w), jnp.float32)
            for w in widths
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
    )(queries.query_positions, queries.ends, table, queries.rows, *pools)
    mixed, total, top = partials
    max_top = top.max(axis=0)
    rescale = jnp.exp(top - max_top)
    return OnlineSoftmax((mixed * rescale).sum(axis=0), (total * rescale).sum(axis=0), max_top)
