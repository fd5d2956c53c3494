"""The request body of OpenAI's chat completions, with tools and images."""

import functools
import inspect
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.agents.episode import call_id
from jaxrl_llm.agents.tool_call_arguments import schemas_of
from jaxrl_llm.agents.tool_call_formats import FORMATS
from jaxrl_llm.agents.tool_call_grammars import (
    AllowedTool,
    Call,
    CallGrammarError,
    RenderCalls,
    call_grammar,
)
from jaxrl_llm.agents.tool_call_scanner import MAX_NAME, open_thinking_mark, thinking_marks
from jaxrl_llm.data import tokenizer as tokenizer_lib
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.images import expand_tokens
from jaxrl_llm.data.tokenizer import Message
from jaxrl_llm.rollout.engine.grammars import GrammarError
from jaxrl_llm.rollout.structured_outputs import GrammarSource
from jaxrl_llm.sampling.reply_grammars import (
    ReplyMarks,
    render_messages,
    reply_grammar,
    reply_marks,
    template_call,
    turn_with_calls,
)
from jaxrl_llm.serving import fields
from jaxrl_llm.serving.constraints import ResponseFormat
from jaxrl_llm.serving.fields import Strict
from jaxrl_llm.serving.protocol import (
    FAIL_FAST,
    ApiError,
    Body,
    ChatPrompt,
    GenerationRequest,
    PositiveCount,
    ServedModel,
    TopLogProbs,
)
from jaxrl_llm.serving.tool_call_stream import ExpectedCalls, StreamedCall
from jaxrl_llm.text import text_fault
from jaxrl_llm.types import PromptImage

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
MAX_TOOLS = 128
# Names that `chat_template_kwargs` must not set: parameters of `apply_chat_template`, and the
# variables that it passes to a template itself.
RESERVED_VARIABLES = frozenset(
    {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
    | {"self", "messages", "kwargs", "raise_exception", "strftime_now", "tojson"}
    | {*PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES, "image_token", "boi_token", "eoi_token"}
) - {"documents"}


class TextPart(Strict):
    """A text part of the content of a message."""

    rules = fields.PART
    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    """An image as a data URL (data:image/png;base64,...); nothing is downloaded."""

    rules = fields.IMAGE_URL
    url: str


class ImagePart(Strict):
    """An image part of the content of a message."""

    rules = fields.PART
    type: Literal["image_url"]
    image_url: ImageUrl


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class CalledFunction(Strict):
    """Function and arguments of a tool call in an earlier assistant turn."""

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


class MessageToolCall(Strict):
    """A tool call in an earlier assistant turn."""

    rules = fields.TOOL_CALL
    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Strict):
    """A message of the dialogue; a reply of this server is valid here unchanged."""

    rules = fields.MESSAGE
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], FAIL_FAST] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], FAIL_FAST] | None = None
    tool_call_id: Name | None = None
    # The reasoning of an earlier turn, under both names in use among servers.
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
        """The data URLs of the images in the content."""
        return [part.image_url.url for part in self._parts if isinstance(part, ImagePart)]

    @property
    def template_content(self) -> str | list[dict[str, str]]:
        """The content for a chat template: a list of parts if it has images, else one text."""
        if isinstance(self.content, str) or self.content is None:
            return self.content or ""
        parts = [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
            for part in self.content
        ]
        return parts if self.images else "".join(part["text"] for part in parts)


class FunctionDefinition(Strict):
    """The definition of a tool, as shown to the model."""

    rules = fields.FUNCTION
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None  # the arguments of every call are valid by the schema


class Tool(Strict):
    """A tool that the model may call."""

    rules = fields.TOOL
    type: Literal["function"]
    function: FunctionDefinition

    def call_schema(self, required: bool) -> dict[str, Any]:
        """The schema of arguments: its own if it is strict or `required`, else of any object."""
        schema = self.function.parameters or {}
        return schema if self.function.strict or required else {}

    @property
    def template_schema(self) -> dict[str, Any]:
        """The tool for a chat template, in the form of `transformers.utils.get_json_schema`."""
        function = self.function
        no_parameters = {"type": "object", "properties": {}}
        description = {"name": function.name, "description": function.description or ""}
        return {
            "type": "function",
            "function": {**description, "parameters": function.parameters or no_parameters},
        }


