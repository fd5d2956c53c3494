"""Grammars of a model's replies: thinking, then an answer or calls of tools.

The server constrains replies by them (`response_format`, strict tools, `tool_choice`), and episodes
with `agent.strict_tools` their turns.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from jaxrl_llm.agents.episode import call_id
from jaxrl_llm.agents.template_delta import with_json_arguments
from jaxrl_llm.agents.tool_call_formats import FORMATS
from jaxrl_llm.agents.tool_call_grammars import (
    AllowedTool,
    Call,
    CallGrammar,
    CallGrammarError,
    call_grammar,
)
from jaxrl_llm.agents.tool_call_scanner import (
    THINKING_TOKENS,
    open_thinking_mark,
    thinking_marks,
)
from jaxrl_llm.data import tokenizer as tokenizer_lib
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tokenizer import Message
from jaxrl_llm.rollout.engine.grammars import Grammar, GrammarError
from jaxrl_llm.rollout.structured_outputs import GrammarCompiler, GrammarPart, GrammarSource
from jaxrl_llm.types import Prompt


class Constraint(NamedTuple):
    """A grammar that the text of a reply must follow."""

    part: GrammarPart
    setting: str  # the field that asks for it


class ReplyMarks(NamedTuple):
    """The texts by which a model marks the parts of its reply; "" where it has none."""

    thinking: tuple[str, ...] = ()  # opening and closing mark; (): the model does not think
    open_thinking: str = ""  # the opening mark, if the prompt ends with it
    answer_start: str = ""
    call_start: str = ""  # with which calls begin behind text


def reply_grammar(
    literal: Callable[[str], str],
    *,
    answer: Constraint | None,
    calls: CallGrammar | None,
    has_text: bool,
    marks: ReplyMarks,
) -> GrammarSource:
    """The constraint of a chat's reply: thinking, if the model does, then an answer or calls.

    Args:
      literal: A text as a Lark expression.
      answer: Of the text.
      calls: Calls of tools that may be made, without `call_start` if `has_text`; None: none.
      has_text: Whether a text without a constraint may stand before calls, or alone.
      marks: Of the model.
    """
    rules = ["TEXT: /(.|\\n)*/", "SPACE: /[ \\n]{0,4}/"]
    parts: list[tuple[str, str]] = []
    alternatives: list[str] = []
    if answer is not None:
        alternatives.append(f"{literal(marks.answer_start)} @answer")
        parts.append(("answer", json.dumps(answer.part)))
    if calls is not None:
        rules += calls.rules
        parts += [(name, json.dumps({"json_schema": schema})) for name, schema in calls.parts]
        alternatives.append("text_before_calls calls" if has_text else "calls")
        if has_text:
            # Calls that no mark begins are objects: other text begins with another character.
            is_marked = marks.call_start or marks.answer_start
            rules.append("ANSWER: " + ("TEXT" if is_marked else r"/([^{](.|\n)*)?/"))
            alternatives.append(f"{literal(marks.answer_start)} ANSWER")
            rules.append(_marked_text("text_before_calls", literal(marks.call_start)))
    thinking = ""
    if marks.thinking:
        opening, closing = map(literal, marks.thinking)
        rules.append(_marked_text("thoughts", closing))
        thinking = "thoughts SPACE" if marks.open_thinking else f"({opening} thoughts SPACE)?"
    rules = [f"start: {thinking} ({' | '.join(alternatives)})", *rules]
    return GrammarSource("\n".join(rules), tuple(parts), answer.setting if answer else "tools")


def _marked_text(rule: str, mark: str) -> str:
    """A rule for a text and the mark that ends it, where the mark occurs for the first time."""
    if mark == '""':
        return f'{rule}: ""'
    # Tokens are in no text. Of text, the shortest is taken that ends with the mark.
    return f"{rule}: TEXT {mark}" if mark.startswith("<[") else f"{rule}[lazy]: TEXT {mark}"


def reply_marks(call_format: str, chat_template: str, prompt_end: str) -> ReplyMarks:
    """The marks of thinking and answers, as the format of calls or the template has them.

    Args:
      call_format: A key of `FORMATS`; "": the model calls no tools.
      prompt_end: The end of the prompt, which may open thinking.
    """
    row = FORMATS[call_format] if call_format else None
    return ReplyMarks(
        row.thinking_marks if row and row.thinking_marks else thinking_marks(chat_template),
        open_thinking_mark(prompt_end),
        row.answer_start if row else "",
        row.call_mark if row else "",
    )


def template_call(number: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call for chat templates, the one with this number in its turn."""
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": call_id(number), "function": function}


