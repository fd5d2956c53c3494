"""Metrics of a step, under verl's names where verl has one.

A statistic over nothing (no token survived the mask) is left out.
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
from jaxrl_llm.sharding import telling
from jaxrl_llm.types import Estimates, Predictions, Rewards, Rollouts

HostOrDevice = np.ndarray | Array
GIB = 2**30


def of_rewards(rewards: Rewards, group_ids: Int[np.ndarray, " B"]) -> dict[str, float]:
    """Returns statistics of the scores, and how many calls of reward functions failed.

    `critic/score/spread` is the largest minus the smallest of two or more scores;
    `training/groups/uniform_share` is the share of the groups of two or more with equal scores.
    Rows that are left out count in none of these; `reward/left_out_share` is their share.
    """
    kept = rewards.kept
    group_ids, kept_scores = group_ids[kept], rewards.scores[kept]
    order = np.argsort(group_ids, kind="stable")
    _, starts, sizes = np.unique(group_ids[order], return_index=True, return_counts=True)
    scores = kept_scores[order]
    uniform = np.zeros(0, bool)
    if scores.size:
        spread = np.maximum.reduceat(scores, starts) - np.minimum.reduceat(scores, starts)
        uniform = spread[sizes > 1] == 0
    found = _summary("critic/score", kept_scores)
    if rewards.left_out is not None:
        found["reward/left_out_share"] = float(rewards.left_out.mean())
    found["training/groups/uniform_share"] = float(uniform.mean()) if uniform.size else 0.0
    found["reward/num_failures"] = float(rewards.num_failures)
    if len(kept_scores) > 1 and rewards.terms:
        found["critic/score/spread"] = float(kept_scores.max() - kept_scores.min())
    if rewards.num_calls:
        found["reward/failure_share"] = rewards.num_failures / rewards.num_calls
    return found


def of_rollouts(
    config: RLConfig,
    rollouts: Rollouts,
    rewards: Rewards,
    predictions: Predictions,
    estimates: Estimates,
    *,
    critic: bool,
) -> dict[str, float]:
    """Returns rewards, advantages, returns, values and lengths of a step.

    `critic/rewards` is the sum over a sequence of the shaped rewards. Advantages, returns, values
    are over the loss mask. `critic/score/SOURCE/mean` splits by data source; `reward/TERM/mean` is
    over the rows that the term applies to. Values only with a critic, costs only with Safe-RLHF.
    `training/filter_groups/evicted_samples` counts the sequences that dynamic sampling replaced.
    """
    estimates, of_critic = telling.fetched((estimates, predictions.values if critic else ()))
    mask = np.asarray(estimates.loss_mask)
    returns = np.asarray(estimates.returns)[mask]
    kept = rewards.kept
    found = {
        **_summary("critic/rewards", np.asarray(estimates.shaped_rewards).sum(1)[kept]),
        **_summary("critic/advantages", np.asarray(estimates.advantages)[mask]),
        **_summary("critic/returns", returns),
    }
    sources = np.array([rollouts.prompts[group].data_source for group in rollouts.group_ids])
    for source in sorted(set(sources.tolist())):
        if (of_source := (sources == source) & kept).any():
            found[f"critic/score/{source}/mean"] = float(rewards.scores[of_source].mean())
    for name, term in rewards.terms.items():
        if (used := (rewards.weights[name] != 0) & kept).any():
            found[f"reward/{name}/mean"] = float(term[used].mean())
    found |= of_episodes(rollouts)
    prompts, responses = _lengths(rollouts)
    for p in (10, 50, 90, 99) if responses.size else ():
        quantile = np.percentile(responses, p, method="inverted_cdf")
        found[f"response_length/p{p}"] = float(quantile)
    for name, lengths, most in (
        ("response", responses, config.rollout.max_response_tokens),
        ("prompt", prompts, config.data.max_prompt_tokens),
    ):
        found |= _summary(f"{name}_length", lengths)
        found[f"{name}_length/clip_ratio"] = float((lengths >= most).mean())
    if critic:
        values = np.asarray(of_critic)[mask]
        found |= _summary("critic/values", values)
        found["critic/vf_explained_var"] = explained_variance(values, returns)
    if config.algorithm.safe:
        found |= _summary("critic/cost", rewards.costs[kept])
    if config.algorithm.dynamic_sampling:
        found["training/filter_groups/evicted_samples"] = float(rewards.num_dropped)
    if config.router.replay in ("compare", "rollout"):
        found["router/missing_routes"] = float(rollouts.missing_routes)
    return found


def of_episodes(rollouts: Rollouts) -> dict[str, float]:
    """Returns turns, calls and errors of episodes, each counted once; nothing without any.

    `tool_calls/NAME`, `tool_errors/KIND` and `agent/rewritten` count in the step; `num_turns`,
    `tool_call_counts` and `timing_s/agent_loop/tool_calls` are of an episode.
    """
    logs = list({id(log): log for log in rollouts.logs}.values())
    found: dict[str, float] = {}
    for name, numbers in (
        ("num_turns", [log.num_turns for log in logs]),
        ("tool_call_counts", [log.calls.total() for log in logs]),
        ("timing_s/agent_loop/tool_calls", [log.seconds for log in logs]),
    ):
        found |= _summary(name, np.array(numbers))
    if logs:
        calls = sum((log.calls for log in logs), collections.Counter[str]())
        errors = sum((log.errors for log in logs), collections.Counter[str]())
        found |= {f"tool_calls/{name}": float(count) for name, count in sorted(calls.items())}
        found |= {f"tool_errors/{kind}": float(count) for kind, count in sorted(errors.items())}
        found["tool_errors/total"] = float(errors.total())
        found["agent/rewritten"] = float(sum(log.num_rewritten for log in logs))
    return found


def explained_variance(
    values: Float[HostOrDevice, " numbers"], returns: Float[HostOrDevice, " numbers"]
) -> float:
    """Returns `1 - var(returns - values) / (var(returns) + 1e-5)`, variances unbiased.

    1 is a perfect critic, 0 one as good as the mean; NaN for fewer than two tokens.

    >>> returns = np.array([0.0, 1.0, 2.0])
    >>> [round(explained_variance(values, returns), 4) for values in (returns, np.zeros(3))]
    [1.0, 0.0]
    """
    values, returns = np.asarray(values, np.float64), np.asarray(returns, np.float64)
    if returns.size < 2:
        return float("nan")
    return float(1 - (returns - values).var(ddof=1) / (returns.var(ddof=1) + 1e-5))


def mean(groups: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the mean of each number over the groups that have it; reads the devices once."""
    found = collections.defaultdict(list)
    for group in telling.fetched(list(groups)):
        for name, value in group.items():
            found[name].append(value)
    return {name: float(np.mean(found[name])) for name in sorted(found)}


