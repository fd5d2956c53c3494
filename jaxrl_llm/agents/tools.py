"""Tools: typed Python functions with docstrings, and what their results become."""

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.algorithms import lookup
from jaxrl_llm.data.encoding import special_tokens as special_tokens
from jaxrl_llm.data.encoding import with_spaces
from jaxrl_llm.text import clean_text

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
    signature = inspect.signature(tool)
    taken = {name: hidden[name] for name in signature.parameters if name in hidden}
    shown = [each for name, each in signature.parameters.items() if name not in taken]

    @functools.wraps(tool)
    def call(*args: Any, **arguments: Any) -> Any:
        return tool(*args, **{**arguments, **taken})

    call.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return call


def as_text(value: Any) -> str:
    """Returns what the model is told of a result: a text as it is, other values as JSON.

    TypeError for what is neither, for example bytes.
    """
    if isinstance(value, str):
        return clean_text(value)
    if hasattr(value, "tolist"):
        value = value.tolist()
    try:
        return clean_text(json.dumps(value, ensure_ascii=False))
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


def harmless(text: str, special: re.Pattern[str] | None) -> str:
    """Returns a text in which no special token of the tokenizer is left: a space breaks each.

    What a tool answers could otherwise end its turn and speak for others.
    """
    return text if special is None else with_spaces(text, special)
