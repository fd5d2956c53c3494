"""From a score for each response to a reward for each token."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxrl_llm.algorithms import masked
from jaxrl_llm.algorithms.kl import estimated_kl
from jaxrl_llm.algorithms.masked import GroupIds, Mask, PerRow, PerToken, RowMask, Scalar
from jaxrl_llm.config import AlgorithmConfig


def outcome_rewards(scores: PerRow, response_mask: Mask) -> PerToken:
    """Returns each score on the last response token of its row, zero elsewhere.

    A row without response tokens is padding; its score goes nowhere. Deviation: verl places the
    score on the last token even where that is a tool's; estimators that skip such tokens lose it.

    >>> print(outcome_rewards(jnp.array([2.0]), jnp.array([[False, True, True, False]])))
    [[0. 0. 2. 0.]]
    """
    later = jnp.cumsum(response_mask[:, ::-1], axis=1)[:, ::-1]
    return jnp.where(response_mask & (later == 1), scores[:, None], 0.0)


def kl_shaped(
    config: AlgorithmConfig,
    kl_coef: Scalar | float,
    scores: PerRow,
    old_log_probs: PerToken,
    ref_log_probs: PerToken,
    response_mask: Mask,
) -> tuple[PerToken, Scalar]:
    """Returns token rewards, less the KL to the reference with `kl_in="reward"`, and the KL.

        rewards = outcome_rewards(scores) - kl_coef * KL(old_log_probs, ref_log_probs)

    The KL is the mean over sequences of their mean per token, and is always measured. Without a
    reference `ref_log_probs` are `old_log_probs`. InstructGPT, arXiv:2203.02155, Eq. 2.

    >>> rewards, current_kl = kl_shaped(
    ...     AlgorithmConfig(kl_in="reward", kl_estimator="k1"), 0.5, jnp.array([1.0]),
    ...     jnp.array([[-1.0, -1.0]]), jnp.array([[-2.0, -1.0]]), jnp.ones((1, 2), bool))
    >>> print(rewards, current_kl)
    [[-0.5  1. ]] 0.5
    """
    rewards = outcome_rewards(scores, response_mask)
    old_log_probs, ref_log_probs = masked.zero_outside(response_mask, old_log_probs, ref_log_probs)
    divergence = estimated_kl(config.kl_estimator, old_log_probs, ref_log_probs)
    (divergence,) = masked.zero_outside(response_mask, divergence)
    rows = jnp.any(response_mask, axis=-1)
    current_kl = masked.mean(masked.mean(divergence, response_mask, -1), rows)
    if config.kl_in == "reward":
        rewards = rewards - kl_coef * divergence
    return rewards, current_kl


def overlong_penalty(
    config: AlgorithmConfig, max_response_tokens: int, response_lengths: Int[Array, " B"]
) -> PerRow:
    """Returns DAPO's soft overlong penalty of responses near the length limit.

        -overlong_penalty * clip((length - (limit - buffer)) / buffer, 0, 1)

    `response_lengths` include tool tokens. Yu et al., DAPO, arXiv:2503.14476, Eq. 13.
    Deviation: verl does not bound it below for responses beyond the limit.

    >>> config = AlgorithmConfig(overlong_buffer_tokens=4, overlong_penalty=1.0)
    >>> print(abs(overlong_penalty(config, 10, jnp.array([6, 8, 10, 12]))))
    [0.  0.5 1.  1. ]
    """
    response_lengths = jnp.asarray(response_lengths)
    if not config.overlong_buffer_tokens:
        return jnp.zeros(response_lengths.shape, jnp.float32)
    begins = max_response_tokens - config.overlong_buffer_tokens
    exceeded = (response_lengths - begins) / config.overlong_buffer_tokens
    return -config.overlong_penalty * jnp.clip(exceeded, 0.0, 1.0)


def uniform_groups(scores: PerRow, group_ids: GroupIds, members: RowMask | None = None) -> RowMask:
    """Returns which rows belong to a group of two or more whose scores are all equal.

    Of rows that are no `members` (None: all are) neither scores nor number count. Group advantages
    of such groups are 0; dynamic sampling replaces them. A group of one is never uniform:
    its advantage is its score. Yu et al., DAPO, arXiv:2503.14476, Eq. 11.

    >>> print(uniform_groups(jnp.array([1.0, 0.0, 1.0, 1.0, 5.0]), jnp.array([0, 1, 0, 1, 2])))
    [ True False  True False False]
    """
    scores, group_ids = jnp.asarray(scores), jnp.asarray(group_ids)
    members = jnp.ones(scores.shape, bool) if members is None else jnp.asarray(members)
    largest = masked.group_max(scores, group_ids, members)
    smallest = -masked.group_max(-scores, group_ids, members)
    return (largest == smallest) & (masked.group_size(group_ids, members) > 1.0)
