"""Off-policy correction: the engine that sampled is not quite the policy that is trained.

Two remedies from the ratio exp(old_log_probs - rollout_log_probs): weights on the loss
(importance sampling, truncated or masked) and a smaller mask (rejection). Neither has a
gradient. `log_ratios` are `old_log_probs - rollout_log_probs`, zero outside the mask of the
response tokens. The numbers that describe the gap are in `correction_metrics`.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algorithms.correction_metrics import (
    Metrics,
    engine_gap,
    rejection_metrics,
    weight_metrics,
)
from jaxrl_llm.algorithms.masked import masked_max, masked_mean, masked_sum
from jaxrl_llm.algorithms.ratios import bounded, log_ratio
from jaxrl_llm.config import AlgorithmConfig


def raw_weights(
    level: str, log_ratios: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """Returns importance weights before truncation, zero outside the mask.

    `token`: `exp(log_ratio)` of each token. `sequence`: `exp` of the row's sum, on each
    of its tokens. `none`: 1. Exponents are clipped to [-20, 20].

    Example:
      >>> log_ratios, mask = jnp.log(jnp.array([[2.0, 3.0]])), jnp.array([[True, True]])
      >>> print(raw_weights("token", log_ratios, mask), raw_weights("sequence", log_ratios, mask))
      [[2. 3.]] [[6. 6.]]
    """
    exponents = {
        "none": jnp.zeros_like(log_ratios),
        "token": bounded(log_ratios),
        "sequence": bounded(masked_sum(log_ratios, mask, -1))[:, None],
    }[level]
    return jnp.where(mask, jnp.exp(exponents), 0.0)


def correction_weights(
    config: AlgorithmConfig, log_ratios: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> tuple[Float[Array, "B T"], Metrics]:
    """Returns the weights that the config asks for, and their `rollout_corr/` metrics.

    `truncate` lowers weights above `correction_high` to it; `mask` makes weights outside
    [correction_low, correction_high] zero, the loss mask untouched. With
    `correction_normalize` the weights are divided by their mean: over tokens at token
    level, over sequences at sequence level; not by a mean of 1e-8 or less.

    Example:
      >>> log_ratios, mask = jnp.log(jnp.array([[1.0, 3.0]])), jnp.array([[True, True]])
      >>> weights, _ = correction_weights(AlgorithmConfig(correction="token"), log_ratios, mask)
      >>> print(weights)
      [[1. 2.]]
    """
    raw = raw_weights(config.correction, log_ratios, mask)
    if config.correction == "none":
        return raw, {}
    if config.correction_mode == "truncate":
        weights = jnp.minimum(raw, config.correction_high)
        low = 1.0 / config.correction_high if config.correction_high > 0 else math.inf
    else:
        low = config.correction_low
        weights = jnp.where((raw >= low) & (raw <= config.correction_high), raw, 0.0)
    metrics = weight_metrics(
        config.correction, weights, raw, log_ratios, mask, low, config.correction_high
    )
    if config.correction_mode == "mask":
        outside = (raw < low) | (raw > config.correction_high)
        metrics["rollout_corr/rollout_is_oob_ratio"] = masked_mean(outside * 1.0, mask)
    if config.correction_normalize:
        mean = metrics["rollout_corr/rollout_is_mean"]
        if config.correction == "sequence":
            mean = metrics["rollout_corr/rollout_is_seq_mean"]
        factor = jnp.where(mean > 1e-8, mean, 1.0)
        weights = weights / factor
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = factor
    return weights, metrics


def rejection_statistic(
    option: str, log_ratios: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """Returns the number by which `option` rejects, on each token; zero outside the mask.

    With `l` the log-ratio clipped to [-20, 20]: k1 is `-l`, k2 is `l**2 / 2`, k3 is
    `exp(l) - 1 - l`. `token_*` is the token's own, `seq_sum_*`, `seq_mean_*` and
    `seq_max_*` the row's.

    Example:
      >>> log_ratios, mask = jnp.array([[1.0, 3.0]]), jnp.array([[True, True]])
      >>> print(rejection_statistic("seq_mean_k1", log_ratios, mask))
      [[-2. -2.]]
    """
    level, _, estimator = option.rpartition("_")
    ratios = bounded(log_ratios)
    per_token = {
        "k1": -ratios,
        "k2": 0.5 * jnp.square(ratios),
        "k3": jnp.exp(ratios) - 1.0 - ratios,
    }[estimator]
    if level == "token":
        return jnp.where(mask, per_token, 0.0)
    reduce = {"seq_sum": masked_sum, "seq_mean": masked_mean, "seq_max": masked_max}[level]
    return jnp.where(mask, reduce(per_token, mask, -1)[:, None], 0.0)


def rejection(
    config: AlgorithmConfig, log_ratios: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> tuple[Bool[Array, "B T"], Metrics]:
    """Returns the tokens that every option of `config.rejections` keeps, and metrics.

    k1 options keep `log(low) <= statistic <= log(high)`: the bounds are ratios (low 0:
    none). The others keep `statistic <= high`. A `seq_` option keeps or rejects the row.

    Example:
      >>> config = AlgorithmConfig(
      ...     rejections=("token_k1",), rejection_lows=(0.5,), rejection_highs=(2.0,))
      >>> kept, _ = rejection(config, jnp.array([[0.1, 3.0]]), jnp.array([[True, True]]))
      >>> print(kept)
      [[ True False]]
    """
    kept = mask
    metrics: Metrics = {}
    options = zip(config.rejections, config.rejection_lows, config.rejection_highs, strict=True)
    for option, low, high in options:
        if option.endswith("k1"):
            low, high = (math.log(bound) if bound > 0 else -math.inf for bound in (low, high))
        else:
            low = -math.inf
        statistic = rejection_statistic(option, log_ratios, mask)
        passed = mask & (statistic >= low) & (statistic <= high)
        metrics |= rejection_metrics(f"rollout_rs_{option}", statistic, passed, mask, low, high)
        kept = kept & passed
    rejected = (mask & ~kept) * 1.0
    metrics["rollout_corr/rollout_rs_masked_fraction"] = masked_mean(rejected, mask)
    metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = masked_mean(
        jnp.max(rejected, axis=-1), jnp.any(mask, axis=-1)
    )
    return kept, metrics if config.rejections else {}


def correct(
    config: AlgorithmConfig,
    old_log_probs: Float[Array, "B T"],
    rollout_log_probs: Float[Array, "B T"],
    response_mask: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"], Metrics]:
    """Returns weights and mask for the loss, and the numbers that describe the gap.

    Weights, their mean and all metrics are over `response_mask`, before rejection. The
    number of surviving tokens is the denominator of the loss, so compute denominators
    from the mask returned here. Deviation: the default path of verl divides by the
    rejected tokens too.

    Weights are zero outside `response_mask`, and 1 inside without a correction.

    Example:
      >>> mask = jnp.array([[True, True]])
      >>> weights, loss_mask, metrics = correct(
      ...     AlgorithmConfig(correction="token", correction_high=1.5),
      ...     jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.5, 0.25]])), mask)
      >>> print(weights, loss_mask, metrics["training/rollout_probs_diff_max"])
      [[1.  1.5]] [[ True  True]] 0.25

    Reference: Truncated weights: Espeholt et al., V-trace, arXiv:1802.01561, section 4.1.
    """
    old_log_probs = jax.lax.stop_gradient(old_log_probs)
    rollout_log_probs = jax.lax.stop_gradient(rollout_log_probs)
    log_ratios = log_ratio(old_log_probs, rollout_log_probs, response_mask)
    weights, weight_numbers = correction_weights(config, log_ratios, response_mask)
    loss_mask, rejection_numbers = rejection(config, log_ratios, response_mask)
    gap = engine_gap(old_log_probs, rollout_log_probs, response_mask)
    return weights, loss_mask, gap | weight_numbers | rejection_numbers
