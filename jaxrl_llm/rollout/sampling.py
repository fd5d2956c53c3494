"""Next tokens from logits: exact, filtered, and reproducible sample by sample; guesses at them.

The random number of a token depends on the key of its sample and on its position alone. A guess
(prompt lookup) is what followed the sequence's last tokens where they occurred before. It is kept
if the sampler draws it at its position, so samples are the same with and without guesses, up to
rounding. This is speculative sampling (2211.17192, algorithm 1) with drafts of probability 1.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

_BLOCK = 128  # vocabulary entries summed at a time by the two-level search


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerState:
    """Sampling parameters of every row, as arrays, so that no value recompiles anything."""

    keys: UInt32[Array, "S 2"]  # raw key of the row's sample
    temperature: Float[Array, " S"]  # 0: greedy
    top_k: Int[Array, " S"]  # 0: off
    top_p: Float[Array, " S"]  # 1: off
    min_p: Float[Array, " S"]  # 0: off


def sample(
    logits: Float[Array, "S V"],
    positions: Int[Array, " S"],
    sampler: SamplerState,
    *,
    filtered: bool,
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Returns one token a row and its log-prob; `positions` are those of the sampled tokens.

    The log-prob is that of the whole vocabulary at the sampling temperature (1 for greedy rows):
    what the same network gives in training. Filters restrict what may be drawn, not what is
    reported. `filtered` (static): some row uses top_k, top_p or min_p; False skips their cost.
    """
    scaled = _scaled(logits, sampler)
    mass = jnp.exp(scaled)  # unnormalized probabilities, the largest is 1
    log_total = jnp.log(mass.sum(-1))
    allowed = _filter(mass, sampler) if filtered else mass
    tokens = _inverse_cdf(allowed, _uniforms(sampler.keys, positions))
    greedy = sampler.temperature == 0.0
    tokens = jnp.where(greedy, jnp.argmax(logits, -1), tokens).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - log_total


def top_log_probs(
    logits: Float[Array, "S V"], sampler: SamplerState, count: int
) -> tuple[Int[Array, "S k"], Float[Array, "S k"]]:
    """Returns the `count` likeliest tokens of each row and their log-probs, as in `sample`."""
    if not count:
        shape = (logits.shape[0], 0)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    log_probs, tokens = lax.top_k(jax.nn.log_softmax(_scaled(logits, sampler)), count)
    return tokens, log_probs


def _scaled(logits: Float[Array, "S V"], sampler: SamplerState) -> Float[Array, "S V"]:
    """Returns the logits less their largest, at each row's temperature (1 for greedy rows)."""
    # In this order: at a small temperature quotients are large, and so is their rounding.
    temperature = jnp.where(sampler.temperature == 0.0, 1.0, sampler.temperature)
    return (logits - logits.max(-1, keepdims=True)) / temperature[:, None]


def _uniforms(keys, positions) -> Float[Array, "S 2"]:
    def two(key, position):
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), position), (2,))

    return jax.vmap(two)(keys, positions)


def _inverse_cdf(mass: Float[Array, "S V"], uniforms: Float[Array, "S 2"]) -> Int[Array, " S"]:
    """Returns an entry of each row, drawn in proportion to `mass`."""
    # A search for a block of entries, one for the entry in it: faster than V Gumbel numbers. Each
    # has its own uniform: one has too few bits for rare entries of a large vocabulary.
    size = mass.shape[-1]
    blocks = jnp.pad(mass, ((0, 0), (0, -size % _BLOCK))).reshape(mass.shape[0], -1, _BLOCK)
    block = _search(blocks.sum(-1), uniforms[:, 0])
    row = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    # A row that is not a number anywhere has no entry to find: any will do.
    return jnp.minimum(block * _BLOCK + _search(row, uniforms[:, 1]), size - 1)


def _search(mass: Float[Array, "S entries"], uniform: Float[Array, " S"]) -> Int[Array, " S"]:
    """Returns the first entry with mass at which the running sum passes `uniform` of its total."""
    # Parallel sums may fall in the last bit, so a larger sum does not show that there is mass.
    sums = jnp.cumsum(mass, -1)
    found = (mass > 0) & (sums > uniform[:, None] * sums[:, -1:])
    last = mass.shape[-1] - 1 - jnp.argmax((mass > 0)[:, ::-1], axis=-1)
    return jnp.where(found.any(-1), jnp.argmax(found, axis=-1), last)


def _filter(mass: Float[Array, "S V"], sampler: SamplerState) -> Float[Array, "S V"]:
    """Returns `mass` with the entries outside top_k, then top_p, then min_p set to zero."""
    k = jnp.where(sampler.top_k > 0, sampler.top_k, mass.shape[-1])
    kth = _threshold(mass, lambda kept: kept.sum(-1) >= k)
    mass = jnp.where(mass >= kth[:, None], mass, 0.0)

    # A row without top_p keeps everything, however its sum rounds.
    wanted = jnp.where(sampler.top_p < 1.0, sampler.top_p * mass.sum(-1), 0.0)
    pth = _threshold(
        mass, lambda kept: jnp.where(kept, mass, 0.0).sum(-1) >= wanted, start=sampler.top_p < 1.0
    )
    mass = jnp.where(mass >= pth[:, None], mass, 0.0)
    return jnp.where(mass >= sampler.min_p[:, None], mass, 0.0)


def _threshold(mass: Float[Array, "S V"], enough, start: Bool[Array, " S"] | bool = True):
    """Returns the largest t of each row such that the entries >= t are `enough`; 0 without start.

    It bisects over the bits of non-negative floats, which are ordered as integers are.
    """

    def bit(i, low):
        middle = low | (1 << (30 - i))
        at = lax.bitcast_convert_type(middle, jnp.float32)
        return jnp.where(enough(mass >= at[:, None]), middle, low)

    # Entries do not exceed 1, so the sign bit and the highest exponent bit stay zero.
    low = lax.fori_loop(1, 31, bit, jnp.zeros(mass.shape[0], jnp.int32))
    # The largest entry, 1, stays: a top_p that rounds to 0 would be enough with none.
    largest = jnp.minimum(lax.bitcast_convert_type(low, jnp.float32), 1.0)
    return jnp.where(start, largest, 0.0)


def guesses(
    history: Int[Array, "S T"], positions: Int[Array, " S"], draft_tokens: int, ngram_tokens: int
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


def kept_draws(
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
