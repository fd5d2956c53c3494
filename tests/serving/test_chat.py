"""The body of a chat completion: what is valid, and the prompt that the model gets for it."""

import dataclasses
import json

import pydantic
import pytest
from serving_chat import ASK, SERVED, TOKENIZER
from serving_model import byte_tokenizer as serving_tokenizer

from jaxrl_llm.serving.chat import RESERVED_VARIABLES, ChatBody, ChatMessage
from jaxrl_llm.serving.protocol import ApiError

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SUB = {"type": "function", "function": {"name": "sub", "description": "a - b"}}


def call(name="add", arguments='{"a": 1}', number="call_7"):
    return {"id": number, "function": {"name": name, "arguments": arguments}}


def body(*messages, **fields):
    return ChatBody.model_validate({"model": "m", "messages": list(messages) or [ASK], **fields})


def prompt(*messages, **fields):
    """The text that the model reads."""
    request = body(*messages, **fields).generation_request(SERVED)
    return TOKENIZER.decode(request.requests[0].tokens)


def refused(*messages, served=SERVED, **fields):
    with pytest.raises(ApiError) as error:
        body(*messages, **fields).generation_request(served)
    return str(error.value)


@pytest.mark.parametrize(
    "message, problem",
    [
        ({"role": "user", "content": "", "tool_calls": [call()]}, "are the assistant's, not of"),
        ({"role": "tool", "content": "2"}, "tool_call_id belongs to messages of role 'tool'"),
        ({"role": "user", "content": "2", "tool_call_id": "a"}, "tool_call_id belongs to"),
        ({"role": "assistant"}, "content is missing; only a message with tool_calls has none"),
        (
            {"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "c"},
            "reasoning and reasoning_content differ",
        ),
        (
            {"role": "system", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
            "images are of role 'user' or 'tool', not 'system'",
        ),
        (
            {"role": "assistant", "tool_calls": [call(arguments="{")]},
            "is no JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [call(arguments="[1]")]},
            "must be a JSON object in a string",
        ),
        (
            {"role": "assistant", "tool_calls": [call(arguments='{"a": "\\ud800"}')]},
            "surrogate",
        ),
    ],
)
def test_a_message_that_contradicts_its_role_is_refused(message, problem):
    with pytest.raises(pydantic.ValidationError, match=problem):
        ChatMessage.model_validate(message)


@pytest.mark.parametrize(
    "fields, problem",
    [
        ({"top_logprobs": 2}, "top_logprobs needs logprobs=true"),
        ({"tools": [ADD, ADD]}, "two tools are called 'add'; rename one of them"),
        ({"tool_choice": "required"}, "tool_choice='required' needs tools"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice: no tool 'sub' among tools",
        ),
        ({"chat_template_kwargs": {"messages": 1}}, "'messages' is set by this server"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "reasoning_effort is 'low', but 'high' in chat_template_kwargs; send one of them",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields, problem):
    with pytest.raises(pydantic.ValidationError, match=problem):
        body(**fields)


def test_variables_that_the_template_call_sets_are_reserved():
    assert {"messages", "tools", "add_generation_prompt", "eos_token"} <= RESERVED_VARIABLES
    assert "documents" not in RESERVED_VARIABLES  # a template's own


def test_text_parts_are_one_text_and_a_developer_is_the_system():
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 1?"}]
    system = {"role": "developer", "content": "Add."}
    assert prompt(system, {"role": "user", "content": parts}) == prompt(
        {**system, "role": "system"}, ASK
    )
    named = prompt({**ASK, "name": "ann"})
    assert named == "user ann: What is 1 + 1?<eos>\nassistant: "


def test_calls_get_the_ids_of_training_and_results_the_name_of_their_tool():
    """The client's id is another one; arguments come as an object, or as its JSON text."""
    result = {"role": "tool", "tool_call_id": "call_7", "content": "2"}
    turns = [
        [ASK, {"role": "assistant", "tool_calls": [call(arguments=text)]}, result]
        for text in ('{"a": 1}', {"a": 1})
    ]
    first, second = (prompt(*turn) for turn in turns)
    assert first == second
    assert '{"name": "add", "arguments": {"a": 1}}' in first and "call_7" not in first
    assert "tool add: 2<eos>" in first
    assert "'other' answers no call before it" in refused(ASK, {**result, "tool_call_id": "other"})


def test_tools_are_shown_unless_none_may_be_called():
    shown = prompt(tools=[ADD, SUB])
    first, second = (json.loads(line[6:]) for line in shown.splitlines()[:2])
    assert first["function"] == {"name": "add", "description": "", "parameters": {"type": "object"}}
    assert second["function"]["parameters"] == {"type": "object", "properties": {}}
    assert prompt(tools=[ADD], tool_choice="none") == prompt()
    silent = dataclasses.replace(SERVED, call_format="")
    said = refused(tools=[ADD], served=silent)
    assert said.startswith("tools: the chat template of this model has no known tool-call format")


@pytest.mark.parametrize(
    "choice, start",
    [
        ({"type": "function", "function": {"name": "add"}}, '{"name": "add", "arguments":'),
        ("required", '{"name": "'),
    ],
)
def test_a_call_is_begun_where_one_is_required(choice, start):
    """As far as all calls that may be made agree; the model writes the rest."""
    shown = prompt(tools=[ADD, SUB], tool_choice=choice)
    assert shown.rpartition("<tool_call>\n")[2].strip() == start.strip()
    assert shown.startswith(prompt(tools=[ADD, SUB]))


def test_a_template_that_begins_no_call_allows_no_required_one():
    tokenizer = serving_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    plain = dataclasses.replace(SERVED, tokenizer=tokenizer)
    said = refused(tools=[ADD], tool_choice="required", served=plain)
    assert said.startswith("tool_choice: the chat template of this model lets no call be begun")


def test_images_are_refused_by_a_model_of_text():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    said = refused({"role": "user", "content": [image]})
    assert said == "messages.0.content, image 1: this model is text-only; leave images out"


def test_limits_and_log_probs_of_the_request():
    request = body(max_tokens=5, max_completion_tokens=3).generation_request(SERVED)
    assert {params.max_tokens for params in request.sampling_params} == {3}
    request = body(logprobs=True, top_logprobs=2).generation_request(SERVED)
    assert request.with_log_probs and request.sampling_params[0].num_top_log_probs == 2
