"""Off-policy correction: the engine that sampled is not quite the policy that is trained.

Two remedies from the ratio exp(old_log_probs - rollout_log_probs): weights on the loss (importance
sampling, truncated or masked) and a smaller mask (rejection). Neither has a gradient. `log_ratios`
are `old_log_probs - rollout_log_probs`, zero outside the mask of the response tokens. Metrics are
scalars over the response tokens of a batch, named as in verl; over an empty batch they are 0, and
`training/rollout_probs_diff_valid` says so.
"""

import math

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import masked
from jaxrl_llm.algorithms.kl import MAX_LOG_RATIO, clip_log_ratios
from jaxrl_llm.algorithms.masked import Mask, PerRow, PerToken, RowMask, Scalar
from jaxrl_llm.config import AlgorithmConfig, recipes

Metrics = dict[str, Scalar]


def correct(
    config: AlgorithmConfig,
    old_log_probs: PerToken,
    rollout_log_probs: PerToken,
    response_mask: Mask,
) -> tuple[PerToken, Mask, Metrics]:
    """Returns weights and mask for the loss, and the numbers that describe the gap.

    Weights are zero outside `response_mask`, and 1 inside without a correction; their mean and all
    metrics are over `response_mask`, before rejection. Compute denominators of the loss from the
    mask returned here. Deviation: by default verl divides by the rejected tokens too.
    Truncated weights: Espeholt et al., V-trace, arXiv:1802.01561, section 4.1.

    >>> weights, loss_mask, metrics = correct(
    ...     AlgorithmConfig(correction="token", correction_high=1.5),
    ...     jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.5, 0.25]])),
    ...     jnp.array([[True, True]]))
    >>> print(weights, loss_mask, metrics["training/rollout_probs_diff_max"])
    [[1.  1.5]] [[ True  True]] 0.25
    """
    old_log_probs = jax.lax.stop_gradient(old_log_probs)
    rollout_log_probs = jax.lax.stop_gradient(rollout_log_probs)
    old, rollout = masked.zero_outside(response_mask, old_log_probs, rollout_log_probs)
    log_ratios = old - rollout
    weights, weight_numbers = _correction_weights(config, log_ratios, response_mask)
    loss_mask, rejection_numbers = _rejection(config, log_ratios, rollout, response_mask)
    gap = engine_gap(old_log_probs, rollout_log_probs, response_mask)
    return weights, loss_mask, gap | weight_numbers | rejection_numbers


