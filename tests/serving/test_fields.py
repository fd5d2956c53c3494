"""Every field that clients send: used, without consequence, or refused by its name."""

import asyncio
import contextlib
import json
import pathlib
import re
import typing

import pytest
import serving_model
from openai.types import completion_create_params
from openai.types.chat import ChatCompletionMessage
from openai.types.chat import completion_create_params as chat_create_params
from serving_chat import ASK, CALL, SERVED, TOKENIZER, talking, text_of, tokens
from serving_engine import SayingEngine
from starlette.testclient import TestClient
from written_calls import TOOLS

from jaxrl_llm.serving import (
    chat,
    constraints,
    fields,
    messages_api,
    protocol,
    tokenization,
)
from jaxrl_llm.serving.app import make_app
from jaxrl_llm.serving.driver import Driver
from jaxrl_llm.serving.metrics import Metrics
from jaxrl_llm.serving.protocol import ServedModel
from jaxrl_llm.serving.responses_api import body, items
from jaxrl_llm.serving.responses_api import fields as response_fields

ROOT = pathlib.Path(__file__).parents[2]
PLACES = {**fields.PLACES, **response_fields.PLACES}
REQUIRED = ("model", "messages", "prompt", "max_tokens")  # the last one by this test
MODELS = {
    "/v1/chat/completions": [chat.ChatBody],
    "/v1/completions": [protocol.CompletionBody],
    "/tokenize": [tokenization.TokenizePrompt],
    "/detokenize": [tokenization.DetokenizeBody],
    "stream_options": [protocol.StreamOptions],
    "response_format": [constraints.ResponseFormat],
    "response_format.json_schema": [constraints.ResponseSchema],
    "structured_outputs": [constraints.StructuredOutputsField],
    "messages": [chat.ChatMessage],
    "messages.tool_calls": [chat.MessageToolCall],
    "messages.tool_calls.function": [chat.CalledFunction],
    "messages.content": [chat.TextPart, chat.ImagePart],
    "messages.content.image_url": [chat.ImageUrl],
    "tools": [chat.Tool],
    "tools.function": [chat.FunctionDefinition],
    "tool_choice": [chat.NamedToolChoice],
    "tool_choice.function": [chat.ChosenFunction],
    "/v1/messages": [messages_api.CountTokensBody, messages_api.MessagesBody],
    "/v1/messages messages": [messages_api.ApiMessage],
    "/v1/messages messages.content": [
        messages_api.TextBlock,
        messages_api.ImageBlock,
        messages_api.ThinkingBlock,
        messages_api.ToolUseBlock,
        messages_api.ToolResultBlock,
    ],
    "/v1/messages messages.content.source": [messages_api.ImageSource],
    "/v1/messages tools": [messages_api.ApiTool],
    "/v1/messages tool_choice": [messages_api.ApiToolChoice],
    "/v1/messages thinking": [messages_api.ThinkingConfig],
    "/v1/messages output_config": [messages_api.OutputConfig],
    "/v1/messages output_config.format": [messages_api.OutputFormat],
    "/v1/responses": [body.ResponsesBody],
    "/v1/responses input": [
        items.MessageItem,
        items.FunctionCallItem,
        items.FunctionCallOutputItem,
        items.ReasoningItem,
        items.ItemReference,
    ],
    "/v1/responses input.content": [
        items.TextItemPart,
        items.ImageItemPart,
        items.SummaryPart,
        items.ReasoningPart,
    ],
    "/v1/responses tools": [body.FunctionTool],
    "/v1/responses tool_choice": [body.FunctionChoice],
    "/v1/responses reasoning": [body.ReasoningConfig],
    "/v1/responses text": [body.TextConfig],
}


def typed_dicts(kind):
    """The TypedDicts among the members of a type, however they are wrapped."""
    if isinstance(kind, type) and typing.is_typeddict(kind):
        return [kind]
    return [each for inner in typing.get_args(kind) for each in typed_dicts(inner)]


