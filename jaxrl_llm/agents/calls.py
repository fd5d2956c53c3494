"""Calls of tools in what a model wrote, in the formats of several families.

A format reads the text of a turn's tokens, special ones included, but not the last that ends it.
What is no valid call becomes a `Call` with a problem, which the model is told; nothing raises.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

# Tool -> JSON schema of its parameters: what values without quotes are meant to be.
Schemas = Mapping[str, Mapping[str, Any]]


class Call(NamedTuple):
    """One call of a tool."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""  # why it cannot be made


class Said(NamedTuple):
    """What a model wrote in one turn."""

    text: str  # without calls
    calls: tuple[Call, ...]


_OPEN, CLOSE = "<tool_call>", "</tool_call>"  # around a call, in three of the formats
_HERMES = re.compile(rf"{_OPEN}(.*?)(?:{CLOSE}|$)", re.DOTALL)
_CODER = re.compile(r"<function=([^>]*)>(.*?)(?:</function>|$)", re.DOTALL)
_CODER_VALUE = re.compile(r"<parameter=([^>]*)>(.*?)(?:</parameter>|$)", re.DOTALL)
_GLM_VALUE = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|$)", re.DOTALL)
_HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?([^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>"
    r"(.*?)(?:<\|(?:end|call|return)\|>|$)",
    re.DOTALL,
)
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_CALL = re.compile(r"([^\[\]{}]*)(?:\[CALL_ID\][^\[]*)?\[ARGS\](.*)", re.DOTALL)
_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|$)", re.DOTALL)
_DEEPSEEK_OPEN = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
_DEEPSEEK_BEGIN = re.compile("|".join(_DEEPSEEK_OPEN))
_PYTHON_TAG = "<|python_tag|>"


