"""Constraints of replies: which texts they accept, in which format calls are, what is refused."""

import asyncio
import dataclasses
import functools
import json

import numpy as np
import pytest
import serving_model
from serving_chat import ASK, SERVED, talking
from written_calls import TOOLS

from jaxrl_llm.agents.tool_call_formats import FORMATS
from jaxrl_llm.rollout.engine.grammars import GrammarError, fill_masks
from jaxrl_llm.serving.chat import ChatBody
from jaxrl_llm.serving.protocol import ApiError, CompletionBody, ServedModel

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y z"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
SUB = {
    "name": "sub",
    "parameters": {
        "type": "object",
        "properties": {
            "mode": {"enum": ["fast", "slow"]},
            "values": {"type": "array", "items": {"type": "number"}},
            "text": {"type": "string"},
        },
        "required": ["mode"],
        "additionalProperties": False,
    },
    "strict": True,
}
BOTH = [*STRICT, {"type": "function", "function": SUB}]
_LOOP = "{% for c in m.tool_calls or [] %}"
# How families of models write a turn with calls: loop variable `c`, message `m`.
CALLS = {
    "hermes": _LOOP + '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% if not loop.last %}\n"
    "{% endif %}{% endfor %}",
    "qwen3_coder": _LOOP + "<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% if not loop.last %}\n{% endif %}{% endfor %}",
    "glm4": _LOOP + "\n<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
    "{% endfor %}",
    "mistral": "{% if m.tool_calls %}[TOOL_CALLS][" + _LOOP + '{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}{% if not loop.last %}, {% endif %}'
    "{% endfor %}]{% endif %}",
    "harmony": _LOOP + " to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>{% endfor %}",
    "deepseek": "{% if m.tool_calls %}<｜tool▁calls▁begin｜>" + _LOOP + "<｜tool▁call▁begin｜>"
    "{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>"
    "{% endfor %}<｜tool▁calls▁end｜>{% endif %}",
    "llama3": "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    + _LOOP
    + '{"name": "{{ c.function.name }}", "parameters": '
    "{{ c.function.arguments | tojson }}}{% endfor %}",
}
SPECIAL = {"mistral": ["[TOOL_CALLS]"], "harmony": ["<|channel|>", "<|message|>", "<|call|>"]}


@functools.cache
def served_as(call_format, thinks=False):
    """A model of this format; its special tokens are those of `SPECIAL`."""
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}{{ m.content }}"
        + ("" if call_format == "harmony" else "\n")
        + CALLS[call_format]
        + "<eos>{% endfor %}{% if add_generation_prompt %}<|start|>assistant"
        + ("" if call_format == "harmony" else "\n")
        + ("<think>\n" if thinks else "")
        + "{% endif %}{# <think></think> #}" * thinks
        + "{% endif %}" * (not thinks)
    )
    tokenizer = serving_model.byte_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL.get(call_format, [])})
    stops = [tokenizer.eos_token_id]
    if call_format == "harmony":
        stops.append(tokenizer.convert_tokens_to_ids("<|call|>"))
    size = len(tokenizer) + 7  # rows of the embedding without a token
    return ServedModel("m", tokenizer, tuple(stops), size, 5000, call_format=call_format)


def matcher_of(served, **fields):
    """The state of a reply's grammar, before its first token."""
    body = ChatBody.model_validate({"model": "m", "messages": [ASK], **fields})
    generation = body.generation_request(served)
    prompt = served.tokenizer.decode(generation.requests[0].tokens)
    return served.grammars.compile(generation.grammar_source).matcher(), prompt


