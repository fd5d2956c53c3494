"""Clients that ask for structured replies, against a model that samples at random."""

import asyncio
import json

import agents
import jsonschema
import openai
import pydantic
import pytest
from serving_chat import ASK
from serving_structured import model_server
from written_calls import TOOLS

pytestmark = pytest.mark.slow


class Step(pydantic.BaseModel):
    number: int
    kind: str = pydantic.Field(pattern="^[a-c]{1,3}$")


class Plan(pydantic.BaseModel):
    """A nested schema with a reference."""

    title: str = pydantic.Field(max_length=8)
    steps: list[Step] = pydantic.Field(max_length=2)
    is_final: bool


def test_clients_get_what_their_schemas_say():
    async def ask():
        async with model_server() as (http, client):
            chat = client.chat.completions
            fields = {"model": "m", "messages": [ASK], "max_tokens": 600, "seed": 3}
            parsed = await chat.parse(**fields, response_format=Plan)
            assert isinstance(parsed.choices[0].message.parsed, Plan)
            tool = openai.pydantic_function_tool(Step)
            called = await chat.parse(
                **fields | {"max_tokens": 400},
                tools=[tool],
                tool_choice="required",
                parallel_tool_calls=False,
            )
            for call in called.choices[0].message.tool_calls:
                assert isinstance(call.function.parsed_arguments, Step)
            reply = await client.responses.parse(
                model="m", input="Plan.", max_output_tokens=600, text_format=Plan
            )
            assert isinstance(reply.output_parsed, Plan)
            async with chat.stream(**fields, response_format=Plan) as stream:
                async for event in stream:
                    assert event.type != "error"
                assert isinstance(
                    (await stream.get_final_completion()).choices[0].message.parsed, Plan
                )
            # Samples of one request, and a request without a constraint beside them.
            several, plain = await asyncio.gather(
                chat.create(**fields | {"max_tokens": 900}, n=4, response_format=json_schema(Plan)),
                chat.create(**fields | {"max_tokens": 40}),
            )
            for choice in several.choices:
                assert choice.finish_reason == "stop"
                jsonschema.validate(json.loads(choice.message.content), Plan.model_json_schema())
            alone = await chat.create(**fields | {"max_tokens": 40})
            assert plain.choices[0].message.content == alone.choices[0].message.content
            with pytest.raises(openai.BadRequestError, match="Invalid type: x"):
                await chat.create(
                    **fields,
                    response_format={
                        "type": "json_schema",
                        "json_schema": {"name": "x", "schema": {"type": "x"}},
                    },
                )
            model = agents.OpenAIChatCompletionsModel("m", client)
            agent = agents.Agent("planner", model=model, output_type=Plan)
            settings = agents.RunConfig(tracing_disabled=True)
            result = await agents.Runner.run(agent, "Plan.", run_config=settings)
            assert isinstance(result.final_output, Plan)
            # A regular expression that overflows the lexer after its first token ends alone.
            costly = await http.post(
                "/v1/chat/completions",
                json=fields | {"guided_regex": "(((a{100}){100}){100}){100}"},
                timeout=60,
            )
            assert costly.status_code == 400
            again = await chat.create(**fields, tools=TOOLS, tool_choice="none")
            assert again.choices[0].message.tool_calls is None

    asyncio.run(ask())


def json_schema(model):
    schema = {"name": model.__name__, "schema": model.model_json_schema()}
    return {"type": "json_schema", "json_schema": schema}
