"""Training losses: policy, critic, SFT, reward models.

A row of [B, T] is one whole sequence, also when the network saw several packed together.
`denominators` and `num_pairs` (at least 1) are of the whole minibatch. A tie of two scores counts
half in the accuracy of a reward model.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algorithms import masked
from jaxrl_llm.algorithms.aggregation import (
    Denominators,
    LossAndMetrics,
    aggregate,
    policy_loss,
    token_mean,
)
from jaxrl_llm.algorithms.kl import clip_log_ratios, estimated_kl
from jaxrl_llm.algorithms.lookup import FunctionError, call_by_name, resolve
from jaxrl_llm.algorithms.masked import Mask, PerToken, Scalar, zero_outside
from jaxrl_llm.algorithms.policy_losses import POLICY_LOSSES
from jaxrl_llm.config import AlgorithmConfig
from jaxrl_llm.types import Minibatch

PerPair = Float[Array, " pairs"]

# Losses of the table with a gradient where all advantages are zero.
_PULL_BACK = frozenset({"kl_cov", "dro"})
# Fields of a minibatch that no policy loss reads.
_HIDDEN = frozenset({"tokens", "lengths", "cost_returns", "cost_values", "proximal_shares"})
# The names that `policy_objective` offers to a policy loss; `log_ratios` to those of the table.
POLICY_LOSS_INPUTS = frozenset(
    {field.name for field in dataclasses.fields(Minibatch)} - _HIDDEN
    | {"log_probs", "log_ratios", "entropies", "selection", "config", "denominators"}
)


def follows_advantages(config: AlgorithmConfig) -> bool:
    """Whether zero advantages mean a zero gradient for the policy.

    Not so with an entropy bonus, a KL in the loss, a loss on observations, or a loss that pulls the
    policy back by itself; a user's own loss may do that too.

    >>> follows_advantages(AlgorithmConfig()), follows_advantages(AlgorithmConfig(kl_in="loss"))
    (True, False)
    """
    known = config.policy_loss in POLICY_LOSSES and config.policy_loss not in _PULL_BACK
    others = config.entropy_coef or config.observation_coef
    return known and config.kl_in != "loss" and not others


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


def near_policy(config: AlgorithmConfig, log_probs: PerToken, minibatch: Minibatch) -> Mask:
    """Returns the loss mask without the off-policy sequences of negative advantage.

        A < 0 and mean_t(rollout_log_probs - log_probs) > off_policy_threshold

    The policy learns most from its own mistakes; those of a policy that is far away mislead it. The
    counts of the loss stay those of all tokens. DeepSeek-AI, DeepSeek-V3.2, arXiv:2512.02556,
    Sec. 3.1.

    >>> import dataclasses
    >>> one = jnp.ones((2, 1))
    >>> minibatch = dataclasses.replace(
    ...     Minibatch.zeros(2, 1), loss_mask=one > 0, advantages=jnp.array([[1.0], [-1.0]]))
    >>> print(near_policy(AlgorithmConfig(off_policy_threshold=0.5), -one, minibatch))
    [[ True]
     [False]]
    """
    mask = minibatch.loss_mask
    if not math.isfinite(config.off_policy_threshold):
        return mask
    gaps = minibatch.rollout_log_probs - jax.lax.stop_gradient(log_probs)
    gaps = masked.mean(gaps, mask, -1)[:, None]
    return mask & ((minibatch.advantages >= 0.0) | (gaps <= config.off_policy_threshold))


def observation_mask(response_mask: Mask, lengths: Int[Array, " B"]) -> Mask:
    """Returns the tokens of tools and environments: those after a response that are none.

    >>> print(observation_mask(jnp.array([[False, True, False, True, False]]), jnp.array([4])))
    [[False False  True False False]]
    """
    begun = jax.lax.cummax(response_mask.astype(jnp.int32), axis=1) > 0
    inside = jnp.arange(response_mask.shape[1]) < lengths[:, None]
    return begun & ~response_mask & inside


def observation_loss(
    config: AlgorithmConfig, log_probs: PerToken, mask: Mask, denominators: Denominators
) -> LossAndMetrics:
    """Returns `observation_coef` times the cross-entropy of the tokens of tools (ECHO).

    It is aggregated as the policy loss is; `denominators` are of the minibatch's `mask`. So every
    rollout teaches what an action leads to, also where no group has a signal.
    Shrivastava et al., ECHO, arXiv:2605.24517.

    >>> loss, metrics = observation_loss(
    ...     AlgorithmConfig(observation_coef=0.5), -jnp.ones((1, 2)), jnp.array([[True, False]]),
    ...     Denominators(1.0, 1.0))
    >>> print(loss, metrics["actor/observation_loss"])
    0.5 1.0
    """
    (log_probs,) = zero_outside(mask, log_probs)
    loss = aggregate(config, -log_probs, mask, denominators)
    return config.observation_coef * loss, {"actor/observation_loss": jax.lax.stop_gradient(loss)}


def policy_objective(
    config: AlgorithmConfig,
    log_probs: PerToken,
    entropies: PerToken,
    minibatch: Minibatch,
    selection: Mask,
    denominators: Denominators,
) -> LossAndMetrics:
    """Returns the policy's total loss on one microbatch.

        policy_loss - entropy_coef * entropy + kl_coef * kl       (kl only with kl_in="loss")

    With `kl_unbiased` each token's KL is multiplied by its ratio, through which a gradient flows
    too: samples of the old policy then estimate the KL of the new one, and its gradient
    (arXiv:2512.02556, Sec. 3.1).

    `entropies` are of the distributions the tokens were drawn from, with gradient if `entropy_coef`
    is not 0; `selection` has the rows of this microbatch of what `selection.select` chose.
    docs/custom_algorithm.md says what a user's loss may name and returns. Raises what
    `lookup.resolve` and `lookup.call_by_name` raise, or FunctionError for another result.

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
    kept = near_policy(config, log_probs, minibatch)
    available: dict[str, Any] = {
        **{name: array for name, array in vars(minibatch).items() if name not in _HIDDEN},
        "loss_mask": kept,
        "log_probs": log_probs,
        "entropies": entropies,
        "selection": selection,
        "config": config,
        "denominators": denominators,
    }
    known = config.policy_loss in POLICY_LOSSES
    if known:  # a user's function gets the arrays as they are
        names = ("log_probs", "old_log_probs", "rollout_log_probs", "advantages")
        inside = zero_outside(kept, *(available[name] for name in names))
        available |= zip(names, inside, strict=True)
        available["log_ratios"] = clip_log_ratios(
            available["log_probs"] - available["old_log_probs"]
        )
    where = f"config.algorithm.policy_loss={config.policy_loss!r}"
    function = resolve(config.policy_loss, POLICY_LOSSES, "policy loss")
    result = call_by_name(function, available, where, config.loss_args)
    if known and jnp.ndim(result[0]):
        weights = minibatch.correction_weights
        result = policy_loss(config, result[0], weights, kept, denominators, **result[1])
    if not (isinstance(result, tuple) and len(result) == 2 and jnp.shape(result[0]) == ()):
        raise FunctionError(
            f"{where}: returned {type(result).__name__}; a policy loss returns"
            " (scalar loss, dict of metrics)"
        )
    loss, metrics = result
    (entropies,) = zero_outside(mask, entropies)
    bonus = aggregate(config, entropies, mask, denominators)
    entropy = token_mean(entropies, mask, denominators)
    more = {"actor/entropy": entropy, "actor/entropy_loss": bonus}
    if math.isfinite(config.off_policy_threshold):
        more["actor/off_policy_masked"] = token_mean((mask & ~kept) * 1.0, mask, denominators)
    if config.entropy_coef:
        loss = loss - config.entropy_coef * bonus
    if config.kl_in == "loss":
        log_probs, ref_log_probs = zero_outside(mask, log_probs, minibatch.ref_log_probs)
        divergence = estimated_kl(config.kl_estimator, log_probs, ref_log_probs)
        if config.kl_unbiased:
            (old_log_probs,) = zero_outside(mask, minibatch.old_log_probs)
            divergence = divergence * jnp.exp(clip_log_ratios(log_probs - old_log_probs))
        more["actor/kl_loss"] = aggregate(config, divergence, mask, denominators)
        loss = loss + config.kl_coef * more["actor/kl_loss"]
    return loss, metrics | jax.lax.stop_gradient(more | {"actor/loss": loss})


