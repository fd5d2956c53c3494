"""Per-token policy losses and their table.

A loss names what it reads, which `losses.policy_objective` sets to 0 outside the loss mask, and
returns a number and metrics for each token. A = advantages, log_ratios = log_probs - old_log_probs
clipped to ±20, ratio = exp(log_ratios). At ratio 1 the gradient of each loss is that of
-A * log_probs.

Parameters with a default are hyperparameters of their loss, which `config.loss_args` sets.
`clip_low` and `clip_high`, which most losses share, are fields of the config.
"""

import math
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import masked
from jaxrl_llm.algorithms.aggregation import Denominators, LossAndMetrics, TokenLoss, policy_loss
from jaxrl_llm.algorithms.kl import clip_log_ratios
from jaxrl_llm.algorithms.masked import Mask, PerToken
from jaxrl_llm.config import AlgorithmConfig
from jaxrl_llm.config.validation import Coefficient, Range

DualClip = Annotated[float, Range("(1, inf]", "inf: off")]
Temperature = Annotated[float, Range("[0.001, 1000]")]


def clipped_surrogate(
    ratios: PerToken, advantages: PerToken, config: AlgorithmConfig
) -> tuple[PerToken, Mask]:
    """Returns `max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))` and where it clips.

    >>> losses, clipped = clipped_surrogate(
    ...     jnp.array([[1.5, 1.5]]), jnp.array([[1.0, -1.0]]), AlgorithmConfig())
    >>> print(losses, clipped)
    [[-1.2  1.5]] [[ True False]]
    """
    plain = -advantages * ratios
    clipped = -advantages * jnp.clip(ratios, 1.0 - config.clip_low, 1.0 + config.clip_high)
    return jnp.maximum(plain, clipped), clipped > plain


def vanilla(
    log_ratios: PerToken,
    advantages: PerToken,
    config: AlgorithmConfig,
    dual_clip: DualClip = 3.0,
) -> TokenLoss:
    """Returns PPO's clipped loss, with the second bound of dual clip where A is negative.

        max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)),  at most -A dual_clip if A < 0

    Schulman et al., arXiv:1707.06347, Eq. 7; dual clip: Ye et al., arXiv:1912.09729, Eq. 5.

    >>> one = jnp.ones((1, 1))
    >>> losses, metrics = vanilla(jnp.log(9.0) * one, -one, AlgorithmConfig())
    >>> print(losses, metrics["pg_clipfrac_lower"])
    [[3.]] [[ True]]
    """
    losses, clipped = clipped_surrogate(jnp.exp(log_ratios), advantages, config)
    negative = advantages < 0.0
    ceiling = jnp.where(negative, jnp.where(negative, -advantages, 1.0) * dual_clip, jnp.inf)
    return jnp.minimum(losses, ceiling), {
        "ppo_kl": -log_ratios,
        "pg_clipfrac": clipped,
        "pg_clipfrac_lower": losses > ceiling,
    }


def gspo(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    loss_mask: Mask,
    config: AlgorithmConfig,
) -> TokenLoss:
    """Returns the clipped loss with one ratio a sequence: the geometric mean of its tokens'.

        ratio_i = exp(mean_t(log_probs - old_log_probs)), at most exp(10)

    Each token has the sequence's ratio as value and its own log-prob as gradient (GSPO-token,
    Eq. 14), so advantages may differ within a response. Zheng et al., GSPO, arXiv:2507.18071,
    Eq. 5, 7 and 14. Deviation: verl always aggregates by seq-mean-token-mean; here the recipe does.

    >>> one = jnp.ones((1, 2))
    >>> log_probs, old = jnp.log(jnp.array([[0.4, 0.1]])), jnp.log(jnp.array([[0.1, 0.4]]))
    >>> print(gspo(log_probs, old, one, one > 0, AlgorithmConfig())[0])
    [[-1. -1.]]
    """
    log_ratios = log_probs - old_log_probs
    sequence = jax.lax.stop_gradient(masked.mean(log_ratios, loss_mask, -1))[:, None]
    carrier = log_probs - jax.lax.stop_gradient(log_probs)
    ratios = jnp.exp(jnp.minimum(carrier + sequence, 10.0))
    losses, clipped = clipped_surrogate(ratios, advantages, config)
    return losses, {"ppo_kl": -log_ratios, "pg_clipfrac": clipped}


