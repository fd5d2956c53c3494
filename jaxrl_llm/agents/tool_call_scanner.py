"""Reads text that may still grow, for the parsers of tool calls: marks, JSON, values between marks.

A parser is a generator. It yields `None` where it needs more text, a `str` of text outside calls as
soon as that is certain, `Thinking` for the thinking that a turn begins with, and a `ScannedCall`
for each call. So one parser serves whole turns and
streamed replies, and reads every character a bounded number of times: a search goes on where it
stopped when the text grew, and a mark that the ended text does not hold is searched for once.
"""

import functools
import json
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from jaxrl_llm.text import clean_json, clean_text

_T = TypeVar("_T")

# Opening mark -> closing mark.
THINKING = {"<think>": "</think>", "[THINK]": "[/THINK]"}
THINKING_TOKENS = 16  # at the end of a prompt: enough to hold a mark that opens thinking
MAX_NAME = 256  # characters of a function's name
_STRUCTURE = re.compile(r'["\[\]{}]')
_IN_STRING = re.compile(r'["\\]')
_WORD = re.compile(r"[^\s<>]*")
_NO_SPACE = re.compile(r"\S")


class ScannedCall(NamedTuple):
    """A call of a tool as it stands in a turn."""

    name: str
    arguments: Mapping[str, Any]
    problem: str  # why it cannot run; "" if it can
    start: int  # where it begins in the turn
    complete: bool  # its JSON or its closing mark was read: a limit did not cut it


class Thinking(NamedTuple):
    """A piece of the thinking in a turn."""

    text: str
    is_mark: bool = False  # an opening or closing mark, not its contents
    in_turn: bool = True  # whether `ParsedTurn.text` has it


Event = str | ScannedCall | Thinking | None
Events = Generator[Event, None, None]
Waiting = Generator[Event, None, _T]
Paths = tuple[tuple[tuple[str, ...], ...], ...]


class ParsedJson(NamedTuple):
    """A JSON value in a text, or the reason why there is none."""

    value: Any
    end: int  # behind the value, or where the fault is
    problem: str


class Scanner:
    """A text that grows, and the searches in it. Positions are counted from its beginning."""

    # Python locates a fault in JSON by counting the lines before it. So many in one turn would make
    # reading it quadratic; behind this number the rest of a turn is one faulty call.
    MAX_FAULTS = 16

    def __init__(self, text: str = "", ended: bool = False):
        self.text, self.ended = text, ended
        self.num_faults = 0
        self._absent: set[str] = set()  # marks that do not occur from some position on
        self._unclosed: set[tuple[str, Paths]] = set()  # of which no value ends any more

    def find(self, mark: str, start: int) -> Waiting[int]:
        """The position of the first `mark` from `start` on, -1 if the ended text has none."""
        while mark not in self._absent:
            position = self.text.find(mark, start)
            if position >= 0:
                return position
            if self.ended:
                self._absent.add(mark)
                break
            start = max(start, len(self.text) - len(mark) + 1)
            yield None
        return -1

    def skip_space(self, start: int) -> Waiting[int]:
        """The position of the first character from `start` on that is no white space."""
        while True:
            if match := _NO_SPACE.search(self.text, start):
                return match.start()
            start = max(start, len(self.text))
            if self.ended:
                return start
            yield None

    def one_of(self, marks: Sequence[str], start: int) -> Waiting[tuple[str, int]]:
        """The longest mark that follows white space at `start`, and the position behind it.

        ("", position of the first character that is no white space) if none of them follows.
        """
        while not self.ended:
            start = yield from self.skip_space(start)
            rest = self.text[start : start + max(map(len, marks))]
            if not any(len(mark) > len(rest) and mark.startswith(rest) for mark in marks):
                break
            yield None
        match = _pattern(marks, spaces=True).match(self.text, start)
        assert match  # white space and no mark match as well
        return match[1], match.end()

    def word(self, start: int) -> Waiting[int]:
        """The position behind the characters from `start` on that are no space, `<` or `>`."""
        while True:
            match = _WORD.match(self.text, start)
            start = match.end() if match else start
            if self.ended or start < len(self.text):
                return start
            yield None

    def text_before(self, marks: Sequence[str], start: int, emit: bool = True) -> Waiting[int]:
        """Yields the text from `start` to the first of `marks`; returns where that mark begins.

        Returns the end of the text if it has none of them. Without `emit`, nothing is yielded.
        """
        pattern = _pattern(marks)
        while True:
            match = pattern.search(self.text, start)
            end = match.start() if match else len(self.text)
            if not match and not self.ended:
                end -= partial_mark_length(self.text[max(start, end - 64) :], marks)
            if emit and end > start:
                yield self.text[start:end]
            start = end
            if match or self.ended:
                return end
            yield None

    def rest(self, start: int) -> Waiting[int]:
        """Yields all text from `start` on; returns its end."""
        while True:
            if len(self.text) > start:
                yield self.text[start:]
                start = len(self.text)
            if self.ended:
                return start
            yield None

    def thinking(self, opened: str) -> Waiting[int]:
        """Yields the thinking that a turn begins with; returns the position behind it.

        No mark within it begins a call. `opened`: the mark with which the prompt has opened it.
        """
        start = 0
        if not opened:
            opened, start = yield from self.one_of(tuple(THINKING), 0)
            if not opened:
                return 0
            yield Thinking(self.text[:start], is_mark=True)
        close = THINKING[opened]
        position = yield from as_thinking(self.text_before((close,), start))
        if not self.text.startswith(close, position):
            return position
        yield Thinking(close, is_mark=True)
        return position + len(close)

    def json(self, start: int) -> Waiting[ParsedJson]:
        """The JSON value at `start`.

        A value is read by the library, once: before the text has ended, when its brackets are
        closed, as a scan counts that goes on where it stopped.
        """
        depth, in_string, at = 0, False, start
        while not self.ended:
            match = (_IN_STRING if in_string else _STRUCTURE).search(self.text, at)
            if match is None:
                at = max(at, len(self.text))
                yield None
                continue
            at = match.end()
            match match[0]:
                case '"':
                    in_string = not in_string
                case "\\":
                    at += 1  # the character that it escapes
                case "{" | "[":
                    depth += 1
                case "}" | "]":
                    depth -= 1
            if depth <= 0 and not in_string:
                break
        try:
            return ParsedJson(*_DECODER.raw_decode(self.text, start), "")
        except json.JSONDecodeError as error:
            fault = max(start, min(error.pos, len(self.text)))
            self.num_faults += 1
            return ParsedJson(None, fault, f"invalid JSON: {error.msg} (char {fault - start})")
        except RecursionError:
            return ParsedJson(None, start, "invalid JSON: nested too deep")
        except ValueError as error:  # NaN, and numbers of thousands of digits
            return ParsedJson(None, start, f"invalid JSON: {error}")

    def value_end(self, close: str, start: int, paths: Paths) -> Waiting[int]:
        """The position of the `close` that ends a value without quotes; -1 if there is none.

        The value may itself contain `close`. Its end is the first one behind which the format can
        go on: along one of `paths`, each of which says for the next marks in turn which ones may
        stand there. White space may lie between them, and the text may end at any of them.
        """
        if (close, paths) in self._unclosed:
            return -1
        while True:
            position = yield from self.find(close, start)
            if position < 0:
                self._unclosed.add((close, paths))
                return -1
            start = position + len(close)
            for path in paths:
                if (yield from self._goes_on(path, start)):
                    return position

    def _goes_on(self, path: Sequence[tuple[str, ...]], start: int) -> Waiting[bool]:
        for marks in path:
            mark, start = yield from self.one_of(marks, start)
            if not mark:
                return self.ended and start >= len(self.text)
        return True


