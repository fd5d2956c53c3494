"""Metrics of a step, under verl's names where verl has one.

A statistic of no values (the mask left no token) is omitted.
"""

import collections
import math
import pathlib
import resource
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jaxrl_llm.config import RLConfig
from jaxrl_llm.sharding import kv_store_broadcast
from jaxrl_llm.types import Estimates, Predictions, Rewards, Rollouts

HostOrDevice = np.ndarray | Array
GIB = 2**30


def reward_metrics(rewards: Rewards, group_ids: Int[np.ndarray, " B"]) -> dict[str, float]:
    """Statistics of the scores, and the number of failed calls of reward functions.

    `critic/score/spread` is the largest minus the smallest of two or more scores;
    `training/groups/uniform_share` is the share of groups of two or more with equal scores.
    Rows that are left out are excluded from both; `reward/left_out_share` is their share.
    """
    kept_rows = rewards.valid_rows
    group_ids, kept_scores = group_ids[kept_rows], rewards.scores[kept_rows]
    order = np.argsort(group_ids, kind="stable")
    _, starts, sizes = np.unique(group_ids[order], return_index=True, return_counts=True)
    scores = kept_scores[order]
    is_uniform = np.zeros(0, bool)
    if scores.size:
        spread = np.maximum.reduceat(scores, starts) - np.minimum.reduceat(scores, starts)
        is_uniform = spread[sizes > 1] == 0
    metrics = _summary("critic/score", kept_scores)
    if rewards.excluded is not None:
        metrics["reward/left_out_share"] = float(rewards.excluded.mean())
    metrics["training/groups/uniform_share"] = float(is_uniform.mean()) if is_uniform.size else 0.0
    metrics["reward/num_failures"] = float(rewards.num_failures)
    if len(kept_scores) > 1 and rewards.terms:
        metrics["critic/score/spread"] = float(kept_scores.max() - kept_scores.min())
    metrics |= judge_metrics(rewards.votes)
    if rewards.num_calls:
        metrics["reward/failure_share"] = rewards.num_failures / rewards.num_calls
    return metrics


def judge_metrics(votes: Mapping[str, Float[np.ndarray, " B"]]) -> dict[str, float]:
    """Agreement of the votes of each judge, by `Rewards.votes`.

    `judge/NAME/disagreement` is the mean variance of votes on the same response, or pair, over the
    variance of all votes: one minus Krippendorff's alpha for intervals (2011, "Computing
    Krippendorff's Alpha-Reliability"), for as many votes on each. 0: votes on a response are always
    the same; 1: they differ as those on different responses do, and the judge says nothing about
    them. It has no value where all votes of a step are equal, or there is one on each.
    `judge/NAME/unparsable_share` is that of the votes that break the schema.
    """
    metrics = {}
    for name in dict.fromkeys(key.rpartition("/")[0] for key in votes):
        mean, square, variance, unparsable = (
            votes[f"{name}/{key}"] for key in ("mean", "square", "variance", "unparsable_share")
        )
        if not np.isnan(unparsable).all():
            metrics[f"judge/{name}/unparsable_share"] = float(np.nanmean(unparsable))
        is_repeated = ~np.isnan(variance)
        if not is_repeated.any():
            continue
        total = square[is_repeated].mean() - mean[is_repeated].mean() ** 2
        if total > 1e-12:
            metrics[f"judge/{name}/disagreement"] = float(variance[is_repeated].mean() / total)
    return metrics


