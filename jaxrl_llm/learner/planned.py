"""The plan of a run: whether it fits its devices, and the sizes and pools left to the planner."""

import dataclasses
import itertools
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from absl import logging
from jax.sharding import AbstractMesh, Mesh

from jaxrl_llm.algorithms import needs
from jaxrl_llm.config import ConfigError, JobConfig, PlacementConfig, RLConfig, SupervisedConfig
from jaxrl_llm.config.folder import load_config
from jaxrl_llm.learner import models as models_lib
from jaxrl_llm.models import families, sequence_attention
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.planning import devices, fit, placement, shapes
from jaxrl_llm.planning.devices import GIB, Device
from jaxrl_llm.planning.fit import Plan
from jaxrl_llm.planning.setting import Scorer, Setting
from jaxrl_llm.sharding import mesh as mesh_lib

Job = TypeVar("Job", bound=JobConfig)
Supervised = TypeVar("Supervised", bound=SupervisedConfig)

_ERROR = 1.1  # estimates are at most a tenth from compilers' reports
_TOKENS = (16_384, 8192, 4096)  # of a microbatch on a device
_FEWEST_ON_CPU = 512
_USABLE = 0.9  # of a device's memory, where sizes are chosen


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices that a run is planned for."""

    device: Device  # their kind
    num_devices: int
    # What programs may be compiled for: devices of this process, or names as of `absent.named`.
    devices: Sequence[Any] | str
    num_hosts: int = 1  # with as many of the devices each


def here(present: Sequence[Any]) -> Target:
    """Returns these devices of the run; raises ConfigError if nothing is known of their kind."""
    device = devices.present(present)
    if device is None:
        raise ConfigError(
            f"device: nothing is known of {present[0].device_kind!r};"
            f" name one of {', '.join(devices.DEVICES)} with --device"
        )
    num_hosts = len({each.process_index for each in present})
    return Target(device, len(present), present, num_hosts)


def elsewhere(topology: str, device: str, num_devices: int) -> Target:
    """Returns the devices of a TPU topology, or so many of a kind if that is empty; as `here`."""
    if not topology:
        kind = devices.named(device)
        return Target(kind, num_devices, kind.name)
    kind, count = devices.of_topology(topology)
    return Target(kind, count, topology)


def plan(config: JobConfig, target: Target) -> Plan:
    """Returns the analytic plan of a job, with what it leaves to the planner chosen.

    Raises:
      ConfigError: If the model is not known, or the mesh does not fill the devices.
    """
    policy = _policy(config)
    if not config.learns_from_samples:
        return _fit(policy, (), _sized(config, policy, (), target), target)
    setting = _setting(config.require_rl(), policy, target)
    return _fit(policy, setting.scorers, _placed(setting, target), target)


def check(config: JobConfig, present: Sequence[Any]) -> float:
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
            f" {fit.nearest(made)}"
        )
        if made.peak > _ERROR * made.device.memory_bytes:
            raise ConfigError(message)
        logging.log_first_n(logging.WARNING, "%s", 1, message)  # a program may ask twice
    return made.peak


def filled(config: Job, target: Target) -> Job:
    """Returns the config on a mesh that fills these devices; warns where that is not its own."""
    try:
        mesh_lib.mesh_sizes(config.mesh, target.num_devices)
    except ConfigError as error:
        tensor = math.gcd(max(1, config.mesh.tensor), target.num_devices)
        expert = math.gcd(max(1, config.mesh.expert), target.num_devices // tensor)
        split = f"fsdp -1{f' x expert {expert}' * (expert > 1)} x tensor {tensor}"
        logging.warning("%s; planned with %s instead", error.problems[0], split)
        mesh = dataclasses.replace(
            config.mesh, data=1, fsdp=-1, expert=expert, sequence=1, tensor=tensor
        )
        config = dataclasses.replace(config, mesh=mesh)
    return config


def settled(config: RLConfig, workdir: str | os.PathLike[str]) -> RLConfig:
    """Returns the config, checked, with its sizes: of the run begun in this folder, or as planned.

    So a resumed run repeats it bit for bit. Sizes that the config gives win; its placement stays.
    """
    needs.check(config.algorithm)
    for path in config.scorer_paths:
        families.read_config(path)  # a plan would only say that it does not fit
    config = _as_begun(config, workdir)
    return _with_sizes_of(config, _chosen_here(config)) if _is_open(config) else config


def _as_begun(config: Job, workdir: str | os.PathLike[str]) -> Job:
    """Returns the config with the sizes of the run that has begun in this folder, if one has."""
    if _is_open(config) and (pathlib.Path(workdir) / "config.json").exists():
        return _with_sizes_of(config, load_config(workdir))
    return config


def meshes(job: JobConfig) -> dict[str, Mesh]:
    """Returns the mesh of each role on the devices of this run; the plan may place those of RL.

    Raises ConfigError if the devices cannot be shared out so.
    """
    if not job.learns_from_samples:
        return models_lib.one_mesh(job)
    config = job.require_rl()
    if config.placement.choice == "auto":
        config = _chosen_here(config)
    return models_lib.role_meshes(config)


def chosen(config: RLConfig, policy: Shape, present: Sequence[Any]) -> RLConfig:
    """Returns the config with pools, microbatches and recomputation for the devices present.

    Pools are the first of the ranking (`planning/placement.py`) that hold their roles and whose
    rows all models can split; then the least recomputation, and with it the most tokens, that fit
    the devices. On devices of an unknown kind all roles share all devices, and recomputation saves
    the most memory.
    """
    if devices.present(present) is not None:
        target = here(present)
        return _placed(_setting(config, policy, target), target)
    if config.placement.choice == "auto":
        config = dataclasses.replace(config, placement=PlacementConfig())
    _, most_tokens = _sizes(config, "tpu")[0]
    return _with_sizes(config, fit.REMAT[-1], most_tokens)


def _chosen_here(config: RLConfig) -> RLConfig:
    if config.model.path:
        families.read_config(config.model.path)
    return chosen(config, _policy(config), jax.devices())


def of_supervised(config: Supervised, workdir: str | os.PathLike[str]) -> Supervised:
    """Returns the config of a job on given answers with its sizes, as `settled`."""
    config = _as_begun(config, workdir)
    if not _is_open(config):
        return config
    if config.model.path:
        families.read_config(config.model.path)
    present = jax.devices()
    if devices.present(present) is None:
        return _with_sizes(config, fit.REMAT[-1], max(_TOKENS[0], config.max_sequence_tokens))
    return _sized(config, _policy(config), (), here(present))


def _policy(config: JobConfig) -> Shape:
    """Returns the policy's shape; only that of a random model needs the tokenizer."""
    vocab_size = 0 if config.model.path else len(models_lib.load_tokenizer(config.model))
    return shapes.shape_of(config.model, vocab_size)


