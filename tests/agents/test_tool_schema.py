"""Schemas of tools whose arguments are TypedDicts, dataclasses and pydantic models."""

import dataclasses
import enum
import inspect
import re
from typing import Annotated, Literal, Optional, Required, TypedDict

import pydantic
import pytest
import typing_extensions
from transformers.utils import get_json_schema

from jaxrl_llm.agents import tool_schema, tools
from jaxrl_llm.agents.tool_call_arguments import argument_value


class Place(TypedDict):
    city: str
    zip: int


@dataclasses.dataclass
class Window:
    first: int
    last: int = 9
    unit: Literal["day", "hour"] = "day"


class Query(pydantic.BaseModel):
    text: Annotated[str, pydantic.Field(description="Words.", max_length=10)]
    window: Window | None = None
    title: str = ""


class Node(pydantic.BaseModel):
    value: int
    children: list["Node"] = []


class Color(enum.Enum):
    RED = "red"


def find(query: Query, places: list[Place], limit: int = 3, color: Color = Color.RED) -> str:
    """Finds things.

    Args:
        query: What to find.
        places: Where.
        limit: How many.
        color: Of what color.
    """
    assert isinstance(query, Query) and (query.window is None or isinstance(query.window, Window))
    return f"{query.text} {query.window} {places} {limit} {color}"


def size(root: Node, window: Window | None = None) -> int:
    """Counts nodes.

    Args:
        root: The root.
        window: When.
    """
    return 1 + sum(size(child) for child in root.children)


def test_nested_schemas():
    described = tool_schema.schema(find)["function"]
    assert described["name"] == "find" and described["description"] == "Finds things."
    parameters = described["parameters"]
    assert parameters["required"] == ["query", "places"] and "$defs" not in parameters
    properties = parameters["properties"]
    assert properties["limit"] == {"type": "integer", "description": "How many."}
    assert properties["color"]["enum"] == ["red"]
    assert properties["places"] == {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}},
            "required": ["city", "zip"],
        },
        "description": "Where.",
    }
    query = properties["query"]
    assert query["required"] == ["text"] and query["description"] == "What to find."
    assert query["properties"]["text"] == {
        "type": "string",
        "description": "Words.",
        "maxLength": 10,
    }
    assert query["properties"]["title"] == {"default": "", "type": "string"}
    window, none = query["properties"]["window"]["anyOf"]
    assert none == {"type": "null"} and window["required"] == ["first"]
    assert window["properties"]["unit"]["enum"] == ["day", "hour"]


def test_a_class_that_contains_itself_is_a_definition():
    parameters = tool_schema.schema(size)["function"]["parameters"]
    assert parameters["properties"]["root"] == {
        "$ref": "#/$defs/Node",
        "description": "The root.",
    }
    children = parameters["$defs"]["Node"]["properties"]["children"]
    assert children["items"] == {"$ref": "#/$defs/Node"}
    tree = {"value": 1, "children": [{"value": 2}, {"value": 3}]}
    assert size(**tool_schema.convert_arguments(size, {"root": tree})) == 3
    # A format without quotes types its texts by the same schema.
    root = parameters["properties"]["root"]
    assert argument_value('{"value": 1}', root, parameters) == {"value": 1}
    assert argument_value("null", parameters["properties"]["window"], parameters) is None


