"""Examples of dialogues: which of the tokens that a chat template writes are the assistant's.

A template that marks them (`{% generation %}`) is believed. Else each message is found in the text
of the whole dialogue by the texts of its beginnings, and what is found is checked. What ends a turn
always bears loss: a policy that never learned it would not stop.
"""

import contextlib
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from jaxrl_llm.data.encoding import encode
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.messages import as_mapping, function_of, is_trained, with_arguments
from jaxrl_llm.data.tokenizer import Message, rendered
from jaxrl_llm.types import Example

Messages = Sequence[Message]

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLE_MARK = re.compile(r"\s*<[^<>\s]{1,40}>")  # <|user|>, <start_of_turn>
_EMPTY_ELEMENT = re.compile(r"<([\w-]+)>\s*</\1>\s*")  # <think></think>


class Dialogue(NamedTuple):
    """Messages, of which the assistant's from number `first` on bear loss; or plain text."""

    messages: Messages
    first: int
    options: Mapping[str, Any]  # `tools` and other variables of the template
    where: str  # its file and row
    text: tuple[str, str] | None = None  # prompt and answer as they came, if both were text


class _NotFoundError(ValueError):
    """The messages are not where the beginnings of the dialogue say."""


def example(
    tokenizer: PreTrainedTokenizerBase,
    dialogue: Dialogue,
    chat_template: bool,
    turns: Sequence[int] | None = None,
    end_mark: str = "",
) -> Example:
    """Returns the tokens of a dialogue; the assistant's, from `dialogue.first` on, bear the loss.

    Without `chat_template` prompt and answer are one plain text, which the end token ends. Thinking
    and the end of a turn are as the template writes them. Where it writes no end of a turn, the
    mark of the next role bears loss, and the end token after the last turn. A dialogue in which
    nothing bears loss, or whose mask cannot be found, is a DataError.

    Args:
      turns: Numbers of the messages that bear loss; None: as `trained_turns` says.
      end_mark: What ends the last message where the template writes no end of a turn; "": the end
        token.
    """
    with named_errors(dialogue.where):
        if not chat_template:
            found = _of_text(tokenizer, dialogue)
        else:
            dialogue = without_end_tokens(tokenizer, dialogue)
            turns = trained_turns(dialogue) if turns is None else turns
            of = _of_marks if has_marks(tokenizer) else _of_beginnings
            found = of(tokenizer, dialogue, turns)
            if any(found.mask):
                found = _with_ends(tokenizer, dialogue, turns, found, end_mark)
        if not any(found.mask):
            raise DataError(
                "no token of the assistant, so nothing to learn; give the answer a text, or leave"
                " the row out"
            )
    return found


@contextlib.contextmanager
def named_errors(where: str) -> Iterator[None]:
    """Errors about a dialogue begin with its file and row."""
    try:
        yield
    except _NotFoundError as error:
        raise DataError(
            f"{where}: the assistant's tokens cannot be found, {error}; set"
            " model.chat_template to a template that marks them with {% generation %}"
        ) from error
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def has_marks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template marks the assistant's tokens with {% generation %}."""
    return bool(_MARK.search(str(tokenizer.chat_template)))


def trained_turns(dialogue: Dialogue) -> list[int]:
    """Returns the numbers of the messages that bear loss, from 0.

    They are the assistant's from `dialogue.first` on, but for those with `"train": false` or
    `"weight": 0`. One without text, thinking and calls is a DataError: it would teach the policy to
    say nothing.
    """
    turns = [
        number
        for number, message in enumerate(dialogue.messages)
        if number >= dialogue.first and message["role"] == "assistant" and is_trained(message)
    ]
    for number in turns:
        if _says_nothing(dialogue.messages[number]):
            raise DataError(
                f"message {number + 1}, of the assistant, is empty and would be trained; give it a"
                ' text, write "train": false into it, or leave the row out'
            )
    return turns


def _says_nothing(message: Message) -> bool:
    if message.get("tool_calls"):
        return False
    texts = [message.get(key) for key in ("reasoning_content", "reasoning", "thinking")]
    content = message.get("content") or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    if any(part.get("type", "text") != "text" for part in parts):
        return False
    texts += [_EMPTY_ELEMENT.sub("", part.get("text") or "") for part in parts]
    return not any(isinstance(text, str) and text.strip() for text in texts)


