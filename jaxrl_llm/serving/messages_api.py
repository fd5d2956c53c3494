"""Anthropic's Messages API: bodies, which become chats; replies and their event streams."""

import json
import uuid
import warnings
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from jaxrl_llm.serving import fields
from jaxrl_llm.serving.chat import MAX_TOOLS, ChatBody, Name, validated_chat
from jaxrl_llm.serving.fields import Strict
from jaxrl_llm.serving.protocol import (
    FAIL_FAST,
    MAX_STOP_STRINGS,
    ApiError,
    GenerationRequest,
    PositiveCount,
    ServedModel,
    Texts,
    check_text,
)
from jaxrl_llm.serving.replies import Json, SampleDelta

PATH = "/v1/messages"


class TextBlock(Strict):
    """Text of a message, of the system prompt or of a tool's result."""

    rules = fields.BLOCK
    type: Literal["text"]
    text: str


class ImageSource(Strict):
    """An image in base64; nothing is downloaded."""

    rules = fields.BLOCK_SOURCE
    type: Literal["base64"]
    media_type: str
    data: str


class ImageBlock(Strict):
    """An image of a message or of a tool's result."""

    rules = fields.BLOCK
    type: Literal["image"]
    source: ImageSource

    @property
    def part(self) -> Json:
        url = f"data:{self.source.media_type};base64,{self.source.data}"
        return {"type": "image_url", "image_url": {"url": url}}


ResultPart = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ThinkingBlock(Strict):
    """Thinking of an earlier turn of the assistant."""

    rules = fields.BLOCK
    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Strict):
    """A tool call in an earlier turn of the assistant."""

    rules = fields.BLOCK
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


