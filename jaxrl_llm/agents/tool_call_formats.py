"""The formats in which families of models write calls of tools: one row of `FORMATS` each.

A parser reads the text of a turn's tokens, special ones included, but not the last one, which ends
the turn. It knows where JSON and values end, so a call may contain the marks of its own format. A
call that cannot be read becomes a `ParsedToolCall` with a problem, which the model receives;
nothing raises. Behind a faulty call, reading goes on at the next closing mark.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.agents.tool_call_arguments import Schemas, typed_arguments
from jaxrl_llm.agents.tool_call_scanner import (
    Events,
    Paths,
    ScannedCall,
    Scanner,
    Thinking,
    Waiting,
    as_thinking,
    parse_json,
    scanned_call,
)


class ParsedToolCall(NamedTuple):
    """A call of a tool that a model wrote."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""  # why it cannot run


class ParsedTurn(NamedTuple):
    """A turn of a model, taken apart."""

    text: str  # without calls
    calls: tuple[ParsedToolCall, ...]


class ToolCallFormat(NamedTuple):
    """How a family of models writes calls of tools."""

    # (scanner, schemas, mark of the thinking that the prompt has opened) -> events.
    events: Callable[[Scanner, Schemas, str], Events]
    # Its models' chat templates contain one of these; the first format that fits is taken.
    template_marks: tuple[str, ...]
    # For grammars of calls. The mark that begins calls; "": no text precedes them in a turn.
    call_mark: str
    has_json_arguments: bool = True  # one object; else each value is a text between marks,
    value_end: str = ""  # of which this is the closing one
    # What a template does not show: the text before an answer, and the marks around thinking.
    answer_start: str = ""
    thinking_marks: tuple[str, ...] = ()

    def parse(self, text: str, schemas: Schemas, open_thinking: str = "") -> ParsedTurn:
        """The text and the calls of a whole turn.

        Args:
          text: What the model wrote.
          schemas: Schemas of the arguments by tool, for values that are written without quotes.
          open_thinking: The mark with which the prompt has opened thinking, "" if it has not.
        """
        texts: list[str] = []
        calls: list[ParsedToolCall] = []
        for event in self.events(Scanner(text, ended=True), schemas, open_thinking):
            if isinstance(event, ScannedCall):
                calls.append(ParsedToolCall(event.name, event.arguments, event.problem))
            elif isinstance(event, Thinking):
                texts.append(event.text if event.in_turn else "")
            elif event is not None:
                texts.append(event)
        return ParsedTurn("".join(texts).strip(), tuple(calls))


def thinking_and_text(scan: Scanner, schemas: Schemas, open_thinking: str) -> Events:
    """Parses a turn of a model that thinks and has no tools to call."""
    at = yield from scan.thinking(open_thinking)
    yield from scan.rest(at)


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"  # around a call, in three of the formats


