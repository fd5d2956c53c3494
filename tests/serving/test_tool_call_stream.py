"""Chats with tools: what is read while a reply grows, what the model is shown, real clients."""

import asyncio
import dataclasses
import json
import re
import time

import hypothesis
import hypothesis.strategies as st
import openai
import pytest
from serving_chat import ASK, CALL, SERVED, TOKENIZER, talking, text_of
from written_calls import ADVERSARIAL, ONE, PIECES, SCHEMAS, TOOLS, TWO, WRITTEN

from jaxrl_llm.agents.tool_call_formats import FORMATS
from jaxrl_llm.agents.tools import special_tokens
from jaxrl_llm.serving.tool_call_stream import ExpectedCalls, ToolCallStream

SPECIAL = special_tokens(TOKENIZER)


def split_reply(name, pieces, special=SPECIAL, **fields):
    """(text, reasoning, [(number, name, arguments)]) of a reply that comes in pieces."""
    stream = ToolCallStream(ExpectedCalls(name, SCHEMAS, **fields), special)
    text, reasoning, calls = "", "", []
    for i, piece in enumerate(pieces):
        delta = stream.extend(piece, i == len(pieces) - 1)
        text, reasoning = text + delta.text, reasoning + delta.reasoning
        calls += [(call.number, call.name, json.loads(call.arguments)) for call in delta.calls]
    return text, reasoning, calls


def read(name, pieces, special=SPECIAL, **fields):
    """(text, [(number, name, arguments)]) of a reply that comes in pieces."""
    text, _, calls = split_reply(name, pieces, special, **fields)
    return text, calls


def without_thinking(name, text, open_thinking):
    """The text of a turn behind the thinking that it begins with."""
    thinks = text.lstrip().startswith("<think>")
    if name == "harmony" or not (open_thinking or thinks):
        return text
    return text.partition("</think>")[2].lstrip()


@pytest.mark.parametrize("name", FORMATS)
def test_a_reply_is_the_same_in_any_pieces(name):
    want = [[(0, *ONE[:2])], [(0, *ONE[:2]), (1, *TWO[:2])]]
    for written, made in zip(WRITTEN[name], want, strict=True):
        said = FORMATS[name].parse(written, SCHEMAS).text
        for size in (1, 2, 3, 7, len(written)):
            # Special tokens come whole.
            pieces = re.findall(
                rf"<\|.*?\|>|.{{1,{size}}}?(?=<\||$)|.{{{size}}}", written, re.DOTALL
            )
            assert "".join(pieces) == written
            assert read(name, pieces) == (said, made)
        assert read(name, [written], only_one=True) == (said, made[:1])


def test_text_and_calls_are_told_as_soon_as_they_are_certain():
    stream = ToolCallStream(ExpectedCalls("hermes", SCHEMAS), None)
    assert stream.extend("I add <t", False) == ("I add", "", ())
    assert stream.extend("wo numbers ", False) == (" <two numbers", "", ())
    assert stream.extend(CALL[:-1], False) == ("", "", ())
    (text, _, (call,)) = stream.extend(CALL[-1], False)
    assert text == "" and (call.name, call.number) == ("add", 0)
    assert json.loads(call.arguments) == {"a": 1, "note": "é"}
    # What is no call is told as it was written; the one before it was told.
    broken = "<tool_call>{}</tool_call>"
    assert read("hermes", [f"Well. {broken} So."]) == (f"Well. {broken} So.", [])
    for pieces in ([CALL, broken], [CALL + broken], list(CALL + broken)):
        assert read("hermes", pieces) == (broken, [(0, "add", {"a": 1, "note": "é"})])
    # A limit may cut a call.
    cut = WRITTEN["qwen3_coder"][0].removesuffix("</tool_call>")
    stream = ToolCallStream(ExpectedCalls("qwen3_coder", SCHEMAS), None)
    assert stream.extend(cut, True, stopped=False) == (cut.strip(), "", ())


