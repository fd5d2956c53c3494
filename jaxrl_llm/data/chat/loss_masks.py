"""Loss masks of dialogues: which tokens of a rendered chat template are the assistant's.

A template that marks them with `{% generation %}` is taken at its word. Otherwise each message is
located in the rendering of the whole dialogue by rendering its prefixes, and the result is checked.
The end of a turn always bears loss: a policy that never learned it would not stop.
"""

import contextlib
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from jaxrl_llm.data.chat.messages import as_mapping, function_of, is_trained, with_arguments
from jaxrl_llm.data.encoding import encode
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tokenizer import Message, render_chat
from jaxrl_llm.types import Example

Messages = Sequence[Message]

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLE_MARK = re.compile(r"\s*<[^<>\s]{1,40}>")  # <|user|>, <start_of_turn>
_EMPTY_ELEMENT = re.compile(r"<([\w-]+)>\s*</\1>\s*")  # <think></think>


class Dialogue(NamedTuple):
    """A dialogue whose assistant messages from number `first` on bear loss; or plain text."""

    messages: Messages
    first: int
    options: Mapping[str, Any]  # `tools` and other variables of the template
    where: str  # file and row, for errors
    text: tuple[str, str] | None = None  # prompt and answer unchanged, if both were texts


class _NotFoundError(ValueError):
    """The renderings of the dialogue's prefixes do not locate its messages."""


def dialogue_example(
    tokenizer: PreTrainedTokenizerBase,
    dialogue: Dialogue,
    chat_template: bool,
    turns: Sequence[int] | None = None,
    end_mark: str = "",
) -> Example:
    """Tokenizes a dialogue; the assistant's tokens from `dialogue.first` on bear loss.

    Without `chat_template` prompt and answer are concatenated and ended with the end token. With
    it, thinking and the ends of turns are as the template renders them. Where a template renders no
    end of a turn, the mark of the next role bears loss, and an end token after the last turn.

    Args:
      turns: Numbers of the messages that bear loss; None: those of `trained_turns`.
      end_mark: Text that ends the last message where the template renders no end of a turn; "":
        the end token.

    Raises:
      DataError: If nothing bears loss, or the mask cannot be found.
    """
    with named_errors(dialogue.where):
        if not chat_template:
            tokens_and_mask = _plain_text_example(tokenizer, dialogue)
        else:
            dialogue = without_end_tokens(tokenizer, dialogue)
            turns = trained_turns(dialogue) if turns is None else turns
            make_example = _marked_example if has_marks(tokenizer) else _located_example
            tokens_and_mask = make_example(tokenizer, dialogue, turns)
            if any(tokens_and_mask.mask):
                tokens_and_mask = _with_ends(tokenizer, dialogue, turns, tokens_and_mask, end_mark)
        if not any(tokens_and_mask.mask):
            raise DataError(
                "no assistant tokens, so nothing to learn; give the answer a text, or leave"
                " the row out"
            )
    return tokens_and_mask


@contextlib.contextmanager
def named_errors(where: str) -> Iterator[None]:
    """Prefixes errors about a dialogue with its file and row."""
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
    """Numbers (from 0) of the messages that bear loss.

    These are the assistant's from `dialogue.first` on, except those with `"train": false` or
    `"weight": 0`. A message without text, thinking and calls is a DataError: it would teach the
    policy to say nothing.
    """
    turns = [
        number
        for number, message in enumerate(dialogue.messages)
        if number >= dialogue.first and message["role"] == "assistant" and is_trained(message)
    ]
    for number in turns:
        if _is_empty(dialogue.messages[number]):
            raise DataError(
                f"message {number + 1}, of the assistant, is empty and would be trained; give it a"
                ' text, write "train": false into it, or leave the row out'
            )
    return turns


