"""Layers that keep no more than their windows: the same samples from less memory."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engine_work import ONE, assert_same, read_by, request
from kinds_of_layers import NETWORKS

from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.config.kv_cache_sizing import ring_pages
from jaxrl_llm.models.architecture import LayerType
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout.engine import kv_cache
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams

LIMIT, PAGE = 96, 8
RING = 3  # pages of the windows of 9 and chunks of 11 below
KINDS = ("windows and experts", "chunks", "all windows")
SHAPES = {
    **NETWORKS,
    "all windows": dataclasses.replace(
        tiny.SHAPE, num_layers=2, layers=(LayerType(window=9), LayerType(window=17))
    ),
}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr("jaxrl_llm.config.kv_cache_sizing._PAGE_TOKENS", {"cpu": PAGE})


@functools.cache
def network_of(name):
    return Network(SHAPES[name])


@functools.cache
def weights(name, mesh=ONE):
    network = network_of(name)
    return tiny.rollout_params(tiny.params(network), mesh, network)


def engine_with(name, num_slots=4, mesh=ONE, **settings):
    settings = {"max_tokens": LIMIT, "chunk_steps": 5, "window_cache": True, **settings}
    return Engine(network_of(name), mesh, num_slots=num_slots, **settings)


def workload():
    """Prompts shorter and longer than a ring, groups, more samples than slots."""
    random = np.random.default_rng(0)
    sizes = [(5, (60, 31)), (30, (50,)), (61, (30, 3, 30)), (8, (1, 70)), (25, (40,))]
    return [
        request(random, length, [SamplingParams(n) for n in tokens], seed)
        for seed, (length, tokens) in enumerate(sizes)
    ]


@functools.cache
def expected(name):
    return engine_with(name, window_cache=False).generate(weights(name), workload())


@pytest.mark.parametrize(
    "name", ["chunks", *(pytest.param(n, marks=pytest.mark.slow) for n in KINDS if n != "chunks")]
)
def test_samples_are_those_of_whole_sequences_in_pages(name):
    engine = engine_with(name)
    assert any(engine.programs.rings)
    found = engine.generate(weights(name), workload())
    assert_same(found, expected(name))
    samples = [(r.tokens, c) for r, some in zip(workload(), found, strict=True) for c in some]
    rows = np.zeros((len(samples), LIMIT), np.int32)
    for row, (prompt, c) in zip(rows, samples, strict=True):
        row[: len(prompt) + len(c.tokens)] = [*prompt, *c.tokens]
    network = network_of(name)
    wanted = tiny.teacher_forced(rows, jnp.ones(len(rows)), network, tiny.params(network))
    for row, (prompt, c) in zip(wanted, samples, strict=True):
        forced = row[len(prompt) :][: len(c.tokens)]
        np.testing.assert_allclose(c.log_probs, forced, atol=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["loop", "tpu", "gpu"])
@pytest.mark.parametrize("name", KINDS)
def test_rings_are_read_where_they_lie(name, reader, monkeypatch):
    wanted = expected(name)
    read_by(reader, monkeypatch)
    assert_same(engine_with(name).generate(weights(name), workload()), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_rings_are_read_by_the_kernel_of_the_cpu(name):
    network = network_of(name).for_decoding(ONE)
    assert network.decode_attention
    params = tiny.rollout_params(tiny.params(network), ONE, network)
    settings = {"num_slots": 4, "max_tokens": LIMIT, "chunk_steps": 5, "window_cache": True}
    assert_same(Engine(network, ONE, **settings).generate(params, workload()), expected(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "settings",
    [{"num_slots": 16}, {"chunk_steps": 32}, {"speculation": SpeculationConfig(draft_tokens=3)}],
    ids=str,
)
def test_slots_and_chunks_do_not_matter(name, settings):
    """Chunks longer than a ring too, and active samples that move to the first slots."""
    assert_same(engine_with(name, **settings).generate(weights(name), workload()), expected(name))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2}, {"fsdp": 4}], ids=str)
def test_mesh_does_not_matter(sizes):
    name, mesh = "windows and experts", tiny.make_mesh(**sizes)
    engine = engine_with(name, mesh=mesh)
    assert engine.programs.cache_sharding.slot_axes
    assert_same(engine.generate(weights(name, mesh), workload()), expected(name))


@pytest.mark.slow
def test_preempted_samples_are_read_again():
    name = "windows and experts"
    engine = engine_with(name, cache_tokens=LIMIT)
    assert_same(engine.generate(weights(name), workload()), expected(name))
    assert engine.statistics.num_preemptions > 0 and engine._pages.num_used == 0


def play(engine, name, *, keeps, num_episodes=5, num_turns=3):
    """Plays episodes in turns of 20 tokens; each turn begins when all have ended theirs."""
    engine.reset()
    random = np.random.default_rng(0)
    tokens = [tuple(random.integers(4, 96, 3 + 4 * i).tolist()) for i in range(num_episodes)]
    before: list = [None] * num_episodes
    answers = []
    for turn in range(num_turns):
        numbers = {}
        for i in range(num_episodes):
            asked = Request(
                tokens[i],
                np.full((1, 2), 10 * i + turn, np.uint32),
                (SamplingParams(16 + i),),
                retains_pages=keeps,
                continues=before[i] if keeps else None,
            )
            numbers[engine.submit(asked)] = i
        completions = {i: engine.completions(number)[0] for number, i in numbers.items()}
        while engine.num_waiting or engine.num_active:
            engine.step(weights(name))
        for number, i in numbers.items():
            added = np.random.default_rng([i, turn]).integers(4, 96, 2 + i).tolist()
            tokens[i], before[i] = (*tokens[i], *completions[i].tokens, *added), (number, 0)
            answers.append([completions[i]])
    return answers


@pytest.mark.slow
def test_a_continued_sample_goes_on_from_its_ring():
    name = "windows and experts"
    wanted = play(engine_with(name, 8, window_cache=False), name, keeps=False)
    engine = engine_with(name, 8)
    assert_same(play(engine, name, keeps=True), wanted)
    assert engine.statistics.recomputed_tokens == 0
    # With fewer slots, some are given to other samples, and what was there is read again.
    few = engine_with(name, 3)
    assert_same(play(few, name, keeps=True), wanted)
    assert few.statistics.recomputed_tokens > 0


def test_memory_is_that_of_the_windows():
    for name, rings in {
        "windows and experts": (RING, 0, RING),
        "chunks": (RING, 0),
        "all windows": (RING, 4),
    }.items():
        engine, network = engine_with(name), network_of(name)
        programs = engine.programs
        assert programs.rings == rings
        cache = programs.abstract_state.cache
        expected_pages = [4 * ring or programs.pages.num_pages for ring in rings]
        assert [len(keys) for keys in cache.keys] == expected_pages
        num_tokens = programs.pages.num_pages * PAGE
        assert kv_cache.cache_bytes(network, ONE, num_tokens, 4, rings, PAGE) == sum(
            a.size * a.dtype.itemsize for a in (*cache.keys, *cache.values)
        )
    assert ring_pages(1024, 128, 32768) * 128 == 1152  # of a window of 1,024 in 32k tokens
    # Where a ring would not be smaller, there is none.
    assert not engine_with("windows and experts", max_tokens=RING * PAGE).programs.rings


def test_prefix_caching_is_off_with_rings(caplog):
    engine = engine_with("windows and experts", prefix_caching=True)
    assert not engine.prefix_caching and "window_cache off" in caplog.text
    caplog.clear()
    assert engine_with("sinks", prefix_caching=True).prefix_caching and not caplog.text
