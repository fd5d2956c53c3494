"""Guesses at the next tokens (prompt lookup), checked by one pass over all of them.

A guess is what followed the sequence's last tokens where they occurred before. It is kept if the
sampler draws it at its position, so samples are the same with and without guesses, up to rounding.
This is speculative sampling (2211.17192, algorithm 1) with drafts of probability 1.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def propose(
    history: Int[Array, "S T"], positions: Int[Array, " S"], *, draft_tokens: int, ngram_tokens: int
) -> Int[Array, "S k"]:
    """Returns what may follow each sequence; -1 everywhere if its last token is new to it.

    The latest earlier occurrence of the longest ending of up to `ngram_tokens` tokens decides. A
    guess that reaches the end goes on as if the sequence repeated itself. `history` are tokens by
    position, `positions` those of the last tokens.
    """
    size = history.shape[1]
    index = jnp.arange(size)
    same = index < positions[:, None]
    matched = jnp.zeros(history.shape, jnp.int32)  # tokens up to each index that match the ending
    for back in range(ngram_tokens):
        ending = jnp.take_along_axis(history, jnp.maximum(positions - back, 0)[:, None], axis=1)
        earlier = jnp.pad(history, ((0, 0), (back, 0)), constant_values=-1)[:, :size]
        same &= earlier == ending
        matched += same
    best = jnp.argmax(matched * size + index * (matched > 0), axis=1)[:, None]
    found = jnp.take_along_axis(matched, best, axis=1) > 0
    period = jnp.maximum(positions[:, None] - best, 1)
    follow = best + 1 + jnp.arange(draft_tokens) % period
    return jnp.where(found, jnp.take_along_axis(history, follow, axis=1), -1)


def kept(
    drawn: Int[Array, "S Q"],
    drafts: Int[Array, "S k"],
    stops: Int[Array, "S stops"],
    remaining: Int[Array, " S"],
) -> Bool[Array, "S Q"]:
    """Returns which draws belong to the samples: the first, and those after right guesses.

    Token i of `drawn` was drawn after the last token and drafts 0 to i - 1; Q is k + 1. Drafts and
    stops that are -1 are none; `remaining` tokens may still be sampled.
    """
    before = drawn[:, :-1]
    goes_on = (before == drafts) & (before[:, :, None] != stops[:, None]).all(-1)
    first = jnp.ones((drawn.shape[0], 1), bool)
    after_right = jnp.cumprod(goes_on, axis=1).astype(bool)
    within = jnp.arange(drawn.shape[1]) < remaining[:, None]
    return jnp.concatenate([first, after_right], axis=1) & within