def _is_empty(message: Message) -> bool:
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
    """Strips end tokens that are written out at the end of answers.

    The template ends a turn itself; a second end token would be trained too.
    """
    specials = tuple(filter(None, {*tokenizer.all_special_tokens, tokenizer.eos_token}))
    messages = list(dialogue.messages)
    for number, message in enumerate(messages):
        text = _last_text(message)
        if message["role"] != "assistant" or not text.rstrip().endswith((">", "]", *specials)):
            continue
        ending = _PrefixRenderings(tokenizer, dialogue, "").ending(number) or ""
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
    """Extends the mask of an example to the end of each turn."""
    text = render_chat(tokenizer, dialogue.messages, dialogue.options, tokenize=False)
    renderings = _PrefixRenderings(tokenizer, dialogue, text)
    last = len(dialogue.messages) - 1
    # The usual case, without another rendering: the last token of the dialogue is an end.
    is_ended = turns[-1] == last and text.rstrip().endswith(tokenizer.eos_token)
    if is_ended and _last_end_bears_loss(tokenizer, before):
        return before
    appended = ""
    spans = []
    ending = renderings.ending(turns[0])
    if ending is None or (ending and not has_marks(tokenizer)):
        return before
    if ending:
        for number in turns:  # `{% generation %}` may exclude the end of a turn
            end = renderings.end(number)
            if text.endswith(ending, 0, end):
                spans.append((end - len(ending), end - len(ending) + len(ending.rstrip())))
    else:
        for number in turns:
            end = len(text) if number == last else renderings.end(number)
            mark = leading_mark(tokenizer, text[end:])
            if number == last:
                mark = appended = end_mark or tokenizer.eos_token
            if not mark:
                raise DataError(
                    f"the chat template writes nothing at the end of message {number + 1}, so no"
                    " sample would learn to stop; set data.rewritten_turns='split', which ends each"
                    " turn with the end token, or model.chat_template to another template"
                )
            spans.append((end, end + len(mark)))
    ends = _tokens_in_spans(tokenizer, text + appended, spans)
    mask = (*before.mask, *[False] * (len(ends.tokens) - len(before.tokens)))
    if ends.tokens[: len(before.tokens)] != before.tokens:
        raise _NotFoundError("the end of the last message is one token with what is before it")
    return Example(ends.tokens, tuple(a or b for a, b in zip(mask, ends.mask, strict=True)))


def _last_end_bears_loss(tokenizer: PreTrainedTokenizerBase, candidate: Example) -> bool:
    pairs = zip(candidate.tokens, candidate.mask, strict=True)
    return [bears for token, bears in pairs if token == tokenizer.eos_token_id][-1:] == [True]


def ends_turns(tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue, turn: int) -> bool:
    """Whether the template renders an end of a turn; GLM-4.5's does not."""
    return _PrefixRenderings(tokenizer, dialogue, "").ending(turn) != ""


def following_mark(tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue, turn: int) -> str:
    """The mark of the role that speaks after a turn, "" if it cannot be found."""
    messages = dialogue.messages[: turn + 2]
    if len(messages) < turn + 2:
        return ""
    try:
        text = render_chat(tokenizer, messages, dialogue.options, tokenize=False)
        end = _PrefixRenderings(tokenizer, dialogue._replace(messages=messages), text).end(turn)
    except (DataError, _NotFoundError):
        return ""
    return leading_mark(tokenizer, text[end:])


