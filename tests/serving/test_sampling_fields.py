"""Log-probs of prompts and adjusted logits over HTTP, with the real engine on a tiny network."""

import asyncio
import contextlib
import functools
import itertools
import json

import numpy as np
import pytest
import serving_model
import tiny
from starlette.testclient import TestClient

from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import SamplingParams
from jaxrl_llm.serving import sampling_fields
from jaxrl_llm.serving.app import make_app
from jaxrl_llm.serving.driver import Driver
from jaxrl_llm.serving.metrics import Metrics
from jaxrl_llm.serving.protocol import CompletionBody, ServedModel
from jaxrl_llm.serving.replies import IncrementalDetokenizer

TOKENIZER = serving_model.byte_tokenizer()
NETWORK = serving_model.network(TOKENIZER)
SERVED = ServedModel("m", TOKENIZER, (TOKENIZER.eos_token_id,), len(TOKENIZER), max_tokens=64)


@functools.cache
def weights():
    return tiny.params(NETWORK, scale=5.0)


@contextlib.contextmanager
def client():
    mesh = tiny.make_mesh()
    engine = Engine(
        NETWORK,
        mesh,
        num_slots=4,
        max_tokens=64,
        decode=TOKENIZER.decode,
        prefix_caching=True,
    )
    driver = Driver(engine, tiny.rollout_params(weights(), mesh, NETWORK), max_waiting=64)
    with TestClient(make_app(SERVED, driver, Metrics(driver))) as http:

        async def start():
            driver.start(call_soon=asyncio.get_running_loop().call_soon_threadsafe)

        http.portal.call(start)
        try:
            yield http
        finally:
            driver.close()


