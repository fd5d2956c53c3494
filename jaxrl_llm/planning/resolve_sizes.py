"""Resolves the sizes and pools left to the planner, and checks that a run fits its devices."""

import dataclasses
import itertools
import math
import os
from collections.abc import Sequence
from typing import Any, TypeVar

from absl import logging
from jax.sharding import AbstractMesh, Mesh

from jaxrl_llm.algorithms import requirements
from jaxrl_llm.config import ConfigError, JobConfig, PlacementConfig, RLConfig, SupervisedConfig
from jaxrl_llm.config.workdir import load_config
from jaxrl_llm.learner import job_models
from jaxrl_llm.models import context_parallel
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.hf import config_reader
from jaxrl_llm.planning import accelerators, memory_plan, pool_placement, published_shapes
from jaxrl_llm.planning.accelerators import GIB, Device
from jaxrl_llm.planning.dataset_names import pin_datasets
from jaxrl_llm.planning.memory_plan import MemoryPlan
from jaxrl_llm.planning.model_names import pin_models
from jaxrl_llm.planning.run_setting import RunSetting, ScoringModel
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.storage import files

Job = TypeVar("Job", bound=JobConfig)
Supervised = TypeVar("Supervised", bound=SupervisedConfig)

_ESTIMATE_ERROR = 1.1  # estimates are within 10 % of what compilers report
_MICROBATCH_TOKENS = (16_384, 8192, 4096)  # candidate microbatch sizes per device
_MIN_CPU_TOKENS = 512
_USABLE_SHARE = 0.9  # share of device memory to plan for when sizes are chosen


@dataclasses.dataclass(frozen=True)
class HardwareTarget:
    """The hardware that a run is planned for."""

    device: Device  # kind of each
    num_devices: int
    # What programs are compiled for: devices of this process, or a name for
    # `absent.devices_by_name`.
    devices: Sequence[Any] | str
    num_hosts: int = 1  # devices are split evenly over them


def local_target(present: Sequence[Any]) -> HardwareTarget:
    """The target of attached devices; raises ConfigError if their kind is not in the table."""
    device = accelerators.local_device(present)
    if device is None:
        raise ConfigError(
            f"device: nothing is known of {present[0].device_kind!r};"
            f" name one of {', '.join(accelerators.DEVICES)} with --device"
        )
    num_hosts = len({each.process_index for each in present})
    return HardwareTarget(device, len(present), present, num_hosts)


def topology_target(topology: str, device: str, num_devices: int) -> HardwareTarget:
    """The target of a TPU topology, or of `num_devices` of a kind if `topology` is empty."""
    if not topology:
        kind = accelerators.device_by_name(device)
        return HardwareTarget(kind, num_devices, kind.name)
    kind, count = accelerators.topology_devices(topology)
    return HardwareTarget(kind, count, topology)


def make_plan(config: JobConfig, target: HardwareTarget) -> MemoryPlan:
    """The analytic memory plan of a job, with the settings it leaves open chosen.

    Raises:
      ConfigError: If the model is not known, or the mesh does not fill the devices.
    """
    policy = _policy_shape(config)
    if not config.learns_from_samples:
        return _make_plan(policy, (), _with_chosen_sizes(config, policy, (), target), target)
    setting = _plan_setting(config.require_rl(), policy, target)
    return _make_plan(policy, setting.scorers, _with_placement(setting, target), target)


def check_memory(config: JobConfig, present: Sequence[Any]) -> float:
    """The planned peak in bytes on each device present; 0 if their kind is not known.

    Estimates may be a tenth too high: an excess up to that only warns.

    Raises:
      ConfigError: If the run cannot fit, with the missing bytes and the nearest run that fits.
    """
    if accelerators.local_device(present) is None:
        logging.warning("unknown device %s: no memory plan", present[0].device_kind)
        return 0.0
    estimate = make_plan(config, local_target(present))
    if not estimate.fits:
        busiest = max(estimate.programs, key=lambda name: estimate.programs[name].total)
        message = (
            f"config: needs {estimate.peak_bytes / GIB:.1f} GiB on each"
            f" {estimate.device.name} device"
            f" while '{busiest}' runs, {-estimate.free_bytes / GIB:.1f} more than it has;"
            " nearest run"
            f" that fits, {memory_plan.nearest_fit(estimate)}"
        )
        if estimate.peak_bytes > _ESTIMATE_ERROR * estimate.device.memory_bytes:
            raise ConfigError(message)
        logging.log_first_n(logging.WARNING, "%s", 1, message)  # a command may check twice
    return estimate.peak_bytes


