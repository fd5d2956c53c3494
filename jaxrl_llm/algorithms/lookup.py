"""How a name in the config becomes a function, and how that function gets its arguments.

A function of the tables in this folder and a user's own are treated alike: each names
as parameters just the arrays and numbers that it needs.
"""

import functools
import importlib
import importlib.util
import inspect
import pathlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from jaxrl_llm.errors import UserError


class FunctionError(UserError, TypeError):
    """A user's function that asks for what there is not, or returns something else."""


@functools.lru_cache
def _module_from_file(path: pathlib.Path, modified_ns: int) -> ModuleType:
    """Runs the file once per modification: the same function object keeps jit caches warm."""
    spec = importlib.util.spec_from_file_location(f"user_{path.stem}_{modified_ns}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _module(name: str, location: str) -> ModuleType:
    if location.endswith(".py"):
        path = pathlib.Path(location).expanduser().resolve()
        if not path.is_file():
            raise FileNotFoundError(
                f"{name!r}: no file {path}; give it absolute or relative to {pathlib.Path.cwd()}"
            )
        return _module_from_file(path, path.stat().st_mtime_ns)
    try:
        return importlib.import_module(location)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name!r}: cannot import module {location!r} ({error});"
            " install it, or use 'path/file.py:function'"
        ) from error


def resolve(
    name: str, table: Mapping[str, Callable[..., Any]], what: str = "function"
) -> Callable[..., Any]:
    """Returns the function that `name` stands for.

    Args:
      name: A key of `table`, `package.module:function` or `path/file.py:function`.
      table: The known functions.
      what: What is looked for, in the words of an error.

    Raises:
      ValueError: `name` is neither a key nor an import path.
      FileNotFoundError: There is no such file.
      ModuleNotFoundError: There is no such module.
      AttributeError: The module has no such function.
      TypeError: It is there, but cannot be called.

    Example:
      >>> resolve("double", {"double": lambda x: 2 * x})(4)
      8
      >>> resolve("operator:add", {})(1, 2)
      3
    """
    if name in table:
        return table[name]
    location, separator, attribute = name.rpartition(":")
    if not separator or not location or not attribute:
        raise ValueError(
            f"unknown {what} {name!r}; known: {', '.join(table)};"
            " or your own function as 'package.module:function' or 'path/file.py:function'"
        )
    module = _module(name, location)
    if not hasattr(module, attribute):
        public = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise AttributeError(
            f"{name!r}: {location} has no {attribute!r}; its functions: {', '.join(public)}"
        )
    function = getattr(module, attribute)
    if not callable(function):
        raise TypeError(f"{name!r} is a {type(function).__name__}, not a function; name a function")
    return function


def call_by_name(function: Callable[..., Any], available: Mapping[str, Any], where: str) -> Any:
    """Returns `function` called with those of the `available` values that it names.

    A parameter that is not available keeps its default; `**rest` takes everything.

    Args:
      function: What to call.
      available: Values by name.
      where: Who asked for the function, to begin an error with.

    Raises:
      FunctionError: A parameter without default that is not available, or positional-only.

    Example:
      >>> call_by_name(lambda b, a: a - b, {"a": 5, "b": 2, "unused": 0}, "example")
      3
    """
    arguments = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            return function(**available)
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise FunctionError(
                f"{where}: parameter {name!r} is positional-only, but arguments are passed by"
                " name; remove the '/' from the signature"
            )
        if name in available:
            arguments[name] = available[name]
        elif parameter.default is inspect.Parameter.empty:
            raise FunctionError(
                f"{where}: parameter {name!r} is not available; available:"
                f" {', '.join(sorted(available))}; rename it or give it a default"
            )
    return function(**arguments)
