"""`placement.choice = "auto"`: the fastest placement of the planner's that a run can have."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from absl import logging
from jax.sharding import AbstractMesh, Mesh

from jaxrl_llm.config import ConfigError, PlacementConfig, PoolConfig, RLConfig
from jaxrl_llm.learner import models as models_lib
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.planning import devices as devices_lib
from jaxrl_llm.planning import placement, shapes
from jaxrl_llm.planning.devices import Device
from jaxrl_llm.planning.memory import Setting
from jaxrl_llm.planning.placement import Placement
from jaxrl_llm.sharding.mesh import AXES

_TOGETHER = PlacementConfig()


def meshes(config: RLConfig) -> dict[str, Mesh]:
    """Returns the mesh of each role on the devices of this run, placed by the plan if it is to.

    Raises:
      ConfigError: If the devices cannot be shared out so.
    """
    if config.placement.choice == "auto":
        shape = models_lib.model_shape(config.model, models_lib.load_tokenizer(config.model))
        config = here(config, shape, jax.devices())
    return models_lib.role_meshes(config)


def here(config: RLConfig, policy: Shape, present: Sequence[Any]) -> RLConfig:
    """Returns the config with the placement that `placed` finds for these devices.

    Args:
      config: The run.
      policy: Its shape.
      present: Devices; of a kind of which nothing is known, all roles share them.
    """
    if config.placement.choice != "auto":
        return config
    device = devices_lib.present(present)
    if device is None:
        return dataclasses.replace(config, placement=_TOGETHER)
    scorers = shapes.scorers(config, policy)
    num_hosts = len({each.process_index for each in present})
    backend = devices_lib.backend(device)
    return placed(Setting(config, policy, scorers, {}, backend), device, len(present), num_hosts)


def placed(setting: Setting, device: Device, num_devices: int, num_hosts: int = 1) -> RLConfig:
    """Returns the config with pools by hand where it leaves them to the planner.

    The first of the ranking (`planning/placement.py`) whose pools hold their roles and whose rows
    all models can split; where none fits, all roles share all devices.

    Args:
      setting: The run; its mesh is not looked at.
      device: What it runs on.
      num_devices: How many.
      num_hosts: That have as many of them each.
    """
    config = setting.config
    if config.placement.choice != "auto":
        return config
    ranking = placement.rank(setting, device, num_devices, num_hosts)
    for place in _possible(ranking, setting):
        logging.info("placement: %s; %s", place.name, place.why())
        return dataclasses.replace(config, placement=place.config())
    logging.warning("placement: none fits; all roles share all devices")
    return dataclasses.replace(config, placement=_TOGETHER)


def _possible(ranking: Iterable[Placement], setting: Setting) -> Iterator[Placement]:
    """Yields the placements that fit and that the run does not refuse."""
    config = setting.config
    for place in ranking:
        if not place.fits:
            continue
        chosen = place.config()
        meshes = {name: _mesh(pool) for name, pool in chosen.pools.items()}
        try:
            models_lib.row_split(
                config, {role: meshes[pool] for role, pool in chosen.roles.items()}
            )
        except ConfigError as error:
            logging.info("placement: not %s: %s", place.name, error.problems[0])
        else:
            yield place


def _mesh(pool: PoolConfig) -> AbstractMesh:
    return AbstractMesh(tuple(getattr(pool, axis) for axis in AXES), AXES)
