"""Messages in every layout that is known, and what is refused."""

import json

import pytest

from jaxrl_llm.data.chat.formats import preference_dialogues, sft_dialogue
from jaxrl_llm.data.chat.messages import checked_messages, is_trained, messages_in_text
from jaxrl_llm.data.errors import DataError

ASK, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}


def call(arguments):
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


def test_a_text_that_holds_messages_is_those_messages():
    for text in (json.dumps([ASK, ANSWER]), f" {json.dumps([ASK, ANSWER], indent=1)}\n"):
        assert checked_messages(text, "row 1: prompt") == [ASK, ANSWER]
    shared = json.dumps([{"from": "human", "value": "Hi"}])
    assert checked_messages(shared, "row 1: prompt") == [ASK]
    for text in ('[{"value": 1}]', "[1]", '[{"a": "role"}]', "[{", "[{}]", "x [{'role': 1}]"):
        assert messages_in_text(text, "") is None
        assert checked_messages(text, "row 1: prompt") == [{"role": "user", "content": text}]
    for text in (str([ASK]), '[{"role": "user", "content": "a" "b"}]'):
        with pytest.raises(
            DataError, match=r"^row 1: prompt looks like a list of messages, but is not"
        ):
            checked_messages(text, "row 1: prompt")


def test_a_long_text_is_looked_at_once():
    text = "[{" + '"role": ' * 100_000 + "}"
    assert messages_in_text(text, "") is None  # minutes, if every beginning were tried


def test_sharegpt_is_a_layout():
    value = json.dumps({"name": "add", "arguments": {"a": None}})
    rows = [("system", "Be brief."), ("human", "Hi"), ("function_call", value)]
    rows += [("observation", "3"), ("gpt", "Yes?")]
    conversations = [{"from": name, "value": text, "weight": None} for name, text in rows]
    wanted = [
        {"role": "system", "content": "Be brief."},
        ASK,
        {"role": "assistant", "tool_calls": [call({"a": None})]},
        {"role": "tool", "content": "3"},
        ANSWER,
    ]
    assert sft_dialogue({"conversations": conversations}, "row 1").messages == wanted
    row = {"conversations": conversations[1:], "system": "Be brief."}
    assert sft_dialogue(row, "row 1").messages == wanted
    conversations[1]["from"] = "narrator"
    with pytest.raises(DataError, match=r"row 1: conversations: message 2: `from` is 'narrator';"):
        sft_dialogue({"conversations": conversations}, "row 1")


def test_aliases_of_roles_are_mapped():
    roles = {"human": "user", "bot": "assistant"}
    human, bot = {"role": "human", "content": "Hi"}, {"role": "bot", "content": "Yes?"}
    assert checked_messages([human, bot], "row", roles=roles) == [ASK, ANSWER]
    both = preference_dialogues(
        {"chosen": [human, bot], "rejected": [ASK, human]}, "row", roles=roles
    )
    assert both[0].messages == [ASK, ANSWER] and both[1].messages == [ASK, ASK]


def test_nulls_of_keys_are_left_out_and_those_of_values_stay():
    message = {"role": "assistant", "content": None, "refusal": None, "function_call": None}
    made = {**call({"a": None, "b": [None]}), "id": None}
    (found,) = checked_messages([{**message, "tool_calls": [made]}], "row")
    assert found == {"role": "assistant", "tool_calls": [call({"a": None, "b": [None]})]}
    assert checked_messages([{**ASK, "tool_calls": []}], "row") == [ASK]
    written = {**ANSWER, "tool_calls": json.dumps([call("{}")])}
    assert checked_messages([written], "row")[0]["tool_calls"] == [call("{}")]


@pytest.mark.parametrize("given", [{"weight": 0}, {"train": False}, {"weight": 0.0, "train": True}])
def test_messages_excluded_from_training_have_no_loss(given):
    (untrained, trained, asked) = checked_messages(
        [{**ANSWER, **given}, {**ANSWER, "weight": 1, "train": True}, {**ASK, **given}], "row"
    )
    assert untrained == {**ANSWER, "train": False} and not is_trained(untrained)
    assert trained == ANSWER and is_trained(trained) and asked == ASK


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": 0.5}, "message 1: weight must be 0 or 1"),
        ({"weight": True}, "message 1: weight must be 0 or 1"),
        ({"train": "no"}, "message 1: train must be true or false, got 'no'"),
        (
            {"tool_calls": [call("{a")]},
            r"arguments of call 1 \(add\) must be an object, or the JSON",
        ),
        ({"tool_calls": [call("[1]")]}, "a JSON object is needed, got list"),
        ({"tool_calls": [call(3)]}, "a JSON object is needed, got int"),
        ({"tool_calls": [call('{"a": "\\ud83d"}')]}, "lone surrogate"),
        ({"tool_calls": [call({"a": ["\ud83d"]})]}, "lone surrogate"),
        ({"tool_calls": [call('{"a": ' + "[" * 900 + "]" * 900 + "}")]}, "nested deeper than 64"),
        ({"tool_calls": [call('{"a": ' + "[" * 99999 + "]" * 99999 + "}")]}, "nested deeper"),
        (
            {"tool_calls": [{"function": {"arguments": {}}}]},
            "call 1 needs the name of its function",
        ),
        ({"function_call": {"name": "f", "arguments": "{"}}, "the arguments of call 1"),
        ({"tool_calls": ["add"]}, "call 1 is str"),
        ({"tool_calls": {"name": "add"}}, "tool_calls must be a list of .* got dict"),
        ({"tool_calls": "add()"}, "tool_calls must be a list of .* or the JSON of one"),
        ({"content": ["Hi"]}, "a part of the content has type None"),
        ({"content": [{"type": "input_text", "text": "Hi"}]}, "has type 'input_text'; only"),
        ({"content": [{"type": "text"}]}, "a part of type 'text' needs a text"),
    ],
)
def test_malformed_messages_are_refused(change, message):
    with pytest.raises(DataError, match=rf"^f\.jsonl, row 2: prompt.*{message}") as error:
        checked_messages([{**ANSWER, **change}], "f.jsonl, row 2: prompt")
    assert len(str(error.value)) < 400
