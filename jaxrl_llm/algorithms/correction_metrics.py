"""Numbers that describe the gap between the engine that sampled and the trained policy.

All are scalars over the response tokens of a batch, named as in verl. Over an empty
batch they are 0, and `training/rollout_probs_diff_valid` says so.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algorithms.masked import (
    masked_max,
    masked_mean,
    masked_min,
    masked_sum,
    masked_variance,
    zero_outside,
)
from jaxrl_llm.algorithms.ratios import MAX_LOG_RATIO, bounded, log_ratio

Metrics = dict[str, Float[Array, ""]]


def engine_gap(
    old_log_probs: Float[Array, "B T"],
    rollout_log_probs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Metrics:
    """Returns the numbers that describe how far the engine is from the trained policy.

    Perplexities are means over sequences of `exp(-mean log-prob of the sequence)`;
    `kl` is the mean of `rollout - old`, `k3_kl` that of `exp(l) - l - 1` with
    `l = old - rollout`; `chi2_token` is the mean of `exp(2 l)` minus 1, `chi2_seq` the
    same with the sum of `l` over the sequence. Exponents are clipped to 20 in size.
    `rollout_probs_diff` is `|exp(old) - exp(rollout)|`: a mean below 0.005 is rounding, above
    0.01 the engine computes something else.

    Example:
      >>> old, rollout = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.25, 0.5]]))
      >>> metrics = engine_gap(old, rollout, jnp.array([[True, True]]))
      >>> print(metrics["rollout_corr/training_ppl"])
      2.0
      >>> print(metrics["training/rollout_probs_diff_mean"])
      0.125
    """
    rows = jnp.any(mask, axis=-1)
    ratios = log_ratio(old_log_probs, rollout_log_probs, mask)
    old_means = masked_mean(old_log_probs, mask, -1)
    rollout_means = masked_mean(rollout_log_probs, mask, -1)
    differences = rollout_means - old_means
    sequence_ratios = bounded(masked_sum(ratios, mask, -1))
    numbers = {
        "training_ppl": masked_mean(jnp.exp(bounded(-old_means)), rows),
        "training_log_ppl": masked_mean(-old_means, rows),
        "rollout_ppl": masked_mean(jnp.exp(bounded(-rollout_means)), rows),
        "rollout_log_ppl": masked_mean(-rollout_means, rows),
        "kl": masked_mean(-ratios, mask),
        "k3_kl": masked_mean(jnp.exp(bounded(ratios)) - ratios - 1.0, mask),
        "log_ppl_diff": masked_mean(differences, rows),
        "log_ppl_abs_diff": masked_mean(jnp.abs(differences), rows),
        "log_ppl_diff_max": masked_max(differences, rows),
        "log_ppl_diff_min": masked_min(differences, rows),
        "ppl_ratio": masked_mean(jnp.exp(bounded(differences)), rows),
        "chi2_token": masked_mean(jnp.exp(2.0 * bounded(ratios)), mask) - 1.0,
        "chi2_seq": masked_mean(jnp.exp(2.0 * sequence_ratios), rows) - 1.0,
    }
    old, rollout = map(jnp.exp, zero_outside(mask, old_log_probs, rollout_log_probs))
    difference = jnp.abs(old - rollout)
    old_centered = old - masked_mean(old, mask)
    rollout_centered = rollout - masked_mean(rollout, mask)
    spread = jnp.sqrt(masked_sum(old_centered**2, mask) * masked_sum(rollout_centered**2, mask))
    covariance = masked_sum(old_centered * rollout_centered, mask)
    return {f"rollout_corr/{name}": value for name, value in numbers.items()} | {
        "training/rollout_probs_diff_valid": jnp.any(mask) * 1.0,
        "training/rollout_probs_diff_mean": masked_mean(difference, mask),
        "training/rollout_probs_diff_max": masked_max(difference, mask),
        "training/rollout_probs_diff_std": jnp.sqrt(masked_variance(difference, mask)),
        "training/rollout_actor_probs_pearson_corr": jnp.where(
            spread > 0.0, covariance / jnp.where(spread > 0.0, spread, 1.0), 0.0
        ),
    }


def _sequence_metrics(
    means: Float[Array, " B"],
    compared: Float[Array, " B"],
    expected: float,
    low: float,
    high: float,
    rows: Bool[Array, " B"],
) -> Metrics:
    """Returns statistics of each sequence's mean; `compared` is what the bounds are for."""
    return {
        "seq_mean": masked_mean(means, rows),
        "seq_std": jnp.sqrt(masked_variance(means, rows)),
        "seq_max": masked_max(means, rows),
        "seq_min": masked_min(means, rows),
        "seq_max_deviation": masked_max(jnp.abs(means - expected), rows),
        "seq_fraction_high": _fraction(compared > high, rows),
        "seq_fraction_low": _fraction(compared < low, rows),
    }


