"""Grammars of tool calls in the model's own format, as its chat template writes it.

The template renders invented calls; the texts around their names, arguments and values are those of
every call. A row of `FORMATS` says whether arguments are JSON or texts between marks, and with
which mark a call begins.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

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
    starts: list[str] = []
    following: list[str] = []
    for number, tool in enumerate(tools):
        first = texts.opening + tool.name
        # What is written may go on behind the name.
        start, behind = first[len(written) :], written[len(first) :]
        if not (first.startswith(written) or written.startswith(first)):
            raise CallGrammarError("the chat template begins its calls in several ways")
        write = _json_call if row.has_json_arguments else _marked_call
        for target, name, skipped in ((starts, start, behind), (following, tool.name, "")):
            target.append(f"{literal(name)} body_{number}_{len(skipped)}")
            rules += write(number, tool, texts, row, literal, skipped)
        parts += _argument_parts(number, tool, row)
        rules += [] if row.has_json_arguments else _value_rules(number, tool, row, literal)
    closing = literal(texts.closing.removeprefix(row.value_end))
    separator = literal(texts.separator.removeprefix(row.value_end))
    repeat = f" ({separator} next_call)*" if texts.separator and not only_one else ""
    rules += [f"calls: first_call{repeat} {closing}", f"first_call: {' | '.join(starts)}"]
    rules += [f"next_call: {' | '.join(following)}"] if repeat else []
    return CallGrammar(tuple(dict.fromkeys(rules)), tuple(parts))


def _json_call(
    number: int,
    tool: AllowedTool,
    texts: _Texts,
    row: ToolCallFormat,
    literal: Callable[[str], str],
    skipped: str,
) -> list[str]:
    """A call behind its name and `skipped`, with its arguments as one JSON object."""
    if not texts.before_arguments.startswith(skipped):
        raise CallGrammarError("the chat template begins its calls in several ways")
    between = literal(texts.before_arguments[len(skipped) :])
    return [f"body_{number}_{len(skipped)}: {between} @arguments_{number}"]


def _marked_call(
    number: int,
    tool: AllowedTool,
    texts: _Texts,
    row: ToolCallFormat,
    literal: Callable[[str], str],
    skipped: str,
) -> list[str]:
    """A call behind its name, with its arguments as texts between marks.

    They come in the order of the schema's properties. A rule for each says what may follow those
    before it: the next ones, up to the first that is required, and if none is, also the end.
    """
    properties = list(_properties(tool))
    required = tool.schema.get("required") or ()
    head = texts.bare_closing.removesuffix(texts.closing.removeprefix(row.value_end))
    next_key = texts.value_to_key.removeprefix(row.value_end)
    if skipped:
        raise CallGrammarError("the chat template begins its calls in several ways")
    rules = []
    for at in range(len(properties) + 1):
        options = []
        for following in range(at, len(properties)):
            lead = next_key if at else texts.before_arguments
            key = lead + properties[following] + texts.key_to_value
            value = f"value_{number}_{following} rest_{number}_{following + 1}"
            options.append(f"{literal(key)} {value}")
            if properties[following] in required:
                break
        else:
            options.append(literal("" if at else head))
        name = f"rest_{number}_{at}" if at else f"body_{number}_0"
        rules.append(f"{name}: {' | '.join(options)}")
    return rules


def _value_rules(
    number: int, tool: AllowedTool, row: ToolCallFormat, literal: Callable[[str], str]
) -> list[str]:
    """The values of arguments and the marks behind them."""
    rules = []
    for at, (key, schema) in enumerate(_properties(tool).items()):
        value, end = f"value_{number}_{at}", literal(row.value_end)
        match _value_kind(tool, key, schema):
            case "fixed":
                texts = " | ".join(map(literal, _fixed_texts(schema)))
                rules.append(f"{value}: ({texts}) {end}")
            case "text":
                rules.append(f"{value}[lazy]: /(.|\\n)*/ {end}")
            case "json":
                rules.append(f"{value}: @argument_{number}_{at} {end}")
    return rules


def _argument_parts(
    number: int, tool: AllowedTool, row: ToolCallFormat
) -> list[tuple[str, Mapping[str, Any]]]:
    """The JSON schemas that a tool's rules name."""
    if row.has_json_arguments:
        return [(f"arguments_{number}", {"type": "object", **tool.schema})]
    shared = {key: tool.schema[key] for key in ("$defs", "definitions") if key in tool.schema}
    return [
        (f"argument_{number}_{at}", {**schema, **shared})
        for at, (key, schema) in enumerate(_properties(tool).items())
        if _value_kind(tool, key, schema) == "json"
    ]


