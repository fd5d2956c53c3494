"""Chats with tools: what is read while a reply grows, what the model is shown, real clients."""

import asyncio
import contextlib
import dataclasses
import json
import re

import httpx2
import openai
import pytest
import serving_model
from serving_engine import SayingEngine
from written_calls import ONE, SCHEMAS, TOOLS, TWO, WRITTEN

from jaxrl_llm.agents import calls
from jaxrl_llm.agents.tools import special_tokens
from jaxrl_llm.serving.app import make_app
from jaxrl_llm.serving.calls import Expected, Reader
from jaxrl_llm.serving.driver import Driver
from jaxrl_llm.serving.metrics import Metrics
from jaxrl_llm.serving.protocol import Served

TEMPLATE = """{% for tool in tools or [] %}tool: {{ tool | tojson }}
{% endfor %}{% for m in messages %}{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}: \
{{ m.content }}{% for c in m.tool_calls %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<eos>
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
TOKENIZER = serving_model.byte_tokenizer(TEMPLATE)
EOS = TOKENIZER.eos_token_id
SERVED = Served("m", TOKENIZER, (EOS,), len(TOKENIZER), max_tokens=2000, call_format="hermes")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "é"}}\n</tool_call>'
ASK = {"role": "user", "content": "What is 1 + 1?"}


def tokens(text):
    return [*TOKENIZER(text)["input_ids"], EOS]


def text_of(request):
    return TOKENIZER.decode(request.tokens)


def read(name, pieces, **fields):
    """Returns (text, [(number, name, arguments)]) of a reply that comes in pieces."""
    reader = Reader(Expected(name, SCHEMAS, **fields), special_tokens(TOKENIZER))
    told, made = "", []
    for i, piece in enumerate(pieces):
        text, new = reader.extend(piece, i == len(pieces) - 1)
        told += text
        made += [(call.number, call.name, json.loads(call.arguments)) for call in new]
    return told, made


@pytest.mark.parametrize("name", calls.FORMATS)
def test_a_reply_is_the_same_in_any_pieces(name):
    want = [[(0, *ONE[:2])], [(0, *ONE[:2]), (1, *TWO[:2])]]
    for written, made in zip(WRITTEN[name], want, strict=True):
        said = calls.FORMATS[name](written, SCHEMAS).text
        for size in (1, 2, 3, 7, len(written)):
            # Special tokens come whole.
            pieces = re.findall(
                rf"<\|.*?\|>|.{{1,{size}}}?(?=<\||$)|.{{{size}}}", written, re.DOTALL
            )
            assert "".join(pieces) == written
            assert read(name, pieces) == (said, made)
        assert read(name, [written], only_one=True) == (said, made[:1])


def test_text_is_told_at_once_and_calls_when_the_next_begins():
    reader = Reader(Expected("hermes", SCHEMAS), None)
    assert reader.extend("I add <t", False) == ("I add", ())
    assert reader.extend("wo numbers ", False) == (" <two numbers", ())
    assert reader.extend(CALL, False) == ("", ())
    (text, (made,)) = reader.extend(CALL[:12], False)
    assert text == "" and (made.name, made.number) == ("add", 0)
    assert json.loads(made.arguments) == {"a": 1, "note": "é"}
    # What is no call is told as it was written; the one before it was told.
    broken = "<tool_call>{}</tool_call>"
    assert read("hermes", [f"Well. {broken} So."]) == (f"Well. {broken} So.", [])
    assert read("hermes", [CALL, broken])[1] == [(0, "add", {"a": 1, "note": "é"})]
    # A limit may cut a call.
    cut = WRITTEN["qwen3_coder"][0].removesuffix("</tool_call>")
    reader = Reader(Expected("qwen3_coder", SCHEMAS), None)
    assert reader.extend(cut, True, stopped=False) == (cut.strip(), ())


@contextlib.asynccontextmanager
async def talking(*says, served=SERVED):
    """Gives an `openai` client of a server whose model says these things, and the engine."""
    engine = SayingEngine(*map(tokens, says))
    driver = Driver(engine, 0.0, max_waiting=8)
    app = make_app(served, driver, Metrics(driver))
    driver.start(call=asyncio.get_running_loop().call_soon_threadsafe)
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
        try:
            yield (
                openai.AsyncOpenAI(
                    base_url="http://test/v1", api_key="none", http_client=http, max_retries=0
                ),
                engine,
            )
        finally:
            driver.close()


def test_the_openai_client_calls_tools():
    async def scenario():
        async with talking(f"I add.\n{CALL}\n{CALL}", "It is 2.", f"{CALL}{CALL}") as (
            client,
            engine,
        ):
            chat = client.chat.completions
            fields = {"model": "m", "tools": TOOLS, "messages": [ASK]}
            (choice,) = (await chat.create(**fields)).choices
            made = choice.message.tool_calls
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I add.")
            assert len({call.id for call in made}) == 2
            for call in made:
                assert call.function.name == "add"
                assert json.loads(call.function.arguments) == {"a": 1, "note": "é"}
            shown = text_of(engine.asked[0])
            assert shown == f"tool: {json.dumps(TOOLS[0])}\nuser: What is 1 + 1?<eos>\nassistant: "
            # What was replied is sent back as it is.
            replies = [{"role": "tool", "tool_call_id": call.id, "content": "2"} for call in made]
            fields["messages"] = [ASK, choice.message, *replies]
            (choice,) = (await chat.create(**fields)).choices
            assert (choice.finish_reason, choice.message.content) == ("stop", "It is 2.")
            assert choice.message.tool_calls is None
            again = text_of(engine.asked[1]).removeprefix(shown)
            assert (
                again == f"I add.{CALL}{CALL}<eos>\ntool add: 2<eos>\ntool add: 2<eos>\nassistant: "
            )
            # Streamed, at most one, which the client puts together.
            stream = client.chat.completions.stream(
                model="m", tools=TOOLS, messages=[ASK], parallel_tool_calls=False, n=1
            )
            async with stream as events:
                async for _ in events:
                    pass
                (choice,) = (await events.get_final_completion()).choices
            assert choice.finish_reason == "tool_calls" and not choice.message.content
            (call,) = choice.message.tool_calls
            assert json.loads(call.function.arguments) == {"a": 1, "note": "é"}

    asyncio.run(scenario())


def test_a_call_that_is_demanded_is_begun():
    async def scenario():
        rest = '", "arguments": {"a": 2, "note": ""}}\n</tool_call>'
        other = TOOLS[0] | {"function": TOOLS[0]["function"] | {"name": "addend"}}
        async with talking(rest.removeprefix('", "arguments": '), rest, CALL) as (client, engine):
            chat, fields = client.chat.completions, {"model": "m", "messages": [ASK]}
            named = {"type": "function", "function": {"name": "add"}}
            for choice, tools, begun in (
                (named, [TOOLS[0], other], '<tool_call>\n{"name": "add", "arguments": '),
                ("required", [TOOLS[0], other], '<tool_call>\n{"name": "add'),
            ):
                reply = await chat.create(**fields, tools=tools, tool_choice=choice)
                (call,) = reply.choices[0].message.tool_calls
                assert call.function.name == "add"
                assert json.loads(call.function.arguments) == {"a": 2, "note": ""}
                assert text_of(engine.asked[-1]).endswith(f"assistant: {begun}")
                assert reply.usage.prompt_tokens == len(engine.asked[-1].tokens)
            reply = await chat.create(**fields, tools=TOOLS, tool_choice="none")
            assert reply.choices[0].message.content == CALL  # no tool was shown: a text
            assert "tool:" not in text_of(engine.asked[-1])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": TOOLS * 2}, "two tools are called 'add'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": "required"}, "needs tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "no tool 'sub' among tools",
        ),
        ({"messages": [{"role": "user"}]}, "content is missing"),
        ({"messages": [{"role": "tool", "content": "2"}]}, "tool_call_id belongs to"),
        (
            {"messages": [ASK, {"role": "tool", "content": "2", "tool_call_id": "x"}]},
            "'x' answers no call before it",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "x", "function": {"name": "add", "arguments": "[]"}}],
                    }
                ]
            },
            "must be a JSON object",
        ),
    ],
)
def test_what_is_wrong_is_told(fields, said):
    async def scenario():
        async with talking() as (client, _):
            with pytest.raises(openai.BadRequestError, match=said):
                await client.chat.completions.create(**{"model": "m", "messages": [ASK], **fields})

    asyncio.run(scenario())


def test_a_model_without_calls_refuses_tools():
    async def scenario():
        served = dataclasses.replace(SERVED, call_format="")
        async with talking(served=served) as (client, _):
            with pytest.raises(openai.BadRequestError, match="how it calls tools"):
                await client.chat.completions.create(model="m", messages=[ASK], tools=TOOLS)

    asyncio.run(scenario())


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_of_another_library_plays_an_episode(streamed):
    """OpenAI's agents: its own client, its tools, whole and streamed."""
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def add(a: int, note: str) -> str:
        """Adds one.

        Args:
            a: A number.
            note: Words.
        """
        return f"{a + 1} {note}"

    async def scenario():
        async with talking(f"I add.\n{CALL}", "It is 2.") as (client, engine):
            model = agents.OpenAIChatCompletionsModel(model="m", openai_client=client)
            agent = agents.Agent(name="a", instructions="Be brief.", tools=[add], model=model)
            if streamed:
                result = agents.Runner.run_streamed(agent, "What is 1 + 1?")
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(agent, "What is 1 + 1?")
            assert result.final_output == "It is 2."
            last = text_of(engine.asked[1])
            assert "tool add: 2 é<eos>\nassistant: " in last and "system: Be brief." in last

    asyncio.run(scenario())
