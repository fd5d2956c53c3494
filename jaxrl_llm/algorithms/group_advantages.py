"""Advantages of whole responses, compared with the other responses to the same prompt.

`scores` are rewards summed over the response. Rows that are not `members` have no response token:
they are padding and belong to no group. A group of one has nothing to compare with: its baseline
is 0 and its scale 1, so its advantage is the score. `advantages.estimate` gives what a function
returns for a row to each response token of the row; returns equal advantages.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algorithms.masked import (
    GroupIds,
    Mask,
    PerRow,
    PerToken,
    RowMask,
    group_deviation,
    group_max,
    group_mean,
    group_size,
    group_sum,
    whiten,
)

EPSILON = 1e-6  # added to a group's standard deviation


def _centered(scores: PerRow, group_ids: GroupIds, members: RowMask) -> PerRow:
    means = group_mean(scores, group_ids, members)
    return scores - jnp.where(group_size(group_ids, members) > 1.0, means, 0.0)


def _whitened(row_advantages: PerRow, response_mask: Mask) -> PerToken:
    return whiten(jnp.where(response_mask, row_advantages[:, None], 0.0), response_mask)


def grpo(scores: PerRow, group_ids: GroupIds, members: RowMask, group_std: bool = True) -> PerRow:
    """Returns the score's distance from its group's mean, in standard deviations.

        (score - mean) / (std + 1e-6)        std with Bessel's correction

    Responses of equal score have advantage 0. A group of one: `score / (1 + 1e-6)`.
    Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.1.2.

    >>> print(grpo(jnp.array([1.0, 0.0]), jnp.array([0, 0]), jnp.ones(2, bool)).round(4))
    [ 0.7071 -0.7071]
    """
    centered = _centered(scores, group_ids, members)
    if not group_std:
        return centered
    return centered / (group_deviation(scores, group_ids, members) + EPSILON)


def grpo_passk(
    scores: PerRow, group_ids: GroupIds, members: RowMask, group_std: bool = True
) -> PerRow:
    """Returns an advantage for the best response of each group only: best minus second best.

    Where two responses share the best score all of the group get 0: without one of them the best
    of k would be the same. In a group of one the second best is 0. arXiv:2503.19595.
    Deviation: verl refuses a group of one, here it keeps its score.

    >>> scores, groups = jnp.array([3.0, 1.0, 0.0]), jnp.array([0, 0, 0])
    >>> print(grpo_passk(scores, groups, jnp.ones(3, bool), group_std=False))
    [2. 0. 0.]
    """
    is_best = members & (scores == group_max(scores, group_ids, members))
    is_alone_best = is_best & (group_sum(is_best.astype(scores.dtype), group_ids, members) == 1.0)
    second = group_max(scores, group_ids, members & ~is_best)
    lead = scores - jnp.where(jnp.isfinite(second), second, 0.0)
    if group_std:
        lead = lead / (group_deviation(scores, group_ids, members) + EPSILON)
    return jnp.where(is_alone_best, lead, 0.0)


def gdpo(
    term_rewards: Float[Array, "terms B"],
    term_weights: Float[Array, "terms B"],
    response_mask: Mask,
    group_ids: GroupIds,
    members: RowMask,
    group_std: bool = True,
) -> PerToken:
    """Returns the weighted sum of each reward term's own GRPO advantage, whitened over tokens.

    Each term is normalized alone, so a rare large term does not hide the others. `term_rewards`
    are unweighted, `term_weights` 0 where a term does not apply to the row. The sum of the terms,
    and a KL in the reward, play no part. Liu et al., GDPO, arXiv:2601.05242.
    Deviation: verl divides by the standard deviation always, here `group_std=False` is heeded.

    >>> term_rewards, one = jnp.array([[1.0, 0.0], [0.0, 100.0]]), jnp.ones((2, 1), bool)
    >>> advantages = gdpo(term_rewards, jnp.ones((2, 2)), one, jnp.array([0, 0]), one[:, 0])
    >>> print(abs(advantages.ravel()).round(1))
    [0. 0.]
    """
    row_advantages = sum(
        weights * grpo(scores, group_ids, members, group_std)
        for scores, weights in zip(term_rewards, term_weights, strict=True)
    )
    return _whitened(row_advantages, response_mask)


def rloo(scores: PerRow, group_ids: GroupIds, members: RowMask) -> PerRow:
    """Returns the score minus the mean of the other scores of its group.

        score - (group_sum - score) / (G - 1)

    Ahmadian et al., arXiv:2402.14740, section 3.2.
    Deviation: verl's `rloo_vectorized` gives a group of one 0, its `rloo` the score.

    >>> print(rloo(jnp.array([3.0, 1.0, 2.0]), jnp.array([0, 0, 0]), jnp.ones(3, bool)))
    [ 1.5 -1.5  0. ]
    """
    size = group_size(group_ids, members)
    others = jnp.where(size > 1.0, size / jnp.maximum(size - 1.0, 1.0), 1.0)
    return _centered(scores, group_ids, members) * others


def reinforce_plus_plus_baseline(
    scores: PerRow, group_ids: GroupIds, members: RowMask, response_mask: Mask
) -> PerToken:
    """Returns the score minus its group's mean, whitened over all tokens of the batch.

    The scale is the batch's: a group of nearly equal scores does not get large advantages.
    Hu et al., REINFORCE++, arXiv:2501.03262.

    >>> one = jnp.ones((2, 1), bool)
    >>> advantages = reinforce_plus_plus_baseline(
    ...     jnp.array([3.0, 1.0]), jnp.array([0, 0]), one[:, 0], one)
    >>> print(advantages.ravel().round(4))
    [ 0.7071 -0.7071]
    """
    return _whitened(_centered(scores, group_ids, members), response_mask)


def opo(scores: PerRow, group_ids: GroupIds, members: RowMask, response_mask: Mask) -> PerRow:
    """Returns the score minus the length-weighted mean of its group's scores.

    If the squared norm of a response's gradient grows with its length, this baseline gives the
    least gradient variance. Hao et al., OPO, arXiv:2505.23585.

    >>> mask = jnp.array([[True, True, True], [True, False, False]])
    >>> print(opo(jnp.array([4.0, 0.0]), jnp.array([0, 0]), jnp.ones(2, bool), mask))
    [ 1. -3.]
    """
    lengths = jnp.sum(response_mask, axis=-1).astype(scores.dtype)
    total = jnp.maximum(group_sum(lengths, group_ids, members), 1.0)
    # Around the group's mean, so that equal scores give exactly 0.
    means = group_mean(scores, group_ids, members)
    weighted = means + group_sum(lengths * (scores - means), group_ids, members) / total
    alone = group_size(group_ids, members) <= 1.0
    return scores - jnp.where(alone, 0.0, weighted)


def gpg(scores: PerRow, group_ids: GroupIds, members: RowMask) -> PerRow:
    """Returns the score minus its group's mean, scaled up for the rows without score.

        alpha * (score - mean),   alpha = rows / max(rows with score != 0, 1)

    Chu et al., GPG, arXiv:2504.02546.

    >>> print(gpg(jnp.array([1.0, 0.0]), jnp.array([0, 0]), jnp.ones(2, bool)))
    [ 1. -1.]
    """
    scored = jnp.maximum(jnp.sum(members & (scores != 0.0)), 1)
    alpha = jnp.sum(members) / scored
    return alpha * _centered(scores, group_ids, members)
