"""One episode: the dialogue of the policy with its tools and environment, turn by turn."""

import collections
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrl_llm.agents import message_content, template_delta, tool_call_formats, tools
from jaxrl_llm.agents.agent_pool import AgentError, Answer
from jaxrl_llm.agents.tool_call_arguments import schemas_of
from jaxrl_llm.agents.tool_call_formats import ParsedToolCall, ParsedTurn
from jaxrl_llm.agents.tool_call_scanner import THINKING_TOKENS, open_thinking_mark
from jaxrl_llm.config.agent import AgentConfig
from jaxrl_llm.data.encoding import without_guards
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.images import ImagePreprocessor, expand_tokens
from jaxrl_llm.data.tokenizer import Message, prompt_text, prompt_tokens
from jaxrl_llm.types import EpisodeLog, Prompt, PromptImage

_PROCESS_ENDED = ("timeout", "ended")  # problems after which the process is gone

# Kinds of errors in `EpisodeLog.errors`; PROBLEM is one of ANSWER_PROBLEMS.
ANSWER_PROBLEMS = ("arguments", "exception", "timeout", "ended")
ERROR_KINDS = (
    *("format", "unknown", *ANSWER_PROBLEMS, "too_many"),  # of a call
    *("tool_seconds", "too_long", "template", "image"),  # of an episode
    *("start_PROBLEM", "reward_PROBLEM", "end_PROBLEM"),  # of an environment
)
EPISODE_END = template_delta.TemplateDelta((), False)  # no tokens follow: the episode has ended

# A pending exchange with the process of an episode: a generator that yields requests, is sent the
# answers, and returns the outcome, a plain dict that all hosts receive.
PendingCall = Generator[Mapping[str, Any], Answer, dict[str, Any]]


