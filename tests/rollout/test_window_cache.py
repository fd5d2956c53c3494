"""Layers that keep no more than their windows: the same samples from less memory."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engine_work import ONE, assert_same, read_by, request
from kinds_of_layers import NETWORKS

from jaxrl_llm.config import MeshConfig, SpeculationConfig
from jaxrl_llm.config.kv_cache_sizing import ring_pages
from jaxrl_llm.models.architecture import LayerType
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout.engine import aot_programs, kv_cache
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams
from jaxrl_llm.sharding import mesh as mesh_lib

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
    trained = network_of(name)
    network = trained.for_decoding(ONE)
    assert network.decode_attention
    params = tiny.rollout_params(tiny.params(trained), ONE, trained, rollout=network)
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
    assert not engine.prefix_caching and "window_cache='sequence'" in caplog.text
    caplog.clear()
    assert engine_with("sinks", prefix_caching=True).prefix_caching and not caplog.text


@pytest.mark.slow
def test_a_tpu_holds_1024_tokens_of_a_window(tpu_devices, monkeypatch):
    """By its compiler: of 32k tokens, and nothing copies the cache."""
    monkeypatch.setattr("jaxrl_llm.config.kv_cache_sizing._PAGE_TOKENS", {"tpu": 128})
    tpus = tpu_devices("v5e:2x4")
    mesh = mesh_lib.make_mesh(MeshConfig(data=4, fsdp=1, tensor=2), tpus)
    network = tiny.with_sizes(
        dataclasses.replace(tiny.NETWORK, compute_dtype="bfloat16"),
        vocab_size=4096,
        hidden_size=1024,
        num_layers=4,
        num_heads=16,
        num_kv_heads=8,
        head_size=128,
        mlp_size=2048,
        layers=(LayerType(window=1024), LayerType(window=1024), LayerType(), LayerType(chunk=1024)),
    )
    needed = {}
    for keeps in (True, False):
        engine = Engine(network, mesh, num_slots=16, max_tokens=32768, window_cache=keeps)
        mover = tiny.resharder(mesh, network, dtype="bfloat16")
        compiled = aot_programs.lower_generate(engine.programs, mover.abstract()).compile()
        memory = compiled.memory_analysis()
        rings = engine.programs.rings
        cache = kv_cache.cache_bytes(network, mesh, 16 * 32768, 16, rings, 128)
        assert memory.temp_size_in_bytes < 0.05 * cache
        assert cache <= memory.alias_size_in_bytes < 1.01 * cache
        needed[keeps] = memory.alias_size_in_bytes
    assert rings == () and needed[True] / needed[False] == pytest.approx(
        (1 + 3 * 1152 / 32768) / 4, rel=0.01
    )
