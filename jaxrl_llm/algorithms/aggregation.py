"""From one number a token to one number a minibatch, as a sum over its microbatches.

A loss is a sum divided by counts of the whole minibatch. The counts are known before
the first microbatch is computed and handed to each, so the sum of the microbatches'
losses, and of their gradients, is the minibatch's, however it was cut.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algorithms.masked import masked_mean, masked_sum
from jaxrl_llm.config import AlgorithmConfig


@dataclasses.dataclass(frozen=True)
class Denominators:
    """What the sums of a minibatch are divided by."""

    tokens: Float[Array, ""]  # tokens in the mask, at least 1
    sequences: Float[Array, ""]  # rows with such a token, at least 1
    loss_scale: float = 0.0  # constant divisor of seq-mean-token-sum-norm; 0: not set


jax.tree_util.register_dataclass(
    Denominators, data_fields=["tokens", "sequences"], meta_fields=["loss_scale"]
)


def minibatch_denominators(mask: Bool[Array, "B T"], loss_scale: float = 0.0) -> Denominators:
    """Returns the counts that losses are divided by.

    Padding rows and rows that rejection emptied count neither as sequences nor tokens.
    Deviation: verl's seq-mean modes count them.

    Args:
      mask: Tokens with a loss, of the whole minibatch.
      loss_scale: Constant of seq-mean-token-sum-norm: `config.algorithm.loss_scale`, or
        `config.rollout.max_response_tokens` where that is 0.

    Example:
      >>> mask = jnp.array([[True, True], [True, False], [False, False]])
      >>> counts = minibatch_denominators(mask)
      >>> print(counts.tokens, counts.sequences)
      3.0 2.0
    """
    return Denominators(
        tokens=jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32),
        sequences=jnp.maximum(jnp.sum(jnp.any(mask, axis=-1)), 1).astype(jnp.float32),
        loss_scale=loss_scale,
    )


def token_mean(
    per_token: Float[Array, "B T"], mask: Bool[Array, "B T"], denominators: Denominators
) -> Float[Array, ""]:
    """Returns the sum over tokens divided by the minibatch's tokens (arXiv:2503.14476, Eq. 8).

    Example:
      >>> x, mask = jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.array([[True, True], [True, False]])
      >>> print(token_mean(x, mask, minibatch_denominators(mask)))
      2.0
    """
    return masked_sum(per_token, mask) / denominators.tokens


def token_sum(
    per_token: Float[Array, "B T"], mask: Bool[Array, "B T"], denominators: Denominators
) -> Float[Array, ""]:
    """Returns the sum over tokens, undivided.

    Example:
      >>> x, mask = jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.array([[True, True], [True, False]])
      >>> print(token_sum(x, mask, minibatch_denominators(mask)))
      6.0
    """
    del denominators
    return masked_sum(per_token, mask)


def seq_mean_token_sum(
    per_token: Float[Array, "B T"], mask: Bool[Array, "B T"], denominators: Denominators
) -> Float[Array, ""]:
    """Returns the sum over tokens divided by the minibatch's sequences.

    Example:
      >>> x, mask = jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.array([[True, True], [True, False]])
      >>> print(seq_mean_token_sum(x, mask, minibatch_denominators(mask)))
      3.0
    """
    return masked_sum(per_token, mask) / denominators.sequences


def seq_mean_token_mean(
    per_token: Float[Array, "B T"], mask: Bool[Array, "B T"], denominators: Denominators
) -> Float[Array, ""]:
    """Returns the mean over sequences of each one's mean over tokens (arXiv:2402.03300, Eq. 3).

    Each row must be one whole sequence.

    Example:
      >>> x, mask = jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.array([[True, True], [True, False]])
      >>> print(seq_mean_token_mean(x, mask, minibatch_denominators(mask)))
      2.25
    """
    return jnp.sum(masked_mean(per_token, mask, -1)) / denominators.sequences


def seq_mean_token_sum_norm(
    per_token: Float[Array, "B T"], mask: Bool[Array, "B T"], denominators: Denominators
) -> Float[Array, ""]:
    """Returns the sum over tokens divided by sequences and by a constant (arXiv:2503.20783).

    Deviation: verl divides by the padded length where no constant is set, here it is an error.

    Raises:
      ValueError: `denominators.loss_scale` is not positive.

    Example:
      >>> x, mask = jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.array([[True, True], [True, False]])
      >>> print(seq_mean_token_sum_norm(x, mask, minibatch_denominators(mask, loss_scale=10.0)))
      0.3
    """
    if not denominators.loss_scale > 0:
        raise ValueError(
            f"denominators.loss_scale: {denominators.loss_scale} is not positive;"
            " seq-mean-token-sum-norm divides by it, pass config.algorithm.loss_scale or"
            " config.rollout.max_response_tokens to minibatch_denominators"
        )
    return seq_mean_token_sum(per_token, mask, denominators) / denominators.loss_scale


Aggregation = Callable[[Float[Array, "B T"], Bool[Array, "B T"], Denominators], Float[Array, ""]]
# Shares of a minibatch: to be summed, not averaged, over its microbatches.
LossAndMetrics = tuple[Float[Array, ""], dict[str, Float[Array, ""]]]
# For each token; the mean of a metric is reported as `actor/NAME`.
TokenLoss = tuple[Float[Array, "B T"], dict[str, Float[Array, "B T"] | Bool[Array, "B T"]]]

AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": token_mean,
    "token-sum": token_sum,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
}


def aggregate(
    config: AlgorithmConfig,
    per_token: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    denominators: Denominators,
) -> Float[Array, ""]:
    """Returns `per_token` aggregated as `config.aggregation` says.

    Example:
      >>> mask = jnp.array([[True, True]])
      >>> print(aggregate(AlgorithmConfig(), jnp.array([[1.0, 2.0]]), mask,
      ...                 minibatch_denominators(mask)))
      1.5
    """
    return AGGREGATIONS[config.aggregation](per_token, mask, denominators)


def policy_loss(
    config: AlgorithmConfig,
    per_token: Float[Array, "B T"],
    correction_weights: Float[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    denominators: Denominators,
    **token_means: Float[Array, "B T"] | Bool[Array, "B T"],
) -> LossAndMetrics:
    """Returns the loss of a microbatch, weighted without gradient, and its metrics.

    Args:
      denominators: Of the whole minibatch.
      **token_means: Per token, what is reported as a mean under `actor/NAME`.

    Example:
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
