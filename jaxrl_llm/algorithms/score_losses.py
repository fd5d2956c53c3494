"""Policy losses of the form weight * -A * log_probs, the weight without gradient.

Except REINFORCE, these bound how much a token weighs and not where its gradient stops. They read
and return what those of `ratio_losses` do.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import TokenLoss
from jaxrl_llm.algorithms.masked import Mask, PerToken
from jaxrl_llm.algorithms.ratios import bounded
from jaxrl_llm.config import AlgorithmConfig


def reinforce(log_probs: PerToken, rollout_log_probs: PerToken, advantages: PerToken) -> TokenLoss:
    """Returns `-A log_probs`, right for one update from samples of the same policy.

    `actor/ppo_kl` is measured against the engine's log-probs. Williams, Simple Statistical
    Gradient-Following Algorithms, 1992.

    >>> one = jnp.ones((1, 1))
    >>> print(reinforce(-2 * one, -2 * one, 3 * one)[0])
    [[6.]]
    """
    return -advantages * log_probs, {"ppo_kl": rollout_log_probs - log_probs}


def gpg(log_probs: PerToken, old_log_probs: PerToken, advantages: PerToken) -> TokenLoss:
    """Returns `-A log_probs`; the scaling that makes it GPG is in its advantages.

    Chu et al., GPG, arXiv:2504.02546.

    >>> one = jnp.ones((1, 1))
    >>> print(gpg(-2 * one, -2 * one, 3 * one)[0])
    [[6.]]
    """
    return reinforce(log_probs, old_log_probs, advantages)


def dro(
    log_probs: PerToken, old_log_probs: PerToken, advantages: PerToken, config: AlgorithmConfig
) -> TokenLoss:
    """Returns REINFORCE with a quadratic pull towards the policy when the step began.

        -(A log_probs - dro_beta / 2 (log_probs - old_log_probs)**2)

    Richemond et al., Direct Reward Optimisation, arXiv:2405.19107.

    >>> one = jnp.ones((1, 1))
    >>> print(dro(-one, -3 * one, 0 * one, AlgorithmConfig(dro_beta=0.5))[0])
    [[1.]]
    """
    differences = log_probs - old_log_probs
    losses = 0.5 * config.dro_beta * jnp.square(differences) - advantages * log_probs
    return losses, {"ppo_kl": -differences}


def cispo(
    log_probs: PerToken, old_log_probs: PerToken, advantages: PerToken, config: AlgorithmConfig
) -> TokenLoss:
    """Returns REINFORCE weighted by the clipped ratio: no token loses its gradient.

        -stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) A log_probs

    MiniMax, MiniMax-M1, arXiv:2506.13585, Eq. 4 and 5.

    >>> one = jnp.ones((1, 1))
    >>> print(cispo(-one, -3 * one, one, AlgorithmConfig(clip_high=0.5))[0])
    [[1.5]]
    """
    log_ratios = bounded(log_probs - old_log_probs)
    ratios = jax.lax.stop_gradient(jnp.exp(log_ratios))
    weights = jnp.clip(ratios, 1.0 - config.clip_low, 1.0 + config.clip_high)
    metrics = {"ppo_kl": -log_ratios, "pg_clipfrac": ratios != weights}
    return -weights * advantages * log_probs, metrics


def _trusted(
    keep: Mask,
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
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
    log_probs: PerToken, old_log_probs: PerToken, advantages: PerToken, config: AlgorithmConfig
) -> TokenLoss:
    """Returns REINFORCE weighted by the ratio, inside a trust region of probability.

    A token keeps its gradient while its probability has moved by at most `clip_high` up (A > 0) or
    `clip_low` down (A <= 0). So the ratio of a rare token may change much, up to `dual_clip` (20 is
    a good value; 3 is tight). Qi et al., Rethinking the Trust Region in LLM RL, arXiv:2602.04879.

    >>> log_probs, old = jnp.log(jnp.array([[0.02, 0.9]])), jnp.log(jnp.array([[0.01, 0.5]]))
    >>> _, metrics = dppo_tv(log_probs, old, jnp.ones((1, 2)), AlgorithmConfig())
    >>> print(metrics["pg_clipfrac"])
    [[False  True]]
    """
    moved = jnp.exp(log_probs) - jnp.exp(old_log_probs)
    keep = jnp.where(advantages > 0.0, moved <= config.clip_high, moved >= -config.clip_low)
    return _trusted(keep, log_probs, old_log_probs, advantages, config)


def dppo_kl(
    log_probs: PerToken, old_log_probs: PerToken, advantages: PerToken, config: AlgorithmConfig
) -> TokenLoss:
    """Returns REINFORCE weighted by the ratio, at most `dual_clip`, inside a region of binary KL.

        kl = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))

    A token keeps its gradient while `kl` is at most `clip_high` (A > 0) or `clip_low` (A <= 0), and
    always where it moves back. Source: that of `dppo_tv`.

    >>> log_probs, old = jnp.log(jnp.array([[0.02, 0.9]])), jnp.log(jnp.array([[0.01, 0.5]]))
    >>> _, metrics = dppo_kl(log_probs, old, jnp.ones((1, 2)), AlgorithmConfig())
    >>> print(metrics["pg_clipfrac"])
    [[False  True]]
    """
    detached = jax.lax.stop_gradient(log_probs)
    probs, old_probs = jnp.exp(detached), jnp.exp(old_log_probs)
    divergence = old_probs * (old_log_probs - detached) + (1.0 - old_probs) * jnp.log(
        (1.0 - old_probs + 1e-8) / (1.0 - probs + 1e-8)
    )
    up = (divergence <= config.clip_high) | (probs <= old_probs)
    down = (divergence <= config.clip_low) | (probs >= old_probs)
    keep = jnp.where(advantages > 0.0, up, down)
    return _trusted(keep, log_probs, old_log_probs, advantages, config)
