"""OpenAI's Responses API, by OpenAI's own client and by its Agents SDK."""

import asyncio
import json
import typing

import agents
import openai
import pytest
import serving_model
from openai.types.responses import ResponseUsage, response_create_params, response_input_item_param
from serving_chat import ASK, CALL, SERVED, TEMPLATE, talking, text_of, tokens
from written_calls import TOOLS

from jaxrl_llm.serving.protocol import ServedModel
from jaxrl_llm.serving.responses_api import fields
from jaxrl_llm.serving.responses_api.store import ResponseStore, StoredResponse

THINKS = serving_model.byte_tokenizer(
    TEMPLATE.replace(
        "{{ m.content }}",
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}",
    )
    + "{% if reasoning_effort %}effort {{ reasoning_effort }} {% endif %}"
    "{% if verbosity %}{{ verbosity }} {% endif %}"
)
THINKING = ServedModel("m", THINKS, SERVED.eos_tokens, len(THINKS), 2000, call_format="hermes")
FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]
SAID = f"<think>\nI add.\n</think>\n\nWell. {CALL}{CALL}"


def kinds(events):
    return [event.type.removeprefix("response.") for event in events]


async def listed(stream):
    """The events of a stream that is about to be opened."""
    return [event async for event in await stream]


def without_ids(value):
    """The response without random ids and times."""
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if isinstance(value, dict):
        random = {"id", "call_id", "created_at", "completed_at", "item_id", "sequence_number"}
        return {k: without_ids(v) for k, v in value.items() if k not in random}
    return value


def test_a_response_and_its_stream():
    async def scenario():
        async with talking(*["It is 2. So."] * 6) as (client, engine):
            request = {"model": "m", "input": "What is 1 + 1?", "instructions": "Add."}
            response = await client.responses.create(**request, metadata={"run": "a"})
            assert text_of(engine.asked[-1]).startswith("system: Add.<eos>\nuser: What is 1 + 1?")
            assert response.output_text == "It is 2. So."
            assert (response.status, response.error) == ("completed", None)
            assert (response.metadata, response.instructions) == ({"run": "a"}, "Add.")
            count = await client.responses.input_tokens.count(**request)
            assert count.input_tokens == response.usage.input_tokens == len(engine.asked[-1].tokens)
            assert response.usage.output_tokens == len(tokens("It is 2. So."))
            events = await listed(client.responses.create(**request, stream=True))
            assert [event.sequence_number for event in events] == [*range(len(events))]
            order = kinds(events)
            begin = ["created", "in_progress", "output_item.added", "content_part.added"]
            end = ["output_text.done", "content_part.done", "output_item.done", "completed"]
            assert (order[:4], order[-4:]) == (begin, end)
            assert set(order[4:-4]) == {"output_text.delta"}
            assert "".join(e.delta for e in events[4:-4]) == events[-4].text == "It is 2. So."
            final = events[-1].response
            streamed, whole = (without_ids(each.model_dump()) for each in (final, response))
            assert streamed == whole | {"metadata": {}}
            assert {event.item_id for event in events[3:-2]} == {final.output[0].id}
            async with client.responses.stream(**request) as stream:
                deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
                assert "".join(deltas) == (await stream.get_final_response()).output_text
            cut = await client.responses.create(**request, max_output_tokens=3)
            assert cut.status == cut.output[0].status == "incomplete"
            assert cut.incomplete_details.reason == "max_output_tokens"
            events = await listed(
                client.responses.create(**request, max_output_tokens=3, stream=True)
            )
            assert kinds(events)[-1] == "incomplete"
            assert without_ids(events[-1].response.model_dump()) == without_ids(cut.model_dump())
            parsed = await client.responses.create(**request, extra_body={"stop": [" So"]})
            assert parsed.output_text == "It is 2."

    asyncio.run(scenario())