def sapo(
    log_ratios: PerToken,
    advantages: PerToken,
    tau_pos: Temperature = 1.0,
    tau_neg: Temperature = 1.05,
) -> TokenLoss:
    """Returns the loss with a soft gate in place of the clip.

        -A sigmoid(tau (ratio - 1)) 4 / tau,   tau = tau_pos if A > 0 else tau_neg

    Gao et al., SAPO, arXiv:2511.20347.
    Deviation: verl always aggregates by seq-mean-token-mean; here the recipe does.

    >>> print(sapo(jnp.zeros((1, 1)), jnp.ones((1, 1)))[0])
    [[-2.]]
    """
    tau = jnp.where(advantages > 0.0, tau_pos, tau_neg)
    gate = jax.nn.sigmoid(tau * (jnp.exp(log_ratios) - 1.0)) * 4.0 / tau
    return -gate * advantages, {"ppo_kl": -log_ratios}


def geo_mean(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    loss_mask: Mask,
    correction_weights: PerToken,
    config: AlgorithmConfig,
    denominators: Denominators,
) -> LossAndMetrics:
    """Returns the loss of GMPO: the geometric mean of the clipped ratios of a sequence.

        d_t = log-ratio, clipped to at most clip_high where A > 0, at least -clip_low where A < 0
        -mean_t(A) exp(mean_t(d)),   the same on each token of the sequence

    Correction weights enter by their geometric mean over the sequence, so the loss is aggregated
    here; the paper does so by seq-mean-token-mean. Zhao et al., GMPO, arXiv:2507.20673.
    Deviation: verl takes the mean over the rows of each microbatch, padding included, so its step
    grows with the number of microbatches; here the divisors are counts of the minibatch.

    >>> one = jnp.ones((1, 2))
    >>> loss, _ = geo_mean(
    ...     jnp.log(jnp.array([[0.4, 0.1]])), jnp.log(0.1) * one, one, one > 0, one,
    ...     AlgorithmConfig(clip_high=10.0), Denominators(2.0, 1.0))
    >>> print(loss.round(4))
    -2.0
    """
    log_ratios = log_probs - old_log_probs
    clipped = jnp.clip(log_ratios, -config.clip_low, config.clip_high)
    sign = jnp.sign(advantages)
    pessimistic = sign * jnp.minimum(sign * log_ratios, sign * clipped)
    ratios = jnp.exp(clip_log_ratios(masked.mean(pessimistic, loss_mask, -1)))
    losses = -masked.mean(advantages, loss_mask, -1) * ratios
    weights = jnp.exp(masked.mean(jnp.log(correction_weights + 1e-10), loss_mask, -1))
    on_tokens = jnp.ones_like(log_ratios)
    was_clipped = log_ratios != clipped
    return policy_loss(
        config,
        losses[:, None] * on_tokens,
        weights[:, None] * on_tokens,
        loss_mask,
        denominators,
        ppo_kl=-log_ratios,
        pg_clipfrac=was_clipped & (advantages > 0.0),
        pg_clipfrac_lower=was_clipped & (advantages < 0.0),
    )


def clip_cov(
    log_ratios: PerToken, advantages: PerToken, selection: Mask, config: AlgorithmConfig
) -> TokenLoss:
    """Returns the clipped loss, 0 on the tokens of the `selection`; no dual clip.

    They are a few tokens whose log-prob and advantage covary strongly and so reduce the entropy.
    Cui et al., The Entropy Mechanism, arXiv:2505.22617.

    >>> one, selection = jnp.ones((1, 2)), jnp.array([[True, False]])
    >>> print(clip_cov(0 * one, one, selection, AlgorithmConfig())[0])
    [[ 0. -1.]]
    """
    losses, _ = clipped_surrogate(jnp.exp(log_ratios), advantages, config)
    return jnp.where(selection, 0.0, losses), {"ppo_kl": -log_ratios, "pg_clipfrac": selection}