def _correction_weights(
    config: AlgorithmConfig, log_ratios: PerToken, mask: Mask
) -> tuple[PerToken, Metrics]:
    """Returns the weights that the config asks for, and their `rollout_corr/` metrics.

    Before truncation the raw weight of a token is `exp` of its log-ratio, or of their sum over the
    row. `truncate` lowers weights above `correction_high` to it; `mask` makes weights outside
    [correction_low, correction_high] zero, the loss mask untouched. With `correction_normalize`
    the weights are divided by their mean: over tokens at token level, over sequences at sequence
    level; not by a mean of 1e-8 or less.

    Means, `seq_*`, and at token level maximum and minimum, are of the applied weights, before
    normalization; at sequence level maximum and minimum are of the raw ones. Fractions beyond the
    bounds are of the raw weights. `std` and the effective sample size (a share, in [0, 1]) are of
    raw weights lowered to `correction_high`.
    """
    if config.correction == "none":
        return jnp.where(mask, jnp.ones_like(log_ratios), 0.0), {}
    rows, high = jnp.any(mask, axis=-1), config.correction_high
    sums = masked.sum(log_ratios, mask, -1)
    exponents = clip_log_ratios(log_ratios if config.correction == "token" else sums[:, None])
    raw = jnp.where(mask, jnp.exp(exponents), 0.0)
    lowered = jnp.minimum(raw, high)
    if config.correction_mode == "truncate":
        weights = lowered
        low = 1.0 / high if high > 0 else math.inf
    else:
        low = config.correction_low
        weights = jnp.where((raw >= low) & (raw <= high), raw, 0.0)
    mean = masked.mean(lowered, mask)
    spread = masked.mean(jnp.square(lowered), mask) - jnp.square(mean)
    relative_square = masked.mean(jnp.square(lowered / (mean + 1e-8)), mask)
    raw_means, means = masked.mean(raw, mask, -1), masked.mean(weights, mask, -1)
    if config.correction == "token":
        largest, smallest = masked.max(weights, mask), masked.min(weights, mask)
        compared, counted = raw, mask
    else:
        largest = jnp.exp(jnp.minimum(masked.max(sums, rows), MAX_LOG_RATIO))
        smallest = jnp.exp(jnp.minimum(masked.min(sums, rows), MAX_LOG_RATIO))
        compared, counted = raw_means, rows
    numbers = {
        "mean": masked.mean(weights, mask),
        "max": largest,
        "min": smallest,
        "std": jnp.sqrt(jnp.maximum(spread, 0.0)),
        "eff_sample_size": jnp.where(
            relative_square > 0.0, 1.0 / jnp.where(relative_square > 0.0, relative_square, 1.0), 0.0
        ),
        "ratio_fraction_high": masked.mean(compared > high, counted),
        "ratio_fraction_low": masked.mean(compared < low, counted),
        **_sequence_metrics(means, raw_means, 1.0, low, high, rows),
    }
    if config.correction_mode == "mask":
        numbers["oob_ratio"] = masked.mean((raw < low) | (raw > high), mask)
    if config.correction_normalize:
        mean = numbers["mean" if config.correction == "token" else "seq_mean"]
        factor = numbers["batch_norm_factor"] = jnp.where(mean > 1e-8, mean, 1.0)
        weights = weights / factor
    return weights, {f"rollout_corr/rollout_is_{key}": value for key, value in numbers.items()}


def binary_kl(log_probs: PerToken, other_log_probs: PerToken) -> PerToken:
    """Returns the larger of both KLs between two policies that tell one token from all others.

        max(D(p, q), D(q, p)),   D(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q))

    Probabilities are clipped to [1e-6, 1 - 1e-6]. A rare token may change its ratio much, a likely
    one little. Guo et al., KPop, 2026 (ringtech.notion.site/kpop), with a bound of 0.1.

    >>> half = jnp.full((1, 2), 0.5)
    >>> print(binary_kl(jnp.log(jnp.array([[0.5, 0.9]])), jnp.log(half)).round(2))
    [[0.   0.51]]
    """
    p, q = (jnp.clip(jnp.exp(x), 1e-6, 1.0 - 1e-6) for x in (log_probs, other_log_probs))
    own, rest = jnp.log(p / q), jnp.log1p(-p) - jnp.log1p(-q)
    return jnp.maximum(p * own + (1.0 - p) * rest, -q * own - (1.0 - q) * rest)


