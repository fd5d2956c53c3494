"""What a run keeps of itself and what it says: checkpoints, metrics, alerts.

The part of the config that decides no number of a healthy run. Its fields may change between two
starts of one run.
"""

import dataclasses
import urllib.parse
from collections.abc import Iterator
from typing import Literal

from jaxrl_llm.errors import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a step is saved. One atomic step holds everything that a resumed run needs."""

    every: int = 0  # RL steps; 0: only after the last step
    keep: int = 2  # newest steps
    best_metric: str = ""  # the step with its best value is saved, and kept beside them; "": none
    best_mode: Literal["max", "min"] = "max"
    on_failure: Literal["stop", "continue"] = "stop"  # when the disk is full or read-only
    grace_s: float = 60.0  # from SIGTERM or SIGINT to the end of the process, saved or not

    def problems(self) -> Iterator[Problem]:
        if self.every < 0:
            yield "every", f"must not be negative (0: only the last step), got {self.every}"
        if self.keep < 1:
            yield "keep", f"must be at least 1, got {self.keep}"
        if not self.grace_s > 0:
            yield "grace_s", f"must be positive (inf: as long as it takes), got {self.grace_s}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Where numbers go, beside `WORKDIR/metrics.jsonl`, which is always written."""

    every: int = 1
    console: bool = True
    tensorboard: bool = True
    wandb_project: str = ""  # "": off
    rollouts_every: int = 1  # RL steps between rollout dumps; 0: none
    # When the disk is full or read-only; continue: numbers are written later, dumps are lost.
    on_failure: Literal["stop", "continue"] = "stop"

    def problems(self) -> Iterator[Problem]:
        if self.every < 1:
            yield "every", f"must be at least 1, got {self.every}"
        if self.rollouts_every < 0:
            yield "rollouts_every", f"must not be negative (0: none), got {self.rollouts_every}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfilerConfig:
    """A window of steps that the JAX profiler records, for TensorBoard, in `WORKDIR/profile`."""

    first_step: int = 0  # RL steps; 0: no window
    num_steps: int = 1

    def problems(self) -> Iterator[Problem]:
        if self.first_step < 0:
            yield "first_step", f"must not be negative (0: no window), got {self.first_step}"
        if self.num_steps < 1:
            yield "num_steps", f"must be at least 1, got {self.num_steps}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlertConfig:
    """When one alert fires, and what the run does then."""

    limit: float  # what the reading may not pass; which side is bad stands at the alert
    steps: int = 1  # in a row, before it fires
    action: Literal["off", "continue", "skip", "stop"] = "continue"  # stop: after a save

    def problems(self) -> Iterator[Problem]:
        if not self.limit >= 0:
            yield "limit", f"must not be negative (action='off': no such alert), got {self.limit}"
        if self.steps < 1:
            yield "steps", f"must be at least 1, got {self.steps}"


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
class AlertsConfig:
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
    throughput: AlertConfig = AlertConfig(limit=0.5)  # tokens/s over their recent median, below
    webhook: str = ""  # http(s) address that a JSON object is posted to; "": none
    function: str = ""  # your own, called with the same object; "": none

    def problems(self) -> Iterator[Problem]:
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
        if self.webhook and urllib.parse.urlsplit(self.webhook).scheme not in ("http", "https"):
            yield "webhook", f"must begin with http:// or https://, got {self.webhook!r}"
        if self.function and ":" not in self.function:
            yield (
                "function",
                f"must be 'package.module:function' or 'path/file.py:function',"
                f" got {self.function!r}",
            )
