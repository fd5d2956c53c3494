"""Samples that continue others: keys and values stay in the slot and change no sample."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from engine_work import LIMIT, NETWORKS, ONE, assert_same, made, rollout_params

from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout.engine import host_inputs
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, RequestError, SamplingParams

EPISODES, TURNS, SAMPLED = 5, 3, 4


@pytest.fixture
def one_window(monkeypatch):
    """Every prompt and every chunk in the widest bucket: fewer programs, the same tokens."""
    monkeypatch.setattr(host_inputs, "MIN_WIDTH", LIMIT)


def engine_with(num_slots, mesh=ONE, shape=tiny.SHAPE, draft_tokens=0, **settings):
    return Engine(
        Network(shape),
        mesh,
        num_slots=num_slots,
        max_tokens=LIMIT,
        chunk_steps=3,
        speculation=SpeculationConfig(draft_tokens=draft_tokens, ngram_tokens=1),
        **settings,
    )


def played(engine, params, keeps=True, added=(7, 1, 9, 2, 5), routes=False):
    """Plays episodes of several turns at once; returns a completion per turn of each.

    Episode i has `added[i]` tokens between its turns; all have the same number of turns.
    """
    random = np.random.default_rng(0)
    tokens = [tuple(random.integers(4, 96, 3 + 2 * i).tolist()) for i in range(EPISODES)]
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1), EPISODES)))
    answers = [[] for _ in range(EPISODES)]
    visited = [None] * EPISODES
    running = {}

    def submit(i, continues=None):
        request = Request(
            tokens[i],
            keys[i : i + 1],
            (SamplingParams(SAMPLED + i % 2),),
            routes=visited[i],
            retains_pages=keeps,
            continues=continues if keeps else None,
        )
        number = engine.submit(request)
        running[number] = i, engine._scheduler.completions(number)[0]

    engine.reset()
    for i in range(EPISODES):
        submit(i)
    while running:
        for progress in engine.step(params):
            if not progress.finish_reason:
                continue
            i, completion = running.pop(progress.request)
            answers[i].append(completion)
            if len(answers[i]) < TURNS:
                more = np.random.default_rng([i, len(answers[i])]).integers(4, 96, added[i])
                tokens[i] = (*tokens[i], *completion.tokens, *more.tolist())
                if routes:
                    known = np.concatenate(completion.routes)
                    unknown = len(tokens[i]) - len(known)
                    visited[i] = np.pad(known, ((0, unknown), (0, 0)), constant_values=-1)
                submit(i, (progress.request, progress.sample))
    return answers


@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS if n != "plain")]
)
def test_retained_pages_change_no_sample(name, request):
    if name == "plain":
        request.getfixturevalue("one_window")
    engine, params = engine_with(8, shape=NETWORKS[name]), made(name)
    wanted = played(engine, params, keeps=False)
    whole = engine.statistics
    assert_same(played(engine, params), wanted)
    # Each token is read once: the prompt, then what is new, and the token sampled before it.
    prompts = sum(3 + 2 * i for i in range(EPISODES))
    new = (TURNS - 1) * (sum((7, 1, 9, 2, 5)) + EPISODES)
    assert engine.statistics.prefill_tokens == prompts + new < whole.prefill_tokens / 2
    assert engine.statistics.recomputed_tokens == whole.recomputed_tokens == 0
    # With room for two, slots are given to others and read again.
    few = engine_with(2, shape=NETWORKS[name])
    assert_same(played(few, params), wanted)
    assert 0 < few.statistics.recomputed_tokens <= whole.prefill_tokens


@pytest.mark.slow
def test_continued_requests_on_a_mesh():
    mesh = tiny.make_mesh(fsdp=2, tensor=2)
    wanted = played(engine_with(8), rollout_params(), keeps=False)
    assert_same(played(engine_with(4, mesh), rollout_params(mesh)), wanted)


def test_turns_wait_for_no_compiler_and_copy_no_cache(compilations):
    engine = engine_with(8)
    for make in engine.programs_to_compile(rollout_params(), [False], continues=True).values():
        make()
    assert "jit(extend)" in compilations
    compilations.clear()
    played(engine, rollout_params())
    assert not {"jit(extend)", "jit(generate)", "jit(move)"} & set(compilations)
    # What is read and written in one program is not copied. More slots need no more memory.
    needed = []
    for num_slots in (16, 64):
        jitted = engine_with(num_slots).programs
        nothing = host_inputs.chunked_prefill_inputs([], [], 8, 32, jitted.pages.table([], 8))
        arguments = nothing, host_inputs.insert_args([], 8, num_slots)
        with jax.set_mesh(ONE):
            program = jitted.extend.lower(
                rollout_params(),
                jitted.abstract_state,
                *arguments,
                window=LIMIT,
                filtered=False,
                num_top=0,
            ).compile()
        needed.append(program.memory_analysis().temp_size_in_bytes)
    assert needed[1] < 1.1 * needed[0]  # the cache of 64 is four times as large


@pytest.mark.slow
def test_long_additions_are_read_in_pieces(monkeypatch):
    monkeypatch.setattr(host_inputs, "_CONTINUATION_SHAPES", ((3, 4), (2, 6)))
    engine = engine_with(8)
    wanted = played(engine, rollout_params(), keeps=False, added=(14, 3, 8, 1, 5))
    assert_same(played(engine, rollout_params(), added=(14, 3, 8, 1, 5)), wanted)


@pytest.mark.slow
def test_guesses_know_what_was_added():
    """Speculation looks for its guesses in all tokens of a sequence, those added too."""
    wanted = played(engine_with(8), rollout_params(), keeps=False)
    engine = engine_with(8, draft_tokens=2)
    assert_same(played(engine, rollout_params()), wanted)
    assert engine.statistics.draft_tokens > 0


@pytest.mark.slow
def test_routes_of_all_tokens_are_known():
    shape = NETWORKS["experts and windows"]
    params = made("experts and windows")
    engine = engine_with(8, shape=shape, keeps_routes=True)
    wanted, found = (played(engine, params, keeps, routes=True) for keeps in (False, True))
    assert_same(found, wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            known = np.concatenate(a.routes)
            assert (known >= 0).all()
            np.testing.assert_array_equal(known, np.concatenate(b.routes))


def test_slots_change_places_with_what_others_keep(one_window):
    """Samples move to the front, where a smaller program decodes; what a slot keeps moves too."""
    engine, params = engine_with(32), rollout_params()
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), 32)))
    prompt = tuple(range(4, 14))
    short, long = SamplingParams(2), SamplingParams(40)
    # The first 24 slots hold samples that end at once; those behind them go on.
    first = engine.submit(Request(prompt, keys[:24], (short,) * 24, retains_pages=True))
    engine.submit(Request(prompt[::-1], keys[24:], (long,) * 8))
    ended = [c.tokens for c in engine._scheduler.completions(first)]
    engine.step(params)
    assert all(len(tokens) == 2 for tokens in ended)
    engine.step(params)  # eight samples are left: they move
    assert {sample.slot for sample in engine._scheduler.active.values()} == set(range(8))
    read = engine.statistics.prefill_tokens
    numbers = [
        engine.submit(
            Request((*prompt, *ended[i], 50), keys[i : i + 1], (short,), continues=(first, i))
        )
        for i in range(24)
    ]
    again = {}
    while engine.num_waiting or engine.num_active:
        for p in engine.step(params):
            again.setdefault(p.request, []).extend(p.tokens)
    assert engine.statistics.prefill_tokens - read == 24 * 2
    assert engine.statistics.recomputed_tokens == 0
    requests = [Request((*prompt, *ended[i], 50), keys[i : i + 1], (short,)) for i in range(24)]
    fresh = engine_with(32).generate(params, requests)
    assert [again[number] for number in numbers] == [c.tokens for (c,) in fresh]


def test_freed_pages_are_recomputed():
    engine, params = engine_with(4), rollout_params()
    key = np.zeros((1, 2), np.uint32)

    def tokens_read(request):
        before = engine.statistics.prefill_tokens
        number = engine.submit(request)
        while engine.num_waiting or engine.num_active:
            engine.step(params)
        return number, engine.statistics.prefill_tokens - before

    first = Request((4, 5, 6), key, (SamplingParams(1),), retains_pages=True)
    more = Request((4, 5, 6, 7, 8), key, (SamplingParams(1),))
    number, count = tokens_read(first)
    assert count == 3
    assert tokens_read(dataclasses.replace(more, continues=(number, 0)))[1] == 2
    # It was continued, so its slot is the new sample's, which keeps nothing.
    assert tokens_read(dataclasses.replace(more, continues=(number, 0)))[1] == 5
    number, _ = tokens_read(first)
    engine.free(number, 0)
    assert tokens_read(dataclasses.replace(more, continues=(number, 0)))[1] == 5
    # Another history shares its beginning alone.
    number, _ = tokens_read(first)
    other = Request((4, 5, 9, 7, 8), key, (SamplingParams(1),), continues=(number, 0))
    assert tokens_read(other)[1] == 3
    two = Request((4, 5), np.zeros((2, 2), np.uint32), (SamplingParams(1),) * 2, continues=(0, 0))
    with pytest.raises(RequestError, match="2 samples continue one; give a request for each"):
        engine.submit(two)
