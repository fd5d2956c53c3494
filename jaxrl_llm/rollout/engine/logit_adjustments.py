"""Adjustments of logits before sampling: bias, penalties, minimum lengths, bad words.

In the order of vLLM's sampler: `logit_bias` is added, then the repetition, frequency and presence
penalties apply, then tokens are banned (stop tokens before `min_tokens`, ends of bad words).
Adjustments define the distribution: a token's log-prob, and those of the most likely tokens, are
of the adjusted logits at the sampling temperature.

The host builds the arrays for every chunk of decode steps from the samples' own tokens, so that a
sample depends neither on its slot and neighbours nor on the length of chunks, and continues
unchanged after a preemption. Rows without adjustments keep their logits bit for bit.

The mask of a grammar comes after them: where it allows banned tokens alone, one of these is
sampled.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.heads import SUPPRESSED_LOGIT
from jaxrl_llm.rollout.engine.requests import (
    BAD_WORD_SIZES,
    BIAS_SIZES,
    NUM_STOP_TOKENS,
    SamplingParams,
)

_ANY_TOKEN = -1  # in bad words: padding at the front
_NO_TOKEN = -2  # equal to no token of a bad word


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitAdjustments:
    """Adjustments of S rows. Token ids past the vocabulary are padding.

    T and L are 0 if no row has penalties or bad words: these alone depend on earlier tokens.
    """

    bias_tokens: Int[Array, "S biases"]
    biases: Float[Array, "S biases"]
    repetition_penalty: Float[Array, " S"]  # 1: off
    presence_penalty: Float[Array, " S"]  # 0: off
    frequency_penalty: Float[Array, " S"]  # 0: off
    stop_tokens: Int[Array, "S stops"]
    min_positions: Int[Array, " S"]  # stop tokens are banned at positions below
    bad_words: Int[Array, "S words L"]  # right-aligned, -1 in front; a last token of -1: none
    history: Int[Array, "S T"]  # tokens by position
    lengths: Int[Array, " S"]  # of the history
    output_starts: Int[Array, " S"]  # position of the first token of the output

    @property
    def uses_history(self) -> bool:
        return self.history.shape[1] > 0


class AdjustedRow(NamedTuple):
    """A sample whose logits are adjusted."""

    params: SamplingParams
    tokens: Sequence[int]  # prompt and output so far
    output_start: int  # length of the prompt


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """Occurrences of tokens in S sequences; V and `recent` are 0 where no row needs them."""

    in_prompt: Bool[Array, "S V"]
    output: Int[Array, "S V"]
    recent: Int[Array, "S preceding"]  # last tokens of the output


def adjustment_arrays(
    rows: Sequence[tuple[int, AdjustedRow]], size: int, history_tokens: int
) -> LogitAdjustments | None:
    """Builds the adjustments of `size` rows on the host, or None if no row is adjusted.

    Args:
      rows: The adjusted rows, with their indices; the others stay as they are.
      history_tokens: At least the tokens of any row.
    """
    if not rows:
        return None
    params = [row.params for _, row in rows]
    needs_history = any(p.is_history_dependent for p in params)
    num_biases = max(len(p.logit_bias) for p in params)
    num_biases = next(n for n in BIAS_SIZES if n >= num_biases)
    num_words = max(len(p.bad_words) for p in params)
    longest = max((len(word) for p in params for word in p.bad_words), default=0)
    words = next((n, m) for n, m in BAD_WORD_SIZES if n >= num_words and m >= longest)
    history_tokens, words = (history_tokens, words) if needs_history else (0, (0, 0))

    zeros: Any = np.zeros  # typed as device arrays: jit transfers them
    none = np.iinfo(np.int32).max  # past any vocabulary
    a = LogitAdjustments(
        bias_tokens=zeros((size, num_biases), np.int32) + none,
        biases=zeros((size, num_biases), np.float32),
        repetition_penalty=zeros(size, np.float32) + 1,
        presence_penalty=zeros(size, np.float32),
        frequency_penalty=zeros(size, np.float32),
        stop_tokens=zeros((size, NUM_STOP_TOKENS), np.int32) + none,
        min_positions=zeros(size, np.int32),
        bad_words=zeros((size, *words), np.int32) + _ANY_TOKEN,
        history=zeros((size, history_tokens), np.int32),
        lengths=zeros(size, np.int32),
        output_starts=zeros(size, np.int32),
    )
    for i, (p, tokens, output_start) in rows:
        for j, (token, bias) in enumerate(p.logit_bias):
            a.bias_tokens[i, j], a.biases[i, j] = token, bias
        a.repetition_penalty[i] = p.repetition_penalty
        a.presence_penalty[i], a.frequency_penalty[i] = p.presence_penalty, p.frequency_penalty
        a.stop_tokens[i, : len(p.stop_tokens)] = p.stop_tokens
        a.min_positions[i] = output_start + p.min_tokens
        a.output_starts[i] = output_start
        if p.is_history_dependent:
            a.lengths[i] = len(tokens)
            a.history[i, : len(tokens)] = tokens
            for j, word in enumerate(p.bad_words):
                a.bad_words[i, j, -len(word) :] = word
    return a


def token_counts(adjustments: LogitAdjustments, vocab_size: int) -> TokenCounts:
    """Counts the tokens of the history."""
    a, rows = adjustments, jnp.arange(len(adjustments.lengths))[:, None]
    if not a.uses_history:
        empty = jnp.zeros((len(a.lengths), 0), jnp.int32)
        return TokenCounts(empty.astype(bool), empty, empty)
    positions = jnp.arange(a.history.shape[1])
    is_token = positions < a.lengths[:, None]
    is_output = positions >= a.output_starts[:, None]
    prompt = jnp.where(is_token & ~is_output, a.history, vocab_size)
    output = jnp.where(is_token & is_output, a.history, vocab_size)
    zeros = jnp.zeros((len(a.lengths), vocab_size), jnp.int32)
    # the last L - 1 tokens, if they belong to the output
    last = a.lengths[:, None] - jnp.arange(a.bad_words.shape[2] - 1, 0, -1)
    recent = jnp.take_along_axis(a.history, jnp.maximum(last, 0), axis=1)
    return TokenCounts(
        in_prompt=zeros.astype(bool).at[rows, prompt].set(True, mode="drop"),
        output=zeros.at[rows, output].add(1, mode="drop"),
        recent=jnp.where(last >= a.output_starts[:, None], recent, _NO_TOKEN),
    )


def dense_bias(adjustments: LogitAdjustments, vocab_size: int) -> Float[Array, "S V"]:
    """The bias of every token; computed once for a chunk of steps."""
    rows = jnp.arange(len(adjustments.lengths))[:, None]
    zeros = jnp.zeros((len(adjustments.lengths), vocab_size), jnp.float32)
    return zeros.at[rows, adjustments.bias_tokens].add(adjustments.biases, mode="drop")


def adjusted_logits(
    logits: Float[Array, "S Q V"],
    positions: Int[Array, "S Q"],
    adjustments: LogitAdjustments,
    bias: Float[Array, "S V"],
    counts: TokenCounts,
    drafts: Int[Array, "S drafts"],
) -> Float[Array, "S Q V"]:
    """Logits with bias and penalties; those of banned tokens are so low that they are never drawn.

    Args:
      positions: Of the tokens to sample.
      bias: As from `dense_bias`.
      counts: Of all tokens before the first of `positions`.
      drafts: Tokens that precede the later ones of `positions` (speculation).
    """
    a = adjustments
    suppressed = logits <= SUPPRESSED_LOGIT  # no bias or penalty raises them
    adjusted = logits + bias[:, None]
    if a.uses_history:
        output = _counts_after_drafts(counts.output, drafts)
        occurs = counts.in_prompt[:, None] | (output > 0)
        column = lambda penalty: penalty[:, None, None]  # noqa: E731
        repetition = jnp.where(occurs, column(a.repetition_penalty), 1.0)
        adjusted = jnp.where(adjusted > 0, adjusted / repetition, adjusted * repetition)
        adjusted -= column(a.frequency_penalty) * output
        adjusted -= column(a.presence_penalty) * (output > 0)
    adjusted = jnp.where(suppressed, logits, adjusted)
    banned = _banned_tokens(a, positions, counts.recent, drafts, logits.shape[-1])
    rows, queries = jnp.arange(logits.shape[0])[:, None, None], jnp.arange(logits.shape[1])[:, None]
    return adjusted.at[rows, queries, banned].set(SUPPRESSED_LOGIT, mode="drop")


def counts_with(
    counts: TokenCounts, tokens: Int[Array, "S Q"], accepted: Bool[Array, "S Q"]
) -> TokenCounts:
    """Counts after the accepted tokens, the first ones of each row."""
    if not counts.output.shape[1]:
        return counts
    rows, vocab_size = jnp.arange(len(tokens))[:, None], counts.output.shape[1]
    size = counts.recent.shape[1]
    # The last `size` tokens end after the accepted ones.
    last = accepted.sum(axis=1)[:, None] + jnp.arange(size)
    recent = jnp.take_along_axis(jnp.concatenate([counts.recent, tokens], axis=1), last, axis=1)
    output = counts.output.at[rows, jnp.where(accepted, tokens, vocab_size)].add(1, mode="drop")
    return dataclasses.replace(counts, output=output, recent=recent)


def _counts_after_drafts(
    output: Int[Array, "S V"], drafts: Int[Array, "S drafts"]
) -> Int[Array, "S Q V"]:
    """Counts before each of Q positions, as if the drafts before it were part of the output."""
    rows = jnp.arange(len(output))
    by_query = [output]
    for draft in jnp.where(drafts < 0, output.shape[1], drafts).T:
        by_query.append(by_query[-1].at[rows, draft].add(1, mode="drop"))
    return jnp.stack(by_query, axis=1)


def _banned_tokens(
    adjustments: LogitAdjustments,
    positions: Int[Array, "S Q"],
    recent: Int[Array, "S preceding"],
    drafts: Int[Array, "S drafts"],
    vocab_size: int,
) -> Int[Array, "S Q bans"]:
    """Tokens that must not be sampled at each position, padded with ids past the vocabulary."""
    a = adjustments
    is_early = (positions < a.min_positions[:, None])[:, :, None]
    stops = jnp.where(is_early, a.stop_tokens[:, None], vocab_size)
    if not a.bad_words.size:
        return stops
    size = recent.shape[1]
    window = jnp.arange(positions.shape[1])[:, None] + jnp.arange(size)
    preceding = jnp.concatenate([recent, drafts], axis=1)[:, window]  # [S, Q, L-1]
    first_tokens, last_token = a.bad_words[:, None, :, :-1], a.bad_words[:, None, :, -1]
    matches = (first_tokens == _ANY_TOKEN) | (first_tokens == preceding[:, :, None])
    ends = matches.all(-1) & (last_token != _ANY_TOKEN)
    return jnp.concatenate([stops, jnp.where(ends, last_token, vocab_size)], axis=-1)
