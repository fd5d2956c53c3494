"""Bias, penalties, minimum lengths and bad words: vLLM's rules, written again with loops."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
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

from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.rollout.engine import requests
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, RequestError, SamplingParams

VOCAB = tiny.SHAPE.vocab_size
# Sequences that random samples meet: any token that ends in 1, and some pairs and triples.
BAD_WORDS = (
    *((t,) for t in range(4, VOCAB, 10)),
    *((a, b) for a in range(5, 25) for b in range(7, 30, 2)),
    (5, 6, 7),
)
ADJUSTED = {
    "bias": {"logit_bias": ((7, 4.0), (95, -100.0), (4, 100.0), (5, -3.5))},
    "repetition": {"repetition_penalty": 1.3},
    "less repetition": {"repetition_penalty": 0.8, "temperature": 0.7},
    "presence": {"presence_penalty": 2.0, "temperature": 0.0},
    "frequency": {"frequency_penalty": 0.7, "temperature": 0.0, "top_p": 0.9},
    "min_tokens": {"min_tokens": 15, "stop_tokens": tuple(range(40, 56))},
    "bad words": {"bad_words": BAD_WORDS},
    "all": {
        "logit_bias": ((9, 6.0), (10, 5.0)),
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.3,
        "min_tokens": 9,
        "stop_tokens": (9, 10, 11),
        "bad_words": ((9, 9), (10, 9), (9, 10, 10), (11,)),
        "top_k": 20,
    },
}


@functools.cache
def adjusted_workload():
    """A prompt with all kinds of adjustments side by side, one whose samples all stand alone."""
    random = np.random.default_rng(5)
    params = [SamplingParams(**{"max_tokens": 30, **extra}) for extra in ADJUSTED.values()]
    return [request(random, 25, params, 11), request(random, 3, params[::-1], 12)]


@functools.cache
def adjusted_samples():
    return engine_of().generate(rollout_params(), adjusted_workload())


def vllm_logits(logits, params, prompt, output):
    """The logits of the token after `output`, as vLLM's sampler adjusts them."""
    logits = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token in {*prompt, *output}:
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, count in collections.Counter(output).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    for *first, last in params.bad_words:
        if not first or output[-len(first) :] == first:
            logits[last] = -np.inf
    if len(output) < params.min_tokens:
        logits[list(params.stop_tokens)] = -np.inf
    return logits


@jax.jit
def all_logits(weights, tokens):
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    hidden = tiny.hidden_states(tiny.NETWORK)(weights, tokens, positions, jnp.ones_like(tokens))
    return tiny.NETWORK.logits(weights, hidden)


def test_log_probs_are_of_the_adjusted_logits():
    differences, num_argmax = {}, 0
    for asked, completions in zip(adjusted_workload(), adjusted_samples(), strict=True):
        rows = np.zeros((len(completions), LIMIT), np.int32)
        for row, c in zip(rows, completions, strict=True):
            row[: len(asked.tokens) + len(c.tokens)] = (*asked.tokens, *c.tokens)
        logits = np.asarray(all_logits(weights(), rows))
        for params, c, row in zip(asked.params, completions, logits, strict=True):
            for i, token in enumerate(c.tokens):
                plain = row[len(asked.tokens) + i - 1].astype(np.float64)
                adjusted = vllm_logits(plain, params, asked.tokens, c.tokens[:i])
                if params.temperature == 0.0:
                    assert token == adjusted.argmax()
                    num_argmax += token != plain.argmax()
                want, before = (
                    (x - np.logaddexp.reduce(x))[token]
                    for x in (adjusted / (params.temperature or 1), plain)
                )
                assert c.log_probs[i] == pytest.approx(want, abs=1e-4)
                change = differences.setdefault(params, [])
                change.append(abs(want - before))
    assert num_argmax > 5, "penalties changed no greedy choice: nothing was shown"
    assert all(max(changes) > 0.1 for changes in differences.values()), differences


def test_samples_keep_the_rules():
    by_kind = dict(zip(ADJUSTED, adjusted_samples()[0], strict=True))
    plain = engine_of().generate(
        rollout_params(),
        [
            dataclasses.replace(
                r,
                params=tuple(
                    SamplingParams(30, p.temperature, stop_tokens=p.stop_tokens) for p in r.params
                ),
            )
            for r in adjusted_workload()
        ],
    )
    before = dict(zip(ADJUSTED, plain[0], strict=True))
    assert min(by_kind["min_tokens"].tokens.index(t) for t in by_kind["min_tokens"].tokens) == 0
    stops = ADJUSTED["min_tokens"]["stop_tokens"]
    assert len(before["min_tokens"].tokens) < 15 < len(by_kind["min_tokens"].tokens)
    assert not set(by_kind["min_tokens"].tokens[:15]) & set(stops)
    assert by_kind["min_tokens"].finish_reason == "stop"
    words = [*zip(before["bad words"].tokens, before["bad words"].tokens[1:], strict=False)]
    assert set(words) & set(BAD_WORDS) or {(t,) for t in before["bad words"].tokens} & {*BAD_WORDS}
    tokens = by_kind["bad words"].tokens
    for size in 1, 2, 3:
        assert not {tuple(tokens[i : i + size]) for i in range(len(tokens))} & {*BAD_WORDS}
    assert len(set(by_kind["presence"].tokens)) > len(set(before["presence"].tokens))


@pytest.mark.slow
def test_neighbours_keep_their_samples():
    found = engine_of().generate(rollout_params(), [*workload(), *adjusted_workload()])
    assert_same(found[: len(workload())], expected())
    assert_same(found[len(workload()) :], adjusted_samples())