def without_end_tokens(tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue) -> Dialogue:
    """Returns the dialogue without the end tokens that answers bring along.

    The template ends a turn itself: a second end would be trained, and follow the first.
    """
    specials = tuple(filter(None, {*tokenizer.all_special_tokens, tokenizer.eos_token}))
    messages = list(dialogue.messages)
    for number, message in enumerate(messages):
        text = _last_text(message)
        if message["role"] != "assistant" or not text.rstrip().endswith((">", "]", *specials)):
            continue
        ending = _Beginnings(tokenizer, dialogue, "").ending(number) or ""
        ends = tuple(filter(None, (tokenizer.eos_token, ending.strip())))
        while text.rstrip().endswith(ends):
            text = text.rstrip()
            text = text[: -max(len(end) for end in ends if text.endswith(end))]
        if text != _last_text(message):
            messages[number] = _with_last_text(message, text)
    return dialogue._replace(messages=messages)


def _last_text(message: Message) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = content[-1].get("text") or ""
    return content


def _with_last_text(message: Message, text: str) -> Message:
    if isinstance(message["content"], str):
        return {**message, "content": text}
    *parts, last = message["content"]
    return {**message, "content": [*parts, {**last, "text": text}]}


def _with_ends(
    tokenizer: PreTrainedTokenizerBase,
    dialogue: Dialogue,
    turns: Sequence[int],
    before: Example,
    end_mark: str,
) -> Example:
    """Returns an example in which what ends each of the turns bears loss too."""
    text = rendered(tokenizer, dialogue.messages, dialogue.options, tokenize=False)
    found = _Beginnings(tokenizer, dialogue, text)
    last = len(dialogue.messages) - 1
    # The usual case, without another rendering: the last token of the dialogue is an end.
    is_ended = turns[-1] == last and text.rstrip().endswith(tokenizer.eos_token)
    if is_ended and _last_end_bears_loss(tokenizer, before):
        return before
    appended = ""
    spans = []
    ending = found.ending(turns[0])
    if ending is None or (ending and not has_marks(tokenizer)):
        return before
    if ending:
        for number in turns:  # marks may leave out what ends a turn
            end = found.end(number)
            if text.endswith(ending, 0, end):
                spans.append((end - len(ending), end - len(ending) + len(ending.rstrip())))
    else:
        for number in turns:
            end = len(text) if number == last else found.end(number)
            mark = leading_mark(tokenizer, text[end:])
            if number == last:
                mark = appended = end_mark or tokenizer.eos_token
            if not mark:
                raise DataError(
                    f"the chat template writes nothing that ends message {number + 1}, so no sample"
                    " would learn to stop; set data.rewritten_turns='split', which ends each turn"
                    " with the end token, or model.chat_template to another template"
                )
            spans.append((end, end + len(mark)))
    ends = _masked(tokenizer, text + appended, spans)
    own = (*before.mask, *[False] * (len(ends.tokens) - len(before.tokens)))
    if ends.tokens[: len(before.tokens)] != before.tokens:
        raise _NotFoundError("the end of the last message is one token with what is before it")
    return Example(ends.tokens, tuple(a or b for a, b in zip(own, ends.mask, strict=True)))


def _last_end_bears_loss(tokenizer: PreTrainedTokenizerBase, found: Example) -> bool:
    pairs = zip(found.tokens, found.mask, strict=True)
    return [bears for token, bears in pairs if token == tokenizer.eos_token_id][-1:] == [True]


def ends_turns(tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue, turn: int) -> bool:
    """Whether the template writes an end of a turn, as GLM-4.5's does not."""
    return _Beginnings(tokenizer, dialogue, "").ending(turn) != ""


def following_mark(tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue, turn: int) -> str:
    """Returns the mark of the role that speaks after a turn, "" if it cannot be found."""
    messages = dialogue.messages[: turn + 2]
    if len(messages) < turn + 2:
        return ""
    try:
        text = rendered(tokenizer, messages, dialogue.options, tokenize=False)
        end = _Beginnings(tokenizer, dialogue._replace(messages=messages), text).end(turn)
    except (DataError, _NotFoundError):
        return ""
    return leading_mark(tokenizer, text[end:])


