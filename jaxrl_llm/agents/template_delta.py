"""Token in, token out: the tokens that a chat template adds after a turn of the policy.

The tokens of an episode are its prompt, the sampled tokens, and these additions. Sampled tokens are
never retokenized: the template renders the whole dialogue, and only the text that follows the
policy's last turn is tokenized.
"""

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from jaxrl_llm.data.chat import loss_masks
from jaxrl_llm.data.chat.loss_masks import Dialogue
from jaxrl_llm.data.encoding import encode
from jaxrl_llm.data.tokenizer import Message, render_chat
from jaxrl_llm.types import PromptImage


class TemplateDelta(NamedTuple):
    """The tokens of the environment that follow a turn of the policy."""

    tokens: tuple[int, ...]
    # The template renders earlier turns differently once others follow (Qwen3 drops thinking):
    # `tokens` is then the whole dialogue, which replaces the sequence so far.
    rewrites: bool
    images: tuple[
        PromptImage, ...
    ] = ()  # their placeholders are in `tokens`, positions relative to it


def delta_after_turn(
    tokenizer: PreTrainedTokenizerBase,
    messages_before: Sequence[Message],
    assistant_message: Message,
    following_messages: Sequence[Message],
    options: Mapping[str, Any],
    last_token: int,
    sampled_text: str = "",
) -> TemplateDelta:
    """The tokens between the last sampled token and the policy's next turn.

    Args:
      messages_before: The dialogue up to the policy's turn.
      assistant_message: That turn, as a message.
      following_messages: The messages after it.
      options: `tools` and other variables of the template.
      last_token: The last sampled token: the end-of-turn token, or another one if a stop string
        ended the turn.
      sampled_text: The text of the turn as sampled. With it, a template that writes an empty
        thinking block into the last turn alone (Qwen3) rewrites only turns sampled with one.

    Raises:
      DataError: If the template rejects the dialogue.
    """
    render = functools.partial(render_chat, tokenizer, options=options, tokenize=False)
    messages = [*messages_before, assistant_message]
    dialogue_text = str(render([*messages, *following_messages], add_generation_prompt=True))
    candidates = loss_masks.prefix_renderings(
        tokenizer, Dialogue(messages, 0, options, ""), dialogue_text
    )
    end = next((len(text) for text in candidates if dialogue_text.startswith(text)), 0)
    prompt = str(render(messages_before, add_generation_prompt=True))
    if not end:
        kept_turn = loss_masks.kept_turn(prompt, str(render(messages)), dialogue_text)
        if kept_turn is None or not sampled_text or _contains_text(sampled_text, kept_turn.dropped):
            return TemplateDelta(_tokens(tokenizer, dialogue_text), True)
        end = kept_turn.end
    # Skip the header of the turn: its special tokens end no turn.
    header = itertools.takewhile(
        lambda pair: pair[0] == pair[1], zip(prompt, dialogue_text, strict=False)
    )
    turn_text, rest_text = dialogue_text[min(len(list(header)), end) : end], dialogue_text[end:]
    ends_with_special = last_token in _special_ids(tokenizer)
    end_mark = _token_text(tokenizer, last_token) if ends_with_special else ""
    # The header of the next turn ends this one (GLM-4).
    if end_mark and rest_text.startswith(end_mark):
        return TemplateDelta(_tokens_after(tokenizer, end_mark, rest_text[len(end_mark) :]), False)
    # The turn reached its token limit, or the template ends turns with another token.
    if not end_mark or end_mark not in turn_text:
        special_texts = (_token_text(tokenizer, token) for token in _special_ids(tokenizer))
        other_mark = next(
            (mark for mark in special_texts if mark and turn_text.rstrip().endswith(mark)), ""
        )
        tail = turn_text[turn_text.rfind(other_mark) :] if other_mark else ""
        tail = tail[len(other_mark) :] if ends_with_special else tail
    else:
        tail = turn_text[turn_text.rfind(end_mark) + len(end_mark) :]
    return TemplateDelta(_tokens_after(tokenizer, end_mark, tail + rest_text), False)


def _contains_text(text: str, part: str) -> bool:
    """Whether a text contains another, ignoring white space."""
    return "".join(part.split()) in "".join(text.split())


def with_json_arguments(messages: Sequence[Message]) -> list[Message]:
    """The messages with the arguments of tool calls as JSON strings, as some templates need."""

    def with_json_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}

    return [
        {**message, "tool_calls": [with_json_arguments(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _tokens_after(tokenizer: PreTrainedTokenizerBase, mark: str, text: str) -> tuple[int, ...]:
    """The tokens of a text that follows the special token `mark`.

    Tokenized on its own, a text may begin differently (SentencePiece puts a space before it).
    """
    mark_tokens = _tokens(tokenizer, mark) if mark else ()
    if len(mark_tokens) != 1:
        return _tokens(tokenizer, text)
    joint_tokens = _tokens(tokenizer, mark + text)
    return joint_tokens[1:] if joint_tokens[:1] == mark_tokens else _tokens(tokenizer, text)


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(encode(tokenizer, text, add_special_tokens=False)["input_ids"])


@functools.lru_cache(maxsize=8)
def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids of all special tokens, the end-of-turn tokens among them."""
    added = tokenizer.added_tokens_decoder
    special_added = (token for token, entry in added.items() if entry.special)
    return frozenset({*tokenizer.all_special_ids, *special_added})


def _token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return str(tokenizer.decode([token], skip_special_tokens=False))
