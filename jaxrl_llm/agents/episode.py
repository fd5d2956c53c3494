"""One episode: the dialogue between the policy and its tools and environment, turn by turn."""

import collections
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrl_llm.agents import additions, contents, tool_call_formats, tools
from jaxrl_llm.agents.pool import AgentError, Answer
from jaxrl_llm.agents.tool_call_arguments import schemas_of
from jaxrl_llm.agents.tool_call_formats import ParsedTurn, ToolCall
from jaxrl_llm.agents.tool_call_scanner import open_thinking_mark
from jaxrl_llm.config.agent import AgentConfig
from jaxrl_llm.data.encoding import without_guards
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.pictures import Pictures, expanded
from jaxrl_llm.data.tokenizer import Message, prompt_text, prompt_tokens
from jaxrl_llm.types import EpisodeLog, Picture, Prompt

_LOST = ("timeout", "ended")  # problems with which a process ends
_END_TOKENS = 16  # at the end of a prompt, which hold a mark that opens thinking
NOTHING = additions.Addition((), False)  # follows: the episode has ended

# What an episode asks its process, the answers, and the outcome.
Talk = Generator[Mapping[str, Any], Answer, dict[str, Any]]


def call_format(config: AgentConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """The format in which the model writes calls, "" if the chat template does not tell it."""
    if config.call_format != "auto":
        return config.call_format
    return tool_call_formats.format_name(str(tokenizer.chat_template or ""))


class Rules:
    """What all episodes of a run have in common."""

    def __init__(
        self,
        config: AgentConfig,
        tokenizer: PreTrainedTokenizerBase,
        described: Mapping[str, Any],
        pictures: Pictures | None = None,
    ):
        """`described` is what `Pool.describe` returned; `pictures` reads images, if the run can."""
        self.config, self.tokenizer, self._described = config, tokenizer, described
        self.pictures = pictures
        self.call_format = call_format(config, tokenizer)
        self.special = tools.special_tokens(tokenizer)

    def tools_of(self, extra_info: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        """Returns (environment, names of the config's tools) of a row."""
        name = str(extra_info.get("agent_name") or "")
        if name == "single_turn_agent":
            return "", ()
        selected = extra_info.get("tool_selection")
        wanted = self.config.tools if selected is None else tuple(
            tool for tool in self.config.tools if self._names(tool) & set(selected)
        )  # fmt: skip
        return self.config.environment_of(name), wanted

    def _names(self, tool: str) -> set[str]:
        schemas = self._described["tools"][tool]
        return {tool, *(schema["function"]["name"] for schema in schemas)}

    def schemas(self, extra_info: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Returns the schemas of a row's tools, those of its environment last."""
        environment, names = self.tools_of(extra_info)
        own = self._described["environments"].get(environment, []) if environment else []
        return [schema for name in names for schema in self._described["tools"][name]] + own

    def told(self, message: Mapping[str, Any]) -> tuple[dict[str, Any], list[Picture], int]:
        """Returns a message for the template, its images, and how many of these are broken.

        AgentError if it has images without a text in their place, and this run reads none.
        """
        said = contents.texts_of(message["content"], self._harmless)
        if isinstance(said, str):
            return {**message, "content": said}, [], 0
        if self.pictures is None:
            if (text := contents.without_images(said)) is not None:
                return {**message, "content": text}, [], 0
            raise AgentError(
                "config.agent: a tool or an environment gave an image, but this run reads text"
                " alone; use a model of text and images, without what is refused for prompts with"
                " images"
            )
        parts, found = [], list[Picture]()
        for part in said:
            if part["type"] == "image":
                try:
                    found.append(self.pictures.read(part["image"], "an image", files=False))
                    part = {"type": "image"}
                except DataError:
                    part = {"type": "text", "text": contents.UNREADABLE}
            parts.append(part)
        broken = sum(part.get("text") == contents.UNREADABLE for part in parts)
        return {**message, "content": parts}, found, broken

    def _harmless(self, text: str) -> str:
        return tools.harmless(text, self.special)


class Episode:
    """One sample of a row. All hosts hold it; the process that its tools live in is one host's."""

    def __init__(self, rules: Rules, prompt: Prompt, number: int):
        self._rules, self._config = rules, rules.config
        self.number, self.prompt = number, prompt
        self.environment, self._names = rules.tools_of(prompt.extra_info)
        self._schemas = rules.schemas(prompt.extra_info)
        self._options = prompt.options
        self._messages: list[Message] = list(prompt.messages)  # those that the template has shown
        self._images: list[Picture] = list(prompt.images)  # of these
        self._turn = ParsedTurn("", ())  # the last one
        self._last = -1  # the last token that was sampled
        self._sampled = ""  # the text of the last turn, as it was sampled
        self._open_thinking = self._thinking_mark(prompt.tokens)  # the policy's next turn is in it
        self.is_lost = False  # its environment ended with its process: nothing answers any more
        self.log = EpisodeLog(environment=self.environment)

    @property
    def beginning(self) -> dict[str, Any]:
        """The request that a new process of this episode answers first."""
        info = self.prompt.extra_info
        kwargs = info.get("tools_kwargs") or {}  # verl's columns
        row = {**info, **(info.get("interaction_kwargs") or {})}
        row |= {"data_source": self.prompt.data_source, "ground_truth": self.prompt.ground_truth}
        return {
            "do": "start",
            "environment": self.environment,
            "names": self._names,
            "kwargs": kwargs,
            "row": row,
            "seed": self.prompt.index,
        }

    # What the host with its process does.

    def opened(self) -> Talk:
        """Asks the environment for the messages that follow the prompt."""
        answer = yield self.beginning
        if problem := answer.get("problem"):
            return {"messages": [], "lost": True, "errors": {f"start_{problem}": 1}}
        return {"messages": answer["messages"]}

    def answered(self) -> Talk:
        """Makes the calls of the turn, or asks the environment."""
        found: dict[str, Any] = {"messages": [], "done": False, "reward": 0.0, "seconds": 0.0}
        lost = False  # the environment, with its process
        errors: collections.Counter[str] = collections.Counter()
        counts: collections.Counter[str] = collections.Counter()
        known = {schema["function"]["name"] for schema in self._schemas}
        if self._turn.calls and known:
            for number, call in enumerate(self._turn.calls):
                counts[call.name if call.name in known else "unknown"] += 1
                kind, text = self._refused(call, number, known)
                if not kind:
                    request = {"do": "call", "name": call.name, "arguments": dict(call.arguments)}
                    answer = yield request
                    kind, text = answer.get("problem", ""), answer["text"]
                    found["seconds"] += answer["seconds"]
                    lost |= kind in _LOST
                errors[kind] += bool(kind)
                text = f"Error: {text}" if kind else text
                found["messages"].append(self._reply(number, call, text))
        else:
            answer = yield {"do": "step", "message": self.answer}
            if problem := answer.get("problem"):
                errors[problem] += 1
                found["done"], lost = True, problem in _LOST
            else:
                found |= answer
        found["lost"] = lost and bool(self.environment)
        found["errors"], found["calls"] = dict(+errors), dict(counts)
        return found

    def rewarded(self) -> Talk:
        """Asks the environment what the episode is worth."""
        answer = yield {"do": "reward", "messages": self.log.messages}
        if kind := answer.get("problem"):
            return {"reward": 0.0, "errors": {f"reward_{kind}": 1}}
        return {"reward": answer["reward"], "errors": {}}

    def _refused(self, call: ToolCall, number: int, known: set[str]) -> tuple[str, str]:
        """Returns (kind, text) of the problem with a call; "" if it can be made."""
        if number >= self._config.max_calls:
            return "too_many", f"only {self._config.max_calls} calls are made in a turn"
        if call.problem:
            return "format", call.problem
        if call.name not in known:
            return "unknown", f"no tool {call.name!r}; there are {', '.join(sorted(known))}"
        return "", ""

    def _reply(self, number: int, call: ToolCall, said: contents.Content) -> dict[str, Any]:
        said = contents.texts_of(said, self._cut)
        return {"role": "tool", "name": call.name, "tool_call_id": call_id(number), "content": said}

    def _cut(self, text: str) -> str:
        config = self._config
        return tools.shortened(text, config.max_result_characters, config.cut_results)

    # What all hosts do.

    @property
    def answer(self) -> dict[str, Any]:
        """The policy's turn as a message."""
        message: dict[str, Any] = {"role": "assistant", "content": self._turn.text}
        made = [
            {
                "type": "function",
                "id": call_id(number),
                "function": {"name": call.name or "unknown", "arguments": dict(call.arguments)},
            }
            for number, call in enumerate(self._turn.calls)
        ]
        return {**message, "tool_calls": made} if made and self._schemas else message

    def take(self, tokens: Sequence[int], stopped: bool) -> bool:
        """Takes in a turn of the policy; returns whether something answers it."""
        tokenizer = self._rules.tokenizer
        self._last = tokens[-1]
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        body = tokens[:-1] if stopped and self._last in special else tokens
        text = str(tokenizer.decode(list(body), skip_special_tokens=False))
        self._sampled = text
        call_format = tool_call_formats.FORMATS.get(self._rules.call_format)
        schemas = schemas_of(self._schemas)
        if call_format and schemas:
            self._turn = call_format.parse(text, schemas, self._open_thinking)
        else:
            self._turn = ParsedTurn(text.strip(), ())
        self.log.num_turns += 1
        self.log.messages.append(self.answer)
        if not stopped or self.is_lost or (not self._turn.calls and not self.environment):
            return False
        if self.log.seconds >= self._config.max_tool_s:
            self.log.errors["tool_seconds"] += 1
            return False
        # The environment judges the last turn too; a call would be in vain.
        return not (self._turn.calls and self._is_last)

    @property
    def _is_last(self) -> bool:
        return self.log.num_turns >= self._config.max_turns

    def open(self, outcome: Mapping[str, Any]) -> Prompt:
        """Takes in what the environment begins with; returns the prompt with that."""
        self.log.errors.update(outcome.get("errors", {}))
        self.is_lost = bool(outcome.get("lost"))
        following = self._heard(outcome["messages"])
        if following:
            self._messages += following
            text = prompt_text(self._rules.tokenizer, self._messages, True, self._options)
            (tokens,) = prompt_tokens(self._rules.tokenizer, [text], True)
            where = f"environment {self.environment!r}"
            tokens, images = expanded(self._rules.pictures, tokens, self._images, where)
            text = without_guards(text)
            fields = {**vars(self.prompt), "tokens": tokens, "text": text, "images": images}
            self.prompt = Prompt(**{**fields, "messages": tuple(self._messages)})
            self._open_thinking = self._thinking_mark(tokens)
        return self.prompt

    def hear(self, outcome: Mapping[str, Any]) -> additions.Addition:
        """Takes in what answers a turn; returns the tokens that follow, none at the end."""
        log = self.log
        log.turn_rewards += [0.0] * (log.num_turns - 1 - len(log.turn_rewards))
        log.turn_rewards.append(float(outcome["reward"]))
        log.errors.update(outcome["errors"])
        log.calls.update(outcome["calls"])
        log.seconds += float(outcome["seconds"])
        self.is_lost = bool(outcome["lost"])
        num_before = len(self._images)
        following = self._heard(outcome["messages"])
        log.messages += following
        if outcome["done"] or self.is_lost or not following or self._is_last:
            return NOTHING
        try:
            found = additions.addition(
                self._rules.tokenizer,
                self._messages,
                self.answer,
                following,
                self._options,
                self._last,
                self._sampled,
            )
            seen = self._images[0 if found.rewrites else num_before :]
            found = found._replace(**self._with_images(found.tokens, seen))
        except DataError:  # the template refuses such a dialogue
            log.errors["template"] += 1
            return NOTHING
        log.num_rewritten += found.rewrites
        self._messages = [*self._messages, self.answer, *following]
        self._open_thinking = self._thinking_mark(found.tokens)
        return found

    def finish(self, outcome: Mapping[str, Any]) -> None:
        """Takes in what the episode is worth."""
        self.log.reward += float(outcome["reward"])
        self.log.errors.update(outcome["errors"])

    def _heard(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns messages for the template; their images are taken in."""
        found = []
        for message in messages:
            told, images, broken = self._rules.told(message)
            found.append(told)
            self._images += images
            self.log.errors.update({"image": broken} if broken else {})
        return found

    def _thinking_mark(self, tokens: Sequence[int]) -> str:
        """The mark of the thinking that these tokens open at their end, "" if they open none."""
        end = self._rules.tokenizer.decode(list(tokens[-_END_TOKENS:]), skip_special_tokens=False)
        return open_thinking_mark(str(end))

    def _with_images(self, tokens: Sequence[int], images: Sequence[Picture]) -> dict[str, Any]:
        every, placed = expanded(self._rules.pictures, tokens, images, "an addition")
        return {"tokens": every, "images": placed}


def call_id(number: int) -> str:
    """Returns the name of a turn's call: nine characters, as some templates demand."""
    return f"{number:09d}"
