"""Checks after each step whether `trainer.stop_when` ends the run."""

from collections.abc import Mapping
from typing import Any

from absl import logging

from jaxrl_llm.config.stop_condition import StopCondition, advice
from jaxrl_llm.sharding import multihost

METRIC = "training/stop_when"


class StopCheck:
    """A condition on the metrics of a run; its state says whether an earlier start has met it."""

    def __init__(self, condition: StopCondition | None):
        self.condition = condition
        self.reason = ""  # why the run ends; "" while it goes on
        self._is_measured = False  # whether the metric has appeared, or a warning that it has not

    def check(self, step: int, numbers: Mapping[str, Any], evaluated: bool) -> dict[str, float]:
        """Metric `training/stop_when`, 1 if the run ends with this step; empty without a condition.

        `evaluated` says whether `numbers` contain those of an evaluation. All processes decide as
        the first one, because times and memory differ between them.
        """
        if self.condition is None:
            return {}
        metric = self.condition.metric
        if metric in numbers:
            self._is_measured = True
        elif not self._is_measured and (evaluated or not metric.startswith("val")):
            self._is_measured = True  # warn once
            message = "config.trainer.stop_when: step %d has no metric %r, so it cannot end; %s"
            logging.warning(message, step, metric, advice(metric, sorted(numbers)))
        is_met = self.condition.is_met(numbers)
        if multihost.broadcast_from_host0(is_met):
            reading = f"{float(numbers[metric]):.4g}" if metric in numbers else "not measured"
            self.reason = f"{metric} is {reading} after step {step} (stop_when: {self.condition})"
            logging.info("the run ends: %s", self.reason)
        return {METRIC: float(bool(self.reason))}

    def get_state(self) -> dict[str, str]:
        return {"condition": str(self.condition), "reason": self.reason}

    def set_state(self, state: Mapping[str, str]) -> None:
        """Takes over the reason of an earlier start, if it had the same condition."""
        if state["condition"] == str(self.condition):
            self.reason = state["reason"]
