"""Attention of decode steps over pages where they lie, on GPUs: a Pallas kernel by Triton.

Each program of its grid reads a part of the pages of one slot for one head of keys, so that long
sequences keep several processors at work; programs behind the end of a sequence read nothing. The
parts are joined afterwards, as sums of a softmax.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from jaxrl_llm.models import low_precision
from jaxrl_llm.models.attention import Scoring, capped
from jaxrl_llm.rollout.paged_attention import UNSEEN, Reach, Sums

_PART_TOKENS = 2048  # that one program of the grid reads at the most, about
_FEWEST_ROWS = 16  # of a product on these processors


def takes(head_size: int, value_size: int, page_tokens: int, dtype: Any) -> bool:
    """Returns whether the kernel reads such pages.

    Its blocks are powers of two; values are apart from keys; not all GPUs convert eight bits.
    """
    sizes = head_size, value_size, page_tokens
    powers = all(size >= 16 and size & (size - 1) == 0 for size in sizes)
    return powers and not low_precision.is_rounded(dtype)


def _kernel(
    q, keys, values, table, places, ends, mixed_out, total_out, top_out,
    *, group: int, reach: Reach, scoring: Scoring, part_pages: int,
):  # fmt: skip
    """Some pages of one slot, for one head of keys and all queries that read it."""
    slot, head, part = (pl.program_id(axis) for axis in range(3))
    rows, size = q.shape
    page, value_size = keys.shape[3], values.shape[2]
    place, end = places[slot], ends[slot]
    of_rows = place + lax.broadcasted_iota(jnp.int32, (rows, page), 0) // group
    first = reach.first(of_rows)
    begin = jnp.maximum(reach.first(place) // page, part * part_pages)
    behind = jnp.minimum((end + page - 1) // page, (part + 1) * part_pages)
    asked = q[...]

    def read(number, sums):
        mixed, total, top = sums
        here = table[slot, number]
        k, v = (ref[here, head].astype(asked.dtype) for ref in (keys, values))
        at = number * page + lax.broadcasted_iota(jnp.int32, (rows, page), 1)
        seen = (at >= first) & (at < end)
        scores = plgpu.dot(asked, k).astype(jnp.float32) * (scoring.scale or size**-0.5)
        scores = jnp.where(seen, capped(scores, scoring.cap), UNSEEN)
        now = jnp.maximum(top, scores.max(axis=1))
        kept = jnp.exp(top - now)
        weights = jnp.where(seen, jnp.exp(scores - now[:, None]), 0.0)
        found = plgpu.dot(weights.astype(v.dtype), v, trans_b=True).astype(jnp.float32)
        mixed = mixed * kept[:, None] + found
        return mixed, total * kept + weights.sum(axis=1), now

    nothing = jnp.zeros(rows, jnp.float32)
    blank = jnp.zeros((rows, value_size), jnp.float32), nothing, nothing + UNSEEN
    mixed, total, top = lax.fori_loop(begin, behind, read, blank)
    mixed_out[...] = mixed
    total_out[...] = total
    top_out[...] = top


def by_kernel(
    rows: Float[Array, "S K rows H"],
    keys: Float[Array, "pages K H page"],
    values: Float[Array, "pages K value page"],
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
    """Returns the sums of queries over pages, as `paged_attention.by_kernel` does for TPUs."""
    num_slots, heads, count, size = rows.shape
    page, most = keys.shape[3], table.shape[1]
    part_pages = max(1, _PART_TOKENS // page)
    parts = -(-most // part_pages)
    padded = max(_FEWEST_ROWS, pl.next_power_of_2(count))
    asked = jnp.pad(rows, ((0, 0), (0, 0), (0, padded - count), (0, 0)))
    dims = num_slots, heads, parts, padded

    def block(*sizes):
        return pl.BlockSpec(
            (None, None, None, *sizes), lambda s, k, p: (s, k, p, *[0] * len(sizes))
        )

    whole = [
        pl.BlockSpec(array.shape, lambda s, k, p, n=array.ndim: (0,) * n)
        for array in (keys, values, table, places, ends)
    ]
    mixed, total, top = pl.pallas_call(
        functools.partial(
            _kernel,
            group=group,
            reach=reach,
            scoring=scoring._replace(sinks=None),
            part_pages=part_pages,
        ),
        grid=(num_slots, heads, parts),
        in_specs=[pl.BlockSpec((None, None, padded, size), lambda s, k, p: (s, k, 0, 0)), *whole],
        out_specs=[block(padded, value_size), block(padded), block(padded)],
        out_shape=[
            jax.ShapeDtypeStruct((*dims, value_size), jnp.float32),
            jax.ShapeDtypeStruct(dims, jnp.float32),
            jax.ShapeDtypeStruct(dims, jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
    )(asked, keys, values, table, places, ends)
    best = top.max(axis=2, keepdims=True)
    shares = jnp.exp(top - best)[..., None]
    joined = (mixed * shares).sum(axis=2), (total[..., None] * shares).sum(axis=2), best[:, :, 0]
    return Sums(joined[0][:, :, :count], joined[1][:, :, :count], joined[2][:, :, :count, None])
