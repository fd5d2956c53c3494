"""Token selection of policy losses (Clip-Cov, KL-Cov), over the whole minibatch.

Clip-Cov and KL-Cov (arXiv:2505.22617) act on the few tokens whose log-prob and advantage covary
most. The choice needs means and ranks over all tokens, so it is made once a minibatch, before its
microbatches, from log-probs of a pass without gradient.
Deviation: verl chooses in each microbatch, and for Clip-Cov without a seed.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from jaxrl_llm.algorithms import masked
from jaxrl_llm.algorithms.kl import clip_log_ratios
from jaxrl_llm.algorithms.masked import Mask, PerToken, Scalar, zero_outside
from jaxrl_llm.algorithms.policy_losses import clipped_surrogate
from jaxrl_llm.config import AlgorithmConfig
from jaxrl_llm.types import Minibatch

SELECTIONS = ("clip_cov", "kl_cov")  # the losses that read one


def select(
    config: AlgorithmConfig, log_probs: PerToken, minibatch: Minibatch, key: Key[Array, ""]
) -> Mask:
    """Returns the selection that `config.policy_loss` needs; nothing where it needs none.

        clip_cov    max(floor(clip_cov_share * tokens), 1) tokens, drawn uniformly among those
                    that the ratio clip has not stopped, clip_cov_low < covariance < clip_cov_high
        kl_cov      the max(floor(kl_cov_share * tokens), 1) tokens of largest covariance

    The draw of a token depends on the key, its row and its position, not on the width of the
    array. For a loss outside `SELECTIONS` only the shape of the log-probs is read.

    >>> import dataclasses
    >>> log_probs = jnp.array([[-1.0, -1.0, -5.0, -5.0]])
    >>> minibatch = dataclasses.replace(
    ...     Minibatch.zeros(1, 4), loss_mask=jnp.ones((1, 4), bool), old_log_probs=log_probs,
    ...     advantages=jnp.array([[2.0, 1.0, 1.0, -4.0]]))
    >>> for name in ("vanilla", *SELECTIONS):
    ...     config = AlgorithmConfig(policy_loss=name, clip_cov_low=3.0, clip_cov_high=6.0)
    ...     print(select(config, log_probs, minibatch, jax.random.key(0)))
    [[False False False False]]
    [[ True False False False]]
    [[False False False  True]]
    """
    if config.policy_loss not in SELECTIONS:
        return jnp.zeros(log_probs.shape, bool)
    mask = minibatch.loss_mask
    log_probs, advantages, old_log_probs = zero_outside(
        mask, jax.lax.stop_gradient(log_probs), minibatch.advantages, minibatch.old_log_probs
    )
    centered_advantages = advantages - masked.mean(advantages, mask)
    covariances = centered_advantages * (log_probs - masked.mean(log_probs, mask))
    priority, candidates, share = covariances, mask, config.kl_cov_share
    if config.policy_loss == "clip_cov":
        ratios = jnp.exp(clip_log_ratios(log_probs - old_log_probs))
        _, clipped = clipped_surrogate(ratios, advantages, config)
        between = (covariances > config.clip_cov_low) & (covariances < config.clip_cov_high)

        def draw(row: Int[Array, ""], position: Int[Array, ""]) -> Scalar:
            return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, row), position))

        rows, width = mask.shape
        draws = jax.vmap(jax.vmap(draw, (None, 0)), (0, None))
        priority = draws(jnp.arange(rows), jnp.arange(width))
        candidates, share = mask & ~clipped & between, config.clip_cov_share
    count = jnp.maximum(jnp.floor(share * jnp.sum(mask)), 1.0)
    order = jnp.argsort(-jnp.where(candidates, priority, -jnp.inf).ravel(), stable=True)
    ranks = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
    return candidates & (ranks.reshape(mask.shape) < count)