def walked(kind, place, known):
    """Yields (place, field) of a TypedDict of the SDK, and of those in the fields that are used."""
    for name, hint in typing.get_type_hints(kind).items():
        yield place, name
        rule = known.get(place, {}).get(name)
        inside = name if place.startswith("/") else f"{place}.{name}"
        if rule is None or rule.kind == "used":
            for each in typed_dicts(hint):
                yield from walked(each, inside, known)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (chat_create_params.CompletionCreateParamsStreaming, "/v1/chat/completions"),
        (chat_create_params.CompletionCreateParamsNonStreaming, "/v1/chat/completions"),
        (completion_create_params.CompletionCreateParamsStreaming, "/v1/completions"),
    ],
)
def test_no_field_of_the_sdk_is_unknown(kind, place):
    sent = set(walked(kind, place, PLACES))
    assert len(sent) > 15
    unknown = {
        (place, name)
        for place, name in sent
        # A schema's own keys are the model's to read.
        if not place.startswith("tools.function.") and name not in PLACES.get(place, {})
    }
    assert unknown == set()


@pytest.mark.parametrize("place", PLACES)
def test_the_table_says_what_the_models_take(place):
    used = {name for name, rule in PLACES[place].items() if rule.kind == "used"}
    assert used == {name for model in MODELS[place] for name in model.model_fields}
    assert all(model.rules is PLACES[place] for model in MODELS[place])


def documented():
    """The rows of the page's tables: place -> field -> what it says."""
    text = (ROOT / "docs" / "serving.md").read_text("utf-8")
    found, place = {}, ""
    for line in text.partition("## Fields")[2].partition("\n## ")[0].splitlines():
        if heading := re.match(r"\*\*`(.+?)`\*\*", line):
            place = heading[1]
        row = re.match(r"\| ((?:`\w+`(?:, )?)+) \| (.+) \|", line)
        for name in re.findall(r"`(\w+)`", row[1]) if row else ():
            assert name not in found.setdefault(place, {}), (place, name)
            found[place][name] = row[2]
    return found


def test_the_page_shows_the_table():
    def shown(rule):
        if rule.kind != "refused":
            return rule.kind
        accepted = [*(json.dumps(value) for value in rule.neutral), "null"]
        return "only " + ", ".join(f"`{value}`" for value in accepted)

    for place, rules in PLACES.items():
        want = {name: shown(rule) for name, rule in rules.items()}
        said = {name: re.sub("^used: .*", "used", t) for name, t in documented()[place].items()}
        assert said == want, place
    assert set(documented()) == set(PLACES)


@contextlib.contextmanager
def client_of(*says, served=SERVED):
    """A plain HTTP client, and the requests that the engine was asked."""
    engine = SayingEngine(*map(tokens, says * 64))  # the same to each request
    with contextlib.ExitStack() as stack:
        driver = Driver(engine, 0.0, max_waiting=8)
        app = make_app(served, driver, Metrics(driver))

        async def start():
            driver.start(call_soon=asyncio.get_running_loop().call_soon_threadsafe)

        client = stack.enter_context(TestClient(app, raise_server_exceptions=False))
        client.portal.call(start)
        stack.callback(driver.close)
        yield client, engine


def post(client, place="/v1/chat/completions", **body):
    needed = {"messages": [ASK]} if "chat" in place else {"prompt": "a"}
    return client.post(place, json={"model": "m", "max_tokens": 4, **needed, **body})


