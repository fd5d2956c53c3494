"""Incremental parsing of a reply into text and tool calls."""

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
    call_start: str = ""  # text prefilled to force a call, with which each reply begins
    only_one: bool = False  # calls after the first are dropped
    open_thinking: str = ""  # the mark with which the prompt has opened thinking


class StreamedCall(NamedTuple):
    """A tool call in a reply of OpenAI's API."""

    number: int  # in its reply, from 0
    name: str
    arguments: str  # a JSON object
    call_id: str

    def as_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class ToolCallStream:
    """Splits a streamed reply into text and tool calls, each returned as soon as it is final.

    The results of `extend` add up to the same, however the text is split. If a call cannot be
    parsed, the text from that call on is returned verbatim.
    """

    def __init__(self, expected: ExpectedCalls, special_tokens: re.Pattern[str] | None):
        self._special_tokens, self._only_one = special_tokens, expected.only_one
        self._scanner = Scanner(expected.call_start)
        self._events = FORMATS[expected.call_format].events(
            self._scanner, expected.schemas, expected.open_thinking
        )
        self._is_faulty = False  # return the rest verbatim
        self._space = ""  # trailing space, returned only if text follows
        self._any_text = False  # whether any text was returned
        self.num_calls = 0

    def extend(
        self, text: str, ended: bool, stopped: bool = True
    ) -> tuple[str, tuple[StreamedCall, ...]]:
        """The (text, calls) that are final now.

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
        return self._stripped_text("".join(texts)), tuple(calls)

    def _stripped_text(self, text: str) -> str:
        """`text` without special tokens and without space at either end of the reply."""
        if self._special_tokens is not None:
            text = self._special_tokens.sub("", text)
        text = self._space + text if self._any_text else text.lstrip()
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        self._any_text |= bool(stripped)
        return stripped


def _streamed_call(number: int, call: ScannedCall) -> StreamedCall:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return StreamedCall(number, call.name, arguments, f"call_{uuid.uuid4().hex[:24]}")
