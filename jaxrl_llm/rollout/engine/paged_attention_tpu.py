"""Paged attention for decode steps: a Pallas TPU kernel, and a loop in plain JAX.

Both return an online softmax state (unnormalized output, sum of weights, maximum score) that is
merged with that of recent tokens (`merged_attention`). The grid of the TPU kernel is a flat list of
the pages that any query sees, so it reads each sequence to its own length and nothing else. The GPU
kernel is in `paged_attention_gpu`. The loop reads pages of all slots up to the longest sequence.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.attention import AttentionScoring, soft_capped

_MASKED_SCORE = -1e30
_STEP_BYTES = 1 << 20  # of pages read by one step of the kernel's grid, about
_MAX_STEP_PAGES = 8  # read by one step


class OnlineSoftmax(NamedTuple):
    """Online softmax state of some keys: weights are exp(score - top), not yet normalized."""

    weighted_values: Any  # sum of weight * value [S, K, rows, value], or parts along the head
    weight_sum: Float[Array, "S K rows 1"]  # sum of the weights
    max_score: Float[Array, "S K rows 1"]  # maximum score


class AttentionWindow(NamedTuple):
    """Sliding window and chunk size of a layer's attention, 0 for none; static."""

    window: int
    chunk: int

    def first_visible(self, position: Int[Array, "..."]) -> Int[Array, "..."]:
        """First position visible to a query at `position`."""
        first_visible = jnp.zeros_like(position)
        if self.window:
            first_visible = jnp.maximum(first_visible, position - self.window + 1)
        return (
            jnp.maximum(first_visible, position - position % self.chunk)
            if self.chunk
            else first_visible
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedQueries:
    """The queries of a decode step and the pages that they attend to, of one layer."""

    rows: Float[Array, "S K rows H"]  # the `group` heads that share a KV head are adjacent
    keys: Float[Array, "pages K H page"]
    # None: the first `value_size` dims of keys
    values: Float[Array, "pages K value page"] | None
    query_positions: Int[Array, " S"]  # of the slots' first queries
    ends: Int[Array, " S"]  # one past each slot's last position in the pages
    group: int = dataclasses.field(metadata={"static": True})
    reach: AttentionWindow = dataclasses.field(metadata={"static": True})
    scoring: AttentionScoring = dataclasses.field(metadata={"static": True})
    value_size: int = dataclasses.field(metadata={"static": True})

    @property
    def pools(self) -> list[Array]:
        """The arrays of pages."""
        return [self.keys] if self.values is None else [self.keys, self.values]


class PageSchedule(NamedTuple):
    """The steps of the TPU kernel's grid; those of a slot are consecutive."""

    num_steps: Int[Array, "1"]  # an array, so that it can differ between shards
    slots: Int[Array, " steps"]
    page_indices: Int[Array, " steps"]  # index of the step's first page in its sequence
    page_ids: Int[Array, "steps pages"]  # past the end of a slot: that of the step before
    first_pages: Int[Array, " S"]  # index of the first page that a slot reads
    steps_per_slot: Int[Array, " S"]  # steps per slot


def page_schedule(
    table: Int[Array, "S pages"],
    firsts: Int[Array, " S"],
    ends: Int[Array, " S"],
    page_tokens: int,
    step_pages: int,
) -> PageSchedule:
    """Schedule of the pages to read for slots whose queries see positions [firsts, ends)."""
    num_slots, pages_per_slot = table.shape
    first = jnp.minimum(firsts, ends) // page_tokens
    page_counts = -(-ends // page_tokens)
    counts = -(-(page_counts - first) // step_pages)
    cumulative_steps = jnp.cumsum(counts)
    steps = jnp.arange(num_slots * -(-pages_per_slot // step_pages))
    slots = jnp.minimum(jnp.searchsorted(cumulative_steps, steps, side="right"), num_slots - 1)
    numbers = first[slots] + (steps - (cumulative_steps - counts)[slots]) * step_pages
    page_indices = numbers[:, None] + jnp.arange(step_pages)
    pages = table[slots[:, None], jnp.minimum(page_indices, pages_per_slot - 1)]
    # Pallas fetches a block only if its index differs from the step before. So entries past the
    # end of a slot repeat the page of the last step that had one, and cost no read.
    is_live = (page_indices < page_counts[slots][:, None]) & (steps < cumulative_steps[-1])[:, None]
    last_live_step = lax.cummax(jnp.where(is_live, steps[:, None], 0), axis=0)
    pages = jnp.take_along_axis(pages, last_live_step, axis=0)
    ints = (a.astype(jnp.int32) for a in (slots, numbers, pages, first, counts))
    return PageSchedule(jnp.maximum(cumulative_steps[-1:], 1).astype(jnp.int32), *ints)


def pages_per_step(keys: Float[Array, "pages K H page"], value_size: int) -> int:
    """Pages that one step of the TPU kernel's grid reads."""
    _, heads, size, page = keys.shape
    page_bytes = heads * (size + value_size) * page * keys.dtype.itemsize
    return max(1, min(_MAX_STEP_PAGES, _STEP_BYTES // page_bytes))


def _kernel(
    slots, page_indices, pages, firsts, counts, first_queries, ends, q, *refs,
    pages_per_step: int, group: int, reach: AttentionWindow, scoring: AttentionScoring,
    value_size: int,
):  # fmt: skip
    """One step of the grid: some pages of one slot; `refs` are pages, outputs and scratch."""
    del pages
    keys, values = refs[:pages_per_step], refs[pages_per_step:-6]
    mixed_out, total_out, top_out, mixed, total, top = refs[-6:]
    step = pl.program_id(0)
    slot = slots[step]
    page_index = page_indices[step]

    @pl.when(page_index == firsts[slot])
    def _():
        mixed[...] = jnp.zeros_like(mixed)
        total[...] = jnp.zeros_like(total)
        top[...] = jnp.full_like(top, _MASKED_SCORE)

    heads, rows, _ = q.shape[1:]
    page = keys[0].shape[3]
    query_positions = (
        first_queries[slot] + lax.broadcasted_iota(jnp.int32, (rows, page), 0) // group
    )
    first_visible, end = reach.first_visible(query_positions), ends[slot]
    for i in range(pages_per_step):

        @pl.when((page_index + i) * page < end)
        def _(i=i):
            key_positions = (page_index + i) * page + lax.broadcasted_iota(
                jnp.int32, (rows, page), 1
            )
            visible = (key_positions >= first_visible) & (key_positions < end)
            for head in range(heads):
                k = keys[i][0, head].astype(q.dtype)
                v = values[i][0, head].astype(q.dtype) if values else k[:value_size]
                running = OnlineSoftmax([mixed[head]], total[head, :, :1], top[head, :, :1])
                merged = merge_softmax(
                    running, page_softmax([q[0, head]], [k], [v], visible, scoring)
                )
                mixed[head] = merged.weighted_values[0]
                total[head] = jnp.broadcast_to(merged.weight_sum, total.shape[1:])
                top[head] = jnp.broadcast_to(merged.max_score, top.shape[1:])

    @pl.when(page_index + pages_per_step >= firsts[slot] + counts[slot] * pages_per_step)
    def _():
        mixed_out[0] = mixed[...]
        total_out[0] = total[...]
        top_out[0] = top[...]


def tpu_partial_attention(
    queries: PagedQueries, schedule: PageSchedule, *, interpret: bool = False
) -> OnlineSoftmax:
    """Softmax state of queries over their pages, by a Pallas kernel for TPUs.

    `schedule` is from `page_schedule`, for the same slots and pages.
    """
    num_slots, heads, num_rows, size = queries.rows.shape
    page, pages_per_step = queries.keys.shape[3], schedule.page_ids.shape[1]
    pools, value_size, lanes = queries.pools, queries.value_size, 128

    def slot_spec(*dims):
        return pl.BlockSpec((1, *dims), lambda step, slots, *_: (slots[step], 0, 0, 0))

    def page_spec(array, i):
        dims = (1, *array.shape[1:])
        return pl.BlockSpec(dims, lambda step, slots, numbers, pages, *_: (pages[step, i], 0, 0, 0))

    output_dims = [(heads, num_rows, width) for width in (value_size, lanes, lanes)]
    kernel = functools.partial(
        _kernel,
        pages_per_step=pages_per_step,
        group=queries.group,
        reach=queries.reach,
        scoring=queries.scoring,
        value_size=value_size,
    )
    bytes_read = schedule.page_ids.size * sum(a[0].size * a.dtype.itemsize for a in pools)
    outputs = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=7,
            grid=(schedule.num_steps[0],),
            in_specs=[
                slot_spec(heads, num_rows, size),
                *(page_spec(pool, i) for pool in pools for i in range(pages_per_step)),
            ],
            out_specs=[slot_spec(*dims) for dims in output_dims],
            scratch_shapes=[pltpu.VMEM(dims, jnp.float32) for dims in output_dims],
        ),
        out_shape=[jax.ShapeDtypeStruct((num_slots, *dims), jnp.float32) for dims in output_dims],
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * heads * page * (size + value_size) * schedule.page_ids.size,
            bytes_accessed=bytes_read,
            transcendentals=num_rows * heads * page * schedule.page_ids.size,
        ),
        interpret=interpret,
    )(
        *schedule[1:],
        queries.query_positions,
        queries.ends,
        queries.rows,
        *(pool for pool in pools for _ in range(pages_per_step)),
    )
    mixed, total, top = outputs
    # the kernel never writes other slots
    has_pages = (schedule.steps_per_slot > 0)[:, None, None, None]
    return OnlineSoftmax(
        jnp.where(has_pages, mixed, 0.0),
        jnp.where(has_pages, total[..., :1], 0.0),
        jnp.where(has_pages, top[..., :1], _MASKED_SCORE),
    )


def loop_partial_attention(
    queries: PagedQueries, table: Int[Array, "S pages_of_slot"]
) -> OnlineSoftmax:
    """Softmax state as from `tpu_partial_attention`, by a loop that reads one page of every slot at
    a time.
    """
    rows, ends, page = queries.rows, queries.ends, queries.keys.shape[3]
    row_offsets = (jnp.arange(rows.shape[2]) // queries.group)[:, None]
    row_positions = queries.query_positions[:, None, None] + row_offsets
    first_visible = queries.reach.first_visible(row_positions)  # [S, rows, 1]
    softmax = functools.partial(page_softmax, scoring=queries.scoring)
    heads_softmax = jax.vmap(softmax, (0, 0, 0, None))

    def add_page(page_index, sums):
        page_ids = jnp.take(table, page_index, axis=1)
        k, *v = (pool[page_ids].astype(rows.dtype) for pool in queries.pools)
        v = v or [k[:, :, : queries.value_size]]
        key_positions = page_index * page + jnp.arange(page)
        visible = (key_positions >= first_visible) & (key_positions < ends[:, None, None])
        return merge_softmax(sums, jax.vmap(heads_softmax)([rows], [k], v, visible))

    first_page = jnp.min(jnp.where(ends > 0, first_visible[:, 0, 0], jnp.max(ends))) // page
    sums = empty_softmax(*rows.shape[:3], sizes=[queries.value_size])
    final = lax.fori_loop(first_page, -(-jnp.max(ends) // page), add_page, sums)
    return final._replace(weighted_values=final.weighted_values[0])


def empty_softmax(*dims: int, sizes: Sequence[int]) -> OnlineSoftmax:
    """Softmax state of rows without visible keys; `weighted_values` has parts of these sizes."""
    zeros = jnp.zeros((*dims, 1), jnp.float32)
    return OnlineSoftmax(
        [jnp.zeros((*dims, size), jnp.float32) for size in sizes], zeros, zeros + _MASKED_SCORE
    )


def page_softmax(
    rows: Sequence[Float[Array, "rows _"]],
    keys: Sequence[Float[Array, "_ page"]],
    values: Sequence[Float[Array, "_ page"]],
    visible: Bool[Array, "rows page"],
    scoring: AttentionScoring,
) -> OnlineSoftmax:
    """Softmax state of one head's rows over one page; arrays come in parts along the head size."""
    f32 = {"preferred_element_type": jnp.float32}
    size = sum(part.shape[1] for part in rows)
    products = (jnp.dot(r, k, **f32) for r, k in zip(rows, keys, strict=True))
    scores = functools.reduce(jnp.add, products) * (scoring.scale or size**-0.5)
    softmax = masked_softmax(scores, visible, scoring, keys[0].dtype)
    transposed = (((1,), (1,)), ((), ()))
    return softmax._replace(
        weighted_values=[
            lax.dot_general(softmax.weighted_values, v, transposed, **f32) for v in values
        ]
    )


def masked_softmax(scores, visible, scoring: AttentionScoring, dtype) -> OnlineSoftmax:
    """Softmax state of scaled scores [..., rows, keys]; `weighted_values` are the weights
    themselves.
    """
    scores = jnp.where(visible, soft_capped(scores, scoring.cap), _MASKED_SCORE)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.where(visible, jnp.exp(scores - top), 0.0)
    return OnlineSoftmax(weights.astype(dtype), weights.sum(axis=-1, keepdims=True), top)


def merge_softmax(a: OnlineSoftmax, b: OnlineSoftmax) -> OnlineSoftmax:
    """Softmax state over the keys of both, as in FlashAttention (2205.14135)."""
    top = jnp.maximum(a.max_score, b.max_score)
    scale_a, scale_b = jnp.exp(a.max_score - top), jnp.exp(b.max_score - top)
    mixed, total = jax.tree.map(lambda x, y: x * scale_a + y * scale_b, a[:2], b[:2])
    return OnlineSoftmax(mixed, total, top)


def merged_attention(
    a: OnlineSoftmax, b: OnlineSoftmax, sinks: Float[Array, "K rows"] | None
) -> Float[Array, "S K rows V"]:
    """Normalized attention over the keys of both, and a sink per row; 0 without visible keys."""
    both = merge_softmax(a, b)
    total = both.weight_sum
    if sinks is not None:
        total = total + jnp.exp(sinks.astype(jnp.float32)[..., None] - both.max_score)
    return both.weighted_values / jnp.maximum(total, 1e-30)
