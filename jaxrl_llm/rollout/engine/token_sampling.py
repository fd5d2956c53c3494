"""Token sampling from logits with top-k, top-p and min-p, reproducible per sample; prompt lookup.

The random number of a token depends only on the key of its sample and its position. A draft
(prompt lookup) is what followed the sequence's last tokens where they occurred before. It is
accepted if the sampler draws it at its position, so samples are the same with and without
speculation, up to rounding. This is speculative sampling (2211.17192, algorithm 1) with drafts of
probability 1.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

TokenMasks = UInt32[
    Array, "S words"
]  # a bit per token of the vocabulary, lowest first; 0: forbidden
MASK_BITS = 32

_BLOCK = 128  # vocabulary entries summed at a time by the two-level search


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerState:
    """Sampling parameters per row, as arrays, so that changing a value never recompiles."""

    keys: UInt32[Array, "S 2"]  # raw key of the row's sample
    temperature: Float[Array, " S"]  # 0: greedy
    top_k: Int[Array, " S"]  # 0: off
    top_p: Float[Array, " S"]  # 1: off
    min_p: Float[Array, " S"]  # 0: off
    # `SamplingParams.support_tokens`, 0: off; None: off for all rows
    support_tokens: Int[Array, " S"] | None = None


def sample(
    logits: Float[Array, "S V"],
    positions: Int[Array, " S"],
    sampler: SamplerState,
    *,
    filtered: bool,
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Samples one token per row, with its log-prob; `positions` are those of the sampled tokens.

    The log-prob is over the whole vocabulary at the sampling temperature (1 for greedy rows), the
    one the same network gives in training. Filters restrict the draw, not the reported log-prob;
    see `sample_with_support` for log-probs over what they keep.
    `filtered` (static): some row uses top_k, top_p or min_p; False skips their cost.
    """
    tokens, log_probs, _ = sample_with_support(
        logits, positions, sampler, filtered=filtered, num_support=0
    )
    return tokens, log_probs


def sample_with_support(
    logits: Float[Array, "S V"],
    positions: Int[Array, " S"],
    sampler: SamplerState,
    *,
    filtered: bool,
    num_support: int,
) -> tuple[Int[Array, " S"], Float[Array, " S"], Int[Array, "S k"]]:
    """As `sample`, with the support of each token: the tokens among which it was drawn.

    Rows with `support_tokens` draw among that many of the most likely tokens that the filters keep,
    and their log-probs are renormalized over these (DeepSeek-V3.2, arXiv:2512.02556, Sec. 3.1:
    keep sampling mask). `num_support` (static) is k, at least the `support_tokens` of any row;
    supports are padded with -1, which is all that other rows have.
    """
    scaled = _scale_logits(logits, sampler)
    mass = jnp.exp(scaled)  # unnormalized probabilities, the largest is 1
    total = mass.sum(-1)
    filtered_mass = _filter(mass, sampler) if filtered else mass
    support = jnp.zeros((len(positions), 0), jnp.int32)
    if num_support and sampler.support_tokens is not None:
        largest, ids = lax.top_k(filtered_mass, num_support)
        is_kept = (jnp.arange(num_support) < sampler.support_tokens[:, None]) & (largest > 0)
        rows, vocab_size = jnp.arange(len(ids))[:, None], mass.shape[-1]
        support_mass = (
            jnp.zeros_like(mass)
            .at[rows, jnp.where(is_kept, ids, vocab_size)]
            .set(largest, mode="drop")
        )
        has_support = sampler.support_tokens > 0
        filtered_mass = jnp.where(has_support[:, None], support_mass, filtered_mass)
        total = jnp.where(has_support, support_mass.sum(-1), total)
        support = jnp.where(is_kept, ids, -1).astype(jnp.int32)
    log_total = jnp.log(total)
    tokens = _inverse_cdf(filtered_mass, _uniforms(sampler.keys, positions))
    greedy = sampler.temperature == 0.0
    tokens = jnp.where(greedy, jnp.argmax(logits, -1), tokens).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - log_total, support


def mask_logits(logits: Float[Array, "S V"], masks: TokenMasks) -> Float[Array, "S V"]:
    """Logits with forbidden tokens at minus infinity: probabilities are over the allowed ones."""
    bits = (masks[:, :, None] >> jnp.arange(MASK_BITS, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(len(masks), -1)[:, : logits.shape[-1]]
    return jnp.where(allowed > 0, logits, -jnp.inf)


def top_log_probs(
    logits: Float[Array, "S V"], sampler: SamplerState, count: int
) -> tuple[Int[Array, "S k"], Float[Array, "S k"]]:
    """The `count` most likely tokens of each row and their log-probs, as in `sample`."""
    if not count:
        shape = (logits.shape[0], 0)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    log_probs, tokens = lax.top_k(jax.nn.log_softmax(_scale_logits(logits, sampler)), count)
    return tokens, log_probs


def _scale_logits(logits: Float[Array, "S V"], sampler: SamplerState) -> Float[Array, "S V"]:
    """Logits minus their maximum, over each row's temperature (1 for greedy rows)."""
    # Subtract first: at a small temperature the quotients are large, and so is their rounding.
    temperature = jnp.where(sampler.temperature == 0.0, 1.0, sampler.temperature)
    return (logits - logits.max(-1, keepdims=True)) / temperature[:, None]


def _uniforms(keys, positions) -> Float[Array, "S 2"]:
    def pair(key, position):
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), position), (2,))

    return jax.vmap(pair)(keys, positions)