def test_thinking_and_tools_go_round():
    async def scenario():
        says = [SAID, SAID, *["It is 2."] * 4]
        async with talking(*says, served=THINKING) as (client, engine):
            request = {"model": "m", "tools": FUNCTIONS, "reasoning": {"effort": "high"}}
            request["text"] = {"verbosity": "low", "format": {"type": "text"}}
            whole = await client.responses.create(**request, input=[ASK])
            assert "effort high low " in text_of(engine.asked[-1])
            events = await listed(client.responses.create(**request, input=[ASK], stream=True))
            streamed = events[-1].response
            assert without_ids(streamed.model_dump()) == without_ids(whole.model_dump())
            reasoning, message, *calls = whole.output
            assert reasoning.content[0].text == "I add." and message.content[0].text == "Well."
            arguments = [json.loads(call.arguments) for call in calls]
            assert arguments == [{"a": 1, "note": "é"}] * 2
            assert len({call.call_id for call in calls}) == 2
            usage = whole.usage
            assert isinstance(usage, ResponseUsage)
            thinking = usage.output_tokens_details.reasoning_tokens
            assert THINKS.decode(tokens(SAID)[:thinking]).endswith("</think>")
            order = kinds(events)
            for kind, delta in (
                ("reasoning_text.done", "reasoning_text.delta"),
                ("function_call_arguments.done", "function_call_arguments.delta"),
            ):
                assert order.index(delta) < order.index(kind) < order.index("completed")
            assert order.index("reasoning_text.done") < order.index("output_text.delta")
            added = [e.item.type for e in events if e.type == "response.output_item.added"]
            assert added == ["reasoning", "message", "function_call", "function_call"]
            assert [e.output_index for e in events if e.type.endswith("item.added")] == [0, 1, 2, 3]
            # The output goes back as items, as the SDK dumps them, or by the id of the response.
            outputs = [
                {"type": "function_call_output", "call_id": calls[0].call_id, "output": "2"},
                {"type": "function_call_output", "call_id": calls[1].call_id,
                 "output": [{"type": "input_text", "text": "no"}]},
                {"role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
            ]  # fmt: skip
            await client.responses.create(**request, input=[ASK, *whole.output, *outputs])
            text = text_of(engine.asked[-1])
            assert "assistant: <think>I add.</think>Well.<tool_call>" in text
            assert "tool add: 2<eos>\ntool add: no<eos>\nuser: And now?<eos>\nassistant: " in text
            dumped = [item.model_dump() for item in whole.output]
            await client.responses.create(**request, input=[ASK, *dumped, *outputs])
            assert text_of(engine.asked[-1]) == text
            references = [{"type": "item_reference", "id": item.id} for item in whole.output]
            await client.responses.create(**request, input=[ASK, *references, *outputs])
            assert text_of(engine.asked[-1]) == text
            await client.responses.create(**request, input=outputs, previous_response_id=whole.id)
            assert text_of(engine.asked[-1]) == text

    asyncio.run(scenario())


def test_log_probs_and_token_ids():
    async def scenario():
        async with talking(SAID, SAID, "", served=THINKING) as (client, engine):
            request = {"model": "m", "input": "?", "include": ["message.output_text.logprobs"]}
            ids = {"return_token_ids": True}
            whole = await client.responses.create(**request, extra_body=ids, tools=FUNCTIONS)
            log_probs = whole.output[1].content[0].logprobs
            assert len(log_probs) == len(tokens(SAID))
            assert b"".join(bytes(each.bytes) for each in log_probs[:-1]).decode() == SAID
            assert whole.token_ids == tokens(SAID)
            assert whole.prompt_token_ids == list(engine.asked[-1].tokens)
            events = await listed(client.responses.create(**request, tools=FUNCTIONS, stream=True))
            deltas = [e for e in events if e.type == "response.output_text.delta"]
            streamed = [each.token for e in deltas for each in e.logprobs]
            assert streamed == [each.token for each in log_probs]
            assert "".join(e.delta for e in deltas) == "Well."
            # A reply without a word is an empty message.
            empty = await client.responses.create(model="m", input="?")
            assert [item.type for item in empty.output] == ["message"] and empty.output_text == ""

    asyncio.run(scenario())


def test_stored_responses():
    async def scenario():
        async with talking(*["It is 2."] * 6) as (client, engine):
            create, request = client.responses.create, {"model": "m"}
            first = await create(**request, input="One?", instructions="Add.")
            again = await client.responses.retrieve(first.id)
            assert again.model_dump() == first.model_dump()
            second = await create(**request, input="Two?", previous_response_id=first.id)
            assert second.previous_response_id == first.id
            # Instructions are of one response alone.
            text = "user: One?<eos>\nassistant: It is 2.<eos>\nuser: Two?<eos>\nassistant: "
            assert text_of(engine.asked[-1]) == text
            items = [i async for i in client.responses.input_items.list(second.id, order="asc")]
            assert [item.type for item in items] == ["message"] * 3
            assert items[1].id == first.output[0].id
            pages = await client.responses.input_items.list(second.id, limit=2)
            texts = [item.content[0].text for item in pages.data]
            assert pages.has_more and texts == ["Two?", "It is 2."]
            await client.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError, match="is not stored here"):
                await client.responses.retrieve(first.id)
            # Its turn is still part of the later dialogue.
            await create(**request, input="Three?", previous_response_id=second.id)
            assert text_of(engine.asked[-1]).startswith(text)
            with pytest.raises(openai.BadRequestError, match="limit: Input should"):
                await client.get(f"/responses/{second.id}/input_items?limit=x", cast_to=object)
            with pytest.raises(openai.BadRequestError, match="cancelled"):
                await client.responses.cancel(second.id)
            unstored = await create(**request, input="?", store=False)
            assert unstored.store is False
            with pytest.raises(openai.BadRequestError, match="not found") as refused:
                await create(**request, input="?", previous_response_id=unstored.id)
            assert refused.value.code == "previous_response_not_found"
            with pytest.raises(openai.BadRequestError, match="only a response in the background"):
                await client.responses.retrieve(second.id, stream=True)

    asyncio.run(scenario())


