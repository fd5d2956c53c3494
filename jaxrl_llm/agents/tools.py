"""Tools: typed Python functions with docstrings; their lookup and the text of their results."""

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

# Built-in tools. A class is instantiated for each episode; its public methods are the tools.
BUILTIN_TOOL_PATHS: Mapping[str, str] = {
    "calculator": "jaxrl_llm.agents.builtin_tools:calculator",
    "python": "jaxrl_llm.agents.builtin_tools:Python",
    "search": "jaxrl_llm.agents.builtin_tools:Search",
}


def resolve_tool(name: str) -> Any:
    """The function or class of a key of `BUILTIN_TOOL_PATHS` or of an import path.

    Errors of `lookup.resolve` and of the module's import pass through.
    """
    return lookup.resolve(BUILTIN_TOOL_PATHS.get(name, name), {}, "tool")


def tool_functions(function_or_class: Any, kwargs: Mapping[str, Any] = {}) -> dict[str, Tool]:
    """The tools, by name: the function itself, or the public methods of a class instance.

    `kwargs` is an entry of verl's column `tools_kwargs`: `create_kwargs` for the class,
    `execute_kwargs` for each call, which the model neither sees nor passes.
    """
    execute_kwargs = dict(kwargs.get("execute_kwargs") or {})
    functions_by_name: dict[str, Tool] = {}
    if inspect.isclass(function_or_class):
        instance = function_or_class(**(kwargs.get("create_kwargs") or {}))
        methods = inspect.getmembers(instance, inspect.ismethod)
        functions_by_name = {name: method for name, method in methods if not name.startswith("_")}
    else:
        functions_by_name = {function_or_class.__name__: function_or_class}
    return (
        {name: _with_arguments(tool, execute_kwargs) for name, tool in functions_by_name.items()}
        if execute_kwargs
        else functions_by_name
    )


def _with_arguments(tool: Tool, fixed_kwargs: Mapping[str, Any]) -> Tool:
    signature = inspect.signature(tool)
    fixed_arguments = {
        name: fixed_kwargs[name] for name in signature.parameters if name in fixed_kwargs
    }
    visible_parameters = [
        parameter for name, parameter in signature.parameters.items() if name not in fixed_arguments
    ]

    @functools.wraps(tool)
    def call(*args: Any, **arguments: Any) -> Any:
        return tool(*args, **{**arguments, **fixed_arguments})

    call.__signature__ = signature.replace(parameters=visible_parameters)  # type: ignore[attr-defined]
    return call


def result_text(value: Any) -> str:
    """The text of a result for the model: a string unchanged, other values as JSON.

    TypeError for other values, for example bytes.
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


def truncate_text(text: str, limit: int, side: str) -> str:
    """The text truncated to `limit` characters, with a mark where it was cut.

    >>> truncate_text("abcdefgh", 4, "middle")
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


def break_special_tokens(text: str, special: re.Pattern[str] | None) -> str:
    """The text with a space inside each special token of the tokenizer.

    Otherwise the output of a tool could end its turn and impersonate other roles.
    """
    return text if special is None else with_spaces(text, special)
