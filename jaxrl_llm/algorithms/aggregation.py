"""Loss aggregation: from per-token losses to one number, summed over microbatches.

A loss is a sum divided by counts of the whole minibatch. The counts are known before the first
microbatch is computed and handed to each, so losses and gradients of the microbatches sum to those
of the minibatch, however it was cut.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import masked
from jaxrl_llm.algorithms.masked import Mask, PerToken, Scalar
from jaxrl_llm.config import AlgorithmConfig

# Shares of a minibatch: to be summed, not averaged, over its microbatches.
LossAndMetrics = tuple[Scalar, dict[str, Scalar]]
# For each token; the mean of a metric is reported as `actor/NAME`.
TokenLoss = tuple[PerToken, dict[str, PerToken | Mask]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Denominators:
    """Divisors of the sums of a minibatch."""

    tokens: Scalar  # tokens in the mask, at least 1
    sequences: Scalar  # rows with such a token, at least 1
    loss_scale: float = dataclasses.field(default=0.0, metadata={"static": True})  # 0: not set


def minibatch_denominators(mask: Mask, loss_scale: float = 0.0) -> Denominators:
    """Returns the counts that losses are divided by.

    `mask` has the tokens with a loss, of the whole minibatch. `loss_scale` is the constant of
    seq-mean-token-sum-norm: `config.algorithm.loss_scale`, or `config.rollout.max_response_tokens`
    where that is 0. Rows without such a token do not count. Deviation: verl's seq-mean modes count
    them.

    >>> counts = minibatch_denominators(jnp.array([[True, True], [True, False], [False, False]]))
    >>> print(counts.tokens, counts.sequences)
    3.0 2.0
    """
    return Denominators(
        tokens=jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32),
        sequences=jnp.maximum(jnp.sum(jnp.any(mask, axis=-1)), 1).astype(jnp.float32),
        loss_scale=loss_scale,
    )


def token_mean(per_token: PerToken, mask: Mask, denominators: Denominators) -> Scalar:
    """Returns the sum over tokens divided by the minibatch's tokens.

    >>> x, mask = jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.array([[True, True], [True, False]])
    >>> print(token_mean(x, mask, minibatch_denominators(mask)))
    2.0
    """
    return masked.sum(per_token, mask) / denominators.tokens


def _seq_mean_token_sum_norm(per_token: PerToken, mask: Mask, denominators: Denominators) -> Scalar:
    if not denominators.loss_scale > 0:
        raise ValueError(
            f"denominators.loss_scale: {denominators.loss_scale} is not positive;"
            " seq-mean-token-sum-norm divides by it, pass config.algorithm.loss_scale or"
            " config.rollout.max_response_tokens to minibatch_denominators"
        )
    return masked.sum(per_token, mask) / denominators.sequences / denominators.loss_scale


AGGREGATIONS: dict[str, Callable[[PerToken, Mask, Denominators], Scalar]] = {
    "token-mean": token_mean,
    "token-sum": lambda x, mask, _: masked.sum(x, mask),
    "seq-mean-token-sum": lambda x, mask, counts: masked.sum(x, mask) / counts.sequences,
    "seq-mean-token-mean": lambda x, mask, counts: (
        jnp.sum(masked.mean(x, mask, -1)) / counts.sequences
    ),
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
}


def aggregate(
    config: AlgorithmConfig, per_token: PerToken, mask: Mask, denominators: Denominators
) -> Scalar:
    """Returns one number for the tokens in the mask, as `config.aggregation` says.

        token-mean                 sum / tokens                         (arXiv:2503.14476, Eq. 8)
        token-sum                  sum
        seq-mean-token-sum         sum / sequences
        seq-mean-token-mean        sum over rows of each row's mean / sequences
                                                                        (arXiv:2402.03300, Eq. 3)
        seq-mean-token-sum-norm    sum / sequences / loss_scale         (arXiv:2503.20783)

    Each row must be one whole sequence. Deviation: verl divides by the padded length where no
    `loss_scale` is set, here it is a ValueError.

    >>> mask = jnp.array([[True, True]])
    >>> x, counts = jnp.array([[1.0, 2.0]]), minibatch_denominators(mask, loss_scale=10.0)
    >>> configs = [AlgorithmConfig(aggregation=name) for name in AGGREGATIONS]
    >>> print(*(aggregate(config, x, mask, counts) for config in configs))
    1.5 3.0 3.0 1.5 0.3
    """
    return AGGREGATIONS[config.aggregation](per_token, mask, denominators)


def policy_loss(
    config: AlgorithmConfig,
    per_token: PerToken,
    correction_weights: PerToken,
    loss_mask: Mask,
    denominators: Denominators,
    **token_means: PerToken | Mask,
) -> LossAndMetrics:
    """Returns the loss of a microbatch, weighted without gradient, and its metrics.

    `denominators` are of the whole minibatch. Of each further array the mean is reported as
    `actor/NAME`.

    >>> mask = jnp.array([[True, True]])
    >>> loss, metrics = policy_loss(
    ...     AlgorithmConfig(), jnp.array([[1.0, 2.0]]), jnp.array([[1.0, 0.5]]), mask,
    ...     minibatch_denominators(mask), pg_clipfrac=jnp.array([[True, False]]))
    >>> print(loss, metrics["actor/pg_clipfrac"])
    1.0 0.5
    """
    weights = jax.lax.stop_gradient(jnp.where(loss_mask, correction_weights, 0.0))
    loss = aggregate(config, per_token * weights, loss_mask, denominators)
    metrics = {"pg_loss": loss} | {
        name: token_mean(values.astype(jnp.float32), loss_mask, denominators)
        for name, values in token_means.items()
    }
    return loss, {f"actor/{name}": jax.lax.stop_gradient(x) for name, x in metrics.items()}
