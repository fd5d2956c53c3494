"""Resolution of function names in the config, and calls of functions by parameter name.

Built-in and user functions declare their inputs as parameters.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import pathlib
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Annotated, Any

from jaxrl_llm.config.validation import Range
from jaxrl_llm.errors import UserError


class FunctionError(UserError, TypeError):
    """A user's function asks for an unavailable input or returns an invalid result."""


@functools.lru_cache
def _module_from_file(path: pathlib.Path, modified_ns: int) -> ModuleType:
    """Runs the file once per modification: the same function object keeps jit caches warm."""
    spec = importlib.util.spec_from_file_location(f"user_{path.stem}_{modified_ns}", path)
    assert spec and spec.loader, "the name ends with .py"
    module = importlib.util.module_from_spec(spec)
    with _siblings_importable(path.parent):
        spec.loader.exec_module(module)
    return module


# The folder of each module that a user's file has imported from beside itself, by its name.
_sibling_folders: dict[str, pathlib.Path] = {}


@contextlib.contextmanager
def _siblings_importable(folder: pathlib.Path) -> Iterator[None]:
    """Makes modules beside a file importable, as if the file were run as a script.

    First in the search path while the file runs, so that `import helpers` is the one beside it;
    then last, for imports inside functions, so that no later import of a library can meet a file
    of the user's. A module of the same name from another user's folder makes way.
    """
    for name, other in list(_sibling_folders.items()):
        is_here = (folder / f"{name}.py").is_file() or (folder / name).is_dir()
        if other != folder and is_here:
            for loaded in [key for key in sys.modules if key.partition(".")[0] == name]:
                del sys.modules[loaded]
            del _sibling_folders[name]
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # a file may have been written just now
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        for name in {key.partition(".")[0] for key in set(sys.modules) - before}:
            origin = getattr(sys.modules.get(name), "__file__", None)
            if origin and folder in pathlib.Path(origin).parents:
                _sibling_folders[name] = folder


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
    """Resolves a function by name; errors call it `what`.

    The name is a key of `table`, `package.module:function` or `path/file.py:function`. Raises
    ValueError for another form, FileNotFoundError, ModuleNotFoundError, AttributeError, or
    TypeError for what is no function.

    >>> resolve("double", {"double": lambda x: 2 * x})(4), resolve("operator:add", {})(1, 2)
    (8, 3)
    """
    if name in table:
        return table[name]
    location, separator, attribute = name.rpartition(":")
    if not (separator and location and attribute):
        raise ValueError(
            f"unknown {what} {name!r}; known: {', '.join(table)};"
            " or your own function as 'package.module:function' or 'path/file.py:function'"
        )
    module = _module(name, location)
    if not hasattr(module, attribute):
        public = {key: f for key, f in vars(module).items() if callable(f) and key[0] != "_"}
        own = [key for key, f in public.items() if getattr(f, "__module__", "") == module.__name__]
        functions = ", ".join(own or public)  # not those that it imports, if it has its own
        raise AttributeError(
            f"{name!r}: {location} has no {attribute!r}; its functions: {functions}"
        )
    function = getattr(module, attribute)
    if not callable(function):
        raise TypeError(f"{name!r} is a {type(function).__name__}, not a function; name a function")
    return function


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The parameters of a function, which name its inputs."""

    names: frozenset[str]
    required: tuple[str, ...]  # those without a default
    takes_rest: bool  # it has **rest, which gets whatever there is


@functools.lru_cache(maxsize=256)
def parameters_of(function: Callable[..., Any]) -> Parameters:
    """Inspects the parameters of a function; a positional-only one is a FunctionError.

    >>> parameters_of(lambda rewards, values=None: rewards).required
    ('rewards',)
    """
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise FunctionError(
                f"parameter {parameter.name!r} is positional-only, but arguments are passed by"
                " name; remove the '/' from the signature"
            )
    rest = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    named = [p for p in parameters if p.kind not in rest]
    return Parameters(
        names=frozenset(p.name for p in named),
        required=tuple(p.name for p in named if p.default is inspect.Parameter.empty),
        takes_rest=any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
    )


@dataclasses.dataclass(frozen=True)
class Hyperparameter:
    """A number in the signature of a function, which a config may set."""

    kind: type[float] | type[int]
    default: float
    range: Range

    def problems(self, value: float) -> Iterator[str]:
        """Yields what is wrong with a value, in the words of a config field's errors."""
        if self.kind is int and not float(value).is_integer():
            yield f"expected int, got {value}"
        else:
            yield from self.range.problems(value)


@functools.lru_cache(maxsize=256)
def hyperparameters(function: Callable[..., Any]) -> Mapping[str, Hyperparameter]:
    """The parameters of a function whose default is a number, by name.

    Their type and range come from an annotation `Annotated[float, Range("(0, 1]")]`; without one,
    the type is that of the default and every number but NaN is allowed. FunctionError if such an
    annotation is a text that cannot be evaluated.

    >>> def loss(advantages, tau: Annotated[float, Range("(0, 1]")] = 0.5, power=2): ...
    >>> {name: (str(each.range), each.default) for name, each in hyperparameters(loss).items()}
    {'tau': ('in (0, 1]', 0.5), 'power': ('in [-inf, inf]', 2)}
    """
    return {
        parameter.name: _hyperparameter(function, parameter)
        for parameter in inspect.signature(function).parameters.values()
        if type(parameter.default) in (float, int)
    }


def _hyperparameter(function: Callable[..., Any], parameter: inspect.Parameter) -> Hyperparameter:
    hint = parameter.annotation
    if isinstance(hint, str):  # alone: those of arrays may name what is imported for types only
        try:
            hint = eval(hint, getattr(inspect.unwrap(function), "__globals__", {}))
        except Exception as error:
            raise FunctionError(
                f"the annotation {hint!r} of {parameter.name!r} cannot be evaluated"
                f" ({type(error).__name__}: {error}); import what it names, or remove it"
            ) from error
    ranges = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Range)]
    kind = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    return Hyperparameter(
        kind=kind if kind in (float, int) else type(parameter.default),
        default=parameter.default,
        range=ranges[0] if ranges else Range("[-inf, inf]"),
    )


def call_by_name(
    function: Callable[..., Any],
    available: Mapping[str, Any],
    where: str,
    settings: Mapping[str, float] = {},
) -> Any:
    """Calls `function` with those of the `available` values that its parameters name.

    A parameter that is not available keeps its default, or is a FunctionError if it has none;
    `**rest` takes everything. `where`, with which errors begin, is the setting of the function.
    `settings` replace defaults of its `hyperparameters`; others, and names of available values,
    are ignored.

    >>> call_by_name(lambda b, a: a - b, {"a": 5, "b": 2, "unused": 0}, "example")
    3
    >>> call_by_name(lambda a, scale=1.0: scale * a, {"a": 5}, "example", {"scale": 2})
    10.0
    """
    try:
        reads = parameters_of(function)
        known = hyperparameters(function) if settings else {}
    except FunctionError as error:
        raise FunctionError(f"{where}: {error}") from None
    numbers = {name: known[name].kind(settings[name]) for name in known.keys() & settings.keys()}
    available = {**numbers, **available}
    for name in reads.required:
        if name not in available:
            raise FunctionError(
                f"{where}: parameter {name!r} is not available; available:"
                f" {', '.join(sorted(available))}; rename it or give it a default"
            )
    if reads.takes_rest:
        return function(**available)
    return function(**{name: available[name] for name in reads.names if name in available})
