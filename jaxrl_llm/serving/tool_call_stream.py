"""Incremental parsing of a reply into thinking, text and tool calls."""

import json
import re
import uuid
from typing import Any, NamedTuple

from jaxrl_llm.agents.tool_call_arguments import Schemas
from jaxrl_llm.agents.tool_call_formats import FORMATS, thinking_and_text
from jaxrl_llm.agents.tool_call_scanner import ScannedCall, Scanner, Thinking


class ExpectedCalls(NamedTuple):
    """The tool calls and the thinking that a reply in a chat may have."""

    call_format: str  # "": no tools were offered
    schemas: Schemas
    call_start: str = ""  # text prefilled to force a call, with which each reply begins
    only_one: bool = False  # calls after the first are dropped
    open_thinking: str = ""  # the mark with which the prompt has opened thinking
    drops_thinking: bool = False  # the client does not want to see it


class StreamedCall(NamedTuple):
    """A tool call in a reply of OpenAI's API."""

    number: int  # in its reply, from 0
    name: str
    arguments: str  # a JSON object
    call_id: str

    def as_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class ReplyDelta(NamedTuple):
    """The part of a reply that has become final since the last delta."""

    text: str
    reasoning: str
    calls: tuple[StreamedCall, ...]


class ToolCallStream:
    """Splits a streamed reply into thinking, text and tool calls, each returned once it is final.

    The results of `extend` add up to the same, however the text is split. If a call cannot be
    parsed, the text from that call on is returned verbatim.
    """

    def __init__(self, expected: ExpectedCalls, special_tokens: re.Pattern[str] | None):
        self._special_tokens, self._only_one = special_tokens, expected.only_one
        self._scanner = Scanner(expected.call_start)
        has_tools = bool(expected.call_format)
        events = FORMATS[expected.call_format].events if has_tools else thinking_and_text
        self._events = events(self._scanner, expected.schemas, expected.open_thinking)
        self._drops_thinking = expected.drops_thinking
        self._is_faulty = False  # return the rest verbatim
        self._text = _StrippedText(special_tokens, keeps_ends=not has_tools)
        self._reasoning = _StrippedText(special_tokens)
        self.num_calls = 0

    def extend(self, text: str, ended: bool, stopped: bool = True) -> ReplyDelta:
        """The part of the reply that is final now.

        Args:
          text: What the model added, with its special tokens.
          ended: Whether nothing follows; `stopped` is false where a limit ended it.
        """
        scanner = self._scanner
        scanner.text += text
        scanner.ended = ended
        texts: list[str] = [text] if self._is_faulty else []
        thoughts: list[str] = []
        calls: list[StreamedCall] = []
        while not self._is_faulty:
            event = next(self._events, None)
            if event is None:
                break
            if isinstance(event, str):
                texts.append(event)
            elif isinstance(event, Thinking):
                self._text.keeps_ends = False  # a template puts space between thinking and text
                thoughts.append("" if event.is_mark or self._drops_thinking else event.text)
            elif event.problem or not (event.complete or stopped):
                self._is_faulty = True
                texts.append(scanner.text[event.start :])
            elif self.num_calls == 0 or not self._only_one:
                calls.append(_streamed_call(self.num_calls, event))
                self.num_calls += 1
        reasoning = self._reasoning.extend("".join(thoughts))
        return ReplyDelta(self._text.extend("".join(texts)), reasoning, tuple(calls))


class _StrippedText:
    """Growing text without special tokens and, unless `keeps_ends`, without space at its ends."""

    def __init__(self, special_tokens: re.Pattern[str] | None, keeps_ends: bool = False):
        self._special_tokens, self.keeps_ends = special_tokens, keeps_ends
        self._space = ""  # trailing space, returned only if text follows
        self._any_text = False  # whether any text was returned

    def extend(self, text: str) -> str:
        """The part of the text that is final now."""
        if self._special_tokens is not None:
            text = self._special_tokens.sub("", text)
        if self.keeps_ends:
            return text
        text = self._space + text if self._any_text else text.lstrip()
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        self._any_text |= bool(stripped)
        return stripped


def _streamed_call(number: int, call: ScannedCall) -> StreamedCall:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return StreamedCall(number, call.name, arguments, f"call_{uuid.uuid4().hex[:24]}")