def kl_cov(
    log_ratios: PerToken,
    advantages: PerToken,
    selection: Mask,
    coef: Annotated[float, Range("[0, 1000]")] = 0.1,
) -> TokenLoss:
    """Returns the unclipped loss and a penalty for moving away on the tokens of the `selection`.

        -A ratio + [selected] coef |log_ratios|

    Cui et al., The Entropy Mechanism, arXiv:2505.22617.

    >>> one = jnp.ones((1, 1))
    >>> losses, metrics = kl_cov(one, 0 * one, one > 0, coef=0.5)
    >>> print(losses, metrics["ppo_kl"])
    [[0.5]] [[1.]]
    """
    distances = jnp.abs(log_ratios)
    penalty = jnp.where(selection, coef * distances, 0.0)
    return -advantages * jnp.exp(log_ratios) + penalty, {"ppo_kl": distances}


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
    """Returns `-A log_probs`; what makes it GPG (arXiv:2504.02546) is the scale of its advantages.

    >>> print(gpg(-2 * jnp.ones((1, 1)), -2 * jnp.ones((1, 1)), 3 * jnp.ones((1, 1)))[0])
    [[6.]]
    """
    return reinforce(log_probs, old_log_probs, advantages)


def dro(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    beta: Annotated[float, Range("(0, 1000]")] = 0.1,
) -> TokenLoss:
    """Returns REINFORCE with a quadratic pull towards the policy when the step began.

        -(A log_probs - beta / 2 (log_probs - old_log_probs)**2)

    Richemond et al., Direct Reward Optimisation, arXiv:2405.19107.

    >>> one = jnp.ones((1, 1))
    >>> print(dro(-one, -3 * one, 0 * one, beta=0.5)[0])
    [[1.]]
    """
    differences = log_probs - old_log_probs
    losses = 0.5 * beta * jnp.square(differences) - advantages * log_probs
    return losses, {"ppo_kl": -differences}


def cispo(
    log_probs: PerToken, log_ratios: PerToken, advantages: PerToken, config: AlgorithmConfig
) -> TokenLoss:
    """Returns REINFORCE weighted by the clipped ratio: no token loses its gradient.

        -stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) A log_probs

    MiniMax, MiniMax-M1, arXiv:2506.13585, Eq. 4 and 5.

    >>> one = jnp.ones((1, 1))
    >>> print(cispo(-one, 2 * one, one, AlgorithmConfig(clip_high=0.5))[0])
    [[1.5]]
    """
    ratios = jax.lax.stop_gradient(jnp.exp(log_ratios))
    weights = jnp.clip(ratios, 1.0 - config.clip_low, 1.0 + config.clip_high)
    metrics = {"ppo_kl": -log_ratios, "pg_clipfrac": ratios != weights}
    return -weights * advantages * log_probs, metrics


def vespo(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    loss_mask: Mask,
    correction_weights: PerToken,
    config: AlgorithmConfig,
    denominators: Denominators,
    k_pos: Coefficient = 2.0,
    lambda_pos: Coefficient = 3.0,
    k_neg: Coefficient = 3.0,
    lambda_neg: Coefficient = 2.0,
) -> LossAndMetrics:
    """Returns REINFORCE weighted by a gamma density of the whole sequence's ratio.

        -stop_gradient(phi(w)) A log_probs,   w = prod_t ratio_t correction_weights_t
        phi(w) = w**k exp(lambda (1 - w)),   k, lambda = k_pos, lambda_pos if A >= 0, else _neg

    phi is 1 at w = 1 and falls to both sides, so no clip is needed. w is clipped to [1e-8,
    exp(20)], lambda is at least 1e-4. Correction weights enter w and scale nothing else. VESPO,
    arXiv:2602.10693; defaults are those of the authors' code.

    >>> one = jnp.ones((1, 2))
    >>> loss, metrics = vespo(
    ...     -one, -one, one, one > 0, one, AlgorithmConfig(), Denominators(2.0, 1.0))
    >>> print(loss, metrics["actor/vespo_weight"])
    1.0 1.0
    """
    log_ratios = jax.lax.stop_gradient(clip_log_ratios(log_probs - old_log_probs))
    least = math.log(1e-8)
    corrections = jnp.log(jnp.where(loss_mask, correction_weights, 1.0))
    corrections = jnp.clip(jax.lax.stop_gradient(corrections), least, 20.0)
    exponents = masked.sum(log_ratios + corrections, loss_mask, -1)[:, None]
    exponents = jnp.clip(exponents, least, 20.0)
    is_good = advantages >= 0.0
    k = jnp.where(is_good, k_pos, k_neg)
    rate = jnp.maximum(jnp.where(is_good, lambda_pos, lambda_neg), 1e-4)
    weights = jnp.exp(rate + k * exponents - rate * jnp.exp(exponents))
    return policy_loss(
        config,
        -weights * advantages * log_probs,
        jnp.ones_like(weights),
        loss_mask,
        denominators,
        ppo_kl=-log_ratios,
        vespo_weight=weights,
    )