def post(http, **body):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    reply = http.post(path, json={"model": "m", **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def log_probs_of(tokens):
    """Log-probs [T, V] of every token after those before it, by one pass over the sequence."""
    rows = np.zeros((1, 64), np.int32)
    rows[0, : len(tokens)] = tokens
    positions = np.arange(64)[None]
    hidden = tiny.hidden_states(NETWORK)(weights(), rows, positions, np.ones_like(rows))
    logits = np.asarray(NETWORK.logits(weights(), hidden))[0, : len(tokens)].astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def loglikelihood(choice, context_length, cut):
    """As lm-eval's `LocalCompletionsAPI.parse_logprobs`; `cut` leaves out the sampled token."""
    values = choice["logprobs"]["token_logprobs"][context_length:cut]
    tops = choice["logprobs"]["top_logprobs"][context_length:cut]
    is_greedy = all(v == max(top.values()) for v, top in zip(values, tops, strict=True))
    return sum(values), is_greedy


def check_loglikelihoods(http):
    random = np.random.default_rng(0)
    rows = [random.integers(3, len(TOKENIZER), n).tolist() for n in (2, 17, 33, 62, 5, 40)]
    for context, max_tokens in (1, 1), (2, 0):
        # lm-eval's own fields.
        reply = post(
            http,
            prompt=rows,
            echo=True,
            logprobs=1,
            max_tokens=max_tokens,
            temperature=0,
            seed=1234,
        )
        usage = reply["usage"]
        assert usage["completion_tokens"] == max_tokens * len(rows)
        for row, choice in zip(rows, reply["choices"], strict=True):
            expected = log_probs_of(row)
            want = [expected[i - 1, row[i]] for i in range(context, len(row))]
            is_greedy = all(expected[i - 1].argmax() == row[i] for i in range(context, len(row)))
            found = loglikelihood(choice, context, -1 if max_tokens else None)
            assert found == (pytest.approx(sum(want), abs=1e-4), is_greedy)
            fields = choice["logprobs"]
            assert fields["token_logprobs"][0] is fields["top_logprobs"][0] is None
            assert {len(values) for values in fields.values()} == {len(row) + max_tokens}
            assert choice["text"].startswith(TOKENIZER.decode(row))
            assert choice["finish_reason"] in (
                ("length",) if not max_tokens else ("length", "stop")
            )
    # Its own greedy continuation is greedy.
    reply = post(http, prompt=rows[1], max_tokens=8, temperature=0, return_token_ids=True)
    row = rows[1] + reply["choices"][0]["token_ids"]
    (choice,) = post(http, prompt=row, echo=True, logprobs=1, max_tokens=0)["choices"]
    assert loglikelihood(choice, len(rows[1]), None)[1]


def check_echo(http):
    text = "The quick brown fox"
    asked = {"prompt": text, "max_tokens": 5, "seed": 2, "n": 2, "logprobs": 2}
    plain = post(http, **asked)
    echoed = post(http, **asked, echo=True)
    num_prompt = len(TOKENIZER(text)["input_ids"])
    for before, after in zip(plain["choices"], echoed["choices"], strict=True):
        assert after["text"] == text + before["text"]
        ours, theirs = after["logprobs"], before["logprobs"]
        assert ours["tokens"][num_prompt:] == theirs["tokens"]
        np.testing.assert_allclose(
            ours["token_logprobs"][num_prompt:], theirs["token_logprobs"], atol=1e-5
        )
        assert "".join(ours["tokens"][:num_prompt]) == text
        assert ours["text_offset"][num_prompt:] == [len(text) + o for o in theirs["text_offset"]]
        assert ours["text_offset"][:2] == [0, len(ours["tokens"][0])]
    with http.stream(
        "POST", "/v1/completions", json={"model": "m", **asked, "echo": True, "stream": True}
    ) as reply:
        events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    texts, tokens = ["", ""], [[], []]
    for event in map(json.loads, events[:-1]):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            tokens[choice["index"]] += choice["logprobs"]["tokens"]
    assert texts == [choice["text"] for choice in echoed["choices"]]
    assert tokens == [choice["logprobs"]["tokens"] for choice in echoed["choices"]]
    assert post(http, prompt=text, echo=True, max_tokens=0)["choices"][0]["text"] == text


def check_prompt_log_probs(http):
    row = [5, 6, 7, 200, 9]
    (choice,) = post(http, prompt=row, max_tokens=2, prompt_logprobs=3)["choices"]
    expected = log_probs_of(row)
    assert choice["prompt_logprobs"][0] is None
    for i, entries in enumerate(choice["prompt_logprobs"][1:], 1):
        theirs = expected[i - 1]
        order = np.argsort(-theirs)
        assert {*entries} == {str(row[i]), *map(str, order[:3])}
        for token, entry in entries.items():
            assert entry["logprob"] == pytest.approx(theirs[int(token)], abs=1e-4)
            assert entry["rank"] == 1 + (order == int(token)).argmax()
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    reply = post(http, **chat, prompt_logprobs=0)
    assert [len(entries or ()) for entries in reply["prompt_logprobs"]][:3] == [0, 1, 1]
    assert "prompt_logprobs" not in reply["choices"][0]


def check_adjustments(http):
    def ids(**fields):
        reply = post(http, prompt="In", seed=3, max_tokens=12, return_token_ids=True, **fields)
        return reply["choices"][0]["token_ids"]

    plain = ids(ignore_eos=True)
    assert ids(logit_bias={"70": 100}) == [70] * 12
    assert plain[0] not in ids(logit_bias={str(plain[0]): -100}, ignore_eos=True)[:1]
    greedy = ids(temperature=0, ignore_eos=True)
    apart = ids(temperature=0, ignore_eos=True, repetition_penalty=100.0)
    assert len(set(greedy)) < len(set(apart)) == 12
    assert len(set(ids(temperature=0, ignore_eos=True, presence_penalty=2.0))) > len(set(greedy))
    eos = {str(SERVED.eos_tokens[0]): 100}
    assert len(ids(logit_bias=eos)) == 1
    assert len(ids(logit_bias=eos, min_tokens=4)) == 5
    word = TOKENIZER.decode(plain[:1])
    bans = sampling_fields.bad_word_tokens(TOKENIZER, [word])
    found = ids(ignore_eos=True, bad_words=[word])
    assert (plain[0],) not in bans or plain[0] not in found


def test_served_log_probs_and_adjustments():
    with client() as http:
        check_loglikelihoods(http)
        check_echo(http)
        check_prompt_log_probs(http)
        check_adjustments(http)


def test_bad_words_are_tokenized_as_vllm_does():
    tokens = functools.partial(TOKENIZER.encode, add_special_tokens=False)
    first, spaced = tuple(tokens("begin")), tuple(tokens(" begin"))
    found = sampling_fields.bad_word_tokens(TOKENIZER, ["begin", " begin", "q"])
    assert found[0] == first and tuple(tokens("q")) in found
    assert (spaced in found) == (len(spaced) == len(first) and spaced[0] != first[0])
    assert len(found) == len(set(found))


def test_fields_become_parameters():
    body = CompletionBody.model_validate(
        {
            "model": "m",
            "prompt": "a",
            "logit_bias": {"7": 1, "9": -2.5},
            "presence_penalty": 1,
            "frequency_penalty": -1,
            "repetition_penalty": 1.5,
            "min_tokens": 3,
            "bad_words": ["q"],
        }
    )
    (request,) = body.generation_request(SERVED).requests
    assert request.params == (
        SamplingParams(
            16,
            stop_tokens=SERVED.eos_tokens,
            logit_bias=((7, 1.0), (9, -2.5)),
            presence_penalty=1.0,
            frequency_penalty=-1.0,
            repetition_penalty=1.5,
            min_tokens=3,
            bad_words=(tuple(TOKENIZER.encode("q")),),
        ),
    )
    assert request.num_prompt_top is None


@pytest.mark.parametrize("cuts", [(), (1, 2, 3, 4, 5, 6), (3,)])
def test_stop_strings_within_min_tokens_are_shown(cuts):
    decode = lambda tokens: "".join("abc"[t] for t in tokens)  # noqa: E731
    tokens, told = [0, 1, 2, 0, 1], ""
    transcript = IncrementalDetokenizer(decode, (), ["ab"], min_tokens=2)
    edges = [0, *(cut for cut in cuts if cut < 5), 5]
    for begin, end in itertools.pairwise(edges):
        told += transcript.extend(tokens[begin:end], "stop" if end == 5 else "")
    assert told == "abc"
    assert transcript.stop_string == "ab"
