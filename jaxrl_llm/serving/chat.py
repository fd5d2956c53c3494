"""What clients send to talk with a model, OpenAI's chat completions with tools."""

import inspect
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.agents.additions import with_json
from jaxrl_llm.agents.episode import call_id
from jaxrl_llm.agents.tool_call_arguments import schemas_of
from jaxrl_llm.agents.tool_call_scanner import open_thinking_mark
from jaxrl_llm.data import tokenizer as tokenizer_lib
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.pictures import expanded
from jaxrl_llm.data.tokenizer import Message
from jaxrl_llm.serving import fields
from jaxrl_llm.serving.fields import Strict
from jaxrl_llm.serving.protocol import (
    ApiError,
    Body,
    Count,
    First,
    Served,
    TopLogProbs,
    Wanted,
)
from jaxrl_llm.serving.tool_call_stream import ExpectedCalls
from jaxrl_llm.text import text_fault
from jaxrl_llm.types import Picture

Name = Annotated[str, Field(min_length=1, max_length=256)]
MAX_TOOLS = 128
# Names that `chat_template_kwargs` must not set: parameters of `apply_chat_template`, and what it
# gives to a template itself.
RESERVED_VARIABLES = frozenset(
    {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
    | {"self", "messages", "kwargs", "raise_exception", "strftime_now", "tojson"}
    | {*PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES, "image_token", "boi_token", "eoi_token"}
) - {"documents"}


class TextPart(Strict):
    """A text in a message's content."""

    rules = fields.PART
    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    """An image itself, as data:image/png;base64,...; nothing is downloaded."""

    rules = fields.IMAGE_URL
    url: str


class ImagePart(Strict):
    """An image in a message's content."""

    rules = fields.PART
    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class CalledFunction(Strict):
    """What a call in an earlier turn of the model called."""

    rules = fields.CALLED_FUNCTION
    name: Name
    arguments: str = ""  # a JSON object; "": without arguments

    @pydantic.field_validator("arguments", mode="before")
    @classmethod
    def _check_arguments(cls, text: Any) -> Any:
        if isinstance(text, dict):  # some clients send the object itself
            return json.dumps(text)
        if not isinstance(text, str):
            return text
        try:
            value = json.loads(text or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise ValueError("must be a JSON object in a string")
        if fault := text_fault(value):
            raise ValueError(" ".join([".".join(fault[0]), fault[1]]))
        return text


class ToolCall(Strict):
    """A call in an earlier turn of the model."""

    rules = fields.TOOL_CALL
    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Strict):
    """A message; what a server has replied may be sent back as it is."""

    rules = fields.MESSAGE
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], First] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], First] | None = None
    tool_call_id: Name | None = None
    # The thinking of an earlier turn, by both names that servers have for it.
    reasoning_content: str | None = None
    reasoning: str | None = None

    @pydantic.model_validator(mode="after")
    def _check_role(self) -> "ChatMessage":
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls are the assistant's, not of role {self.role!r}")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id belongs to messages of role 'tool', and to all of them")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing; only a message with tool_calls has none")
        if self.images and self.role not in ("user", "tool"):
            raise ValueError(f"images are of role 'user' or 'tool', not {self.role!r}")
        if self.reasoning and self.reasoning_content not in (None, self.reasoning):
            raise ValueError("reasoning and reasoning_content differ; send one of them")
        return self

    @property
    def _parts(self) -> Sequence[TextPart | ImagePart]:
        return [] if self.content is None or isinstance(self.content, str) else self.content

    @property
    def images(self) -> list[str]:
        """The addresses of the images in the content."""
        return [part.image_url.url for part in self._parts if isinstance(part, ImagePart)]

    @property
    def shown(self) -> str | list[dict[str, str]]:
        """The content for a chat template: parts if some are images, else a text, joined."""
        if isinstance(self.content, str) or self.content is None:
            return self.content or ""
        parts = [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
            for part in self.content
        ]
        return parts if self.images else "".join(part["text"] for part in parts)


