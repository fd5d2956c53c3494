"""Attention over pages: the kernel for TPUs, interpreted, and the loop, beside the plain form."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engine_work import LIMIT, assert_same, expected, rollout_params, workload

from jaxrl_llm.models.attention import Scoring
from jaxrl_llm.rollout import attending, paged_attention
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.paged_attention import Reach

PAGE, HEADS, GROUP, SIZE = 8, 2, 3, 16
ENDS = np.array([37, 0, 8, 13], np.int32)  # of four slots; one is free


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def plain(rows, keys, values, table, places, ends, reach, scoring, value_size):
    """Returns attention of every query on its own, in float64; zeros where it sees nothing."""
    rows, keys = np.asarray(rows, np.float64), np.asarray(keys, np.float64)
    found = np.zeros((*rows.shape[:3], value_size))
    for slot, head, row in np.ndindex(rows.shape[:3]):
        place = places[slot] + row // GROUP
        first = int(reach.first(jnp.asarray(place)))
        at = np.arange(min(first, ends[slot]), ends[slot])
        if not len(at):
            continue
        pages = table[slot, at // PAGE]
        k = keys[pages, head, :, at % PAGE]
        v = k[:, :value_size] if values is None else np.asarray(values)[pages, head, :, at % PAGE]
        scores = k @ rows[slot, head, row] * (scoring.scale or SIZE**-0.5)
        if scoring.cap:
            scores = scoring.cap * np.tanh(scores / scoring.cap)
        weights = np.exp(scores - scores.max())
        found[slot, head, row] = weights @ v / weights.sum()
    return found


CASES = {
    "all": (Reach(0, 0), Scoring(), 2, 1, False),
    "window and cap": (Reach(9, 0), Scoring(cap=2.0), 2, 2, False),
    "chunk, values in keys": (Reach(0, 11), Scoring(scale=0.4), 1, 4, True),
}


@pytest.mark.parametrize(
    "name",
    ["window and cap", *(pytest.param(n, marks=pytest.mark.slow) for n in [*CASES][::2])],
)
def test_the_kernel_and_the_loop_are_the_plain_form(name):
    reach, scoring, width, step_pages, in_keys = CASES[name]
    slots, most = len(ENDS), 5
    num_pages, value_size = slots * most + 2, 12 if in_keys else SIZE
    table = np.random.default_rng(3).permutation(num_pages)[: slots * most].reshape(slots, most)
    keys = random(0, num_pages, HEADS, SIZE, PAGE)
    values = None if in_keys else random(1, num_pages, HEADS, SIZE, PAGE)
    rows = random(2, slots, HEADS, width * GROUP, SIZE)
    places, table = jnp.asarray(ENDS), jnp.asarray(table, jnp.int32)
    how = {"group": GROUP, "reach": reach, "scoring": scoring, "value_size": value_size}
    todo = paged_attention.work(table, reach.first(places), places, PAGE, step_pages)
    kernel = functools.partial(paged_attention.by_kernel, **how, interpret=True)
    given = rows, keys, values
    wanted = plain(*given, np.asarray(table), ENDS, ENDS, reach, scoring, value_size)
    for found in (
        jax.jit(kernel)(*given, todo, places, places),
        jax.jit(functools.partial(paged_attention.by_loop, **how))(*given, table, places, places),
    ):
        seen = np.asarray(found.total > 0)
        got = np.where(seen, found.mixed / np.where(seen, found.total, 1.0), 0.0)
        np.testing.assert_allclose(got, wanted, atol=2e-6)
        assert (np.asarray(found.total)[ENDS == 0] == 0).all()


@pytest.mark.parametrize("step_pages", [1, 2, 8])
def test_a_kernel_reads_the_live_pages_and_hardly_another(step_pages):
    """Lengths as reasoning makes them, up to 8192; a page as in the step before is not read."""
    random = np.random.default_rng(0)
    page, slots = 128, 64
    lengths = np.clip(np.exp(random.normal(7.0, 1.0, slots)), 1, 8192).astype(np.int32)
    lengths[::9] = 0
    most = 8192 // page
    table = random.permutation(slots * most).reshape(slots, most).astype(np.int32)
    todo = paged_attention.work(
        jnp.asarray(table), jnp.zeros(slots, jnp.int32), jnp.asarray(lengths), page, step_pages
    )
    steps, live = int(todo.num_steps[0]), -(-lengths // page)
    pages = np.asarray(todo.pages)[:steps]
    fetched = step_pages + int((pages[1:] != pages[:-1]).sum())
    assert live.sum() <= fetched <= 1.1 * live.sum()
    assert steps == (-(-live // step_pages)).sum()
    # Every live page of every slot is in its steps, in order.
    for slot in range(slots):
        mine = pages[np.asarray(todo.slots)[:steps] == slot].reshape(-1)
        np.testing.assert_array_equal(mine[: live[slot]], table[slot, : live[slot]])


@pytest.mark.parametrize(
    "sizes", [{}, pytest.param({"fsdp": 2, "tensor": 2}, marks=pytest.mark.slow)], ids=str
)
def test_reading_pages_in_a_loop_changes_no_sample(sizes, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.rollout.inputs.SMALLEST_WIDTH", LIMIT)
    mesh = tiny.make_mesh(**sizes)
    whole = workload()[5]
    lone = dataclasses.replace(whole, keys=whole.keys[1:2], params=whole.params[1:2])
    wanted = [*expected(), expected()[5][1:2]]
    monkeypatch.setattr(attending, "reader_for", lambda network, platform: "loop")
    engine = Engine(tiny.NETWORK, mesh, num_slots=4, max_tokens=LIMIT, chunk_steps=5)
    params = rollout_params(mesh)
    assert_same(engine.generate(params, workload()), wanted[:-1])
    # The slots beside it are free, and their rows of the table name a page that it holds.
    assert_same(engine.generate(params, [lone]), wanted[-1:])
