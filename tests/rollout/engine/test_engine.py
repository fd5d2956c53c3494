"""The engine: one sample's tokens follow from its prompt, its key and the weights alone."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
from engine_work import (
    LIMIT,
    ONE,
    assert_same,
    engine_of,
    expected,
    request,
    rollout_params,
    run_to_end,
    weights,
    workload,
)

from jaxrl_llm.config import MeshConfig, SpeculationConfig
from jaxrl_llm.models.cpu_kernels import kernels, matmuls
from jaxrl_llm.rollout.engine import aot_programs, host_inputs, kv_cache, prefill
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams
from jaxrl_llm.sharding import mesh as mesh_lib

MORE_TPUS = ("v5e:2x4", 4), ("v5p:2x2x2", 0), ("v6e:2x4", 0)


@pytest.fixture
def one_window(monkeypatch):
    """Every prompt and every chunk in the widest bucket: fewer programs, the same tokens."""
    monkeypatch.setattr("jaxrl_llm.rollout.engine.host_inputs.MIN_WIDTH", LIMIT)


def count_prompts_read(engine, monkeypatch):
    """Makes the engine note every prompt that it prefills, empty places left out."""
    read, prefill = [], engine.programs.prefill

    def counted(params, prompts):
        tokens = prompts.tokens.reshape(-1)
        spans = {}
        for at, length in zip(prompts.starts, prompts.lengths, strict=True):
            spans.setdefault(at, length)  # empty places come last and name token 0 again
        read.extend(tuple(tokens[at : at + length].tolist()) for at, length in spans.items())
        return prefill(params, prompts)

    monkeypatch.setattr(engine.programs, "prefill", counted)
    return read


def one_pass(requests, completions, network=tiny.NETWORK):
    """Returns (log-probs of the engine, of one pass over each sequence), tokens of all samples."""
    samples = [
        (r.tokens, p, c)
        for r, cs in zip(requests, completions, strict=True)
        for p, c in zip(r.params, cs, strict=True)
    ]
    tokens = np.zeros((len(samples), LIMIT), np.int32)
    for row, (prompt, _, c) in zip(tokens, samples, strict=True):
        row[: len(prompt) + len(c.tokens)] = (*prompt, *c.tokens)
    temperatures = np.array([p.temperature or 1.0 for _, p, _ in samples], np.float32)
    found = np.asarray(tiny.teacher_forced(tokens, temperatures, network, weights()))
    found = [
        row[len(prompt) : len(prompt) + len(c.tokens)]
        for row, (prompt, _, c) in zip(found, samples, strict=True)
    ]
    return np.concatenate([c.log_probs for _, _, c in samples]), np.concatenate(found)


def test_log_probs_are_those_of_one_pass_over_the_sequence():
    ours, theirs = one_pass(workload(), expected())
    assert np.abs(theirs).max() > 3.0
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_kernels_may_lie_by_outputs_and_come_first(sizes, one_window):
    mesh = tiny.make_mesh(**sizes)
    wide = tiny.params(tiny.WIDE, scale=2.0)  # scores as large as of the small network
    found = [
        engine_of(mesh, network=network).generate(
            tiny.rollout_params(wide, mesh, tiny.WIDE, rollout=network),
            workload()[:3],
        )
        for network in (tiny.WIDE, tiny.WIDE_FIRST)
    ]
    assert_same(*found)


@pytest.mark.skipif(not kernels.is_available(), reason="no C++ compiler")
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        pytest.param(
            {"head_size": 10, "num_kv_heads": 1, "mlp_size": 50, "qk_norm": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_own_kernels_on_a_cpu_change_no_sample(sizes, one_window):
    mesh, network = tiny.make_mesh(), tiny.with_sizes(**sizes)
    own = network.for_decoding(mesh)
    assert own.matmuls is matmuls.CUSTOM_KERNELS
    weights = tiny.params(network, scale=8.0)
    found = [
        engine_of(mesh, network=each).generate(
            tiny.rollout_params(weights, mesh, network, rollout=each), workload()
        )
        for each in (network, own)
    ]
    assert_same(*found)


def test_samples_end_where_they_should():
    stopped = 0
    for wanted, completions in zip(workload(), expected(), strict=True):
        for params, completion in zip(wanted.params, completions, strict=True):
            assert 1 <= len(completion.tokens) <= params.max_tokens
            assert len(completion.log_probs) == len(completion.tokens)
            assert not set(completion.tokens[:-1]) & set(params.stop_tokens)
            assert completion.is_stopped == (completion.tokens[-1] in params.stop_tokens)
            if not completion.is_stopped:
                assert len(completion.tokens) == params.max_tokens
            stopped += completion.is_stopped
    assert stopped, "no sample met a stop token: nothing was shown"


def test_samples_of_one_prompt_differ():
    assert len({tuple(c.tokens) for c in expected()[0]}) == 5


@pytest.mark.parametrize(
    ("num_slots", "chunk_steps"),
    [(3, 5), (4, 16), (32, 1)],
    ids=str,
)
@pytest.mark.slow
def test_slots_and_chunks_do_not_matter(num_slots, chunk_steps, one_window, monkeypatch):
    engine = engine_of(num_slots=num_slots, chunk_steps=chunk_steps)
    read = count_prompts_read(engine, monkeypatch)
    assert_same(engine.generate(rollout_params(), workload()), expected())
    assert read == [wanted.tokens for wanted in workload()]  # each once


@pytest.mark.parametrize(
    ("sizes", "draft_tokens"),
    [
        ({}, 0),
        *(
            pytest.param(*p, marks=pytest.mark.slow)
            for p in (({}, 2), ({"fsdp": 2, "tensor": 2}, 0))
        ),
    ],
    ids=str,
)
def test_pages_do_not_matter(sizes, draft_tokens, one_window, monkeypatch):
    """With pages for a few sequences alone, samples are put back and read again: the same ones."""
    wanted = expected()
    monkeypatch.setattr("jaxrl_llm.config.kv_cache_sizing._PAGE_TOKENS", {"cpu": 8})
    mesh = tiny.make_mesh(**sizes)
    engine = Engine(
        tiny.NETWORK,
        mesh,
        num_slots=8,
        max_tokens=LIMIT,
        chunk_steps=5,
        speculation=SpeculationConfig(draft_tokens=draft_tokens),
        cache_tokens=LIMIT,
    )
    shards = engine.programs.pages.num_shards
    assert engine.programs.pages.num_pages == 8 * shards
    assert_same(engine.generate(rollout_params(mesh), workload()), wanted)
    done = engine.statistics
    assert done.num_preemptions > 0 and done.recomputed_tokens > 0
    assert done.peak_pages <= 8 * shards and engine._pages.num_used == 0


@pytest.mark.parametrize(
    "sizes",
    [pytest.param({"fsdp": 2, "tensor": 2}, marks=pytest.mark.slow), {"fsdp": 4, "tensor": 2}],
    ids=str,
)
def test_mesh_does_not_matter(sizes, one_window):
    mesh = tiny.make_mesh(**sizes)
    engine = engine_of(mesh)
    assert_same(engine.generate(rollout_params(mesh), workload()), expected())


def test_order_and_neighbours_do_not_matter(one_window):
    engine, params = engine_of(num_slots=4), rollout_params()
    order = np.random.default_rng(1).permutation(len(workload()))
    shuffled = engine.generate(params, [workload()[i] for i in order])
    assert_same(shuffled, [expected()[i] for i in order])
    # One sample of one request, with nobody beside it.
    lone = workload()[3]
    lone = dataclasses.replace(lone, keys=lone.keys[1:2], params=lone.params[1:2])
    assert_same(engine.generate(params, [lone]), [expected()[3][1:2]])


def test_prompts_are_read_in_several_batches(one_window, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.rollout.engine.host_inputs.MAX_PREFILL_TOKENS", 80)
    engine = engine_of(num_slots=4)
    read = count_prompts_read(engine, monkeypatch)
    assert_same(engine.generate(rollout_params(), workload()), expected())
    assert read == [wanted.tokens for wanted in workload()]


def test_filters_of_a_neighbor_do_not_affect_a_sample(one_window):
    engine, params = engine_of(), rollout_params()
    plain = [r for r in workload() if not any(p.is_filtered for p in r.params)]
    want = [
        c for r, c in zip(workload(), expected(), strict=True) if any(r is other for other in plain)
    ]
    assert_same(engine.generate(params, plain), want)


def test_requests_may_come_while_others_run(one_window):
    engine, params = engine_of(num_slots=4), rollout_params()
    engine.reset()
    found, numbers = {}, []
    for wanted in workload():
        numbers.append(engine.submit(wanted))
        for p in engine.step(params):
            kept = found.setdefault((p.request, p.sample), [[], ""])
            kept[0].extend(p.tokens)
            kept[1] = p.finish_reason
    run_to_end(engine, params, found)
    assert engine.step(params) == []
    for number, completions in zip(numbers, expected(), strict=True):
        for i, c in enumerate(completions):
            assert found[number, i] == [c.tokens, c.finish_reason]
    assert engine.statistics.prefill_tokens == sum(len(w.tokens) for w in workload())
    engine.reset()


def test_each_token_tells_the_weights_that_drew_it(one_window):
    engine, params = engine_of(num_slots=4, chunk_steps=5), rollout_params()
    engine.reset()
    numbers, found = [engine.submit(wanted) for wanted in workload()], {}
    version = 30
    while engine.num_waiting or engine.num_active:
        version += 1
        for p in engine.step(params, version):
            assert p.versions == (version,) * len(p.tokens)
            found.setdefault((p.request, p.sample), []).extend(
                zip(p.tokens, p.versions, strict=True)
            )
        if version == 32:
            # What is aborted tells them too.
            for i, c in enumerate(engine.abort(numbers[0])):
                drawn = list(zip(c.tokens, c.versions, strict=True))
                assert drawn == found.pop((numbers[0], i), [])
    assert version > 35
    for number, completions in zip(numbers[1:], expected()[1:], strict=True):
        for i, c in enumerate(completions):
            assert [token for token, _ in found[number, i]] == c.tokens
    assert len({versions for drawn in found.values() for _, versions in drawn}) > 4
    for completions in engine.generate(params, workload(), version=9):
        assert all(c.versions == [9] * len(c.tokens) for c in completions)


def test_an_aborted_request_goes_on_as_if_it_had_not_been(one_window):
    engine, params = engine_of(num_slots=4, chunk_steps=5), rollout_params()
    engine.reset()
    numbers = [engine.submit(wanted) for wanted in workload()]
    found = {(p.request, p.sample): [list(p.tokens), ""] for p in engine.step(params)}
    # Four of the five samples of the first prompt stand in slots, the fifth waits.
    assert (engine.num_active, len(found)) == (4, 4)
    partial = engine.abort(numbers[0])
    assert [c.tokens for c in partial] == [found[0, i][0] for i in range(4)] + [[]]
    assert {c.finish_reason for c in partial} == {"abort"}
    assert engine.num_active == 0
    assert engine.abort(numbers[0]) == engine.abort(999) == []
    first = workload()[0]
    for i, c in enumerate(partial):
        left = dataclasses.replace(first.params[i], max_tokens=20 - len(c.tokens))
        rest = Request((*first.tokens, *c.tokens), first.keys[i : i + 1], (left,))
        numbers.append(engine.submit(rest))
    found = run_to_end(engine, params, {})
    for i, c in enumerate(partial):
        whole = expected()[0][i]
        assert c.tokens + found[numbers[len(workload()) + i], 0][0] == whole.tokens
    # The others did not notice.
    for number, completions in zip(numbers[1:], expected()[1:], strict=False):
        for i, c in enumerate(completions):
            assert found[number, i] == [c.tokens, c.finish_reason]
    engine.reset()


def test_waiting_prompts_are_read_with_the_weights_of_their_turn(one_window):
    # A prompt that was read ahead with earlier weights must not be used with later ones.
    engine, params = engine_of(num_slots=4), rollout_params()
    other = tiny.rollout_params(tiny.params(seed=1), ONE)
    engine.reset()
    early, late = (engine.submit(workload()[i]) for i in (0, 2))
    engine.step(params)
    assert engine.num_waiting
    engine.abort(early)
    found = run_to_end(engine, other, {})
    (want,) = engine.generate(other, [workload()[2]])
    assert [found[late, i][0] for i in range(2)] == [c.tokens for c in want]


def test_generate_wants_an_idle_engine():
    engine = engine_of()
    engine.reset()
    engine.submit(workload()[0])
    with pytest.raises(ValueError, match="session: 5 submitted samples are waiting and 0 running"):
        engine.generate(rollout_params(), workload())
    engine.reset()
    assert engine.num_waiting == 0


def test_stop_strings_end_samples_in_the_middle_of_a_chunk(one_window):
    params = rollout_params()
    engine = Engine(
        tiny.NETWORK, ONE, num_slots=4, max_tokens=LIMIT, decode=lambda ts: "".join(map(chr, ts))
    )
    # The third and fourth token of one sample, as text.
    whole = expected()[0][2]
    stop = chr(whole.tokens[2]) + chr(whole.tokens[3])
    wanted = dataclasses.replace(
        workload()[0],
        params=tuple(
            dataclasses.replace(p, stop_strings=("~~~", stop)) for p in workload()[0].params
        ),
    )
    found = engine.generate(params, [wanted, *workload()[1:]])
    assert_same(found[1:], expected()[1:])
    assert found[0][2].tokens == whole.tokens[:4]
    assert found[0][2].finish_reason == "stop"
    for ours, theirs in zip(found[0], expected()[0], strict=True):
        text = "".join(map(chr, theirs.tokens))
        at = text.find(stop)
        assert ours.tokens == (theirs.tokens if at < 0 else theirs.tokens[: at + 2])
        assert len(ours.log_probs) == len(ours.tokens)
    with pytest.raises(ValueError, match="request: stop strings need the text"):
        engine_of().submit(wanted)


def test_text_error_of_one_sample_ends_only_that_one(one_window):
    whole = expected()[0]

    def decode(tokens):
        if list(tokens[:2]) == whole[2].tokens[:2]:
            raise KeyError("a defect")
        return "".join(map(chr, tokens))

    engine = Engine(tiny.NETWORK, ONE, num_slots=4, max_tokens=LIMIT, decode=decode)
    params = tuple(dataclasses.replace(p, stop_strings=("~~~",)) for p in workload()[0].params)
    watched = dataclasses.replace(workload()[0], params=params)
    bad, good = engine.submit(watched), [engine.submit(r) for r in workload()[1:]]
    errors, found = {}, {}
    while engine.num_waiting or engine.num_active:
        for p in engine.step(rollout_params()):
            found.setdefault((p.request, p.sample), []).extend(p.tokens)
            if p.error is not None:
                errors[p.request, p.sample] = p.finish_reason, type(p.error)
    assert errors == {(bad, 2): ("error", KeyError)}
    for number, completions in zip([bad, *good], expected(), strict=True):
        for i, completion in enumerate(completions):
            if (number, i) not in errors:
                assert found[number, i] == completion.tokens
    with pytest.raises(KeyError, match="a defect"):
        engine.generate(rollout_params(), [watched])
    assert_same(engine.generate(rollout_params(), workload()[1:]), expected()[1:])


def order_of_chunks(engine, budgets, monkeypatch, **params):
    """Runs samples; returns what was done, d: a chunk dispatched, r: a chunk (or insert) read."""
    events, generate, read = [], engine.programs.generate, jax.device_get

    def dispatch(*args, **kwargs):
        events.append("d")
        return generate(*args, **kwargs)

    def read_chunk(outputs):
        events.append("r")
        return read(outputs)

    random = np.random.default_rng(1)
    asked = [request(random, 8, [SamplingParams(n, **params)], i) for i, n in enumerate(budgets)]
    with monkeypatch.context() as patched:
        patched.setattr(engine.programs, "generate", dispatch)
        patched.setattr(jax, "device_get", read_chunk)
        found = engine.generate(rollout_params(), asked)
    assert [len(row[0].tokens) for row in found] == list(budgets)
    assert engine.statistics.decode_tokens == sum(budgets) - len(budgets)
    return "".join(events)


def test_the_host_is_a_chunk_behind_where_it_decides_nothing(one_window, monkeypatch):
    engine = Engine(tiny.NETWORK, ONE, num_slots=4, max_tokens=LIMIT, chunk_steps=5, decode=str)
    # The first token is of the insert, 15 are of three chunks; nothing is left after those.
    assert order_of_chunks(engine, [16] * 4, monkeypatch) == "r" + "ddrdrr"
    # Texts are searched after every chunk.
    stops = {"stop_strings": ("never",)}
    assert order_of_chunks(engine, [16] * 4, monkeypatch, **stops) == "r" + "drdrdr"
    # While a sample waits, its slot is a decision.
    assert order_of_chunks(engine, [16] * 5, monkeypatch) == "r" + "drdrdr" + "r" + "ddrdrr"
    # So is the smaller program for the eight that are left when eight have ended.
    engine = engine_of(num_slots=16, chunk_steps=5)
    assert order_of_chunks(engine, [8] * 8 + [16] * 8, monkeypatch) == "r" + "ddrr" + "dr"


def test_a_sample_that_ends_early_is_found_out_a_chunk_late(one_window):
    engine, params = engine_of(num_slots=4, chunk_steps=2), rollout_params()
    group = workload()[0]
    first = dataclasses.replace(group, keys=group.keys[:4], params=group.params[:4])
    (whole,) = engine.generate(params, [first])
    # Each sample ends with its own third or fourth token, if it has not been there before.
    stops = [tuple(c.tokens[2 + i % 2 : 3 + i % 2]) for i, c in enumerate(whole)]
    asked = tuple(
        dataclasses.replace(p, stop_tokens=s) for p, s in zip(first.params, stops, strict=True)
    )
    (found,) = engine.generate(params, [dataclasses.replace(first, params=asked)])
    for ours, theirs, stop in zip(found, whole, stops, strict=True):
        end = theirs.tokens.index(stop[0]) + 1
        assert (ours.tokens, ours.finish_reason) == (theirs.tokens[:end], "stop")
    # All ended while a chunk was under way; the next call knows nothing of it.
    (again,) = engine.generate(params, [first])
    assert_same([again], [whole])


def test_likeliest_tokens_are_reported_with_the_sampled_one(one_window):
    engine, params = engine_of(), rollout_params()
    asked = [
        dataclasses.replace(
            r, params=tuple(dataclasses.replace(p, num_top_log_probs=3) for p in r.params[:1])
        )
        for r in workload()[:4]
    ]
    asked = [dataclasses.replace(r, keys=r.keys[:1]) for r in asked]
    found = engine.generate(params, [*asked, workload()[4]])
    assert_same(found[:4], [row[:1] for row in expected()[:4]])
    assert found[4][0].top_log_probs == []
    hits = 0
    for (completion,) in found[:4]:
        assert len(completion.top_log_probs) == len(completion.tokens)
        for token, log_prob, top in zip(
            completion.tokens, completion.log_probs, completion.top_log_probs, strict=True
        ):
            tokens, values = zip(*top, strict=True)
            assert len(top) == len(set(tokens)) == 3
            assert list(values) == sorted(values, reverse=True)
            if token in tokens:
                hits += 1
                assert values[tokens.index(token)] == pytest.approx(log_prob, abs=1e-5)
            else:
                assert log_prob <= values[-1] + 1e-5
    assert hits > 10


def test_nothing_asked_nothing_given():
    engine, params = engine_of(), rollout_params()
    assert engine.generate(params, []) == []
    assert engine.statistics.decode_tokens == 0
    nobody = Request((5, 6), np.zeros((0, 2), np.uint32), ())
    assert engine.generate(params, [nobody, workload()[6]])[0] == []


def test_calls_of_the_same_widths_compile_nothing(one_window, monkeypatch):
    mesh = tiny.make_mesh(fsdp=2, tensor=2)
    engine, mover = engine_of(mesh), tiny.resharder(mesh)
    states = []

    def watch(name):
        program = getattr(engine.programs, name)

        def watched(*args, **kwargs):
            out = program(*args, **kwargs)
            states.append(jax.tree.map(lambda a: a.sharding, out[0]))
            return out

        watched._cache_size = program._cache_size
        monkeypatch.setattr(engine.programs, name, watched)

    watch("insert")
    watch("generate")
    random = np.random.default_rng(2)
    rollout, counts = mover.zeros(), []
    for seed in range(3):
        train = tiny.sharded(tiny.params(seed=seed), mesh)
        with jax.set_mesh(mesh):
            rollout = mover.reshard(rollout, train)
        lengths = random.integers(1, 41, 8)
        budgets = random.integers(1, 25, (8, 3))
        requests = [
            request(random, n, [SamplingParams(int(b)) for b in row], seed)
            for n, row in zip(lengths, budgets, strict=True)
        ]
        engine.generate(rollout, requests)
        counts.append(engine.num_compilations())
    assert counts == counts[:1] * 3
    # What goes out is split as what came in: slots over 2, 2 heads over 2.
    split = engine.programs.state_shardings
    assert split.cache.keys[0].spec[:2] == ("fsdp", "tensor")
    assert all(state == split for state in states)


def test_programs_compiled_between_turns_change_no_sample(one_window):
    engine = Engine(tiny.NETWORK, ONE, num_slots=8, max_tokens=LIMIT, chunk_steps=4)
    params = rollout_params()
    names = [
        program.name
        for program in aot_programs.warmup_programs(engine.programs, 8, 40, filters=(False, True))
    ]
    assert len(set(names)) == len(names) >= 7
    halved = Engine(tiny.NETWORK, ONE, num_slots=48, max_tokens=LIMIT)
    assert halved.programs.slot_counts == (12, 24, 48)
    # What a first short request needs comes first.
    assert names[1].startswith("prefill of 1 x 64 tokens") and "filtered" in names[-1]
    numbers, found = [engine.submit(r) for r in workload()], {}
    while engine.num_waiting or engine.num_active:
        for p in engine.step(params):
            found.setdefault((p.request, p.sample), []).extend(p.tokens)
        for program in aot_programs.warmup_programs(
            engine.programs, num_prompts=1, prompt_tokens=40
        ):
            engine.compile(params, program)
    for number, completions in zip(numbers, expected(), strict=True):
        assert [found[number, i] for i in range(len(completions))] == [
            c.tokens for c in completions
        ]


def test_nothing_is_compiled_after_what_is_ahead(compilations):
    shapes = host_inputs.prefill_shapes(2, 60, LIMIT)
    how = {"num_slots": 16, "max_tokens": LIMIT}
    engine = Engine(tiny.NETWORK, ONE, prompt_shapes=shapes, **how)
    mover = tiny.resharder(ONE)
    for make in engine.programs_to_compile(mover.abstract(), [False]).values():
        make()
    random, params = np.random.default_rng(0), rollout_params()
    # Not compiled anew where an engine of this process had as many slots: moving and releasing.
    own, common = {"jit(prefill)", "jit(insert)", "jit(generate)"}, {"jit(move)", "jit(release)"}
    done = []
    for lengths, budgets in (([30], [3] * 16), ([3, 40], [2] * 4 + [20] * 4)):
        samples = [SamplingParams(n) for n in budgets]
        engine.generate(params, [request(random, n, samples, 0) for n in lengths])
        done.append([name for name in compilations if name in own | common])
    assert own <= set(done[0]) and done[0] == done[1]
    assert done[0].count("jit(generate)") == len(engine.programs.slot_counts) == 2
    many = Engine(tiny.NETWORK, ONE, num_slots=16 << 8, max_tokens=LIMIT)
    assert not many.programs_to_compile(params, [False])


@pytest.mark.parametrize(
    "draft_tokens",
    [pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.nightly)],
)
def test_twenty_steps_compile_nothing_after_the_warm_up(draft_tokens):
    mover = tiny.resharder(ONE)
    rollout = mover.zeros()
    engine = Engine(
        tiny.NETWORK,
        ONE,
        num_slots=16,
        max_tokens=2 * LIMIT,
        chunk_steps=4,
        speculation=SpeculationConfig(draft_tokens=draft_tokens),
    )
    for program in aot_programs.warmup_programs(engine.programs, num_prompts=6, prompt_tokens=100):
        engine.compile(rollout, program)
    count = engine.num_compilations()
    random, finished, best = np.random.default_rng(4), 0, 0.0
    used = set()
    generate = engine.programs.generate

    def watched(*args, num_slots, window, **kwargs):
        used.add((num_slots, window))
        return generate(*args, num_slots=num_slots, window=window, **kwargs)

    watched._cache_size = generate._cache_size
    engine.programs.generate = watched
    for step in range(20):
        with jax.set_mesh(ONE):
            rollout = mover.reshard(rollout, tiny.sharded(tiny.params(seed=step), ONE))
        requests = [
            request(
                random,
                random.integers(1, 101),
                [SamplingParams(int(n), random.uniform(0.5, 1.5)) for n in budgets],
                step,
            )
            for budgets in random.integers(1, 25, (6, 4))
        ]
        finished += sum(len(row) for row in engine.generate(rollout, requests))
        best = max(best, engine.statistics.tokens_per_forward)
    assert finished == 20 * 24
    assert (best > 1) == (draft_tokens > 0)
    assert len(used) >= 4, "the steps were all alike: nothing was shown"
    assert engine.num_compilations() == count


@pytest.mark.parametrize("piece", [pytest.param(16, marks=pytest.mark.slow), 24])
def test_long_prompts_are_read_in_pieces(piece, one_window, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.rollout.engine.prefill.PREFILL_CHUNK_TOKENS", piece)
    engine = Engine(tiny.NETWORK, ONE, num_slots=8, max_tokens=LIMIT)
    assert_same(engine.generate(rollout_params(), workload()), expected())


def test_reading_in_pieces_needs_less_memory():
    def temporary(piece):
        read = functools.partial(prefill.prefill, tiny.NETWORK, piece_tokens=piece)
        lowered = jax.jit(read).lower(rollout_params(), host_inputs.empty_prompt_rows(1, 4096))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    # Nearly all of it is scores of 4 heads, twice: [512, 4096] in one piece, as attention takes
    # 512 queries at a time; [128, 4096] in pieces.
    assert temporary(128) < temporary(4096) / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "draft_tokens"),
    [("v5e:2x4", 0), *(pytest.param(*p, marks=pytest.mark.nightly) for p in MORE_TPUS)],
)
def test_a_tpu_reads_pages_in_place(topology, draft_tokens, tpu_devices):
    """The kernel for TPUs compiles; nothing copies the cache, which is longer than fast memory."""
    mesh = mesh_lib.make_mesh(MeshConfig(data=4, fsdp=1, tensor=2), tpu_devices(topology))
    network = tiny.with_sizes(
        dataclasses.replace(tiny.NETWORK, compute_dtype="bfloat16"),
        vocab_size=4096,
        hidden_size=1024,
        num_heads=16,
        num_kv_heads=8,
        head_size=128,
        mlp_size=2048,
    )
    guesses = SpeculationConfig(draft_tokens=draft_tokens)
    engine = Engine(network, mesh, num_slots=64, max_tokens=8192, speculation=guesses)
    mover = tiny.resharder(mesh, network, dtype="bfloat16")
    compiled = aot_programs.lower_generate(engine.programs, mover.abstract()).compile()
    assert "tpu_custom_call" in compiled.as_text()
    memory = compiled.memory_analysis()
    cache = kv_cache.cache_bytes(network, mesh, 64 * 8192, 64)
    assert memory.temp_size_in_bytes < 0.05 * cache
    assert memory.alias_size_in_bytes >= cache


@pytest.mark.slow
def test_a_tpu_holds_no_weights_twice(tpu_devices):
    """Wide products, few tokens: turned copies of the layers' weights would be most of it."""
    mesh = mesh_lib.make_mesh(MeshConfig(fsdp=8), tpu_devices("v5p:2x2x2"))
    network = tiny.with_sizes(
        dataclasses.replace(tiny.NETWORK, compute_dtype="bfloat16"),
        vocab_size=1024,
        hidden_size=4096,
        num_layers=8,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        mlp_size=1024,
    ).for_decoding(mesh)
    engine = Engine(network, mesh, num_slots=64, max_tokens=256)
    mover = tiny.resharder(mesh, network, dtype="bfloat16")
    memory = (
        aot_programs.lower_generate(engine.programs, mover.abstract()).compile().memory_analysis()
    )
    of_layer = 4096 * (32 + 2 * 8) * 128 * 2  # bytes of its queries, keys and values
    assert memory.temp_size_in_bytes < of_layer


