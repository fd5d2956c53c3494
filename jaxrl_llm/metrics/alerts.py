"""Alerts: thresholds on the metrics of a run, and the actions when one is crossed.

An alert that fires is logged, is 1 in the metrics (`alerts/NAME`), and is sent to a webhook or a
user's function by a thread of its own, so that neither can delay training.
"""

import collections
import contextlib
import functools
import json
import math
import operator
import os
import queue
import shutil
import statistics
import threading
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from absl import logging

from jaxrl_llm.algorithms import lookup
from jaxrl_llm.config import AlertsConfig, ConfigError
from jaxrl_llm.config.logging_config import BEFORE_UPDATE, AlertConfig
from jaxrl_llm.sharding import kv_store_broadcast
from jaxrl_llm.storage import files

Numbers = Mapping[str, Any]

WEBHOOK_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 10.0  # to send the remaining messages when the run ends
QUEUE_LENGTH = 64
SPEED_STEPS = 20  # window of the median throughput
SPEED_MIN_STEPS = 5
# Depend on the machine, not the seed: not in the checkpoint, a resumed run counts from zero.
MACHINE_DEPENDENT = ("disk", "throughput", "rollout_idle", "learner_idle")

# Whether a reading has crossed its limit; false for NaN, which `nonfinite` reports.
_COMPARISONS = {"above": operator.gt, "below": operator.lt, "at most": operator.le}


class Alert(NamedTuple):
    """The metrics that an alert reads and the texts of its message."""

    quantity: str
    remedy: str
    metric_names: tuple[str, ...] = ()  # metrics; the last one present is the reading
    comparison: str = "above"  # side of the limit on which it fires, a key of `_COMPARISONS`


ALERTS: Mapping[str, Alert] = {
    "nonfinite": Alert(
        "loss, gradient or updated weights not finite (1: so)",
        "the update was not taken; lower the learning rate, look at the step's rollouts and at the"
        " optimizer's eps and weight_decay",
    ),
    "kl": Alert(
        "KL of the policy against itself when the step began",
        "lower the learning rate or the number of epochs",
        ("actor/ppo_kl",),
    ),
    "reference_kl": Alert(
        "KL against the reference policy",
        "raise algorithm.kl_coef or lower the learning rate",
        ("actor/reward_kl_penalty", "actor/kl_loss"),
    ),
    "entropy": Alert(
        "entropy in nats per token",
        "raise algorithm.clip_high or algorithm.entropy_coef, or lower the learning rate",
        ("actor/entropy",),
        "below",
    ),
    "log_prob_difference": Alert(
        "mean |p - q| of sampled tokens between rollout and training",
        "set rollout.dtype='float32', or correct for it (algorithm.correction)",
        ("training/rollout_probs_diff_mean",),
    ),
    "constant_reward": Alert(
        "largest minus smallest score of the step",
        "nothing can be learned from equal scores; look at the rollouts and the reward function",
        ("critic/score/spread",),
        "at most",
    ),
    "reward_failures": Alert(
        "share of reward calls that failed",
        "the log names the first of them",
        ("reward/failure_share",),
    ),
    "staleness": Alert(
        "mean age of sampled tokens in versions of the weights",
        "lower trainer.max_staleness, or give rollout more devices",
        ("training/off_policy/staleness/mean",),
    ),
    "rollout_idle": Alert(
        "share of the step in which rollout's devices had nothing to do",
        "give the learner more of the devices, or raise trainer.max_staleness",
        ("perf/idle_share/rollout",),
    ),
    "learner_idle": Alert(
        "share of the step in which the learner waited for samples",
        "give rollout more of the devices, or raise trainer.max_staleness",
        ("perf/idle_share/learner",),
    ),
    "disk": Alert(
        "free share of the run's file system",
        "remove what is not needed before the next checkpoint fails",
        comparison="below",
    ),
    "throughput": Alert(
        f"tokens/s over the median of the last {SPEED_STEPS} steps that were not slow",
        "look for other work on this machine",
        comparison="below",
    ),
}