def test_the_store_is_bounded_by_all_that_its_entries_keep():
    def entry(number, previous=None, size=1000):
        return StoredResponse(
            f"resp_{number}",
            json.dumps({"output": [{"id": f"msg_{number}", "text": "x" * size}]}).encode(),
            b"[]",
            (f"msg_{number}",),
            previous,
        )

    store = ResponseStore(20_000)
    previous = None
    for number in range(100):
        previous = entry(number, previous)
        if not store.fits(previous):
            previous = entry(number)
        store.add(previous)
        assert store.num_bytes <= 20_000
        assert store.output_item(f"msg_{number}")["text"] == "x" * 1000
    assert 1 <= len(store) < 10 and len(store._owners) == len(store)
    store = ResponseStore(3 * entry(0).num_bytes)
    for number in range(3):
        store.add(entry(number))
    assert store.get("resp_0")  # used last: the next one takes the place of resp_1
    store.add(entry(3))
    assert [f"resp_{i}" in store for i in range(4)] == [True, False, True, True]
    assert store.output_item("msg_1") is None
    for number in (0, 2, 3):
        store.remove(f"resp_{number}")
    assert store.num_bytes == len(store) == len(store._owners) == 0
    assert not ResponseStore(0).fits(entry(0))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"input": []}, "input is empty"),
        ({"input": [{"type": "web_search_call"}]}, "input.0: an item of type 'web_search_call'"),
        ({"input": [{"role": "user", "content": 3}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "a"}]}]},
         "input.0.content.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "detail": "auto",
          "image_url": "data:image/png;base64,aa"}]}]}, "this model is text-only"),
        ({"input": [{"type": "function_call_output", "call_id": "t", "output": "2"}]},
         "input: tool_call_id 't' answers no call before it"),
        ({"input": [{"type": "function_call", "call_id": "t", "name": "f", "arguments": "{"}]},
         "input.0.arguments"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item 'msg_1' is not stored"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type: Input should be 'function'"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"background": True}, "background=True is not supported"),
        ({"conversation": "a"}, "conversation="),
        ({"truncation": "auto"}, "truncation='auto'"),
        ({"max_output_tokens": 5000}, "maximum context length is 2000"),
        ({"top_logprobs": 3}, "top_logprobs needs include"),
        ({"include": ["nothing"]}, "include.0"),
        ({"extra_body": {"colour": 1}}, "colour: no such field"),
        ({"extra_body": {"n": 2}}, "n: Input should be 1"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "is set by this server"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_its_name(wrong, said):
    async def scenario():
        async with talking("It is 2.") as (client, engine):
            request = {"model": "m", "input": "?"}
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(**{**request, **wrong})
            assert said in refused.value.body["message"], refused.value.body
            assert "messages" not in refused.value.body["message"].partition(":")[0]
            assert not engine.asked
            assert (await client.responses.create(**request)).output_text == "It is 2."

    asyncio.run(scenario())


def test_a_prompt_that_is_too_long_has_openais_code():
    async def scenario():
        async with talking("It is 2.") as (client, _):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="m", input="a" * 3000)
            assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")

    asyncio.run(scenario())


def test_agents_of_the_sdk_use_it_by_default():
    """Its default model: whole and streamed, tools, a handoff, and the server's own state."""

    @agents.function_tool
    def add(a: int, note: str) -> str:
        """Adds."""
        return f"sum {a + 1} {note}"

    def agent_of(client, **fields):
        model = agents.OpenAIResponsesModel("m", client)
        return agents.Agent("adder", model=model, **fields)

    async def scenario():
        says = [f"Well. {CALL}", "It is 2."] * 2 + ["Ja.", "Nein."]
        async with talking(*says) as (client, engine):
            agent = agent_of(client, instructions="Add.", tools=[add])
            result = await agents.Runner.run(agent, "What is 1 + 1?")
            assert result.final_output == "It is 2."
            text = text_of(engine.asked[-1])
            assert "tool add: sum 2 é<eos>" in text and text.count("assistant: ") == 2
            streamed = agents.Runner.run_streamed(agent, "What is 1 + 1?")
            events = [event.type async for event in streamed.stream_events()]
            assert streamed.final_output == "It is 2." and "run_item_stream_event" in events
            assert text_of(engine.asked[-1]) == text
            plain = agent_of(client)
            first = await agents.Runner.run(plain, "Gut?")
            second = await agents.Runner.run(
                plain, "Wirklich?", previous_response_id=first.last_response_id
            )
            assert second.final_output == "Nein."
            assert "assistant: Ja.<eos>\nuser: Wirklich?" in text_of(engine.asked[-1])

    agents.set_tracing_disabled(True)
    asyncio.run(scenario())


def test_no_field_of_the_sdk_is_unknown():
    kind = response_create_params.ResponseCreateParamsStreaming
    sent = set(typing.get_type_hints(kind))
    assert len(sent) > 25 and sent <= set(fields.RESPONSES)
    for name in ("Message", "FunctionCallOutput", "ItemReference"):
        hints = typing.get_type_hints(getattr(response_input_item_param, name))
        assert set(hints) <= set(fields.ITEM), name
