"""Token selection of policy losses (Clip-Cov, KL-Cov, M2PO), over the whole minibatch.

Clip-Cov and KL-Cov (arXiv:2505.22617) act on the few tokens whose log-prob and advantage covary
most, M2PO on those whose ratio is an outlier. The choice needs means and ranks over all tokens, so
it is made once a minibatch, before its microbatches, from log-probs of a pass without gradient.
Deviation: verl chooses in each microbatch, and for Clip-Cov without a seed.
"""

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from jaxrl_llm.algorithms import masked
from jaxrl_llm.algorithms.kl import clip_log_ratios
from jaxrl_llm.algorithms.lookup import call_by_name
from jaxrl_llm.algorithms.masked import Mask, PerToken, Scalar, zero_outside
from jaxrl_llm.algorithms.policy_losses import clipped_surrogate
from jaxrl_llm.config import AlgorithmConfig
from jaxrl_llm.config.validation import Range, Real, Share
from jaxrl_llm.types import Minibatch


def select(
    config: AlgorithmConfig, log_probs: PerToken, minibatch: Minibatch, key: Key[Array, ""]
) -> Mask:
    """Returns the selection that `config.policy_loss` needs; nothing where it needs none.

    For a loss outside `SELECTIONS` only the shape of the log-probs is read.

    >>> import dataclasses
    >>> log_probs = jnp.array([[-1.0, -1.0, -5.0, -5.0]])
    >>> minibatch = dataclasses.replace(
    ...     Minibatch.zeros(1, 4), loss_mask=jnp.ones((1, 4), bool), old_log_probs=log_probs,
    ...     advantages=jnp.array([[2.0, 1.0, 1.0, -4.0]]))
    >>> for name, loss_args in (
    ...     ("vanilla", {}), ("clip_cov", {"low": 3.0, "high": 6.0}), ("kl_cov", {})):
    ...     config = AlgorithmConfig(policy_loss=name, loss_args=loss_args)
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
    available = {
        "covariances": centered_advantages * (log_probs - masked.mean(log_probs, mask)),
        "log_ratios": clip_log_ratios(log_probs - old_log_probs),
        "advantages": advantages,
        "loss_mask": mask,
        "config": config,
        "key": key,
    }
    where = f"config.algorithm.policy_loss={config.policy_loss!r}"
    return call_by_name(SELECTIONS[config.policy_loss], available, where, config.loss_args)


def clip_cov_tokens(
    covariances: PerToken,
    log_ratios: PerToken,
    advantages: PerToken,
    loss_mask: Mask,
    config: AlgorithmConfig,
    key: Key[Array, ""],
    share: Share = 0.0002,
    low: Real = 1.0,
    high: Annotated[float, Range("[-1000000, 1000000] or inf", "inf: off")] = 5.0,
) -> Mask:
    """Returns `max(floor(share * tokens), 1)` tokens, drawn uniformly from the candidates.

    Candidates are the tokens that the ratio clip has not stopped, with `low < covariance < high`.
    The draw of a token depends on the key, its row and its position, not on the width of the
    array.

    >>> one = jnp.ones((1, 2))
    >>> print(clip_cov_tokens(
    ...     jnp.array([[2.0, 9.0]]), 0 * one, one, one > 0, AlgorithmConfig(), jax.random.key(0)))
    [[ True False]]
    """
    _, clipped = clipped_surrogate(jnp.exp(log_ratios), advantages, config)
    between = (covariances > low) & (covariances < high)

    def draw(row: Int[Array, ""], position: Int[Array, ""]) -> Scalar:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, row), position))

    rows, width = loss_mask.shape
    draws = jax.vmap(jax.vmap(draw, (None, 0)), (0, None))
    priority = draws(jnp.arange(rows), jnp.arange(width))
    return _first_tokens(priority, loss_mask & ~clipped & between, share, loss_mask)


def kl_cov_tokens(covariances: PerToken, loss_mask: Mask, share: Share = 0.0002) -> Mask:
    """Returns the `max(floor(share * tokens), 1)` tokens of largest covariance.

    >>> print(kl_cov_tokens(jnp.array([[2.0, 9.0]]), jnp.ones((1, 2), bool)))
    [[False  True]]
    """
    return _first_tokens(covariances, loss_mask, share, loss_mask)


def m2po_tokens(
    log_ratios: PerToken,
    advantages: PerToken,
    loss_mask: Mask,
    budget: Annotated[float, Range("[0, 1000]")] = 0.04,
) -> Mask:
    """Returns the fewest tokens without which the mean square of the log-ratios is in the budget.

    Candidates, and the tokens of the mean, are those with a ratio above 1 at A > 0, or below 1 at
    A < 0; of equal ones all are selected or none. arXiv:2510.01161. Deviation: AReaL's
    candidates are all tokens.

    >>> ones = jnp.ones((1, 4))
    >>> print(m2po_tokens(jnp.array([[0.1, 0.9, 0.2, -3.0]]), ones, ones > 0))
    [[False  True False False]]
    """
    candidates = loss_mask & (log_ratios * advantages > 0.0)
    squares = jnp.where(candidates, jnp.square(log_ratios), 0.0)
    descending = -jnp.sort(-squares.ravel())
    # The sum of all but the k largest, for k = 0, 1, ...; a sum from the smallest on is exact.
    rest = jnp.cumsum(descending[::-1])[::-1]
    left = jnp.sum(candidates) - jnp.arange(descending.size)
    within = rest <= budget * left
    count = jnp.where(jnp.any(within), jnp.argmax(within), descending.size)
    smallest = descending[jnp.maximum(count - 1, 0)]
    return candidates & (count > 0) & (squares >= smallest)


def high_entropy_tokens(entropies: PerToken, mask: Mask, share: float) -> Mask:
    """Returns the `share` of the tokens of highest entropy: those from its quantile on.

    Few tokens decide where a chain of thought goes; the gradient of the others is left out
    (`config.entropy_share`). Wang et al., Beyond the 80/20 Rule, arXiv:2506.01939.
    Deviation: the quantile is that of the whole step; TRL's that of a microbatch.

    >>> entropies = jnp.array([[0.1, 0.2, 2.0, 0.3, 9.0]])
    >>> print(high_entropy_tokens(entropies, jnp.array([[True, True, True, True, False]]), 0.25))
    [[False False  True False False]]
    """
    inside = jnp.where(mask, entropies, jnp.nan)
    return mask & (entropies >= jnp.nanquantile(inside, 1.0 - share))


def _first_tokens(priority: PerToken, candidates: Mask, share: float, mask: Mask) -> Mask:
    count = jnp.maximum(jnp.floor(share * jnp.sum(mask)), 1.0)
    order = jnp.argsort(-jnp.where(candidates, priority, -jnp.inf).ravel(), stable=True)
    ranks = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
    return candidates & (ranks.reshape(mask.shape) < count)


# Of the losses that read a selection; its hyperparameters are theirs.
SELECTIONS: dict[str, Callable[..., Mask]] = {
    "clip_cov": clip_cov_tokens,
    "kl_cov": kl_cov_tokens,
    "m2po": m2po_tokens,
}