class ToolResultBlock(Strict):
    """The result of a tool call, in a message of the user."""

    rules = fields.BLOCK
    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | Annotated[list[ResultPart], FAIL_FAST] | None = None


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class ApiMessage(Strict):
    """A message of the dialogue; a reply of this server is valid here unchanged."""

    rules = fields.API_MESSAGE
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], FAIL_FAST]

    @pydantic.model_validator(mode="after")
    def _check_blocks(self) -> "ApiMessage":
        allowed = {
            "user": {"text", "image", "tool_result"},
            "assistant": {"text", "thinking", "tool_use"},
            "system": {"text"},
        }[self.role]
        kinds = [] if isinstance(self.content, str) else [block.type for block in self.content]
        if wrong := next((kind for kind in kinds if kind not in allowed), ""):
            message = f"a block {wrong!r} is not of role {self.role!r}, which has"
            raise ValueError(f"{message} {', '.join(sorted(allowed))}")
        return self

    def chat_messages(self) -> Iterator[Json]:
        """Yields the messages of a chat that say the same; each tool result is one."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
        elif self.role == "user":
            yield from _user_messages(self.content)
        else:
            yield _assistant_message(self.role, self.content)


def _user_messages(blocks: Sequence[Any]) -> Iterator[Json]:
    parts: list[Json] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            if parts:
                yield {"role": "user", "content": parts}
                parts = []
            content = block.content or ""
            result = content if isinstance(content, str) else [_part(each) for each in content]
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}
        else:
            parts.append(_part(block))
    if parts:
        yield {"role": "user", "content": parts}


def _part(block: TextBlock | ImageBlock) -> Json:
    return block.part if isinstance(block, ImageBlock) else {"type": "text", "text": block.text}


def _assistant_message(role: str, blocks: Sequence[Any]) -> Json:
    """One message of the assistant or of the system from its blocks."""
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    thinking = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = [
        {"id": b.id, "type": "function", "function": {"name": b.name, "arguments": b.input}}
        for b in blocks
        if isinstance(b, ToolUseBlock)
    ]
    optional = {"reasoning_content": thinking, "tool_calls": calls}
    return {"role": role, "content": text} | {name: each for name, each in optional.items() if each}


class ApiTool(Strict):
    """A tool that the model may call and the client runs."""

    rules = fields.API_TOOL
    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None  # as of `tools.function`

    @property
    def chat_tool(self) -> Json:
        function = {"name": self.name, "parameters": self.input_schema, "strict": self.strict}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class ApiToolChoice(Strict):
    """Whether a tool must be called."""

    rules = fields.API_TOOL_CHOICE
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @pydantic.model_validator(mode="after")
    def _check_name(self) -> "ApiToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name belongs to a tool_choice of type 'tool', and to each of them")
        return self

    @property
    def chat_choice(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class ThinkingConfig(Strict):
    """Whether the model thinks: the variable `enable_thinking` of its chat template."""

    rules = fields.THINKING
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    display: Literal["summarized", "omitted"] | None = None  # the first: as it is


with warnings.catch_warnings():
    # The clients' name is that of a method that pydantic has deprecated.
    warnings.filterwarnings("ignore", "Field name .* shadows an attribute")

    class OutputFormat(Strict):
        """The JSON schema of the reply."""

        rules = fields.OUTPUT_FORMAT
        type: Literal["json_schema"]
        schema: dict[str, Any]  # type: ignore[assignment]


class OutputConfig(Strict):
    """The format of the text, and the variable `reasoning_effort` of the chat template."""

    rules = fields.OUTPUT_CONFIG
    format: OutputFormat | None = None
    effort: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")] | None = None


class CountTokensBody(Strict):
    """`POST /v1/messages/count_tokens`."""

    rules = fields.MESSAGES
    model: str
    messages: Annotated[list[ApiMessage], FAIL_FAST] = Field(min_length=1)
    system: str | Annotated[list[TextBlock], FAIL_FAST] | None = None
    tools: Annotated[list[ApiTool], FAIL_FAST] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ApiToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _check_text(cls, values: Any) -> Any:
        return check_text(values)

    @pydantic.model_validator(mode="after")
    def _check_last_message(self) -> "CountTokensBody":
        if self.messages[-1].role == "assistant":
            message = "the last message is the assistant's, which this server does not continue"
            raise ValueError(f"messages: {message}; end with one of the user")
        return self

    def _chat_fields(self) -> Json:
        """The fields of the same request to `/v1/chat/completions`."""
        system = self.system or ""
        if not isinstance(system, str):
            system = "".join(block.text for block in system)
        messages = [{"role": "system", "content": system}] if system else []
        messages += [each for message in self.messages for each in message.chat_messages()]
        chat: Json = {"model": self.model, "messages": messages}
        if self.tools:
            chat["tools"] = [tool.chat_tool for tool in self.tools]
        if self.tool_choice:
            chat["tool_choice"] = self.tool_choice.chat_choice
            chat["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.thinking:
            enabled = self.thinking.type != "disabled"
            chat["chat_template_kwargs"] = {"enable_thinking": enabled}
            chat["include_reasoning"] = self.thinking.display != "omitted"
        if self.output_config:
            chat["reasoning_effort"] = self.output_config.effort
        if self.output_config and (form := self.output_config.format):
            schema = {"name": "output", "schema": form.schema}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        return chat

    def chat_body(self) -> ChatBody:
        """The same request to `/v1/chat/completions`; raises `ApiError` if there is none."""
        return validated_chat(self._chat_fields())

    def num_tokens(self, served: ServedModel) -> int:
        """Tokens of the prompt."""
        return len(self.chat_body().rendered_prompt(served).tokens)


class MessagesBody(CountTokensBody):
    """`POST /v1/messages`."""

    max_tokens: PositiveCount
    stop_sequences: Texts | None = Field(None, max_length=MAX_STOP_STRINGS)
    stream: bool | None = None
    # No longer in Anthropic's own types, but in those of earlier clients.
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=0, lt=2**31)

    def _chat_fields(self) -> Json:
        own = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        chat = super()._chat_fields() | {name: getattr(self, name) for name in own}
        return chat | {"stop": self.stop_sequences or None}

    def generation_request(self, served: ServedModel) -> GenerationRequest:
        """Converts the body into an engine request; raises `ApiError` if it cannot be served."""
        return self.chat_body().generation_request(served)


_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}


class MessagesFormat:
    """The reply to a request at `/v1/messages`, complete or as a stream of events."""

    def __init__(self, model: str, generation: GenerationRequest):
        self._generation = generation
        self._head = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._block_kind = ""  # of the block that the stream is in
        self._num_blocks = 0  # that the stream has begun

    def reply(self, samples: Sequence[SampleDelta]) -> Json:
        (sample,) = samples
        content: list[Json] = []
        if sample.reasoning:
            content.append({"type": "thinking", "thinking": sample.reasoning, "signature": ""})
        if sample.text:
            content.append({"type": "text", "text": sample.text})
        for call in sample.calls:
            tool_use = {"type": "tool_use", "id": call.call_id, "name": call.name}
            content.append({**tool_use, "input": json.loads(call.arguments)})
        return {
            **self._head,
            "content": content,
            **self._stop(sample),
            "usage": self._usage(len(sample.tokens)),
        }

    def opening_events(self) -> Iterator[bytes]:
        """Yields the events with which a stream begins."""
        no_stop = {"stop_reason": None, "stop_sequence": None}
        message: Json = {**self._head, "content": [], **no_stop, "usage": self._usage(0)}
        yield _event("message_start", message=message)

    def events(self, index: int, piece: SampleDelta, num_tokens: int) -> Iterator[bytes]:
        """Yields the events of a piece; `num_tokens` were generated with it."""
        if piece.reasoning:
            yield from self._enter_block("thinking", thinking="", signature="")
            yield self._delta("thinking_delta", thinking=piece.reasoning)
        if piece.text:
            yield from self._enter_block("text", text="")
            yield self._delta("text_delta", text=piece.text)
        for call in piece.calls:
            yield from self._enter_block("tool_use", id=call.call_id, name=call.name, input={})
            yield self._delta("input_json_delta", partial_json=call.arguments)
        if piece.finish_reason:
            yield from self._block_end()
            usage = self._usage(num_tokens)
            yield _event("message_delta", delta=self._stop(piece), usage=usage)

    def closing_events(self, num_tokens: int) -> Iterator[bytes]:
        """Yields the events with which a stream ends."""
        yield _event("message_stop")

    def error_event(self, error: ApiError) -> bytes:
        """The event with which a stream ends that has failed."""
        return _event(**error_body(error))

    def _enter_block(self, kind: str, **start: Any) -> Iterator[bytes]:
        """Begins a block unless the stream is in one of its kind; each call has its own."""
        if self._block_kind == kind != "tool_use":
            return
        yield from self._block_end()
        self._block_kind = kind
        block = {"type": kind, **start}
        yield _event("content_block_start", index=self._num_blocks, content_block=block)
        self._num_blocks += 1

    def _block_end(self) -> Iterator[bytes]:
        if self._block_kind:
            yield _event("content_block_stop", index=self._num_blocks - 1)
            self._block_kind = ""

    def _delta(self, kind: str, **delta: str) -> bytes:
        index = self._num_blocks - 1
        return _event("content_block_delta", index=index, delta={"type": kind, **delta})

    def _stop(self, sample: SampleDelta) -> Json:
        if sample.stop_string:
            return {"stop_reason": "stop_sequence", "stop_sequence": sample.stop_string}
        reason = _STOP_REASONS.get(sample.finish_reason, "end_turn")
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self, num_tokens: int) -> Json:
        prompt = self._generation.num_prompt_tokens
        return {"input_tokens": prompt, "output_tokens": num_tokens}


def _event(type: str, **contents: Any) -> bytes:
    data = json.dumps({"type": type, **contents}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {type}\ndata: {data}\n\n".encode()


_ERROR_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError) -> Json:
    """An error in Anthropic's format."""
    kind = _ERROR_TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