def render_messages(render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> str:
    """The rendered messages; call arguments are objects or, if the template fails, JSON strings."""
    try:
        return render(messages)
    except DataError:
        return render(with_json_arguments(messages))


def turn_with_calls(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    calls: Sequence[Call],
) -> str:
    """The dialogue and a turn of the assistant with these calls, rendered."""

    def render_text(dialogue: Sequence[Message]) -> str:
        return str(tokenizer_lib.render_chat(tokenizer, dialogue, options, tokenize=False))

    tool_calls = [template_call(number, *call) for number, call in enumerate(calls)]
    turn = {"role": "assistant", "content": "", "tool_calls": tool_calls}
    return render_messages(render_text, [*messages, turn])


class StrictToolGrammars:
    """Grammars of the turns of episodes whose tools are strict: text, or calls that are valid.

    Each call has the name of an offered tool, and arguments that are valid by its schema, and named
    there.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        tokenizer: PreTrainedTokenizerBase,
        call_format: str,
        end_tokens: Sequence[int],
    ):
        """`end_tokens` end a turn."""
        self._compiler, self._tokenizer, self._call_format = compiler, tokenizer, call_format
        self._ends = [compiler.token_text(token) for token in end_tokens]
        # By the schemas of the tools and the mark of open thinking.
        self._grammars: dict[tuple[str, str], Grammar] = {}

    def grammar(self, prompt: Prompt, tokens: Sequence[int] = ()) -> Grammar | None:
        """The grammar of the turn that follows `tokens` (default: the prompt's); None: no tools.

        Raises:
          GrammarError: If calls of these tools cannot be constrained; says why.
        """
        tools = prompt.options.get("tools")
        if not tools:
            return None
        last = list(tokens or prompt.tokens)[-THINKING_TOKENS:]
        end = str(self._tokenizer.decode(last, skip_special_tokens=False))
        key = json.dumps(tools, sort_keys=True), open_thinking_mark(end)
        if key not in self._grammars:
            self._grammars[key] = self._compiler.compile(self._source(prompt, tools, end))
        return self._grammars[key]

    def _source(
        self, prompt: Prompt, tools: Sequence[Mapping[str, Any]], end: str
    ) -> GrammarSource:
        template, messages = str(self._tokenizer.chat_template), prompt.messages
        marks = reply_marks(self._call_format, template, end)
        text = tokenizer_lib.prompt_text(self._tokenizer, messages, True, prompt.options)

        def render(calls: Sequence[Call]) -> str:
            turn = turn_with_calls(self._tokenizer, messages, prompt.options, calls)
            return turn.removeprefix(text)

        functions = [tool["function"] for tool in tools]
        # A tool gets no arguments that its schema does not name, unless it says so.
        closed = {"additionalProperties": False}
        try:
            calls = call_grammar(
                self._call_format,
                render,
                [
                    AllowedTool(each["name"], closed | (each.get("parameters") or {}))
                    for each in functions
                ],
                self._compiler.literal,
                self._ends,
                written=marks.call_start,
            )
        except CallGrammarError as error:
            raise GrammarError(f"config.agent.strict_tools: {error}") from error
        source = reply_grammar(
            self._compiler.literal, answer=None, calls=calls, has_text=True, marks=marks
        )
        return dataclasses.replace(source, setting="config.agent.strict_tools")
