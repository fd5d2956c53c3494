"""The text of a reply and its calls of tools, as they grow."""

import json
import re
import uuid
from typing import Any, NamedTuple

from jaxrl_llm.agents import calls
from jaxrl_llm.agents.calls import Call, Schemas


class Expected(NamedTuple):
    """What the client of a chat with tools expects."""

    call_format: str
    schemas: Schemas
    begun: str = ""  # how each reply begins, in the model's stead: a call that has to be made
    only_one: bool = False  # calls after the first are dropped


class Made(NamedTuple):
    """A call as OpenAI's API tells it."""

    number: int  # in its reply, from 0
    name: str
    arguments: str  # a JSON object
    call_id: str

    def as_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class Reader:
    """Reads one reply: text is told once it is certain, a call once another one follows it.

    What `extend` returns adds up to the same, whatever pieces the text comes in. If a call cannot
    be read, the text from the first call on is told as it was written.
    """

    def __init__(self, expected: Expected, special_tokens: re.Pattern[str] | None):
        self._expected, self._special_tokens = expected, special_tokens
        self._read = calls.FORMATS[expected.call_format]
        self._beginning = calls.BEGINNINGS[expected.call_format]
        self._before = expected.begun  # text before the first call that is not told
        self._calls: str | None = None  # from the first call on
        self._num_told = 0  # characters of what the format reads there as text
        self._space = ""  # it is told if a text follows
        self._any_told = False  # of the reply's text
        self.num_calls = 0

    def extend(self, text: str, ended: bool, stopped: bool = True) -> tuple[str, tuple[Made, ...]]:
        """Returns the (text, calls) that are certain now.

        Args:
          text: What the model added, with its special tokens.
          ended: Whether nothing follows; `stopped` is false where a limit ended it.
        """
        told = ""
        if self._calls is None:
            self._before += text
            if found := self._beginning.search(self._before):
                told, self._calls = self._before[: found.start()], self._before[found.start() :]
            else:
                sure = len(self._before) - (0 if ended else calls.num_undecided(self._before))
                told, self._before = self._before[:sure], self._before[sure:]
                return self._tidied(told), ()
        else:
            self._calls += text
        more, made = self._found(ended, stopped)
        return self._tidied(told + more), made

    def _found(self, ended: bool, stopped: bool) -> tuple[str, tuple[Made, ...]]:
        """Returns the (text, calls) from the first call on that were not told."""
        assert self._calls is not None
        said = self._read(self._calls, self._expected.schemas)
        complete = list(said.calls if ended else said.calls[:-1])
        broken = [i for i, call in enumerate(complete) if call.problem]
        if not stopped and self._calls.startswith("<tool_call>"):  # a limit may have cut the last
            broken.append(self._calls.count(calls.CLOSE))
        valid = min([*broken, len(complete)])
        most = 1 if self._expected.only_one else valid
        new = range(self.num_calls, min(valid, most))
        made = tuple(_made(i, complete[i]) for i in new)
        self.num_calls += len(made)
        text = ""
        if ended and valid < len(complete) and not self._num_told:
            text = self._calls
        elif ended or self._expected.call_format == "harmony":  # in others calls come last
            text, self._num_told = said.text[self._num_told :], len(said.text)
        return text, made

    def _tidied(self, text: str) -> str:
        """Returns a text without special tokens, and without space at both ends of the reply."""
        if self._special_tokens is not None:
            text = self._special_tokens.sub("", text)
        text = self._space + text if self._any_told else text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._any_told |= bool(kept)
        return kept


def _made(index: int, call: Call) -> Made:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return Made(index, call.name, arguments, f"call_{uuid.uuid4().hex[:24]}")
