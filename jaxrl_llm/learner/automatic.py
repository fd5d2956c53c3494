"""What a run leaves to the planner: its placement, its microbatches, what it computes again."""

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from absl import logging
from jax.sharding import AbstractMesh, Mesh

from jaxrl_llm.algorithms import custom
from jaxrl_llm.config import (
    ConfigError,
    JobConfig,
    PlacementConfig,
    PoolConfig,
    RLConfig,
    SupervisedConfig,
)
from jaxrl_llm.config.folder import load_config
from jaxrl_llm.learner import models as models_lib
from jaxrl_llm.models import families, sequence_attention
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.planning import devices as devices_lib
from jaxrl_llm.planning import fit, placement, shapes
from jaxrl_llm.planning.devices import Device
from jaxrl_llm.planning.memory import Setting
from jaxrl_llm.planning.placement import Placement
from jaxrl_llm.sharding.mesh import AXES

Job = TypeVar("Job", bound=JobConfig)

_TOGETHER = PlacementConfig()

# What the backward pass finds again, from the least work to the least memory.
_REMAT = ("none", "dots", "projections", "attention", "full")
_TOKENS = (16_384, 8192, 4096)  # of a microbatch on a device
_FEWEST_ON_CPU = 512
_MARGIN = 0.9  # of a device's memory: estimates are good to a tenth


def here(config: RLConfig, policy: Shape, present: Sequence[Any]) -> RLConfig:
    """Returns the config with what `placed` and `sized` find for these devices.

    Args:
      config: The run.
      policy: Its shape.
      present: Devices; of a kind of which nothing is known, all roles share them, and what is
        computed again saves the most.
    """
    device = devices_lib.present(present)
    if device is None:
        together = config.placement.choice == "auto"
        config = dataclasses.replace(config, placement=_TOGETHER) if together else config
        return _with_sizes(config, *next(iter(_sizes(config, "tpu", _REMAT[-1:]))))
    scorers = shapes.scorers(config, policy)
    num_hosts = len({each.process_index for each in present})
    setting = Setting(config, policy, scorers, {}, devices_lib.backend(device))
    return placed(setting, device, len(present), num_hosts)


def settled(config: RLConfig, workdir: str | os.PathLike[str]) -> RLConfig:
    """Returns the config with sizes: of the run that began in this folder, or as planned.

    So a resumed run repeats it bit for bit. What the config itself says wins; its placement stays
    as it is.
    """
    custom.check(config.algorithm)
    for model in (*config.rewards.models.values(), *config.rewards.cost_models.values()):
        if model.path:
            families.read_config(model.path)  # what is wrong there is not the plan's to say
    config = repeated(config, workdir)
    if not _is_open(config):
        return config
    return with_sizes_of(config, here(config, _policy(config), jax.devices()))


def meshes(config: RLConfig) -> dict[str, Mesh]:
    """Returns the mesh of each role on the devices of this run, placed by the plan if it is to.

    Raises:
      ConfigError: If the devices cannot be shared out so.
    """
    if config.placement.choice == "auto":
        config = here(config, _policy(config), jax.devices())
    return models_lib.role_meshes(config)


def _policy(config: RLConfig) -> Shape:
    return models_lib.model_shape(config.model, models_lib.load_tokenizer(config.model))


def of_supervised(config: SupervisedConfig) -> SupervisedConfig:
    """Returns the config with sizes that hold its longest row, where it leaves them open."""
    small = jax.default_backend() == "cpu"
    tokens = max(2048 if small else 16_384, config.max_sequence_tokens)
    return _with_sizes(config, "none" if small else "full", tokens)


def repeated(config: RLConfig, workdir: str | os.PathLike[str]) -> RLConfig:
    """Returns the config with the sizes that the run in this folder began with."""
    if not _is_open(config) or not (pathlib.Path(workdir) / "config.json").exists():
        return config
    begun = load_config(workdir)
    return _with_sizes(config, begun.model.remat, begun.trainer.max_tokens_per_microbatch)


def with_sizes_of(config: RLConfig, chosen: RLConfig) -> RLConfig:
    """Returns the config with microbatches and recomputation as `chosen` has them."""
    return _with_sizes(config, chosen.model.remat, chosen.trainer.max_tokens_per_microbatch)


def _is_open(config: JobConfig) -> bool:
    return config.model.remat == "auto" or not config.trainer.max_tokens_per_microbatch


