"""Baselines that differ from token to token, of least gradient variance.

The variance of REINFORCE's gradient is least under the baseline E[return * energy] / E[energy],
where energy is the squared norm of the gradient summed so far. For a softmax, the squared norm of
one token's gradient with respect to its logits is 1 - 2 p + sum(p**2).
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import masked
from jaxrl_llm.algorithms.masked import GroupIds, Mask, PerToken, zero_outside

AdvantagesAndReturns = tuple[PerToken, PerToken]


def optimal_token_baseline(
    rewards: PerToken,
    response_mask: Mask,
    group_ids: GroupIds,
    old_log_probs: PerToken,
    sum_squared_probs: PerToken,
    correction_weights: PerToken,
    count_tools: bool = True,
) -> AdvantagesAndReturns:
    """Returns the reward to go minus the group's baseline of least variance at each position.

        norm_t     = (1 - 2 exp(old_log_probs_t) + sum_squared_probs_t) * correction_weights_t**2
        energy_t   = norm_1 + ... + norm_t
        baseline_t = sum_group(return_t energy_t) / (sum_group(energy_t) + 1e-8)
        advantage  = return_t - baseline_t

    A position is the distance from the row's first response token. With `count_tools=False` tool
    tokens are not counted: the k-th token that the policy chose is compared with the k-th of the
    other rows, whatever the length of a tool's answer. Where one response is longer than all
    others, its tokens beyond the second longest have baseline 0; so has a group of one.
    Weaver and Tao, arXiv:1301.2315, applied to each position as in verl.

    >>> ones, mask = jnp.ones((2, 3)), jnp.array([[True, False, True], [True, True, False]])
    >>> rewards = jnp.array([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    >>> of_policy = jnp.log(0.5) * ones, 0.5 * ones, ones
    >>> print(optimal_token_baseline(rewards, mask, jnp.array([0, 0]), *of_policy, False)[0])
    [[ 0.5  0.   0.5]
     [-0.5 -0.5  0. ]]
    """
    if count_tools:
        first = jnp.argmax(response_mask, axis=1, keepdims=True)
        positions = jnp.clip(jnp.arange(response_mask.shape[1]) - first, 0)
    else:
        positions = jnp.clip(jnp.cumsum(response_mask, axis=1) - 1, 0)
    old_log_probs, sum_squared_probs, correction_weights = zero_outside(
        response_mask, old_log_probs, sum_squared_probs, correction_weights
    )
    norms = 1.0 - 2.0 * jnp.exp(old_log_probs) + sum_squared_probs
    (norms,) = zero_outside(response_mask, norms * jnp.square(correction_weights))
    returns = masked.returns_to_go(rewards, response_mask)
    energy = jnp.cumsum(norms, axis=1)
    batch, length = returns.shape
    bins = group_ids[:, None] * length + positions

    def sums(x: PerToken) -> PerToken:
        """The sum over the group's tokens of equal position."""
        (inside,) = zero_outside(response_mask, x)
        return jax.ops.segment_sum(inside.ravel(), bins.ravel(), batch * length)[bins]

    def maxima(x: PerToken) -> PerToken:
        """The largest of the group's tokens of equal position."""
        inside = jnp.where(response_mask, x, -jnp.inf)
        return jax.ops.segment_max(inside.ravel(), bins.ravel(), batch * length)[bins]

    # A mean of returns around a large offset is rounded to the offset's precision.
    offset = masked.dominating_offset(-maxima(-returns), maxima(returns))
    offset = jnp.where(sums(energy) > 1e-4, offset, 0.0)  # else 1e-8 below counts
    around = returns - offset
    baseline = sums(around * energy) / (sums(energy) + 1e-8)
    # Beyond the second longest response the longest one would be its own baseline.
    members = jnp.any(response_mask, axis=-1)
    lengths = jnp.sum(response_mask, axis=-1).astype(returns.dtype)
    is_longest = members & (lengths == masked.group_max(lengths, group_ids, members))
    num_longest = masked.group_sum(is_longest.astype(returns.dtype), group_ids, members)
    alone = is_longest & (num_longest == 1.0)
    second = masked.group_max(lengths, group_ids, members & ~is_longest)
    in_tail = alone[:, None] & (positions >= second[:, None])
    singleton = masked.group_size(group_ids, members)[:, None] <= 1.0
    has_baseline = response_mask & ~in_tail & ~singleton
    advantages = jnp.where(has_baseline, around - baseline, returns)
    (advantages,) = zero_outside(response_mask, advantages)
    return advantages, returns