def _rejection(
    config: AlgorithmConfig, log_ratios: PerToken, rollout_log_probs: PerToken, mask: Mask
) -> tuple[Mask, Metrics]:
    """Returns the tokens that every option of `config.rejections` keeps, and metrics.

    With `l` the log-ratio clipped to [-20, 20], k1 is `-l`, k2 is `l**2 / 2`, k3 is
    `exp(l) - 1 - l`; of the token, or for a `seq_` option of the row, which it keeps or rejects.
    `token_binary_kl` is `binary_kl`. k1 options keep `log(low) <= k1 <= log(high)`: the bounds are
    ratios (low 0: no bound). The others keep values up to `high`. `masked_fraction` is the share of
    tokens rejected, `seq_masked_fraction` the share of sequences that lost at least one.
    """
    kept, rows = mask, jnp.any(mask, axis=-1)
    ratios = clip_log_ratios(log_ratios)
    estimates = {
        "k1": -ratios,
        "k2": 0.5 * jnp.square(ratios),
        "k3": jnp.exp(ratios) - 1.0 - ratios,
        "binary_kl": binary_kl(rollout_log_probs + log_ratios, rollout_log_probs),
    }
    reductions = {"seq_sum": masked.sum, "seq_mean": masked.mean, "seq_max": masked.max}
    metrics: Metrics = {}
    options = zip(config.rejections, config.rejection_lows, config.rejection_highs, strict=True)
    for option, low, high in options:
        level, estimator = recipes.rejection_parts(option)
        if estimator == "k1":
            low, high = (math.log(bound) if bound > 0 else -math.inf for bound in (low, high))
        else:
            low = -math.inf
        values = estimates[estimator]
        if level != "token":
            values = reductions[level](values, mask, -1)[:, None]
        values = jnp.where(mask, values, 0.0)
        passed = mask & (values >= low) & (values <= high)
        kept, rejected = kept & passed, mask & ~passed
        means = masked.mean(values, mask, -1)
        numbers = {
            "mean": masked.mean(values, mask),
            "max": masked.max(values, mask),
            "min": masked.min(values, mask),
            "std": jnp.sqrt(masked.variance(values, mask)),
            "fraction_high": masked.mean(values > high, mask),
            "fraction_low": masked.mean(values < low, mask),
            "masked_fraction": masked.mean(rejected, mask),
            "seq_masked_fraction": masked.mean(jnp.any(rejected, axis=-1), rows),
            **_sequence_metrics(means, means, 0.0, low, high, rows),
        }
        metrics |= {f"rollout_corr/rollout_rs_{option}_{key}": x for key, x in numbers.items()}
    if config.rejections:
        rejected = mask & ~kept
        metrics |= {
            "rollout_corr/rollout_rs_masked_fraction": masked.mean(rejected, mask),
            "rollout_corr/rollout_rs_seq_masked_fraction": masked.mean(
                jnp.any(rejected, axis=-1), rows
            ),
        }
    return kept, metrics


def _sequence_metrics(
    means: PerRow, compared: PerRow, expected: float, low: float, high: float, rows: RowMask
) -> Metrics:
    """Returns statistics of each sequence's mean; `compared` is what the bounds are for."""
    return {
        "seq_mean": masked.mean(means, rows),
        "seq_std": jnp.sqrt(masked.variance(means, rows)),
        "seq_max": masked.max(means, rows),
        "seq_min": masked.min(means, rows),
        "seq_max_deviation": masked.max(jnp.abs(means - expected), rows),
        "seq_fraction_high": masked.mean(compared > high, rows),
        "seq_fraction_low": masked.mean(compared < low, rows),
    }


def interpolated_log_probs(
    rollout_log_probs: PerToken, log_probs: PerToken, proximal_shares: PerToken
) -> PerToken:
    """Returns approximate log-probs of the policy when the step began, without a gradient.

        rollout_log_probs + share (log_probs - rollout_log_probs)

    The share of a token of version v in the step that makes version V + 1 of V is
    `(V - v) / (V + 1 - v)`: 0 for a token of the newest weights. It saves a pass over the step.
    AReaL's log-linear approximation of the proximal policy.

    >>> half = jnp.full((1, 1), 0.5)
    >>> print(interpolated_log_probs(-2.0 * half, -4.0 * half, half))
    [[-1.5]]
    """
    log_probs = jax.lax.stop_gradient(log_probs)
    return rollout_log_probs + proximal_shares * (log_probs - rollout_log_probs)


def interpolated_weights(
    config: AlgorithmConfig,
    old_log_probs: PerToken,
    rollout_log_probs: PerToken,
    response_mask: Mask,
) -> PerToken:
    """Returns the weights of `correct` for interpolated log-probs, row by row, without metrics.

    >>> half = jnp.full((1, 1), 0.5)
    >>> config = AlgorithmConfig(correction="token", correction_high=1.5)
    >>> print(interpolated_weights(config, half, -half, half > 0))
    [[1.5]]
    """
    ratios = jax.lax.stop_gradient(old_log_probs - rollout_log_probs)
    (ratios,) = masked.zero_outside(response_mask, ratios)
    return _correction_weights(config, ratios, response_mask)[0]