def _with_sizes(config: Job, remat: Any, tokens: int) -> Job:
    """Returns the config with these where it says nothing."""
    model, trainer = config.model, config.trainer
    if model.remat == "auto":
        model = dataclasses.replace(model, remat=remat)
    if not trainer.max_tokens_per_microbatch:
        trainer = dataclasses.replace(trainer, max_tokens_per_microbatch=tokens)
    return dataclasses.replace(config, model=model, trainer=trainer)


def _sizes(
    config: RLConfig, backend: str, remats: Sequence[str] = _REMAT
) -> Iterator[tuple[str, int]]:
    """Yields recomputation and tokens of a microbatch, the least work first."""
    row = sequence_attention.row_width(config.max_sequence_tokens, config.mesh.sequence)
    row = -(-row // config.mesh.sequence)
    few = (_FEWEST_ON_CPU,) if backend == "cpu" else ()
    tokens = dict.fromkeys(max(each, row) for each in (*_TOKENS, *few))
    return itertools.product(remats, tokens)


def sized(setting: Setting, device: Device, num_devices: int) -> RLConfig:
    """Returns the config with microbatches and recomputation where it leaves them open.

    The least recomputation, then the most tokens, with which the plan fits a device with a margin.
    A CPU is as fast with small microbatches and shares its memory with others: there, the least
    memory that the run can do with, and a little more, is what it may take.

    Args:
      setting: The run, its placement settled; its mesh is not looked at.
      device: What it runs on.
      num_devices: How many.
    """
    config, backend = setting.config, setting.backend
    if not _is_open(config):
        return config

    def peak(remat: str, tokens: int) -> float:
        tried = _with_sizes(config, remat, tokens)
        shapes_of = setting.policy, setting.scorers
        return fit.make(tried, *shapes_of, device, num_devices, backend).peak

    choices = list(_sizes(config, backend))
    limit = _MARGIN * device.memory_bytes
    if backend == "cpu":
        limit = min(limit, 1.05 * peak(*choices[-1]) + devices_lib.GIB / 4)
    found = next((each for each in choices if peak(*each) <= limit), choices[-1])
    config = _with_sizes(config, *found)
    logging.info(
        "chosen by the plan: trainer.max_tokens_per_microbatch=%d model.remat=%s",
        config.trainer.max_tokens_per_microbatch,
        config.model.remat,
    )
    return config


def placed(setting: Setting, device: Device, num_devices: int, num_hosts: int = 1) -> RLConfig:
    """Returns the config with pools by hand where it leaves them to the planner, and `sized`.

    The first of the ranking (`planning/placement.py`) whose pools hold their roles and whose rows
    all models can split; where none fits, all roles share all devices.

    Args:
      setting: The run; its mesh is not looked at.
      device: What it runs on.
      num_devices: How many.
      num_hosts: That have as many of them each.
    """
    config = setting.config
    if config.placement.choice == "auto":
        # Placements are compared with the sizes that leave the most room.
        small = _with_sizes(config, *list(_sizes(config, setting.backend))[-1])
        tried = dataclasses.replace(setting, config=small)
        ranking = placement.rank(tried, device, num_devices, num_hosts)
        place = next(_possible(ranking, tried), None)
        if place:
            logging.info("placement: %s; %s", place.name, place.why())
        else:
            logging.warning("placement: none fits; all roles share all devices")
        chosen = place.config() if place else _TOGETHER
        config = dataclasses.replace(config, placement=chosen)
    return sized(dataclasses.replace(setting, config=config), device, num_devices)


def _possible(ranking: Iterable[Placement], setting: Setting) -> Iterator[Placement]:
    """Yields the placements that fit and that the run does not refuse."""
    config = setting.config
    for place in ranking:
        if not place.fits:
            continue
        chosen = place.config()
        meshes = {name: _mesh(pool) for name, pool in chosen.pools.items()}
        try:
            of_roles = {role: meshes[pool] for role, pool in chosen.roles.items()}
            models_lib.row_split(config, of_roles)
        except ConfigError as error:
            logging.info("placement: not %s: %s", place.name, error.problems[0])
        else:
            yield place


def _mesh(pool: PoolConfig) -> AbstractMesh:
    return AbstractMesh(tuple(getattr(pool, axis) for axis in AXES), AXES)