def leading_mark(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The mark of a role at the beginning of a text, "" if there is none."""
    for special in sorted(tokenizer.get_added_vocab(), key=len, reverse=True):
        if special and text.lstrip().startswith(special):
            return text[: len(text) - len(text.lstrip()) + len(special)]
    mark = _ROLE_MARK.match(text)
    return mark[0] if mark else ""


class KeptTurn(NamedTuple):
    """End of a turn in a longer dialogue's rendering, and the elements dropped from it there."""

    end: int
    dropped: str  # empty elements, as `<think></think>`; "": nothing


def kept_turn(context: str, alone: str, text: str) -> KeptTurn | None:
    """Locates a turn, as it is sampled, in a longer dialogue; None if it is rewritten there.

    Args:
      context: Rendering of the messages before the turn, with the generation prompt.
      alone: Rendering of the dialogue that ends with this turn.
      text: Rendering of the longer dialogue. It keeps the turn if it shares the prefix up to the
        end of the turn, apart from empty elements: Qwen3 renders `<think></think>` in the last turn
        only, and leaving it out loses nothing of the message.
    """
    start = _common_prefix_length(context, alone)
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


def _plain_text_example(tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue) -> Example:
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
    return _tokens_in_spans(tokenizer, text, [(len(prompt), len(text))], special=True)


def _marked_example(
    tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue, turns: Sequence[int] | None = None
) -> Example:
    render = functools.partial(render_chat, tokenizer, dialogue.messages, dialogue.options)
    encoding = render(return_dict=True, return_assistant_tokens_mask=True)
    tokens, mask = encoding["input_ids"], map(bool, encoding["assistant_masks"])
    turns = trained_turns(dialogue) if turns is None else turns
    spoken = [i for i, message in enumerate(dialogue.messages) if message["role"] == "assistant"]
    if set(turns) == set(spoken):
        return Example(tuple(tokens), tuple(mask))
    text = render(tokenize=False)
    beginnings = _PrefixRenderings(tokenizer, dialogue, text)
    spans = [
        (beginnings.end(number - 1) if number else 0, beginnings.end(number)) for number in turns
    ]
    turn_mask = _tokens_in_spans(tokenizer, text, spans).mask
    return Example(tuple(tokens), tuple(a and b for a, b in zip(mask, turn_mask, strict=True)))


def _located_example(
    tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue, turns: Sequence[int] | None = None
) -> Example:
    text = render_chat(tokenizer, dialogue.messages, dialogue.options, tokenize=False)
    renderings = _PrefixRenderings(tokenizer, dialogue, text)
    spans = [
        renderings.span(number) for number in (trained_turns(dialogue) if turns is None else turns)
    ]
    if any(a[1] > b[0] for a, b in itertools.pairwise(spans)):
        raise _NotFoundError("two messages overlap in the text of the template")
    return _tokens_in_spans(tokenizer, text, spans)


def _tokens_in_spans(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    spans: Sequence[tuple[int, int]],
    special: bool = False,  # add the tokens that the tokenizer puts around plain text
) -> Example:
    """Tokenizes a text; tokens that overlap one of the character spans bear loss."""
    options = {"add_special_tokens": special, "return_offsets_mapping": tokenizer.is_fast}
    encoding = encode(tokenizer, text, **options)
    if "offset_mapping" not in encoding:
        raise DataError("this tokenizer gives no character offsets; it needs tokenizer.json")
    mask = [
        any(span[0] < end and begin < min(end, span[1]) for span in spans)
        for begin, end in encoding["offset_mapping"]
    ]
    return Example(tuple(encoding["input_ids"]), tuple(mask))


def prefix_renderings(
    tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue, text: str
) -> Iterator[str]:
    """Yields renderings up to the end of the last turn: possible prefixes of `text`."""
    return _PrefixRenderings(tokenizer, dialogue, text).full_renderings()


class _PrefixRenderings:
    """Locates the messages of a dialogue in its rendering by renderings of its prefixes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue, text: str):
        self._render = functools.partial(
            render_chat, tokenizer, options=dialogue.options, tokenize=False
        )
        self._messages = [dict(message) for message in dialogue.messages]
        self._text = text
        self._headers: dict[int, str] = {}

    def span(self, number: int) -> tuple[int, int]:
        """Start of an answer, after its header, and the end of its turn, in characters."""
        if not number:
            raise _NotFoundError("a dialogue begins with the assistant")
        begin = self.end(number - 1)
        begin += _common_prefix_length(self._header(number), self._text[begin:])
        end = self.end(number)
        if end <= begin:
            raise _NotFoundError(f"message {number + 1} has no text")
        return begin, end

    def end(self, number: int) -> int:
        """End of the turn of a message in the rendering of the dialogue, in characters."""
        text, messages = self._text, self._messages
        if number == len(messages) - 1:
            return len(text)
        beginnings = list(self._prefixes(messages[: number + 1]))
        for beginning in beginnings:
            if text.startswith(beginning):
                return len(beginning)
        # The template renders the message differently once others follow, for instance without its
        # thinking, so no prefix matches. Change the end of the message and render again: the text
        # after the change is the end of the turn followed by the rest of the dialogue.
        for changed in _changed_variants(messages[number]):
            others = [*messages[:number], changed]
            rest = _common_suffix(text, self._render([*others, *messages[number + 1 :]]))
            for beginning, other in zip(beginnings, self._prefixes(others), strict=True):
                ending = _common_suffix(beginning, other)
                if len(ending) <= len(rest) < len(text) and rest.startswith(ending):
                    return len(text) - len(rest) + len(ending)
        raise _NotFoundError(f"message {number + 1} of {len(messages)} ends nowhere in the text")

    def full_renderings(self) -> Iterator[str]:
        """Yields the renderings of the whole dialogue."""
        return self._prefixes(self._messages)

    def ending(self, number: int) -> str | None:
        """The text that the template renders after an answer at the place of a message.

        "" if it is only white space; None if the template refuses such a dialogue.
        """
        try:
            texts = [
                self._render([*self._messages[:number], {"role": "assistant", "content": content}])
                for content in "AB"
            ]
        except DataError:
            return None
        ending = _common_suffix(*texts)
        return ending if ending.strip() else ""

    def _prefixes(self, messages: Messages) -> Iterator[str]:
        yield self._render(messages)
        opened = self._render(messages, add_generation_prompt=True)
        yield opened.removesuffix(self._header(len(messages)))

    def _header(self, number: int) -> str:
        """The generation prompt after the first `number` messages."""
        # Taken after the last question: some templates end an answer as if the dialogue ended.
        while number > 1 and self._messages[number - 1]["role"] == "assistant":
            number -= 1
        if number not in self._headers:
            closed = self._render(self._messages[:number])
            opened = self._render(self._messages[:number], add_generation_prompt=True)
            is_longer = opened.startswith(closed)
            self._headers[number] = opened[len(closed) :] if is_longer else ""
        return self._headers[number]


def _changed_variants(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields variants of a message: another end of its content, other arguments of its call."""
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


def _common_suffix(first: str, second: str) -> str:
    return first[len(first) - _common_prefix_length(first[::-1], second[::-1]) :]


def _common_prefix_length(first: str, second: str) -> int:
    """Length of the common prefix of two texts."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
