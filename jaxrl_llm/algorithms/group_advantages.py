"""Advantages of whole responses, compared with the other responses to the same prompt.

Each function gives all response tokens of a row one number. `rewards` are summed over
the response. A row without response tokens is padding and belongs to no group. A group
of one has nothing to compare with: its baseline is 0 and its scale 1, so that its
advantage is the score itself. Returns equal advantages.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algorithms.masked import (
    group_max,
    group_mean,
    group_size,
    group_sum,
    masked_sum,
    whiten,
)
from jaxrl_llm.algorithms.masked import group_std as standard_deviation
from jaxrl_llm.algorithms.token_baselines import AdvantagesAndReturns

EPSILON = 1e-6  # added to a group's standard deviation


def _members(response_mask: Bool[Array, "B T"]) -> Bool[Array, " B"]:
    return jnp.any(response_mask, axis=-1)


def _baselines(
    scores: Float[Array, " B"], group_ids: Int[Array, " B"], members: Bool[Array, " B"]
) -> Float[Array, " B"]:
    means = group_mean(scores, group_ids, members)
    return jnp.where(group_size(group_ids, members) > 1.0, means, 0.0)


def _on_tokens(
    row_advantages: Float[Array, " B"], response_mask: Bool[Array, "B T"]
) -> AdvantagesAndReturns:
    advantages = jnp.where(response_mask, row_advantages[:, None], 0.0)
    return advantages, advantages


def _normalized(
    scores: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    members: Bool[Array, " B"],
    scale: bool,
) -> Float[Array, " B"]:
    centered = scores - _baselines(scores, group_ids, members)
    if not scale:
        return centered
    return centered / (standard_deviation(scores, group_ids, members) + EPSILON)


def grpo(
    rewards: Float[Array, "B T"],
    response_mask: Bool[Array, "B T"],
    group_ids: Int[Array, " B"],
    group_std: bool = True,
) -> AdvantagesAndReturns:
    """Returns the score's distance from its group's mean, in standard deviations.

        (score - mean) / (std + 1e-6)        std with Bessel's correction

    Responses of equal score have advantage 0. A group of one: `score / (1 + 1e-6)`.

    Example:
      >>> advantages, _ = grpo(
      ...     rewards=jnp.array([[0.0, 1.0], [0.0, 0.0]]), response_mask=jnp.ones((2, 2), bool),
      ...     group_ids=jnp.array([0, 0]))
      >>> print(advantages.round(4))
      [[ 0.7071  0.7071]
       [-0.7071 -0.7071]]

    Reference: Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.1.2.
    """
    scores, members = masked_sum(rewards, response_mask, -1), _members(response_mask)
    return _on_tokens(_normalized(scores, group_ids, members, group_std), response_mask)


def grpo_passk(
    rewards: Float[Array, "B T"],
    response_mask: Bool[Array, "B T"],
    group_ids: Int[Array, " B"],
    group_std: bool = True,
) -> AdvantagesAndReturns:
    """Returns an advantage for the best response of each group only: best minus second best.

    Two responses that share the best score make all of the group 0: taking one of them
    away would not change the best of k. In a group of one the second best is 0.

    Example:
      >>> advantages, _ = grpo_passk(
      ...     rewards=jnp.array([[3.0], [1.0], [0.0]]), response_mask=jnp.ones((3, 1), bool),
      ...     group_ids=jnp.array([0, 0, 0]), group_std=False)
      >>> print(advantages.ravel())
      [2. 0. 0.]

    Reference: arXiv:2503.19595. Deviation: verl refuses a group of one, here it keeps its score.
    """
    scores, members = masked_sum(rewards, response_mask, -1), _members(response_mask)
    is_best = members & (scores == group_max(scores, group_ids, members))
    is_alone_best = is_best & (group_sum(is_best.astype(scores.dtype), group_ids, members) == 1.0)
    second = group_max(scores, group_ids, members & ~is_best)
    lead = scores - jnp.where(jnp.isfinite(second), second, 0.0)
    if group_std:
        lead = lead / (standard_deviation(scores, group_ids, members) + EPSILON)
    return _on_tokens(jnp.where(is_alone_best, lead, 0.0), response_mask)


def gdpo(
    term_rewards: Float[Array, "terms B"],
    term_weights: Float[Array, "terms B"],
    response_mask: Bool[Array, "B T"],
    group_ids: Int[Array, " B"],
    group_std: bool = True,
) -> AdvantagesAndReturns:
    """Returns the weighted sum of each reward term's own GRPO advantage, whitened over tokens.

    Normalizing the terms apart keeps the resolution of each: a rare large term does not
    flatten the others. The sum of the terms, and a KL in the reward, play no part.

    Args:
      term_rewards: Unweighted.
      term_weights: 0 where a term does not apply to the row.

    Example:
      >>> advantages, _ = gdpo(
      ...     term_rewards=jnp.array([[1.0, 0.0], [0.0, 100.0]]), term_weights=jnp.ones((2, 2)),
      ...     response_mask=jnp.ones((2, 1), bool), group_ids=jnp.array([0, 0]))
      >>> print(abs(advantages.ravel()).round(1))
      [0. 0.]

    Reference: Liu et al., GDPO, arXiv:2601.05242. Deviation: verl divides by the standard
      deviation always, here `group_std=False` is heeded.
    """
    members = _members(response_mask)
    row_advantages = sum(
        weights * _normalized(scores, group_ids, members, group_std)
        for scores, weights in zip(term_rewards, term_weights, strict=True)
    )
    advantages, _ = _on_tokens(row_advantages, response_mask)
    advantages = whiten(advantages, response_mask)
    return advantages, advantages


def rloo(
    rewards: Float[Array, "B T"], response_mask: Bool[Array, "B T"], group_ids: Int[Array, " B"]
) -> AdvantagesAndReturns:
    """Returns the score minus the mean of the other scores of its group.

        score - (group_sum - score) / (G - 1)

    A group of one has no others: its advantage is the score.
    Deviation: verl's `rloo_vectorized` gives a group of one 0, its `rloo` the score.

    Example:
      >>> advantages, _ = rloo(
      ...     rewards=jnp.array([[3.0], [1.0], [2.0]]), response_mask=jnp.ones((3, 1), bool),
      ...     group_ids=jnp.array([0, 0, 0]))
      >>> print(advantages.ravel())
      [ 1.5 -1.5  0. ]

    Reference: Ahmadian et al., arXiv:2402.14740, section 3.2.
    """
    scores, members = masked_sum(rewards, response_mask, -1), _members(response_mask)
    size = group_size(group_ids, members)
    others = jnp.where(size > 1.0, size / jnp.maximum(size - 1.0, 1.0), 1.0)
    centered = scores - _baselines(scores, group_ids, members)
    return _on_tokens(centered * others, response_mask)


def reinforce_plus_plus_baseline(
    rewards: Float[Array, "B T"], response_mask: Bool[Array, "B T"], group_ids: Int[Array, " B"]
) -> AdvantagesAndReturns:
    """Returns the score minus its group's mean, whitened over all tokens of the batch.

    The scale is the batch's and not the group's: a group of nearly equal scores is not
    blown up.

    Example:
      >>> advantages, _ = reinforce_plus_plus_baseline(
      ...     rewards=jnp.array([[3.0], [1.0]]), response_mask=jnp.ones((2, 1), bool),
      ...     group_ids=jnp.array([0, 0]))
      >>> print(advantages.ravel().round(4))
      [ 0.7071 -0.7071]

    Reference: Hu et al., REINFORCE++, arXiv:2501.03262.
    """
    scores, members = masked_sum(rewards, response_mask, -1), _members(response_mask)
    centered = scores - _baselines(scores, group_ids, members)
    advantages = whiten(_on_tokens(centered, response_mask)[0], response_mask)
    return advantages, advantages


def opo(
    rewards: Float[Array, "B T"], response_mask: Bool[Array, "B T"], group_ids: Int[Array, " B"]
) -> AdvantagesAndReturns:
    """Returns the score minus the length-weighted mean of its group's scores.

    The weights make the baseline that of least gradient variance, if the squared norm of
    a response's gradient grows with its length. A group of one keeps its score.

    Example:
      >>> advantages, _ = opo(
      ...     rewards=jnp.array([[0.0, 0.0, 4.0], [0.0, 0.0, 0.0]]),
      ...     response_mask=jnp.array([[True, True, True], [True, False, False]]),
      ...     group_ids=jnp.array([0, 0]))
      >>> print(advantages)
      [[ 1.  1.  1.]
       [-3.  0.  0.]]

    Reference: Hao et al., OPO, arXiv:2505.23585.
    """
    scores, members = masked_sum(rewards, response_mask, -1), _members(response_mask)
    lengths = jnp.sum(response_mask, axis=-1).astype(scores.dtype)
    total = jnp.maximum(group_sum(lengths, group_ids, members), 1.0)
    # Around the group's mean, so that equal scores give exactly 0.
    means = group_mean(scores, group_ids, members)
    weighted = means + group_sum(lengths * (scores - means), group_ids, members) / total
    alone = group_size(group_ids, members) <= 1.0
    return _on_tokens(scores - jnp.where(alone, 0.0, weighted), response_mask)


def gpg(
    rewards: Float[Array, "B T"], response_mask: Bool[Array, "B T"], group_ids: Int[Array, " B"]
) -> AdvantagesAndReturns:
    """Returns the score minus its group's mean, scaled up for the rows without score.

        alpha * (score - mean),   alpha = rows / max(rows with score != 0, 1)

    Example:
      >>> advantages, _ = gpg(
      ...     rewards=jnp.array([[1.0], [0.0]]), response_mask=jnp.ones((2, 1), bool),
      ...     group_ids=jnp.array([0, 0]))
      >>> print(advantages.ravel())
      [ 1. -1.]

    Reference: Chu et al., GPG, arXiv:2504.02546.
    """
    scores, members = masked_sum(rewards, response_mask, -1), _members(response_mask)
    scored = jnp.maximum(jnp.sum(members & (scores != 0.0)), 1)
    alpha = jnp.sum(members) / scored
    return _on_tokens(alpha * (scores - _baselines(scores, group_ids, members)), response_mask)
