"""Baselines that differ from token to token, of least gradient variance.

The variance of REINFORCE's gradient is least under the baseline
E[return * energy] / E[energy], where energy is the squared norm of the gradient gathered so far.
For a softmax, the squared norm of one token's gradient with respect to its logits is known from
its probability and from the sum of squared probabilities: 1 - 2 p + sum(p**2).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algorithms.masked import group_max, group_size, group_sum, zero_outside

AdvantagesAndReturns = tuple[Float[Array, "B T"], Float[Array, "B T"]]


def returns_to_go(rewards: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns, for each response token, the rewards from it to the end; 0 outside the mask.

    Example:
      >>> print(returns_to_go(jnp.array([[1.0, 9.0, 2.0]]), jnp.array([[True, False, True]])))
      [[3. 0. 2.]]
    """
    (inside,) = zero_outside(mask, rewards)
    (to_go,) = zero_outside(mask, jax.lax.cumsum(inside, axis=1, reverse=True))
    return to_go


def _less_baseline(
    rewards: Float[Array, "B T"],
    response_mask: Bool[Array, "B T"],
    group_ids: Int[Array, " B"],
    old_log_probs: Float[Array, "B T"],
    sum_squared_probs: Float[Array, "B T"],
    weights: Float[Array, "B T"],
    numbers: Int[Array, "B T"],
) -> AdvantagesAndReturns:
    """Returns the reward to go less its weighted mean over the group's tokens of equal number."""
    old_log_probs, sum_squared_probs, weights = zero_outside(
        response_mask, old_log_probs, sum_squared_probs, weights
    )
    norms = (1.0 - 2.0 * jnp.exp(old_log_probs) + sum_squared_probs) * jnp.square(weights)
    (norms,) = zero_outside(response_mask, norms)
    returns = returns_to_go(rewards, response_mask)
    energy = jnp.cumsum(norms, axis=1)
    batch, length = returns.shape
    bins = group_ids[:, None] * length + numbers

    def group_sums(x: Float[Array, "B T"]) -> Float[Array, "B T"]:
        (inside,) = zero_outside(response_mask, x)
        return jax.ops.segment_sum(inside.ravel(), bins.ravel(), batch * length)[bins]

    baseline = group_sums(returns * energy) / (group_sums(energy) + 1e-8)
    # Beyond the second longest response the longest one is alone and would be its own
    # baseline, which would leave nothing to learn from.
    members = jnp.any(response_mask, axis=-1)
    lengths = jnp.sum(response_mask, axis=-1).astype(returns.dtype)
    is_longest = members & (lengths == group_max(lengths, group_ids, members))
    alone = is_longest & (group_sum(is_longest.astype(returns.dtype), group_ids, members) == 1.0)
    second = group_max(lengths, group_ids, members & ~is_longest)
    in_tail = alone[:, None] & (numbers >= second[:, None])
    singleton = group_size(group_ids, members)[:, None] <= 1.0
    baseline = jnp.where(response_mask & ~in_tail & ~singleton, baseline, 0.0)
    (advantages,) = zero_outside(response_mask, returns - baseline)
    return advantages, returns


def optimal_token_baseline(
    rewards: Float[Array, "B T"],
    response_mask: Bool[Array, "B T"],
    group_ids: Int[Array, " B"],
    old_log_probs: Float[Array, "B T"],
    sum_squared_probs: Float[Array, "B T"],
    correction_weights: Float[Array, "B T"],
) -> AdvantagesAndReturns:
    """Returns the reward to go minus the group's baseline of least variance at each position.

        norm_t     = (1 - 2 exp(old_log_probs_t) + sum_squared_probs_t) * weight_t**2
        energy_t   = norm_1 + ... + norm_t
        baseline_t = sum_group(return_t energy_t) / (sum_group(energy_t) + 1e-8)
        advantage  = return_t - baseline_t

    Tokens are matched by their distance from the row's first response token, tool tokens
    counted. A longest response that is longest alone has baseline 0 from the token on
    whose number reaches the second longest one's count of tokens. A group of one has baseline 0.

    Example:
      >>> ones = jnp.ones((2, 1))
      >>> advantages, returns = optimal_token_baseline(
      ...     rewards=jnp.array([[1.0], [0.0]]), response_mask=ones > 0,
      ...     group_ids=jnp.array([0, 0]), old_log_probs=jnp.log(0.5) * ones,
      ...     sum_squared_probs=0.5 * ones, correction_weights=ones)
      >>> print(advantages.ravel())
      [ 0.5 -0.5]

    Reference: Weaver and Tao, arXiv:1301.2315, applied to each position as in verl.
    """
    first = jnp.argmax(response_mask, axis=1, keepdims=True)
    numbers = jnp.clip(jnp.arange(response_mask.shape[1]) - first, 0)
    policy = old_log_probs, sum_squared_probs, correction_weights
    return _less_baseline(rewards, response_mask, group_ids, *policy, numbers)


def tir_optimal_token_baseline(
    rewards: Float[Array, "B T"],
    response_mask: Bool[Array, "B T"],
    group_ids: Int[Array, " B"],
    old_log_probs: Float[Array, "B T"],
    sum_squared_probs: Float[Array, "B T"],
    correction_weights: Float[Array, "B T"],
) -> AdvantagesAndReturns:
    """Returns `optimal_token_baseline` with tool tokens left out of the count of positions.

    The k-th token that the policy chose is compared with the k-th of the other rows, so
    that the length of a tool's answer does not shift what is compared.

    Example:
      >>> ones = jnp.ones((2, 3))
      >>> mask = jnp.array([[True, False, True], [True, True, False]])
      >>> advantages, returns = tir_optimal_token_baseline(
      ...     rewards=jnp.array([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), response_mask=mask,
      ...     group_ids=jnp.array([0, 0]), old_log_probs=jnp.log(0.5) * ones,
      ...     sum_squared_probs=0.5 * ones, correction_weights=ones)
      >>> print(advantages)
      [[ 0.5  0.   0.5]
       [-0.5 -0.5  0. ]]
    """
    numbers = jnp.clip(jnp.cumsum(response_mask, axis=1) - 1, 0)
    policy = old_log_probs, sum_squared_probs, correction_weights
    return _less_baseline(rewards, response_mask, group_ids, *policy, numbers)
