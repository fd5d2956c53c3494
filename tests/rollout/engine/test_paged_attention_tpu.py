"""Attention over pages: both kernels, interpreted, and the loop, beside the plain form."""

import dataclasses
import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engine_work import LIMIT, assert_same, expected, read_by, rollout_params, workload
from jax.experimental import pallas as pl

from jaxrl_llm.models.attention import AttentionScoring
from jaxrl_llm.planning import compile_only_devices
from jaxrl_llm.rollout.engine import decode_attention, paged_attention_gpu, paged_attention_tpu
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.paged_attention_tpu import AttentionWindow, PagedQueries

PAGE, HEADS, GROUP, SIZE = 8, 2, 3, 16
ENDS = np.array([37, 0, 8, 13], np.int32)  # of four slots; one is free


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def plain(rows, keys, values, table, places, ends, reach, scoring, value_size):
    """Returns attention of every query on its own, in float64; zeros where it sees nothing."""
    rows, keys = np.asarray(rows, np.float64), np.asarray(keys, np.float64)
    page, found = keys.shape[3], np.zeros((*rows.shape[:3], value_size))
    for slot, head, row in np.ndindex(rows.shape[:3]):
        place = places[slot] + row // GROUP
        first = int(reach.first_visible(jnp.asarray(place)))
        at = np.arange(min(first, ends[slot]), ends[slot])
        if not len(at):
            continue
        pages = table[slot, at // page]
        k = keys[pages, head, :, at % page]
        v = k[:, :value_size] if values is None else np.asarray(values)[pages, head, :, at % page]
        scores = k @ rows[slot, head, row] * (scoring.scale or SIZE**-0.5)
        if scoring.cap:
            scores = scoring.cap * np.tanh(scores / scoring.cap)
        weights = np.exp(scores - scores.max())
        found[slot, head, row] = weights @ v / weights.sum()
    return found


CASES = {
    "all": (AttentionWindow(0, 0), AttentionScoring(), 2, 1, False),
    "window and cap": (AttentionWindow(9, 0), AttentionScoring(cap=2.0), 2, 2, False),
    "chunk, values in keys": (AttentionWindow(0, 11), AttentionScoring(scale=0.4), 1, 4, True),
}


@pytest.mark.parametrize(
    "name",
    ["window and cap", *(pytest.param(n, marks=pytest.mark.slow) for n in [*CASES][::2])],
)
def test_the_kernels_and_the_loop_are_the_plain_form(name):
    reach, scoring, width, step_pages, in_keys = CASES[name]
    slots, most = len(ENDS), 5
    num_pages, value_size = slots * most + 2, 12 if in_keys else SIZE
    table = np.random.default_rng(3).permutation(num_pages)[: slots * most].reshape(slots, most)
    keys = random(0, num_pages, HEADS, SIZE, PAGE)
    values = None if in_keys else random(1, num_pages, HEADS, SIZE, PAGE)
    rows = random(2, slots, HEADS, width * GROUP, SIZE)
    places, table = jnp.asarray(ENDS), jnp.asarray(table, jnp.int32)
    how = {"group": GROUP, "reach": reach, "scoring": scoring, "value_size": value_size}
    todo = paged_attention_tpu.page_schedule(
        table, reach.first_visible(places), places, PAGE, step_pages
    )
    kernel = functools.partial(paged_attention_tpu.tpu_partial_attention, interpret=True)
    queries = PagedQueries(rows, keys, values, places, places, **how)
    wanted = plain(rows, keys, values, np.asarray(table), ENDS, ENDS, reach, scoring, value_size)
    gpu_kernel = functools.partial(paged_attention_gpu.gpu_partial_attention, interpret=True)
    for found in (
        jax.jit(kernel)(queries, todo),
        jax.jit(gpu_kernel)(queries, table),
        jax.jit(paged_attention_tpu.loop_partial_attention)(queries, table),
    ):
        seen = np.asarray(found.weight_sum > 0)
        got = np.where(seen, found.weighted_values / np.where(seen, found.weight_sum, 1.0), 0.0)
        np.testing.assert_allclose(got, wanted, atol=2e-6)
        assert (np.asarray(found.weight_sum)[ENDS == 0] == 0).all()


@pytest.mark.parametrize("step_pages", [1, 2, 8])
def test_a_kernel_reads_the_live_pages_and_hardly_another(step_pages):
    """Lengths as reasoning makes them, up to 8192; a page as in the step before is not read."""
    random = np.random.default_rng(0)
    page, slots = 128, 64
    lengths = np.clip(np.exp(random.normal(7.0, 1.0, slots)), 1, 8192).astype(np.int32)
    lengths[::9] = 0
    most = 8192 // page
    table = random.permutation(slots * most).reshape(slots, most).astype(np.int32)
    todo = paged_attention_tpu.page_schedule(
        jnp.asarray(table), jnp.zeros(slots, jnp.int32), jnp.asarray(lengths), page, step_pages
    )
    steps, live = int(todo.num_steps[0]), -(-lengths // page)
    pages = np.asarray(todo.page_ids)[:steps]
    fetched = step_pages + int((pages[1:] != pages[:-1]).sum())
    assert live.sum() <= fetched <= 1.1 * live.sum()
    assert steps == (-(-live // step_pages)).sum()
    # Every live page of every slot is in its steps, in order.
    for slot in range(slots):
        mine = pages[np.asarray(todo.slots)[:steps] == slot].reshape(-1)
        np.testing.assert_array_equal(mine[: live[slot]], table[slot, : live[slot]])


@pytest.mark.parametrize("window", [0, pytest.param(300, marks=pytest.mark.slow)])
def test_the_kernel_fetches_the_live_pages_and_hardly_more(window, monkeypatch):
    """Bytes of the blocks that the grid of an interpreted call brings, beside those that are live.

    A block is brought when its index differs from that of the step before, as pipelines do.
    """
    page, slots, most, step_pages = 128, 24, 16, 4
    random_of = np.random.default_rng(0)
    lengths = np.clip(np.exp(random_of.normal(6.0, 1.0, slots)), 1, most * page).astype(np.int32)
    lengths[::9] = 0
    assert lengths.max() > 5 * np.median(lengths)  # skewed
    num_pages = slots * most
    table = jnp.asarray(random_of.permutation(num_pages).reshape(slots, most), jnp.int32)
    keys, values = (random(seed, num_pages, HEADS, SIZE, page) for seed in (0, 1))
    rows, places, reach = (
        random(2, slots, HEADS, GROUP, SIZE),
        jnp.asarray(lengths),
        AttentionWindow(window, 0),
    )
    first = np.asarray(reach.first_visible(places))
    call, brought, estimated = pl.pallas_call, [], []

    def watched(kernel, *, grid_spec, cost_estimate, **how):
        (steps,) = map(int, grid_spec.grid)
        estimated.append(cost_estimate.bytes_accessed)

        def run(*given):
            scalars = [np.asarray(a) for a in given[: grid_spec.num_scalar_prefetch]]
            arrays = given[grid_spec.num_scalar_prefetch :]
            for spec, array in zip(grid_spec.in_specs, arrays, strict=True):
                at = [tuple(map(int, spec.index_map(i, *scalars))) for i in range(steps)]
                fetches = 1 + sum(a != b for a, b in zip(at[1:], at, strict=False))
                brought.append(fetches * math.prod(spec.block_shape) * array.dtype.itemsize)
            return call(kernel, grid_spec=grid_spec, cost_estimate=cost_estimate, **how)(*given)

        return run

    monkeypatch.setattr(paged_attention_tpu.pl, "pallas_call", watched)
    how = {"group": GROUP, "reach": reach, "scoring": AttentionScoring(), "value_size": SIZE}
    todo = paged_attention_tpu.page_schedule(table, jnp.asarray(first), places, page, step_pages)
    queries = PagedQueries(rows, keys, values, places, places, **how)
    found = paged_attention_tpu.tpu_partial_attention(queries, todo, interpret=True)
    wanted = plain(
        rows, keys, values, np.asarray(table), lengths, lengths, reach, AttentionScoring(), SIZE
    )
    got = found.weighted_values / jnp.maximum(found.weight_sum, 1e-30)
    np.testing.assert_allclose(got, wanted, atol=2e-6)
    of_page = 2 * HEADS * SIZE * page * keys.dtype.itemsize
    live = (-(-lengths // page) - np.minimum(first, lengths) // page).sum() * of_page
    queries, pages = brought[0], sum(brought[1:])
    assert live <= pages and pages + queries <= 1.1 * live
    # What the compiler is told does not know lengths: it is right where all are the longest.
    assert estimated == [num_pages * of_page]


@pytest.mark.parametrize(
    ("width", "settings", "grid"),
    [
        (2, {"_MERGE_RATIO": 1}, (1, HEADS, 4, 6)),  # more shares than the longest slot has pages
        pytest.param(8, {"_MAX_OUTPUTS": 256}, (2, HEADS, 4, 1), marks=pytest.mark.slow),
    ],
    ids=["pages of a slot", "rows of a head"],
)
@pytest.mark.parametrize("window", [0, 9])
def test_programs_on_gpus_share_the_work_and_read_the_live_pages(
    window, width, settings, grid, monkeypatch
):
    for name, value in settings.items():
        monkeypatch.setattr(paged_attention_gpu, name, value)
    call, grids = pl.pallas_call, []

    def watched(*args, grid, **how):
        grids.append(grid)
        return call(*args, grid=grid, **how)

    monkeypatch.setattr(paged_attention_gpu.pl, "pallas_call", watched)
    slots, most, reach = len(ENDS), 5, AttentionWindow(window, 0)
    table = np.arange(slots * most, dtype=np.int32).reshape(slots, most)
    table[3, 0] = table[2, 0]  # the same prompt
    first = np.minimum(np.asarray(reach.first_visible(jnp.asarray(ENDS))), ENDS) // PAGE
    live = np.concatenate(
        [row[a:b] for row, a, b in zip(table, first, -(-ENDS // PAGE), strict=True)]
    )
    dead = np.setdiff1d(np.arange(slots * most), live)
    keys, values = (
        random(seed, slots * most, HEADS, SIZE, PAGE).at[dead].set(np.nan) for seed in (0, 1)
    )
    rows = random(2, slots, HEADS, width * GROUP, SIZE)
    how = {"group": GROUP, "reach": reach, "scoring": AttentionScoring(), "value_size": SIZE}
    queries = PagedQueries(rows, keys, values, jnp.asarray(ENDS), jnp.asarray(ENDS), **how)
    found = paged_attention_gpu.gpu_partial_attention(queries, jnp.asarray(table), interpret=True)
    assert grids == [grid]
    wanted = plain(rows, keys, values, table, ENDS, ENDS, reach, AttentionScoring(), SIZE)
    got = found.weighted_values / jnp.maximum(found.weight_sum, 1e-30)
    np.testing.assert_allclose(got, wanted, atol=2e-6)
    assert (np.asarray(found.weight_sum)[ENDS == 0] == 0).all()


def pools(dtype, page, *sizes, num_pages=2):
    return [jax.ShapeDtypeStruct((num_pages, HEADS, size, page), dtype) for size in sizes]


@pytest.mark.parametrize(
    ("of_pages", "value_size", "fits"),
    [
        (pools("bfloat16", 64, 128, 128), 128, True),
        (pools("float32", 64, 80, 96), 96, True),
        (pools("bfloat16", 64, 576), 512, True),  # latents
        (pools("bfloat16", 64, 20), 16, False),
        (pools("bfloat16", 48, 64, 64), 64, False),
        (pools("bfloat16", 64, 64, 64, num_pages=1 << 20), 64, True),
        (pools("float8_e4m3fn", 64, 64, 64, num_pages=1 << 17), 64, True),
        (pools("float8_e4m3fn", 64, 64, 64, num_pages=1 << 18), 64, False),
    ],
)
def test_gpu_kernel_supports_pools_that_fit_it(of_pages, value_size, fits):
    assert paged_attention_gpu.kernel_supports(of_pages, value_size) == fits


@pytest.mark.parametrize(
    ("platform", "capability", "cache_dtype", "reader"),
    [
        ("cpu", "", "", "gather"),
        ("tpu", "", "", "tpu"),
        ("gpu", "9.0", "", "gpu"),
        ("gpu", "8.0", "", "gpu"),
        ("gpu", "12.0", "float8_e4m3fn", "gpu"),
        ("gpu", "8.0", "float8_e4m3fn", "loop"),
        ("gpu", "7.5", "", "loop"),
        ("gpu", "gfx942", "", "loop"),
    ],
)
def test_how_devices_read_the_cache(platform, capability, cache_dtype, reader):
    network = dataclasses.replace(tiny.NETWORK, cache_dtype=cache_dtype)
    device = types.SimpleNamespace(platform=platform)
    if capability:
        device.compute_capability = capability
    assert decode_attention.cache_reader_for(network, device) == reader


# Slots, heads of keys, rows of each, sizes of keys and values (0: latents), dtypes of pages, rows.
MODELS = {
    "Qwen2.5-0.5B": (64, 2, 7, 64, 64, "bfloat16", "bfloat16"),
    "Llama-3.1-8B": (64, 8, 4, 128, 128, "bfloat16", "bfloat16"),
    "few slots": (4, 8, 4, 128, 128, "bfloat16", "bfloat16"),
    "heads of 256": (64, 4, 2, 256, 256, "bfloat16", "bfloat16"),
    "heads of 96": (64, 32, 1, 96, 96, "bfloat16", "bfloat16"),
    "latents": (64, 1, 128, 576, 0, "bfloat16", "bfloat16"),
    "fp8": (64, 8, 4, 128, 128, "float8_e4m3fn", "bfloat16"),
    "float32": (64, 8, 4, 128, 128, "float32", "float32"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_the_kernel_compiles_for_gpus(name, gpu_devices):
    slots, heads, rows, size, of_value, dtype, compute = MODELS[name]
    mesh = jax.sharding.Mesh(np.array(gpu_devices("h100", 1)), ("fsdp",))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def array(dtype, *dims):
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=here)

    keys = array(dtype, 4096, heads, size, 64)
    values = array(dtype, 4096, heads, of_value, 64) if of_value else None
    how = {"group": rows, "reach": AttentionWindow(1024, 0), "scoring": AttentionScoring(cap=50.0)}
    table, ints = array("int32", slots, 128), array("int32", slots)
    rows_of_heads = array(compute, slots, heads, rows, size)
    queries = PagedQueries(
        rows_of_heads, keys, values, ints, ints, **how, value_size=of_value or 512
    )
    with jax.set_mesh(mesh), compile_only_devices.gpu_as_cuda():
        lowered = jax.jit(paged_attention_gpu.gpu_partial_attention).lower(queries, table)
    program = lowered.compile()
    assert "triton" in program.as_text()
    # The sums of programs that share slots, and nothing of the size of the pages read.
    assert program.memory_analysis().temp_size_in_bytes < 64 * 128 * keys.size // 4096


@pytest.mark.parametrize(
    "sizes", [{}, pytest.param({"fsdp": 2, "tensor": 2}, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(
    "reader", ["loop", *(pytest.param(reader, marks=pytest.mark.slow) for reader in ("tpu", "gpu"))]
)
def test_reading_pages_where_they_lie_changes_no_sample(reader, sizes, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.rollout.engine.host_inputs.MIN_WIDTH", LIMIT)
    mesh = tiny.make_mesh(**sizes)
    whole = workload()[5]
    lone = dataclasses.replace(whole, keys=whole.keys[1:2], params=whole.params[1:2])
    wanted = [*expected(), expected()[5][1:2]]
    read_by(reader, monkeypatch)
    engine = Engine(tiny.NETWORK, mesh, num_slots=4, max_tokens=LIMIT, chunk_steps=5)
    params = rollout_params(mesh)
    assert_same(engine.generate(params, workload()), wanted[:-1])
    # The slots beside it are free, and their rows of the table name a page that it holds.
    assert_same(engine.generate(params, [lone]), wanted[-1:])
