"""Layers with a state in the engine: samples are those of a whole pass, wherever decoded."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engine_work import LIMIT, ONE, assert_same, engine_of, request, workload
from kinds_of_layers import NETWORKS

from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.models.recurrent.sequence_memory import paged_layers, recurrent_layers
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout.engine import host_inputs, kv_cache, layer_states
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams

NETWORK = Network(NETWORKS["states"])


@functools.cache
def weights(mesh=ONE):
    return tiny.rollout_params(tiny.params(NETWORK), mesh, NETWORK)


@functools.cache
def expected():
    return engine_of(network=NETWORK).generate(weights(), workload())


@pytest.fixture
def one_window(monkeypatch):
    """Every prompt in the widest bucket: fewer programs, the same tokens."""
    monkeypatch.setattr(host_inputs, "MIN_WIDTH", LIMIT)


def engine_with(num_slots=8, mesh=ONE, **settings):
    settings = {"max_tokens": LIMIT, "chunk_steps": 5, **settings}
    return Engine(NETWORK, mesh, num_slots=num_slots, **settings)


def teacher_forced(prompts, completions, width):
    rows = np.zeros((len(prompts), width), np.int32)
    for row, prompt, c in zip(rows, prompts, completions, strict=True):
        row[: len(prompt) + len(c.tokens)] = [*prompt, *c.tokens]
    found = tiny.teacher_forced(rows, jnp.ones(len(rows)), NETWORK, tiny.params(NETWORK))
    return [
        row[len(prompt) :][: len(c.tokens)]
        for row, prompt, c in zip(found, prompts, completions, strict=True)
    ]


def test_log_probs_are_those_of_a_whole_pass_beyond_a_chunk_of_the_rule():
    """Prompts of one and of several pieces, samples that cross chunks of 64 tokens, groups."""
    random = np.random.default_rng(0)
    asked = [
        request(random, length, [SamplingParams(70)] * count, seed)
        for seed, (length, count) in enumerate([(5, 2), (63, 1), (64, 1), (100, 2)])
    ]
    engine = engine_with(4, max_tokens=192)
    found = engine.generate(weights(), asked)
    prompts = [r.tokens for r in asked for _ in r.params]
    completions = [c for some in found for c in some]
    for c, wanted in zip(completions, teacher_forced(prompts, completions, 192), strict=True):
        np.testing.assert_allclose(c.log_probs, wanted, atol=5e-5)


@pytest.mark.parametrize(
    ("num_slots", "settings"),
    [
        pytest.param(3, {}, marks=pytest.mark.slow),
        pytest.param(32, {"chunk_steps": 1}, marks=pytest.mark.slow),
        pytest.param(4, {"chunk_steps": 16}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_slots_and_neighbours_do_not_matter(num_slots, settings, one_window):
    engine, order = engine_with(num_slots, **settings), np.random.default_rng(1).permutation(7)
    found = engine.generate(weights(), [workload()[i] for i in order])
    assert_same(found, [expected()[i] for i in order])


@pytest.mark.slow
def test_preempted_samples_are_read_again(one_window, monkeypatch):
    wanted = expected()
    monkeypatch.setattr("jaxrl_llm.config.kv_cache_sizing._PAGE_TOKENS", {"cpu": 8})
    engine = engine_with(cache_tokens=LIMIT)
    assert_same(engine.generate(weights(), workload()), wanted)
    assert engine.statistics.num_preemptions > 0 and engine._pages.num_used == 0


@pytest.mark.parametrize(
    "sizes",
    [{"fsdp": 2, "tensor": 2}, {"fsdp": 4, "tensor": 2}],
    ids=str,
)
@pytest.mark.slow
def test_mesh_does_not_matter(sizes, one_window):
    mesh = tiny.make_mesh(**sizes)
    assert_same(engine_with(mesh=mesh).generate(weights(mesh), workload()), expected())


def play(engine, num_episodes, *, keeps, num_turns=3, stop_strings=()):
    """Plays episodes of several turns; each turn begins when all episodes have ended theirs."""
    engine.reset()
    random = np.random.default_rng(0)
    tokens = [tuple(random.integers(4, 96, 3 + i).tolist()) for i in range(num_episodes)]
    before: list = [None] * num_episodes
    answers = []
    for turn in range(num_turns):
        numbers = {}
        for i in range(num_episodes):
            params = SamplingParams(3 + i % 2, stop_strings=stop_strings)
            asked = Request(
                tokens[i],
                np.full((1, 2), 10 * i + turn, np.uint32),
                (params,),
                retains_pages=keeps,
                continues=before[i] if keeps else None,
            )
            numbers[engine.submit(asked)] = i
        completions = {i: engine.completions(number)[0] for number, i in numbers.items()}
        while engine.num_waiting or engine.num_active:
            engine.step(weights())
        for number, i in numbers.items():
            added = np.random.default_rng([i, turn]).integers(4, 96, 2 + i).tolist()
            tokens[i], before[i] = (*tokens[i], *completions[i].tokens, *added), (number, 0)
            answers.append([completions[i]])
    return answers


def test_a_continued_sample_goes_on_from_its_slot(one_window):
    engine = engine_with(32)
    wanted = play(engine, 9, keeps=False)
    num_whole = engine.statistics.prefill_tokens
    assert_same(play(engine, 9, keeps=True), wanted)
    # Each token is read once: the prompts, what is added, and the token sampled before that.
    prompts, added = sum(3 + i for i in range(9)), 2 * sum(2 + i + 1 for i in range(9))
    assert engine.statistics.prefill_tokens == prompts + added < num_whole
    assert engine.statistics.recomputed_tokens == 0
    # With fewer slots, some are given to other samples, and what was there is read again.
    few = engine_with(4)
    assert_same(play(few, 9, keeps=True), wanted)
    assert 0 < few.statistics.recomputed_tokens < num_whole
    assert prompts + added < few.statistics.prefill_tokens <= num_whole


@pytest.mark.slow
def test_a_state_behind_the_end_is_not_continued(one_window):
    """The host ends a sample at a string while the device goes on: its state is of later tokens."""
    decode = lambda tokens: "".join(map(chr, tokens))  # noqa: E731
    stop_strings = tuple(map(chr, range(4, 60)))
    engine = engine_with(16, decode=decode)
    wanted = play(engine, 5, keeps=False, stop_strings=stop_strings)
    assert any(c.is_stopped and len(c.tokens) < 3 for (c,) in wanted)
    assert_same(play(engine, 5, keeps=True, stop_strings=stop_strings), wanted)


def test_another_past_is_read_from_its_first_token(one_window):
    engine = engine_with(4)
    key, params = np.zeros((1, 2), np.uint32), (SamplingParams(3),)
    first = engine.submit(Request((5, 6, 7, 8), key, params, retains_pages=True))
    while engine.num_waiting or engine.num_active:
        engine.step(weights())
    other = Request((5, 6, 9, 9, 9), key, params)
    number = engine.submit(dataclasses.replace(other, continues=(first, 0)))
    (found,) = engine.completions(number)
    while engine.num_waiting or engine.num_active:
        engine.step(weights())
    assert_same([[found]], engine_with(4).generate(weights(), [other]))
    assert engine._pages.num_used == 0


def test_memory_is_what_is_declared():
    shape = NETWORK.shape
    assert paged_layers(shape) == (1,) and recurrent_layers(shape) == (0, 2)
    engine = engine_with(4)
    state = engine.programs.abstract_state
    assert len(state.cache.keys) == 1 and len(state.layer_states) == 2
    # Two layers of 4 x 8 x 6 floats, and 3 tokens of 2 x (2 x 8) + 4 x 6 channels.
    assert layer_states.state_bytes(NETWORK, ONE, 4) == 4 * 2 * 4 * (4 * 8 * 6 + 3 * (32 + 24))
    arrays = [*state.cache.keys, *state.cache.values]
    held = [a for layer in state.layer_states for a in layer.values()]
    num_tokens = engine.programs.pages.num_pages * engine.programs.pages.page_tokens
    assert kv_cache.cache_bytes(NETWORK, ONE, num_tokens, 4) == sum(
        a.size * a.dtype.itemsize for a in (*arrays, *held)
    )
    assert layer_states.state_bytes(NETWORK, tiny.make_mesh(fsdp=2, tensor=2), 4) == (
        layer_states.state_bytes(NETWORK, ONE, 4) // 4
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"draft_tokens": 3, "ngram_tokens": 1},
        pytest.param({"draft_tokens": 1, "ngram_tokens": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rejected_drafts_leave_no_state(settings, one_window):
    """Drafts of the tokens that followed the last one before: some are right, most are wrong."""
    engine = engine_with(speculation=SpeculationConfig(**settings))
    assert_same(engine.generate(weights(), workload()), expected())
    statistics = engine.statistics
    num_accepted = statistics.decode_tokens - statistics.slot_steps
    assert 0 < num_accepted < statistics.draft_tokens


@pytest.mark.slow
def test_a_continued_sample_goes_on_from_the_accepted_tokens(one_window):
    engine = engine_with(16, speculation=SpeculationConfig(draft_tokens=2, ngram_tokens=1))
    wanted = play(engine_with(16), 5, keeps=False)
    assert_same(play(engine, 5, keeps=True), wanted)
    assert engine.statistics.recomputed_tokens == 0


def test_prefix_caching_is_off(caplog):
    assert not engine_with(prefix_caching=True).prefix_caching
    assert "prefix caching is off" in caplog.text