def leading_mark(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Returns the mark of a role with which a text begins, "" if there is none."""
    for special in sorted(tokenizer.get_added_vocab(), key=len, reverse=True):
        if special and text.lstrip().startswith(special):
            return text[: len(text) - len(text.lstrip()) + len(special)]
    mark = _ROLE_MARK.match(text)
    return mark[0] if mark else ""


class KeptTurn(NamedTuple):
    """Where a turn ends in the text of a longer dialogue, and what was left out of it there."""

    end: int
    dropped: str  # empty elements, as `<think></think>`; "": nothing


def kept_turn(context: str, alone: str, text: str) -> KeptTurn | None:
    """Finds a turn, as it is sampled, in the text of a longer dialogue; None: it is rewritten.

    Args:
      context: What the turn is sampled after: the messages before it, with its header.
      alone: The dialogue that ends with this turn.
      text: The dialogue that may go on. It has the turn if both begin alike as far as the turn
        ends, but for elements without content: Qwen3 writes `<think></think>` into the last turn
        alone, and that loses nothing of the message.
    """
    start = _num_alike(context, alone)
    if not text.startswith(alone[:start]):
        return None
    said = alone[start:].rstrip()
    if text.startswith(said, start):
        return KeptTurn(start + len(said), "")
    short = _EMPTY_ELEMENT.sub("", said)
    if short == said or not text.startswith(short, start):
        return None
    dropped = "".join(match[0] for match in _EMPTY_ELEMENT.finditer(said))
    return KeptTurn(start + len(short), dropped)


def _of_text(tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue) -> Example:
    if dialogue.text is None:
        raise DataError(
            "lists of messages need a chat template; set data.chat_template=True, or write prompt"
            " and answer as texts"
        )
    prompt, answer = dialogue.text
    if not answer.strip().removesuffix(tokenizer.eos_token):
        raise DataError("the answer is empty; give it a text, or leave the row out")
    while answer.endswith(tokenizer.eos_token):
        answer = answer.removesuffix(tokenizer.eos_token)
    text = prompt + answer + tokenizer.eos_token
    return _masked(tokenizer, text, [(len(prompt), len(text))], special=True)


def _of_marks(
    tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue, turns: Sequence[int] | None = None
) -> Example:
    render = functools.partial(rendered, tokenizer, dialogue.messages, dialogue.options)
    found = render(return_dict=True, return_assistant_tokens_mask=True)
    tokens, mask = found["input_ids"], map(bool, found["assistant_masks"])
    turns = trained_turns(dialogue) if turns is None else turns
    spoken = [i for i, message in enumerate(dialogue.messages) if message["role"] == "assistant"]
    if set(turns) == set(spoken):
        return Example(tuple(tokens), tuple(mask))
    text = render(tokenize=False)
    beginnings = _Beginnings(tokenizer, dialogue, text)
    spans = [
        (beginnings.end(number - 1) if number else 0, beginnings.end(number)) for number in turns
    ]
    own = _masked(tokenizer, text, spans).mask
    return Example(tuple(tokens), tuple(a and b for a, b in zip(mask, own, strict=True)))


def _of_beginnings(
    tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue, turns: Sequence[int] | None = None
) -> Example:
    text = rendered(tokenizer, dialogue.messages, dialogue.options, tokenize=False)
    found = _Beginnings(tokenizer, dialogue, text)
    spans = [found.span(number) for number in (trained_turns(dialogue) if turns is None else turns)]
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
    options = {"add_special_tokens": special, "return_offsets_mapping": tokenizer.is_fast}
    found = encode(tokenizer, text, **options)
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
        self._headers: dict[int, str] = {}

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

    def ending(self, number: int) -> str | None:
        """Returns what the template writes after the text of an answer in place of a message.

        "" if that is nothing but white space; None: it refuses such a dialogue.
        """
        try:
            texts = [
                self._render([*self._messages[:number], {"role": "assistant", "content": content}])
                for content in "AB"
            ]
        except DataError:
            return None
        ending = _common_end(*texts)
        return ending if ending.strip() else ""

    def _beginnings(self, messages: Messages) -> Iterator[str]:
        yield self._render(messages)
        opened = self._render(messages, add_generation_prompt=True)
        yield opened.removesuffix(self._header(len(messages)))

    def _header(self, number: int) -> str:
        """Returns what begins an answer after the first `number` messages."""
        # Of the last question before: some templates end an answer as if the dialogue ended.
        while number > 1 and self._messages[number - 1]["role"] == "assistant":
            number -= 1
        if number not in self._headers:
            closed = self._render(self._messages[:number])
            opened = self._render(self._messages[:number], add_generation_prompt=True)
            is_longer = opened.startswith(closed)
            self._headers[number] = opened[len(closed) :] if is_longer else ""
        return self._headers[number]


def _changed(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the message with another end of its content, and with other arguments of its call."""
    content = message.get("content") or ""
    if isinstance(content, list):
        yield {**message, "content": [*content, {"type": "text", "text": "0"}]}
    else:
        yield {**message, "content": content + ("1" if content.endswith("0") else "0")}
    if calls := message.get("tool_calls"):
        function = function_of(calls[-1])
        with contextlib.suppress(ValueError):
            other = with_arguments(calls[-1], {**as_mapping(function.get("arguments")), "0": 0})
            yield {**message, "tool_calls": [*calls[:-1], other]}


def _common_end(first: str, second: str) -> str:
    return first[len(first) - _num_alike(first[::-1], second[::-1]) :]


def _num_alike(first: str, second: str) -> int:
    """Returns the number of characters that both texts begin with."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
