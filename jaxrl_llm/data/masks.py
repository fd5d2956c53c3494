"""Examples of dialogues: which of the tokens that a chat template writes are the assistant's.

A template that marks them (`{% generation %}`) is believed. Else each message is found in the text
of the whole dialogue by the texts of its beginnings, and what is found is checked.
"""

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tokenizer import Message, rendered
from jaxrl_llm.types import Example

Messages = Sequence[Message]

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Dialogue(NamedTuple):
    """Messages, of which the assistant's from number `first` on bear loss; or plain text."""

    messages: Messages
    first: int
    options: Mapping[str, Any]  # `tools` and other variables of the template
    where: str  # its file and row
    text: tuple[str, str] | None = None  # prompt and answer as they came, if both were text


class _NotFoundError(ValueError):
    """The messages are not where the beginnings of the dialogue say."""


def example(tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue, chat_template: bool) -> Example:
    """Returns the tokens of a dialogue; the assistant's, from `dialogue.first` on, bear the loss.

    Without `chat_template` prompt and answer are one plain text, which the end token ends. Thinking
    and the end of a turn are as the template writes them. A dialogue in which nothing bears loss,
    or whose mask cannot be found, is a DataError.
    """
    try:
        if not chat_template:
            found = _of_text(tokenizer, dialogue)
        elif _MARK.search(str(tokenizer.chat_template)):
            found = _of_marks(tokenizer, dialogue)
        else:
            found = _of_beginnings(tokenizer, dialogue)
    except _NotFoundError as error:
        raise DataError(
            f"{dialogue.where}: the assistant's tokens cannot be found, {error}; set"
            " model.chat_template to a template that marks them with {% generation %}"
        ) from error
    except DataError as error:
        raise DataError(f"{dialogue.where}: {error}") from error
    if not any(found.mask):
        raise DataError(
            f"{dialogue.where}: no token of the assistant, so nothing to learn; give the answer a"
            " text, or leave the row out"
        )
    return found


def _of_text(tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue) -> Example:
    if dialogue.text is None:
        raise DataError(
            "lists of messages need a chat template; set data.chat_template=True, or write prompt"
            " and answer as texts"
        )
    prompt, answer = dialogue.text
    if not answer.strip():
        raise DataError("the answer is empty; give it a text, or leave the row out")
    end = "" if answer.endswith(tokenizer.eos_token) else tokenizer.eos_token
    text = prompt + answer + end
    return _masked(tokenizer, text, [(len(prompt), len(text))], special=True)


def _of_marks(tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue) -> Example:
    render = functools.partial(rendered, tokenizer, dialogue.messages, dialogue.options)
    found = render(return_dict=True, return_assistant_tokens_mask=True)
    tokens, mask = found["input_ids"], map(bool, found["assistant_masks"])
    before = dialogue.messages[: dialogue.first]
    if all(message["role"] != "assistant" for message in before):
        return Example(tuple(tokens), tuple(mask))
    text = render(tokenize=False)
    begin = _Beginnings(tokenizer, dialogue, text).end(dialogue.first - 1)
    late = _masked(tokenizer, text, [(begin, len(text))]).mask
    return Example(tuple(tokens), tuple(a and b for a, b in zip(mask, late, strict=True)))


def _of_beginnings(tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue) -> Example:
    text = rendered(tokenizer, dialogue.messages, dialogue.options, tokenize=False)
    found = _Beginnings(tokenizer, dialogue, text)
    spans = [
        found.span(number)
        for number, message in enumerate(dialogue.messages)
        if number >= dialogue.first and message["role"] == "assistant"
    ]
    if any(a[1] > b[0] for a, b in itertools.pairwise(spans)):
        raise _NotFoundError("two messages overlap in the text of the template")
    return _masked(tokenizer, text, spans)


