"""Grammars of tool calls in the model's own format, as its chat template writes it.

The template renders invented calls; the texts around their names, arguments and values are those of
every call. A row of `FORMATS` says whether arguments are JSON or texts between marks, and with
which mark a call begins.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.agents.tool_call_arguments import accepted_types
from jaxrl_llm.agents.tool_call_formats import FORMATS, ToolCallFormat

# Names that no tool has, and no template writes.
_NAME, _KEY, _VALUE = "zqname{}zq", "zqkey{}zq", "zqvalue{}zq"
# Keywords that restrict texts; between marks, where a text is not quoted, they cannot be followed.
_TEXT_KEYWORDS = ("pattern", "minLength", "maxLength", "format", "not", "allOf")

Call = tuple[str, Mapping[str, Any]]  # name, arguments
# Renders a turn of the assistant with these calls.
RenderCalls = Callable[[Sequence[Call]], str]


class CallGrammarError(Exception):
    """Calls of these tools cannot be constrained; the message says why."""


class AllowedTool(NamedTuple):
    """A tool that may be called, and what its arguments must be."""

    name: str
    schema: Mapping[str, Any]


class CallGrammar(NamedTuple):
    """Rules of a Lark grammar for one or more calls."""

    rules: tuple[str, ...]  # `calls` is the first
    parts: tuple[tuple[str, Mapping[str, Any]], ...]  # JSON schemas that the rules name, as @name


class _Texts(NamedTuple):
    """The texts around calls, each with two arguments, or with none."""

    opening: str  # before the first name
    before_arguments: str  # from a name to its arguments, or to its first key
    key_to_value: str
    value_to_key: str  # from a value to the next key
    separator: str  # from arguments, or the last value, to the next name; "": one call a turn
    closing: str  # behind the last call
    bare_closing: str  # from a name without arguments to the end; not of JSON


def call_grammar(
    format_name: str,
    render: RenderCalls,
    tools: Sequence[AllowedTool],
    literal: Callable[[str], str],
    ends: Sequence[str],
    *,
    only_one: bool = False,
    begins_at_mark: bool = True,
    written: str = "",
) -> CallGrammar:
    """The grammar of a turn's calls, to the end of the turn.

    Args:
      render: Renders a turn of the assistant with these calls, from the end of the prompt on.
      literal: A text as a Lark expression; special tokens of the tokenizer are tokens there.
      ends: Texts of the tokens that end a turn.
      only_one: Whether a second call is forbidden.
      begins_at_mark: Whether the first call begins at its mark; else at the end of the prompt.
      written: The beginning of the calls, if it has been written already.

    Raises:
      CallGrammarError: If the template writes no such calls, or a schema cannot be followed.
    """
    row = FORMATS[format_name]
    texts = _call_texts(row, render, ends, begins_at_mark)
    rules: list[str] = []
    parts: list[tuple[str, Mapping[str, Any]]] = []
    write = _json_call if row.has_json_arguments else _marked_call
    more = texts.separator and not only_one
    end = row.value_end
    closing = literal(texts.closing.removeprefix(end))
    separator = literal(texts.separator.removeprefix(end))
    starts = []
    for number, tool in enumerate(tools):
        first = texts.opening + tool.name + ("" if end else texts.before_arguments)
        if not first.startswith(written):
            raise CallGrammarError("the chat template begins its calls in several ways")
        starts.append(f"{literal(first[len(written) :])} body_{number}")
        call_rules, call_parts = write(number, tool, texts, row, literal)
        rules += call_rules
        parts += call_parts
    names = [
        f"{literal(tool.name + ('' if end else texts.before_arguments))} body_{number}"
        for number, tool in enumerate(tools)
    ]
    repeat = f" ({separator} next_call)*" if more else ""
    rules = [f"calls: first_call{repeat} {closing}", *rules]
    rules.append(f"first_call: {' | '.join(starts)}")
    if more:
        rules.append(f"next_call: {' | '.join(names)}")
    return CallGrammar(tuple(rules), tuple(parts))


def _json_call(
    number: int, tool: AllowedTool, texts: _Texts, row: ToolCallFormat, literal: Callable[[str], str]
) -> tuple[list[str], list[tuple[str, Mapping[str, Any]]]]:
    """The arguments of a call as one JSON object."""
    schema = {"type": "object", **tool.schema}
    return [f"body_{number}: @arguments_{number}"], [(f"arguments_{number}", schema)]


def _marked_call(
    number: int, tool: AllowedTool, texts: _Texts, row: ToolCallFormat, literal: Callable[[str], str]
) -> tuple[list[str], list[tuple[str, Mapping[str, Any]]]]:
    """The arguments of a call as texts between marks, in the order of the schema's properties."""
    properties = tool.schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = [key for key in tool.schema.get("required") or () if key in properties]
    rules: list[str] = []
    parts: list[tuple[str, Mapping[str, Any]]] = []
    # What may follow the arguments before each: the next ones, up to the first that is required.
    # Behind the last required one also nothing.
    head = texts.bare_closing.removesuffix(texts.closing.removeprefix(row.value_end))
    keys = list(properties)
    for at in range(len(keys) + 1):
        is_first = at == 0
        leads = literal(texts.before_arguments if is_first else
                        texts.value_to_key.removeprefix(row.value_end))  # fmt: skip
        options = []
        for following in range(at, len(keys)):
            value = f"value_{number}_{following}"
            options.append(f"{leads} {literal(keys[following] + texts.key_to_value)} {value}"
                           f" rest_{number}_{following + 1}")  # fmt: skip
            if keys[following] in required:
                break
        else:
            options.append(literal(head) if is_first else '""')
        name = f"body_{number}" if is_first else f"rest_{number}_{at}"
        rules.append(f"{name}: {' | '.join(options)}")
    for at, (key, schema) in enumerate(properties.items()):
        value, part = f"value_{number}_{at}", f"argument_{number}_{at}"
        types = accepted_types(schema, tool.schema)
        fixed = _fixed_texts(schema)
        if fixed is not None:
            rules.append(f"{value}: ({' | '.join(map(literal, fixed))}) {literal(row.value_end)}")
        elif not types or "string" in types:
            if keyword := next((k for k in _TEXT_KEYWORDS if k in (schema or {})), ""):
                message = f"{tool.name}.{key}: this model writes texts without quotes, so that"
                raise CallGrammarError(f"{message} {keyword!r} cannot be followed; leave it out")
            rules.append(f"{value}[lazy]: /(.|\\n)*/ {json.dumps(row.value_end)}")
        else:
            definitions = {k: tool.schema[k] for k in ("$defs", "definitions") if k in tool.schema}
            parts.append((part, {**schema, **definitions}))
            rules.append(f"{value}: @{part} {literal(row.value_end)}")
    return rules, parts