def _hermes(scan: Scanner, schemas: Schemas, open_thinking: str) -> Events:
    """Hermes, Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    at = yield from scan.thinking(open_thinking)
    while (start := (yield from scan.text_before((_OPEN,), at))) < len(scan.text):
        at = yield from _json_call(scan, start, start + len(_OPEN), (_CLOSE,))


_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_WRAPPED_PATHS: Paths = (((_PARAMETER,),), ((_END_FUNCTION,), (_CLOSE, _FUNCTION)))
_BARE_PATHS: Paths = (((_PARAMETER,),), ((_END_FUNCTION,),))


def _qwen3_coder(scan: Scanner, schemas: Schemas, open_thinking: str) -> Events:
    """Qwen3-Coder: `<function=f><parameter=a>value</parameter></function>` in `<tool_call>`.

    The model often leaves out `<tool_call>`; then only what goes on as a call is one.
    """
    at = yield from scan.thinking(open_thinking)
    while (start := (yield from scan.text_before((_OPEN, _FUNCTION), at))) < len(scan.text):
        if scan.text.startswith(_OPEN, start):
            at = yield from _functions(scan, start, schemas)
            continue
        name, at = yield from _name_in_tag(scan, start + len(_FUNCTION))
        if name and (yield from scan.one_of((_PARAMETER, _END_FUNCTION), at))[0]:
            texts, problem, mark, at = yield from _parameters(scan, at, _BARE_PATHS)
            if problem:
                at = yield from _next_end(scan, at, (_END_FUNCTION,))
            arguments = typed_arguments(name, texts, schemas)
            yield scanned_call(name, arguments, problem, start, complete=bool(mark))
        else:
            at = start + len(_FUNCTION)
            yield _FUNCTION


def _functions(scan: Scanner, start: int, schemas: Schemas) -> Waiting[int]:
    """Yields the calls of a block `<tool_call>`; returns the position behind it."""
    mark, at = yield from scan.one_of((_FUNCTION,), start + len(_OPEN))
    name, problem = "", "" if mark else f"no {_FUNCTION}NAME> in the call"
    while True:
        texts: dict[str, str] = {}
        if not problem:
            begun = at
            name, at = yield from _name_in_tag(scan, at)
            if at < 0:
                at, problem = begun, f"no > behind {_FUNCTION}{name}"
        if not problem:
            texts, problem, _, at = yield from _parameters(scan, at, _WRAPPED_PATHS)
        if not problem:
            mark, at = yield from scan.one_of((_CLOSE, _FUNCTION), at)
            if not mark and at < len(scan.text):
                problem = f"other text behind {_END_FUNCTION}"
        if problem:
            at = yield from _next_end(scan, at, (_CLOSE,))
            yield scanned_call(name, {}, problem, start)
            return at
        arguments = typed_arguments(name, texts, schemas)
        yield scanned_call(name, arguments, "", start, complete=bool(mark))
        if mark != _FUNCTION:
            return at
        start = at - len(_FUNCTION)


def _name_in_tag(scan: Scanner, start: int) -> Waiting[tuple[str, int]]:
    """The name that a tag's `>` follows, and the position behind that; -1 if none does."""
    end = yield from scan.word(start)
    mark, behind = yield from scan.one_of((">",), end)
    name = scan.text[start:end]
    return name, behind if mark and name else -1


def _parameters(
    scan: Scanner, at: int, paths: Paths
) -> Waiting[tuple[dict[str, str], str, str, int]]:
    """Reads parameters up to `</function>`, which may be missing at the end of a turn.

    Returns (texts of the values, problem, the mark that ended them, the position behind it).
    """
    texts: dict[str, str] = {}
    while True:
        mark, at = yield from scan.one_of((_PARAMETER, _END_FUNCTION), at)
        if mark != _PARAMETER:
            stray = not mark and at < len(scan.text)
            return texts, "other text between the parameters" if stray else "", mark, at
        name, start = yield from _name_in_tag(scan, at)
        if start < 0:
            return texts, f"no > behind {_PARAMETER}{name}", "", at
        end = yield from scan.value_end(_END_PARAMETER, start, paths)
        if end < 0:
            return texts, f"{_PARAMETER}{name}> does not end with {_END_PARAMETER}", "", start
        # The format puts line ends around a value.
        texts[name] = scan.text[start:end].removeprefix("\n").removesuffix("\n")
        at = end + len(_END_PARAMETER)


_KEY, _END_KEY = "<arg_key>", "</arg_key>"
_VALUE, _END_VALUE = "<arg_value>", "</arg_value>"
_GLM_PATHS: Paths = (((_KEY, _CLOSE),),)


def _glm4(scan: Scanner, schemas: Schemas, open_thinking: str) -> Events:
    """GLM-4.5: `<tool_call>f<arg_key>a</arg_key><arg_value>value</arg_value></tool_call>`."""
    at = yield from scan.thinking(open_thinking)
    while (start := (yield from scan.text_before((_OPEN,), at))) < len(scan.text):
        at = start + len(_OPEN)
        end = yield from scan.text_before((_KEY, _CLOSE), at, emit=False)
        name = scan.text[at:end].strip()
        texts, problem, mark, at = yield from _keys_and_values(scan, end)
        if not problem and len(name.split()) != 1:
            name, problem = "", f"a call begins with the name of its function, got {name[:100]!r}"
        elif problem:
            at = yield from _next_end(scan, at, (_CLOSE,))
        arguments = typed_arguments(name, texts, schemas)
        yield scanned_call(name, arguments, problem, start, complete=bool(mark))


