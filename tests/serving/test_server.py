"""A real server process and the real `openai` client, against the engine in this process."""

import concurrent.futures
import json
import time

import httpx
import numpy as np
import openai
import pytest
import serving_model
import tiny

from jaxrl_llm.data.token_names import detokenizer
from jaxrl_llm.data.tokenizer import load_tokenizer
from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams
from jaxrl_llm.serving.protocol import random_keys
from jaxrl_llm.serving.replies import IncrementalDetokenizer

PROMPT = "The quick brown"
LIMIT = 256


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("serving") / "tiny-model"
    serving_model.make_folder(path)
    return path


@pytest.fixture(scope="module")
def url(folder):
    with serving_model.serving(
        folder, "--num_slots=8", "--max_waiting=24", "--warm_up_prompts=0", "--body_bytes=20000"
    ) as (_, address):
        yield address


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def sample(folder, tokenizer):
    """Returns what the engine in this process gives for a prompt, and its text."""
    net = serving_model.network(tokenizer)
    engine = Engine(net, tiny.make_mesh(), num_slots=8, max_tokens=LIMIT)
    weights = tiny.rollout_params(checkpoint.load(folder, net), tiny.make_mesh(), net)

    def sample(prompt, keys, **params):
        tokens = tuple(tokenizer(prompt)["input_ids"])
        drawn = SamplingParams(stop_tokens=(tokenizer.eos_token_id,), **params)
        request = Request(tokens, keys, (drawn,) * len(keys))
        (completions,) = engine.generate(weights, [request])
        decode = detokenizer(tokenizer)
        return completions, [
            IncrementalDetokenizer(decode, drawn.stop_tokens).extend(c.tokens, c.finish_reason)
            for c in completions
        ]

    return sample


def complete(client, **fields):
    fields = {"model": "tiny-model", "prompt": PROMPT, "max_tokens": 24, **fields}
    return client.completions.create(**fields)


def chat(client, **fields):
    messages = [{"role": "user", "content": "Count to ten."}]
    fields = {"model": "tiny-model", "messages": messages, "max_tokens": 24, **fields}
    return client.chat.completions.create(**fields)


def test_a_greedy_completion_is_the_engines(client, sample, tokenizer):
    (expected,), (text,) = sample(PROMPT, np.zeros((1, 2), np.uint32), max_tokens=24, temperature=0)
    reply = complete(client, temperature=0, logprobs=3)
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason) == (text, expected.finish_reason)
    assert reply.usage.completion_tokens == len(expected.tokens)
    assert reply.usage.prompt_tokens == len(tokenizer(PROMPT)["input_ids"])
    # Another process, another number of devices: the same sums, float32.
    np.testing.assert_allclose(choice.logprobs.token_logprobs, expected.log_probs, atol=2e-5)
    for tops, own in zip(choice.logprobs.top_logprobs, expected.log_probs, strict=True):
        assert len(tops) == 3
        assert max(tops.values()) == pytest.approx(own, abs=2e-5)  # greedy: the likeliest
    assert choice.logprobs.text_offset[0] == 0
    assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset)


def test_a_seed_decides_the_samples(client, sample):
    expected, texts = sample(PROMPT, random_keys(7, 1, 3)[0], max_tokens=24)
    reply = complete(client, seed=7, n=3)
    assert [choice.text for choice in reply.choices] == texts
    assert [choice.finish_reason for choice in reply.choices] == [c.finish_reason for c in expected]
    assert len(set(texts)) == 3
    assert complete(client, seed=8).choices[0].text != texts[0]
    assert complete(client).choices[0].text != complete(client).choices[0].text


def test_seeds_repeat_whatever_else_is_running(client):
    def text(seed):
        length = 8 + 5 * (seed % 4)
        return complete(client, seed=seed, max_tokens=length, prompt=f"{PROMPT} {seed}")

    alone = [text(seed).choices[0].text for seed in range(12)]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        together = list(pool.map(text, [*range(12), *range(12)]))
    assert [reply.choices[0].text for reply in together] == alone * 2
    assert len({reply.id for reply in together}) == 24