def engine_gap(old_log_probs: PerToken, rollout_log_probs: PerToken, mask: Mask) -> Metrics:
    """Returns the numbers that describe how far the engine is from the trained policy.

    Perplexities are means over sequences of `exp(-mean log-prob of the sequence)`; `kl` is the
    mean of `rollout - old`, `k3_kl` that of `exp(l) - l - 1` with `l = old - rollout`; `chi2_token`
    is the mean of `exp(2 l)` minus 1, `chi2_seq` the same with the sum of `l` over the sequence.
    Exponents are clipped to 20 in size. `rollout_probs_diff` is `|exp(old) - exp(rollout)|`: a mean
    below 0.005 is rounding, above 0.01 the engine computes something else.

    >>> old, rollout = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.25, 0.5]]))
    >>> metrics = engine_gap(old, rollout, jnp.array([[True, True]]))
    >>> print(metrics["rollout_corr/training_ppl"], metrics["training/rollout_probs_diff_mean"])
    2.0 0.125
    """
    rows = jnp.any(mask, axis=-1)
    old_log_probs, rollout_log_probs = masked.zero_outside(mask, old_log_probs, rollout_log_probs)
    ratios = old_log_probs - rollout_log_probs
    old_means = masked.mean(old_log_probs, mask, -1)
    rollout_means = masked.mean(rollout_log_probs, mask, -1)
    differences = rollout_means - old_means
    sequence_ratios = clip_log_ratios(masked.sum(ratios, mask, -1))
    numbers = {
        "training_ppl": masked.mean(jnp.exp(clip_log_ratios(-old_means)), rows),
        "training_log_ppl": masked.mean(-old_means, rows),
        "rollout_ppl": masked.mean(jnp.exp(clip_log_ratios(-rollout_means)), rows),
        "rollout_log_ppl": masked.mean(-rollout_means, rows),
        "kl": masked.mean(-ratios, mask),
        "k3_kl": masked.mean(jnp.exp(clip_log_ratios(ratios)) - ratios - 1.0, mask),
        "log_ppl_diff": masked.mean(differences, rows),
        "log_ppl_abs_diff": masked.mean(jnp.abs(differences), rows),
        "log_ppl_diff_max": masked.max(differences, rows),
        "log_ppl_diff_min": masked.min(differences, rows),
        "ppl_ratio": masked.mean(jnp.exp(clip_log_ratios(differences)), rows),
        "chi2_token": masked.mean(jnp.exp(2.0 * clip_log_ratios(ratios)), mask) - 1.0,
        "chi2_seq": masked.mean(jnp.exp(2.0 * sequence_ratios), rows) - 1.0,
    }
    old, rollout = jnp.exp(old_log_probs), jnp.exp(rollout_log_probs)
    difference = jnp.abs(old - rollout)
    old_centered = old - masked.mean(old, mask)
    rollout_centered = rollout - masked.mean(rollout, mask)
    spread = jnp.sqrt(masked.sum(old_centered**2, mask) * masked.sum(rollout_centered**2, mask))
    covariance = masked.sum(old_centered * rollout_centered, mask)
    return {f"rollout_corr/{name}": value for name, value in numbers.items()} | {
        "training/rollout_probs_diff_valid": jnp.any(mask) * 1.0,
        "training/rollout_probs_diff_mean": masked.mean(difference, mask),
        "training/rollout_probs_diff_max": masked.max(difference, mask),
        "training/rollout_probs_diff_std": jnp.sqrt(masked.variance(difference, mask)),
        "training/rollout_actor_probs_pearson_corr": jnp.where(
            spread > 0.0, covariance / jnp.where(spread > 0.0, spread, 1.0), 0.0
        ),
    }
