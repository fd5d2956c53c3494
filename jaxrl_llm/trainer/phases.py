"""What the loop of RL calls in each step, compiled for a layout."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.learner import distillation, estimate, predict, update
from jaxrl_llm.learner.update import Updater
from jaxrl_llm.learner.weights import LearnerState
from jaxrl_llm.planning import devices as hardware
from jaxrl_llm.sharding import pools
from jaxrl_llm.trainer.prepare import Prepared
from jaxrl_llm.types import Estimates


class Phases(NamedTuple):
    """The functions of a step, and the devices that they use."""

    lessons_of: Any  # learner/distillation.py
    predictions_of: Any  # learner/predict.py
    estimates_of: Any  # learner/estimate.py
    has_signal: Callable[[Mapping[str, float], Estimates], bool]
    learn: Updater
    devices: list[Any]
    peak_flops: float  # of all devices together, in a second


def of(prepared: Prepared, state: LearnerState) -> Phases:
    """Returns the phases of a run; of `state` only shapes and shardings are read."""
    config, models, frozen = prepared.config, prepared.models, prepared.frozen
    devices = pools.devices(models.meshes.values())
    return Phases(
        lessons_of=distillation.teaching(config, models, frozen),
        predictions_of=predict.predictor(config, models, frozen),
        estimates_of=estimate.estimator(config, models.mesh),
        has_signal=estimate.signal_check(config),
        learn=update.updater(config, models, frozen.base, state, prepared.source.meanwhile),
        devices=devices,
        peak_flops=hardware.peak_flops(devices),
    )
