"""Policy losses of the form weight * -A * log_probs, the weight without gradient.

Beside REINFORCE, these bound how much a token weighs and not where its gradient stops. They
return what those of `ratio_losses` return.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algorithms.aggregation import TokenLoss
from jaxrl_llm.algorithms.masked import zero_outside
from jaxrl_llm.algorithms.ratios import bounded, log_ratio
from jaxrl_llm.config import AlgorithmConfig


def reinforce(
    log_probs: Float[Array, "B T"],
    rollout_log_probs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
) -> TokenLoss:
    """Returns `-A log_probs`, right for one update from samples of the same policy.

    `actor/ppo_kl` is measured against the engine's log-probs.

    Example:
      >>> one = jnp.ones((1, 1))
      >>> print(reinforce(-2 * one, -2 * one, 3 * one, one > 0)[0])
      [[6.]]

    Reference: Williams, Simple Statistical Gradient-Following Algorithms, 1992.
    """
    log_probs, rollout_log_probs, advantages = zero_outside(
        loss_mask, log_probs, rollout_log_probs, advantages
    )
    return -advantages * log_probs, {"ppo_kl": rollout_log_probs - log_probs}


def gpg(
    log_probs: Float[Array, "B T"],
    old_log_probs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
) -> TokenLoss:
    """Returns `-A log_probs`; the scaling that makes it GPG is in its advantages.

    Example:
      >>> one = jnp.ones((1, 1))
      >>> print(gpg(-2 * one, -2 * one, 3 * one, one > 0)[0])
      [[6.]]

    Reference: Chu et al., GPG, arXiv:2504.02546.
    """
    return reinforce(log_probs, old_log_probs, advantages, loss_mask)


def dro(
    log_probs: Float[Array, "B T"],
    old_log_probs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    config: AlgorithmConfig,
) -> TokenLoss:
    """Returns REINFORCE with a quadratic pull towards the policy when the step began.

        -(A log_probs - dro_beta / 2 (log_probs - old_log_probs)**2)

    Example:
      >>> one = jnp.ones((1, 1))
      >>> print(dro(-one, -3 * one, 0 * one, one > 0, AlgorithmConfig(dro_beta=0.5))[0])
      [[1.]]

    Reference: Richemond et al., Direct Reward Optimisation, arXiv:2405.19107.
    """
    log_probs, old_log_probs, advantages = zero_outside(
        loss_mask, log_probs, old_log_probs, advantages
    )
    differences = log_probs - old_log_probs
    losses = 0.5 * config.dro_beta * jnp.square(differences) - advantages * log_probs
    return losses, {"ppo_kl": -differences}


def cispo(
    log_probs: Float[Array, "B T"],
    old_log_probs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    config: AlgorithmConfig,
) -> TokenLoss:
    """Returns REINFORCE weighted by the clipped ratio: no token loses its gradient.

        -stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) A log_probs

    Example:
      >>> one = jnp.ones((1, 1))
      >>> print(cispo(-one, -3 * one, one, one > 0, AlgorithmConfig(clip_high=0.5))[0])
      [[1.5]]

    Reference: MiniMax, MiniMax-M1, arXiv:2506.13585, Eq. 4 and 5.
    """
    log_probs, advantages = zero_outside(loss_mask, log_probs, advantages)
    log_ratios = bounded(log_ratio(log_probs, old_log_probs, loss_mask))
    ratios = jax.lax.stop_gradient(jnp.exp(log_ratios))
    weights = jnp.clip(ratios, 1.0 - config.clip_low, 1.0 + config.clip_high)
    metrics = {"ppo_kl": -log_ratios, "pg_clipfrac": ratios != weights}
    return -weights * advantages * log_probs, metrics


def _trusted(
    keep: Bool[Array, "B T"],
    log_probs: Float[Array, "B T"],
    old_log_probs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    config: AlgorithmConfig,
) -> TokenLoss:
    log_ratios = bounded(log_probs - old_log_probs)
    ratios = jnp.exp(jax.lax.stop_gradient(log_ratios))
    weights = jnp.where(keep, jnp.minimum(ratios, config.dual_clip), 0.0)
    return -weights * advantages * log_probs, {
        "ppo_kl": -log_ratios,
        "pg_clipfrac": ~keep,
        "pg_clipfrac_lower": keep & (ratios > config.dual_clip),
    }


def dppo_tv(
    log_probs: Float[Array, "B T"],
    old_log_probs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    config: AlgorithmConfig,
) -> TokenLoss:
    """Returns REINFORCE weighted by the ratio, inside a trust region of probability.

    A token keeps its gradient while its probability has moved by at most `clip_high` up
    (A > 0) or `clip_low` down (A <= 0). A rare token may so change its ratio a lot, up to
    `dual_clip` (20 is a good value; 3 is tight).

    Example:
      >>> one = jnp.ones((1, 2))
      >>> _, metrics = dppo_tv(
      ...     jnp.log(jnp.array([[0.02, 0.9]])), jnp.log(jnp.array([[0.01, 0.5]])), one, one > 0,
      ...     AlgorithmConfig())
      >>> print(metrics["pg_clipfrac"])
      [[False  True]]

    Reference: Qi et al., Rethinking the Trust Region in LLM RL, arXiv:2602.04879.
    """
    log_probs, old_log_probs, advantages = zero_outside(
        loss_mask, log_probs, old_log_probs, advantages
    )
    moved = jnp.exp(log_probs) - jnp.exp(old_log_probs)
    keep = jnp.where(advantages > 0.0, moved <= config.clip_high, moved >= -config.clip_low)
    return _trusted(keep, log_probs, old_log_probs, advantages, config)


def dppo_kl(
    log_probs: Float[Array, "B T"],
    old_log_probs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    config: AlgorithmConfig,
) -> TokenLoss:
    """Returns REINFORCE weighted by the ratio, at most `dual_clip`, inside a region of binary KL.

        kl = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))

    A token keeps its gradient while `kl` is at most `clip_high` (A > 0) or `clip_low`
    (A <= 0), and always where it moves back.

    Example:
      >>> one = jnp.ones((1, 2))
      >>> _, metrics = dppo_kl(
      ...     jnp.log(jnp.array([[0.02, 0.9]])), jnp.log(jnp.array([[0.01, 0.5]])), one, one > 0,
      ...     AlgorithmConfig())
      >>> print(metrics["pg_clipfrac"])
      [[False  True]]

    Reference: Qi et al., Rethinking the Trust Region in LLM RL, arXiv:2602.04879.
    """
    log_probs, old_log_probs, advantages = zero_outside(
        loss_mask, log_probs, old_log_probs, advantages
    )
    detached = jax.lax.stop_gradient(log_probs)
    probs, old_probs = jnp.exp(detached), jnp.exp(old_log_probs)
    divergence = old_probs * (old_log_probs - detached) + (1.0 - old_probs) * jnp.log(
        (1.0 - old_probs + 1e-8) / (1.0 - probs + 1e-8)
    )
    up = (divergence <= config.clip_high) | (probs <= old_probs)
    down = (divergence <= config.clip_low) | (probs >= old_probs)
    keep = jnp.where(advantages > 0.0, up, down)
    return _trusted(keep, log_probs, old_log_probs, advantages, config)
