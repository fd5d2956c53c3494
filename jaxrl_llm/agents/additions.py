"""Token in, token out: what a chat template adds after a turn of the policy, in tokens.

The tokens of an episode are its prompt, what was sampled, and these additions. What was sampled is
never tokenized again: the template is asked for the text of the whole dialogue, and only what
follows the policy's last turn is taken from it.
"""

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from jaxrl_llm.data import masks
from jaxrl_llm.data.encoding import encode
from jaxrl_llm.data.masks import Dialogue
from jaxrl_llm.data.tokenizer import Message, rendered
from jaxrl_llm.types import Picture


class Addition(NamedTuple):
    """What follows a turn of the policy."""

    tokens: tuple[int, ...]
    # The template writes the turn in another way now that others follow (Qwen3 drops thinking):
    # the tokens are the whole dialogue as it is to be read from here on.
    rewrites: bool
    images: tuple[Picture, ...] = ()  # in these tokens, with their places there


def addition(
    tokenizer: PreTrainedTokenizerBase,
    before: Sequence[Message],
    answer: Message,
    following: Sequence[Message],
    options: Mapping[str, Any],
    last: int,
    sampled: str = "",
) -> Addition:
    """Returns the tokens between the last one that was sampled and the policy's next turn.

    Args:
      before: The dialogue up to the policy's turn.
      answer: That turn, as a message; `following` are those after it.
      options: `tools` and other variables of the template.
      last: The last token that was sampled: the end of the turn, or another one where the turn was
        ended by a stop string.
      sampled: The text of the turn as it was sampled. With it, a template that writes an empty
        thinking into the last turn alone (Qwen3) rewrites only turns that were sampled with one.

    Raises:
      DataError: If the template refuses the dialogue.
    """
    render = functools.partial(rendered, tokenizer, options=options, tokenize=False)
    turn = [*before, answer]
    whole = str(render([*turn, *following], add_generation_prompt=True))
    found = masks.beginnings(tokenizer, Dialogue(turn, 0, options, ""), whole)
    end = next((len(text) for text in found if whole.startswith(text)), 0)
    asked = str(render(before, add_generation_prompt=True))
    if not end:
        kept = masks.kept_turn(asked, str(render(turn)), whole)
        if kept is None or not sampled or _contains(sampled, kept.dropped):
            return Addition(_tokens(tokenizer, whole), True)
        end = kept.end
    # Without its header, whose special tokens end no turn.
    header = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(asked, whole, strict=False))
    said, rest = whole[min(len(list(header)), end) : end], whole[end:]
    ended = last in _specials(tokenizer)
    mark = _written(tokenizer, last) if ended else ""
    if mark and rest.startswith(mark):  # a turn ends with the next one's header (GLM-4)
        return Addition(_after(tokenizer, mark, rest[len(mark) :]), False)
    if (
        not mark or mark not in said
    ):  # it was sampled to its limit, or the template ends it with another
        written = (_written(tokenizer, token) for token in _specials(tokenizer))
        other = next((each for each in written if each and said.rstrip().endswith(each)), "")
        tail = said[said.rfind(other) :] if other else ""
        tail = tail[len(other) :] if ended else tail
    else:
        tail = said[said.rfind(mark) + len(mark) :]
    return Addition(_after(tokenizer, mark, tail + rest), False)


def _contains(text: str, part: str) -> bool:
    """Whether a text has a part in it, whatever the white space."""
    return "".join(part.split()) in "".join(text.split())


def with_json(messages: Sequence[Message]) -> list[Message]:
    """Returns messages whose calls have their arguments as a text, as some templates want them."""

    def written(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}

    return [
        {**message, "tool_calls": [written(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _after(tokenizer: PreTrainedTokenizerBase, mark: str, text: str) -> tuple[int, ...]:
    """Returns the tokens of a text as they are where it follows the special token `mark`."""
    first = _tokens(tokenizer, mark) if mark else ()
    if len(first) != 1:
        return _tokens(tokenizer, text)
    both = _tokens(tokenizer, mark + text)
    return both[1:] if both[:1] == first else _tokens(tokenizer, text)


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(encode(tokenizer, text, add_special_tokens=False)["input_ids"])


@functools.lru_cache(maxsize=8)
def _specials(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Returns the special tokens; some of them end turns."""
    added = tokenizer.added_tokens_decoder
    return frozenset({*tokenizer.all_special_ids, *(i for i, t in added.items() if t.special)})


def _written(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return str(tokenizer.decode([token], skip_special_tokens=False))