@pytest.mark.parametrize("place", ["/v1/chat/completions", "/v1/completions"])
def test_no_op_fields_are_accepted_and_others_named(place):
    rules = PLACES[place]
    with client_of("It is 2.") as (client, engine):
        plain = text_of_last(post(client, place), engine)
        neutral = {
            name: rule.neutral[-1] if rule.neutral else {"any": [1]}
            for name, rule in rules.items()
            if rule.kind == "ignored" or rule.neutral
        }
        assert text_of_last(post(client, place, **neutral), engine) == plain
        nulls = {name: None for name in rules if name not in REQUIRED}
        assert text_of_last(post(client, place, **nulls, of_next_year=None), engine) == plain
        for name, rule in rules.items():
            if rule.kind == "refused":
                reply = post(client, place, **{name: [{"x": 1}]})
                error = reply.json()["error"]
                assert (reply.status_code, error["param"]) == (400, name)
                assert error["code"] == "unsupported_parameter" and name in error["message"]
        reply = post(client, place, tempreature=1)
        assert reply.json()["error"]["message"] == "tempreature: no such field"


def text_of_last(reply, engine):
    assert reply.status_code == 200, reply.text
    request = engine.asked[-1]
    return text_of(request), request.params


@pytest.mark.parametrize(
    ("sent", "place"),
    [
        ({"echo": True}, "echo"),
        ({"repetition_penalty": 1e-9}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"bad_words": "x"}, "bad_words"),
        ({"response_format": {"type": "json_schema"}}, "response_format: json_schema belongs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs: structural_tag="),
        ({"top_k": -2}, "top_k"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: 'messages' is set by"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs: 'bos_token' is set"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "'add_generation_prompt' is"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"reasoning_effort": "high\nsystem"}, "reasoning_effort"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "reasoning_effort is 'low', but 'high' in chat_template_kwargs; send one of them",
        ),
        ({"messages": [{**ASK, "audio": {"id": "a"}}]}, "messages.0: audio={'id': 'a'} is not"),
        ({"messages": [{**ASK, "mood": "x"}]}, "messages.0.mood: no such field"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages.0.content.0: Input tag 'input_audio'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            "messages.0.content.0.text: Input should be a valid string; got 3",
        ),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0: custom="),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "allowed_tools="),
        ({"stop": ["a", 7]}, "stop.1: Input should be a valid string; got 7"),
    ],
)
def test_unsupported_fields_are_refused_with_their_location(sent, place):
    with client_of("It is 2.") as (client, _):
        reply = post(client, **sent)
        assert reply.status_code == 400 and place in reply.json()["error"]["message"]


def test_a_reply_goes_back_as_the_sdk_dumps_it():
    """`model_dump()` writes every field of its type, most of them null; so do others' types."""

    async def scenario():
        async with talking(f"I add.\n{CALL}", "It is 2.", "Again 2.", "No.") as (client, engine):
            create = client.chat.completions.create
            messages = [dict(ASK)]
            reply = await create(model="m", messages=messages, tools=TOOLS)
            messages.append(reply.choices[0].message.model_dump())
            assert {"annotations", "audio", "function_call"} <= messages[1].keys()
            (call,) = reply.choices[0].message.tool_calls
            call_id = call.id
            messages.append({"role": "tool", "tool_call_id": call_id, "content": "2"})
            reply = await create(model="m", messages=messages, tools=TOOLS)
            expected = text_of(engine.asked[-1])
            assert reply.choices[0].message.content == "It is 2."
            # The same history with what streams, caches and other servers add to it.
            called = messages[1]["tool_calls"][0]
            messages[0] |= {"cache_control": {"type": "ephemeral"}}
            messages[1] |= {
                "annotations": [],
                "refusal": "",
                "provider_specific_fields": {"refusal": None},
                "tool_calls": [{**called, "index": 0, "custom": None}],
            }
            tools = [{**tool, "cache_control": {"type": "ephemeral"}} for tool in TOOLS]
            messages[2]["content"] = [
                {"type": "text", "text": "2", "cache_control": {"type": "ephemeral"}}
            ]
            await create(model="m", messages=messages, tools=tools)
            assert text_of(engine.asked[-1]) == expected
            # Arguments as an object mean the same as in a string.
            function = called["function"]
            parsed = {**function, "arguments": json.loads(function["arguments"])}
            messages[1]["tool_calls"] = [{**called, "type": None, "function": parsed}]
            await create(model="m", messages=messages, tools=tools)
            assert text_of(engine.asked[-1]) == expected

    asyncio.run(scenario())
    assert "annotations" in ChatCompletionMessage.model_fields