def _properties(tool: AllowedTool) -> Mapping[str, Any]:
    properties = tool.schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _value_kind(tool: AllowedTool, key: str, schema: Any) -> Literal["fixed", "text", "json"]:
    """How an argument is written between marks: one of some texts, any text, or JSON."""
    if _fixed_texts(schema):
        return "fixed"
    types = accepted_types(schema, tool.schema)
    if types and "string" not in types:
        return "json"
    if keyword := next((each for each in _TEXT_KEYWORDS if each in (schema or {})), ""):
        raise CallGrammarError(
            f"{tool.name}.{key}: this model writes texts without quotes, so that {keyword!r} cannot"
            " be followed; leave it out"
        )
    return "text"


def _fixed_texts(schema: Any) -> list[str]:
    """The texts of a schema that lists its values; [] if it does not."""
    if not isinstance(schema, Mapping):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return []
    return [each if isinstance(each, str) else json.dumps(each) for each in values]


def _call_texts(
    row: ToolCallFormat, render: RenderCalls, ends: Sequence[str], begins_at_mark: bool
) -> _Texts:
    """The texts that a chat template writes around calls; `CallGrammarError` without any."""
    arguments = [{_KEY.format(n + i): _VALUE.format(n + i) for i in (0, 1)} for n in (0, 2)]
    calls = [(_NAME.format(number), each) for number, each in enumerate(arguments)]
    two, texts = _pieces(row, render, calls), _pieces(row, render, calls[:1])
    if texts is None:
        raise CallGrammarError("the chat template of this model writes no calls")
    opening, *inner, closing = texts
    if begins_at_mark and row.call_mark:
        opening = opening[opening.rfind(row.call_mark) :]
    separator = ""
    # The end of two calls may differ from that of one: then only one can be followed.
    if two is not None and _before_end(two[-1], ends) == _before_end(closing, ends):
        separator = two[len(inner) + 1]
    before_arguments, key_to_value, value_to_key = [*inner, "", ""][:3]
    closing = _before_end(closing, ends)
    ending_values = value_to_key, separator or row.value_end, closing
    if not all(text.startswith(row.value_end) for text in ending_values):
        raise CallGrammarError("the chat template of this model writes no such calls")
    bare = "" if row.has_json_arguments else _bare_closing(render, ends)
    return _Texts(opening, before_arguments, key_to_value, value_to_key, separator, closing, bare)


def _bare_closing(render: RenderCalls, ends: Sequence[str]) -> str:
    text = _turn_text(render, [(_NAME.format(0), {})])
    return _before_end(text.partition(_NAME.format(0))[2], ends) if text else ""


def _pieces(row: ToolCallFormat, render: RenderCalls, calls: Sequence[Call]) -> list[str] | None:
    """The texts between names and arguments, or names, keys and values; None: not written."""
    text = _turn_text(render, calls)
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


def _turn_text(render: RenderCalls, calls: Sequence[Call]) -> str | None:
    try:
        return render(calls)
    except Exception:  # of templates that refuse several calls, or calls at all
        return None


def _before_end(text: str, ends: Sequence[str]) -> str:
    """A text before the first token that ends a turn, without the space that follows calls."""
    positions = [at for end in ends if (at := text.find(end)) >= 0]
    return text[: min(positions)] if positions else text.rstrip()
