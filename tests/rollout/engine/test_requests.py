"""What an engine refuses, each with the number and the rule; stop strings, however text is cut."""

import math

import numpy as np
import pytest
from engine_work import engine_of, rollout_params, workload
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.config.rollout_data import MIN_TEMPERATURE
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.engine import requests
from jaxrl_llm.rollout.engine.requests import Request, RequestError, RequestLimits, SamplingParams

LIMITS = RequestLimits(max_tokens=64, vocab_size=96, takes_stop_strings=True)
KEY = np.zeros((1, 2), np.uint32)
NAN, INF = math.nan, math.inf
PIECES = ["a", "b", "ab", "", "ba", "abba", "é"]  # token 3 has no text


def check(tokens=(1,), keys=KEY, **params):
    LIMITS.check(Request(tokens, keys, (SamplingParams(**{"max_tokens": 1, **params}),)), "it")


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        (
            r"temperature must be 0 or in \[0.0001, inf\) \(0: greedy\)",
            (-1, -1e-9, NAN, INF, 1e-10, 9e-5, "x"),
        ),
        (
            r"top_k=.* \(0: off\) must lie between 0 and 2147483647 and be an integer",
            (-1, 2**31, 2.5, NAN, None),
        ),
        (r"top_p must be in \(0, 1\] \(1: off\)", (0, -0.5, 1.01, NAN, INF)),
        (r"min_p must be in \[0, 1\) \(0: off\)", (-0.1, 1.0, NAN, INF)),
        ("max_tokens=.* must lie between 1 and 63", (0, -1, 64, 2.5, NAN, "x")),
        ("num_top_log_probs=.* must lie between 0 and 32", (-1, 33, 1.5)),
        ("stop_tokens: token id .* outside the vocabulary of 96", ((-1,), (1, 96), (10**12,))),
        ("stop_tokens: token ids are integers", ((1.5,), (10**30,), ("a",))),
        ("17 stop tokens, at most 16", (tuple(range(17)),)),
        ("a stop string is empty", (("a", ""),)),
        (r"'\\ud800x' contains a lone surrogate", (("\ud800x",),)),
        ("prompt: token id (-1|96) is outside the vocabulary of 96", ((-1,), (5, 96))),
        ("prompt: token ids are integers", ((1.5,), ("a",), ((1, 2),))),
        ("a prompt of (0|64) tokens; this engine takes 1 to 63", ((), (1,) * 64)),
        ("one raw key of two integers for each", (KEY[:0], KEY[0], KEY.astype(float))),
    ],
)
def test_sampling_params_out_of_range_are_refused(rule, values):
    words = {"a stop string": "stop_strings", "'": "stop_strings", "17": "stop_tokens"}
    words |= {"prompt": "tokens", "a prompt": "tokens", "one raw": "keys"}
    field = next((f for word, f in words.items() if rule.startswith((word, "r" + word))), "")
    field = field or rule.replace("=", " ").replace(":", " ").split()[0]
    for value in values:
        with pytest.raises(RequestError, match=f"it: .*{rule}"):
            check(**{field: value})


def test_the_ends_of_the_ranges_are_taken():
    for temperature in (0, 0.0, MIN_TEMPERATURE, np.float32(0.5), 1e30):
        check(temperature=temperature, top_k=np.int64(7), top_p=1e-30, min_p=0.999, max_tokens=63)
    check((0, 95), top_k=2**31 - 1, top_p=1, stop_tokens=(0, 95), stop_strings=("é😀",))


def test_nothing_is_queued_of_a_refused_request():
    engine, good = engine_of(), workload()[0]
    engine.reset()
    with pytest.raises(UserError):
        engine.submit(Request((1,), KEY, (SamplingParams(1, temperature=1e-10),)))
    assert engine.num_waiting == 0
    with pytest.raises(ValueError, match="request 1: temperature must"):
        bad = Request((1,), KEY, (SamplingParams(1, temperature=-1),))
        engine.generate(rollout_params(), [good, bad])
    assert engine.num_waiting == 0


def decode(tokens):
    return "".join(PIECES[t] for t in tokens)


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.sampled_from([0, 1, 2, 4, 5, 6]), max_size=30),
    stops=st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=3),
    chunks=st.lists(st.integers(1, 7), min_size=1),
)
def test_the_first_token_that_completes_one_is_found(tokens, stops, chunks):
    want = next(
        (n for n in range(len(tokens) + 1) if any(s in decode(tokens[:n]) for s in stops)), 0
    )
    seen = found = 0
    while seen < len(tokens) and not found:
        end = seen + chunks[seen % len(chunks)]
        found = requests.num_tokens_to_stop(tokens[:end], seen, stops, decode)
        seen = end
    assert found == want
    text = requests.text_before(decode(tokens), stops)
    assert not any(s in text for s in stops)
    assert decode(tokens).startswith(text)
    assert (text == decode(tokens)) == (want == 0)


def test_tokens_without_text_are_bridged():
    assert requests.num_tokens_to_stop([0, 3, 3, 3, 1], 4, ["ab"], decode) == 5
