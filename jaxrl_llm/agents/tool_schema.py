"""JSON schemas of tools that are typed Python functions, and the arguments such tools get.

Plain types (texts, numbers, lists, mappings, literals, enums) have the schema that transformers
makes. A parameter whose annotation holds a TypedDict, a dataclass or a pydantic model has the
nested schema that pydantic makes, and the function gets an instance of it.
"""

import dataclasses
import enum
import functools
import inspect
import operator
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.errors import check_package

_RULE = "a tool has a docstring with a line `name: what it is` under Args:, and types"
_UNNAMED: Mapping[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*{} has no names that a model could give",
    inspect.Parameter.VAR_KEYWORD: "**{} has no names that a model could give",
    inspect.Parameter.POSITIONAL_ONLY: "{} is positional only, but a model gives names",
}


def schema(tool: Callable[..., Any]) -> dict[str, Any]:
    """The description of a tool that a chat template shows, as transformers' `get_json_schema`.

    ValueError if the tool has no docstring, an argument without type or description, or `*args`.
    """
    from transformers.utils import get_json_schema  # takes a second: only where schemas are needed

    if (described := getattr(tool, "json_schema", None)) is not None:  # of an adapter
        return described
    try:
        for name, parameter in inspect.signature(tool).parameters.items():
            if problem := _UNNAMED.get(parameter.kind):
                raise TypeError(
                    f"{problem.format(name)}; write an ordinary argument for each value"
                )
        structured = _structured_types(tool)
        for annotation in _converted_types(tool).values():
            _type_adapter(annotation)  # fails before the run, if at all
        if not structured:
            return get_json_schema(tool)
        described = get_json_schema(_with_plain_types(tool, structured))
        parameters = described["function"]["parameters"]
        for name, annotation in structured.items():
            description = parameters["properties"][name]["description"]
            nested = _nested_schema(annotation, parameters)
            parameters["properties"][name] = {**nested, "description": description}
    except Exception as error:  # of several kinds
        name = getattr(tool, "__name__", str(tool))
        problem = getattr(error, "message", str(error))  # pydantic's, without an address
        raise ValueError(f"tool {name!r}: {problem}; {_RULE}") from error
    return described