class ChosenFunction(Strict):
    """The name of the tool in `NamedToolChoice`."""

    rules = fields.CHOSEN_FUNCTION
    name: str


class NamedToolChoice(Strict):
    """A `tool_choice` that forces a call of one named tool."""

    rules = fields.TOOL_CHOICE
    type: Literal["function"]
    function: ChosenFunction


class RenderedPrompt(NamedTuple):
    """A dialogue as the model reads it."""

    text: str
    call_start: str  # behind it: the beginning of a call that is forced
    tokens: tuple[int, ...]  # of both, with placeholders of images expanded
    images: tuple[PromptImage, ...]
    # Renders calls of tools behind the dialogue; returns the text from its end on.
    render_calls: RenderCalls


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    rules = fields.CHAT
    messages: Annotated[list[ChatMessage], FAIL_FAST] = Field(min_length=1)
    max_tokens: PositiveCount | None = None
    max_completion_tokens: PositiveCount | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogProbs | None = None
    tools: Annotated[list[Tool], FAIL_FAST] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # Variables of the chat template; without effect on a template that does not read them.
    reasoning_effort: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")] | None = None
    verbosity: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None  # false: thinking is dropped from the reply
    prompt_logprobs: TopLogProbs | None = None  # vLLM's

    @pydantic.model_validator(mode="after")
    def _check_top_logprobs(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self

    @pydantic.model_validator(mode="after")
    def _check_tools(self) -> "ChatBody":
        names = [tool.function.name for tool in self.tools or ()]
        if duplicates := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two tools are called {min(duplicates)!r}; rename one of them")
        if self._required_tools and not {*self._required_tools} <= {*names}:
            raise ValueError(f"tool_choice: no tool {self._required_tools[0]!r} among tools")
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
                conflict = f"{value!r}, but {variables[name]!r} in chat_template_kwargs"
                raise ValueError(f"{name} is {conflict}; send one of them")
        return self

    @property
    def _template_variables(self) -> dict[str, Any]:
        own_fields = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        sent_fields = {name: value for name, value in own_fields.items() if value is not None}
        return {**sent_fields, **(self.chat_template_kwargs or {})}

    @property
    def _required_tools(self) -> list[str]:
        """Names of the tools of which one must be called; empty if a call is optional."""
        if isinstance(self.tool_choice, NamedToolChoice):
            return [self.tool_choice.function.name]
        required = self.tool_choice == "required"
        return [tool.function.name for tool in self.tools or ()] if required else []

    @property
    def _template_tools(self) -> list[dict[str, Any]]:
        return (
            []
            if self.tool_choice == "none"
            else [tool.template_schema for tool in self.tools or ()]
        )

    def rendered_prompt(self, served: ServedModel) -> RenderedPrompt:
        """The prompt of a reply; raises `ApiError` for messages that cannot be rendered."""
        if served.chat_template and not served.tokenizer.chat_template:
            raise ApiError(400, "this model has no chat template; use /v1/completions")
        messages, tools = _template_messages(self.messages), self._template_tools
        images: Sequence[PromptImage] = _load_images(served, self.messages)
        if tools and not (served.chat_template and served.call_format):
            message = "tools: the chat template of this model has no known tool-call format"
            raise ApiError(400, f"{message}; leave them out", param="tools")
        options = {**self._template_variables, **({"tools": tools} if tools else {})}
        try:
            text = render_messages(
                lambda messages_variant: tokenizer_lib.prompt_text(
                    served.tokenizer, messages_variant, served.chat_template, options
                ),
                messages,
            )
            call_start = (
                _forced_call_start(served, messages, options, text, self._required_tools)
                if tools
                else ""
            )
        except DataError as error:
            raise ApiError(400, str(error), param="messages") from error
        chat = ChatPrompt(messages, options, text, call_start, served.chat_template)
        try:
            tokens = (served.tokenize_chat or chat_tokenizer(served.tokenizer))(chat)
            tokens, images = expand_tokens(served.image_processor, tokens, images, "messages")
        except DataError as error:
            raise ApiError(400, str(error), param="messages") from error
        render_calls = functools.partial(_rendered_calls, served, messages, options, text)
        return RenderedPrompt(text, call_start, tokens, tuple(images), render_calls)

    def generation_request(self, served: ServedModel) -> GenerationRequest:
        prompt = self.rendered_prompt(served)
        calls = expected_calls(served, self._template_tools, prompt.text, prompt.call_start)
        if calls is not None:
            calls = calls._replace(
                only_one=self.parallel_tool_calls is False,
                drops_thinking=self.include_reasoning is False,
            )
        try:
            source = self._grammar_source(served, prompt)
        except (CallGrammarError, GrammarError) as error:
            raise ApiError(400, f"tools: {error}", param="tools") from error
        limit = self.max_completion_tokens or self.max_tokens
        num_top = (self.top_logprobs or 0) if self.logprobs else -1
        return self._generation_request(
            served,
            [prompt.tokens],
            "messages",
            limit,
            served.max_tokens,
            num_top,
            calls,
            prompt.images,
            num_prompt_log_probs=self.prompt_logprobs,
            grammar_source=source,
        )

    def _grammar_source(self, served: ServedModel, prompt: RenderedPrompt) -> GrammarSource | None:
        """The constraint of the reply: of its text, of its calls, or of either."""
        answer = self.reply_constraint()
        if not served.constrains_replies:
            if answer is None:
                return None
            message = f"{answer.setting}: this training run does not constrain its samples"
            remedy = "leave it out, or set rollout.support_tokens"
            raise ApiError(400, f"{message}; {remedy}", param=answer.setting)
        offered = () if self.tool_choice == "none" else self.tools or ()
        is_strict = any(tool.function.strict for tool in offered)
        if not (answer or is_strict or prompt.call_start):
            return None
        has_text = not (answer or prompt.call_start)
        marks = reply_marks(served.call_format, str(served.tokenizer.chat_template), prompt.text)
        calls = None
        if offered:
            allowed = [
                AllowedTool(tool.function.name, tool.call_schema(bool(self._required_tools)))
                for tool in offered
                if tool.function.name in (self._required_tools or [tool.function.name])
            ]
            calls = call_grammar(
                served.call_format,
                prompt.render_calls,
                allowed,
                served.grammars.literal,
                [served.grammars.token_text(token) for token in served.eos_tokens],
                only_one=self.parallel_tool_calls is False,
                begins_at_mark=not prompt.call_start,
                written=prompt.call_start or (marks.call_start if has_text else ""),
            )
        if prompt.call_start:  # the calls are begun: neither an answer nor thinking comes before
            answer, marks = None, ReplyMarks()
        return reply_grammar(
            served.grammars.literal,
            answer=answer,
            calls=calls,
            has_text=has_text,
            marks=marks,
        )


def chat_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
) -> Callable[[ChatPrompt], tuple[int, ...]]:
    """The function that tokenizes the text of a dialogue."""

    def chat_tokens(chat: ChatPrompt) -> tuple[int, ...]:
        texts = [chat.text + chat.call_start]
        (tokens,) = tokenizer_lib.prompt_tokens(tokenizer, texts, chat.uses_template)
        return tokens

    return chat_tokens