@pytest.mark.slow
def test_guesses_change_no_reply(client, folder):
    def replies(client):
        greedy = complete(client, temperature=0, max_tokens=200, extra_body={"ignore_eos": True})
        drawn = complete(client, seed=7, n=6, temperature=0.8, top_p=0.9, logprobs=0)
        return [(c.text, c.finish_reason) for c in (*greedy.choices, *drawn.choices)]

    guessing = ("--num_slots=8", "--draft_tokens=3", "--warm_up_prompts=0")
    with (
        serving_model.serving(folder, *guessing) as (_, url),
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as other,
    ):
        assert replies(other) == replies(client)
        assert serving_model.metric(url, "tokens_per_forward") > 1.0


def joined(chunks, field):
    """Returns (text, finish reason, log-prob entries) of each choice of a stream."""
    choices = {}
    for chunk in chunks:
        for choice in chunk.choices:
            text, reason, entries = choices.get(choice.index, ("", None, []))
            part = choice.text if field == "text" else choice.delta.content
            assert reason is None  # nothing after the end
            if choice.logprobs is not None:
                new = choice.logprobs.content if field == "content" else choice.logprobs.tokens
                entries = entries + new
            choices[choice.index] = (text + (part or ""), choice.finish_reason, entries)
    return [choices[i] for i in sorted(choices)]


def test_a_stream_adds_up_to_the_whole_completion(client):
    fields = {"seed": 5, "n": 2, "max_tokens": 60, "logprobs": 0, "prompt": [PROMPT, "Ü", "你好"]}
    whole = complete(client, **fields)
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}, **fields))
    assert joined(chunks, "text") == [
        (c.text, c.finish_reason, c.logprobs.tokens) for c in whole.choices
    ]
    assert len(whole.choices) == 6
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 7


def test_a_stream_adds_up_to_the_whole_chat(client):
    fields = {"seed": 6, "n": 3, "max_completion_tokens": 50, "logprobs": True, "top_logprobs": 3}
    fields["max_tokens"] = openai.omit
    whole = chat(client, **fields)
    chunks = list(chat(client, stream=True, **fields))
    assert joined(chunks, "content") == [
        (c.message.content, c.finish_reason, c.logprobs.content) for c in whole.choices
    ]
    assert chunks[0].choices[0].delta.role == "assistant"
    entry = whole.choices[0].logprobs.content[0]
    assert len(entry.top_logprobs) == 3
    assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    assert all(c.usage is None for c in chunks)


def test_chat_log_probs_hold_the_bytes_of_the_text(client):
    whole = chat(client, temperature=0, logprobs=True, max_tokens=40)
    (choice,) = whole.choices
    entries = choice.logprobs.content
    if choice.finish_reason == "stop":
        entries = entries[:-1]
    raw = b"".join(bytes(entry.bytes) for entry in entries)
    assert raw.decode(errors="replace") == choice.message.content


def test_chat_is_the_template_and_a_completion(client, tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Count to ten."}], tokenize=False
    )
    completed = complete(client, prompt=text, temperature=0).choices[0].text
    assert chat(client, temperature=0).choices[0].message.content == completed


def test_the_forms_of_a_prompt_are_the_same(client, tokenizer):
    ids = tokenizer(PROMPT)["input_ids"]
    texts = [
        complete(client, prompt=prompt, temperature=0).choices[0].text
        for prompt in (PROMPT, ids, [PROMPT], [ids])
    ]
    assert len(set(texts)) == 1
    reply = complete(client, prompt=["Ü", PROMPT], temperature=0)
    assert reply.choices[1].text == texts[0]


def test_text_ends_before_a_stop_string(client):
    free = complete(client, seed=3, max_tokens=60, extra_body={"ignore_eos": True}).choices[0].text
    stop = free[20:23]
    first = free.index(stop)
    fields = {"seed": 3, "max_tokens": 60, "stop": ["never to be seen", stop]}
    reply = complete(client, **fields, extra_body={"ignore_eos": True})
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (free[:first], "stop")
    assert reply.usage.completion_tokens < 60
    chunks = list(complete(client, stream=True, **fields, extra_body={"ignore_eos": True}))
    assert joined(chunks, "text") == [(free[:first], "stop", [])]