def _keys_and_values(scan: Scanner, at: int) -> Waiting[tuple[dict[str, str], str, str, int]]:
    """Reads arguments up to `</tool_call>`; returns what `_parameters` does."""
    texts: dict[str, str] = {}
    while True:
        mark, at = yield from scan.one_of((_KEY, _CLOSE), at)
        if mark != _KEY:
            stray = not mark and at < len(scan.text)
            return texts, "other text between the arguments" if stray else "", mark, at
        end = yield from scan.find(_END_KEY, at)
        key = scan.text[at:end].strip()
        if end < 0 or "<" in key:
            return texts, f"a key does not end with {_END_KEY}", "", at
        mark, start = yield from scan.one_of((_VALUE,), end + len(_END_KEY))
        if not mark:
            return texts, f"no {_VALUE} behind the key {key!r}", "", start
        end = yield from scan.value_end(_END_VALUE, start, _GLM_PATHS)
        if end < 0:
            return texts, f"the value of {key!r} does not end with {_END_VALUE}", "", start
        texts[key] = scan.text[start:end]
        at = end + len(_END_VALUE)


_PYTHON_TAG = "<|python_tag|>"


def _llama3(scan: Scanner, schemas: Schemas, open_thinking: str) -> Events:
    """Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, or several with `;`."""
    begin = yield from scan.thinking(open_thinking)
    tag, at = yield from scan.one_of((_PYTHON_TAG, "{"), begin)
    if tag == _PYTHON_TAG:
        tag, at = yield from scan.one_of(("{",), at)
    if not tag:
        yield from scan.rest(begin)
        return
    start, first = at - 1, True
    while first or start < len(scan.text):
        value, end, problem = yield from scan.json(start)
        if first:
            if problem:  # whether a call was meant shows when all is there
                yield from scan.text_before((_NEVER,), end, emit=False)
            if '"name"' not in scan.text[start:] if problem else not _is_call(value):
                yield from scan.rest(begin)
                return
        if problem:
            yield from scan.text_before((_NEVER,), end, emit=False)
            yield scanned_call("", {}, problem, start)
            return
        for name, arguments, fault in _calls_of(value):
            yield scanned_call(name, arguments, fault, start)
        separator, start, first = ";", end, False
        while separator:
            separator, start = yield from scan.one_of((";",), start)


_NEVER = "\0\0"  # a mark that no text has


_MISTRAL, _ARGUMENTS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _mistral(scan: Scanner, schemas: Schemas, open_thinking: str) -> Events:
    """Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]f[ARGS]{...}`."""
    at = yield from scan.thinking(open_thinking)
    while (start := (yield from scan.text_before((_MISTRAL,), at))) < len(scan.text):
        at = yield from scan.skip_space(start + len(_MISTRAL))
        name, end = "", (yield from scan.text_before(("[", "{"), at, emit=False))
        if end > at:
            name = scan.text[at:end].strip()
            mark, behind = yield from scan.one_of((_CALL_ID, _ARGUMENTS), end)
            if mark == _CALL_ID:
                end = yield from scan.text_before(("[",), behind, emit=False)
                mark, behind = yield from scan.one_of((_ARGUMENTS,), end)
            name, at = (name, behind) if mark else ("", at)
        at = yield from _json_call(scan, start, at, (_MISTRAL,), name)
        if scan.text.startswith(_MISTRAL, at - len(_MISTRAL)) and at - len(_MISTRAL) > start:
            at -= len(_MISTRAL)  # it begins the next call


_START, _MESSAGE = "<|start|>", "<|message|>"
_END_MESSAGE = "<|end|>", "<|call|>", "<|return|>"
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]*)")


def _harmony(scan: Scanner, schemas: Schemas, open_thinking: str) -> Events:
    """gpt-oss: messages with a channel; one with `to=functions.f` is a call, "final" the text."""
    at = 0
    while (end := (yield from scan.find(_MESSAGE, at))) >= 0:
        start = max(at, scan.text.rfind(_START, at, end))
        header, body = scan.text[start:end], end + len(_MESSAGE)
        if recipient := _RECIPIENT.search(header):
            at = yield from _json_call(scan, start, body, _END_MESSAGE, recipient[1])
            continue
        message = scan.text_before(_END_MESSAGE, body)
        end = yield from as_thinking(message, in_turn=False) if "analysis" in header else message
        _, at = yield from scan.one_of(_END_MESSAGE, end)