def expected_calls(
    served: ServedModel, tools: Sequence[Mapping[str, Any]], text: str, call_start: str = ""
) -> ExpectedCalls | None:
    """The calls and the thinking that a reply to a dialogue may have; None: replies are text alone.

    Args:
      tools: As the chat template sees them.
      text: The rendered dialogue.
      call_start: As in `ChatPrompt`.
    """
    # Harmony has channels for thinking and text, with tools or without.
    parses_calls = bool(tools) or served.call_format == "harmony"
    if not parses_calls and not thinking_marks(str(served.tokenizer.chat_template)):
        return None
    call_format = served.call_format if parses_calls else ""
    thinking = open_thinking_mark(text)
    return ExpectedCalls(call_format, schemas_of(tools), call_start, open_thinking=thinking)


def validated_chat(chat: Mapping[str, Any]) -> ChatBody:
    """The chat that a request of another protocol means; raises `ApiError` if there is none."""
    try:
        return ChatBody.model_validate(chat)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        message = f"{place}: {first['msg'].removeprefix('Value error, ')}".removeprefix(": ")
        param = str(first["loc"][0]) if first["loc"] else ""
        raise ApiError(400, message, param=param) from error


def _load_images(served: ServedModel, messages: Sequence[ChatMessage]) -> list[PromptImage]:
    """The images of the messages, decoded; raises `ApiError` for one that cannot be read."""
    images = []
    for number, message in enumerate(messages):
        for image, address in enumerate(message.images):
            location = f"messages.{number}.content, image {image + 1}"
            if served.image_processor is None:
                rule = "this model is text-only; leave images out"
                raise ApiError(400, f"{location}: {rule}", param="messages")
            try:
                images.append(served.image_processor.read(address, location, files=False))
            except DataError as error:
                raise ApiError(400, str(error), param="messages") from error
    return images


