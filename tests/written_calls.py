"""Calls of tools as models write them, by format."""

from jaxrl_llm.agents.tool_call_arguments import schemas_of
from jaxrl_llm.agents.tool_call_formats import ParsedToolCall

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "One."},
                    "note": {"type": "string", "description": "Words."},
                },
                "required": ["a"],
            },
        },
    }
]
SCHEMAS = schemas_of(TOOLS)
ONE, TWO = (
    ParsedToolCall("add", {"a": 1, "note": "12 x"}),
    ParsedToolCall("add", {"a": -2, "note": "3"}),
)
# Format -> one call after some words, and two calls.
WRITTEN = {
    "hermes": (
        'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "12 x"}}\n</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1, "note": "12 x"}}</tool_call>\n<tool_call>'
        '{"name": "add", "arguments": "{\\"a\\": -2, \\"note\\": \\"3\\"}"}',
    ),
    "qwen3_coder": (
        "Well.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\n"
        "12 x\n</parameter>\n</function>\n</tool_call>",
        "<tool_call><function=add><parameter=a>1</parameter><parameter=note>12 x</parameter>"
        "</function></tool_call><tool_call><function=add><parameter=a>-2</parameter>"
        "<parameter=note>3</parameter></function></tool_call>",
    ),
    "glm4": (
        "Well.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>note"
        "</arg_key>\n<arg_value>12 x</arg_value>\n</tool_call>",
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>note</arg_key>"
        "<arg_value>12 x</arg_value></tool_call><tool_call>add\n<arg_key>a</arg_key>"
        "<arg_value>-2</arg_value><arg_key>note</arg_key><arg_value>3</arg_value></tool_call>",
    ),
    "llama3": (
        '<|python_tag|>{"name": "add", "parameters": {"a": 1, "note": "12 x"}}',
        '{"name": "add", "parameters": {"a": 1, "note": "12 x"}}; '
        '{"name": "add", "parameters": {"a": -2, "note": "3"}}',
    ),
    "mistral": (
        'Well.[TOOL_CALLS]add[ARGS]{"a": 1, "note": "12 x"}',
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "note": "12 x"}}, '
        '{"name": "add", "arguments": {"a": -2, "note": "3"}}]',
    ),
    "harmony": (
        "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Well.<|end|><|start|>assistant to=functions.add<|channel|>commentary json<|message|>"
        '{"a": 1, "note": "12 x"}<|call|>',
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
        '{"a": 1, "note": "12 x"}<|call|><|start|>assistant<|channel|>commentary to=functions.add '
        '<|constrain|>json<|message|>{"a": -2, "note": "3"}<|call|>',
    ),
    "deepseek": (
        "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1, "note": "12 x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "note": "12 x"}'
        '<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": -2, "note": "3"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
}

# Parts of calls: any sequence of them is read without an exception, streamed as whole.
PIECES = [
    *"{}[]\"';:<>/\\ \n",
    *(text for pair in WRITTEN.values() for text in pair),
    '{"name": "add", "arguments": {"a": 1}}',
    '{"name": "add", "parameters": {"note": "</tool_call>[TOOL_CALLS]<|call|>"}}',
    "[TOOL_CALLS]",
    "add[ARGS]",
    "[CALL_ID]x1",
    "<tool_call>",
    "</tool_call>",
    "<function=add>",
    "<function=add",
    "<parameter=note>",
    "</parameter>",
    "</function>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<|start|>assistant",
    "<|channel|>final",
    "<|channel|>analysis",
    " to=functions.add",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|python_tag|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "function",
    "add",
    "```json",
    "```",
    "<think>",
    "</think>",
    "NaN",
    "\ud83d",
]
# Repeated, they made earlier readers take time that grew with the square or the cube of the length.
ADVERSARIAL = [
    "a",
    "a b\n",
    "<",
    " ",
    "[",
    '{"a":',
    '"\\',
    "to=functions.f ",
    "<|channel|>x",
    "<|start|>assistant<|channel|>",
    "<|message|>{",
    "<tool_call>",
    '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    '<tool_call>{"name" "</tool_call>',
    "<tool_call>{x</tool_call>",
    "<tool_call><function=f><parameter=a></tool_call>",
    "<function=f><parameter=a>",
    "<function=f>",
    "</parameter>  ",
    "<tool_call>f<arg_key>a</arg_key><arg_value></arg_value>x",
    "<tool_call>f<arg_key>",
    "[TOOL_CALLS]",
    "[TOOL_CALLS][{",
    "[TOOL_CALLS]f[CALL_ID]",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    '{"name": "add", "parameters": {}};',
]