class Function(Strict):
    """What the model is told of a tool."""

    rules = fields.FUNCTION
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema


class Tool(Strict):
    """A tool that the model may call."""

    rules = fields.TOOL
    type: Literal["function"]
    function: Function

    @property
    def shown(self) -> dict[str, Any]:
        """What a chat template shows, as `transformers.utils.get_json_schema` describes it."""
        function = self.function
        empty = {"type": "object", "properties": {}}
        given = {"name": function.name, "description": function.description or ""}
        return {
            "type": "function",
            "function": {**given, "parameters": function.parameters or empty},
        }


class ChosenFunction(Strict):
    """The tool that is to be called."""

    rules = fields.CHOSEN_FUNCTION
    name: str


class Choice(Strict):
    """That a tool is to be called."""

    rules = fields.TOOL_CHOICE
    type: Literal["function"]
    function: ChosenFunction


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    rules = fields.CHAT
    messages: Annotated[list[ChatMessage], First] = Field(min_length=1)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogProbs | None = None
    tools: Annotated[list[Tool], First] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    # Variables of the chat template. They make no difference to one that does not read them.
    reasoning_effort: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")] | None = None
    verbosity: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @pydantic.model_validator(mode="after")
    def _check_top(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self

    @pydantic.model_validator(mode="after")
    def _check_tools(self) -> "ChatBody":
        names = [tool.function.name for tool in self.tools or ()]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two tools are called {min(twice)!r}; rename one of them")
        if self._demanded and not {*self._demanded} <= {*names}:
            raise ValueError(f"tool_choice: no tool {self._demanded[0]!r} among tools")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice='required' needs tools")
        return self

    @pydantic.field_validator("chat_template_kwargs")
    @classmethod
    def _check_variables(cls, variables: dict[str, Any] | None) -> dict[str, Any] | None:
        if reserved := sorted(RESERVED_VARIABLES.intersection(variables or ())):
            raise ValueError(f"{reserved[0]!r} is set by this server; leave it out")
        return variables

    @pydantic.model_validator(mode="after")
    def _check_effort(self) -> "ChatBody":
        variables = self.chat_template_kwargs or {}
        for name in ("reasoning_effort", "verbosity"):
            value = getattr(self, name)
            if value is not None and variables.get(name, value) != value:
                both = f"{value!r}, but {variables[name]!r} in chat_template_kwargs"
                raise ValueError(f"{name} is {both}; send one of them")
        return self

    @property
    def _template_variables(self) -> dict[str, Any]:
        own = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        sent = {name: value for name, value in own.items() if value is not None}
        return {**sent, **(self.chat_template_kwargs or {})}

    @property
    def _demanded(self) -> list[str]:
        """The tools one of which has to be called; none: it need not."""
        if isinstance(self.tool_choice, Choice):
            return [self.tool_choice.function.name]
        required = self.tool_choice == "required"
        return [tool.function.name for tool in self.tools or ()] if required else []

    @property
    def _shown_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else [tool.shown for tool in self.tools or ()]

    def wanted(self, served: Served) -> Wanted:
        if served.chat_template and not served.tokenizer.chat_template:
            raise ApiError(400, "this model has no chat template; use /v1/completions")
        messages, shown = _as_templates_want(self.messages), self._shown_tools
        found = _pictures(served, self.messages)
        if shown and not (served.chat_template and served.call_format):
            message = "tools: the chat template of this model does not tell how it calls tools"
            raise ApiError(400, f"{message}; leave them out", param="tools")
        options = {**self._template_variables, **({"tools": shown} if shown else {})}
        try:
            text = _either(
                lambda given: tokenizer_lib.prompt_text(
                    served.tokenizer, given, served.chat_template, options
                ),
                messages,
            )
            begun = _begun(served, messages, options, text, self._demanded) if shown else ""
        except DataError as error:
            raise ApiError(400, str(error), param="messages") from error
        (tokens,) = tokenizer_lib.prompt_tokens(
            served.tokenizer, [text + begun], served.chat_template
        )
        try:
            tokens, images = expanded(served.pictures, tokens, found, "messages")
        except DataError as error:
            raise ApiError(400, str(error), param="messages") from error
        expected = ExpectedCalls(
            served.call_format,
            schemas_of(shown),
            begun,
            only_one=self.parallel_tool_calls is False,
            open_thinking=open_thinking_mark(text),
        )
        limit = self.max_completion_tokens or self.max_tokens
        num_top = (self.top_logprobs or 0) if self.logprobs else -1
        return self._wanted(
            served,
            [tokens],
            "messages",
            limit,
            served.max_tokens,
            num_top,
            expected if shown else None,
            images,
        )


def _pictures(served: Served, messages: Sequence[ChatMessage]) -> list[Picture]:
    """Returns the images of messages, read; one that cannot be is an `ApiError`."""
    found = []
    for number, message in enumerate(messages):
        for image, address in enumerate(message.images):
            where = f"messages.{number}.content, image {image + 1}"
            if served.pictures is None:
                rule = "this model reads text alone; leave images out"
                raise ApiError(400, f"{where}: {rule}", param="messages")
            try:
                found.append(served.pictures.read(address, where, files=False))
            except DataError as error:
                raise ApiError(400, str(error), param="messages") from error
    return found


def _as_templates_want(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Returns messages with the arguments of calls as objects, and calls named as in training.

    A reply of a tool also has the tool's name, which clients do not send.
    """
    made: list[dict[str, Any]] = []
    known: dict[str, dict[str, str]] = {}  # a client's name of a call -> what a reply to it has
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        new: dict[str, Any] = {"role": role, "content": message.shown}
        if message.name:
            new["name"] = message.name
        if thinking := message.reasoning_content or message.reasoning:
            new["reasoning_content"] = thinking
        if message.tool_calls:
            new["tool_calls"] = []
            for number, call in enumerate(message.tool_calls):
                name = call.function.name
                known[call.id] = {"tool_call_id": call_id(number), "name": name}
                arguments = json.loads(call.function.arguments or "{}")
                new["tool_calls"].append(_call(number, name, arguments))
        if message.tool_call_id is not None:
            if message.tool_call_id not in known:
                wrong = f"tool_call_id {message.tool_call_id[:100]!r} answers no call before it"
                raise ApiError(400, f"messages: {wrong}", param="messages")
            new |= known[message.tool_call_id]
        made.append(new)
    return made


def _either(render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> str:
    """Returns what a template makes of messages, with arguments as objects or as it wants them."""
    try:
        return render(messages)
    except DataError:
        return render(with_json(messages))


def _begun(
    served: Served,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    text: str,
    names: Sequence[str],
) -> str:
    """Returns what every call of one of these tools begins with, after the text of the dialogue."""

    def whole(given: Sequence[Message]) -> str:
        return str(tokenizer_lib.rendered(served.tokenizer, given, options, tokenize=False))

    if not names:
        return ""
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [_call(0, name, arguments)]}
        for name in names
        for arguments in ({}, {"x": 1})
    ]
    beginnings = zip(*(_either(whole, [*messages, turn]) for turn in turns), strict=False)
    same = itertools.takewhile(lambda letters: len({*letters}) == 1, beginnings)
    common = "".join(letters[0] for letters in same)
    begun = common[len(text) :].rstrip("{<")  # that of the arguments is the model's
    if not common.startswith(text) or not begun.strip():
        message = "tool_choice: the chat template of this model lets no call be begun"
        raise ApiError(400, f"{message}; use 'auto'", param="tool_choice")
    return begun


def _call(number: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": call_id(number), "function": function}
