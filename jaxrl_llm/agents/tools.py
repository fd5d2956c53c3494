"""Tools: typed Python functions with docstrings, and what their results become."""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jaxrl_llm.algorithms import lookup

if TYPE_CHECKING:  # takes a second, and processes of episodes have no tokenizer
    from transformers import PreTrainedTokenizerBase

Tool = Callable[..., Any]

# A class is made anew for each episode; its public methods are the tools.
READY: Mapping[str, str] = {
    "calculator": "jaxrl_llm.agents.ready:calculator",
    "python": "jaxrl_llm.agents.ready:Python",
    "search": "jaxrl_llm.agents.ready:Search",
}


def found(name: str) -> Any:
    """Returns the function or class of a key of `READY` or of an import path.

    Raises what `lookup.resolve`, or the module when it is imported, raises.
    """
    return lookup.resolve(READY.get(name, name), {}, "tool")


def functions(made: Any, kwargs: Mapping[str, Any] = {}) -> dict[str, Tool]:
    """Returns the tools of a function, itself, or of a class: an instance's public methods.

    `kwargs` are those of verl's column `tools_kwargs`: `create_kwargs` for the class,
    `execute_kwargs` for each call, which the model neither sees nor gives.
    """
    hidden = dict(kwargs.get("execute_kwargs") or {})
    all_of: dict[str, Tool] = {}
    if inspect.isclass(made):
        instance = made(**(kwargs.get("create_kwargs") or {}))
        methods = inspect.getmembers(instance, inspect.ismethod)
        all_of = {name: method for name, method in methods if not name.startswith("_")}
    else:
        all_of = {made.__name__: made}
    return {name: _with(tool, hidden) for name, tool in all_of.items()} if hidden else all_of


def _with(tool: Tool, hidden: Mapping[str, Any]) -> Tool:
    taken = {name: hidden[name] for name in inspect.signature(tool).parameters if name in hidden}
    return lambda **arguments: tool(**{**arguments, **taken})


def schema(tool: Tool, hidden: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Returns what a chat template shows of a tool, as `transformers.utils.get_json_schema` does.

    ValueError if it has no docstring, or an argument without type or description.
    """
    from transformers.utils import get_json_schema  # takes a second; only where schemas are made

    given = getattr(tool, "json_schema", None)  # of an adapter
    if given is not None:
        return given
    try:
        made = get_json_schema(tool)
    except Exception as error:  # of several kinds
        name = getattr(tool, "__name__", str(tool))
        rule = "a tool has a docstring with a line `name: what it is` under Args:, and types"
        raise ValueError(f"tool {name!r}: {error}; {rule}") from error
    return made


def as_text(value: Any) -> str:
    """Returns what the model is told of a result: a text as it is, other values as JSON.

    TypeError for what is neither, for example bytes.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if hasattr(value, "tolist"):
        value = value.tolist()
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        rule = "a tool returns a text, or what JSON can hold"
        raise TypeError(f"returned {type(value).__name__}; {rule}") from error


def shortened(text: str, limit: int, side: str) -> str:
    """Returns a text of at most `limit` characters and a mark where more were cut out.

    >>> shortened("abcdefgh", 4, "middle")
    'ab...(cut)...gh'
    """
    if len(text) <= limit:
        return text
    if side == "left":
        return f"(cut)...{text[len(text) - limit :]}"
    if side == "right":
        return f"{text[:limit]}...(cut)"
    tail = limit // 2
    return f"{text[: limit - tail]}...(cut)...{text[len(text) - tail :]}"


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern[str] | None:
    """Returns what finds a tokenizer's special tokens in a text; None if it has none."""
    texts = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    texts = {text for text in texts | set(tokenizer.all_special_tokens) if len(text) > 1}
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if texts else None


def harmless(text: str, special: re.Pattern[str] | None) -> str:
    """Returns a text in which no special token of the tokenizer is left: a space breaks each.

    What a tool answers could otherwise end its turn and speak for others.
    """
    if special is None:
        return text
    return special.sub(lambda m: f"{m[0][0]} {m[0][1:]}", text)