def _fraction(flags: Bool[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, ""]:
    return masked_mean(flags.astype(jnp.float32), mask)


def weight_metrics(
    level: str,
    weights: Float[Array, "B T"],
    raw: Float[Array, "B T"],
    log_ratios: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    low: float,
    high: float,
) -> Metrics:
    """Returns statistics of importance weights.

    Means, `seq_*`, and at token level maximum and minimum, are of the applied weights;
    at sequence level maximum and minimum are of the raw ones. Fractions beyond `low` and
    `high` are of the raw weights. `std` and the effective sample size (a share, in
    [0, 1]) are of raw weights lowered to `high`.

    Args:
      level: `token` or `sequence`.
      weights: The weights that multiply the loss, before normalization.
      raw: The weights before truncation or masking.

    Example:
      >>> raw, mask = jnp.array([[1.0, 3.0]]), jnp.array([[True, True]])
      >>> metrics = weight_metrics(
      ...     "token", jnp.minimum(raw, 2.0), raw, jnp.log(raw), mask, 0.5, 2.0)
      >>> print(metrics["rollout_corr/rollout_is_mean"])
      1.5
      >>> print(metrics["rollout_corr/rollout_is_ratio_fraction_high"])
      0.5
    """
    rows = jnp.any(mask, axis=-1)
    lowered = jnp.minimum(raw, high)
    mean = masked_mean(lowered, mask)
    spread = masked_mean(jnp.square(lowered), mask) - jnp.square(mean)
    relative_square = masked_mean(jnp.square(lowered / (mean + 1e-8)), mask)
    raw_means, means = masked_mean(raw, mask, -1), masked_mean(weights, mask, -1)
    if level == "token":
        largest, smallest = masked_max(weights, mask), masked_min(weights, mask)
        compared, counted = raw, mask
    else:
        sums = masked_sum(log_ratios, mask, -1)
        largest = jnp.exp(jnp.minimum(masked_max(sums, rows), MAX_LOG_RATIO))
        smallest = jnp.exp(jnp.minimum(masked_min(sums, rows), MAX_LOG_RATIO))
        compared, counted = raw_means, rows
    numbers = {
        "mean": masked_mean(weights, mask),
        "max": largest,
        "min": smallest,
        "std": jnp.sqrt(jnp.maximum(spread, 0.0)),
        "eff_sample_size": jnp.where(
            relative_square > 0.0, 1.0 / jnp.where(relative_square > 0.0, relative_square, 1.0), 0.0
        ),
        "ratio_fraction_high": _fraction(compared > high, counted),
        "ratio_fraction_low": _fraction(compared < low, counted),
        **_sequence_metrics(means, raw_means, 1.0, low, high, rows),
    }
    return {f"rollout_corr/rollout_is_{key}": value for key, value in numbers.items()}


def rejection_metrics(
    name: str,
    statistic: Float[Array, "B T"],
    passed: Bool[Array, "B T"],
    mask: Bool[Array, "B T"],
    low: float,
    high: float,
) -> Metrics:
    """Returns statistics of one rejection option under `rollout_corr/NAME_`.

    `masked_fraction` is the share of tokens rejected, `seq_masked_fraction` the share of
    sequences that lost at least one.

    Example:
      >>> mask = jnp.array([[True, True]])
      >>> statistic = jnp.array([[0.1, 0.9]])
      >>> metrics = rejection_metrics("x", statistic, statistic < 0.5, mask, 0.0, 0.5)
      >>> print(metrics["rollout_corr/x_masked_fraction"])
      0.5
    """
    rows = jnp.any(mask, axis=-1)
    means = masked_mean(statistic, mask, -1)
    rejected = mask & ~passed
    numbers = {
        "mean": masked_mean(statistic, mask),
        "max": masked_max(statistic, mask),
        "min": masked_min(statistic, mask),
        "std": jnp.sqrt(masked_variance(statistic, mask)),
        "fraction_high": _fraction(statistic > high, mask),
        "fraction_low": _fraction(statistic < low, mask),
        "masked_fraction": _fraction(rejected, mask),
        "seq_masked_fraction": _fraction(jnp.any(rejected, axis=-1), rows),
        **_sequence_metrics(means, means, 0.0, low, high, rows),
    }
    return {f"rollout_corr/{name}_{key}": value for key, value in numbers.items()}