def _fixed_texts(schema: Any) -> list[str] | None:
    """The texts of a schema that lists its values, None if it does not."""
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return [each if isinstance(each, str) else json.dumps(each) for each in values]


def _call_texts(
    row: ToolCallFormat, render: RenderCalls, ends: Sequence[str], begins_at_mark: bool
) -> _Texts:
    """What the chat template writes around calls; `CallGrammarError` if it writes none."""
    arguments = [{_KEY.format(n + i): _VALUE.format(n + i) for i in (0, 1)} for n in (0, 2)]
    calls = [(_NAME.format(number), each) for number, each in enumerate(arguments)]
    two, texts = _pieces(row, render, calls), _pieces(row, render, calls[:1])
    if texts is None:
        raise CallGrammarError("the chat template of this model writes no calls")
    opening, *inner, closing = texts
    if begins_at_mark and row.call_mark:
        opening = opening[opening.rfind(row.call_mark) :]
    separator = ""
    if two is not None:
        # The end of two calls may differ from that of one: a list of them has its own.
        if _until(two[-1], ends) == _until(closing, ends):
            separator = two[len(inner) + 1]
    before_arguments, key_to_value, value_to_key = inner if not row.has_json_arguments else (
        inner[0], "", ""
    )  # fmt: skip
    bare = "" if row.has_json_arguments else _bare_closing(render, ends)
    return _Texts(
        opening,
        before_arguments,
        key_to_value,
        value_to_key,
        separator,
        _until(closing, ends),
        bare,
    )


def _bare_closing(render: RenderCalls, ends: Sequence[str]) -> str:
    text = _rendered(render, [(_NAME.format(0), {})])
    return _until(text.partition(_NAME.format(0))[2], ends) if text else ""


def _pieces(row: ToolCallFormat, render: RenderCalls, calls: Sequence[Call]) -> list[str] | None:
    """The texts between names and arguments, or names, keys and values; None: not written."""
    text = _rendered(render, calls)
    if text is None:
        return None
    pieces, at = [], 0
    for pattern in _patterns(row, calls):
        if (match := re.compile(pattern).search(text, at)) is None:
            return None
        pieces.append(text[at : match.start()])
        at = match.end()
    return [*pieces, text[at:]]


def _patterns(row: ToolCallFormat, calls: Sequence[Call]) -> Iterator[str]:
    for name, arguments in calls:
        yield name
        if row.has_json_arguments:
            items = (rf'"{key}":\s*"{value}"' for key, value in arguments.items())
            yield r"\{\s*" + r",\s*".join(items) + r"\s*\}"
        else:
            yield from itertools.chain.from_iterable(arguments.items())


def _rendered(render: RenderCalls, calls: Sequence[Call]) -> str | None:
    try:
        return render(calls)
    except Exception:  # of templates that refuse several calls, or calls at all
        return None


def _until(text: str, ends: Sequence[str]) -> str:
    """A text before the first token that ends a turn, without the space that follows calls."""
    positions = [at for end in ends if (at := text.find(end)) >= 0]
    return text[: min(positions)] if positions else text.rstrip()