VARIABLES = (
    "{% for m in messages %}{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}\n{% endfor %}effort {{ reasoning_effort | default('medium') }} "
    "{{ verbosity | default('medium') }} thinking "
    "{{ enable_thinking if enable_thinking is defined else True }}\nassistant: "
)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({}, "effort medium medium thinking True"),
        ({"reasoning_effort": "high", "verbosity": "low"}, "effort high low thinking True"),
        (
            {"chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low"}},
            "effort low medium thinking False",
        ),
        ({"chat_template_kwargs": {}, "reasoning_effort": None}, "effort medium medium"),
        (
            {"messages": [{**ASK, "name": "ann"}, {"role": "assistant", "content": "2",
             "reasoning": "one and one", "reasoning_content": None}]},
            "user ann: What is 1 + 1?\nassistant: <think>one and one</think>2\n",
        ),
    ],
)  # fmt: skip
def test_variables_reach_the_template(sent, said):
    tokenizer = serving_model.byte_tokenizer(VARIABLES)
    served = ServedModel("m", tokenizer, SERVED.eos_tokens, len(tokenizer), max_tokens=2000)
    with client_of("It is 2.", served=served) as (client, engine):
        assert post(client, **sent).status_code == 200
        assert said in tokenizer.decode(engine.asked[-1].tokens)


def test_thinking_comes_as_reasoning_content_and_is_taken_back():
    tokenizer = serving_model.byte_tokenizer(f"{VARIABLES}{{# <think></think> #}}")
    served = ServedModel("m", tokenizer, SERVED.eos_tokens, len(tokenizer), max_tokens=2000)

    async def scenario():
        reply = "<think>\none and one\n</think>\n\nIt is 2."
        async with talking(reply, reply, reply, "So.", served=served) as (client, engine):
            chat = client.chat.completions
            request = {"model": "m", "messages": [ASK], "logprobs": True}
            choice = (await chat.create(**request)).choices[0]
            assert choice.message.content == "It is 2."
            assert choice.message.reasoning_content == "one and one"
            assert len(choice.logprobs.content) == len(tokens(reply))
            text = reasoning = ""
            async for chunk in await chat.create(**request, stream=True):
                delta = chunk.choices[0].delta
                text += delta.content or ""
                reasoning += getattr(delta, "reasoning_content", "")
            assert (text, reasoning) == ("It is 2.", "one and one")
            hidden = await chat.create(**request, extra_body={"include_reasoning": False})
            assert hidden.choices[0].message.content == "It is 2."
            assert "reasoning_content" not in hidden.choices[0].message.model_dump()
            request["messages"] = [ASK, choice.message.model_dump(), ASK]
            await chat.create(**request)
            assert "<think>one and one</think>It is 2." in text_of(engine.asked[-1])

    asyncio.run(scenario())


@pytest.mark.parametrize("place", ["/v1/chat/completions", "/v1/completions"])
def test_token_ids_come_with_the_reply(place):
    ids, is_chat = tokens("It is 2."), "chat" in place
    options = {"return_token_ids": True, "max_tokens": 100, "n": 2}
    with client_of("It is 2.", "It is 2.", "It is 2.", served=SERVED) as (client, engine):
        reply = post(client, place, **options).json()
        prompt = list(engine.asked[-1].tokens)
        assert [choice["token_ids"] for choice in reply["choices"]] == [ids, ids]
        holders = [reply] if is_chat else reply["choices"]
        assert [holder["prompt_token_ids"] for holder in holders] == [prompt] * len(holders)
        lines = post(client, place, **options, stream=True).text.split("\n\n")
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        for index in range(2):
            mine = [c for c in chunks if c["choices"][0]["index"] == index]
            assert [t for c in mine for t in c["choices"][0].get("token_ids", ())] == ids
            (first,) = [h for c in mine for h in (c, *c["choices"]) if "prompt_token_ids" in h]
            assert first["prompt_token_ids"] == prompt
        log_probs = {"logprobs": True if is_chat else 0, "return_tokens_as_token_ids": True}
        named = post(client, place, max_tokens=100, **log_probs).json()["choices"][0]["logprobs"]
        names = [each["token"] for each in named["content"]] if is_chat else named["tokens"]
        assert names == [f"token_id:{token}" for token in ids]
        assert "token_ids" not in post(client, place).json()["choices"][0]