def _inverse_cdf(mass: Float[Array, "S V"], uniforms: Float[Array, "S 2"]) -> Int[Array, " S"]:
    """Draws an entry of each row in proportion to `mass`."""
    # Two-level search, for a block of entries and then within it: faster than V Gumbel numbers.
    # Each level has its own uniform: one has too few bits for rare entries of a large vocabulary.
    size = mass.shape[-1]
    blocks = jnp.pad(mass, ((0, 0), (0, -size % _BLOCK))).reshape(mass.shape[0], -1, _BLOCK)
    block = _search(blocks.sum(-1), uniforms[:, 0])
    row = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    # In a row of NaNs no entry is found: any will do, but it must be in range.
    return jnp.minimum(block * _BLOCK + _search(row, uniforms[:, 1]), size - 1)


def _search(mass: Float[Array, "S entries"], uniform: Float[Array, " S"]) -> Int[Array, " S"]:
    """The first entry with mass where the cumulative sum exceeds `uniform` times the total."""
    # Parallel prefix sums are not monotonic in the last bit, so a larger sum alone does not show
    # that the entry has mass.
    sums = jnp.cumsum(mass, -1)
    passes = (mass > 0) & (sums > uniform[:, None] * sums[:, -1:])
    last = mass.shape[-1] - 1 - jnp.argmax((mass > 0)[:, ::-1], axis=-1)
    return jnp.where(passes.any(-1), jnp.argmax(passes, axis=-1), last)


def _filter(mass: Float[Array, "S V"], sampler: SamplerState) -> Float[Array, "S V"]:
    """`mass` with entries outside top-k, then top-p, then min-p set to zero."""
    k = jnp.where(sampler.top_k > 0, sampler.top_k, mass.shape[-1])
    top_k_threshold = _threshold(mass, lambda kept: kept.sum(-1) >= k)
    mass = jnp.where(mass >= top_k_threshold[:, None], mass, 0.0)

    # A row without top-p keeps everything, however its sum rounds.
    target_mass = jnp.where(sampler.top_p < 1.0, sampler.top_p * mass.sum(-1), 0.0)
    top_p_threshold = _threshold(
        mass,
        lambda kept: jnp.where(kept, mass, 0.0).sum(-1) >= target_mass,
        enabled=sampler.top_p < 1.0,
    )
    mass = jnp.where(mass >= top_p_threshold[:, None], mass, 0.0)
    return jnp.where(mass >= sampler.min_p[:, None], mass, 0.0)


def _threshold(mass: Float[Array, "S V"], is_enough, enabled: Bool[Array, " S"] | bool = True):
    """The largest t per row for which the entries >= t satisfy `is_enough`; 0 unless `enabled`.

    Bisects over the bits of non-negative floats, which are ordered like integers.
    """

    def try_bit(i, low):
        middle = low | (1 << (30 - i))
        threshold = lax.bitcast_convert_type(middle, jnp.float32)
        return jnp.where(is_enough(mass >= threshold[:, None]), middle, low)

    # Entries do not exceed 1, so the sign bit and the highest exponent bit stay zero.
    low = lax.fori_loop(1, 31, try_bit, jnp.zeros(mass.shape[0], jnp.int32))
    # Always keep the largest entry, 1: a top-p mass that rounds to 0 would keep none.
    largest = jnp.minimum(lax.bitcast_convert_type(low, jnp.float32), 1.0)
    return jnp.where(enabled, largest, 0.0)


def prompt_lookup_drafts(
    history: Int[Array, "S T"], positions: Int[Array, " S"], draft_tokens: int, ngram_tokens: int
) -> Int[Array, "S k"]:
    """Draft tokens for each sequence by prompt lookup; all -1 if its last token is new to it.

    Copies what follows the latest earlier occurrence of the longest suffix of up to `ngram_tokens`
    tokens. A draft that reaches the end of the sequence continues as if it were periodic. `history`
    are tokens by position, `positions` those of the last tokens.
    """
    size = history.shape[1]
    index = jnp.arange(size)
    matches = index < positions[:, None]
    match_lengths = jnp.zeros(history.shape, jnp.int32)  # of suffixes that end at each index
    for distance in range(ngram_tokens):
        ending = jnp.take_along_axis(history, jnp.maximum(positions - distance, 0)[:, None], axis=1)
        earlier = jnp.pad(history, ((0, 0), (distance, 0)), constant_values=-1)[:, :size]
        matches &= earlier == ending
        match_lengths += matches
    latest_match = jnp.argmax(match_lengths * size + index * (match_lengths > 0), axis=1)[:, None]
    has_match = jnp.take_along_axis(match_lengths, latest_match, axis=1) > 0
    period = jnp.maximum(positions[:, None] - latest_match, 1)
    next_indices = latest_match + 1 + jnp.arange(draft_tokens) % period
    return jnp.where(has_match, jnp.take_along_axis(history, next_indices, axis=1), -1)


def acceptance_mask(
    drawn: Int[Array, "S Q"],
    drafts: Int[Array, "S k"],
    stops: Int[Array, "S stops"],
    remaining: Int[Array, " S"],
) -> Bool[Array, "S Q"]:
    """Acceptance mask of speculative decoding: the first draw, and those after right drafts.

    Token i of `drawn` was sampled after the last token and drafts 0 to i - 1; Q is k + 1. Entries
    of -1 in drafts and stops are padding; `remaining` tokens may still be sampled.
    """
    preceding = drawn[:, :-1]
    is_right = (preceding == drafts) & (preceding[:, :, None] != stops[:, None]).all(-1)
    first = jnp.ones((drawn.shape[0], 1), bool)
    after_right_drafts = jnp.cumprod(is_right, axis=1).astype(bool)
    within_limit = jnp.arange(drawn.shape[1]) < remaining[:, None]
    return jnp.concatenate([first, after_right_drafts], axis=1) & within_limit
