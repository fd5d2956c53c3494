"""Token ids that must never be sampled: those without text, and image, video or audio markers.

Embeddings are often padded to a round number of rows, and tokenizers leave gaps. Such ids have
logits but no text: if sampled, they decode to nothing and are trained on all the same. Sampling and
log-prob computation mask their logits by the same ranges.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

# Half-open ranges of token ids, ascending; hashable, so that networks can be compared.
TokenRanges = tuple[tuple[int, int], ...]

_KEY_PREFIXES = ("image", "video", "audio", "vision", "boi", "eoi")
_KEY_SUFFIXES = ("_token_id", "_token_index")


def to_ranges(tokens: Iterable[int]) -> TokenRanges:
    """Token ids as merged half-open ranges.

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
    vocab_size: int,
    tokenizer_ids: Iterable[int],
    multimodal_ids: Iterable[int] = (),
    eos_token_ids: Iterable[int] = (),
) -> TokenRanges:
    """Ranges of ids to mask: those that the tokenizer lacks, and `multimodal_ids`; never end
    tokens.

    Args:
      vocab_size: Rows of the output projection.
      tokenizer_ids: Ids that the tokenizer has text for.
      multimodal_ids: Ids of image markers; see `multimodal_token_ids`.
      eos_token_ids: Ids that end a response; they may be sampled even if the tokenizer lacks them.

    >>> unused_tokens(8, tokenizer_ids=[0, 1, 2, 4], multimodal_ids=[2], eos_token_ids=[6])
    ((2, 4), (5, 6), (7, 8))
    """
    return to_ranges(
        (set(range(vocab_size)) - set(tokenizer_ids) | set(multimodal_ids)) - set(eos_token_ids)
    )


def multimodal_token_ids(config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Ids in a config.json that stand for an image, video or sound, or mark its begin or end."""
    return tuple(
        value
        for key, value in config.items()
        if key.startswith(_KEY_PREFIXES) and key.endswith(_KEY_SUFFIXES)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size
    )


def is_inside(tokens: Int[Array, "*dims"], ranges: TokenRanges) -> Bool[Array, "*dims"]:
    """Whether each token lies in one of the ranges; false everywhere without ranges."""
    inside = jnp.zeros(jnp.shape(tokens), bool)
    for start, end in ranges:
        inside |= (tokens >= start) & (tokens < end)
    return inside