def _setting(config: RLConfig, policy: Shape, target: Target) -> Setting:
    return Setting(config, policy, shapes.scorers(config, policy), {}, target.device.backend)


def _fit(policy: Shape, scorers: tuple[Scorer, ...], config: JobConfig, target: Target) -> Plan:
    return fit.make(config, policy, scorers, target.device, target.num_devices)


def _is_open(config: JobConfig) -> bool:
    return config.model.remat == "auto" or not config.trainer.max_tokens_per_microbatch


def _with_sizes_of(config: Job, other: JobConfig) -> Job:
    return _with_sizes(config, other.model.remat, other.trainer.max_tokens_per_microbatch)


def _with_sizes(config: Job, remat: Any, tokens: int) -> Job:
    """Returns the config with these where it gives none."""
    model, trainer = config.model, config.trainer
    if model.remat == "auto":
        model = dataclasses.replace(model, remat=remat)
    if not trainer.max_tokens_per_microbatch:
        trainer = dataclasses.replace(trainer, max_tokens_per_microbatch=tokens)
    return dataclasses.replace(config, model=model, trainer=trainer)


def _sizes(config: JobConfig, backend: str) -> list[tuple[str, int]]:
    """Returns choices of recomputation and tokens of a microbatch, the least work first."""
    row = sequence_attention.row_width(config.max_sequence_tokens, config.mesh.sequence)
    row = -(-row // config.mesh.sequence)
    few = (_FEWEST_ON_CPU,) if backend == "cpu" else ()
    tokens = dict.fromkeys(max(each, row) for each in (*_TOKENS, *few))
    return list(itertools.product(fit.REMAT, tokens))


def _placed(setting: Setting, target: Target) -> RLConfig:
    """Returns the config with the best pools and sizes, where it leaves them open."""
    config = setting.config
    if config.placement.choice == "auto":
        # Placements are compared with the sizes that leave the most room.
        small = _with_sizes(config, *_sizes(config, setting.backend)[-1])
        tried = dataclasses.replace(setting, config=small)
        ranking = placement.rank(tried, target.device, target.num_devices, target.num_hosts)
        pools = PlacementConfig()  # all roles share all devices
        if best := next((each for each in ranking if each.fits and _may_split(each, small)), None):
            pools = best.config()
            logging.info("placement: %s; %s", best.name, best.why())
        else:
            logging.warning("placement: none fits; all roles share all devices")
        config = dataclasses.replace(config, placement=pools)
    return _sized(config, setting.policy, setting.scorers, target)


def _may_split(best: placement.Placement, config: RLConfig) -> bool:
    """Returns whether every pool can split the rows of the run."""
    chosen, axes = best.config(), mesh_lib.AXES
    of_roles = {
        role: AbstractMesh(tuple(getattr(chosen.pools[pool], axis) for axis in axes), axes)
        for role, pool in chosen.roles.items()
    }
    try:
        models_lib.row_split(config, of_roles)
    except ConfigError as error:
        logging.info("placement: not %s: %s", best.name, error.problems[0])
        return False
    return True


def _sized(config: Job, policy: Shape, scorers: tuple[Scorer, ...], target: Target) -> Job:
    """Returns the config with microbatches and recomputation where it leaves them open.

    On a CPU small microbatches are as fast and memory is shared: there the limit is little more
    than the least memory that the run needs.
    """
    backend = target.device.backend
    if not _is_open(config):
        return config

    def peak(remat: str, tokens: int) -> float:
        return _fit(policy, scorers, _with_sizes(config, remat, tokens), target).peak

    choices = _sizes(config, backend)
    limit = _USABLE * target.device.memory_bytes
    if backend == "cpu":
        limit = min(limit, 1.05 * peak(*choices[-1]) + GIB / 4)
    found = next((each for each in choices if peak(*each) <= limit), choices[-1])
    config = _with_sizes(config, *found)
    sizes = config.trainer.max_tokens_per_microbatch, config.model.remat
    said = "chosen by the plan: trainer.max_tokens_per_microbatch=%d model.remat=%s"
    logging.info(said, *sizes)
    return config
