"""The text of a reply and its calls of tools, as they grow."""

import json
import re
import uuid
from typing import Any, NamedTuple

from jaxrl_llm.agents.tool_call_arguments import Schemas
from jaxrl_llm.agents.tool_call_formats import FORMATS
from jaxrl_llm.agents.tool_call_scanner import ScannedCall, Scanner


class ExpectedCalls(NamedTuple):
    """The calls that a reply in a chat with tools may make."""

    call_format: str
    schemas: Schemas
    begun: str = ""  # how each reply begins, in the model's stead: a call that has to be made
    only_one: bool = False  # calls after the first are dropped
    open_thinking: str = ""  # the mark with which the prompt has opened thinking


class StreamedCall(NamedTuple):
    """A call as OpenAI's API tells it."""

    number: int  # in its reply, from 0
    name: str
    arguments: str  # a JSON object
    call_id: str

    def as_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class ToolCallStream:
    """Splits a growing reply into text and calls, each told as soon as it is certain.

    What `extend` returns adds up to the same, whatever pieces the text comes in. If a call cannot
    be read, the text from that call on is told as it was written.
    """

    def __init__(self, expected: ExpectedCalls, special_tokens: re.Pattern[str] | None):
        self._special_tokens, self._only_one = special_tokens, expected.only_one
        self._scanner = Scanner(expected.begun)
        self._events = FORMATS[expected.call_format].events(
            self._scanner, expected.schemas, expected.open_thinking
        )
        self._is_faulty = False  # all that follows is told as it is
        self._space = ""  # it is told if a text follows
        self._any_told = False  # of the reply's text
        self.num_calls = 0

    def extend(
        self, text: str, ended: bool, stopped: bool = True
    ) -> tuple[str, tuple[StreamedCall, ...]]:
        """Returns the (text, calls) that are certain now.

        Args:
          text: What the model added, with its special tokens.
          ended: Whether nothing follows; `stopped` is false where a limit ended it.
        """
        scanner = self._scanner
        scanner.text += text
        scanner.ended = ended
        texts: list[str] = [text] if self._is_faulty else []
        calls: list[StreamedCall] = []
        while not self._is_faulty:
            event = next(self._events, None)
            if event is None:
                break
            if isinstance(event, str):
                texts.append(event)
            elif event.problem or not (event.complete or stopped):
                self._is_faulty = True
                texts.append(scanner.text[event.start :])
            elif self.num_calls == 0 or not self._only_one:
                calls.append(_streamed_call(self.num_calls, event))
                self.num_calls += 1
        return self._tidied("".join(texts)), tuple(calls)

    def _tidied(self, text: str) -> str:
        """A text without special tokens, and without space at both ends of the reply."""
        if self._special_tokens is not None:
            text = self._special_tokens.sub("", text)
        text = self._space + text if self._any_told else text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._any_told |= bool(kept)
        return kept


def _streamed_call(number: int, call: ScannedCall) -> StreamedCall:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return StreamedCall(number, call.name, arguments, f"call_{uuid.uuid4().hex[:24]}")
