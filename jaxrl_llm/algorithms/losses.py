"""The objectives of the policy and of the critic, and the table of policy losses.

A row of [B, T] is one whole sequence, also when the network saw several packed together.
`denominators` are of the whole minibatch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import ratio_losses, score_losses
from jaxrl_llm.algorithms.aggregation import (
    Denominators,
    LossAndMetrics,
    TokenLoss,
    aggregate,
    policy_loss,
    token_mean,
)
from jaxrl_llm.algorithms.kl import KL_ESTIMATORS
from jaxrl_llm.algorithms.lookup import FunctionError, call_by_name, resolve
from jaxrl_llm.algorithms.masked import Mask, PerToken, zero_outside
from jaxrl_llm.config import AlgorithmConfig
from jaxrl_llm.types import Minibatch

POLICY_LOSSES: dict[str, Callable[..., LossAndMetrics | TokenLoss]] = {
    "vanilla": ratio_losses.vanilla,
    "gspo": ratio_losses.gspo,
    "sapo": ratio_losses.sapo,
    "gpg": score_losses.gpg,
    "clip_cov": ratio_losses.clip_cov,
    "kl_cov": ratio_losses.kl_cov,
    "geo_mean": ratio_losses.geo_mean,
    "dppo_tv": score_losses.dppo_tv,
    "dppo_kl": score_losses.dppo_kl,
    "dro": score_losses.dro,
    "cispo": score_losses.cispo,
    "reinforce": score_losses.reinforce,
}

# Losses of the table with a gradient where all advantages are zero.
_PULL_BACK = frozenset({"kl_cov", "dro"})
# Fields of a minibatch that no policy loss reads.
_HIDDEN = frozenset({"tokens", "lengths", "cost_returns", "cost_values"})


def follows_advantages(config: AlgorithmConfig) -> bool:
    """Returns whether zero advantages leave the policy nothing to learn.

    Not so with an entropy bonus, a KL in the loss, or a loss that pulls the policy back by itself;
    a user's own loss may do that too.

    >>> follows_advantages(AlgorithmConfig()), follows_advantages(AlgorithmConfig(kl_in="loss"))
    (True, False)
    """
    known = config.policy_loss in POLICY_LOSSES and config.policy_loss not in _PULL_BACK
    return known and config.kl_in != "loss" and not config.entropy_coef


def value_loss(
    config: AlgorithmConfig,
    values: PerToken,
    old_values: PerToken,
    returns: PerToken,
    loss_mask: Mask,
    denominators: Denominators,
    role: str = "critic",
) -> LossAndMetrics:
    """Returns half the squared error of the critic, the worse of clipped and unclipped.

        0.5 max((values - returns)**2, (clip(values, old_values ± value_clip) - returns)**2)

    `role` begins the names of the metrics; `cost_critic` is that of Safe-RLHF. arXiv:1707.06347
    with the clip of its implementation; arXiv:2005.12729, section 3.

    >>> mask = jnp.array([[True, False]])
    >>> loss, _ = value_loss(
    ...     AlgorithmConfig(value_clip=0.5), jnp.array([[2.0, jnp.nan]]), jnp.zeros((1, 2)),
    ...     jnp.array([[2.0, 0.0]]), mask, Denominators(1.0, 1.0))
    >>> print(loss)
    1.125
    """
    values, old_values, returns = zero_outside(loss_mask, values, old_values, returns)
    clipped = jnp.clip(values, old_values - config.value_clip, old_values + config.value_clip)
    plain_error, clipped_error = jnp.square(values - returns), jnp.square(clipped - returns)
    worse = jnp.maximum(plain_error, clipped_error)
    loss = 0.5 * aggregate(config, worse, loss_mask, denominators)
    is_clipped = (clipped_error > plain_error).astype(values.dtype)
    metrics = {
        f"{role}/vf_loss": loss,
        f"{role}/vf_clipfrac": token_mean(is_clipped, loss_mask, denominators),
        f"{role}/vpred_mean": token_mean(values, loss_mask, denominators),
    }
    return loss, jax.lax.stop_gradient(metrics)


def policy_objective(
    config: AlgorithmConfig,
    log_probs: PerToken,
    entropies: PerToken,
    minibatch: Minibatch,
    selection: Mask,
    denominators: Denominators,
) -> LossAndMetrics:
    """Returns what the policy minimizes, on one microbatch.

        policy_loss - entropy_coef * entropy + kl_coef * kl       (kl only with kl_in="loss")

    `entropies` are of the distributions the tokens were drawn from, with gradient if `entropy_coef`
    is not 0; `selection` has the rows of this microbatch of what `selection.select` chose.
    docs/custom_algorithm.md lists what a user's loss (`config.policy_loss` as import path) may
    name. It returns its loss and a dict of metrics, as shares of the minibatch:
    `aggregation.policy_loss` makes them from a loss per token.

    Raises:
      ValueError, ImportError, AttributeError, FunctionError: The loss cannot be found (see
        `lookup.resolve`), names what is not available, or returns something else.

    >>> import dataclasses
    >>> zero, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    >>> minibatch = dataclasses.replace(
    ...     Minibatch.zeros(1, 2), loss_mask=mask, advantages=zero + 1.0,
    ...     correction_weights=zero + 1.0)
    >>> loss, metrics = policy_objective(
    ...     AlgorithmConfig(entropy_coef=0.5, policy_loss="reinforce"), zero - 1.0, zero + 2.0,
    ...     minibatch, ~mask, Denominators(2.0, 1.0))
    >>> print(loss, metrics["actor/pg_loss"], metrics["actor/entropy"])
    0.0 1.0 2.0
    """
    mask = minibatch.loss_mask
    available = {name: array for name, array in vars(minibatch).items() if name not in _HIDDEN} | {
        "log_probs": log_probs,
        "entropies": entropies,
        "selection": selection,
        "config": config,
        "denominators": denominators,
    }
    loss, metrics = _policy_loss(config, minibatch, available, denominators)
    (entropies,) = zero_outside(mask, entropies)
    bonus = aggregate(config, entropies, mask, denominators)
    more = {
        "actor/entropy": token_mean(entropies, mask, denominators),
        "actor/entropy_loss": bonus,
    }
    if config.entropy_coef:
        loss = loss - config.entropy_coef * bonus
    if config.kl_in == "loss":
        log_probs, ref_log_probs = zero_outside(mask, log_probs, minibatch.ref_log_probs)
        divergence = KL_ESTIMATORS[config.kl_estimator](log_probs, ref_log_probs)
        more["actor/kl_loss"] = aggregate(config, divergence, mask, denominators)
        loss = loss + config.kl_coef * more["actor/kl_loss"]
    return loss, metrics | jax.lax.stop_gradient(more | {"actor/loss": loss})


def _policy_loss(
    config: AlgorithmConfig,
    minibatch: Minibatch,
    available: dict[str, Any],
    denominators: Denominators,
) -> LossAndMetrics:
    where = f"config.algorithm.policy_loss={config.policy_loss!r}"
    function = resolve(config.policy_loss, POLICY_LOSSES, "policy loss")
    if config.policy_loss in POLICY_LOSSES:  # a user's function gets the arrays as they are
        names = ("log_probs", "old_log_probs", "rollout_log_probs", "advantages")
        inside = zero_outside(minibatch.loss_mask, *(available[name] for name in names))
        available = available | dict(zip(names, inside, strict=True))
    result = call_by_name(function, available, where)
    if config.policy_loss in POLICY_LOSSES and jnp.ndim(result[0]):
        per_token, token_means = result
        weights, mask = minibatch.correction_weights, minibatch.loss_mask
        return policy_loss(config, per_token, weights, mask, denominators, **token_means)
    if not (isinstance(result, tuple) and len(result) == 2 and jnp.shape(result[0]) == ()):
        raise FunctionError(
            f"{where}: returned {type(result).__name__}; a policy loss returns"
            " (scalar loss, dict of metrics)"
        )
    return result