def _template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages for a chat template: call arguments as objects, call ids as in training.

    Tool messages also get the name of their tool, which clients do not send.
    """
    template_messages: list[dict[str, Any]] = []
    # A client's call id -> fields of the tool message that answers it.
    call_fields: dict[str, dict[str, str]] = {}
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        template_message: dict[str, Any] = {"role": role, "content": message.template_content}
        if message.name:
            template_message["name"] = message.name
        if thinking := message.reasoning_content or message.reasoning:
            template_message["reasoning_content"] = thinking
        if message.tool_calls:
            template_message["tool_calls"] = []
            for number, call in enumerate(message.tool_calls):
                name = call.function.name
                call_fields[call.id] = {"tool_call_id": call_id(number), "name": name}
                arguments = json.loads(call.function.arguments or "{}")
                template_message["tool_calls"].append(template_call(number, name, arguments))
        if message.tool_call_id is not None:
            if message.tool_call_id not in call_fields:
                problem = f"tool_call_id {message.tool_call_id[:100]!r} answers no call before it"
                raise ApiError(400, f"messages: {problem}", param="messages")
            template_message |= call_fields[message.tool_call_id]
        template_messages.append(template_message)
    return template_messages


def _rendered_calls(
    served: ServedModel,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    text: str,
    calls: Sequence[Call],
) -> str:
    """The text of these calls behind the dialogue, which is rendered as `text` before a reply."""
    return turn_with_calls(served.tokenizer, messages, options, calls).removeprefix(text)


def _forced_call_start(
    served: ServedModel,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    text: str,
    names: Sequence[str],
) -> str:
    """The text after the dialogue that begins any call of these tools, to force one of them."""
    if not names:
        return ""
    calls = [(name, arguments) for name in names for arguments in ({}, {"x": 1})]
    columns = zip(
        *(turn_with_calls(served.tokenizer, messages, options, [call]) for call in calls),
        strict=False,
    )
    shared = itertools.takewhile(lambda characters: len({*characters}) == 1, columns)
    common = "".join(characters[0] for characters in shared)
    call_start = common[len(text) :].rstrip("{<")  # the arguments are the model's to begin
    if not FORMATS[served.call_format].has_json_arguments and len(names) == 1:
        # What follows depends on whether the call has arguments.
        call_start = call_start[: call_start.rfind(names[0]) + len(names[0])]
    if not common.startswith(text) or not call_start.strip():
        message = "tool_choice: the chat template of this model lets no call be begun"
        raise ApiError(400, f"{message}; use 'auto'", param="tool_choice")
    return call_start


def call_message(call: StreamedCall) -> dict[str, Any]:
    """A call in a reply of this server, in the form for chat templates."""
    return template_call(call.number, call.name, json.loads(call.arguments))