def rollout_metrics(
    config: RLConfig,
    rollouts: Rollouts,
    rewards: Rewards,
    predictions: Predictions,
    estimates: Estimates,
    *,
    critic: bool,
) -> dict[str, float]:
    """Statistics of rewards, advantages, returns, values and lengths of a step.

    `critic/rewards` is the sum of the shaped rewards of a sequence. Advantages, returns and values
    are over the loss mask. `critic/score/SOURCE/mean` splits by data source; `reward/TERM/mean` is
    over the rows to which the term applies. Values require a critic, costs Safe-RLHF.
    `training/filter_groups/evicted_samples` counts the sequences that dynamic sampling replaced.
    """
    estimates, critic_values = kv_store_broadcast.device_get(
        (estimates, predictions.values if critic else ())
    )
    mask = np.asarray(estimates.loss_mask)
    returns = np.asarray(estimates.returns)[mask]
    kept_rows = rewards.valid_rows
    metrics = {
        **_summary("critic/rewards", np.asarray(estimates.shaped_rewards).sum(1)[kept_rows]),
        **_summary("critic/advantages", np.asarray(estimates.advantages)[mask]),
        **_summary("critic/returns", returns),
    }
    sources = np.array([rollouts.prompts[group].data_source for group in rollouts.group_ids])
    for source in sorted(set(sources.tolist())):
        if (source_rows := (sources == source) & kept_rows).any():
            metrics[f"critic/score/{source}/mean"] = float(rewards.scores[source_rows].mean())
    for name, term in rewards.terms.items():
        if (term_rows := (rewards.weights[name] != 0) & kept_rows).any():
            metrics[f"reward/{name}/mean"] = float(term[term_rows].mean())
    metrics |= episode_metrics(rollouts)
    prompts, responses = _lengths(rollouts)
    for percent in (10, 50, 90, 99) if responses.size else ():
        quantile = np.percentile(responses, percent, method="inverted_cdf")
        metrics[f"response_length/p{percent}"] = float(quantile)
    for name, lengths, max_length in (
        ("response", responses, config.rollout.max_response_tokens),
        ("prompt", prompts, config.data.max_prompt_tokens),
    ):
        metrics |= _summary(f"{name}_length", lengths)
        metrics[f"{name}_length/clip_ratio"] = float((lengths >= max_length).mean())
    if critic:
        values = np.asarray(critic_values)[mask]
        metrics |= _summary("critic/values", values)
        metrics["critic/vf_explained_var"] = explained_variance(values, returns)
    if config.algorithm.safe:
        metrics |= _summary("critic/cost", rewards.costs[kept_rows])
    if config.algorithm.dynamic_sampling:
        metrics["training/filter_groups/evicted_samples"] = float(rewards.num_dropped)
    if config.router.replay in ("compare", "rollout"):
        metrics["router/missing_routes"] = float(rollouts.missing_routes)
    return metrics


def episode_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Turns, tool calls and errors of the episodes of a step, each counted once; {} without any.

    `tool_calls/NAME`, `tool_errors/KIND` and `agent/rewritten` are totals of the step; `num_turns`,
    `tool_call_counts` and `timing_s/agent_loop/tool_calls` are per episode.
    """
    logs = list({id(log): log for log in rollouts.episode_logs}.values())
    metrics: dict[str, float] = {}
    for name, numbers in (
        ("num_turns", [log.num_turns for log in logs]),
        ("tool_call_counts", [log.calls.total() for log in logs]),
        ("timing_s/agent_loop/tool_calls", [log.seconds for log in logs]),
    ):
        metrics |= _summary(name, np.array(numbers))
    if logs:
        calls = sum((log.calls for log in logs), collections.Counter[str]())
        errors = sum((log.errors for log in logs), collections.Counter[str]())
        metrics |= {f"tool_calls/{name}": float(count) for name, count in sorted(calls.items())}
        metrics |= {f"tool_errors/{kind}": float(count) for kind, count in sorted(errors.items())}
        metrics["tool_errors/total"] = float(errors.total())
        metrics["agent/rewritten"] = float(sum(log.num_rewritten for log in logs))
        if any(log.num_requests for log in logs):  # black-box agents
            for name in ("branches", "unmatched", "requests"):
                total = sum(getattr(log, f"num_{name}") for log in logs)
                metrics[f"agent/{name}"] = float(total)
    return metrics


def explained_variance(
    values: Float[HostOrDevice, " numbers"], returns: Float[HostOrDevice, " numbers"]
) -> float:
    """`1 - var(returns - values) / (var(returns) + 1e-5)` with unbiased variances.

    1 for a perfect critic, 0 for one no better than the mean; NaN for fewer than two tokens.

    >>> returns = np.array([0.0, 1.0, 2.0])
    >>> [round(explained_variance(values, returns), 4) for values in (returns, np.zeros(3))]
    [1.0, 0.0]
    """
    values, returns = np.asarray(values, np.float64), np.asarray(returns, np.float64)
    if returns.size < 2:
        return float("nan")
    return float(1 - (returns - values).var(ddof=1) / (returns.var(ddof=1) + 1e-5))


def mean_metrics(groups: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each metric over the groups that have it; one transfer from the devices."""
    values = collections.defaultdict(list)
    for group in kv_store_broadcast.device_get(list(groups)):
        for name, value in group.items():
            values[name].append(value)
    return {name: float(np.mean(values[name])) for name in sorted(values)}


