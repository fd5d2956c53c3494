"""How fast a step was, and how near that is to what the devices could do at best."""

import math
from collections.abc import Mapping

from jaxrl_llm.algorithms import needs
from jaxrl_llm.config import RLConfig
from jaxrl_llm.learner.models import Models
from jaxrl_llm.metrics import machine, statistics
from jaxrl_llm.models import flops
from jaxrl_llm.planning import devices as hardware
from jaxrl_llm.sharding import pools
from jaxrl_llm.types import Rollouts


def of_step(
    config: RLConfig, models: Models, rollouts: Rollouts, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Returns tokens per second and device, share of the devices' best, and memory.

    `perf/tflops/update` is the arithmetic of all learners' forward and backward passes, counted
    from their shapes, per second of the update and device; `perf/mfu/update` its share of
    what the device can do in 16 bits, `perf/mfu/actor` the same where the policy learns alone.
    Shares are left out for devices without a known best, as CPUs are. While critics warm up the
    policy's work is counted though it rests.

    Args:
      config: The run.
      models: Its networks and meshes.
      rollouts: The sequences of the step, each learned from `trainer.epochs` times.
      seconds: `Clock.seconds()` of the step, with `timing_s/update`.
    """
    devices = pools.devices(models.meshes.values())
    critics = needs.of(config.algorithm).num_critics
    work = critics * flops.training(models.value.shape, rollouts.lengths, num_labels=1)
    frozen = bool(config.lora.rank)
    work += flops.training(models.policy.shape, rollouts.lengths, frozen=frozen)
    work *= config.trainer.epochs
    time = seconds.get("timing_s/update", math.inf)  # a step may leave its updates out
    found = {"perf/tflops/update": work / time / len(devices) / 1e12}
    share = hardware.utilization(work, time, devices)
    if not math.isnan(share):
        found["perf/mfu/update"] = share
        if not critics:
            found["perf/mfu/actor"] = share
    return {
        **statistics.of_speed(rollouts, seconds, len(devices)),
        **found,
        **machine.memory(devices),
    }