def of_speed(
    rollouts: Rollouts,
    seconds: Mapping[str, float],
    num_devices: int,
    *,
    flops: float,
    peak_flops: float,
    critic: bool,
) -> dict[str, float]:
    """Returns tokens per second, milliseconds per token, and the share of the devices' peak.

    `perf/throughput` counts prompt and response tokens, per second and device;
    `timing_per_token_ms/gen` counts response tokens, other phases all tokens. `perf/mfu/actor` is
    `perf/mfu/update` where no critic learns too. `seconds` are `Clock.seconds()` of the step,
    `flops` the operations of all its updates, `peak_flops` those of all devices in a second at
    best; NaN: not known, no shares.
    """
    _, responses = _lengths(rollouts)
    total = float(rollouts.lengths.sum())
    found = {
        "perf/total_num_tokens": total,
        "perf/time_per_step": seconds["timing_s/step"],
        "perf/throughput": total / (seconds["timing_s/step"] * num_devices),
    }
    for name, value in seconds.items():
        phase = name.removeprefix("timing_s/")
        tokens = float(responses.sum()) if phase == "gen" else total
        if phase != "step" and tokens:
            found[f"timing_per_token_ms/{phase}"] = 1000.0 * value / tokens
    time = seconds.get("timing_s/update", math.inf)  # a step may leave its updates out
    found["perf/tflops/update"] = flops / time / num_devices / 1e12
    share = flops / (time * peak_flops) if time > 0 else math.nan
    if not math.isnan(share):
        found["perf/mfu/update"] = share
        if not critic:
            found["perf/mfu/actor"] = share
    return found