def fit_mesh(config: Job, target: HardwareTarget) -> Job:
    """The config with a mesh that fills the target; warns if the config's own does not."""
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


def resolve(config: RLConfig, workdir: str | os.PathLike[str]) -> RLConfig:
    """The checked config with all sizes set: those of the run in `workdir`, or planned ones.

    So a resumed run repeats it bit for bit. Sizes set in the config win; placement is not changed.
    Hyperparameters that the policy loss leaves open are set to their defaults, and names on the
    hub get their commit (`pin_models`, `pin_datasets`).
    """
    config = pin_datasets(pin_models(config, workdir), workdir)
    requirements.check_functions(config.algorithm)
    algorithm = requirements.with_loss_defaults(config.algorithm)
    config = dataclasses.replace(config, algorithm=algorithm)
    for path in config.scorer_paths:
        # report a broken folder before any plan: that would only say that the run does not fit
        config_reader.read_config(path)
    config = _with_started_sizes(config, workdir)
    return (
        _with_sizes_from(config, _with_local_choices(config)) if _has_open_sizes(config) else config
    )


def resolve_unsaved(config: RLConfig) -> RLConfig:
    """The checked config of a policy without the folder of a run, with all sizes set."""
    requirements.check_functions(config.algorithm)
    config = pin_models(config)
    return (
        _with_sizes_from(config, _with_local_choices(config)) if _has_open_sizes(config) else config
    )


def _with_started_sizes(config: Job, workdir: str | os.PathLike[str]) -> Job:
    """The config with the sizes of the run that was started in this folder, if any."""
    if _has_open_sizes(config) and files.is_file(files.run_path(workdir) / "config.json"):
        return _with_sizes_from(config, load_config(workdir))
    return config


def resolved_meshes(job: JobConfig) -> dict[str, Mesh]:
    """The mesh of each role on the devices of this run; for RL the plan may choose them.

    Raises ConfigError if the devices cannot be shared out so.
    """
    if not job.learns_from_samples:
        return job_models.shared_mesh(job)
    config = job.require_rl()
    if config.placement.choice == "auto":
        config = _with_local_choices(config)
    return job_models.role_meshes(config)


def choose_sizes(config: RLConfig, policy: Architecture, present: Sequence[Any]) -> RLConfig:
    """The config with pools, microbatch size and remat policy for the devices present.

    Pools are the best of the ranking (`planning/pool_placement.py`) that fit their roles and whose
    rows all models can split; then the least rematerialization, and with it the most tokens, that
    fit the devices. On an unknown kind of device all roles share all devices, with full remat.
    """
    if accelerators.local_device(present) is not None:
        target = local_target(present)
        return _with_placement(_plan_setting(config, policy, target), target)
    if config.placement.choice == "auto":
        config = dataclasses.replace(config, placement=PlacementConfig())
    _, most_tokens = _size_candidates(config, "tpu")[0]
    return _with_sizes(config, memory_plan.REMAT[-1], most_tokens)


def _with_local_choices(config: RLConfig) -> RLConfig:
    if config.model.path:
        config_reader.read_config(config.model.path)
    return choose_sizes(config, _policy_shape(config), mesh_lib.run_devices())


def resolve_supervised(config: Supervised, workdir: str | os.PathLike[str]) -> Supervised:
    """The config of a supervised job with all sizes and commits set, as `resolve`."""
    config = pin_datasets(pin_models(config, workdir), workdir)
    if (loss := config.preference_loss) is not None:
        requirements.check_preference_loss(loss)
        changes: Any = {"dpo": requirements.with_preference_defaults(loss)}
        config = dataclasses.replace(config, **changes)
    config = _with_started_sizes(config, workdir)
    if not _has_open_sizes(config):
        return config
    if config.model.path:
        config_reader.read_config(config.model.path)
    present = mesh_lib.run_devices()
    if accelerators.local_device(present) is None:
        return _with_sizes(
            config, memory_plan.REMAT[-1], max(_MICROBATCH_TOKENS[0], config.max_sequence_tokens)
        )
    return _with_chosen_sizes(config, _policy_shape(config), (), local_target(present))


def _policy_shape(config: JobConfig) -> Architecture:
    """The policy's shape; only a randomly initialized model needs the tokenizer for it."""
    vocab_size = 0 if config.model.path else len(job_models.load_tokenizer(config.model))
    return published_shapes.policy_shape(config.model, vocab_size)


