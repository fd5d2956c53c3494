"""What a run keeps of itself and what it says: checkpoints, metrics, alerts.

The part of the config that decides no number of a healthy run. Its fields may change between two
starts of one run.
"""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Literal

from jaxrl_llm.config.ranges import (
    Address,
    Count,
    Every,
    Function,
    Group,
    Name,
    Range,
)
from jaxrl_llm.errors import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Group):
    """When a step is saved. One atomic step holds everything that a resumed run needs."""

    # RL steps.
    every: Annotated[int, Range("[0, 2147483647]", "0: only after the last step")] = 0
    keep: Count = 2  # newest steps
    best_metric: Name = ""  # the step with its best value is saved, and kept beside them; "": none
    best_mode: Literal["max", "min"] = "max"
    on_failure: Literal["stop", "continue"] = "stop"  # when the disk is full or read-only
    # From SIGTERM or SIGINT to the end of the process, saved or not.
    grace_s: Annotated[float, Range("(0, inf]", "inf: as long as it takes")] = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsConfig(Group):
    """Where numbers go, beside `WORKDIR/metrics.jsonl`, which is always written."""

    every: Count = 1
    console: bool = True
    tensorboard: bool = True
    wandb_project: Name = ""  # "": off
    rollouts_every: Every = 1  # RL steps between rollout dumps
    # When the disk is full or read-only; continue: numbers are written later, dumps are lost.
    on_failure: Literal["stop", "continue"] = "stop"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfilerConfig(Group):
    """A window of steps that the JAX profiler records, for TensorBoard, in `WORKDIR/profile`."""

    # RL steps.
    first_step: Annotated[int, Range("[0, 2147483647]", "0: no window")] = 0
    num_steps: Count = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlertConfig(Group):
    """When one alert fires, and what the run does then."""

    # What the reading may not pass; which side is bad stands at the alert.
    limit: Annotated[float, Range("[0, inf]", "action='off': no such alert")]
    steps: Count = 1  # in a row, before it fires
    action: Literal["off", "continue", "skip", "stop"] = "continue"  # stop: after a save


# Known before the weights change, so that the step's updates can be left out.
SKIPPABLE = (
    "nonfinite",
    "kl",
    "entropy",
    "log_prob_difference",
    "constant_reward",
    "reward_failures",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlertsConfig(Group):
    """What the run watches in every step, and whom it tells."""

    # Share of updates whose loss or gradient is not finite, above; none of them is ever taken.
    nonfinite: AlertConfig = AlertConfig(limit=0.0, action="skip")
    # Of the policy against itself when the step began, above; skip: that update and, as its
    # weights do not move, those like it.
    kl: AlertConfig = AlertConfig(limit=0.5)
    reference_kl: AlertConfig = AlertConfig(limit=10.0)  # against the reference policy, above
    entropy: AlertConfig = AlertConfig(limit=1e-3)  # nats per token, below
    # Mean |p - q| of sampled tokens between the engine and the training network, above.
    log_prob_difference: AlertConfig = AlertConfig(limit=0.1)
    constant_reward: AlertConfig = AlertConfig(limit=0.0, steps=10)  # max - min of scores, at most
    reward_failures: AlertConfig = AlertConfig(limit=0.1)  # share of calls, above
    disk: AlertConfig = AlertConfig(limit=0.03)  # free share of the run's file system, below
    # Tokens/s over their median before, below; so long that a busy machine alone is no alert.
    throughput: AlertConfig = AlertConfig(limit=0.3, steps=5)
    webhook: Address = ""  # a JSON object is posted to it; "": none
    function: Function = ""  # your own, called with the same object; "": none

    def rules(self) -> Iterator[Problem]:
        for field in dataclasses.fields(self):
            alert = getattr(self, field.name)
            if not isinstance(alert, AlertConfig) or alert.action != "skip":
                continue
            if field.name not in SKIPPABLE:
                yield (
                    f"{field.name}.action",
                    "'skip' comes too late, the update is taken when this is known; use"
                    " 'continue' or 'stop'",
                )
            elif alert.steps > 1 and field.name in ("nonfinite", "kl"):
                yield (
                    f"{field.name}.steps",
                    f"an update is skipped at once, got {alert.steps}; use 1",
                )