def test_slots_stay_full_while_samples_wait(one_window):
    # Log-normal budgets, many short and few long, as reasoning makes them.
    random = np.random.default_rng(3)
    budgets = np.clip(np.exp(random.normal(2.5, 0.8, (16, 4))), 1, 56).astype(int)
    requests = [
        request(random, 1 + i % 8, [SamplingParams(int(b)) for b in row], i)
        for i, row in enumerate(budgets)
    ]
    engine = engine_of()
    completions = engine.generate(rollout_params(), requests)
    found = [[len(c.tokens) for c in row] for row in completions]
    np.testing.assert_array_equal(found, budgets)
    statistics = engine.statistics
    assert statistics.occupancy > 0.9
    # The first token of each sample comes from its prompt.
    assert statistics.decode_tokens == budgets.sum() - budgets.size
    assert statistics.prefill_tokens == sum(len(r.tokens) for r in requests)
    assert budgets.max() <= statistics.decode_steps <= budgets.sum() / 8 + budgets.max()
    found = statistics.metrics()
    assert found["rollout/slot_occupancy"] == statistics.occupancy
    assert found["rollout/decode_tokens_per_s"] * statistics.decode_s == pytest.approx(
        statistics.decode_tokens
    )
    assert (statistics.tokens_per_forward, statistics.acceptance) == (1.0, 0.0)
    # Those of two calls add up, and shares are weighted by what they are shares of.
    engine.generate(rollout_params(), workload()[:1])
    other = engine.statistics
    both = statistics + other
    assert both.decode_tokens == statistics.decode_tokens + other.decode_tokens
    assert both.occupancy == (statistics.busy_slot_steps + other.busy_slot_steps) / (
        statistics.busy_capacity + other.busy_capacity
    )


