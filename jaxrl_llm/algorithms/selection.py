"""Which tokens a policy loss treats apart, chosen over the whole minibatch.

Clip-Cov and KL-Cov (arXiv:2505.22617) act on the few tokens whose log-prob and advantage
covary most. The choice needs means and ranks over all tokens, so it is made once a
minibatch, before its microbatches, from log-probs of a pass without gradient.
Deviation: verl chooses in each microbatch, and for Clip-Cov without a seed.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from jaxrl_llm.algorithms.masked import masked_mean, zero_outside
from jaxrl_llm.algorithms.ratio_losses import clipped_surrogate
from jaxrl_llm.algorithms.ratios import bounded
from jaxrl_llm.config import AlgorithmConfig
from jaxrl_llm.types import Minibatch


def _covariances(
    log_probs: Float[Array, "B T"], minibatch: Minibatch
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]]:
    """Returns each token's part of the covariance, its advantage and its log-ratio."""
    mask = minibatch.loss_mask
    log_probs, advantages, old_log_probs = zero_outside(
        mask, jax.lax.stop_gradient(log_probs), minibatch.advantages, minibatch.old_log_probs
    )
    centered_advantages = advantages - masked_mean(advantages, mask)
    centered_log_probs = log_probs - masked_mean(log_probs, mask)
    return centered_advantages * centered_log_probs, advantages, log_probs - old_log_probs


def _largest(
    priority: Float[Array, "B T"], candidates: Bool[Array, "B T"], count: Float[Array, ""]
) -> Bool[Array, "B T"]:
    """Returns the `count` candidates of largest priority, all if they are fewer."""
    order = jnp.argsort(-jnp.where(candidates, priority, -jnp.inf).ravel(), stable=True)
    ranks = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
    return candidates & (ranks.reshape(priority.shape) < count)


def _share(share: float, mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    return jnp.maximum(jnp.floor(share * jnp.sum(mask)), 1.0)


def clip_cov(
    log_probs: Float[Array, "B T"],
    minibatch: Minibatch,
    key: Key[Array, ""],
    config: AlgorithmConfig,
) -> Bool[Array, "B T"]:
    """Returns tokens drawn among those whose covariance lies between two bounds.

    Of the tokens with `clip_cov_low < covariance < clip_cov_high` that the ratio clip has
    not stopped, `max(floor(clip_cov_share * tokens), 1)` are drawn uniformly. The draw of
    a token depends on the key, its row and its position, not on the width of the array.

    Example:
      >>> import dataclasses
      >>> log_probs = jnp.array([[-1.0, -1.0, -5.0, -5.0]])
      >>> minibatch = dataclasses.replace(
      ...     Minibatch.zeros(1, 4), loss_mask=jnp.ones((1, 4), bool), old_log_probs=log_probs,
      ...     advantages=jnp.array([[1.0, 1.0, 1.0, -3.0]]))
      >>> config = AlgorithmConfig(clip_cov_high=9.0)
      >>> print(clip_cov(log_probs, minibatch, jax.random.key(0), config))
      [[False False False  True]]
    """
    covariances, advantages, log_ratios = _covariances(log_probs, minibatch)
    _, clipped = clipped_surrogate(jnp.exp(bounded(log_ratios)), advantages, config)
    candidates = (
        minibatch.loss_mask
        & ~clipped
        & (covariances > config.clip_cov_low)
        & (covariances < config.clip_cov_high)
    )
    rows, width = covariances.shape
    positions = jnp.arange(width)
    draws = jax.vmap(
        lambda row: jax.vmap(
            lambda position: jax.random.uniform(
                jax.random.fold_in(jax.random.fold_in(key, row), position)
            )
        )(positions)
    )(jnp.arange(rows))
    return _largest(draws, candidates, _share(config.clip_cov_share, minibatch.loss_mask))


def kl_cov(
    log_probs: Float[Array, "B T"],
    minibatch: Minibatch,
    key: Key[Array, ""],
    config: AlgorithmConfig,
) -> Bool[Array, "B T"]:
    """Returns the `max(floor(kl_cov_share * tokens), 1)` tokens of largest covariance.

    Example:
      >>> import dataclasses
      >>> minibatch = dataclasses.replace(
      ...     Minibatch.zeros(1, 3), loss_mask=jnp.ones((1, 3), bool),
      ...     advantages=jnp.array([[2.0, -1.0, -1.0]]))
      >>> print(kl_cov(jnp.array([[-1.0, -2.0, -2.0]]), minibatch, jax.random.key(0),
      ...              AlgorithmConfig()))
      [[ True False False]]
    """
    del key
    covariances, _, _ = _covariances(log_probs, minibatch)
    mask = minibatch.loss_mask
    return _largest(covariances, mask, _share(config.kl_cov_share, mask))


SELECTIONS: dict[str, Callable[..., Bool[Array, "B T"]]] = {
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}


def select(
    config: AlgorithmConfig,
    log_probs: Float[Array, "B T"],
    minibatch: Minibatch,
    key: Key[Array, ""],
) -> Bool[Array, "B T"]:
    """Returns the selection that `config.policy_loss` needs; nothing where it needs none.

    For a loss outside `SELECTIONS` only the shape of the log-probs is read.

    Example:
      >>> import dataclasses
      >>> config, log_probs = AlgorithmConfig(policy_loss="vanilla"), jnp.zeros((1, 2))
      >>> print(select(config, log_probs, Minibatch.zeros(1, 2), jax.random.key(0)))
      [[False False]]
    """
    if config.policy_loss not in SELECTIONS:
        return jnp.zeros(log_probs.shape, bool)
    return SELECTIONS[config.policy_loss](log_probs, minibatch, key, config)
