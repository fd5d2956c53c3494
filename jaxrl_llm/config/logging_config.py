"""Checkpoints, metrics, profiler and alerts; none of them changes the results of a healthy run."""

import dataclasses
from typing import Annotated, Literal

from jaxrl_llm.config.validation import (
    Address,
    ConfigGroup,
    Count,
    Every,
    Function,
    Name,
    Problems,
    Range,
)


class CheckpointConfig(ConfigGroup):
    """When a step is saved. A saved step holds everything that a resumed run needs."""

    # RL steps.
    every: Annotated[int, Range("[0, 2147483647]", "0: only after the last step")] = 0
    # RL steps between copies in the memory of the hosts, from which a run goes on after a crash.
    memory_every: Every = 0
    keep: Count = 2  # number of newest steps to keep
    best_metric: Name = ""  # the step with its best value is also saved and kept; "": none
    best_mode: Literal["max", "min"] = "max"
    on_failure: Literal["stop", "continue"] = "stop"  # if the disk is full or read-only
    # Maximum time from SIGTERM or SIGINT to the end of the process.
    grace_s: Annotated[float, Range("(0, inf]", "inf: no limit")] = 60.0


class MetricsConfig(ConfigGroup):
    """Outputs of metrics besides `WORKDIR/metrics.jsonl`, which is always written."""

    every: Count = 1
    console: bool = True
    tensorboard: bool = True
    # Trackers of experiments; "": off. Each needs the extra of its name.
    wandb_project: Name = ""
    mlflow_experiment: Name = ""
    trackio_project: Name = ""
    run_name: Name = ""  # for trackers; "": that of the folder
    rollouts_every: Every = 1  # RL steps between rollout dumps
    # Also dump tokens, log-probs and advantages: for colours in the viewer, and for a replay. About
    # 100 bytes a token.
    rollout_tokens: bool = False
    # If the disk is full or read-only. "continue": metrics are written later, dumps are lost.
    on_failure: Literal["stop", "continue"] = "stop"


class ProfilerConfig(ConfigGroup):
    """Steps that the JAX profiler records for TensorBoard, in `WORKDIR/profile`."""

    # RL steps.
    first_step: Annotated[int, Range("[0, 2147483647]", "0: no profile")] = 0
    num_steps: Count = 1


class AlertConfig(ConfigGroup):
    """When an alert fires, and what the run does then."""

    # The alert fires above or below this value; see the comment of the alert.
    limit: Annotated[float, Range("[0, inf]", "action='off': no such alert")]
    steps: Count = 1  # in a row, before it fires
    action: Literal["off", "continue", "skip", "stop"] = "continue"  # stop: after a save


# Alerts whose reading is known before the weights change, so that they can skip the whole update.
BEFORE_UPDATE = ("entropy", "log_prob_difference", "constant_reward", "reward_failures")
SKIPPABLE = ("nonfinite", "kl", *BEFORE_UPDATE)  # the first two skip within the update


class AlertsConfig(ConfigGroup):
    """Alerts on metrics that are checked in every step, and where they are sent."""

    # Above: share of updates with a loss or gradient that is not finite; all of them are skipped.
    nonfinite: AlertConfig = AlertConfig(limit=0.0, action="skip")
    # Above: KL of the policy to itself at the start of the step. "skip" skips that update and, as
    # the weights do not change, the same updates after it.
    kl: AlertConfig = AlertConfig(limit=0.5)
    reference_kl: AlertConfig = AlertConfig(limit=10.0)  # above: KL to the reference policy
    entropy: AlertConfig = AlertConfig(limit=1e-3)  # below: nats per token
    # Above: mean |p - q| of sampled tokens, between the engine and the training network.
    log_prob_difference: AlertConfig = AlertConfig(limit=0.1)
    constant_reward: AlertConfig = AlertConfig(limit=0.0, steps=10)  # at most: max - min of scores
    reward_failures: AlertConfig = AlertConfig(limit=0.1)  # above: share of failed calls
    staleness: AlertConfig = AlertConfig(limit=4.0)  # above: mean age of tokens, in versions
    # Above: share of a step in which a pool had nothing to do, because the other one is slower.
    rollout_idle: AlertConfig = AlertConfig(limit=0.5, steps=5)
    learner_idle: AlertConfig = AlertConfig(limit=0.5, steps=5)
    disk: AlertConfig = AlertConfig(limit=0.03)  # below: free share of the run's file system
    # Below: tokens/s relative to their median before; 5 steps, because a machine may be busy.
    throughput: AlertConfig = AlertConfig(limit=0.3, steps=5)
    webhook: Address = ""  # receives a POST with a JSON object; "": none
    function: Function = ""  # your own function, called with the same object; "": none

    def rules(self) -> Problems:
        for field in dataclasses.fields(self):
            alert = getattr(self, field.name)
            if not isinstance(alert, AlertConfig) or alert.action != "skip":
                continue
            if field.name not in SKIPPABLE:
                message = "'skip' comes too late, the update is taken when this is known; use"
                yield f"{field.name}.action", f"{message} 'continue' or 'stop'"
            elif alert.steps > 1 and field.name in ("nonfinite", "kl"):
                message = f"an update is skipped at once, got {alert.steps}; use 1"
                yield f"{field.name}.steps", message

    def skip_rules(
        self, *, engine_log_probs: bool, one_update: bool, calls_rewards: bool
    ) -> Problems:
        """Yields alerts whose action "skip" could never skip an update in an RL run."""
        reasons = {}
        if engine_log_probs:
            reasons["log_prob_difference"] = (
                "old_log_probs='rollout' takes the engine's for the policy's own; use 'recompute'"
            )
        elif one_update:
            reasons["kl"] = (
                "a step has one update, before which the policy has not moved;"
                " use 'continue' or 'stop', or a smaller trainer.minibatch_size"
            )
        if not calls_rewards:
            reasons["reward_failures"] = "no reward function is called; use 'off'"
        for name, reason in reasons.items():
            if getattr(self, name).action == "skip":
                yield f"alerts.{name}.action", f"'skip' would never skip: {reason}"
