"""Dialogues as training sequences: each turn in the context in which it is sampled.

Some chat templates write a turn in another way once others follow; Qwen3 drops its thinking. In
the rendering of the whole dialogue such a turn is not what the policy samples, and is trained in a
sequence of its own, which ends with it. The other turns share a sequence.
"""

import functools
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from jaxrl_llm.data.chat import loss_masks
from jaxrl_llm.data.chat.loss_masks import Dialogue
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tokenizer import render_chat
from jaxrl_llm.types import Example

RewrittenTurns = Literal["split", "whole"]


class TurnSequence(NamedTuple):
    """A sequence that trains some turns of a dialogue."""

    example: Example
    num_messages: int  # of the dialogue, from its beginning
    turns: tuple[int, ...]  # numbers of the messages that bear loss, from 0


class DialogueSequences(NamedTuple):
    """The sequences of a dialogue, in the order of their last turns."""

    sequences: tuple[TurnSequence, ...]
    num_rewritten: int  # turns that the rendering of the whole dialogue does not have as sampled


def dialogue_sequences(
    tokenizer: PreTrainedTokenizerBase,
    dialogue: Dialogue,
    chat_template: bool,
    rewritten_turns: RewrittenTurns = "split",
) -> DialogueSequences:
    """Sequences that train each turn of a dialogue once; see `loss_masks.dialogue_example`.

    A turn's context is the rendering of the messages before it with the generation prompt.
    "split": the context of every turn is the one in which it is sampled. "whole": one sequence,
    with every turn as the rendering of the whole dialogue has it.

    Raises:
      DataError: If nothing bears loss, or the tokens of a turn cannot be found.
    """
    if not chat_template:
        example = loss_masks.dialogue_example(tokenizer, dialogue, chat_template)
        count = len(dialogue.messages)
        return DialogueSequences((TurnSequence(example, count, (count - 1,)),), 0)
    with loss_masks.named_errors(dialogue.where):
        dialogue = loss_masks.without_end_tokens(tokenizer, dialogue)
        turns = loss_masks.trained_turns(dialogue)
        renderings = _Renderings(tokenizer, dialogue)
        num_messages = len(dialogue.messages)
        if rewritten_turns == "split":
            groups = renderings.groups(turns)
            num_rewritten = len(turns) - len(groups[-1]) if turns else 0
        else:
            groups = [turns]
            num_rewritten = len(turns) - len(renderings.kept_turns(turns, num_messages))
        splits = rewritten_turns == "split" and bool(turns)
        sizes = [group[-1] + 1 if splits else num_messages for group in groups]
        marks = [renderings.following_mark(size) for size in sizes]
    sequences = []
    for group, size, mark in zip(groups, sizes, marks, strict=True):
        part = dialogue._replace(messages=dialogue.messages[:size])
        example = loss_masks.dialogue_example(tokenizer, part, True, group, mark)
        sequences.append(TurnSequence(example, size, tuple(group)))
    return DialogueSequences(tuple(sequences), num_rewritten)


class _Renderings:
    """Cached renderings of the prefixes of a dialogue."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue):
        self._tokenizer = tokenizer
        self._dialogue = dialogue
        self._texts: dict[tuple[int, bool], str] = {}

    def _text(self, num_messages: int, asks: bool = False) -> str:
        key = num_messages, asks
        if key not in self._texts:
            messages, options = self._dialogue.messages[:num_messages], self._dialogue.options
            kwargs = {"tokenize": False, "add_generation_prompt": asks}
            self._texts[key] = str(render_chat(self._tokenizer, messages, options, **kwargs))
        return self._texts[key]

    @functools.cached_property
    def _has_end(self) -> bool:
        turn = next(i for i, m in enumerate(self._dialogue.messages) if m["role"] == "assistant")
        return loss_masks.ends_turns(self._tokenizer, self._dialogue, turn)

    def groups(self, turns: list[int]) -> list[list[int]]:
        """Groups turns into sequences; a sequence ends with the last turn of its group."""
        groups: list[list[int]] = []
        while turns:
            group = self.kept_turns(turns, turns[-1] + 1)
            groups.insert(0, group)
            turns = [turn for turn in turns if turn not in group]
        return groups or [[]]

    def kept_turns(self, turns: list[int], num_messages: int) -> list[int]:
        """The turns that the first `num_messages` messages render as they are sampled."""
        if len(turns) == 1 and turns[0] == num_messages - 1:  # the usual row: nothing to compare
            return turns
        text = self._text(num_messages)
        return [turn for turn in turns if turn == num_messages - 1 or self._is_kept(turn, text)]

    def _is_kept(self, turn: int, text: str) -> bool:
        try:
            kept = loss_masks.kept_turn(self._text(turn, asks=True), self._text(turn + 1), text)
        except DataError:  # it refuses this beginning of a dialogue
            if loss_masks.has_marks(self._tokenizer):
                return True
            raise
        if kept is None or self._has_end:
            return kept is not None
        return bool(loss_masks.leading_mark(self._tokenizer, text[kept.end :]))

    def following_mark(self, num_messages: int) -> str:
        """The mark of the role that speaks after `num_messages` messages, "" if none is known."""
        if num_messages >= len(self._dialogue.messages) or self._has_end:
            return ""
        return loss_masks.following_mark(self._tokenizer, self._dialogue, num_messages - 1)
