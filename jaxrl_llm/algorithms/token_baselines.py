"""Baselines that differ from token to token, of least gradient variance.

The variance of REINFORCE's gradient is least under the baseline E[return * energy] / E[energy],
where energy is the squared norm of the gradient summed so far. For a softmax, the squared norm of
one token's gradient with respect to its logits is 1 - 2 p + sum(p**2).
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.masked import (
    GroupIds,
    Mask,
    PerToken,
    group_max,
    group_size,
    group_sum,
    zero_outside,
)

AdvantagesAndReturns = tuple[PerToken, PerToken]


def returns_to_go(rewards: PerToken, mask: Mask) -> PerToken:
    """Returns, for each response token, the rewards from it to the end; 0 outside the mask.

    >>> print(returns_to_go(jnp.array([[1.0, 9.0, 2.0]]), jnp.array([[True, False, True]])))
    [[3. 0. 2.]]
    """
    (inside,) = zero_outside(mask, rewards)
    (to_go,) = zero_outside(mask, jax.lax.cumsum(inside, axis=1, reverse=True))
    return to_go


def optimal_token_baseline(
    rewards: PerToken,
    response_mask: Mask,
    group_ids: GroupIds,
    old_log_probs: PerToken,
    sum_squared_probs: PerToken,
    correction_weights: PerToken,
    count_tool_tokens: bool = True,
) -> AdvantagesAndReturns:
    """Returns the reward to go minus the group's baseline of least variance at each position.

        norm_t     = (1 - 2 exp(old_log_probs_t) + sum_squared_probs_t) * correction_weights_t**2
        energy_t   = norm_1 + ... + norm_t
        baseline_t = sum_group(return_t energy_t) / (sum_group(energy_t) + 1e-8)
        advantage  = return_t - baseline_t

    A position is the distance from the row's first response token. Where one response is longer
    than all others, its tokens beyond the second longest have baseline 0; so has a group of one.
    Weaver and Tao, arXiv:1301.2315, applied to each position as in verl.

    >>> ones = jnp.ones((2, 1))
    >>> advantages, returns = optimal_token_baseline(
    ...     jnp.array([[1.0], [0.0]]), ones > 0, jnp.array([0, 0]), jnp.log(0.5) * ones,
    ...     0.5 * ones, ones)
    >>> print(advantages.ravel())
    [ 0.5 -0.5]
    """
    if count_tool_tokens:
        first = jnp.argmax(response_mask, axis=1, keepdims=True)
        positions = jnp.clip(jnp.arange(response_mask.shape[1]) - first, 0)
    else:
        positions = jnp.clip(jnp.cumsum(response_mask, axis=1) - 1, 0)
    old_log_probs, sum_squared_probs, correction_weights = zero_outside(
        response_mask, old_log_probs, sum_squared_probs, correction_weights
    )
    norms = 1.0 - 2.0 * jnp.exp(old_log_probs) + sum_squared_probs
    (norms,) = zero_outside(response_mask, norms * jnp.square(correction_weights))
    returns = returns_to_go(rewards, response_mask)
    energy = jnp.cumsum(norms, axis=1)
    batch, length = returns.shape
    bins = group_ids[:, None] * length + positions

    def sums(x: PerToken) -> PerToken:
        """Returns, for each token, the sum over the group's tokens of equal position."""
        (inside,) = zero_outside(response_mask, x)
        return jax.ops.segment_sum(inside.ravel(), bins.ravel(), batch * length)[bins]

    baseline = sums(returns * energy) / (sums(energy) + 1e-8)
    # Beyond the second longest response the longest one is alone and would be its own
    # baseline, which would leave nothing to learn from.
    members = jnp.any(response_mask, axis=-1)
    lengths = jnp.sum(response_mask, axis=-1).astype(returns.dtype)
    is_longest = members & (lengths == group_max(lengths, group_ids, members))
    alone = is_longest & (group_sum(is_longest.astype(returns.dtype), group_ids, members) == 1.0)
    second = group_max(lengths, group_ids, members & ~is_longest)
    in_tail = alone[:, None] & (positions >= second[:, None])
    singleton = group_size(group_ids, members)[:, None] <= 1.0
    baseline = jnp.where(response_mask & ~in_tail & ~singleton, baseline, 0.0)
    (advantages,) = zero_outside(response_mask, returns - baseline)
    return advantages, returns


def tir_optimal_token_baseline(
    rewards: PerToken,
    response_mask: Mask,
    group_ids: GroupIds,
    old_log_probs: PerToken,
    sum_squared_probs: PerToken,
    correction_weights: PerToken,
) -> AdvantagesAndReturns:
    """Returns `optimal_token_baseline` with positions that do not count tool tokens.

    The k-th token that the policy chose is compared with the k-th of the other rows, so the length
    of a tool's answer does not change what is compared.

    >>> ones, mask = jnp.ones((2, 3)), jnp.array([[True, False, True], [True, True, False]])
    >>> advantages, returns = tir_optimal_token_baseline(
    ...     jnp.array([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), mask, jnp.array([0, 0]),
    ...     jnp.log(0.5) * ones, 0.5 * ones, ones)
    >>> print(advantages)
    [[ 0.5  0.   0.5]
     [-0.5 -0.5  0. ]]
    """
    policy = old_log_probs, sum_squared_probs, correction_weights
    return optimal_token_baseline(rewards, response_mask, group_ids, *policy, False)
