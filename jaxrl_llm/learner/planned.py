"""The plan of a run: for devices of this process, or for others that it may be given."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from absl import logging

from jaxrl_llm.algorithms import custom
from jaxrl_llm.config import ConfigError, RLConfig
from jaxrl_llm.learner import automatic
from jaxrl_llm.planning import advice, devices, fit, shapes
from jaxrl_llm.planning.devices import GIB, Device
from jaxrl_llm.planning.fit import Plan
from jaxrl_llm.planning.memory import Setting
from jaxrl_llm.sharding import mesh as mesh_lib

_MARGIN = 1.1  # how far estimates are from compilers' reports at most


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a run is to go.

    Attributes:
      device: The kind.
      num_devices: How many.
      devices: What programs may be compiled for: of this process, none, or a topology's name.
      num_hosts: That have as many of them each.
    """

    device: Device
    num_devices: int
    devices: Sequence[Any] | str = ()
    num_hosts: int = 1

    @property
    def backend(self) -> str:
        return devices.backend(self.device)


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
    num_hosts = len({each.process_index for each in present})
    return Place(device, len(present), present, num_hosts)


def elsewhere(topology: str, device: str, num_devices: int) -> Place:
    """Returns the devices of a TPU topology, or so many of a kind if that is empty.

    Raises:
      ConfigError: If topology or kind is not known.
    """
    if not topology:
        return Place(devices.named(device), num_devices)
    kind, count = devices.of_topology(topology)
    return Place(kind, count, topology)


def plan(config: RLConfig, place: Place) -> Plan:
    """Returns the analytic plan of a run, on the pools that suit it best if it leaves them open.

    Raises:
      ConfigError: If the model or a function of the user's is not known, or the mesh does not
        fill the devices.
    """
    custom.check(config.algorithm)
    policy = shapes.shape_of(config.model, 0 if config.model.path else _vocab_size(config))
    scorers = shapes.scorers(config, policy)
    setting = Setting(config, policy, scorers, {}, place.backend)
    config = automatic.placed(setting, place.device, place.num_devices, place.num_hosts)
    return fit.make(config, policy, scorers, place.device, place.num_devices, place.backend)


def filled(config: RLConfig, place: Place) -> RLConfig:
    """Returns the config on a mesh that fills the place; warns where that is not its own."""
    try:
        mesh_lib.mesh_sizes(config.mesh, place.num_devices)
        return config
    except ConfigError as error:
        tensor = math.gcd(max(1, config.mesh.tensor), place.num_devices)
        logging.warning("%s; planned with fsdp -1 x tensor %d instead", error.problems[0], tensor)
        mesh = dataclasses.replace(config.mesh, data=1, fsdp=-1, sequence=1, tensor=tensor)
        return dataclasses.replace(config, mesh=mesh)


def _vocab_size(config: RLConfig) -> int:
    # Tokenizers take seconds to import, and a plan of a model with a folder or a name needs none.
    from jaxrl_llm.learner import models

    return len(models.load_tokenizer(config.model))


def check(config: RLConfig, present: Sequence[Any]) -> float:
    """Returns the planned peak of bytes on each of the devices present; 0 if they are not known.

    An estimate may be a tenth too high: up to that it warns, above it refuses.

    Raises:
      ConfigError: If the run cannot fit, with what is missing and the nearest run that fits.
    """
    if devices.present(present) is None:
        logging.warning("nothing is known of %s: no memory plan", present[0].device_kind)
        return 0.0
    made = plan(config, here(present))
    if not made.fits:
        busiest = max(made.programs, key=lambda name: made.programs[name].total)
        message = (
            f"config: needs {made.peak / GIB:.1f} GiB on each {made.device.name} device while"
            f" '{busiest}' runs, {-made.room / GIB:.1f} more than it has; nearest run that fits,"
            f" {advice.nearest(made)}"
        )
        if made.peak > _MARGIN * made.device.memory_bytes:
            raise ConfigError([message])
        logging.warning("%s", message)
    return made.peak