def test_filters_leave_the_likeliest(client):
    greedy = complete(client, temperature=0, max_tokens=8).choices[0].text
    hot = {"temperature": 2.0, "max_tokens": 8}
    assert complete(client, seed=4, **hot).choices[0].text != greedy
    assert complete(client, seed=4, **hot, extra_body={"top_k": 1}).choices[0].text == greedy
    assert complete(client, seed=4, **hot, extra_body={"min_p": 0.999}).choices[0].text == greedy
    assert complete(client, seed=1, **hot, top_p=1e-6).choices[0].text == greedy


@pytest.mark.parametrize(
    "fields, status, param, message",
    [
        (
            {"prompt": [1] * 240},
            400,
            "max_tokens",
            "the prompt has 240 tokens and max_tokens is 24",
        ),
        ({"prompt": [1] * 300}, 400, "prompt", "together 324; this model takes 256"),
        ({"prompt": ""}, 400, "prompt", "no tokens"),
        ({"prompt": [-1]}, 400, "prompt", "token id -1 is outside the vocabulary of 320"),
        ({"prompt": {"a": 1}}, 400, "prompt", "prompt"),
        ({"model": "../../etc/passwd"}, 404, "model", "is not served here; use 'tiny-model'"),
        ({"temperature": 3}, 400, "temperature", "less than or equal to 2; got 3"),
        (
            {"temperature": 1e-10},
            400,
            "temperature",
            "0 or in [0.0001, inf) (0: greedy), got 1e-10",
        ),
        ({"temperature": "hot"}, 400, "temperature", "valid number; got 'hot'"),
        ({"top_p": 0}, 400, "top_p", "greater than 0"),
        ({"n": 0}, 400, "n", "greater than or equal to 1"),
        ({"n": 33}, 400, None, "33 samples in one request; this server holds 1 to 32"),
        ({"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 2.5}, 400, "max_tokens", "valid integer"),
        ({"suffix": "x"}, 400, "suffix", "not supported"),
        ({"best_of": 2}, 400, "best_of", "best_of=2 must be n=1"),
        ({"logit_bias": {"320": 1}}, 400, "logit_bias", "outside the vocabulary of 320"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias", "match pattern"),
        ({"logit_bias": {"5": 101}}, 400, "logit_bias", "less than or equal to 100"),
        ({"presence_penalty": 2.5}, 400, "presence_penalty", "less than or equal to 2"),
        ({"frequency_penalty": -2.5}, 400, "frequency_penalty", "greater than or equal to -2"),
        ({"stop": [""]}, 400, "stop", "1 to 256 characters"),
        ({"stop": ["x"] * 17}, 400, "stop", "17 stop strings, at most 16"),
        ({"logprobs": 21}, 400, "logprobs", "less than or equal to 20"),
        ({"stream_options": {"include_usage": True}}, 400, None, "needs stream=true"),
        ({"extra_body": {"repetition_penalty": 0}}, 400, "repetition_penalty", "equal to 0.01"),
        ({"extra_body": {"min_tokens": 25}}, 400, "min_tokens", "above the limit of 24"),
        ({"extra_body": {"bad_words": [""]}}, 400, "bad_words", "at least 1 character"),
        ({"extra_body": {"bad_words": ["7@" * 40]}}, 400, "bad_words", "give words of 1 to 32"),
        (
            {"extra_body": {"prompt_logprobs": 1, "stream": True}},
            400,
            "prompt_logprobs",
            "not available with stream=true",
        ),
        ({"extra_body": {"prompt_logprobs": -1}}, 400, "prompt_logprobs", "equal to 0"),
        ({"extra_body": {"tempreature": 1}}, 400, "tempreature", "tempreature: no such field"),
        ({"extra_body": {"stop_token_ids": [*range(17)]}}, 400, "stop_token_ids", "at most 16"),
        ({"prompt": "x" * 30000}, 413, None, "over 20000 bytes"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(client, fields, status, param, message):
    with pytest.raises(openai.APIStatusError) as caught:
        complete(client, **fields)
    assert caught.value.status_code == status
    error = caught.value.body
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "judge", "content": ""}]}, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
        ),
        ({"top_logprobs": 2}, "needs logprobs=true"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"functions": [{"name": "f"}]}, "not supported"),
        ({"extra_body": {"guided_regex": "(a"}}, r"guided_regex: at 2\(8\): invalid regex"),
        ({"max_completion_tokens": 10_000}, "max_tokens is 10000"),
    ],
)
def test_bad_chats_are_told_what_is_wrong(client, fields, message):
    with pytest.raises(openai.BadRequestError, match=message):
        chat(client, **fields)