def _masked(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    spans: Sequence[tuple[int, int]],
    special: bool = False,  # with what the tokenizer puts around plain text
) -> Example:
    """Returns the tokens of a text; those with a character in one of the spans bear loss."""
    found = tokenizer(text, add_special_tokens=special, return_offsets_mapping=tokenizer.is_fast)
    if "offset_mapping" not in found:
        raise DataError("this tokenizer does not say where its tokens are; it needs tokenizer.json")
    mask = [
        any(span[0] < end and begin < min(end, span[1]) for span in spans)
        for begin, end in found["offset_mapping"]
    ]
    return Example(tuple(found["input_ids"]), tuple(mask))


def beginnings(tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue, text: str) -> Iterator[str]:
    """Yields the texts of a dialogue as far as its last turn's end, with which `text` may begin."""
    return _Beginnings(tokenizer, dialogue, text).whole()


class _Beginnings:
    """Finds the messages of a dialogue in its text by the texts of its first 1, 2, ... messages."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue, text: str):
        self._render = functools.partial(
            rendered, tokenizer, options=dialogue.options, tokenize=False
        )
        self._messages = [dict(message) for message in dialogue.messages]
        self._text = text

    def span(self, number: int) -> tuple[int, int]:
        """Returns where an answer begins, after its header, and where its turn ends."""
        if not number:
            raise _NotFoundError("a dialogue begins with the assistant")
        begin = self.end(number - 1)
        begin += _num_alike(self._header(number), self._text[begin:])
        end = self.end(number)
        if end <= begin:
            raise _NotFoundError(f"message {number + 1} has no text")
        return begin, end

    def end(self, number: int) -> int:
        """Returns where the turn of a message ends in the text of the dialogue."""
        text, messages = self._text, self._messages
        if number == len(messages) - 1:
            return len(text)
        beginnings = list(self._beginnings(messages[: number + 1]))
        for beginning in beginnings:
            if text.startswith(beginning):
                return len(beginning)
        # The template writes a message in another way when others follow, for instance without its
        # thinking. What follows a change in it is the end of its turn, then the rest.
        for changed in _changed(messages[number]):
            others = [*messages[:number], changed]
            rest = _common_end(text, self._render([*others, *messages[number + 1 :]]))
            for beginning, other in zip(beginnings, self._beginnings(others), strict=True):
                ending = _common_end(beginning, other)
                if len(ending) <= len(rest) < len(text) and rest.startswith(ending):
                    return len(text) - len(rest) + len(ending)
        raise _NotFoundError(f"message {number + 1} of {len(messages)} ends nowhere in the text")

    def whole(self) -> Iterator[str]:
        """Yields the texts of all messages."""
        return self._beginnings(self._messages)

    def _beginnings(self, messages: Messages) -> Iterator[str]:
        yield self._render(messages)
        opened = self._render(messages, add_generation_prompt=True)
        yield opened.removesuffix(self._header(len(messages)))

    @functools.cache  # noqa: B019 (of one dialogue)
    def _header(self, number: int) -> str:
        """Returns what begins an answer after the first `number` messages."""
        # Of the last question before: some templates end an answer as if the dialogue ended.
        while number > 1 and self._messages[number - 1]["role"] == "assistant":
            number -= 1
        closed = self._render(self._messages[:number])
        opened = self._render(self._messages[:number], add_generation_prompt=True)
        return opened[len(closed) :] if opened.startswith(closed) else ""


def _changed(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the message with another end of its content, and with other arguments of its call."""
    content = message.get("content") or ""
    yield {**message, "content": content + ("1" if content.endswith("0") else "0")}
    if calls := message.get("tool_calls"):
        function = calls[-1].get("function") or {}
        if isinstance(arguments := function.get("arguments"), Mapping):
            other = {**calls[-1], "function": {**function, "arguments": {**arguments, "0": 0}}}
            yield {**message, "tool_calls": [*calls[:-1], other]}


def _common_end(first: str, second: str) -> str:
    return first[len(first) - _num_alike(first[::-1], second[::-1]) :]


def _num_alike(first: str, second: str) -> int:
    """Returns the number of characters that both texts begin with."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