def test_a_reply_that_begins_within_thinking_makes_calls_behind_it():
    thought = f"I may {CALL} or not.</think>\n"
    for size in (1, 5, 1000):
        text = thought + CALL
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        told, reasoning, made = split_reply("hermes", pieces, open_thinking="<think>")
        assert (told, reasoning) == ("", f"I may {CALL} or not.") and len(made) == 1
        assert len(read("hermes", pieces)[1]) == 2  # outside thinking both are calls


@pytest.mark.parametrize(
    ("reply", "open_thinking", "text", "reasoning"),
    [
        ("<think>\none and one\n</think>\n\nIt is 2.", "", "It is 2.", "one and one"),
        ("one and one\n</think>\n\nIt is 2.", "<think>", "It is 2.", "one and one"),
        ("[THINK]a < b[/THINK]It is 2.", "", "It is 2.", "a < b"),
        ("<think>one and", "", "", "one and"),
        ("<think></think> It is 2.", "", "It is 2.", ""),
        (" It is <think>2</think>. ", "", " It is <think>2</think>. ", ""),
    ],
)
def test_a_model_without_tools_thinks_and_replies(reply, open_thinking, text, reasoning):
    for size in (1, 3, 100):
        pieces = [reply[i : i + size] for i in range(0, len(reply), size)]
        split = split_reply("", pieces, None, open_thinking=open_thinking)
        assert split == (text, reasoning, [])
        dropped = split_reply("", pieces, None, open_thinking=open_thinking, drops_thinking=True)
        assert dropped == (text, "", [])


def test_harmony_thinks_in_a_channel():
    reply = (
        "<|channel|>analysis<|message|>one and one<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is 2."
    )
    for size in (1, 3, 1000):
        pieces = [reply[i : i + size] for i in range(0, len(reply), size)]
        assert split_reply("harmony", pieces, None) == ("It is 2.", "one and one", [])


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.sampled_from(PIECES), max_size=14),
    st.integers(1, 9),
    st.sampled_from(["", "<think>"]),
)
def test_any_text_is_the_same_in_any_pieces(name, parts, size, open_thinking):
    """What is told of a stream does not depend on its pieces, and is what a whole turn says."""
    text = "".join(parts)
    pieces = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    told, thoughts, made = split_reply(name, pieces, special=None, open_thinking=open_thinking)
    whole = split_reply(name, [text], special=None, open_thinking=open_thinking)
    assert (told, thoughts) == whole[:2]
    assert [call[1:] for call in made] == [call[1:] for call in whole[2]]
    parsed = FORMATS[name].parse(text, SCHEMAS, open_thinking)
    if not any(call.problem for call in parsed.calls):
        assert (told, [call[1:] for call in made]) == (
            without_thinking(name, parsed.text, open_thinking),
            [(call.name, call.arguments) for call in parsed.calls],
        )


@pytest.mark.parametrize("name", FORMATS)
def test_streaming_takes_linear_time(name):
    """Four times the text, in pieces of a token each, takes about four times the time."""
    for unit in ADVERSARIAL:
        seconds = []
        for size in (2_000, 8_000):
            text = (unit * (size // len(unit) + 1))[:size]
            best = float("inf")
            for _ in range(2):
                stream = ToolCallStream(ExpectedCalls(name, SCHEMAS), None)
                begun = time.process_time()
                for i in range(0, size, 4):
                    stream.extend(text[i : i + 4], i + 4 >= size)
                best = min(best, time.process_time() - begun)
            seconds.append(best)
        assert seconds[1] < 12 * seconds[0] + 0.02, (unit, seconds)


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
def test_malformed_calls_are_reported(fields, said):
    async def scenario():
        async with talking() as (client, _):
            with pytest.raises(openai.BadRequestError, match=said):
                await client.chat.completions.create(**{"model": "m", "messages": [ASK], **fields})

    asyncio.run(scenario())


def test_a_model_without_calls_refuses_tools():
    async def scenario():
        served = dataclasses.replace(SERVED, call_format="")
        async with talking(served=served) as (client, _):
            with pytest.raises(openai.BadRequestError, match="no known tool-call format"):
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