def accepts(served, text, **fields):
    """Whether a reply may be this text, token by token, and end behind it."""
    matcher, _ = matcher_of(served, **fields)
    stops = served.eos_tokens
    for token in [*served.tokenizer(text)["input_ids"], stops[0]]:
        mask = np.zeros((1, -(-served.vocab_size // 32)), np.uint32)
        if fill_masks(mask, {0: matcher}, {0: stops}):
            return False
        if not mask[0, token // 32] >> (token % 32) & 1:
            return False
        if token != stops[0]:
            matcher.advance([token])
    return True


def schema_of(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def test_each_constraint_accepts_its_texts():
    good, bad = '{"a": 1, "b": "y z"}', ['{"a": 1}', '{"a": 1.5, "b": "x"}', good_ := '{"b": 1}']
    assert good_ in bad
    for fields in (
        {"response_format": schema_of(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": json.dumps(SCHEMA)},
    ):
        assert accepts(SERVED, good, **fields)
        assert not any(accepts(SERVED, text, **fields) for text in bad)
    assert accepts(SERVED, '{"é": [1, {}]}', response_format={"type": "json_object"})
    assert accepts(SERVED, "{}", structured_outputs={"json_object": True})
    assert not accepts(SERVED, "[]", response_format={"type": "json_object"})
    for text, is_match in (("ab/1", True), ("ab/", False), ("b/1", False)):
        assert accepts(SERVED, text, guided_regex=r"a\w/\d") is is_match
        assert accepts(SERVED, text, structured_outputs={"regex": r"a\w\/\d"}) is is_match
    assert accepts(SERVED, 'a "b"', guided_choice=["c", 'a "b"'])
    assert not accepts(SERVED, "d", structured_outputs={"choice": ["c"]})
    assert accepts(SERVED, "((a))", guided_grammar='start: "(" start ")" | "a"')
    assert accepts(SERVED, "<12>", structured_outputs={"grammar": 'root ::= "<" [0-9]+ ">"'})
    tight = {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}}
    assert accepts(SERVED, good, **tight) and not accepts(SERVED, good.replace(" ", "  "), **tight)


@pytest.mark.parametrize("call_format", FORMATS)
def test_calls_are_in_the_format_of_the_model(call_format):
    served, row = served_as(call_format), FORMATS[call_format]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in BOTH}
    ones = [
        ("add", {"a": 12, "note": "w\nx"}),
        ("add", {"a": -3}),
        ("sub", {"mode": "slow", "values": [1.5, 2], "text": "é < 3"}),
        ("sub", {"mode": "fast"}),
    ]
    wrong = [("add", {"note": "x"}), ("add", {"a": "x"}), ("sub", {"mode": "other"}), ("mul", {})]
    for choice in ("required", "auto"):
        fields = {"tools": BOTH, "tool_choice": choice}
        _, prompt = matcher_of(served, **fields)
        start = prompt.rpartition("<|start|>assistant")[2].removeprefix("\n")
        assert bool(start) == (choice == "required")
        for calls in ([one] for one in ones):
            text = rendered(served, calls)
            assert accepts(served, text[len(start) :], **fields), (choice, text)
            parsed = row.parse(text, schemas)
            assert [(call.name, call.arguments) for call in parsed.calls] == calls
        for call in wrong:
            assert not accepts(served, rendered(served, [call])[len(start) :], **fields), call
        free = "<|channel|>final<|message|>It is 2." if row.answer_start else "It is 2."
        assert accepts(served, free, **fields) == (choice == "auto")
        if call_format != "llama3" and call_format != "harmony":
            two = rendered(served, ones[1:3])[len(start) :]
            assert accepts(served, two, **fields)
            assert not accepts(served, two, **fields, parallel_tool_calls=False)
    named = {"type": "function", "function": {"name": "sub"}}
    _, prompt = matcher_of(served, tools=BOTH, tool_choice=named)
    start = prompt.rpartition("<|start|>assistant")[2].removeprefix("\n")
    text = rendered(served, ones[3:])
    assert text.startswith(start) and "sub" in start
    assert accepts(served, text[len(start) :], tools=BOTH, tool_choice=named)


def rendered(served, calls):
    """The turn of these calls, without the token that ends it."""
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": n, "arguments": a}} for n, a in calls],
    }
    text = served.tokenizer.apply_chat_template([ASK, turn], tokenize=False)
    text = text.rpartition("<|start|>assistant")[2].removeprefix("\n")
    return text.removesuffix("<eos>").removesuffix("<|call|>").rstrip("\n")


def test_thinking_and_an_answer_or_calls():
    served = served_as("hermes", thinks=True)
    both = {"tools": TOOLS, "response_format": schema_of(SCHEMA)}
    answer, call = '{"a": 1, "b": "x"}', rendered(served, [("add", {"z": 1})])
    for text, fields, is_valid in (
        ("Hm.</think>\n\n" + answer, both, True),
        (answer, both, False),  # the prompt has opened the thinking
        ("Hm.</think>" + call, both, True),
        ("Hm.</think>It is 2." + call, both, False),
        ("Hm.</think>It is 2." + call, {"tools": STRICT}, False),  # "z" is not in its schema
        ("Hm.</think>It is 2.", {"tools": STRICT}, True),
    ):
        assert accepts(served, text, **fields) == is_valid, (text, fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": schema_of({"type": "strin"})}, "response_format: Invalid type: strin"),
        ({"response_format": schema_of({"$ref": "#/x"})}, "response_format: Pointer '/x' does not"),
        ({"guided_regex": "(a"}, 'guided_regex: at 2(8): invalid regex "(a"'),
        ({"guided_regex": "(?=a)b"}, "look-around"),
        ({"guided_grammar": "start: foo"}, 'guided_grammar: at 1(8): unknown name: "foo"'),
        ({"guided_grammar": "root ::= ("}, "guided_grammar: the GBNF grammar cannot be read"),
        ({"guided_json": "{"}, "guided_json: is no JSON"),
        ({"guided_json": "[]"}, "guided_json: a JSON schema is an object, got '[]'"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json and guided_regex both constrain"),
        ({"structured_outputs": {}}, "structured_outputs has no constraint"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos: a reply ends when its guided_re"),
        ({"response_format": {"type": "json_schema"}}, "json_schema belongs to type 'json_schema'"),
        ({"guided_json": {"enum": ["x" * 2**17]}}, "guided_json: a grammar of 131"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_compiled_is_refused_before_it_is_queued(fields, message):
    async def ask():
        async with talking("It is 2.") as (client, engine):
            for path, prompt in (
                ("chat/completions", {"messages": [ASK]}),
                ("completions", {"prompt": "x"}),
            ):
                body = {"model": "m", **prompt, **fields}
                reply = await client._client.post(f"/v1/{path}", json=body)
                assert reply.status_code == 400 and message in reply.json()["error"]["message"]
            assert engine.asked == []

    asyncio.run(ask())


def test_keywords_of_texts_without_quotes_are_refused():
    tool = {"name": "f", "parameters": {"properties": {"t": {"type": "string", "pattern": "a+"}}}}
    fields = {"tools": [{"type": "function", "function": {**tool, "strict": True}}]}
    with pytest.raises(ApiError, match=r"tools: f.t: this model writes .* 'pattern' cannot be"):
        matcher_of(served_as("glm4"), **fields)
    assert accepts(
        served_as("hermes"), rendered(served_as("hermes"), [("f", {"t": "aa"})]), **fields
    )


def test_deep_and_costly_grammars_end_their_request_alone():
    chain = {f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(2500)}
    schema = {"$defs": {**chain, "2500": {}}, "$ref": "#/$defs/0"}
    rules = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(9000)) + '\nr9000: "a"'
    # Both overflow a stack of 8 MiB.
    assert accepts(SERVED, "[[1]]", guided_json=schema)
    assert accepts(SERVED, "a", guided_grammar=rules)


def test_a_completion_is_constrained_too_and_grammars_are_kept():
    body = CompletionBody.model_validate(
        {"model": "m", "prompt": ["a", "b"], "guided_regex": "a+", "n": 2}
    )
    generation = body.generation_request(SERVED)
    grammar = SERVED.grammars.compile(generation.grammar_source)
    assert SERVED.grammars.compile(generation.grammar_source) is grammar
    requests = generation.with_grammar(grammar).requests
    assert [each.grammar for each in requests] == [grammar, grammar]
    plain = CompletionBody.model_validate({"model": "m", "prompt": "a"})
    assert plain.generation_request(SERVED).grammar_source is None


def test_without_llguidance_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    fresh = dataclasses.replace(SERVED)
    with pytest.raises(GrammarError, match=r"guided_regex: needs .* 'jaxrl_llm\[serve\]'"):
        fresh.grammars.compile(
            CompletionBody.model_validate({"model": "m", "prompt": "a", "guided_regex": "a"})
            .generation_request(SERVED)
            .grammar_source
        )
