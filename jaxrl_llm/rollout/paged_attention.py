"""Attention of decode steps over pages where they lie, on accelerators.

What queries find in the pages comes as sums that are joined with those of recent tokens
(`together`). On TPUs a Pallas kernel finds them: its grid is one list of the pages that anyone
sees, so that it reads each sequence to its own length and nothing else. On GPUs it is that of
`paged_attention_gpu`, elsewhere a loop over the pages of all slots, as far as the longest has any.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.attention import Scoring, capped

_UNSEEN = -1e30
_STEP_BYTES = 1 << 20  # of pages that one step of the kernel's grid reads, about
_MOST_PAGES = 8  # of one step


class Sums(NamedTuple):
    """A softmax in parts: weights are exp(score - top), whatever else there is to see."""

    mixed: Any  # values times their weights [S, K, rows, value], or parts of them
    total: Float[Array, "S K rows 1"]  # of the weights
    top: Float[Array, "S K rows 1"]


class Reach(NamedTuple):
    """How far a layer's queries look; static."""

    window: int
    chunk: int

    def first(self, place: Int[Array, "..."]) -> Int[Array, "..."]:
        """Returns the first position that a query at `place` sees."""
        found = jnp.zeros_like(place)
        if self.window:
            found = jnp.maximum(found, place - self.window + 1)
        return jnp.maximum(found, place - place % self.chunk) if self.chunk else found


class Work(NamedTuple):
    """The steps of the kernel's grid, those of a slot one after another."""

    num_steps: Int[Array, "1"]  # an array, as others of a shard
    slots: Int[Array, " steps"]
    numbers: Int[Array, " steps"]  # of the step's first page in its sequence
    pages: Int[Array, "steps pages"]  # of what a slot has no page, the page of the step before
    firsts: Int[Array, " S"]  # number of the first page that a slot reads
    counts: Int[Array, " S"]  # steps of a slot


