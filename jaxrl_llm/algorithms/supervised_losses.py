"""Losses of the supervised stages: imitation, reward models, direct preferences.

`denominators` and `num_pairs` (at least 1) are of the whole minibatch. A tie counts half in
`accuracy`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algorithms.aggregation import Denominators, LossAndMetrics, token_mean
from jaxrl_llm.algorithms.masked import Mask, PerToken, Scalar, masked_sum, zero_outside

PerPair = Float[Array, " pairs"]


def token_cross_entropy(
    log_probs: PerToken, loss_mask: Mask, denominators: Denominators
) -> LossAndMetrics:
    """Returns the mean over the minibatch's tokens of `-log_probs`, also as `sft/loss`.

    >>> loss, _ = token_cross_entropy(
    ...     jnp.array([[-1.0, -3.0, jnp.nan]]), jnp.array([[True, True, False]]),
    ...     Denominators(tokens=2.0, sequences=1.0))
    >>> print(loss)
    2.0
    """
    (log_probs,) = zero_outside(loss_mask, log_probs)
    loss = token_mean(-log_probs, loss_mask, denominators)
    return loss, {"sft/loss": jax.lax.stop_gradient(loss)}


def bradley_terry(
    chosen_scores: PerPair,
    rejected_scores: PerPair,
    pair_mask: Bool[Array, " pairs"],
    num_pairs: Scalar | float,
) -> LossAndMetrics:
    """Returns the loss of a reward model on pairs: `-log sigmoid(chosen - rejected)`.

    Ouyang et al., InstructGPT, arXiv:2203.02155, Eq. 1.

    >>> one = jnp.array([1.0])
    >>> loss, metrics = bradley_terry(one, one, one > 0, 1.0)
    >>> print(loss.round(4), metrics["reward_model/accuracy"])
    0.6931 0.5
    """
    chosen_scores, rejected_scores = zero_outside(pair_mask, chosen_scores, rejected_scores)
    margins = chosen_scores - rejected_scores
    loss = -masked_sum(jax.nn.log_sigmoid(margins), pair_mask) / num_pairs
    metrics = {
        "reward_model/loss": loss,
        "reward_model/accuracy": masked_sum(0.5 * (jnp.sign(margins) + 1.0), pair_mask) / num_pairs,
        "reward_model/margin": masked_sum(margins, pair_mask) / num_pairs,
    }
    return loss, jax.lax.stop_gradient(metrics)


def dpo(
    chosen_log_probs: PerPair,
    rejected_log_probs: PerPair,
    ref_chosen_log_probs: PerPair,
    ref_rejected_log_probs: PerPair,
    pair_mask: Bool[Array, " pairs"],
    num_pairs: Scalar | float,
    *,
    beta: float,
) -> LossAndMetrics:
    """Returns the loss of direct preference optimization.

        -log sigmoid(beta ((chosen - ref_chosen) - (rejected - ref_rejected)))

    Log-probs are sums over a response; `dpo/margin` is that of the implied rewards.
    Rafailov et al., arXiv:2305.18290, Eq. 7.

    >>> loss, metrics = dpo(
    ...     jnp.array([-1.0]), jnp.array([-4.0]), jnp.array([-2.0]), jnp.array([-3.0]),
    ...     jnp.array([True]), 1.0, beta=0.5)
    >>> print(f"{loss:.4f}", metrics["dpo/margin"])
    0.3133 1.0
    """
    chosen = beta * (chosen_log_probs - ref_chosen_log_probs)
    rejected = beta * (rejected_log_probs - ref_rejected_log_probs)
    loss, metrics = bradley_terry(chosen, rejected, pair_mask, num_pairs)
    return loss, {key.replace("reward_model/", "dpo/"): value for key, value in metrics.items()}