def convert_arguments(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call as the tool's annotations ask for them.

    Mappings become TypedDicts, dataclasses and pydantic models where an annotation names one, and
    values become members of enums; all other arguments stay as they are. ValueError names what of
    an argument does not fit.
    """
    hints = _converted_types(tool)
    result = dict(arguments)
    for name in hints.keys() & arguments.keys():
        try:
            result[name] = _type_adapter(hints[name]).validate_python(arguments[name])
        except ValueError as error:
            own: Any = error
            faults = own.errors() if hasattr(own, "errors") else [{"loc": (), "msg": own}]
            texts = [".".join([name, *map(str, f["loc"])]) + f": {f['msg']}" for f in faults[:8]]
            raise ValueError("; ".join(texts)) from error
    return result


def _structured_types(tool: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of parameters that hold a TypedDict, a dataclass or a pydantic model."""
    return {name: hint for name, hint in _hints(tool).items() if _holds(hint, _is_structured)}


def _converted_types(tool: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of parameters whose values are not what JSON has, but instances."""
    return {name: hint for name, hint in _hints(tool).items() if _holds(hint, _is_converted)}


def _hints(tool: Callable[..., Any]) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(inspect.unwrap(tool), include_extras=True)
    except (TypeError, NameError):  # no function, or names that are not there at run time
        return {}
    shown = inspect.signature(tool).parameters  # without hidden ones
    return {name: hint for name, hint in hints.items() if name in shown}


def _holds(hint: Any, is_wanted: Callable[[Any], bool]) -> bool:
    """Whether an annotation, or one inside it, is wanted; values of a Literal are none."""
    if typing.get_origin(hint) is typing.Literal:
        return False
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Annotated:
        parts = parts[:1]
    return is_wanted(hint) or any(_holds(part, is_wanted) for part in parts)


def _is_structured(hint: Any) -> bool:
    if _is_typed_dict(hint) or hasattr(hint, "__pydantic_validator__"):
        return True
    is_class = isinstance(hint, type) and not isinstance(hint, types.GenericAlias)
    return is_class and dataclasses.is_dataclass(hint)


def _is_converted(hint: Any) -> bool:
    return _is_structured(hint) or (isinstance(hint, type) and issubclass(hint, enum.Enum))


def _is_typed_dict(hint: Any) -> bool:
    """Also for those of `typing_extensions`, which `typing.is_typeddict` does not know."""
    return isinstance(hint, type) and issubclass(hint, dict) and hasattr(hint, "__required_keys__")


def _with_plain_types(tool: Callable[..., Any], structured: Mapping[str, Any]) -> Callable:
    """A function like the tool whose structured parameters are mappings, for transformers."""
    hints = typing.get_type_hints(inspect.unwrap(tool))
    signature = inspect.signature(tool)
    plain = {name: dict if name in structured else hint for name, hint in hints.items()}

    def stand_in():
        raise NotImplementedError

    stand_in.__name__ = tool.__name__
    stand_in.__doc__ = inspect.getdoc(tool)
    stand_in.__annotations__ = {
        name: hint
        for name, hint in plain.items()
        if name == "return" or name in signature.parameters
    }
    stand_in.__signature__ = signature  # type: ignore[attr-defined]
    return stand_in


def _type_adapter(annotation: Any) -> Any:
    try:
        hash(annotation)
    except TypeError:  # metadata of an Annotated may be anything
        return _kept_type_adapter.__wrapped__(annotation)
    return _kept_type_adapter(annotation)


@functools.cache
def _kept_type_adapter(annotation: Any) -> Any:
    check_package("pydantic", "serve", "arguments of tools that are classes:")
    import pydantic

    return pydantic.TypeAdapter(_readable_by_pydantic(annotation))


def _readable_by_pydantic(hint: Any, inside: tuple[Any, ...] = ()) -> Any:
    """The annotation with TypedDicts of `typing_extensions`, which pydantic asks for up to 3.11."""
    if sys.version_info >= (3, 12) or hint in inside:
        return hint
    if typing.is_typeddict(hint):  # of `typing`
        from typing_extensions import TypedDict

        keys = {
            key: _readable_by_pydantic(value, (*inside, hint))
            for key, value in typing.get_type_hints(hint, include_extras=True).items()
        }
        needed = hint.__required_keys__
        keys = {
            key: value if key in needed else typing.NotRequired[value]
            for key, value in keys.items()
        }
        return TypedDict(hint.__name__, keys)  # type: ignore[operator]
    if not _holds(hint, _is_structured) or not (arguments := typing.get_args(hint)):
        return hint
    changed = tuple(_readable_by_pydantic(each, inside) for each in arguments)
    if isinstance(hint, types.UnionType):
        return functools.reduce(operator.or_, changed)
    if isinstance(hint, types.GenericAlias):
        return types.GenericAlias(typing.get_origin(hint), changed)
    return hint.copy_with(changed[:1] if typing.get_origin(hint) is typing.Annotated else changed)


_DATA = ("default", "const", "enum", "examples")  # keys of a schema whose values are no schemas
# Pydantic's titles repeat the names; a discriminator points to definitions, which are inlined.
_LEFT_OUT = ("title", "discriminator")


def _nested_schema(annotation: Any, root: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of an annotation, its definitions inlined.

    Those that contain themselves cannot be: they stay in `$defs` of the tool's parameters.
    """
    raw_schema = _type_adapter(annotation).json_schema()
    definitions = raw_schema.pop("$defs", {})

    def inlined(node: Any, inside: tuple[str, ...], are_names: bool = False) -> Any:
        if isinstance(node, list):
            return [inlined(item, inside) for item in node]
        if not isinstance(node, Mapping):
            return node
        if are_names:  # of properties, which may be called "title" or "default"
            return {key: inlined(value, inside) for key, value in node.items()}
        reference = node.get("$ref", "")
        if not reference.startswith("#/$defs/"):
            return {
                key: value if key in _DATA else inlined(value, inside, key == "properties")
                for key, value in node.items()
                if key not in _LEFT_OUT
            }
        name = reference.removeprefix("#/$defs/")
        others = {key: value for key, value in node.items() if key != "$ref"}
        if name in inside or _contains_itself(name, definitions):
            kept_definitions = root.setdefault("$defs", {})
            if name not in kept_definitions:
                kept_definitions[name] = {}  # while its own references are followed
                kept_definitions[name] = inlined(definitions[name], (*inside, name))
            return {"$ref": reference, **others}
        return {**inlined(definitions[name], (*inside, name)), **others}

    return inlined(raw_schema, ())


def _contains_itself(name: str, definitions: Mapping[str, Any]) -> bool:
    reached: set[str] = set()
    waiting = [definitions[name]]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, Mapping):
            waiting += node.values()
            target = str(node.get("$ref", "")).removeprefix("#/$defs/")
            if target in definitions and target not in reached:
                reached.add(target)
                waiting.append(definitions[target])
    return name in reached
