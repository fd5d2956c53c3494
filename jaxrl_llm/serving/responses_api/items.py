"""Items of OpenAI's Responses API, and the messages of a chat that they become."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Discriminator, Field, Tag

from jaxrl_llm.serving.chat import CalledFunction, Name
from jaxrl_llm.serving.fields import UNSUPPORTED, Strict
from jaxrl_llm.serving.protocol import FAIL_FAST, ApiError
from jaxrl_llm.serving.replies import Json
from jaxrl_llm.serving.responses_api import fields


class TextItemPart(Strict):
    """Text of a message or of a tool's output."""

    rules = fields.ITEM_PART
    type: Literal["input_text", "output_text"]
    text: str

    @property
    def chat_part(self) -> Json:
        return {"type": "text", "text": self.text}


class ImageItemPart(Strict):
    """An image as a data URL; nothing is downloaded."""

    rules = fields.ITEM_PART
    type: Literal["input_image"]
    image_url: str

    @property
    def chat_part(self) -> Json:
        return {"type": "image_url", "image_url": {"url": self.image_url}}


ItemPart = Annotated[TextItemPart | ImageItemPart, Field(discriminator="type")]
ItemContent = str | Annotated[list[ItemPart], FAIL_FAST]


class _Item(Strict):
    rules = fields.ITEM
    id: Name | None = None


class MessageItem(_Item):
    """A message of the dialogue; those of the assistant may be replies of this server."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent


class FunctionCallItem(_Item):
    """A call of a function in an earlier turn of the assistant."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str

    @pydantic.field_validator("arguments", mode="before")
    @classmethod
    def _check_arguments(cls, text: Any) -> Any:
        return CalledFunction.model_validate({"name": "function", "arguments": text}).arguments


class FunctionCallOutputItem(_Item):
    """The output of a function, for the call with the same `call_id`."""

    type: Literal["function_call_output"]
    call_id: Name
    name: str | None = None  # templates get the name in the call
    output: ItemContent


class SummaryPart(Strict):
    """A part of a summary of thinking."""

    rules = fields.ITEM_PART
    type: Literal["summary_text"]
    text: str


class ReasoningPart(Strict):
    """A part of the thinking itself."""

    rules = fields.ITEM_PART
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Item):
    """Thinking of an earlier turn: its contents or, without them, its summary."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryPart], FAIL_FAST] | None = None
    content: Annotated[list[ReasoningPart], FAIL_FAST] | None = None

    @property
    def thinking(self) -> str:
        if self.content:
            return "".join(part.text for part in self.content)
        return "\n\n".join(part.text for part in self.summary or ())


class ItemReference(_Item):
    """The id of an output item of a stored response, in place of the item."""

    type: Literal["item_reference"] = "item_reference"
    id: Name


_MODELS: Mapping[str, type[_Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ItemReference,
}


def _item_type(item: Any) -> str:
    """The tag of an item, in the union below; messages and references may have no type."""
    kind = getattr(item, "type", None) if isinstance(item, _Item) else None
    if isinstance(item, Mapping):
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
    return f"{kind} item"


# The tags are no names of fields, which places of errors are searched for.
InputItem = Annotated[
    Annotated[MessageItem, Tag("message item")]
    | Annotated[FunctionCallItem, Tag("function_call item")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output item")]
    | Annotated[ReasoningItem, Tag("reasoning item")]
    | Annotated[ItemReference, Tag("item_reference item")],
    Discriminator(_item_type),
]


def check_types(items: Any) -> None:
    """Raises `ApiError` for an item of a type that this server does not take."""
    for number, item in enumerate(items if isinstance(items, list) else ()):
        kind = item.get("type") if isinstance(item, Mapping) else None
        if isinstance(kind, str) and kind not in _MODELS:
            problem = f"an item of type {kind[:100]!r} is not supported by this server"
            message = f"input.{number}: {problem}; it takes {', '.join(_MODELS)}"
            raise ApiError(400, message, code=UNSUPPORTED, param="input")


def chat_messages(items: Sequence[_Item]) -> Iterator[Json]:
    """Yields the messages of a chat that say the same.

    Thinking, text and calls that follow each other are one turn of the assistant, as in the reply
    that they come from; a second message begins a turn of its own.
    """
    turn: Json = {}  # of the assistant, not yet complete
    for item in items:
        if isinstance(item, ReasoningItem):
            turn["reasoning_content"] = turn.get("reasoning_content", "") + item.thinking
        elif isinstance(item, FunctionCallItem):
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        elif isinstance(item, MessageItem) and item.role == "assistant" and "content" not in turn:
            turn["content"] = _chat_content(item.content)
        else:
            if turn:
                yield _assistant_turn(turn)
            turn = {}
            if isinstance(item, FunctionCallOutputItem):
                output = _chat_content(item.output)
                yield {"role": "tool", "tool_call_id": item.call_id, "content": output}
            elif isinstance(item, MessageItem) and item.role == "assistant":
                turn = {"content": _chat_content(item.content)}
            elif isinstance(item, MessageItem):
                yield {"role": item.role, "content": _chat_content(item.content)}
    if turn:
        yield _assistant_turn(turn)


def _assistant_turn(turn: Json) -> Json:
    said = {name: value for name, value in turn.items() if value}
    return {"role": "assistant", "content": "", **said}


def _chat_content(content: ItemContent) -> Any:
    return content if isinstance(content, str) else [part.chat_part for part in content]


def with_parts(item: _Item) -> _Item:
    """The item with content in parts, as OpenAI's API shows it, if it is a message of one text."""
    if not isinstance(item, MessageItem) or not isinstance(item.content, str):
        return item
    kind: Literal["input_text", "output_text"] = (
        "output_text" if item.role == "assistant" else "input_text"
    )
    return item.model_copy(update={"content": [TextItemPart(type=kind, text=item.content)]})