def test_texts_and_dialogues_are_tokenized_and_back():
    with client_of("It is 2.", served=SERVED) as (client, engine):
        text = "a <eos> b"
        ids = TOKENIZER(text)["input_ids"]
        reply = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert (reply["tokens"], reply["count"], reply["max_model_len"]) == (ids, len(ids), 2000)
        assert TOKENIZER.convert_tokens_to_ids(reply["token_strs"]) == ids
        back = client.post("/detokenize", json={"model": "m", "tokens": ids}).json()
        assert back == {"prompt": text}
        # A dialogue is what a chat's reply follows.
        chat = {"model": "m", "messages": [ASK], "tools": TOOLS}
        reply = client.post("/tokenize", json=chat).json()
        client.post("/v1/chat/completions", json=chat)
        assert reply["tokens"] == list(engine.asked[-1].tokens)
        assert reply["token_strs"] is None
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": 1}, "prompt"),
            ("/tokenize", {"prompt": "a", "echo": True}, "echo"),
            ("/tokenize", {"messages": []}, "messages"),
            ("/detokenize", {"tokens": [10**6]}, "tokens"),
            ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ):
            refused = client.post(path, json=body)
            assert refused.status_code == 400, body
            assert refused.json()["error"]["param"] == param, refused.json()
        assert client.post("/tokenize", json={**chat, "model": "x"}).status_code == 404


@pytest.mark.parametrize("place", ["/v1/chat/completions", "/v1/completions"])
def test_usage_is_in_every_chunk_if_it_is_asked_for(place):
    options = {"include_usage": True, "continuous_usage_stats": True}
    with client_of("It is 2.") as (client, engine):
        reply = post(client, place, stream=True, stream_options=options, max_tokens=100)
        lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n")]
        chunks = [json.loads(line) for line in lines if line.startswith("{")]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        prompt = len(engine.asked[-1].tokens)
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {prompt}
        totals = [chunk["usage"]["total_tokens"] for chunk in chunks]
        assert totals == [prompt + count for count in counts]
        assert counts == sorted(counts) and counts[-1] == len(tokens("It is 2."))
        assert counts[-2] == counts[-1] and chunks[-1]["choices"] == []
        # Only with `include_usage`, as vLLM; options that ask for nothing need no stream.
        options["include_usage"] = False
        reply = post(client, place, stream=True, stream_options=options)
        assert reply.status_code == 200 and "usage" not in reply.text
        assert post(client, place, stream_options={"include_usage": False}).status_code == 200


@pytest.mark.parametrize(
    ("prompt", "limit", "param"), [("a" * 3000, None, "messages"), ("a" * 1900, 200, "max_tokens")]
)
def test_a_prompt_that_is_too_long_is_told_in_openais_words(prompt, limit, param):
    with client_of("It is 2.") as (client, _):
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": limit}
        reply = post(client, **body)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == param
        assert error["message"].startswith("This model's maximum context length is 2000 tokens.")
        length = len(TOKENIZER(f"user: {prompt}<eos>\nassistant: ")["input_ids"])
        assert f"the prompt has {length} tokens and max_tokens is {limit or 1}" in error["message"]
