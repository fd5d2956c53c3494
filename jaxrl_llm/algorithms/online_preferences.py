"""Preference optimization of the policy's own samples, as advantages of whole responses.

The gradient of a loss on pairs is a weight for each response times the gradient of its log-prob, so
with the loss `reinforce` these weights are advantages. They are those of the policy that sampled:
exact for the first update of a step. Sums over the group of a prompt; `margins` are
`sum_t(old_log_probs - ref_log_probs)` of a response.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.algorithms import masked
from jaxrl_llm.algorithms.masked import GroupIds, Mask, PerRow, PerToken, RowMask
from jaxrl_llm.config import AlgorithmConfig


def _margins(old_log_probs: PerToken, ref_log_probs: PerToken, response_mask: Mask) -> PerRow:
    return masked.sum(old_log_probs, response_mask, -1) - masked.sum(
        ref_log_probs, response_mask, -1
    )


def _mixture_weights(
    margins: PerRow, group_ids: GroupIds, members: RowMask, share: float
) -> PerRow:
    """Weights in proportion to `exp(-share margin)`, the largest of each group 1.

    They turn samples of the policy into those of `policy**(1 - share) reference**share`.
    """
    logits = -share * margins
    largest = masked.group_max(logits, group_ids, members)
    return jnp.where(members, jnp.exp(jnp.where(members, logits - largest, 0.0)), 0.0)


def online_dpo(
    scores: PerRow,
    old_log_probs: PerToken,
    ref_log_probs: PerToken,
    response_mask: Mask,
    group_ids: GroupIds,
    members: RowMask,
    config: AlgorithmConfig,
) -> PerRow:
    """Returns the weights of DPO's gradient for the best and the worst response of each prompt.

        G beta sigmoid(-beta (margin_best - margin_worst)),  negative for the worst, 0 for others

    Of responses that share the best or the worst score the mean margin counts, and each has its
    part of the weight; a group of equal scores has none. With `seq-mean-token-sum` the loss is the
    mean over prompts. Guo et al., arXiv:2402.04792, Eq. 2. Deviation: TRL trains on pairs of equal
    scores too, the first being the better.

    >>> half, one = jnp.full((2, 1), -0.5), jnp.ones((2, 1), bool)
    >>> print(online_dpo(jnp.array([1.0, 0.0]), half, half, one, jnp.zeros(2, int), one[:, 0],
    ...                  AlgorithmConfig(dpo_beta=0.2)))
    [ 0.2 -0.2]
    """
    margins = _margins(old_log_probs, ref_log_probs, response_mask)
    best = members & (scores == masked.group_max(scores, group_ids, members))
    worst = members & (scores == -masked.group_max(-scores, group_ids, members))
    is_pair = members & ~(best & worst)
    best, worst = best & is_pair, worst & is_pair
    counts = [masked.group_size(group_ids, side) for side in (best, worst)]
    means = [masked.group_mean(margins, group_ids, side) for side in (best, worst)]
    num_best, num_worst = (jnp.maximum(count, 1.0) for count in counts)
    beta = config.dpo_beta
    weights = beta * jax.nn.sigmoid(-beta * (means[0] - means[1]))
    weights *= masked.group_size(group_ids, members)
    sides = jnp.where(best, 1.0 / num_best, 0.0) - jnp.where(worst, 1.0 / num_worst, 0.0)
    return jnp.where(best | worst, weights * sides, 0.0)


def xpo(
    scores: PerRow,
    old_log_probs: PerToken,
    ref_log_probs: PerToken,
    response_mask: Mask,
    group_ids: GroupIds,
    members: RowMask,
    config: AlgorithmConfig,
) -> PerRow:
    """Returns the weights of `online_dpo`, and of XPO's bonus for responses the reference gives.

        online_dpo - G exploration_coef w,   w = exp(-margin) / sum of exp(-margin)

    The bonus makes likely responses of the reference unlikelier, so that others are tried.
    Xie et al., arXiv:2405.21046, Eq. 5. Deviation: the paper samples one response of each pair
    from the reference; here the group's samples of the policy stand for them by importance
    weights.

    >>> half, one = jnp.full((2, 1), -0.5), jnp.ones((2, 1), bool)
    >>> print(xpo(jnp.array([1.0, 0.0]), half, half, one, jnp.zeros(2, int), one[:, 0],
    ...           AlgorithmConfig(dpo_beta=0.25, exploration_coef=0.125)))
    [ 0.125 -0.375]
    """
    inputs = old_log_probs, ref_log_probs, response_mask
    preferred = online_dpo(scores, *inputs, group_ids, members, config)
    weights = _mixture_weights(_margins(*inputs), group_ids, members, 1.0)
    total = masked.group_sum(weights, group_ids, members)
    size = masked.group_size(group_ids, members)
    bonus = config.exploration_coef * size * weights / jnp.maximum(total, 1.0)
    return preferred - jnp.where(members & (size > 1.0), bonus, 0.0)


def nash_md(
    scores: PerRow,
    old_log_probs: PerToken,
    ref_log_probs: PerToken,
    response_mask: Mask,
    group_ids: GroupIds,
    members: RowMask,
    config: AlgorithmConfig,
) -> PerRow:
    """Returns the probability, less one half, that a response beats one of the mixture policy.

        sum_j w_j (sigmoid(score - score_j) - 1/2) / sum_j w_j,    w_j = exp(-c margin_j)

    over the other responses of the group, with `c = mixture_coef`: opponents are of the policy
    `pi**(1 - c) reference**c`. Munos et al., Nash-MD-PG, arXiv:2312.00886, Sec. 7.
    Deviations: the paper samples opponents, from the mixture of each token's distributions; here
    the group's samples are weighted to the mixture of whole responses, which its theory is about.
    Its preference model is Bradley and Terry's of the scores. A group of one has 0.

    >>> half, one = jnp.full((2, 1), -0.5), jnp.ones((2, 1), bool)
    >>> print(nash_md(jnp.array([1.0, 0.0]), half, half, one, jnp.zeros(2, int), one[:, 0],
    ...               AlgorithmConfig()).round(4))
    [ 0.2311 -0.2311]
    """
    margins = _margins(old_log_probs, ref_log_probs, response_mask)
    weights = _mixture_weights(margins, group_ids, members, config.mixture_coef)
    # Rows of a group become neighbours, so that others of the group are a few places away.
    order = jnp.lexsort((~members, group_ids))
    names = jnp.where(members, group_ids, -1)[order]
    sorted_scores, sorted_weights = scores[order], weights[order]
    places = jnp.arange(len(scores))

    def add_opponents(distance: Int[Array, ""], sums: Float[Array, "2 B"]) -> Float[Array, "2 B"]:
        for other in (places + distance, places - distance):
            inside = (other >= 0) & (other < len(scores))
            other = jnp.clip(other, 0, len(scores) - 1)
            is_opponent = inside & (names[other] == names) & (names >= 0)
            weight = jnp.where(is_opponent, sorted_weights[other], 0.0)
            beats = jax.nn.sigmoid(sorted_scores - sorted_scores[other]) - 0.5
            sums += jnp.stack([weight * jnp.where(is_opponent, beats, 0.0), weight])
        return sums

    furthest = jnp.max(masked.group_size(group_ids, members)).astype(jnp.int32)
    wins, totals = jax.lax.fori_loop(1, furthest, add_opponents, jnp.zeros((2, len(scores))))
    sorted_advantages = jnp.where(totals > 0, wins / jnp.where(totals > 0, totals, 1.0), 0.0)
    return jnp.zeros_like(scores).at[order].set(sorted_advantages)
