"""Speculation: the guesses by hand, and the samples of an engine that makes none."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from distributions import FILTERS, assert_drawn_from, distribution
from engine_work import (
    LIMIT,
    ONE,
    assert_same,
    engine_of,
    expected,
    request,
    rollout_params,
    weights,
    workload,
)

from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.rollout.engine import (
    decode_steps,
    device_programs,
    host_inputs,
    prefill,
    token_sampling,
)
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import NUM_STOP_TOKENS, Request, SamplingParams
from jaxrl_llm.rollout.engine.token_sampling import SamplerState

THREE = SpeculationConfig(draft_tokens=3)


@pytest.fixture(autouse=True)
def one_window(monkeypatch):
    """Every prompt and every chunk in the widest bucket: fewer programs, the same tokens."""
    monkeypatch.setattr("jaxrl_llm.rollout.engine.host_inputs.MIN_WIDTH", LIMIT)


guess = jax.jit(
    token_sampling.prompt_lookup_drafts, static_argnames=("draft_tokens", "ngram_tokens")
)
kept = jax.jit(token_sampling.acceptance_mask)


def propose(sequences, draft_tokens=4, ngram_tokens=3, behind=7):
    history = np.full((len(sequences), 24), behind, np.int32)
    for row, sequence in zip(history, sequences, strict=True):
        row[: len(sequence)] = sequence
    at = np.array([len(sequence) - 1 for sequence in sequences])
    found = guess(history, at, draft_tokens=draft_tokens, ngram_tokens=ngram_tokens)
    return np.asarray(found).tolist()


@pytest.mark.parametrize(
    ("sequence", "guesses"),
    [
        ([5, 1, 2, 9, 8, 6, 4, 1, 2], [9, 8, 6, 4]),  # what followed 1 2
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2, 4]),  # the latest, and round again at the end
        ([0, 1, 2, 3, 9, 1, 2, 4, 0, 1, 2], [3, 9, 1, 2]),  # the longest before the latest
        ([8, 1, 2, 3, 5, 9, 1, 2, 3], [5, 9, 1, 2]),
        ([3, 3], [3, 3, 3, 3]),
        ([1, 2, 3, 4], [-1] * 4),  # the last token is new, whatever stands behind it
        ([7], [-1] * 4),
    ],
)
def test_draft_tokens_by_hand(sequence, guesses):
    assert propose([sequence]) == [guesses]
    assert propose([sequence], behind=sequence[-1]) == [guesses]
    assert propose([sequence], draft_tokens=2) == [guesses[:2]]


def test_guesses_are_those_of_a_search():
    def search(sequence, count, ngram):
        for size in range(ngram, 0, -1):
            ending = sequence[-size:]
            for end in range(len(sequence) - 1, size - 1, -1):
                if sequence[end - size : end] == ending:
                    again = list(sequence)
                    while len(again) < len(sequence) + count:
                        again.append(again[end - len(sequence) + len(again)])
                    return again[len(sequence) :]
        return [-1] * count

    random = np.random.default_rng(0)
    sequences = [random.integers(0, 3, n).tolist() for n in random.integers(1, 25, 300)]
    for ngram in (1, 2, 5):
        found = propose(sequences, 4, ngram)
        for sequence, guesses in zip(sequences, found, strict=True):
            assert guesses == search(sequence, 4, ngram), sequence


@pytest.mark.parametrize(
    ("drawn", "drafts", "remaining", "count"),
    [
        ([4, 5, 6], [4, 5], 9, 3),  # two right guesses and what follows them
        ([4, 5, 6], [4, 6], 9, 2),
        ([4, 5, 6], [3, 5], 9, 1),  # right only after a wrong one
        ([4, 5, 6], [-1, -1], 9, 1),
        ([4, 5, 6], [4, 5], 2, 2),
        ([4, 5, 6], [4, 5], 0, 0),
        ([9, 5, 6], [9, 5], 9, 1),  # 9 ends the sample
        ([4, 9, 6], [4, 9], 9, 2),
    ],
)
def test_accepted_tokens_by_hand(drawn, drafts, remaining, count):
    found = kept(*(np.array([row]) for row in (drawn, drafts, [9, -1])), np.array([remaining]))
    assert np.asarray(found)[0].tolist() == [True] * count + [False] * (3 - count)


@functools.cache
def after_a_prompt(slots=4000):
    """Returns a state whose slots have all drawn the same first token, and the one step."""
    prompt = tuple(np.random.default_rng(5).integers(4, 96, 9).tolist())
    params = rollout_params()
    prefix = jax.jit(functools.partial(prefill.prefill, tiny.NETWORK))(
        params, host_inputs.prompt_rows([prompt], 16)
    )
    column = functools.partial(np.full, slots)
    sampler = SamplerState(
        np.zeros((slots, 2), np.uint32),
        column(0.0),
        column(0),
        column(1.0),
        column(0.0),
        column(0),
    )
    # All read the same page of 16 tokens, none writes to it in one step.
    writes = host_inputs.page_writes([(0, 0, 0)], 1, slots)
    admission = device_programs.InsertArgs(
        column(0),
        np.arange(slots),
        column(9),
        np.full((slots, NUM_STOP_TOKENS), -1),
        sampler,
        column(0),
    )
    state = device_programs.empty_state(tiny.NETWORK, slots, 1, 16, history_tokens=16)
    state, first = jax.jit(functools.partial(device_programs.insert, filtered=False, num_top=0))(
        state, prefix, admission, writes
    )
    step = functools.partial(
        decode_steps.generate,
        tiny.NETWORK,
        params,
        table=np.zeros((slots, 1), np.int32),
        free_target=jnp.int32(slots),
        num_steps=1,
        num_slots=slots,
        window=16,
        reader="gather",
        filtered=True,
        num_top=0,
        draft_tokens=2,
        ngram_tokens=1,
    )
    return state, (*prompt, int(first.tokens[0, 0])), jax.jit(step)


@jax.jit
def logits_of(tokens):
    stacked, inside = jax.tree.map(jnp.asarray, weights()), jnp.ones_like(tokens)
    hidden = tiny.hidden_states(tiny.NETWORK)(stacked, tokens, jnp.arange(16)[None], inside)
    return tiny.NETWORK.logits(stacked, hidden)[0]


def logits_after(sequence):
    return np.asarray(logits_of(np.array([[*sequence, *[0] * (16 - len(sequence))]])))[
        len(sequence) - 1
    ]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_frequencies_are_those_of_the_distribution(params):
    state, sequence, step = after_a_prompt()
    slots, at = len(state.tokens), len(sequence) - 1
    first = distribution(logits_after(sequence), **params)
    guess = int(np.argsort(first)[-2])  # likely, and not what greedy decoding would take
    # Made to be the guess: it stands behind the last token's earlier place.
    history = state.history.at[:, 0].set(sequence[-1]).at[:, 1].set(guess).at[:, 2].set(5)
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "support_tokens": 0}
    fields = {
        name: jnp.full_like(getattr(state.sampler, name), value)
        for name, value in (defaults | params).items()
    }
    keys = jax.random.key_data(jax.random.split(jax.random.key(6), slots))
    state = dataclasses.replace(state, history=history, sampler=SamplerState(keys=keys, **fields))
    after, outputs = step(state)
    tokens, log_probs = np.asarray(outputs.tokens), np.asarray(outputs.log_probs)
    assert_drawn_from(tokens[0], first)
    accepted = tokens[0] == guess
    assert (accepted == (tokens[1] >= 0)).all()
    assert accepted.sum() > 80
    assert_drawn_from(tokens[1, accepted], distribution(logits_after((*sequence, guess)), **params))
    assert ((tokens[2] >= 0) == (accepted & (tokens[1] == 5))).all()
    count = (tokens >= 0).sum(0)
    np.testing.assert_array_equal(after.positions, at + count)
    np.testing.assert_array_equal(after.remaining, 8 - count)
    np.testing.assert_array_equal(after.tokens, np.take_along_axis(tokens, count[None] - 1, 0)[0])
    # The log-prob is that of the whole vocabulary at the temperature.
    whole = distribution(logits_after(sequence), params.get("temperature", 1.0))
    np.testing.assert_allclose(log_probs[0], np.log(whole[tokens[0]]), atol=1e-4)


def greedy_request():
    """Long greedy samples, one of which draws from a single token; they fall into loops."""
    random = np.random.default_rng(8)
    params = [SamplingParams(50, 0.0), SamplingParams(50, top_k=1)]
    return request(random, 9, params, 8)


def test_the_samples_are_those_of_the_plain_engine():
    engine = engine_of(num_slots=8, speculation=THREE)
    asked = [*workload(), greedy_request()]
    found = engine.generate(rollout_params(), asked)
    assert_same(found[:-1], expected())
    assert_same(found[-1:], engine_of().generate(rollout_params(), asked[-1:]))
    statistics = engine.statistics
    assert statistics.tokens_per_forward > 1.2, "hardly a guess was right: nothing was shown"
    assert statistics.tokens_per_forward == pytest.approx(1 + 3 * statistics.acceptance)


@pytest.mark.slow
def test_turns_stop_strings_and_likeliest_tokens():
    engine = Engine(
        tiny.NETWORK,
        ONE,
        num_slots=4,
        max_tokens=LIMIT,
        chunk_steps=2,
        speculation=THREE,
        decode=lambda tokens: "".join(map(chr, tokens)),
    )
    params = rollout_params()
    (greedy,) = engine_of().generate(params, [greedy_request()])
    stop = "".join(map(chr, greedy[0].tokens[20:23]))
    first_end = "".join(map(chr, greedy[0].tokens)).index(stop) + 3
    with_stop, with_tops = (
        dataclasses.replace(
            greedy_request(),
            params=tuple(dataclasses.replace(p, **extra) for p in greedy_request().params),
        )
        for extra in ({"stop_strings": (stop,)}, {"num_top_log_probs": 2})
    )
    engine.reset()
    aborted, stopped, topped = map(engine.submit, (greedy_request(), with_stop, with_tops))
    found = {}
    for p in engine.step(params):
        found[p.request, p.sample] = [list(p.tokens), p.finish_reason]
    begun = engine.abort(aborted)[0].tokens
    assert 2 < len(begun) < 50
    left = SamplingParams(50 - len(begun), 0.0)
    rest = engine.submit(
        Request((*greedy_request().tokens, *begun), np.zeros((1, 2), np.uint32), (left,))
    )
    tops = []
    while engine.num_waiting or engine.num_active:
        for p in engine.step(params):
            kept_so_far = found.setdefault((p.request, p.sample), [[], ""])
            kept_so_far[0].extend(p.tokens)
            kept_so_far[1] = p.finish_reason
            if (p.request, p.sample) == (topped, 0):
                assert len(p.top_log_probs) == len(p.tokens)
                tops.extend(p.top_log_probs)
    whole = greedy[0].tokens
    assert begun + found[rest, 0][0] == whole
    assert found[stopped, 0] == [whole[:first_end], "stop"]
    assert found[topped, 0] == [whole, "length"]
    assert [pairs[0][0] for pairs in tops] == whole
    engine.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_slots", "chunk_steps", "guesses"),
    [
        (3, 5, SpeculationConfig(draft_tokens=1)),
        (4, 16, SpeculationConfig(draft_tokens=6, ngram_tokens=1)),
        (32, 1, SpeculationConfig(draft_tokens=4, ngram_tokens=5)),
    ],
    ids=str,
)
def test_slots_chunks_and_guesses_do_not_matter(num_slots, chunk_steps, guesses):
    engine = engine_of(num_slots=num_slots, chunk_steps=chunk_steps, speculation=guesses)
    assert_same(engine.generate(rollout_params(), workload()), expected())
    assert engine.statistics.tokens_per_forward > 1


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 2}, {"fsdp": 8}], ids=str)
def test_mesh_does_not_matter(sizes):
    mesh = tiny.make_mesh(**sizes)
    engine = engine_of(mesh, speculation=THREE)
    split = engine.programs.state_shardings
    assert split.history.spec[0], "slots are on one device: nothing was shown"
    assert_same(engine.generate(rollout_params(mesh), workload()), expected())


@pytest.mark.slow
def test_other_weights_compile_nothing_and_give_their_own_samples():
    engine, other = engine_of(speculation=THREE), tiny.rollout_params(tiny.params(seed=1), ONE)
    engine.generate(rollout_params(), workload())
    count = engine.num_compilations()
    found = engine.generate(other, workload())
    assert engine.num_compilations() == count
    assert_same(found, engine_of().generate(other, workload()))


def test_without_speculation_no_history_is_kept():
    state = engine_of().programs.abstract_state
    assert state.history.shape == (8, 0)
    kept_by = engine_of(speculation=THREE).programs.abstract_state
    assert kept_by.history.shape == (8, LIMIT)
