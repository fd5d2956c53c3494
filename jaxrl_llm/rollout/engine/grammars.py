"""Grammars of samples, and the masks of the tokens that they allow; computed by llguidance.

`rollout/structured_outputs.py` compiles JSON schemas, regular expressions and Lark grammars into
these. A grammar describes the text of a sample without the token that ends it.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from jaxtyping import UInt32

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.engine.token_sampling import MASK_BITS

_NOTHING_FOLLOWS = "no token of this model can follow"


class GrammarError(UserError, ValueError):
    """A grammar that cannot be compiled, or that a sample cannot follow."""


class Grammar:
    """A compiled grammar over the tokens of one model; its matchers are independent."""

    def __init__(self, matcher: Any, eos_token: int, num_tokens: int, text: str):
        """
        Args:
          matcher: An `LLMatcher` at the start of the grammar.
          eos_token: The token by which llguidance says that the text may end.
          num_tokens: Size of the vocabulary that llguidance knows.
          text: What it was compiled from.
        """
        self._matcher, self.eos_token, self.num_tokens = matcher, eos_token, num_tokens
        self.text = text

    @property
    def num_words(self) -> int:
        """Words of a mask over the vocabulary."""
        return num_mask_words(self.num_tokens)

    def matcher(self) -> "GrammarMatcher":
        """The state of a sample without any token."""
        return GrammarMatcher(self, self._matcher.deep_copy())


class GrammarMatcher:
    """The state of one sample in its grammar."""

    def __init__(self, grammar: Grammar, native: Any):
        self.grammar, self.native = grammar, native
        self.num_advanced = 0  # tokens

    def advance(self, tokens: Sequence[int]) -> None:
        """Accepts tokens; raises `GrammarError` if the grammar does not allow them."""
        tokens = list(tokens)
        if tokens and not self.native.consume_tokens(tokens):
            raise GrammarError(f"grammar: {problem_of(self.native)}")
        self.num_advanced += len(tokens)


def problem_of(matcher: Any) -> str:
    """The error of an `LLMatcher` in one line, without its state; "" if there is none."""
    problem = " ".join(matcher.get_error().partition("<state>")[0].split())
    return _NOTHING_FOLLOWS if problem.startswith("NoExtension") else problem[:300]


def num_mask_words(num_tokens: int) -> int:
    """Words of a mask over `num_tokens` tokens."""
    return -(-num_tokens // MASK_BITS)


class ConstrainedSample(Protocol):
    """A sample as its masks need it."""

    @property
    def stop_tokens(self) -> Sequence[int]:
        """Tokens that end it."""
        ...

    @property
    def is_constrained(self) -> bool:
        """Whether it has a grammar."""
        ...

    def advanced_matcher(self) -> GrammarMatcher:
        """The state of its grammar after all its tokens; raises `GrammarError`."""
        ...


_Sample = TypeVar("_Sample", bound=ConstrainedSample)


def token_masks(
    samples: Mapping[int, _Sample], num_rows: int, vocab_size: int
) -> tuple[UInt32[np.ndarray, "rows words"], dict[_Sample, GrammarError]]:
    """Masks of the tokens that the grammars of samples by row allow; other rows allow all.

    Returns the masks, and the errors of the samples that cannot go on.
    """
    masks = np.full((num_rows, num_mask_words(vocab_size)), ~np.uint32(0))
    errors: dict[_Sample, GrammarError] = {}
    matchers: dict[int, GrammarMatcher] = {}
    for row, sample in samples.items():
        if sample.is_constrained:
            try:
                matchers[row] = sample.advanced_matcher()
            except GrammarError as error:
                errors[sample] = error
    stop_tokens = {row: samples[row].stop_tokens for row in matchers}
    failed_rows = fill_masks(masks, matchers, stop_tokens)
    return masks, errors | {samples[row]: error for row, error in failed_rows.items()}


def fill_masks(
    masks: UInt32[np.ndarray, "S words"],
    matchers: Mapping[int, GrammarMatcher],
    stop_tokens: Mapping[int, Sequence[int]],
) -> dict[int, GrammarError]:
    """Fills rows of `masks` with the tokens that may come next; other rows stay as they are.

    Stop tokens of a row are allowed where its grammar may end, and nowhere else unless the grammar
    itself allows them. The rows are filled in parallel, without the interpreter's lock.

    Returns:
      The error of each row that cannot go on; its mask allows everything.
    """
    if not matchers:
        return {}
    num_words = max(masks.shape[1], *(m.grammar.num_words for m in matchers.values()))
    filled = np.zeros((len(masks), num_words), np.uint32)
    pairs = [(matcher.native, row) for row, matcher in matchers.items()]
    _executor().unsafe_compute_mask_ptr(
        pairs, filled.ctypes.data, num_words * filled.itemsize, len(filled)
    )
    errors = {}
    for row, matcher in matchers.items():
        mask = filled[row, : masks.shape[1]]
        may_end = _clear_bit(filled[row], matcher.grammar.eos_token)
        if may_end and matcher.native.is_error():
            errors[row] = GrammarError(f"grammar: {problem_of(matcher.native)}")
        elif may_end:
            for token in stop_tokens[row]:
                mask[token // MASK_BITS] |= np.uint32(1 << token % MASK_BITS)
        if row not in errors and not mask.any():
            errors[row] = GrammarError(f"grammar: {_NOTHING_FOLLOWS}")
        masks[row] = ~np.uint32(0) if row in errors else mask
    return errors


def _clear_bit(mask: UInt32[np.ndarray, " words"], token: int) -> bool:
    """Clears the bit of a token; returns whether it was set."""
    word, bit = token // MASK_BITS, np.uint32(1 << token % MASK_BITS)
    was_set = bool(mask[word] & bit)
    mask[word] &= ~bit
    return was_set


@functools.cache
def _executor() -> Any:
    """The threads that fill masks."""
    import llguidance

    return llguidance.LLExecutor()