def _plan_setting(config: RLConfig, policy: Architecture, target: HardwareTarget) -> RunSetting:
    return RunSetting(
        config, policy, published_shapes.scoring_models(config, policy), {}, target.device.backend
    )


def _make_plan(
    policy: Architecture,
    scorers: tuple[ScoringModel, ...],
    config: JobConfig,
    target: HardwareTarget,
) -> MemoryPlan:
    return memory_plan.make_plan(config, policy, scorers, target.device, target.num_devices)


def _has_open_sizes(config: JobConfig) -> bool:
    return config.model.remat == "auto" or not config.trainer.max_tokens_per_microbatch


def _with_sizes_from(config: Job, other: JobConfig) -> Job:
    return _with_sizes(config, other.model.remat, other.trainer.max_tokens_per_microbatch)


def _with_sizes(config: Job, remat: Any, tokens: int) -> Job:
    """The config with remat policy and microbatch tokens, where it leaves them open."""
    model, trainer = config.model, config.trainer
    if model.remat == "auto":
        model = dataclasses.replace(model, remat=remat)
    if not trainer.max_tokens_per_microbatch:
        trainer = dataclasses.replace(trainer, max_tokens_per_microbatch=tokens)
    return dataclasses.replace(config, model=model, trainer=trainer)


def _size_candidates(config: JobConfig, backend: str) -> list[tuple[str, int]]:
    """Candidate (remat policy, microbatch tokens), the least recomputation first."""
    row_tokens = context_parallel.padded_row_width(config.max_sequence_tokens, config.mesh.sequence)
    row_tokens = -(-row_tokens // config.mesh.sequence)
    cpu_tokens = (_MIN_CPU_TOKENS,) if backend == "cpu" else ()
    tokens = dict.fromkeys(max(each, row_tokens) for each in (*_MICROBATCH_TOKENS, *cpu_tokens))
    return list(itertools.product(memory_plan.REMAT, tokens))


def _with_placement(setting: RunSetting, target: HardwareTarget) -> RLConfig:
    """The config with the best pools and sizes, where it leaves them open."""
    config = setting.config
    if config.placement.choice == "auto":
        # Placements are compared with the sizes that leave the most room.
        smallest = _with_sizes(config, *_size_candidates(config, setting.backend)[-1])
        trial_setting = dataclasses.replace(setting, config=smallest)
        ranking = pool_placement.rank_placements(
            trial_setting, target.device, target.num_devices, target.num_hosts
        )
        pools = PlacementConfig()  # all roles share all devices
        if best := next(
            (each for each in ranking if each.fits and _can_split_rows(each, smallest)), None
        ):
            pools = best.config()
            logging.info("placement: %s; %s", best.name, best.explanation())
        else:
            logging.warning("placement: none fits; all roles share all devices")
        config = dataclasses.replace(config, placement=pools)
    return _with_chosen_sizes(config, setting.policy, setting.scorers, target)


def _can_split_rows(candidate: pool_placement.Placement, config: RLConfig) -> bool:
    """Whether every pool can split the rows of the run."""
    placement_config, axes = candidate.config(), mesh_lib.AXES
    role_meshes = {
        role: AbstractMesh(
            tuple(getattr(placement_config.pools[pool], axis) for axis in axes), axes
        )
        for role, pool in placement_config.roles.items()
    }
    try:
        job_models.row_split(config, role_meshes)
    except ConfigError as error:
        logging.info("placement: not %s: %s", candidate.name, error.problems[0])
        return False
    return True


def _with_chosen_sizes(
    config: Job, policy: Architecture, scorers: tuple[ScoringModel, ...], target: HardwareTarget
) -> Job:
    """The config with the microbatch size and remat policy chosen where it leaves them open.

    On a CPU small microbatches are as fast and memory is shared, so the limit there is just above
    the smallest peak of all candidates.
    """
    backend = target.device.backend
    if not _has_open_sizes(config):
        return config

    def peak(remat: str, tokens: int) -> float:
        return _make_plan(policy, scorers, _with_sizes(config, remat, tokens), target).peak_bytes

    choices = _size_candidates(config, backend)
    limit = _USABLE_SHARE * target.device.memory_bytes
    if backend == "cpu":
        limit = min(limit, 1.05 * peak(*choices[-1]) + GIB / 4)
    sizes = next((each for each in choices if peak(*each) <= limit), choices[-1])
    config = _with_sizes(config, *sizes)
    logging.info(
        "chosen by the plan: trainer.max_tokens_per_microbatch=%d model.remat=%s",
        config.trainer.max_tokens_per_microbatch,
        config.model.remat,
    )
    return config
