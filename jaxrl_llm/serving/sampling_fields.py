"""The request fields that adjust logits, as OpenAI's and vLLM's."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.rollout.engine.requests import BAD_WORD_SIZES, BIAS_SIZES
from jaxrl_llm.serving.fields import Strict

Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
BadWord = Annotated[str, Field(min_length=1, max_length=256)]


class SamplingFields(Strict):
    """The fields of a request that adjust logits."""

    logit_bias: dict[TokenKey, Bias] | None = Field(None, max_length=BIAS_SIZES[-1])
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # Extensions to OpenAI's API, as in vLLM.
    repetition_penalty: float | None = Field(None, ge=0.01, le=100.0)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    # A word is two sequences of tokens: as it begins a text, and after a space.
    bad_words: list[BadWord] | None = Field(None, max_length=BAD_WORD_SIZES[-1][0] // 2)

    def adjustments(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> dict[str, Any]:
        """The fields of `SamplingParams` for them. Raises ValueError, naming the field."""
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        if outside := [token for token in bias if token >= vocab_size]:
            message = f"token id {outside[0]} is outside the vocabulary of {vocab_size}"
            raise ValueError(f"logit_bias: {message}")
        penalty = self.repetition_penalty
        return {
            "logit_bias": tuple(bias.items()),
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "repetition_penalty": 1.0 if penalty is None else penalty,
            "min_tokens": self.min_tokens or 0,
            "bad_words": bad_word_tokens(tokenizer, self.bad_words or ()),
        }


def bad_word_tokens(
    tokenizer: PreTrainedTokenizerBase, words: Sequence[str]
) -> tuple[tuple[int, ...], ...]:
    """Token sequences of words, at the beginning of a text and after a space, as vLLM bans them.

    Raises ValueError for a word of no token, or of too many.
    """
    sequences: list[tuple[int, ...]] = []
    max_length = BAD_WORD_SIZES[-1][1]
    for word in words:
        first, spaced = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False))
            for space in ("", " ")
        )
        if not 1 <= len(first) <= max_length:
            raise ValueError(
                f"bad_words: {word!r} has {len(first)} tokens; give words of 1 to {max_length}"
            )
        sequences.append(first)
        # As vLLM: only where the space makes another first token, not one more.
        if len(spaced) == len(first) and spaced[0] != first[0]:
            sequences.append(spaced)
    return tuple(dict.fromkeys(sequences))
