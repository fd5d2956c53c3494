"""Anthropic's Messages API, by Anthropic's own client."""

import asyncio
import contextlib
import typing

import anthropic
import httpx2
import pytest
import serving_model
from anthropic.types import message_count_tokens_params, message_create_params, tool_param
from serving_chat import ASK, CALL, SERVED, TEMPLATE, talking, text_of
from written_calls import TOOLS

from jaxrl_llm.serving import fields
from jaxrl_llm.serving.protocol import ServedModel

THINKS = serving_model.byte_tokenizer(
    TEMPLATE.replace(
        "{{ m.content }}",
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}",
    )
)
THINKING = ServedModel("m", THINKS, SERVED.eos_tokens, len(THINKS), 2000, call_format="hermes")
API_TOOLS = [
    {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
    for f in (tool["function"] for tool in TOOLS)
]


@contextlib.asynccontextmanager
async def anthropic_client(*says, served=SERVED):
    """Gives an `anthropic` client of a server whose model says these things, and the engine."""
    async with talking(*says, served=served) as (client, engine):
        # The transport of the other client, whose application it is.
        transport = client._client._transport
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
            yield (
                anthropic.AsyncAnthropic(
                    base_url="http://test", api_key="none", http_client=http, max_retries=0
                ),
                engine,
            )


def test_a_message_and_its_stream():
    async def scenario():
        async with anthropic_client(*["It is 2. So."] * 4) as (client, engine):
            request = {"model": "m", "max_tokens": 100, "messages": [ASK], "system": "Add."}
            message = await client.messages.create(**request)
            assert [block.text for block in message.content] == ["It is 2. So."]
            assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
            assert message.usage.input_tokens == len(engine.asked[-1].tokens)
            assert text_of(engine.asked[-1]).startswith("system: Add.<eos>\nuser: What is 1 + 1?")
            count = await client.messages.count_tokens(
                model="m", messages=[ASK], system=[{"type": "text", "text": "Add."}]
            )
            assert count.input_tokens == message.usage.input_tokens
            async with client.messages.stream(**request) as stream:
                texts = [text async for text in stream.text_stream]
                streamed = await stream.get_final_message()
            assert "".join(texts) == "It is 2. So."
            assert streamed.content[0].text == "It is 2. So."
            assert streamed.usage.output_tokens == message.usage.output_tokens
            stopped = await client.messages.create(**request, stop_sequences=["x", " So"])
            assert stopped.content[0].text == "It is 2."
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " So")
            cut = await client.messages.create(**{**request, "max_tokens": 3})
            assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)

    asyncio.run(scenario())


def test_thinking_and_tools_go_round():
    said = f"<think>\nI add.\n</think>\n\nWell. {CALL}{CALL}"

    async def scenario():
        async with anthropic_client(said, said, "It is 2.", "It is 2.", served=THINKING) as (
            client,
            engine,
        ):
            request = {"model": "m", "max_tokens": 1000, "tools": API_TOOLS}
            message = await client.messages.create(**request, messages=[ASK])
            async with client.messages.stream(**request, messages=[ASK]) as stream:
                streamed = await stream.get_final_message()
            for each in (message, streamed):
                thinking, text, *calls = each.content
                assert (thinking.thinking, text.text) == ("I add.", "Well.")
                assert [call.input for call in calls] == [{"a": 1, "note": "é"}] * 2
                assert len({call.id for call in calls}) == 2 and each.stop_reason == "tool_use"
            results = [
                {"type": "tool_result", "tool_use_id": calls[0].id, "content": "2"},
                {"type": "tool_result", "tool_use_id": calls[1].id, "is_error": True,
                 "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "ne"}]},
                {"type": "text", "text": "And now?"},
            ]  # fmt: skip
            turns = [
                ASK,
                {"role": "assistant", "content": streamed.model_dump()["content"]},
                {"role": "user", "content": results},
            ]
            await client.messages.create(**request, messages=turns)
            text = text_of(engine.asked[-1])
            assert "assistant: <think>I add.</think>Well.<tool_call>" in text
            assert "tool add: 2<eos>\ntool add: none<eos>\nuser: And now?<eos>\nassistant: " in text
            hidden = {"type": "adaptive", "display": "omitted"}
            message = await client.messages.create(**request, messages=[ASK], thinking=hidden)
            assert [block.type for block in message.content] == ["text"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"model": "x"}, anthropic.NotFoundError, "model 'x' is not served here"),
        ({"max_tokens": 5000}, anthropic.BadRequestError, "maximum context length is 2000"),
        ({"messages": []}, anthropic.BadRequestError, "messages: List should have at least 1"),
        (
            {"messages": [ASK, {"role": "assistant", "content": "It"}]},
            anthropic.BadRequestError,
            "the last message is the assistant's",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
            anthropic.BadRequestError,
            "a block 'thinking' is not of role 'user'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source":
             {"type": "base64", "media_type": "image/png", "data": "aa"}}]}]},
            anthropic.BadRequestError,
            "this model is text-only",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result",
             "tool_use_id": "t", "content": "2"}]}]},
            anthropic.BadRequestError,
            "'t' answers no call before it",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            anthropic.BadRequestError,
            "tools.0.type: Input should be 'custom'",
        ),
        ({"tool_choice": {"type": "tool"}}, anthropic.BadRequestError, "tool_choice: name belongs"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "needs tools"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
         anthropic.BadRequestError, "Invalid type: x"),
        ({"extra_body": {"mcp_servers": [{}]}}, anthropic.BadRequestError, "mcp_servers="),
        ({"extra_body": {"colour": 1}}, anthropic.BadRequestError, "colour: no such field"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_in_the_clients_own_errors(wrong, error, said):
    async def scenario():
        async with anthropic_client("It is 2.") as (client, engine):
            request = {"model": "m", "max_tokens": 100, "messages": [ASK]}
            with pytest.raises(error, match=said) as refused:
                await client.messages.create(**{**request, **wrong})
            body = refused.value.body
            assert body["type"] == "error" and set(body["error"]) == {"type", "message"}
            assert not engine.asked
            assert (await client.messages.create(**request)).stop_reason == "end_turn"

    asyncio.run(scenario())


def test_no_field_of_the_sdk_is_unknown():
    for place, *kinds in (
        (
            "/v1/messages",
            message_create_params.MessageCreateParamsStreaming,
            message_count_tokens_params.MessageCountTokensParams,
        ),
        ("/v1/messages tools", tool_param.ToolParam),
    ):
        sent = {name for kind in kinds for name in typing.get_type_hints(kind)}
        assert len(sent) > 5 and sent <= set(fields.PLACES[place])
