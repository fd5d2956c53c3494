"""OpenAI's Responses API: bodies, which become chats; replies and their event streams."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from jaxrl_llm.serving.chat import MAX_TOOLS, ChatBody, Name, validated_chat
from jaxrl_llm.serving.fields import Strict
from jaxrl_llm.serving.protocol import (
    FAIL_FAST,
    ApiError,
    Body,
    GenerationRequest,
    PositiveCount,
    ServedModel,
    TopLogProbs,
)
from jaxrl_llm.serving.replies import Json
from jaxrl_llm.serving.responses_api import fields
from jaxrl_llm.serving.responses_api.items import (
    InputItem,
    ItemReference,
    MessageItem,
    chat_messages,
    check_types,
)
from jaxrl_llm.serving.responses_api.store import ResponseStore, StoredResponse

LOG_PROBS = "message.output_text.logprobs"
# The rest of OpenAI's concern tools that are not served, or add nothing to what replies have:
# thinking is in them as it is, not encrypted.
Includable = Literal[
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
# Fields of a chat by which its errors name a fault -> the place here.
_PLACES = {
    "messages": "input",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}
_ITEMS = pydantic.TypeAdapter(list[InputItem])


class FunctionTool(Strict):
    """A function that the model may call and the client runs."""

    rules = fields.RESPONSE_TOOL
    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # as of `tools.function`

    @property
    def chat_tool(self) -> Json:
        return {"type": "function", "function": self.model_dump(exclude={"type"})}


class FunctionChoice(Strict):
    """A `tool_choice` that forces a call of one function."""

    rules = fields.RESPONSE_TOOL_CHOICE
    type: Literal["function"]
    name: str


class ReasoningConfig(Strict):
    """Effort: the variable `reasoning_effort` of the chat template."""

    rules = fields.REASONING
    effort: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")] | None = None


class TextConfig(Strict):
    """The format of the text, and the variable `verbosity` of the chat template."""

    rules = fields.TEXT
    format: dict[str, Any] | None = None
    verbosity: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")] | None = None

    @property
    def response_format(self) -> Json | None:
        """The format as a chat has it, which nests name, schema and strictness."""
        if (self.format or {}).get("type") != "json_schema":
            return self.format
        schema = {name: value for name, value in (self.format or {}).items() if name != "type"}
        return {"type": "json_schema", "json_schema": schema}


class ResponsesBody(Body):
    """`POST /v1/responses`."""

    rules = fields.RESPONSES
    input: str | Annotated[list[InputItem], FAIL_FAST] = ""
    n: Literal[1] | None = None
    instructions: str | None = None
    previous_response_id: Name | None = None
    store: bool | None = None  # default: true
    metadata: dict[str, str] | None = None
    include: Annotated[list[Includable], FAIL_FAST] | None = None
    max_output_tokens: PositiveCount | None = None
    top_logprobs: TopLogProbs | None = None
    tools: Annotated[list[FunctionTool], FAIL_FAST] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @pydantic.field_validator("input", mode="before")
    @classmethod
    def _check_types(cls, items: Any) -> Any:
        check_types(items)
        return items

    @pydantic.model_validator(mode="after")
    def _check_input(self) -> "ResponsesBody":
        if not self.input and self.previous_response_id is None:
            raise ValueError("input is empty; give a text or items")
        if self.top_logprobs and not self.has_log_probs:
            raise ValueError(f"top_logprobs needs include=[{LOG_PROBS!r}]")
        if self.stream_options and self.stream_options.continuous_usage_stats:
            raise ValueError("stream_options: usage is in the last event; ask for no more")
        return self

    @property
    def has_log_probs(self) -> bool:
        return LOG_PROBS in (self.include or ())

    @property
    def items(self) -> list[Any]:
        """The input as items."""
        if not isinstance(self.input, str):
            return self.input
        return [MessageItem(role="user", content=self.input)] if self.input else []


@dataclasses.dataclass(frozen=True)
class ResponseRequest:
    """A body with the dialogue before it."""

    body: ResponsesBody
    items: tuple[Any, ...]  # of the input, references resolved
    previous: StoredResponse | None = None

    @classmethod
    def from_body(cls, body: ResponsesBody, store: ResponseStore) -> "ResponseRequest":
        """Reads what the body refers to; raises `ApiError` if it is not stored."""
        previous = None
        number = body.previous_response_id
        if number is not None and (previous := store.get(number)) is None:
            message = f"Previous response with id '{number[:100]}' not found: it was not stored"
            raise ApiError(
                400,
                f"{message}, or dropped for newer ones; send its items as input",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return cls(body, tuple(_stored_item(item, store) for item in body.items), previous)

    @property
    def model(self) -> str:
        return self.body.model

    @property
    def stream(self) -> bool | None:
        return self.body.stream

    def chat_body(self) -> ChatBody:
        """The same request to `/v1/chat/completions`; raises `ApiError` if there is none."""
        body = self.body
        earlier = _ITEMS.validate_python(self.previous.items() if self.previous else [])
        messages = list(chat_messages([*earlier, *self.items]))
        if body.instructions:
            messages.insert(0, {"role": "system", "content": body.instructions})
        # Sampling has the same fields in both.
        chat = {name: getattr(body, name) for name in Body.model_fields} | {
            "messages": messages,
            "stream_options": None,
            "max_completion_tokens": body.max_output_tokens,
            "logprobs": body.has_log_probs,
            "top_logprobs": body.top_logprobs,
            "parallel_tool_calls": body.parallel_tool_calls,
            "chat_template_kwargs": body.chat_template_kwargs,
            "reasoning_effort": body.reasoning and body.reasoning.effort,
            "verbosity": body.text and body.text.verbosity,
            "response_format": body.text and body.text.response_format,
            "tools": [tool.chat_tool for tool in body.tools or ()] or None,
            "tool_choice": body.tool_choice,
        }
        if isinstance(body.tool_choice, FunctionChoice):
            function = {"name": body.tool_choice.name}
            chat["tool_choice"] = {"type": "function", "function": function}
        return validated_chat(chat)

    def num_tokens(self, served: ServedModel) -> int:
        """Tokens of the prompt."""
        with _renamed_fields():
            return len(self.chat_body().rendered_prompt(served).tokens)

    def generation_request(self, served: ServedModel) -> GenerationRequest:
        """Converts the body into an engine request; raises `ApiError` if it cannot be served."""
        with _renamed_fields():
            return self.chat_body().generation_request(served)


def _stored_item(item: Any, store: ResponseStore) -> Any:
    """The item that a reference names; others as they are."""
    if not isinstance(item, ItemReference):
        return item
    if (referenced := store.output_item(item.id)) is None:
        message = f"input: item {item.id[:100]!r} is not stored here; send the item itself"
        raise ApiError(400, message, param="input")
    return _ITEMS.validate_python([referenced])[0]


@contextlib.contextmanager
def _renamed_fields() -> Iterator[None]:
    """Errors of the chat name the fields of this API."""
    try:
        yield
    except ApiError as error:
        details = error.body["error"]
        name = details["param"] or ""
        place = _PLACES.get(name, name)
        message = str(error)
        if message.startswith(name):
            message = place + message.removeprefix(name)
        raise ApiError(
            error.status,
            message,
            details["type"] or "",
            details["code"] or "",
            param=place.partition(".")[0],
            headers=error.headers,
        ) from error