def m2po(
    log_ratios: PerToken,
    advantages: PerToken,
    selection: Mask,
) -> TokenLoss:
    """Returns the unclipped loss `-A ratio`, 0 on the tokens of the `selection`.

    They are the few tokens, of those that moved the way their advantage wants, whose squared
    log-ratios keep the mean above a budget (`selection.m2po_tokens`). Stale samples lose far fewer
    tokens than by a clip. Zheng et al., M2PO, arXiv:2510.01161. Deviation: the authors' code clips
    at a bound found from the budget, and never within [0.7, 1.5]; a clipped token too has no
    gradient.

    >>> one, selection = jnp.ones((1, 2)), jnp.array([[True, False]])
    >>> print(m2po(jnp.log(2.0) * one, one, selection)[0])
    [[ 0. -2.]]
    """
    losses = jnp.where(selection, 0.0, -advantages * jnp.exp(log_ratios))
    return losses, {"ppo_kl": -log_ratios, "pg_clipfrac": selection}


def _trust_region_loss(
    keep: Mask,
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    dual_clip: float,
) -> TokenLoss:
    log_ratios = clip_log_ratios(log_probs - old_log_probs)
    ratios = jnp.exp(jax.lax.stop_gradient(log_ratios))
    weights = jnp.where(keep, jnp.minimum(ratios, dual_clip), 0.0)
    return -weights * advantages * log_probs, {
        "ppo_kl": -log_ratios,
        "pg_clipfrac": ~keep,
        "pg_clipfrac_lower": keep & (ratios > dual_clip),
    }


def dppo_tv(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    config: AlgorithmConfig,
    dual_clip: DualClip = 3.0,
) -> TokenLoss:
    """Returns REINFORCE weighted by the ratio, inside a trust region of probability.

    A token keeps its gradient while its probability has moved by at most `clip_high` up (A > 0) or
    `clip_low` down (A <= 0). So the ratio of a rare token may change much, up to `dual_clip` (20 is
    a good value; 3 is tight). Qi et al., Rethinking the Trust Region in LLM RL, arXiv:2602.04879.

    >>> log_probs, old = jnp.log(jnp.array([[0.02, 0.9]])), jnp.log(jnp.array([[0.01, 0.5]]))
    >>> print(dppo_tv(log_probs, old, jnp.ones((1, 2)), AlgorithmConfig())[1]["pg_clipfrac"])
    [[False  True]]
    """
    moved = jnp.exp(log_probs) - jnp.exp(old_log_probs)
    keep = jnp.where(advantages > 0.0, moved <= config.clip_high, moved >= -config.clip_low)
    return _trust_region_loss(keep, log_probs, old_log_probs, advantages, dual_clip)


def dppo_kl(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    config: AlgorithmConfig,
    dual_clip: DualClip = 3.0,
) -> TokenLoss:
    """Returns REINFORCE weighted by the ratio, at most `dual_clip`, inside a region of binary KL.

        kl = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))

    A token keeps its gradient while `kl` is at most `clip_high` (A > 0) or `clip_low` (A <= 0), and
    always where it moves back. Source: that of `dppo_tv`.

    >>> log_probs, old = jnp.log(jnp.array([[0.02, 0.9]])), jnp.log(jnp.array([[0.01, 0.5]]))
    >>> print(dppo_kl(log_probs, old, jnp.ones((1, 2)), AlgorithmConfig())[1]["pg_clipfrac"])
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
    return _trust_region_loss(keep, log_probs, old_log_probs, advantages, dual_clip)


_LOSSES = (vanilla, gspo, sapo, gpg, clip_cov, kl_cov, geo_mean, dppo_tv, dppo_kl, dro, cispo)
POLICY_LOSSES: dict[str, Callable[..., LossAndMetrics | TokenLoss]] = {
    loss.__name__: loss for loss in (*_LOSSES, vespo, m2po, reinforce)
}