def test_bodies_that_are_not_json(url):
    for content, kind in ((b"{", "application/json"), (b'{"model": NaN}', "application/json")):
        reply = httpx.post(url + "/v1/completions", content=content, headers={"Content-Type": kind})
        assert reply.status_code == 400
        assert reply.json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(url + "/v1/nothing").json()["error"]["message"] == "Not Found"
    assert httpx.get(url + "/v1/completions").status_code == 405


@pytest.mark.parametrize(
    ("field", "place"),
    [
        ({"stop": "\ud800"}, "stop"),
        ({"stop": ["a", "b\udfff"]}, "stop.1"),
        ({"prompt": "a\ud83d"}, "prompt"),
        ({"messages": [{"role": "user", "content": "\udc00"}]}, "messages.0.content"),
        ({"metadata": {"a": {"\ud800": 1}}}, r"metadata.a.'\ud800'"),
        ({"\ud800": 1}, r"'\ud800'"),
        ({"model": "\ud800"}, "model"),
    ],
)
def test_half_of_a_surrogate_pair_is_told_where_it_is(url, field, place):
    path = "/v1/chat/completions" if "messages" in field else "/v1/completions"
    body = {"model": "tiny-model", "prompt": PROMPT, **field}
    if "messages" in field:
        del body["prompt"]
    headers = {"Content-Type": "application/json"}
    reply = httpx.post(url + path, content=json.dumps(body), headers=headers)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(f"{place}: contains a lone surrogate")
    assert httpx.get(url + "/health").status_code == 200


def test_models_health_and_metrics(client, url):
    assert [model.id for model in client.models.list()] == ["tiny-model"]
    assert client.models.retrieve("tiny-model").id == "tiny-model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    assert httpx.get(url + "/health").json() == {"status": "ready"}
    before = serving_model.metric(url, "generated_tokens_total")
    reply = complete(client, n=2)
    gained = serving_model.metric(url, "generated_tokens_total") - before
    assert gained == reply.usage.completion_tokens
    text = httpx.get(url + "/metrics").text
    for name in ("active_slots", "queue_samples", "time_to_first_token_seconds_bucket"):
        assert f"\njaxrl_llm_{name}" in text
    assert 'jaxrl_llm_rejected_total{reason="not_found"}' in text
    assert serving_model.metric(url, "slots") == 8


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_client_that_leaves_frees_its_slots(client, url, stream):
    before = serving_model.metric(url, "cancelled_total")
    body = {"model": "tiny-model", "prompt": PROMPT, "n": 32, "max_tokens": 240, "stream": stream}
    body["ignore_eos"] = True
    patience = httpx.Timeout(30, read=30 if stream else 0.03)
    try:
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=patience) as reply:
            for line in reply.iter_lines():
                assert json.loads(line.removeprefix("data: "))["choices"]
                break
    except httpx.ReadTimeout:
        assert not stream
    end = time.monotonic() + serving_model.HANGS_S
    while serving_model.metric(url, "cancelled_total") == before:
        assert time.monotonic() < end
        time.sleep(0.05)
    while serving_model.metric(url, "active_slots"):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert complete(client).usage.completion_tokens > 0
