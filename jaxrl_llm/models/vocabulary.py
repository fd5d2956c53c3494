"""Token ids that a model has and a response must never hold: without a text, or marks of images.

Embeddings are often padded to a round number of rows, and tokenizers leave gaps. Such ids have
logits, but no text: what is sampled of them decodes to nothing and is trained all the same. Their
logits are masked where tokens are drawn and where log-probs are computed, by the same ranges.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

# Half-open ranges of token ids, ascending; hashable, so that networks with them can be compared.
TokenRanges = tuple[tuple[int, int], ...]

_MARKS = ("image", "video", "audio", "vision", "boi", "eoi")
_MARK_ENDINGS = ("_token_id", "_token_index")


def to_ranges(tokens: Iterable[int]) -> TokenRanges:
    """The ids as ranges.

    >>> to_ranges([7, 3, 4, 5])
    ((3, 6), (7, 8))
    """
    ranges: list[tuple[int, int]] = []
    for token in sorted(set(tokens)):
        if ranges and ranges[-1][1] == token:
            ranges[-1] = ranges[-1][0], token + 1
        else:
            ranges.append((token, token + 1))
    return tuple(ranges)


def unused_tokens(
    vocab_size: int, known: Iterable[int], marks: Iterable[int] = (), ends: Iterable[int] = ()
) -> TokenRanges:
    """The ids below `vocab_size` that the tokenizer lacks, and marks of images, without end tokens.

    Args:
      vocab_size: Rows of the output projection.
      known: Ids that the tokenizer has a text for.
      marks: Ids that stand for images; see `image_marks`.
      ends: Ids that end a response; these may be sampled even if the tokenizer lacks them.

    >>> unused_tokens(8, known=[0, 1, 2, 4], marks=[2], ends=[6])
    ((2, 4), (5, 6), (7, 8))
    """
    return to_ranges((set(range(vocab_size)) - set(known) | set(marks)) - set(ends))


def image_marks(config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The ids of a config.json that stand for images, videos or sounds, or begin or end them."""
    return tuple(
        value
        for key, value in config.items()
        if key.startswith(_MARKS) and key.endswith(_MARK_ENDINGS)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size
    )


def is_inside(tokens: Int[Array, "*dims"], ranges: TokenRanges) -> Bool[Array, "*dims"]:
    """Whether each token lies in one of the ranges; false everywhere without ranges."""
    inside = jnp.zeros(jnp.shape(tokens), bool)
    for first, end in ranges:
        inside |= (tokens >= first) & (tokens < end)
    return inside