def throughput_metrics(
    rollouts: Rollouts,
    seconds: Mapping[str, float],
    num_devices: int,
    *,
    flops: float,
    peak_flops: float,
    critic: bool,
) -> dict[str, float]:
    """Tokens per second, milliseconds per token, and model FLOPs utilization.

    `perf/throughput` counts prompt and response tokens, per second and device;
    `timing_per_token_ms/gen` counts response tokens, other phases all tokens. `perf/mfu/actor` is
    `perf/mfu/update` unless a critic is trained too. `seconds` are `Clock.seconds()` of the step,
    `flops` those of all its updates, `peak_flops` the peak of all devices per second; NaN: not
    known, no utilization.
    """
    _, responses = _lengths(rollouts)
    total = float(rollouts.lengths.sum())
    metrics = {
        "perf/total_num_tokens": total,
        "perf/time_per_step": seconds["timing_s/step"],
        "perf/throughput": total / (seconds["timing_s/step"] * num_devices),
    }
    for name, value in seconds.items():
        phase = name.removeprefix("timing_s/")
        tokens = float(responses.sum()) if phase == "gen" else total
        if phase != "step" and tokens:
            metrics[f"timing_per_token_ms/{phase}"] = 1000.0 * value / tokens
    update_s = seconds.get("timing_s/update", math.inf)  # a step may skip its updates
    metrics["perf/tflops/update"] = flops / update_s / num_devices / 1e12
    utilization = flops / (update_s * peak_flops) if update_s > 0 else math.nan
    if not math.isnan(utilization):
        metrics["perf/mfu/update"] = utilization
        if not critic:
            metrics["perf/mfu/actor"] = utilization
    return metrics


def memory_metrics(devices: Collection[Any], planned_bytes: float = 0.0) -> dict[str, float]:
    """Memory in GiB: of the fullest device of this process, and of the host.

    `perf/max_memory_allocated_gb` is the peak since the process began,
    `perf/max_memory_reserved_gb` the limit of the allocator. Numbers that the platform does not
    report (CPU: all device memory) or that were not planned are omitted. `perf/cpu_memory_used_gb`
    is the resident memory of the process now, `perf/max_cpu_memory_used_gb` its peak.
    """
    local_devices = [device for device in devices if device.process_index == jax.process_index()]
    memory_stats = [
        device_stats for device in local_devices if (device_stats := device.memory_stats())
    ]
    metrics: dict[str, float] = {}
    for key, name in (("peak_bytes_in_use", "allocated"), ("bytes_limit", "reserved")):
        if memory_stats and all(key in device_stats for device_stats in memory_stats):
            max_bytes = max(device_stats[key] for device_stats in memory_stats)
            metrics[f"perf/max_memory_{name}_gb"] = max_bytes / GIB
            if planned_bytes and name == "allocated":
                metrics["perf/measured_to_planned_memory"] = max_bytes / planned_bytes
    if planned_bytes:
        metrics["perf/planned_memory_gb"] = planned_bytes / GIB
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics["perf/max_cpu_memory_used_gb"] = peak_kib * 1024 / GIB
    statm_file = pathlib.Path("/proc/self/statm")
    if statm_file.exists():
        resident_bytes = int(statm_file.read_text().split()[1]) * resource.getpagesize()
        metrics["perf/cpu_memory_used_gb"] = resident_bytes / GIB
    return metrics


def balance_metrics(
    lengths: Int[HostOrDevice, " B"], shards: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Tokens per data shard, before and after balancing.

    `global_seqlen/{min,max,minmax_diff}` are of equal contiguous blocks of the sequences,
    `balanced_{min,max}` of the sequences of each shard; sequences in no shard are not counted.

    >>> metrics = balance_metrics(np.array([4, 4, 1, 1]), [[0, 2], [1, 3]])
    >>> metrics["global_seqlen/minmax_diff"], metrics["global_seqlen/balanced_max"]
    (6.0, 5.0)
    """
    lengths = np.asarray(lengths)
    in_order = lengths[sorted(row for rows in shards for row in rows)]
    blocks = [int(block.sum()) for block in np.array_split(in_order, len(shards))]
    balanced = [int(lengths[list(rows)].sum()) for rows in shards]
    return {
        "global_seqlen/min": float(min(blocks)),
        "global_seqlen/max": float(max(blocks)),
        "global_seqlen/minmax_diff": float(max(blocks) - min(blocks)),
        "global_seqlen/balanced_min": float(min(balanced)),
        "global_seqlen/balanced_max": float(max(balanced)),
        "global_seqlen/mean": float(in_order.sum() / len(shards)),
    }


def _lengths(rollouts: Rollouts) -> tuple[Int[np.ndarray, " B"], Int[np.ndarray, " B"]]:
    """Prompt tokens and response tokens (including tool output) of each sequence."""
    prompts = np.array([len(prompt.tokens) for prompt in rollouts.prompts])[rollouts.group_ids]
    return prompts, rollouts.lengths - prompts


def _summary(name: str, numbers: Shaped[np.ndarray, " numbers"]) -> dict[str, float]:
    if not numbers.size:
        return {}
    numbers = numbers.astype(np.float64)
    return {f"{name}/{part}": float(getattr(numbers, part)()) for part in ("mean", "max", "min")}