def _hermes(text: str, schemas: Schemas) -> Said:
    """Hermes, Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    calls = (_from_json(body) for body in _HERMES.findall(text))
    return Said(_HERMES.sub("", text).strip(), tuple(calls))


def _qwen3_coder(text: str, schemas: Schemas) -> Said:
    """Qwen3-Coder: `<function=f><parameter=a>value</parameter></function>` in `<tool_call>`."""

    def call(body: str) -> Call:
        found = _CODER.search(body)
        if not found:
            return Call("", {}, "no <function=NAME> in the call")
        values = {k.strip(): _without_line_ends(v) for k, v in _CODER_VALUE.findall(found[2])}
        return _typed(found[1].strip(), values, schemas)

    calls = (call(body) for body in _HERMES.findall(text))
    return Said(_HERMES.sub("", text).strip(), tuple(calls))


def _glm4(text: str, schemas: Schemas) -> Said:
    """GLM-4.5: `<tool_call>f<arg_key>a</arg_key><arg_value>value</arg_value></tool_call>`."""

    def call(body: str) -> Call:
        name = body.partition("<arg_key>")[0].strip()
        return _typed(name, dict(_GLM_VALUE.findall(body)), schemas)

    calls = (call(body) for body in _HERMES.findall(text))
    return Said(_HERMES.sub("", text).strip(), tuple(calls))


def _llama3(text: str, schemas: Schemas) -> Said:
    """Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, or several with `;`."""
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    if not (body.startswith("{") and '"name"' in body):
        return Said(text.strip(), ())
    values, problem = _json_values(body)
    calls = [_call(value) for value in values]
    if problem:
        calls.append(Call("", {}, problem))
    return Said("", tuple(calls))


def _mistral(text: str, schemas: Schemas) -> Said:
    """Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]f[ARGS]{...}`."""
    before, *bodies = text.split(_MISTRAL)
    calls: list[Call] = []
    for body in bodies:
        if found := _MISTRAL_CALL.match(body):
            calls.append(_named(found[1].strip(), found[2]))
            continue
        value, problem = _json(body)
        many = value if isinstance(value, list) else [value]
        calls += [Call("", {}, problem)] if problem else map(_call, many)
    return Said(before.strip(), tuple(calls))


def _harmony(text: str, schemas: Schemas) -> Said:
    """gpt-oss: messages with a channel; one with `to=functions.f` is a call, "final" the text."""
    said, calls = [], []
    for header, body in _HARMONY.findall(text):
        to = re.search(r"to=([^\s<]*)", header)
        if to:
            calls.append(_named(to[1].removeprefix("functions."), body))
        elif "analysis" not in header:
            said.append(body)
    return Said("".join(said).strip(), tuple(calls))


def _deepseek(text: str, schemas: Schemas) -> Said:
    """DeepSeek V3: `function<sep>f` and JSON in a fence; V3.1: `f<sep>{...}`."""

    def call(body: str) -> Call:
        kind, _, rest = body.partition("<｜tool▁sep｜>")
        if kind.strip() == "function":
            name, _, rest = rest.partition("\n")
            return _named(name.strip(), rest.strip().removeprefix("```json").removesuffix("```"))
        return _named(kind.strip(), rest)

    before = _DEEPSEEK_BEGIN.split(text, maxsplit=1)[0]
    return Said(before.strip(), tuple(map(call, _DEEPSEEK.findall(text))))


# Name -> reader of one turn: (text, schemas) -> what was said.
FORMATS: Mapping[str, Callable[[str, Schemas], Said]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "glm4": _glm4,
    "llama3": _llama3,
    "mistral": _mistral,
    "harmony": _harmony,
    "deepseek": _deepseek,
}

# What a chat template contains if its model writes calls in a format; the first that fits.
_SIGNS = {
    "qwen3_coder": ("<function=",),
    "glm4": ("<arg_key>",),
    "hermes": ("<tool_call>",),
    "mistral": (_MISTRAL,),
    "harmony": ("<|channel|>",),
    "deepseek": ("<｜tool▁call▁begin｜>",),
    "llama3": (_PYTHON_TAG, '"parameters": '),
}

# Where the first call begins in a turn, by format; of harmony all is in messages with headers.
BEGINNINGS: Mapping[str, re.Pattern[str]] = {
    **dict.fromkeys(("hermes", "qwen3_coder", "glm4"), re.compile(_OPEN)),
    "llama3": re.compile(rf"\A\s*(?:{re.escape(_PYTHON_TAG)}|\{{)"),
    "mistral": re.compile(re.escape(_MISTRAL)),
    "harmony": re.compile(r"\A"),
    "deepseek": _DEEPSEEK_BEGIN,
}


def num_undecided(text: str) -> int:
    """Returns how many characters at the end of a text may turn out to begin a call.

    >>> num_undecided("I shall look. <tool_")
    6
    """
    marks = (_OPEN, _MISTRAL, _PYTHON_TAG, *_DEEPSEEK_OPEN)
    parts = (mark[:size] for mark in marks for size in range(1, len(mark)))
    return max((len(part) for part in parts if text.endswith(part)), default=0)


def format_of(chat_template: str) -> str:
    """Returns the format in which a chat template writes calls, "" if it writes none.

    >>> format_of("... <tool_call> ...")
    'hermes'
    """
    found = (name for name, signs in _SIGNS.items() if any(s in chat_template for s in signs))
    return next(found, "")


def _json(text: str) -> tuple[Any, str]:
    """Returns (value, problem); line ends in strings are allowed, as models write them."""
    try:
        return json.loads(text.strip(), strict=False), ""
    except (ValueError, RecursionError) as error:
        return None, f"invalid JSON: {error}"


def _json_values(text: str) -> tuple[list[Any], str]:
    """Returns (values with `;` between them, what is wrong with the one after them)."""
    decoder, rest = json.JSONDecoder(strict=False), text
    values: list[Any] = []
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            return values, f"invalid JSON: {error}"
        values.append(value)
        rest = rest[end:].lstrip(" \n;")
    return values, ""


def _from_json(text: str) -> Call:
    value, problem = _json(text)
    return Call("", {}, problem) if problem else _call(value)


def _call(value: Any) -> Call:
    """Returns the call of `{"name": ..., "arguments" or "parameters": {...}}`."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return Call("", {}, 'a call is {"name": ..., "arguments": {...}}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON in JSON
        return _named(name, arguments)
    return _checked(name, arguments)


def _named(name: str, arguments: str) -> Call:
    value, problem = _json(arguments or "{}")
    return Call(name, {}, problem) if problem else _checked(name, value)


def _checked(name: str, arguments: Any) -> Call:
    if not isinstance(arguments, dict):
        return Call(name, {}, f"arguments are an object, got {json.dumps(arguments)[:100]}")
    return Call(name, arguments)


def _typed(name: str, values: Mapping[str, str], schemas: Schemas) -> Call:
    """Returns a call whose values came as text: strings stay, others are read as JSON."""
    types = schemas.get(name, {}).get("properties", {})

    def value(key: str, text: str) -> Any:
        wanted = types.get(key, {}).get("type")
        if wanted == "string":
            return text
        read, problem = _json(text)
        return text if problem else read

    return Call(name, {key: value(key, text) for key, text in values.items()})


def _without_line_ends(text: str) -> str:
    """Returns a value without the line ends that the format puts around it."""
    return text.removeprefix("\n").removesuffix("\n")


def schemas_of(tools: Iterable[Mapping[str, Any]]) -> Schemas:
    """Returns the schemas of tools as `transformers.utils.get_json_schema` describes them."""
    described = [tool["function"] for tool in tools]
    return {each["name"]: each.get("parameters", {}) for each in described}