def work(
    table: Int[Array, "S pages"],
    firsts: Int[Array, " S"],
    ends: Int[Array, " S"],
    page_tokens: int,
    step_pages: int,
) -> Work:
    """Returns what to read of slots that see the positions [firsts, ends)."""
    num_slots, most = table.shape
    first = jnp.minimum(firsts, ends) // page_tokens
    held = -(-ends // page_tokens)
    counts = -(-(held - first) // step_pages)
    after = jnp.cumsum(counts)
    steps = jnp.arange(num_slots * -(-most // step_pages))
    slots = jnp.minimum(jnp.searchsorted(after, steps, side="right"), num_slots - 1)
    numbers = first[slots] + (steps - (after - counts)[slots]) * step_pages
    wanted = numbers[:, None] + jnp.arange(step_pages)
    pages = table[slots[:, None], jnp.minimum(wanted, most - 1)]
    # A page that is as in the step before is not read again.
    there = (wanted < held[slots][:, None]) & (steps < after[-1])[:, None]
    last = lax.cummax(jnp.where(there, steps[:, None], 0), axis=0)
    pages = jnp.take_along_axis(pages, last, axis=0)
    ints = (a.astype(jnp.int32) for a in (slots, numbers, pages, first, counts))
    return Work(jnp.maximum(after[-1:], 1).astype(jnp.int32), *ints)


def step_pages(keys: Float[Array, "pages K H page"], value_size: int) -> int:
    """Returns how many pages one step of the kernel's grid reads."""
    _, heads, size, page = keys.shape
    held = heads * (size + value_size) * page * keys.dtype.itemsize
    return max(1, min(_MOST_PAGES, _STEP_BYTES // held))


def _kernel(
    slots, numbers, pages, firsts, counts, places, ends, q, *refs,
    count: int, group: int, reach: Reach, scoring: Scoring, value_size: int,
):  # fmt: skip
    """One step of the grid: some pages of one slot; `refs` are pages, results and scratch."""
    del pages
    keys, values = refs[:count], refs[count:-6]
    mixed_out, total_out, top_out, mixed, total, top = refs[-6:]
    step = pl.program_id(0)
    slot = slots[step]
    number = numbers[step]

    @pl.when(number == firsts[slot])
    def _():
        mixed[...] = jnp.zeros_like(mixed)
        total[...] = jnp.zeros_like(total)
        top[...] = jnp.full_like(top, _UNSEEN)

    heads, rows, _ = q.shape[1:]
    page = keys[0].shape[3]
    place = places[slot] + lax.broadcasted_iota(jnp.int32, (rows, page), 0) // group
    first, end = reach.first(place), ends[slot]
    for i in range(count):

        @pl.when((number + i) * page < end)
        def _(i=i):
            at = (number + i) * page + lax.broadcasted_iota(jnp.int32, (rows, page), 1)
            seen = (at >= first) & (at < end)
            for head in range(heads):
                k = keys[i][0, head].astype(q.dtype)
                v = values[i][0, head].astype(q.dtype) if values else k[:value_size]
                before = Sums([mixed[head]], total[head, :, :1], top[head, :, :1])
                now = added(before, of_page([q[0, head]], [k], [v], seen, scoring))
                mixed[head] = now.mixed[0]
                total[head] = jnp.broadcast_to(now.total, total.shape[1:])
                top[head] = jnp.broadcast_to(now.top, top.shape[1:])

    @pl.when(number + count >= firsts[slot] + counts[slot] * count)
    def _():
        mixed_out[0] = mixed[...]
        total_out[0] = total[...]
        top_out[0] = top[...]


def by_kernel(
    rows: Float[Array, "S K rows H"],
    keys: Float[Array, "pages K H page"],
    values: Float[Array, "pages K value page"] | None,
    todo: Work,
    places: Int[Array, " S"],
    ends: Int[Array, " S"],
    *,
    group: int,
    reach: Reach,
    scoring: Scoring,
    value_size: int,
    interpret: bool = False,
) -> Sums:
    """Returns the sums of queries over pages, by a Pallas kernel for TPUs.

    Args:
      rows: Queries of the slots; the heads that share keys lie together, `group` of them.
      values: None: they are the first `value_size` dims of keys.
      todo: Of these slots and pages; `places` are those of the slots' first queries.
    """
    num_slots, heads, count_rows, size = rows.shape
    page, count = keys.shape[3], todo.pages.shape[1]
    lanes = 128

    def of_slot(*dims):
        return pl.BlockSpec((1, *dims), lambda step, slots, *_: (slots[step], 0, 0, 0))

    def of_page(array, i):
        dims = (1, *array.shape[1:])
        return pl.BlockSpec(dims, lambda step, slots, numbers, pages, *_: (pages[step, i], 0, 0, 0))

    pools = [keys] if values is None else [keys, values]
    results = [(heads, count_rows, width) for width in (value_size, lanes, lanes)]
    kernel = functools.partial(
        _kernel,
        count=count,
        group=group,
        reach=reach,
        scoring=scoring,
        value_size=value_size,
    )
    bytes_read = todo.pages.size * sum(a[0].size * a.dtype.itemsize for a in pools)
    found = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=7,
            grid=(todo.num_steps[0],),
            in_specs=[
                of_slot(heads, count_rows, size),
                *(of_page(pool, i) for pool in pools for i in range(count)),
            ],
            out_specs=[of_slot(*dims) for dims in results],
            scratch_shapes=[pltpu.VMEM(dims, jnp.float32) for dims in results],
        ),
        out_shape=[jax.ShapeDtypeStruct((num_slots, *dims), jnp.float32) for dims in results],
        cost_estimate=pl.CostEstimate(
            flops=2 * count_rows * heads * page * (size + value_size) * todo.pages.size,
            bytes_accessed=bytes_read,
            transcendentals=count_rows * heads * page * todo.pages.size,
        ),
        interpret=interpret,
    )(*todo[1:], places, ends, rows, *(pool for pool in pools for _ in range(count)))
    mixed, total, top = found
    read = (todo.counts > 0)[:, None, None, None]  # the results of other slots are not written
    return Sums(
        jnp.where(read, mixed, 0.0),
        jnp.where(read, total[..., :1], 0.0),
        jnp.where(read, top[..., :1], _UNSEEN),
    )


def by_loop(
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
) -> Sums:
    """Returns what the kernels do, one page of every slot after another."""
    page = keys.shape[3]
    place = places[:, None, None] + (jnp.arange(rows.shape[2]) // group)[:, None]
    first = reach.first(place)  # [S, rows, 1]
    of_heads = jax.vmap(functools.partial(of_page, scoring=scoring), (0, 0, 0, None))

    def read(number, sums):
        here = jnp.take(table, number, axis=1)
        k = keys[here].astype(rows.dtype)
        v = k[:, :, :value_size] if values is None else values[here].astype(rows.dtype)
        at = number * page + jnp.arange(page)
        seen = (at >= first) & (at < ends[:, None, None])
        return added(sums, jax.vmap(of_heads)([rows], [k], [v], seen))

    begin = jnp.min(jnp.where(ends > 0, first[:, 0, 0], jnp.max(ends))) // page
    sums = nothing(*rows.shape[:3], sizes=[value_size])
    found = lax.fori_loop(begin, -(-jnp.max(ends) // page), read, sums)
    return found._replace(mixed=found.mixed[0])


def nothing(*dims: int, sizes: Sequence[int]) -> Sums:
    """Returns the sums of rows that saw nothing; `mixed` has parts of these sizes."""
    one = jnp.zeros((*dims, 1), jnp.float32)
    return Sums([jnp.zeros((*dims, size), jnp.float32) for size in sizes], one, one + _UNSEEN)


def of_page(
    rows: Sequence[Float[Array, "rows _"]],
    keys: Sequence[Float[Array, "_ page"]],
    values: Sequence[Float[Array, "_ page"]],
    seen: Bool[Array, "rows page"],
    scoring: Scoring,
) -> Sums:
    """Returns the sums of a head's rows over one page; sizes of heads come in parts."""
    wide = {"preferred_element_type": jnp.float32}
    size = sum(part.shape[1] for part in rows)
    products = (jnp.dot(r, k, **wide) for r, k in zip(rows, keys, strict=True))
    scores = functools.reduce(jnp.add, products) * (scoring.scale or size**-0.5)
    found = weighed(scores, seen, scoring, keys[0].dtype)
    turned = (((1,), (1,)), ((), ()))
    return found._replace(mixed=[lax.dot_general(found.mixed, v, turned, **wide) for v in values])


def weighed(scores, seen, scoring: Scoring, dtype) -> Sums:
    """Returns sums of scaled scores [..., rows, keys]; `mixed` are the weights themselves."""
    scores = jnp.where(seen, capped(scores, scoring.cap), _UNSEEN)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    return Sums(weights.astype(dtype), weights.sum(axis=-1, keepdims=True), top)


def added(a: Sums, b: Sums) -> Sums:
    """Returns the sums over what both saw."""
    top = jnp.maximum(a.top, b.top)
    of_a, of_b = jnp.exp(a.top - top), jnp.exp(b.top - top)
    mixed, total = jax.tree.map(lambda x, y: x * of_a + y * of_b, a[:2], b[:2])
    return Sums(mixed, total, top)


def together(a: Sums, b: Sums, sinks: Float[Array, "K rows"] | None) -> Float[Array, "S K rows V"]:
    """Returns attention over what both saw, and a sink; zeros where that is nothing."""
    both = added(a, b)
    total = both.total
    if sinks is not None:
        total = total + jnp.exp(sinks.astype(jnp.float32)[..., None] - both.top)
    return both.mixed / jnp.maximum(total, 1e-30)
