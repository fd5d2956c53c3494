"""Arguments of tool calls that a model writes without quotes: their types come from schemas."""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl_llm.agents.tool_call_scanner import parse_json

# Tool -> JSON schema of its parameters.
Schemas = Mapping[str, Mapping[str, Any]]
_MAX_DEPTH = 16  # of references and alternatives in a schema
_NULLS = "null", "None"
_BOOLEANS = {"true": True, "True": True, "false": False, "False": False}  # as templates write them


def schemas_of(tools: Iterable[Mapping[str, Any]]) -> Schemas:
    """The schemas of tools as `transformers.utils.get_json_schema` describes these, by name."""
    functions = [tool["function"] for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}


def typed_arguments(name: str, texts: Mapping[str, str], schemas: Schemas) -> dict[str, Any]:
    """The values of the arguments of tool `name` that were written as texts."""
    schema = schemas.get(name, {})
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    return {key: argument_value(text, properties.get(key), schema) for key, text in texts.items()}


def argument_value(text: str, schema: Any, root: Mapping[str, Any] | None = None) -> Any:
    """The value that a text means for an argument with this schema.

    A text stays a text where the schema accepts one, unless it is a JSON value of another type that
    the schema accepts too. Without a schema it is a JSON value if it can be read as one.

    >>> optional = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    >>> [argument_value(text, optional) for text in ("123", "null")]
    ['123', None]
    >>> argument_value("123", {"type": "integer"}), argument_value("[1]", None)
    (123, [1])
    """
    types = accepted_types(schema, root or {})
    word = text.strip()
    if types == {"string"}:
        return text
    if "null" in types and word in _NULLS:
        return None
    if "boolean" in types and word in _BOOLEANS:
        return _BOOLEANS[word]
    value, _, problem = parse_json(text)
    if problem or ("string" in types and not types & _types_of(value) - {"string"}):
        return text
    return value


def accepted_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The types of JSON that a schema accepts, as it names them; empty if it does not tell.

    >>> sorted(accepted_types({"anyOf": [{"type": ["integer", "null"]}, {"enum": ["a"]}]}, {}))
    ['integer', 'null', 'string']
    """
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    types: set[str] = set()
    match schema.get("type"):
        case str() as name:
            types.add(name)
        case list() as names:
            types |= {name for name in names if isinstance(name, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(key)
        for each in alternatives if isinstance(alternatives, list) else ():
            types |= accepted_types(each, root, depth + 1)
    values = schema.get("enum")
    for value in [*(values if isinstance(values, list) else ()), *_constants(schema)]:
        types |= _types_of(value) if not schema.get("type") else set()
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        types |= accepted_types(target, root, depth + 1)
    if schema.get("nullable") is True:
        types.add("null")
    return frozenset(types)


def _constants(schema: Mapping[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else []


def _types_of(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case str():
            return {"string"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case list():
            return {"array"}
    return {"object"}
