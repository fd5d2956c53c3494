"""Log-probs of prompts: one pass over the whole sequence, whatever the prompts are read with."""

import dataclasses
import functools

import numpy as np
import pytest
import tiny
from engine_work import (
    LIMIT,
    ONE,
    assert_same,
    engine_of,
    expected,
    rollout_params,
    weights,
    workload,
)

from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, RequestError, SamplingParams

TOPS = (0, 3, None, 5, 2, 0, 1)  # by request of the workload


@functools.cache
def one_pass(tokens):
    """Log-probs [T, V] of every token after those before it."""
    rows = np.array([tokens])
    positions = np.arange(rows.shape[1])[None]
    hidden = tiny.hidden_states(tiny.NETWORK)(weights(), rows, positions, np.ones_like(rows))
    logits = np.asarray(tiny.NETWORK.logits(weights(), hidden))[0].astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def asked(**extra):
    return [
        dataclasses.replace(r, num_prompt_top=top, **extra)
        for r, top in zip(workload(), TOPS, strict=True)
    ]


def check(requests, completions):
    for request, samples in zip(requests, completions, strict=True):
        if (k := request.num_prompt_top) is None:
            assert all(c.prompt_log_probs is None for c in samples)
            continue
        log_probs = one_pass(request.tokens)
        for sample in samples:
            ours = sample.prompt_log_probs
            assert {len(a) for a in ours} == {len(request.tokens)}
            assert ours.top_tokens.shape[1] == ours.top_log_probs.shape[1] == k
            for i, token in enumerate(request.tokens[1:]):
                theirs = log_probs[i]
                assert ours.log_probs[i + 1] == pytest.approx(theirs[token], abs=1e-4)
                assert ours.ranks[i + 1] == 1 + (theirs > theirs[token]).sum()
                assert ours.top_tokens[i + 1].tolist() == np.argsort(-theirs)[:k].tolist()
                np.testing.assert_allclose(
                    ours.top_log_probs[i + 1], np.sort(theirs)[::-1][:k], atol=1e-4
                )
                # Clients find out whether a token is the likeliest by comparing the two.
                if k and ours.ranks[i + 1] == 1:
                    assert ours.log_probs[i + 1] == ours.top_log_probs[i + 1, 0]


@pytest.mark.slow
def test_log_probs_are_those_of_one_pass():
    engine = engine_of()
    found = engine.generate(rollout_params(), asked())
    check(asked(), found)
    assert_same(found, expected())
    engine.reset()
    first = {}
    numbers = [engine.submit(r) for r in asked()]
    while engine.num_waiting or engine.num_active:
        for p in engine.step(rollout_params()):
            key = numbers.index(p.request), p.sample
            first.setdefault(key, []).append(p.prompt_log_probs)
    for (i, j), parts in first.items():
        assert parts[1:] == [None] * (len(parts) - 1)
        assert (parts[0] is None) == (TOPS[i] is None)
        if parts[0] is not None:
            whole = found[i][j].prompt_log_probs
            np.testing.assert_allclose(parts[0].log_probs, whole.log_probs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["chunks", "mesh", "batches"])
def test_ways_to_prefill_do_not_matter(case, monkeypatch):
    mesh = tiny.make_mesh(fsdp=2, tensor=2) if case == "mesh" else ONE
    if case == "chunks":
        monkeypatch.setattr("jaxrl_llm.rollout.engine.prefill.PREFILL_CHUNK_TOKENS", 16)
    if case == "batches":
        monkeypatch.setattr("jaxrl_llm.rollout.engine.host_inputs.MAX_PREFILL_TOKENS", 80)
    engine = Engine(tiny.NETWORK, mesh, num_slots=4, max_tokens=LIMIT)
    found = engine.generate(rollout_params(mesh), asked())
    check(asked(), found)
    assert_same(found, expected())


@pytest.mark.slow
def test_a_continued_prompt_is_read_as_a_whole():
    engine = Engine(tiny.NETWORK, ONE, num_slots=4, max_tokens=LIMIT, chunk_steps=5)
    first = dataclasses.replace(workload()[3], retains_pages=True)

    def run(request):
        """Returns its completions and the number of tokens that were prefilled."""
        before = engine.statistics.prefill_tokens
        completions = engine.completions(engine.submit(request))
        while engine.num_waiting or engine.num_active:
            engine.step(rollout_params())
        return completions, engine.statistics.prefill_tokens - before

    def continued(top):
        engine.reset()
        tokens = (*first.tokens, *run(first)[0][2].tokens)
        again = Request(
            tokens, first.keys[:1], (SamplingParams(4),), continues=(0, 2), num_prompt_top=top
        )
        completions, num_read = run(again)
        check([again], [completions])
        assert engine._pages.num_used == 3  # what is retained of the two other samples
        return completions[0].tokens, num_read

    tokens, num_read = continued(None)
    assert num_read == 1
    assert continued(2) == (tokens, len(first.tokens) + 20)


@pytest.mark.parametrize("top", [-1, 33, 1.5])
def test_bad_numbers_are_refused(top):
    with pytest.raises(RequestError, match=r"num_prompt_top=.* must lie between 0 and 32"):
        engine_of().submit(dataclasses.replace(workload()[0], num_prompt_top=top))
