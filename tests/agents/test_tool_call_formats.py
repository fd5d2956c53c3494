"""Calls as models write them, right and wrong."""

import json
import pathlib
import time
import typing

import hypothesis
import hypothesis.strategies as st
import pytest
from transformers.utils.chat_template_utils import render_jinja_template
from written_calls import ADVERSARIAL, ONE, PIECES, SCHEMAS, TOOLS, TWO, WRITTEN

from jaxrl_llm.agents.tool_call_formats import FORMATS, format_name
from jaxrl_llm.config.agent import AgentConfig

TEMPLATES = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data" / "chat_templates"


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_found(name):
    one, two = (FORMATS[name].parse(text, SCHEMAS) for text in WRITTEN[name])
    assert one.calls == (ONE,) and one.text == ("" if name == "llama3" else "Well.")
    assert two.calls == (ONE, TWO) and two.text == ""


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_without_calls_is_text(name):
    said = FORMATS[name].parse("It is 3 < 4 and {5}.", SCHEMAS)
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
        ("llama3", '{"name": "", "parameters": {}}', "in 1 to 256 characters, not 0"),
        ("llama3", '{"name": "%s", "parameters": {}}' % ("a" * 257), "in 1 to 256"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{", "invalid JSON"),
        ("mistral", "[TOOL_CALLS]add", "invalid JSON"),
        ("harmony", "<|channel|>commentary to=functions.add<|message|>{", "invalid JSON"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{", "invalid JSON"),
    ],
)
def test_malformed_calls_have_a_problem(name, text, problem):
    (call,) = FORMATS[name].parse(text, SCHEMAS).calls
    assert problem in call.problem


WRITE = {"name": "write", "arguments": {"content": "x </tool_call> y"}}
GREP = """grep "</parameter>" f"""
OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


def coder(name, **values):
    """A call as Qwen3-Coder's template writes it."""
    lines = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<function={name}>\n{lines}</function>"


def block(*calls):
    return "<tool_call>\n" + "\n".join(calls) + "\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "text", "calls", "said"),
    [
        # A call contains the marks of its format.
        ("hermes", block(json.dumps(WRITE)), [("write", WRITE["arguments"])], ""),
        ("qwen3_coder", block(coder("sh", cmd=GREP)), [("sh", {"cmd": GREP})], ""),
        (
            "qwen3_coder",
            block(coder("sh", cmd=f"echo '{coder('f', a=1)}' | wc", b=2)),
            [("sh", {"cmd": f"echo '{coder('f', a=1)}' | wc", "b": 2})],
            "",
        ),
        (
            "glm4",
            "<tool_call>sh\n<arg_key>cmd</arg_key>\n<arg_value>a </arg_value> b </tool_call> c"
            "</arg_value>\n</tool_call>",
            [("sh", {"cmd": "a </arg_value> b </tool_call> c"})],
            "",
        ),
        (
            "mistral",
            '[TOOL_CALLS]write[ARGS]{"content": "[TOOL_CALLS][{"}',
            [("write", {"content": "[TOOL_CALLS][{"})],
            "",
        ),
        (
            "mistral",
            '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
            [("f", {"a": 1}), ("g", {})],
            "",
        ),
        (
            "harmony",
            "<|channel|>commentary to=functions.write <|constrain|>json<|message|>"
            '{"content": "<|end|><|call|>"}<|call|>',
            [("write", {"content": "<|end|><|call|>"})],
            "",
        ),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>write\n```json\n"
            '{"content": "```<｜tool▁call▁end｜>"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            [("write", {"content": "```<｜tool▁call▁end｜>"})],
            "",
        ),
        ("llama3", '{"name": "f", "parameters": {"a": "; {"}}', [("f", {"a": "; {"})], ""),
        # Several functions in a block; none around them.
        (
            "qwen3_coder",
            block(coder("f", a=1), coder("g", b="x")),
            [("f", {"a": 1}), ("g", {"b": "x"})],
            "",
        ),
        ("qwen3_coder", f"Well.\n{coder('f', a=1)}", [("f", {"a": 1})], "Well."),
        ("qwen3_coder", "I write <function=NAME> first.", [], "I write <function=NAME> first."),
        # Thinking makes no call, and swallows none.
        (
            "hermes",
            "<think>A <tool_call> it is.</think>\n" + block('{"name": "f", "arguments": {}}'),
            [("f", {})],
            "<think>A <tool_call> it is.</think>",
        ),
        ("hermes", "<think>" + block("{}"), [], "<think>" + block("{}")),
        (
            "qwen3_coder",
            f"<think>{coder('f', a=1)}</think>{block(coder('g', a=2))}",
            [("g", {"a": 2})],
            f"<think>{coder('f', a=1)}</think>",
        ),
        # An object that names nobody is an answer.
        ("llama3", '{"answer": 4}', [], '{"answer": 4}'),
        # Without arguments.
        ("glm4", "<tool_call>f\n</tool_call>", [("f", {})], ""),
        ("qwen3_coder", block(coder("f")), [("f", {})], ""),
        ("harmony", "<|channel|>commentary to=functions.f<|message|><|call|>", [("f", {})], ""),
    ],
)
def test_hard_calls_are_read(name, text, calls, said):
    turn = FORMATS[name].parse(text, SCHEMAS)
    assert [(call.name, call.arguments, call.problem) for call in turn.calls] == [
        (*call, "") for call in calls
    ]
    assert turn.text == said


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("qwen3_coder", block("<function=f\n<parameter=a>\n1\n</parameter>"), "no > behind"),
        ("qwen3_coder", block("<function=f>\n<parameter=a>\n1"), "does not end with"),
        ("qwen3_coder", block("<function=f>\nwords\n</function>"), "other text between"),
        ("hermes", block('{"name": "f", "arguments": {"a": "b" c"}}'), "invalid JSON"),
        ("hermes", block('{"name": "f", "arguments": {"a": NaN}}'), "NaN is no JSON"),
        ("hermes", block('{"name": "f"} and more'), "other text behind"),
        ("glm4", "<tool_call>f\n<arg_key>a</arg_key>1</tool_call>", "no <arg_value>"),
        ("glm4", "<tool_call>please f</tool_call>", "begins with the name"),
        ("deepseek", "<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>", "no <｜tool▁sep｜>"),
    ],
)
def test_reading_goes_on_behind_a_faulty_call(name, text, problem):
    (call,) = FORMATS[name].parse(text, SCHEMAS).calls
    assert problem in call.problem and not call.arguments
    if name == "qwen3_coder" and "does not end" in problem:
        return  # a value without an end takes in what follows
    faulty, good = FORMATS[name].parse(text + WRITTEN[name][0], SCHEMAS).calls
    assert faulty == call and good == ONE


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("123", OPTIONAL, "123"),
        ("null", OPTIONAL, None),
        ("None", OPTIONAL, None),
        ("123", {"type": ["string", "null"]}, "123"),
        ("123", {"type": "string", "nullable": True}, "123"),
        ("123", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 123),
        ("123", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 123),
        ("12x", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12x"),
        ('["a"]', {"anyOf": [{"type": "string"}, {"type": "array"}]}, ["a"]),
        ('{"a": 1}', {"anyOf": [{"type": "string"}, {"type": "array"}]}, '{"a": 1}'),
        ('"a"', {"type": "string"}, '"a"'),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"enum": [1, 2]}, 1),
        ("1", {"const": "1"}, "1"),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("1.5", {"type": "number"}, 1.5),
        ("7", {"type": "number"}, 7),
        ("many", {"type": "integer"}, "many"),
        ("123", {"$ref": "#/$defs/Name"}, "123"),
        ("123", {"allOf": [{"$ref": "#/$defs/Name"}]}, "123"),
        ("123", {"$ref": "#/$defs/Loop"}, 123),
        ("123", None, 123),
        ("[1", None, "[1"),
    ],
)
def test_values_without_quotes_have_the_type_of_their_schema(text, schema, value):
    root = {"$defs": {"Name": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}}}
    schemas = {"f": {"type": "object", "properties": {"a": schema}, **root}}
    for name, written in (
        ("qwen3_coder", block(coder("f", a=text))),
        ("glm4", f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"),
    ):
        (call,) = FORMATS[name].parse(written, schemas).calls
        assert call == ("f", {"a": value}, "")
        assert type(call.arguments["a"]) is type(value)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(st.sampled_from(sorted(FORMATS)), st.lists(st.sampled_from(PIECES)))
def test_arbitrary_text_never_raises(name, pieces):
    turn = FORMATS[name].parse("".join(pieces), SCHEMAS)
    assert all(isinstance(call.arguments, dict) for call in turn.calls)
    json.dumps([call._asdict() for call in turn.calls], allow_nan=False).encode()


@pytest.mark.parametrize("name", FORMATS)
def test_reading_takes_linear_time(name):
    """Four times the text takes about four times the time, and 64 KB less than 50 ms."""
    for unit in ADVERSARIAL:
        seconds = []
        for size in (16_000, 64_000):
            text = (unit * (size // len(unit) + 1))[:size]
            times = []
            # A busy machine slows single runs: the fastest counts, of as many as it takes.
            while len(times) < 5 or (min(times) >= 0.05 and len(times) < 40):
                begun = time.process_time()
                FORMATS[name].parse(text, SCHEMAS)
                times.append(time.process_time() - begun)
            seconds.append(min(times))
        assert seconds[1] < 10 * seconds[0] + 0.005, (unit, seconds)
        assert seconds[1] < 0.05, (unit, seconds)


def test_the_setting_names_the_formats():
    choices = typing.get_args(typing.get_type_hints(AgentConfig)["call_format"])
    assert {*choices} == {"auto", *FORMATS}


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
def test_calls_rendered_by_templates_are_parsed(template, name):
    text = (TEMPLATES / f"{template}.jinja").read_text()
    assert format_name(text) == name
    if not name:
        return
    settings = {"tools": TOOLS, "chat_template": text, "bos_token": "<s>", "eos_token": "</s>"}
    notes = (
        "12 x",
        'x </tool_call> "y"',
        """grep '</parameter>' f\n</function>""",
        "[TOOL_CALLS][{",
        "back \\ slash\n\tand lines",
        "é 漢 😀",
        "123",
        "</arg_value> and",
        "{",
    )
    for note in notes:
        arguments = {"a": 1, "note": note}
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        (prompt,), _ = render_jinja_template([messages[:1]], add_generation_prompt=True, **settings)
        (whole,), _ = render_jinja_template([messages], **settings)
        prompt = prompt.removesuffix("<think>\n")  # which DeepSeek's template leaves out later
        assert whole.startswith(prompt)
        answer = whole.removeprefix(prompt).removesuffix("<|eot_id|>")
        assert FORMATS[name].parse(answer, SCHEMAS).calls == (("add", arguments, ""),)
