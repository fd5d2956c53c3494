"""Calls as models write them, right and wrong."""

import pathlib

import hypothesis
import hypothesis.strategies as st
import pytest
from transformers.utils.chat_template_utils import render_jinja_template
from written_calls import ONE, SCHEMAS, TOOLS, TWO, WRITTEN

from jaxrl_llm.agents.calls import FORMATS, format_of

TEMPLATES = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data" / "chat_templates"


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_found(name):
    one, two = (FORMATS[name](text, SCHEMAS) for text in WRITTEN[name])
    assert one.calls == (ONE,) and one.text == ("" if name == "llama3" else "Well.")
    assert two.calls == (ONE, TWO) and two.text == ""


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_without_calls_is_text(name):
    said = FORMATS[name]("It is 3 < 4 and {5}.", SCHEMAS)
    assert said.calls == ()
    # gpt-oss writes no text outside messages.
    assert said.text == ("" if name == "harmony" else "It is 3 < 4 and {5}.")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("hermes", '<tool_call>{"name": "add", "argu', "invalid JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", 'a call is {"name"'),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
            "an object, got [1]",
        ),
        ("hermes", "<tool_call>" + "[" * 100_000, "invalid JSON"),
        ("qwen3_coder", "<tool_call>add</tool_call>", "no <function=NAME>"),
        ("llama3", '{"name": "add", "parameters": {', "invalid JSON"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{", "invalid JSON"),
        ("mistral", "[TOOL_CALLS]add", "invalid JSON"),
        ("harmony", "<|channel|>commentary to=functions.add<|message|>{", "invalid JSON"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{", "invalid JSON"),
    ],
)
def test_what_is_no_call_has_a_problem(name, text, problem):
    (call,) = FORMATS[name](text, SCHEMAS).calls
    assert problem in call.problem


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(
        st.sampled_from(
            [
                *"{}[]\"';:<>/ \n",
                *WRITTEN["hermes"],
                "[TOOL_CALLS]",
                "[ARGS]",
                "<tool_call>",
                "<|message|>",
                "<｜tool▁call▁begin｜>",
                "NaN",
            ]
        )
    ),
)
def test_nothing_raises(name, pieces):
    said = FORMATS[name]("".join(pieces), SCHEMAS)
    assert all(isinstance(call.arguments, dict) for call in said.calls)


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="no chat templates beside the project")
@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("qwen2_5", "hermes"),
        ("qwen3", "hermes"),
        ("qwen3_instruct_2507_training", "hermes"),
        ("llama3_1", "llama3"),
        ("llama3_2", "llama3"),
        ("gptoss", "harmony"),
        ("deepseekv3_training", "deepseek"),
        ("glm4moe", "glm4"),
        ("gemma3", ""),
        ("llama3", ""),
    ],
)
def test_what_templates_write_is_read(template, name):
    text = (TEMPLATES / f"{template}.jinja").read_text()
    assert format_of(text) == name
    if not name:
        return
    call = {"type": "function", "function": {"name": ONE.name, "arguments": ONE.arguments}}
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    settings = {"tools": TOOLS, "chat_template": text, "bos_token": "<s>", "eos_token": "</s>"}
    (prompt,), _ = render_jinja_template([messages[:1]], add_generation_prompt=True, **settings)
    (whole,), _ = render_jinja_template([messages], **settings)
    prompt = prompt.removesuffix("<think>\n")  # which DeepSeek's template leaves out later
    assert whole.startswith(prompt)
    answer = whole.removeprefix(prompt).removesuffix("<|eot_id|>")
    assert FORMATS[name](answer, SCHEMAS).calls == (ONE,)
