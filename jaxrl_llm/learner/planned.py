"""The plan of a run: for devices of this process, or for others that it may be given."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from absl import logging

from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.learner import compiled as compiled_lib
from jaxrl_llm.learner import lowering, networks
from jaxrl_llm.planning import devices, fit, memory, shapes
from jaxrl_llm.planning.devices import GIB, Device
from jaxrl_llm.planning.fit import Plan

_MARGIN = 1.1  # how far estimates are from compilers' reports at most


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a run is to go.

    Attributes:
      device: The kind.
      num_devices: How many.
      devices: What programs may be compiled for; empty of devices that are only named.
      backend: Whose compiler's habits the analytic plan assumes.
    """

    device: Device
    num_devices: int
    devices: Sequence[Any] = ()
    backend: str = "tpu"


def here(present: Sequence[Any]) -> Place:
    """Returns the devices of this process.

    Raises:
      ConfigError: If nothing is known of their kind.
    """
    device = devices.present(present)
    if device is None:
        raise ConfigError(
            [
                f"device: nothing is known of {present[0].device_kind!r};"
                f" name one of {', '.join(devices.DEVICES)} with --device"
            ]
        )
    backend = "cpu" if present[0].platform == "cpu" else "tpu"
    return Place(device, len(present), present, backend)


def elsewhere(topology: str, device: str, num_devices: int) -> Place:
    """Returns the devices of a TPU topology, or so many of a kind if that is empty.

    Raises:
      ConfigError: If topology or kind is not known.
    """
    if not topology:
        return Place(devices.named(device), num_devices)
    kind, count = devices.of_topology(topology)
    return Place(kind, count, _Topology(topology, count))


class _Topology(Sequence):
    """Devices of a topology, made when the first is asked for: that loads the TPU compiler."""

    def __init__(self, name: str, count: int):
        self._name, self._count = name, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index):
        return compiled_lib.topology_devices(self._name)[index]


def plan(config: Config, place: Place) -> Plan:
    """Returns the analytic plan of a run.

    Raises:
      ConfigError: If the model is not known or the mesh does not fill the devices.
    """
    vocab_size = 0 if config.model.path else len(networks.load_tokenizer(config.model))
    policy = shapes.shape_of(config.model, vocab_size)
    scorers = tuple(
        shapes.shape_of(dataclasses.replace(config.model, path=model.path), 0)
        if model.path
        else policy
        for model in (*config.rewards.models.values(), *config.rewards.cost_models.values())
    )
    return fit.make(config, policy, scorers, place.device, place.num_devices, place.backend)


def compiled(plan: Plan, place: Place) -> dict[str, float | str]:
    """Returns by program what is on a device while it runs, by the compiler's own report.

    What lies beside a program is as in the analytic plan; a program that the compiler refuses
    has its reason in place of a number.

    Raises:
      ConfigError: If the devices are only named, not known to a compiler.
    """
    if not place.devices:
        raise ConfigError(
            [f"--compile: {place.device.name} devices are not here; give a TPU --topology"]
        )
    setting = plan.setting
    roles = lowering.abstract_roles(setting.config, setting.policy, list(place.devices))
    own = memory.estimate(setting)
    found: dict[str, float | str] = {}
    for name, lower in lowering.lowered(roles).items():
        logging.info("compiling %s", name)
        try:
            report = compiled_lib.compile_report(lower)
        except compiled_lib.Refused as error:
            found[name] = str(error)
        else:
            found[name] = report.total + plan.programs[name].total - own[name].total
    return found


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a run was planned to need on its devices; nothing where they are not known."""

    peak_bytes: float

    def metrics(self, present: Sequence[Any]) -> dict[str, float]:
        """Returns the plan in GiB, and how much of it the devices have used at most so far.

        `perf/planned_memory_gb`, and `perf/measured_to_planned_memory` where the platform
        tells its peak (CPU does not).
        """
        if not self.peak_bytes:
            return {}
        stats = [found for device in present if (found := device.memory_stats())]
        peaks = [found["peak_bytes_in_use"] for found in stats if "peak_bytes_in_use" in found]
        found = {"perf/planned_memory_gb": self.peak_bytes / GIB}
        if peaks:
            found["perf/measured_to_planned_memory"] = max(peaks) / self.peak_bytes
        return found


def check(config: Config, present: Sequence[Any]) -> Budget:
    """Returns what a run may need of the devices present.

    The estimate is good to a tenth: up to that much too much is a warning, more is refused.

    Raises:
      ConfigError: If it cannot fit, with what is missing and the nearest run that fits.
    """
    if devices.present(present) is None:
        logging.warning("nothing is known of %s: no memory plan", present[0].device_kind)
        return Budget(0.0)
    made = plan(config, here(present))
    if not made.fits:
        busiest = max(made.programs, key=lambda name: made.programs[name].total)
        message = (
            f"config: needs {made.peak / GIB:.1f} GiB on each {made.device.name} device while"
            f" '{busiest}' runs, {-made.room / GIB:.1f} more than it has; nearest run that fits,"
            f" {fit.advise(made)}"
        )
        if made.peak > _MARGIN * made.device.memory_bytes:
            raise ConfigError([message])
        logging.warning("%s", message)
    return Budget(made.peak)