def token_cross_entropy(
    log_probs: PerToken,
    likeliest: PerToken,
    loss_mask: Mask,
    denominators: Denominators,
    weighs_by_probability: bool = False,
) -> LossAndMetrics:
    """Returns the mean over the minibatch's tokens of `-log_probs`, also as `sft/loss`.

    `likeliest` is 1 at tokens than which none was likelier; `sft/token_accuracy` is its mean.
    `weighs_by_probability` makes it DFT, `-stop_gradient(exp(log_probs)) log_probs`: the gradient
    of a reward of 1 for each token, which an unlikely token does not dominate.
    Wu et al., DFT, arXiv:2508.05629.

    >>> loss, metrics = token_cross_entropy(
    ...     jnp.array([[-1.0, -3.0, jnp.nan]]), jnp.array([[1.0, 0.0, 1.0]]),
    ...     jnp.array([[True, True, False]]), Denominators(tokens=2.0, sequences=1.0))
    >>> print(loss, metrics["sft/token_accuracy"])
    2.0 0.5
    """
    log_probs, likeliest = zero_outside(loss_mask, log_probs, likeliest)
    weights = jax.lax.stop_gradient(jnp.exp(log_probs)) if weighs_by_probability else 1.0
    loss = token_mean(-weights * log_probs, loss_mask, denominators)
    accuracy = token_mean(likeliest, loss_mask, denominators)
    return loss, jax.lax.stop_gradient({"sft/loss": loss, "sft/token_accuracy": accuracy})


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
    loss = -masked.sum(jax.nn.log_sigmoid(margins), pair_mask) / num_pairs
    metrics = {
        "reward_model/loss": loss,
        "reward_model/accuracy": masked.sum(0.5 * (jnp.sign(margins) + 1.0), pair_mask) / num_pairs,
        "reward_model/margin": masked.sum(margins, pair_mask) / num_pairs,
    }
    return loss, jax.lax.stop_gradient(metrics)