def test_a_failed_call_leaves_the_engine_as_it_was(one_window, monkeypatch):
    engine, params = engine_of(num_slots=4), rollout_params()
    generate, calls = engine.programs.generate, []

    def fails_once(*args, **kwargs):
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(*args, **kwargs)

    monkeypatch.setattr(engine.programs, "generate", fails_once)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(params, workload())
    assert_same(engine.generate(params, workload()), expected())


def test_logits_that_are_no_numbers_end_like_others():
    engine, params = engine_of(), rollout_params()
    broken = jax.tree.map(lambda a: a * np.nan, params)
    for completions, wanted in zip(engine.generate(broken, workload()), workload(), strict=True):
        for completion, sampled in zip(completions, wanted.params, strict=True):
            assert len(completion.tokens) == sampled.max_tokens or completion.is_stopped
            assert all(0 <= token < 96 for token in completion.tokens)
            assert np.isnan(completion.log_probs).all()
    assert_same(engine.generate(params, workload()), expected())


def test_low_precision_stays_near_one_pass(one_window):
    network = dataclasses.replace(tiny.NETWORK, compute_dtype="bfloat16")
    params = tiny.rollout_params(weights(), ONE, dtype="bfloat16")
    plain = [r for r in workload() if not any(p.is_filtered for p in r.params)]
    completions = engine_of(network=network).generate(params, plain)
    ours, theirs = one_pass(plain, completions, network)
    # bfloat16 keeps 8 bits of hidden states; log-probs here are of size 3.
    assert np.abs(ours - theirs).mean() < 0.02


@pytest.mark.parametrize(
    ("length", "params", "message"),
    [
        (0, SamplingParams(1), "request 1: a prompt of 0 tokens; this engine takes 1 to 63"),
        (64, SamplingParams(1), "request 1: a prompt of 64 tokens"),
        (40, SamplingParams(25), "max_tokens=25 after a prompt of 40 must lie between 1 and 24"),
        (5, SamplingParams(0), "max_tokens=0"),
        (5, SamplingParams(1, stop_tokens=tuple(range(17))), "17 stop tokens, at most 16"),
        (5, SamplingParams(1, num_top_log_probs=33), "num_top_log_probs=33 must lie between 0"),
        (5, SamplingParams(1, stop_strings=("a",)), "request 1: stop strings need the text"),
    ],
)
def test_impossible_requests_are_refused(length, params, message):
    random = np.random.default_rng(0)
    bad = request(random, length, [params], 0)
    with pytest.raises(ValueError, match=message):
        engine_of().generate({}, [workload()[0], bad])