def call_format(config: AgentConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """The format in which the model writes tool calls, "" if the chat template reveals none."""
    if config.call_format != "auto":
        return config.call_format
    return tool_call_formats.format_name(str(tokenizer.chat_template or ""))


class EpisodeContext:
    """The settings, tokenizer and tool schemas that all episodes of a run share."""

    def __init__(
        self,
        config: AgentConfig,
        tokenizer: PreTrainedTokenizerBase,
        described_schemas: Mapping[str, Any],
        image_processor: ImagePreprocessor | None = None,
    ):
        """
        Args:
          described_schemas: The result of `AgentPool.describe`.
          image_processor: Reads images; None for a text-only run.
        """
        self.config, self.tokenizer, self._described_schemas = config, tokenizer, described_schemas
        self.image_processor = image_processor
        self.call_format = call_format(config, tokenizer)
        self.special_token_pattern = tools.special_tokens(tokenizer)

    def environment_and_tools(self, extra_info: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        """The (environment, names of the config's tools) of a row."""
        name = str(extra_info.get("agent_name") or "")
        if name == "single_turn_agent":
            return "", ()
        selected = extra_info.get("tool_selection")
        tool_names = self.config.tools if selected is None else tuple(
            tool for tool in self.config.tools if self._function_names(tool) & set(selected)
        )  # fmt: skip
        return self.config.environment_for(name), tool_names

    def _function_names(self, tool: str) -> set[str]:
        schemas = self._described_schemas["tools"][tool]
        return {tool, *(schema["function"]["name"] for schema in schemas)}

    def tool_schemas(self, extra_info: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The schemas of a row's tools, those of its environment last."""
        environment, names = self.environment_and_tools(extra_info)
        own = self._described_schemas["environments"].get(environment, []) if environment else []
        return [schema for name in names for schema in self._described_schemas["tools"][name]] + own

    def template_message(
        self, message: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[PromptImage], int]:
        """A message for the chat template, its images, and the number of unreadable images.

        AgentError if it has images without an `alt` text and the run is text-only.
        """
        content = message_content.map_texts(message["content"], self._without_special_tokens)
        if isinstance(content, str):
            return {**message, "content": content}, [], 0
        if self.image_processor is None:
            if (text := message_content.without_images(content)) is not None:
                return {**message, "content": text}, [], 0
            raise AgentError(
                "config.agent: a tool or an environment returned an image, but this run is"
                " text-only; use a vision-language model, or return no images"
            )
        parts, images = [], list[PromptImage]()
        for part in content:
            if part["type"] == "image":
                try:
                    images.append(self.image_processor.read(part["image"], "an image", files=False))
                    part = {"type": "image"}
                except DataError:
                    part = {"type": "text", "text": message_content.UNREADABLE_IMAGE}
            parts.append(part)
        num_broken = sum(part.get("text") == message_content.UNREADABLE_IMAGE for part in parts)
        return {**message, "content": parts}, images, num_broken

    def _without_special_tokens(self, text: str) -> str:
        return tools.break_special_tokens(text, self.special_token_pattern)


class Episode:
    """One sample of a row. All hosts hold it; the process of its tools runs on one of them."""

    def __init__(self, context: EpisodeContext, prompt: Prompt, number: int):
        self._context, self._config = context, context.config
        self.number, self.prompt = number, prompt
        self.environment, self._tool_names = context.environment_and_tools(prompt.extra_info)
        self._schemas = context.tool_schemas(prompt.extra_info)
        self._options = prompt.options
        self._messages: list[Message] = list(prompt.messages)  # rendered by the template so far
        self._images: list[PromptImage] = list(prompt.images)  # in `_messages`
        self._parsed_turn = ParsedTurn("", ())  # of the last turn
        self._last_token = -1  # the last sampled token
        self._sampled_text = ""  # text of the last turn, as sampled
        self._open_thinking = self._thinking_mark(prompt.tokens)  # the next turn begins inside it
        self.is_lost = False  # the process of its environment is gone: no more answers
        self.log = EpisodeLog(environment=self.environment)

    @property
    def start_request(self) -> dict[str, Any]:
        """The request `start`, the first one that a new process of this episode answers."""
        info = self.prompt.extra_info
        kwargs = info.get("tools_kwargs") or {}  # verl's columns
        row = {**info, **(info.get("interaction_kwargs") or {})}
        row |= {"data_source": self.prompt.data_source, "ground_truth": self.prompt.ground_truth}
        return {
            "do": "start",
            "environment": self.environment,
            "names": self._tool_names,
            "kwargs": kwargs,
            "row": row,
            "seed": self.prompt.index,
        }

    # On the host with the process of the episode.

    def ask_start(self) -> PendingCall:
        """Asks the environment for the messages that follow the prompt."""
        answer = yield self.start_request
        if "problem" in answer:
            return {"messages": [], "lost": True, "errors": _answer_errors(answer, "start_")}
        return {"messages": answer["messages"]}

    def ask_step(self) -> PendingCall:
        """Runs the tool calls of the turn, or asks the environment for its answer."""
        outcome: dict[str, Any] = {"messages": [], "done": False, "reward": 0.0, "seconds": 0.0}
        is_lost = False  # the environment is gone with its process
        errors: collections.Counter[str] = collections.Counter()
        counts: collections.Counter[str] = collections.Counter()
        tool_names = {schema["function"]["name"] for schema in self._schemas}
        if self._parsed_turn.calls and tool_names:
            for number, call in enumerate(self._parsed_turn.calls):
                counts[call.name if call.name in tool_names else "unknown"] += 1
                kind, text = self._call_problem(call, number, tool_names)
                if not kind:
                    request = {"do": "call", "name": call.name, "arguments": dict(call.arguments)}
                    answer = yield request
                    kind, text = answer.get("problem", ""), answer["text"]
                    outcome["seconds"] += answer["seconds"]
                    is_lost |= kind in _PROCESS_ENDED
                    errors.update(_answer_errors(answer))
                else:
                    errors[kind] += 1
                text = f"Error: {text}" if kind else text
                outcome["messages"].append(self._tool_message(number, call, text))
        else:
            answer = yield {"do": "step", "message": self.assistant_message}
            if problem := answer.get("problem"):
                errors.update(_answer_errors(answer))
                outcome["done"], is_lost = True, problem in _PROCESS_ENDED
            else:
                outcome |= answer
        outcome["lost"] = is_lost and bool(self.environment)
        outcome["errors"], outcome["calls"] = dict(+errors), dict(counts)
        return outcome

    def ask_reward(self) -> PendingCall:
        """Asks the environment for the reward of the episode."""
        answer = yield {"do": "reward", "messages": self.log.messages}
        if "problem" in answer:
            return {"reward": 0.0, "errors": _answer_errors(answer, "reward_")}
        return {"reward": answer["reward"], "errors": {}}

    def _call_problem(
        self, call: ParsedToolCall, number: int, tool_names: set[str]
    ) -> tuple[str, str]:
        """The (kind, text) of the problem with a call; both "" if it can run."""
        if number >= self._config.max_calls:
            return "too_many", f"only {self._config.max_calls} calls are made in a turn"
        if call.problem:
            return "format", call.problem
        if call.name not in tool_names:
            return "unknown", f"no tool {call.name!r}; there are {', '.join(sorted(tool_names))}"
        return "", ""

    def _tool_message(
        self, number: int, call: ParsedToolCall, content: message_content.MessageContent
    ) -> dict[str, Any]:
        content = message_content.map_texts(content, self._truncated)
        return {
            "role": "tool",
            "name": call.name,
            "tool_call_id": call_id(number),
            "content": content,
        }

    def _truncated(self, text: str) -> str:
        config = self._config
        return tools.truncate_text(text, config.max_result_characters, config.cut_results)

    # On all hosts.

    @property
    def assistant_message(self) -> dict[str, Any]:
        """The policy's turn as a message."""
        message: dict[str, Any] = {"role": "assistant", "content": self._parsed_turn.text}
        tool_calls = [
            {
                "type": "function",
                "id": call_id(number),
                "function": {"name": call.name or "unknown", "arguments": dict(call.arguments)},
            }
            for number, call in enumerate(self._parsed_turn.calls)
        ]
        return {**message, "tool_calls": tool_calls} if tool_calls and self._schemas else message

    def record_turn(self, tokens: Sequence[int], stopped: bool) -> bool:
        """Records a turn of the policy; returns whether a tool or the environment answers it."""
        tokenizer = self._context.tokenizer
        self._last_token = tokens[-1]
        special_ids = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        content_tokens = tokens[:-1] if stopped and self._last_token in special_ids else tokens
        text = str(tokenizer.decode(list(content_tokens), skip_special_tokens=False))
        self._sampled_text = text
        call_format = tool_call_formats.FORMATS.get(self._context.call_format)
        schemas = schemas_of(self._schemas)
        if call_format and schemas:
            self._parsed_turn = call_format.parse(text, schemas, self._open_thinking)
        else:
            self._parsed_turn = ParsedTurn(text.strip(), ())
        self.log.num_turns += 1
        self.log.messages.append(self.assistant_message)
        if not stopped or self.is_lost or (not self._parsed_turn.calls and not self.environment):
            return False
        if self.log.seconds >= self._config.max_tool_s:
            self.log.errors["tool_seconds"] += 1
            return False
        # The environment judges the last turn too; the result of a call could not be used.
        return not (self._parsed_turn.calls and self._is_last_turn)

    @property
    def _is_last_turn(self) -> bool:
        return self.log.num_turns >= self._config.max_turns

    def apply_start(self, outcome: Mapping[str, Any]) -> Prompt:
        """Applies the outcome of `ask_start`; returns the prompt with the environment's part."""
        self.log.errors.update(outcome.get("errors", {}))
        self.is_lost = bool(outcome.get("lost"))
        following = self._template_messages(outcome["messages"])
        if following:
            self._messages += following
            text = prompt_text(self._context.tokenizer, self._messages, True, self._options)
            (tokens,) = prompt_tokens(self._context.tokenizer, [text], True)
            where = f"environment {self.environment!r}"
            tokens, images = expand_tokens(
                self._context.image_processor, tokens, self._images, where
            )
            text = without_guards(text)
            fields = {**vars(self.prompt), "tokens": tokens, "text": text, "images": images}
            self.prompt = Prompt(**{**fields, "messages": tuple(self._messages)})
            self._open_thinking = self._thinking_mark(tokens)
        return self.prompt

    def observe(self, outcome: Mapping[str, Any]) -> template_delta.TemplateDelta:
        """Applies the outcome of `ask_step`; returns the tokens that follow, none at the end."""
        log = self.log
        log.turn_rewards += [0.0] * (log.num_turns - 1 - len(log.turn_rewards))
        log.turn_rewards.append(float(outcome["reward"]))
        log.errors.update(outcome["errors"])
        log.calls.update(outcome["calls"])
        log.seconds += float(outcome["seconds"])
        self.is_lost = bool(outcome["lost"])
        num_before = len(self._images)
        following = self._template_messages(outcome["messages"])
        log.messages += following
        if outcome["done"] or self.is_lost or not following or self._is_last_turn:
            return EPISODE_END
        try:
            delta = template_delta.delta_after_turn(
                self._context.tokenizer,
                messages_before=self._messages,
                assistant_message=self.assistant_message,
                following_messages=following,
                options=self._options,
                last_token=self._last_token,
                sampled_text=self._sampled_text,
            )
            new_images = self._images[0 if delta.rewrites else num_before :]
            delta = delta._replace(**self._expanded_images(delta.tokens, new_images))
        except DataError:  # the template rejects such a dialogue
            log.errors["template"] += 1
            return EPISODE_END
        log.num_rewritten += delta.rewrites
        self._messages = [*self._messages, self.assistant_message, *following]
        self._open_thinking = self._thinking_mark(delta.tokens)
        return delta

    def apply_reward(self, outcome: Mapping[str, Any]) -> None:
        """Applies the outcome of `ask_reward`."""
        self.log.reward += float(outcome["reward"])
        self.log.errors.update(outcome["errors"])

    def _template_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages for the template; records their images and broken images."""
        template_messages = []
        for message in messages:
            template_message, images, num_broken = self._context.template_message(message)
            template_messages.append(template_message)
            self._images += images
            self.log.errors.update({"image": num_broken} if num_broken else {})
        return template_messages

    def _thinking_mark(self, tokens: Sequence[int]) -> str:
        """The mark of the thinking block that is open at the end of the tokens, "" if none is."""
        end = self._context.tokenizer.decode(
            list(tokens[-THINKING_TOKENS:]), skip_special_tokens=False
        )
        return open_thinking_mark(str(end))

    def _expanded_images(
        self, tokens: Sequence[int], images: Sequence[PromptImage]
    ) -> dict[str, Any]:
        expanded_tokens, placed_images = expand_tokens(
            self._context.image_processor, tokens, images, "an addition"
        )
        return {"tokens": expanded_tokens, "images": placed_images}


def _answer_errors(answer: Answer, prefix: str = "") -> dict[str, int]:
    """The errors of an answer: its problem, and that of closing the environment after it."""
    errors = {f"{prefix}{answer['problem']}": 1} if answer.get("problem") else {}
    return errors | ({f"end_{answer['end_problem']}": 1} if "end_problem" in answer else {})


def call_id(number: int) -> str:
    """The id of a call within its turn: nine characters, as some templates require."""
    return f"{number:09d}"