def test_arguments_are_instances():
    query = {"text": "cat", "window": {"first": "3"}}
    arguments = {"query": query, "places": [{"city": "A", "zip": 1}], "limit": 2}
    given = tool_schema.convert_arguments(find, arguments)
    assert given["query"].window == Window(3) and given["limit"] == 2
    assert find(**given).startswith("cat Window(first=3, last=9, unit='day') [{'city': 'A'")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"query": {}}, "query.text: Field required"),
        ({"query": "cat"}, "query: Input should be a valid dictionary"),
        ({"query": {"text": "a" * 11}}, "query.text: String should have at most 10"),
        ({"places": [{"city": "A"}]}, "places.0.zip: Field required"),
        ({"query": {"text": "a", "window": {"first": 1, "unit": "year"}}}, "query.window.unit"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        tool_schema.convert_arguments(find, arguments)


def test_typed_dicts_in_every_annotation():
    class Part(TypedDict, total=False):
        place: Required[Place]
        note: str | None

    def go(
        a: Part,
        b: dict[str, Part],
        c: Part | None,
        d: Annotated[list[Part], "said"],
        e: Optional[Part],  # noqa: UP045
    ) -> str:
        """Goes.

        Args:
            a: One.
            b: Two.
            c: Three.
            d: Four.
            e: Five.
        """
        return ""

    properties = tool_schema.schema(go)["function"]["parameters"]["properties"]
    part = properties["a"]
    assert part["required"] == ["place"] and set(part["properties"]) == {"place", "note"}
    bare = {key: value for key, value in part.items() if key != "description"}
    assert properties["b"]["additionalProperties"] == properties["d"]["items"] == bare
    assert properties["c"]["anyOf"] == properties["e"]["anyOf"] == [bare, {"type": "null"}]
    place = {"place": {"city": "A", "zip": "7"}}
    assert tool_schema.convert_arguments(go, {"d": [place]}) == {
        "d": [{"place": {"city": "A", "zip": 7}}]
    }


def test_plain_tools_are_as_they_were():
    def plain(a: int, b: list[str], c: dict[str, int] | None = None) -> str:
        """Does.

        Args:
            a: One.
            b: Two.
            c: Three.
        """
        return ""

    assert tool_schema.schema(plain) == get_json_schema(plain)
    given = {"a": "not an int", "b": 3}
    assert tool_schema.convert_arguments(plain, given) == given


def test_arguments_without_names_are_refused():
    def many(*numbers: int) -> int:
        """Adds.

        Args:
            numbers: These.
        """
        return sum(numbers)

    def named(**numbers: int) -> int:
        """Adds.

        Args:
            numbers: These.
        """
        return sum(numbers.values())

    for tool, stars in ((many, "*"), (named, "**")):
        with pytest.raises(ValueError) as raised:
            tool_schema.schema(tool)
        said = str(raised.value)
        assert f"tool {tool.__name__!r}: {stars}numbers has no names" in said
        assert "write an ordinary argument for each value" in said

    def positional(number: int, /) -> int:
        """Adds.

        Args:
            number: This.
        """
        return number

    with pytest.raises(ValueError, match="tool 'positional': number is positional only, but a"):
        tool_schema.schema(positional)


def with_types(**annotations):
    """A tool with these annotations."""

    def tool():
        raise NotImplementedError

    lines = "".join(f"\n    {name}: {name.upper()}." for name in annotations)
    tool.__doc__ = f"Does.\n\nArgs:{lines}\n"
    tool.__annotations__ = {**annotations, "return": str}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    tool.__signature__ = inspect.Signature(
        [inspect.Parameter(name, kind, annotation=each) for name, each in annotations.items()]
    )
    return tool


def test_enums_become_members():
    tool = with_types(a=Color, b=list[Color] | None, c=Literal["x", "y"])
    assert tool_schema.schema(tool) == get_json_schema(tool)
    given = {"a": "red", "b": ["red"], "c": "x"}
    assert tool_schema.convert_arguments(tool, given) == {
        "a": Color.RED,
        "b": [Color.RED],
        "c": "x",
    }
    assert tool_schema.convert_arguments(tool, {"b": None}) == {"b": None}
    with pytest.raises(ValueError, match="a: Input should be 'red'"):
        tool_schema.convert_arguments(tool, {"a": "blue"})


def test_metadata_and_foreign_typed_dicts():
    class Tree(typing_extensions.TypedDict):
        kids: list["Tree"]

    class Data(pydantic.BaseModel):
        title: dict[str, str] = {"title": "a"}
        default: int = 3

    class Square(pydantic.BaseModel):
        kind: Literal["square"]

    class Circle(pydantic.BaseModel):
        kind: Literal["circle"]

    Tree.__annotations__["kids"] = list[Tree]  # no name of a module
    shape = Annotated[Square | Circle, pydantic.Field(discriminator="kind")]
    short = Annotated[list[Place], pydantic.Field(max_length=1), {"unhashable": 1}]
    tool = with_types(tree=Tree, data=Data, shape=shape, short=short)
    parameters = tool_schema.schema(tool)["function"]["parameters"]
    properties = parameters["properties"]
    assert properties["tree"] == {"$ref": "#/$defs/Tree", "description": "TREE."}
    kids = parameters["$defs"]["Tree"]["properties"]["kids"]
    assert kids == {"type": "array", "items": {"$ref": "#/$defs/Tree"}}
    assert properties["data"]["properties"] == {
        "title": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "default": {"title": "a"},
        },
        "default": {"type": "integer", "default": 3},
    }
    assert properties["shape"].keys() == {"oneOf", "description"}  # no name of what is inlined
    assert properties["short"]["maxItems"] == 1
    given = {"shape": {"kind": "circle"}, "short": [{"city": "A", "zip": 1}], "tree": {"kids": []}}
    arguments = tool_schema.convert_arguments(tool, given)
    assert arguments == {**given, "shape": Circle(kind="circle")}
    with pytest.raises(ValueError, match="short: List should have at most 1 item"):
        tool_schema.convert_arguments(tool, {"short": given["short"] * 2})


def test_hidden_arguments_are_neither_shown_nor_asked_for():
    def secret(query: Query, key: str) -> str:
        """Finds.

        Args:
            query: What.
            key: Hidden.
        """
        return f"{type(query).__name__} {key}"

    (tool,) = tools.tool_functions(secret, {"execute_kwargs": {"key": "k"}}).values()
    given = tool_schema.convert_arguments(tool, {"query": {"text": "a"}})
    assert tool(**given) == "Query k"
    assert set(tool_schema.schema(tool)["function"]["parameters"]["properties"]) == {"query"}
