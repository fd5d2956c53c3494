"""Safe-RLHF (arXiv:2310.12773): the most reward whose mean cost stays below a limit.

PPO with two critics and a Lagrange multiplier, kept as its logarithm so that it cannot be negative.
A multiplier of exactly 0 (logarithm -inf) stays 0 and is PPO to the bit.

The costs of tokens are `kl_shaped` with `-kl_coef`: the KL is added where rewards lose it. The
combined advantage then holds the KL with `kl_coef` whatever the multiplier is:
((r - kl) - multiplier (c + kl)) / (1 + multiplier). Deviation: the paper gives half of the
coefficient to each, so its coefficient is twice ours; ours is PPO's at 0.
"""

import jax.numpy as jnp

from jaxrl_llm.algorithms.advantages import generalized_advantage_estimation
from jaxrl_llm.algorithms.masked import Mask, PerToken, Scalar, whiten
from jaxrl_llm.config import AlgorithmConfig


def next_log_multiplier(
    config: AlgorithmConfig, log_multiplier: Scalar | float, mean_cost: Scalar | float
) -> Scalar:
    """Returns the log-multiplier of the next step: up while the mean cost is above the limit.

        log_multiplier + multiplier_lr * multiplier * (mean_cost - cost_limit)

    It is at most `log(multiplier_max)`. `mean_cost` is that of this step's responses, without KL.
    Dai et al., arXiv:2310.12773, appendix B.3.

    >>> config = AlgorithmConfig(multiplier_lr=0.1, cost_limit=1.0)
    >>> print(next_log_multiplier(config, 0.0, 3.0))
    0.2
    """
    log_multiplier = jnp.asarray(log_multiplier, jnp.float32)
    step = config.multiplier_lr * jnp.exp(log_multiplier) * (mean_cost - config.cost_limit)
    return jnp.minimum(log_multiplier + step, jnp.log(jnp.float32(config.multiplier_max)))


def combined_advantages(
    reward_advantages: PerToken, cost_advantages: PerToken, multiplier: Scalar | float
) -> PerToken:
    """Returns `(reward_advantages - multiplier * cost_advantages) / (1 + multiplier)`.

    With multiplier 0 it is `reward_advantages` to the bit, whatever the costs are.

    >>> print(combined_advantages(jnp.array([[2.0]]), jnp.array([[1.0]]), 1.0))
    [[0.5]]
    """
    combined = (reward_advantages - multiplier * cost_advantages) / (1.0 + multiplier)
    return jnp.where(jnp.asarray(multiplier) == 0.0, reward_advantages, combined)


def safe_advantages(
    config: AlgorithmConfig,
    log_multiplier: Scalar | float,
    rewards: PerToken,
    costs: PerToken,
    values: PerToken,
    cost_values: PerToken,
    response_mask: Mask,
) -> tuple[PerToken, PerToken, PerToken]:
    """Returns the advantages that Safe-RLHF maximizes, and the targets of both critics.

    Reward and cost advantages are estimated apart, combined in their own units, and whitened
    together, as PPO's are.

    >>> zero, one = jnp.zeros((2, 1)), jnp.array([[1.0], [0.0]])
    >>> advantages, returns, cost_returns = safe_advantages(
    ...     AlgorithmConfig(), 0.0, one, one, zero, zero, zero == 0.0)
    >>> print(advantages.ravel(), returns.ravel(), cost_returns.ravel())
    [0. 0.] [1. 0.] [1. 0.]
    """
    reward_advantages, returns = generalized_advantage_estimation(
        rewards, values, response_mask, gamma=config.gamma, gae_lambda=config.gae_lambda
    )
    cost_advantages, cost_returns = generalized_advantage_estimation(
        costs, cost_values, response_mask, gamma=config.gamma, gae_lambda=config.gae_lambda
    )
    multiplier = jnp.exp(jnp.asarray(log_multiplier, jnp.float32))
    combined = combined_advantages(reward_advantages, cost_advantages, multiplier)
    return whiten(combined, response_mask), returns, cost_returns
