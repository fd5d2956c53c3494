"""Conditions on a metric that end a run, and the names of all metrics."""

import difflib
import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"\s*(\S+?)\s*(>=|<=|>|<)\s*(\S+)\s*")
# Parts of a name that stand for others, as in docs/metrics.md.
_PLACEHOLDERS = {
    "ROLE": "(?:actor|critic|cost_critic)",
    "JOB": "(?:sft|dpo|reward_model)",
    **dict.fromkeys(("SOURCE", "NAME", "PHASE", "MODULE", "KIND", "OPTION"), ".+"),
    **dict.fromkeys((r"K\b", r"P\b", r"E\b"), "[0-9]+"),
}

# The names in docs/metrics.md, whose tables say what they mean; a test compares both.
METRIC_NAMES = tuple("""
    JOB/grad_norm JOB/grad_norm/MODULE JOB/skipped_updates ROLE/grad_norm ROLE/grad_norm/MODULE
    ROLE/loss ROLE/skipped_updates ROLE/vf_clipfrac ROLE/vf_loss ROLE/vpred_mean actor/NAME
    actor/entropy actor/entropy_loss actor/kl_loss actor/loss actor/observation_loss
    actor/off_policy_masked actor/pg_clipfrac
    actor/pg_clipfrac_lower actor/pg_loss actor/ppo_kl actor/reward_kl_penalty
    actor/reward_kl_penalty_coeff agent/branches agent/requests agent/rewritten agent/unmatched
    alerts/NAME critic/advantages/max critic/advantages/mean critic/advantages/min
    critic/cost/max critic/cost/mean critic/cost/min critic/returns/max critic/returns/mean
    critic/returns/min critic/rewards/max critic/rewards/mean critic/rewards/min
    critic/score/SOURCE/mean critic/score/max critic/score/mean critic/score/min
    critic/score/spread critic/values/max critic/values/mean critic/values/min
    critic/vf_explained_var curriculum/answered curriculum/solved curriculum/unsolved
    distillation/forward_kl distillation/jsd distillation/k3 distillation/reverse_kl
    distillation/student_mass distillation/teacher_log_prob distillation/teacher_mass dpo/baseline
    dpo/loss global_seqlen/balanced_max global_seqlen/balanced_min
    global_seqlen/max global_seqlen/mean global_seqlen/min
    global_seqlen/minmax_diff judge/NAME/disagreement judge/NAME/unparsable_share
    logps/chosen logps/rejected num_turns/max num_turns/mean
    num_turns/min perf/cpu_memory_used_gb perf/idle_share/learner perf/idle_share/rollout
    perf/max_cpu_memory_used_gb perf/max_memory_allocated_gb perf/max_memory_reserved_gb
    perf/measured_to_planned_memory perf/mfu/actor perf/mfu/update perf/padding_share
    perf/goodput perf/planned_memory_gb perf/tflops/update perf/throughput perf/time_per_step
    perf/total_num_tokens prompt_length/clip_ratio prompt_length/max prompt_length/mean
    prompt_length/min replay/step reshard/bytes_moved reshard/copied_bytes reshard/extra_bytes
    reshard/lower_bound_bytes response_length/clip_ratio response_length/max
    response_length/mean response_length/min response_length/pP reward/NAME/mean
    reward/failure_share reward/left_out_share reward/num_failures reward_model/accuracy
    reward_model/loss reward_model/margin rewards/accuracies rewards/chosen rewards/margins
    rewards/rejected rollout/decode_tokens_per_s rollout/draft_acceptance
    rollout/prefill_tokens_per_s rollout/prefix_cache_hit_rate rollout/put_back
    rollout/reread_tokens rollout/slot_occupancy rollout/tokens_per_forward rollout_corr/NAME
    rollout_corr/rollout_is_NAME rollout_corr/rollout_rs_OPTION_NAME
    rollout_corr/rollout_rs_masked_fraction rollout_corr/rollout_rs_seq_masked_fraction
    router/balance_loss router/equal_routes router/idle_experts router/load/E router/max_vio
    router/max_vio/max router/missing_routes router/z_loss safe/cost safe/multiplier sft/loss
    sft/token_accuracy timing_per_token_ms/PHASE timing_s/PHASE
    timing_s/agent_loop/tool_calls/max timing_s/agent_loop/tool_calls/mean
    timing_s/agent_loop/tool_calls/min timing_s/step tool_call_counts/max tool_call_counts/mean
    tool_call_counts/min tool_calls/NAME tool_errors/KIND tool_errors/total
    training/filter_groups/evicted_samples training/groups/uniform_share
    training/masked_truncated_share training/masked_uniform_share training/off_policy/buffer
    training/off_policy/in_flight
    training/off_policy/partial_ratio training/off_policy/spans/max
    training/off_policy/spans/mean training/off_policy/staleness/max
    training/off_policy/staleness/mean training/off_policy/weights_age
    training/rollout_actor_probs_pearson_corr training/rollout_probs_diff_max
    training/rollout_probs_diff_mean training/rollout_probs_diff_std
    training/rollout_probs_diff_valid training/stop_when training/updates_left_out val-aux/NAME
    val-aux/response_length/mean val-aux/reward/num_failures val-core/SOURCE/maj@K
    val-core/SOURCE/mean@K val-core/SOURCE/pass@K val/NAME
""".split())  # fmt: skip  # noqa: SIM905


class StopCondition(NamedTuple):
    """A metric, and the values of it with which a run ends."""

    metric: str
    comparison: str
    threshold: float

    def __str__(self) -> str:
        return f"{self.metric} {self.comparison} {self.threshold:g}"

    def is_met(self, numbers: Mapping[str, float]) -> bool:
        """Whether the metric is among these and has such a value; NaN has not."""
        value = float(numbers.get(self.metric, math.nan))
        return _COMPARISONS[self.comparison](value, self.threshold)


def stop_condition(text: str) -> StopCondition | None:
    """The condition that a text means, for example "val/sft/loss < 0.5"; "" means none.

    Raises:
      ValueError: If it is no condition, or of a metric that no run has.
    """
    if not text:
        return None
    match = _CONDITION.fullmatch(text)
    try:
        threshold = float(match[3]) if match else math.nan
    except ValueError:
        threshold = math.nan
    if match is None or not math.isfinite(threshold):
        form = "'METRIC >= NUMBER', with >=, <=, > or <"
        raise ValueError(f"{text!r} is not {form}, for example 'val/sft/loss < 0.5'")
    metric = match[1]
    if not any(pattern.fullmatch(metric) for pattern in _patterns()):
        raise ValueError(f"no run has a metric {metric!r}; {advice(metric, METRIC_NAMES)}")
    return StopCondition(metric, match[2], threshold)


def advice(metric: str, names: Sequence[str]) -> str:
    """The names that are most like one that does not exist, as the end of a message."""
    nearest = difflib.get_close_matches(metric, names, n=3, cutoff=0.5)
    if not nearest:
        return "docs/metrics.md lists all metrics"
    return f"did you mean {' or '.join(map(repr, nearest))}? docs/metrics.md lists all metrics"


@functools.cache
def _patterns() -> Iterable[re.Pattern[str]]:
    placeholder = re.compile("|".join(_PLACEHOLDERS))
    values = {name.removesuffix(r"\b"): value for name, value in _PLACEHOLDERS.items()}
    return [
        re.compile(placeholder.sub(lambda match: values[match[0]], re.escape(name)))
        for name in METRIC_NAMES
    ]