def of_memory(devices: Collection[Any], planned_bytes: float = 0.0) -> dict[str, float]:
    """Returns memory in GiB: of the fullest of this process's devices, and of the host.

    `perf/max_memory_allocated_gb` is the peak since the process began,
    `perf/max_memory_reserved_gb` the limit of the allocator. What the platform does not report
    (CPU: all of the device's) or nobody planned is left out. `perf/cpu_memory_used_gb` is what the
    process holds now, `perf/max_cpu_memory_used_gb` its peak.
    """
    here = [device for device in devices if device.process_index == jax.process_index()]
    stats = [of_device for device in here if (of_device := device.memory_stats())]
    found: dict[str, float] = {}
    for key, name in (("peak_bytes_in_use", "allocated"), ("bytes_limit", "reserved")):
        if stats and all(key in of_device for of_device in stats):
            most = max(of_device[key] for of_device in stats)
            found[f"perf/max_memory_{name}_gb"] = most / GIB
            if planned_bytes and name == "allocated":
                found["perf/measured_to_planned_memory"] = most / planned_bytes
    if planned_bytes:
        found["perf/planned_memory_gb"] = planned_bytes / GIB
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found["perf/max_cpu_memory_used_gb"] = peak_kib * 1024 / GIB
    pages = pathlib.Path("/proc/self/statm")
    if pages.exists():
        resident = int(pages.read_text().split()[1]) * resource.getpagesize()
        found["perf/cpu_memory_used_gb"] = resident / GIB
    return found


def of_balance(
    lengths: Int[HostOrDevice, " B"], shards: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Returns tokens per data shard, before and after balancing.

    `global_seqlen/{min,max,minmax_diff}` are of equal contiguous blocks of the sequences,
    `balanced_{min,max}` of the sequences in each of the `shards`; those in none are not counted.

    >>> found = of_balance(np.array([4, 4, 1, 1]), [[0, 2], [1, 3]])
    >>> found["global_seqlen/minmax_diff"], found["global_seqlen/balanced_max"]
    (6.0, 5.0)
    """
    lengths = np.asarray(lengths)
    came = lengths[sorted(row for rows in shards for row in rows)]
    blocks = [int(block.sum()) for block in np.array_split(came, len(shards))]
    balanced = [int(lengths[list(rows)].sum()) for rows in shards]
    return {
        "global_seqlen/min": float(min(blocks)),
        "global_seqlen/max": float(max(blocks)),
        "global_seqlen/minmax_diff": float(max(blocks) - min(blocks)),
        "global_seqlen/balanced_min": float(min(balanced)),
        "global_seqlen/balanced_max": float(max(balanced)),
        "global_seqlen/mean": float(came.sum() / len(shards)),
    }


def _lengths(rollouts: Rollouts) -> tuple[Int[np.ndarray, " B"], Int[np.ndarray, " B"]]:
    """Returns tokens of the prompt and of what follows it (tool output too) in each sequence."""
    prompts = np.array([len(prompt.tokens) for prompt in rollouts.prompts])[rollouts.group_ids]
    return prompts, rollouts.lengths - prompts


def _summary(name: str, numbers: Shaped[np.ndarray, " numbers"]) -> dict[str, float]:
    if not numbers.size:
        return {}
    numbers = numbers.astype(np.float64)
    return {f"{name}/{part}": float(getattr(numbers, part)()) for part in ("mean", "max", "min")}