_CALLS, _CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
_END_CALL, _SEPARATOR, _FENCE = "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "```"


def _deepseek(scan: Scanner, schemas: Schemas, open_thinking: str) -> Events:
    """DeepSeek V3: `function<sep>f` and JSON in a fence; V3.1: `f<sep>{...}`.

    Text behind the first call is dropped: the models write none.
    """
    at = yield from scan.thinking(open_thinking)
    at = yield from scan.text_before((_CALLS, _CALL), at)
    while (start := (yield from scan.find(_CALL, at))) >= 0:
        at = start + len(_CALL)
        end = yield from scan.text_before((_SEPARATOR, _END_CALL, _CALL), at, emit=False)
        if not scan.text.startswith(_SEPARATOR, end):
            at = yield from _next_end(scan, end, (_END_CALL,))
            yield scanned_call("", {}, f"no {_SEPARATOR} in the call", start)
            continue
        name, at = scan.text[at:end].strip(), end + len(_SEPARATOR)
        if name == "function":
            end = yield from scan.text_before(("\n", _FENCE, "{", _END_CALL), at, emit=False)
            name = scan.text[at:end].strip()
            _, at = yield from scan.one_of((f"{_FENCE}json", _FENCE), end)
        at = yield from _json_call(scan, start, at, (_END_CALL,), name, fence=_FENCE)


def _json_call(
    scan: Scanner, start: int, at: int, closing: Sequence[str], name: str = "", fence: str = ""
) -> Waiting[int]:
    """Yields the calls of the JSON at `at`; returns the position behind their closing mark.

    The JSON is a call or a list of calls, or the arguments of a call of `name`, which may be
    missing. `start` is where the call begins. At the end of a turn the closing mark may be missing,
    and `fence` may stand before it.
    """
    at = yield from scan.skip_space(at)
    mark, behind = yield from scan.one_of(closing, at)
    if name and mark:
        yield scanned_call(name, {}, "", start)
        return behind
    value, end, problem = yield from scan.json(at)
    if not problem:
        if fence:
            _, end = yield from scan.one_of((fence,), end)
        mark, end = yield from scan.one_of(closing, end)
        if not mark and end < len(scan.text):
            problem = "invalid JSON: other text behind its end"
    if problem:
        end = yield from _next_end(scan, end, closing)
        yield scanned_call(name, {}, problem, start)
        return end
    for call_name, arguments, fault in [(name, value, "")] if name else _calls_of(value):
        yield scanned_call(call_name, arguments, fault, start)
    return end


def _next_end(scan: Scanner, at: int, closing: Sequence[str]) -> Waiting[int]:
    """The position behind the next closing mark; the end of the text if there is none."""
    marks = (_NEVER,) if scan.num_faults >= scan.MAX_FAULTS else closing
    end = yield from scan.text_before(marks, at, emit=False)
    _, end = yield from scan.one_of(marks, end)
    return end


def _calls_of(value: Any) -> Iterator[tuple[str, Any, str]]:
    """Yields (name, arguments, problem) of `{"name": ..., "arguments" or "parameters": {...}}`."""
    for each in value if isinstance(value, list) else [value]:
        if not _is_call(each):
            yield "", {}, 'a call is {"name": ..., "arguments": {...}}'
            continue
        arguments = each.get("arguments", each.get("parameters", {}))
        problem = ""
        if isinstance(arguments, str):  # JSON in JSON
            arguments, _, problem = parse_json(arguments or "{}")
        yield each["name"], arguments, problem


def _is_call(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)


# In the order in which their marks are looked for in a chat template.
FORMATS: Mapping[str, ToolCallFormat] = {
    "qwen3_coder": ToolCallFormat(
        _qwen3_coder,
        (_FUNCTION,),
        _OPEN,
        has_json_arguments=False,
        value_end=f"\n{_END_PARAMETER}",
    ),
    "glm4": ToolCallFormat(_glm4, (_KEY,), _OPEN, has_json_arguments=False, value_end=_END_VALUE),
    "hermes": ToolCallFormat(_hermes, (_OPEN,), _OPEN),
    "mistral": ToolCallFormat(_mistral, (_MISTRAL,), _MISTRAL),
    "harmony": ToolCallFormat(
        _harmony,
        ("<|channel|>",),
        "",
        answer_start=f"<|channel|>final{_MESSAGE}",
        thinking_marks=(f"<|channel|>analysis{_MESSAGE}", f"<|end|>{_START}assistant"),
    ),
    "deepseek": ToolCallFormat(_deepseek, (_CALL,), _CALLS),
    "llama3": ToolCallFormat(_llama3, (_PYTHON_TAG, '"parameters": '), ""),
}


def format_name(chat_template: str) -> str:
    """The name of the format in which a chat template writes calls, "" if it writes none.

    >>> format_name("... <tool_call> ...")
    'hermes'
    """
    fitting = (
        name
        for name, each in FORMATS.items()
        if any(mark in chat_template for mark in each.template_marks)
    )
    return next(fitting, "")
