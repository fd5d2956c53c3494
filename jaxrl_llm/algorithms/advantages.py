"""Advantage estimators along the response, the table of all, and the call of the chosen one.

`rewards` are for emitting each token, `values` the predicted returns just before it. All results
are zero outside `response_mask`; tokens outside it are skipped, not discounted.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm.algorithms import group_advantages, token_baselines
from jaxrl_llm.algorithms.lookup import FunctionError, call_by_name, resolve
from jaxrl_llm.algorithms.masked import Mask, PerRow, PerToken, masked_sum, whiten, zero_outside
from jaxrl_llm.algorithms.token_baselines import AdvantagesAndReturns
from jaxrl_llm.config import AlgorithmConfig


def generalized_advantage_estimation(
    rewards: PerToken, values: PerToken, response_mask: Mask, *, gamma: float, gae_lambda: float
) -> AdvantagesAndReturns:
    r"""Returns advantages and value targets of one trajectory per row.

    Over the response tokens of a row, with `t+1` the next response token:

        delta_t = r_t + gamma * V_{t+1} - V_t                     (Eq. 12)
        A_t     = delta_t + gamma * gae_lambda * A_{t+1}          (Eq. 11)

    `V` is zero after the last response token: the response ended, it was not cut. Advantages
    are not normalized; returns are `advantages + values`. Schulman et al., arXiv:1506.02438;
    equations as numbered in PPO, arXiv:1707.06347.

    >>> advantages, returns = generalized_advantage_estimation(
    ...     rewards=jnp.array([[0.0, 0.0, 1.0]]), values=jnp.array([[0.9, 0.5, 0.5]]),
    ...     response_mask=jnp.array([[False, True, True]]), gamma=1.0, gae_lambda=1.0)
    >>> print(advantages)
    [[0.  0.5 0.5]]
    """

    def step(carry, inputs):
        next_value, next_advantage = carry
        reward, value, mask = inputs
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * gae_lambda * next_advantage
        carry = (jnp.where(mask, value, next_value), jnp.where(mask, advantage, next_advantage))
        return carry, jnp.where(mask, advantage, 0.0)

    zeros = jnp.zeros_like(rewards, shape=rewards.shape[:1])
    _, advantages = jax.lax.scan(
        step, (zeros, zeros), (rewards.T, values.T, response_mask.T), reverse=True
    )
    advantages = advantages.T
    return advantages, jnp.where(response_mask, advantages + values, 0.0)


def gae(
    rewards: PerToken, values: PerToken, response_mask: Mask, gamma: float, gae_lambda: float
) -> AdvantagesAndReturns:
    """Returns `generalized_advantage_estimation`, its advantages whitened over the batch.

    Deviation: verl leaves values outside the mask.

    >>> advantages, returns = gae(
    ...     rewards=jnp.array([[1.0], [0.0]]), values=jnp.zeros((2, 1)),
    ...     response_mask=jnp.ones((2, 1), bool), gamma=1.0, gae_lambda=1.0)
    >>> print(advantages.ravel().round(4), returns.ravel())
    [ 0.7071 -0.7071] [1. 0.]
    """
    advantages, returns = generalized_advantage_estimation(
        rewards, values, response_mask, gamma=gamma, gae_lambda=gae_lambda
    )
    return whiten(advantages, response_mask), returns


def reinforce_plus_plus(
    rewards: PerToken, response_mask: Mask, gamma: float
) -> AdvantagesAndReturns:
    """Returns the discounted reward to go, whitened over all tokens of the batch, and unwhitened.

    Hu et al., REINFORCE++, arXiv:2501.03262.

    >>> advantages, returns = reinforce_plus_plus(
    ...     jnp.array([[0.0, 0.0, 1.0]]), jnp.array([[True, False, True]]), gamma=0.5)
    >>> print(returns, advantages.round(4))
    [[0.5 0.  1. ]] [[-0.7071  0.      0.7071]]
    """
    _, returns = generalized_advantage_estimation(
        rewards, jnp.zeros_like(rewards), response_mask, gamma=gamma, gae_lambda=1.0
    )
    return whiten(returns, response_mask), returns


def remax(rewards: PerToken, response_mask: Mask, baselines: PerRow) -> AdvantagesAndReturns:
    """Returns the reward to go minus the score of the prompt's greedy response, and as it is.

    Li et al., ReMax, arXiv:2310.10505. Deviation: verl leaves values on tool tokens.

    >>> advantages, _ = remax(
    ...     jnp.array([[0.0, 1.0]]), jnp.ones((1, 2), bool), baselines=jnp.array([0.25]))
    >>> print(advantages)
    [[0.75 0.75]]
    """
    returns = token_baselines.returns_to_go(rewards, response_mask)
    return jnp.where(response_mask, returns - baselines[:, None], 0.0), returns


# Those of `group_advantages` return advantages alone, for each row or for each token.
ESTIMATORS: dict[str, Callable[..., AdvantagesAndReturns | Array]] = {
    "gae": gae,
    "grpo": group_advantages.grpo,
    "grpo_passk": group_advantages.grpo_passk,
    "gdpo": group_advantages.gdpo,
    "rloo": group_advantages.rloo,
    "reinforce_plus_plus_baseline": group_advantages.reinforce_plus_plus_baseline,
    "opo": group_advantages.opo,
    "gpg": group_advantages.gpg,
    "optimal_token_baseline": token_baselines.optimal_token_baseline,
    "tir_optimal_token_baseline": token_baselines.tir_optimal_token_baseline,
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
}


def estimate(
    config: AlgorithmConfig, *, rewards: PerToken, response_mask: Mask, **available: Any
) -> AdvantagesAndReturns:
    """Returns what the estimator `config.advantage` makes of the values that it names.

    docs/custom_algorithm.md lists what a user's function may name, as far as it is `available`. It
    returns advantages and returns [B, T]; what is outside the mask is discarded. `rewards` include
    the KL penalty. `response_mask` is not the mask that rejection left: a rejected token has no
    gradient, but its reward still counts.

    Raises:
      ValueError, ImportError, AttributeError, FunctionError: The function cannot be found
        (see `lookup.resolve`), names what is not available, or returns something else.

    >>> advantages, _ = estimate(
    ...     AlgorithmConfig(advantage="rloo"), response_mask=jnp.ones((2, 1), bool),
    ...     rewards=jnp.array([[1.0], [0.0]]), group_ids=jnp.array([0, 0]))
    >>> print(advantages.ravel())
    [ 1. -1.]
    """
    where = f"config.algorithm.advantage={config.advantage!r}"
    named = {
        "config": config,
        "gamma": config.gamma,
        "gae_lambda": config.gae_lambda,
        "group_std": config.group_std,
        "rewards": rewards,
        "response_mask": response_mask,
        "scores": masked_sum(rewards, response_mask, -1),
        "members": jnp.any(response_mask, axis=-1),
    }
    function = resolve(config.advantage, ESTIMATORS, "advantage estimator")
    result = call_by_name(function, named | available, where)
    if config.advantage in ESTIMATORS and not isinstance(result, tuple):
        advantages = result if result.ndim == 2 else result[:, None]
        advantages = jnp.where(response_mask, advantages, 0.0)
        return advantages, advantages
    shapes = [jnp.shape(array) for array in result] if isinstance(result, tuple | list) else []
    if shapes != [response_mask.shape, response_mask.shape]:
        got = f"arrays of shapes {shapes}" if shapes else type(result).__name__
        raise FunctionError(
            f"{where}: returned {got}; an estimator returns (advantages, returns), both of"
            f" response_mask's shape {response_mask.shape}"
        )
    advantages, returns = zero_outside(response_mask, *map(jnp.asarray, result))
    return advantages, returns