def as_thinking(events: Waiting[_T], in_turn: bool = True) -> Waiting[_T]:
    """The same events, with text as `Thinking`."""
    try:
        while True:
            event = next(events)
            yield Thinking(event, in_turn=in_turn) if isinstance(event, str) else event
    except StopIteration as stop:
        result: _T = stop.value
        return result


@functools.cache
def _pattern(marks: Sequence[str], spaces: bool = False) -> re.Pattern[str]:
    """Matches any of `marks`, the longest first; with `spaces`, white space and perhaps a mark."""
    longest_first = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
    return re.compile(rf"\s*({longest_first}|)" if spaces else longest_first)


def partial_mark_length(text: str, marks: Sequence[str]) -> int:
    """The number of characters at the end of a text that may turn out to begin one of `marks`.

    >>> partial_mark_length("I shall look. <tool_", ["<tool_call>"])
    6
    """
    longest = max(map(len, marks), default=1)
    for size in range(min(len(text), longest - 1), 0, -1):
        if any(len(mark) > size and mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


def thinking_marks(chat_template: str) -> tuple[str, ...]:
    """The marks between which models with this chat template think; empty if they do not.

    >>> thinking_marks("... <think> ... </think> ...")
    ('<think>', '</think>')
    """
    pairs = THINKING.items()
    return next((pair for pair in pairs if all(mark in chat_template for mark in pair)), ())


def open_thinking_mark(prompt: str) -> str:
    """The mark of the thinking that a prompt opens, in which the reply begins; "" if it opens none.

    >>> open_thinking_mark("assistant\\n<think>\\n"), open_thinking_mark("<think></think>")
    ('<think>', '')
    """
    end = prompt.rstrip()
    return next((mark for mark in THINKING if end.endswith(mark)), "")


def scanned_call(
    name: str, arguments: Any, problem: str, start: int, complete: bool = True
) -> ScannedCall:
    """A call whose texts any process and template can take, whatever the policy wrote.

    Halves of surrogate pairs become U+FFFD. Arguments that are no object, or nested too deep, and
    names that no protocol takes back are a problem.
    """
    if not problem and not 0 < len(name) <= MAX_NAME:
        problem = f"a call names a function, in 1 to {MAX_NAME} characters, not {len(name)}"
    if not problem and not isinstance(arguments, dict):
        problem = f"arguments are an object, got {json.dumps(arguments)[:100]}"
    try:
        arguments = {} if problem else clean_json(arguments)
    except ValueError as error:
        arguments, problem = {}, f"invalid arguments: {error}"
    return ScannedCall(clean_text(name), arguments, clean_text(problem), start, complete)


def parse_json(text: str) -> ParsedJson:
    """The JSON value that is all of a text."""
    parse = Scanner(text.strip(), ended=True).json(0)
    try:
        while True:
            next(parse)
    except StopIteration as stop:
        parsed: ParsedJson = stop.value
    if not parsed.problem and parsed.end < len(text.strip()):
        return ParsedJson(None, parsed.end, "invalid JSON: other text behind its end")
    return parsed


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# Line ends in strings are allowed, as models write them.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)
