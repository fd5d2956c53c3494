"""Which tokens a policy loss treats apart, chosen over the whole minibatch.

Clip-Cov and KL-Cov (arXiv:2505.22617) act on the few tokens whose log-prob and advantage covary
most. The choice needs means and ranks over all tokens, so it is made once a minibatch, before its
microbatches, from log-probs of a pass without gradient.
Deviation: verl chooses in each microbatch, and for Clip-Cov without a seed.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from jaxrl_llm.algorithms.masked import Mask, PerToken, Scalar, masked_mean, zero_outside
from jaxrl_llm.algorithms.ratio_losses import clipped_surrogate
from jaxrl_llm.algorithms.ratios import bounded
from jaxrl_llm.config import AlgorithmConfig
from jaxrl_llm.types import Minibatch


def _covariances(log_probs: PerToken, advantages: PerToken, mask: Mask) -> PerToken:
    centered_advantages = advantages - masked_mean(advantages, mask)
    return centered_advantages * (log_probs - masked_mean(log_probs, mask))


def _largest(priority: PerToken, candidates: Mask, share: float, mask: Mask) -> Mask:
    """Returns the candidates of largest priority: `share` of the tokens, at least one."""
    count = jnp.maximum(jnp.floor(share * jnp.sum(mask)), 1.0)
    order = jnp.argsort(-jnp.where(candidates, priority, -jnp.inf).ravel(), stable=True)
    ranks = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
    return candidates & (ranks.reshape(priority.shape) < count)


def clip_cov(
    log_probs: PerToken, minibatch: Minibatch, key: Key[Array, ""], config: AlgorithmConfig
) -> Mask:
    """Returns tokens drawn among those whose covariance lies between two bounds.

    Of the tokens with `clip_cov_low < covariance < clip_cov_high` that the ratio clip has not
    stopped, `max(floor(clip_cov_share * tokens), 1)` are drawn uniformly. The draw of a token
    depends on the key, its row and its position, not on the width of the array.

    >>> import dataclasses
    >>> log_probs = jnp.array([[-1.0, -1.0, -5.0, -5.0]])
    >>> minibatch = dataclasses.replace(
    ...     Minibatch.zeros(1, 4), loss_mask=jnp.ones((1, 4), bool), old_log_probs=log_probs,
    ...     advantages=jnp.array([[1.0, 1.0, 1.0, -3.0]]))
    >>> print(clip_cov(log_probs, minibatch, jax.random.key(0), AlgorithmConfig(clip_cov_high=9.0)))
    [[False False False  True]]
    """
    mask = minibatch.loss_mask
    log_probs, advantages, old_log_probs = zero_outside(
        mask, log_probs, minibatch.advantages, minibatch.old_log_probs
    )
    covariances = _covariances(log_probs, advantages, mask)
    _, clipped = clipped_surrogate(jnp.exp(bounded(log_probs - old_log_probs)), advantages, config)
    between = (covariances > config.clip_cov_low) & (covariances < config.clip_cov_high)

    def draw(row: Int[Array, ""], position: Int[Array, ""]) -> Scalar:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, row), position))

    rows, width = mask.shape
    draws = jax.vmap(jax.vmap(draw, (None, 0)), (0, None))(jnp.arange(rows), jnp.arange(width))
    return _largest(draws, mask & ~clipped & between, config.clip_cov_share, mask)


def kl_cov(
    log_probs: PerToken, minibatch: Minibatch, key: Key[Array, ""], config: AlgorithmConfig
) -> Mask:
    """Returns the `max(floor(kl_cov_share * tokens), 1)` tokens of largest covariance.

    >>> import dataclasses
    >>> minibatch = dataclasses.replace(
    ...     Minibatch.zeros(1, 3), loss_mask=jnp.ones((1, 3), bool),
    ...     advantages=jnp.array([[2.0, -1.0, -1.0]]))
    >>> log_probs = jnp.array([[-1.0, -2.0, -2.0]])
    >>> print(kl_cov(log_probs, minibatch, jax.random.key(0), AlgorithmConfig()))
    [[ True False False]]
    """
    del key
    mask = minibatch.loss_mask
    log_probs, advantages = zero_outside(mask, log_probs, minibatch.advantages)
    return _largest(_covariances(log_probs, advantages, mask), mask, config.kl_cov_share, mask)


SELECTIONS: dict[str, Callable[..., Mask]] = {"clip_cov": clip_cov, "kl_cov": kl_cov}


def select(
    config: AlgorithmConfig, log_probs: PerToken, minibatch: Minibatch, key: Key[Array, ""]
) -> Mask:
    """Returns the selection that `config.policy_loss` needs; nothing where it needs none.

    For a loss outside `SELECTIONS` only the shape of the log-probs is read.

    >>> config, log_probs = AlgorithmConfig(policy_loss="vanilla"), jnp.zeros((1, 2))
    >>> print(select(config, log_probs, Minibatch.zeros(1, 2), jax.random.key(0)))
    [[False False]]
    """
    if config.policy_loss not in SELECTIONS:
        return jnp.zeros(log_probs.shape, bool)
    log_probs = jax.lax.stop_gradient(log_probs)
    return SELECTIONS[config.policy_loss](log_probs, minibatch, key, config)