class Alerts(contextlib.AbstractContextManager["Alerts"]):
    """Checks the metrics of each step; the state counts consecutive bad steps per alert."""

    def __init__(
        self, config: AlertsConfig, workdir: str | os.PathLike[str], stop: Callable[[str], None]
    ):
        """Starts the sender thread; `stop` is called with the reason when an alert ends the run."""
        self._config, self._workdir, self._stop = config, workdir, stop
        self._consecutive = dict.fromkeys(ALERTS, 0)
        self._speeds: collections.deque[float] = collections.deque(maxlen=SPEED_STEPS)
        senders: list[Callable[[Numbers], Any]] = []
        if config.webhook and jax.process_index() == 0:  # sends for all processes
            senders.append(functools.partial(_post, config.webhook))
        if config.function and jax.process_index() == 0:
            senders.append(lookup.resolve(config.function, {}, "alert function"))
        self._messages: queue.Queue[Numbers | None] = queue.Queue(QUEUE_LENGTH)
        self._thread = threading.Thread(
            target=_send_messages, args=(senders, self._messages), name="alerts", daemon=True
        )
        if senders:
            self._thread.start()

    def allow_update(self, numbers: Numbers) -> bool:
        """False if an alert with action "skip" forbids the update of this step.

        Waits for the devices only if such an alert reads a metric that they compute.
        """
        skips = [name for name in BEFORE_UPDATE if self._rule(name).action == "skip"]
        metric_names = {number for name in skips for number in ALERTS[name].metric_names}
        readings = _readings(
            kv_store_broadcast.device_get({k: v for k, v in numbers.items() if k in metric_names})
        )
        return not any(
            self._consecutive[name] + 1 >= self._rule(name).steps and self._is_bad(name, readings)
            for name in skips
        )

    def check(self, step: int, numbers: Numbers) -> dict[str, float]:
        """Evaluates all alerts: returns `alerts/NAME`, 1 if firing, and performs their actions.

        `metric_names` are all metrics of the step, including token counts and phase times.
        """
        readings = _readings(numbers)
        for name, number in numbers.items():
            # If the KL alert may skip updates, a skipped one need not have been non-finite.
            skipped_by_kl = name == "actor/skipped_updates" and self._rule("kl").action == "skip"
            if name.endswith("/skipped_updates") and number and not skipped_by_kl:
                readings["nonfinite"] = 1.0
        try:
            if not files.in_bucket(self._workdir):
                usage = shutil.disk_usage(self._workdir)
                readings["disk"] = usage.free / usage.total
        except OSError as error:  # the next write there reports the cause
            logging.warning("alerts: free space of %s is not known: %s", self._workdir, error)
        seconds = numbers["timing_s/step"] - numbers.get("timing_s/testing", 0.0)
        speed = numbers["perf/total_num_tokens"] / seconds
        if len(self._speeds) >= SPEED_MIN_STEPS:
            readings["throughput"] = speed / statistics.median(self._speeds)
        # A slow step must not lower the median of normal speed before the alert has fired for it.
        rule = self._rule("throughput")
        if (
            not self._is_bad("throughput", readings)
            or self._consecutive["throughput"] >= rule.steps
        ):
            self._speeds.append(speed)
        metrics = {}
        for name in ALERTS:
            rule = self._rule(name)
            if rule.action == "off":
                continue
            is_bad = self._is_bad(name, readings)
            self._consecutive[name] = self._consecutive[name] + 1 if is_bad else 0
            fires = self._consecutive[name] >= rule.steps
            metrics[f"alerts/{name}"] = float(fires)
            if fires:
                self._fire(name, rule, step, readings[name])
        return metrics

    def get_state(self) -> dict[str, int]:
        return {
            name: count
            for name, count in self._consecutive.items()
            if name not in MACHINE_DEPENDENT
        }

    def set_state(self, state: Mapping[str, int]) -> None:
        self._consecutive |= {name: count for name, count in state.items() if name in ALERTS}

    def __exit__(self, *exception: Any) -> None:
        """Waits up to `CLOSE_TIMEOUT_S` for unsent messages, then drops the rest."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(queue.Full):
            self._messages.put(None, timeout=CLOSE_TIMEOUT_S)
            self._thread.join(CLOSE_TIMEOUT_S)
        with contextlib.suppress(queue.Empty):
            while self._thread.is_alive():
                self._messages.get_nowait()
        self._messages.put_nowait(None)  # the thread ends after the message in flight

    def _rule(self, name: str) -> AlertConfig:
        return getattr(self._config, name)

    def _is_bad(self, name: str, readings: Mapping[str, float]) -> bool:
        is_bad = _COMPARISONS[ALERTS[name].comparison]
        return name in readings and is_bad(readings[name], self._rule(name).limit)

    def _fire(self, name: str, rule: AlertConfig, step: int, reading: float) -> None:
        alert, count = ALERTS[name], self._consecutive[name]
        text = (
            f"alert {name} in step {step}: {alert.quantity} is {reading:.4g}, {alert.comparison}"
            f" config.alerts.{name}.limit={rule.limit:g}"
            + (f" for {count} steps" if count > 1 else "")
            + f"; {alert.remedy}"
        )
        logging.warning("%s (action: %s)", text, rule.action)
        message = {
            "text": text,
            "alert": name,
            "step": step,
            "reading": reading,
            "limit": rule.limit if math.isfinite(rule.limit) else str(rule.limit),
            "steps_in_row": count,
            "action": rule.action,
            "workdir": str(self._workdir),
        }
        try:
            if self._thread.is_alive():
                self._messages.put_nowait(message)
        except queue.Full:
            logging.warning("alerts: %d messages are queued; this one is dropped", QUEUE_LENGTH)
        if rule.action == "stop":
            self._stop(text)


def check(config: AlertsConfig) -> None:
    """Raises ConfigError if the user's function cannot be imported; before any allocation."""
    if not config.function:
        return
    try:
        lookup.resolve(config.function, {}, "alert function")
    except Exception as error:  # anything the user's module raises on import
        raise ConfigError(f"config.alerts.function: {type(error).__name__}: {error}") from error


def _readings(numbers: Numbers) -> dict[str, float]:
    """The reading of each alert whose metrics are present."""
    readings = {
        name: float(numbers[number])
        for name, alert in ALERTS.items()
        for number in alert.metric_names
        if number in numbers
    }
    if losses := [v for k, v in numbers.items() if k.endswith(("/loss", "/grad_norm"))]:
        readings["nonfinite"] = float(not all(math.isfinite(value) for value in losses))
    return readings


def _send_messages(senders: Sequence[Callable[[Numbers], Any]], messages: queue.Queue) -> None:
    """Thread: passes messages to webhook and function until it gets None."""
    while (message := messages.get()) is not None:
        for send in senders:
            try:
                send(message)
            except Exception as error:  # from the user's function or the network
                kind = type(error).__name__
                logging.warning("alerts: could not be sent: %s: %s", kind, error)


def _post(address: str, message: Numbers) -> None:
    data, headers = json.dumps(message).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(address, data, headers, method="POST")
    urllib.request.urlopen(request, timeout=WEBHOOK_TIMEOUT_S).close()