@pytest.mark.parametrize(
    ("num_slots", "chunk_steps", "draft_tokens"),
    [(4, 5, 3), (3, 1, 0), (32, 16, 1)],
)
@pytest.mark.slow
def test_slots_chunks_and_drafts_do_not_matter(num_slots, chunk_steps, draft_tokens):
    speculation = SpeculationConfig(draft_tokens=draft_tokens)
    engine = engine_of(num_slots=num_slots, chunk_steps=chunk_steps, speculation=speculation)
    assert_same(engine.generate(rollout_params(), adjusted_workload()), adjusted_samples())
    assert draft_tokens == 0 or engine.statistics.acceptance > 0


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_mesh_does_not_matter(sizes):
    mesh = tiny.make_mesh(**sizes)
    found = engine_of(mesh).generate(rollout_params(mesh), [*adjusted_workload(), *workload()])
    assert_same(found, [*adjusted_samples(), *expected()])


@pytest.mark.slow
def test_preemption_and_resumption_do_not_matter(monkeypatch):
    want = adjusted_samples()
    monkeypatch.setattr("jaxrl_llm.config.kv_cache_sizing._PAGE_TOKENS", {"cpu": 8})
    engine = Engine(
        tiny.NETWORK, ONE, num_slots=8, max_tokens=LIMIT, chunk_steps=5, cache_tokens=LIMIT
    )
    assert_same(engine.generate(rollout_params(), adjusted_workload()), want)
    assert engine.statistics.num_preemptions > 0
    # Aborted and resumed: what had been sampled stays output.
    engine.reset()
    number = engine.submit(adjusted_workload()[1])
    for _ in range(2):
        engine.step(rollout_params())
    partial, first = engine.abort(number), adjusted_workload()[1]
    resumed = {}
    for i, c in enumerate(partial):
        if c.finish_reason == "abort":
            left = dataclasses.replace(first.params[i], max_tokens=30 - len(c.tokens))
            tokens, key = (*first.tokens, *c.tokens), first.keys[i : i + 1]
            asked = Request(tokens, key, (left,), num_partial=len(c.tokens))
            resumed[engine.submit(asked)] = i
    assert len([c for c in partial if c.tokens]) > 3 and len(resumed) > 4
    for (number, _), (tokens, _) in run_to_end(engine, rollout_params(), {}).items():
        i = resumed[number]
        assert partial[i].tokens + tokens == want[1][i].tokens


@pytest.mark.slow
def test_stop_strings_count_after_min_tokens():
    whole = expected()[0][2].tokens
    decode = lambda tokens: "".join(map(chr, tokens))  # noqa: E731
    engine = Engine(tiny.NETWORK, ONE, num_slots=4, max_tokens=LIMIT, decode=decode)
    stop = decode(whole[2:4])
    first = workload()[0]

    stops = stop, decode(whole[12:13])

    def sample(min_tokens):
        params = SamplingParams(20, stop_strings=stops, min_tokens=min_tokens)
        asked = dataclasses.replace(first, keys=first.keys[2:3], params=(params,))
        ((completion,),) = engine.generate(rollout_params(), [asked])
        return len(completion.tokens)

    again = whole.index(whole[12]) + 1
    assert sample(0) == sample(3) == min(4, again)
    assert sample(4) == next(i + 1 for i, t in enumerate(whole) if t == whole[12] and i >= 4)
    assert sample(20) == 20


@pytest.mark.parametrize(
    ("seen", "min_tokens", "end"), [(0, 0, 2), (1, 1, 2), (0, 2, 5), (4, 4, 5)]
)
def test_stop_strings_complete_before_min_tokens_are_ignored(seen, min_tokens, end):
    decode = lambda tokens: "".join("abc"[t] for t in tokens)  # noqa: E731
    tokens = [0, 1, 2, 0, 1]
    assert requests.num_tokens_to_stop(tokens, seen, ["ab"], decode, min_tokens) == end
    assert requests.num_tokens_to_stop(tokens, 0, ["ab"], decode, 5) == 0


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        (
            {"logit_bias": ((VOCAB, 1.0),)},
            "logit_bias: token id 96 is outside the vocabulary of 96",
        ),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias: a token stands twice"),
        ({"logit_bias": ((1, 100.5),)}, r"logit_bias of token 1 must be in \[-100, 100\]"),
        ({"logit_bias": ((1, float("nan")),)}, "got nan"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be in \[0.01, 100\]"),
        ({"repetition_penalty": float("inf")}, "got inf"),
        ({"presence_penalty": 2.1}, r"presence_penalty must be in \[-2, 2\]"),
        ({"frequency_penalty": -2.1}, r"frequency_penalty must be in \[-2, 2\]"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"bad_words": ((),)}, "bad_words: one of 0 tokens; give 1 to 32"),
        ({"bad_words": ((1,) * 33,)}, "bad_words: one of 33 tokens"),
        ({"bad_words": ((1,),) * 513}, "513 bad words, at most 512"),
        ({"bad_words": ((-1,),)}, "bad_words: token id -1 is outside"),
        ({"bad_words": tuple((t,) for t in range(VOCAB))}, "may ban the whole vocabulary"),
    ],
)
def test_bad_values_are_refused(extra, problem):
    with pytest.raises(RequestError, match=problem):
        engine_of().submit(
            Request((5,), np.zeros((1, 2), np.uint32), (SamplingParams(1, **extra),))
        )
