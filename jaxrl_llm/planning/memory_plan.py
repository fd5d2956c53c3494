"""Memory plan of a run: whether it fits its devices, and the nearest config that does."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxrl_llm.algorithms import requirements
from jaxrl_llm.config import ConfigError, JobConfig
from jaxrl_llm.config.placement import CHOICES, ROLES
from jaxrl_llm.models import flops
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.pipeline import checks
from jaxrl_llm.models.recurrent import checks as recurrent_checks
from jaxrl_llm.planning import memory, supervised_runs
from jaxrl_llm.planning.accelerators import DEVICES, GIB, Device
from jaxrl_llm.planning.run_setting import MemoryParts, RunSetting, ScoringModel, expert_axis_sizes
from jaxrl_llm.sharding import device_pools
from jaxrl_llm.sharding.mesh import AXES, mesh_sizes

Changes = dict[str, Any]  # values by config key, in the order of the config

_TENSOR_SIZES = [1, 2, 4, 8, 16, 32]  # of the tensor axis, that are tried
# Remat policies, from least recomputation to least memory.
REMAT = ("none", "dots", "projections", "attention", "full")


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Memory that a run needs on its devices."""

    job: JobConfig
    pools: Mapping[tuple[str, ...], RunSetting]  # by the roles of each pool; most runs have one
    device: Device
    # Bytes per device while each program runs. With several pools, names end with the roles.
    programs: Mapping[str, MemoryParts]

    @property
    def setting(self) -> RunSetting:  # of the pool with the policy
        return next(setting for roles, setting in self.pools.items() if "policy" in roles)

    @property
    def num_devices(self) -> int:
        return sum(setting.num_devices for setting in self.pools.values())

    @property
    def peak_bytes(self) -> float:  # peak bytes per device; on CPU including the process itself
        return max(parts.total for parts in self.programs.values()) + self.device.process_bytes

    @property
    def free_bytes(self) -> float:  # free bytes at the peak; negative: missing
        return self.device.memory_bytes - self.peak_bytes

    @property
    def fits(self) -> bool:
        return self.free_bytes >= 0


@dataclasses.dataclass(frozen=True)
class Advice:
    """The nearest config that fits: settings to change, and the plan with them."""

    changes: Changes
    plan: MemoryPlan

    def __str__(self) -> str:
        device = self.plan.device
        values = {k: f'"{v}"' if isinstance(v, tuple) else v for k, v in self.changes.items()}
        flags = " ".join(f"--config.{key}={value}" for key, value in values.items())
        left = f"{self.plan.peak_bytes / GIB:.1f} of {device.memory_bytes / GIB:.1f} GiB a device"
        where = f"{self.plan.num_devices} x {device.name}"
        return f"on {where}: {flags or 'no change of settings'} ({left})"


def mesh_axes_text(mesh: Mapping[str, int]) -> str:
    """The mesh axes larger than 1 as text: "fsdp 8 x tensor 2"."""
    return " x ".join(f"{axis} {n}" for axis, n in mesh.items() if n > 1) or "one device"


def make_plan(
    config: JobConfig,
    policy: Architecture,
    scorers: tuple[ScoringModel, ...],
    device: Device,
    num_devices: int,
) -> MemoryPlan:
    """The plan of a run whose `placement.choice` is not "auto"; raises as
    `device_pools.pool_sizes`.
    """
    if not config.learns_from_samples:
        return _supervised_plan(config, policy, device, num_devices)
    config = config.require_rl()
    meshes: dict[tuple[str, ...], dict[str, int]] = {}
    if config.placement.choice == "colocate":
        meshes[ROLES] = mesh_sizes(config.mesh, num_devices)
    else:
        needed = requirements.requirements(config.algorithm)
        needs_role = {
            "critic": needed.critic,
            "reference": needed.reference,
            "reward": bool(scorers),
        }
        used = [role for role in ROLES if needs_role.get(role, True)]
        pool_meshes, role_pools = device_pools.pool_sizes(
            config.placement, config.mesh, used, num_devices, 1
        )
        for name, mesh in pool_meshes.items():
            meshes[tuple(role for role in used if role_pools[role] == name)] = mesh
    role_meshes = {role: sizes for roles, sizes in meshes.items() for role in roles}
    checks.check_roles(config, role_meshes)
    for shape in (policy, *(scorer.shape for scorer in scorers)):
        checks.check_layers(config, shape, role_meshes["policy"]["stage"])
        recurrent_checks.check_settings(config, shape)
    settings = {
        roles: RunSetting(
            config,
            policy,
            scorers,
            mesh,
            device.backend,
            device.memory_bytes,
            full_microbatches=True,
        )
        for roles, mesh in meshes.items()
    }
    programs = {
        name if len(settings) == 1 else f"{name} ({'+'.join(roles)})": parts
        for roles, setting in settings.items()
        for name, parts in memory.step_memory(setting, roles).items()
    }
    return MemoryPlan(config, settings, device, programs)


def _supervised_plan(
    job: JobConfig, policy: Architecture, device: Device, num_devices: int
) -> MemoryPlan:
    mesh = mesh_sizes(job.mesh, num_devices)
    checks.check_roles(job, {"policy": mesh})
    checks.check_layers(job, policy, mesh["stage"])
    programs: dict[str, MemoryParts] = {}
    planned_runs = supervised_runs.planned_runs(job)
    settings = [
        RunSetting(
            run.config,
            policy,
            (),
            mesh,
            device.backend,
            device.memory_bytes,
            full_microbatches=True,
            scalar_adapters="policy" not in run.roles,
        )
        for run in planned_runs
    ]
    for run, setting in zip(planned_runs, settings, strict=True):
        job_programs = memory.step_memory(setting, run.roles)
        programs |= {name: parts for name, parts in job_programs.items() if name in run.programs}
    return MemoryPlan(job, {("policy",): settings[0]}, device, programs)


def with_changes(group: Any, changes: Changes) -> Any:
    """A copy of the config with some settings changed, keyed as on the command line."""
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        value = with_changes(getattr(group, name), {rest: value}) if rest else value
        group = dataclasses.replace(group, **{name: value})
    return group


def nearest_fit(plan: MemoryPlan) -> Advice:
    """The nearest config that fits: the plan's own if it does.

    Prefers changing the fewest kinds of settings (remat, microbatch, slots, dtypes of weights and
    moments, host offload, mesh and rollout layout), then the smallest change of each. If no change
    is enough, it uses the fewest devices of the same kind, doubling their number; else the fewest
    of other kinds, smallest memory first. Raises ConfigError if nothing fits.
    """
    if plan.fits:
        return Advice({}, plan)
    counts = [plan.num_devices << i for i in range(12)]
    all_devices = sorted(DEVICES.values(), key=lambda other: other.memory_bytes)
    for devices in ([plan.device], all_devices):
        for count, device in itertools.product(counts, devices):
            if advice := _nearest_on_devices(plan, device, count):
                return advice
    raise ConfigError(
        f"no number of {plan.device.name} and no change of settings fits this run; use a smaller"
        " model"
    )


def _nearest_on_devices(plan: MemoryPlan, device: Device, count: int) -> Advice | None:
    """The nearest change with which the run fits `count` devices, or None.

    The last value of every kind of setting but the mesh needs the least memory. So the last values
    show which kinds must change; only combinations of those kinds are tried value by value.
    """
    setting = plan.setting
    if device.memory_bytes < _least_bytes(plan, count):
        return None

    def fitting_advice(selection: Iterable[Changes]) -> Advice | None:
        changes = {key: value for each in selection for key, value in each.items()}
        config = with_changes(plan.job, changes)
        try:
            candidate_plan = make_plan(config, setting.model, setting.scorers, device, count)
        except ConfigError:  # the devices do not divide into the pools
            return None
        return Advice(changes, candidate_plan) if candidate_plan.fits else None

    kind_values = [
        values
        for values in (_without_unread(plan.job, each) for each in _candidate_changes(plan))
        if values
    ]
    meshes = list(_candidate_meshes(plan, count))
    any_mesh = [{}, *meshes]

    def can_fit(kind_values: Iterable[list[Changes]], meshes: list[Changes]) -> bool:
        last = (values[-1:] for values in kind_values)
        return any(map(fitting_advice, itertools.product(*last, meshes)))

    if not can_fit(kind_values, any_mesh):
        return None
    # On other devices a new mesh does not count as a change.
    same_devices = plan.num_devices == count and plan.device == device
    options = [*kind_values, meshes] if same_devices else kind_values
    for number in range(len(options) + 1):
        candidates: list[tuple[int, Advice]] = []
        for selected_kinds in itertools.combinations(options, number):
            changes_mesh = same_devices and meshes in selected_kinds[-1:]
            mesh_options = meshes if changes_mesh else [{}] if same_devices else any_mesh
            setting_kinds = selected_kinds[:-1] if changes_mesh else selected_kinds
            if not can_fit(setting_kinds, mesh_options):
                continue
            value_lists = (*setting_kinds, mesh_options)
            steps = itertools.product(*map(range, map(len, value_lists)))
            for picks in sorted(steps, key=sum):
                if advice := fitting_advice(
                    values[i] for values, i in zip(value_lists, picks, strict=True)
                ):
                    candidates.append((sum(picks), advice))
                    break
        if candidates:
            return min(candidates, key=lambda candidate: candidate[0])[1]
    return None


def _least_bytes(plan: MemoryPlan, count: int) -> float:
    """A lower bound of the bytes per device, whatever settings and mesh are changed.

    Without it, a model that is too large by orders of magnitude is refused only after a thousand
    plans, which take half a minute. It counts a byte per weight: those of all layers, over all
    devices, and those of attention in one layer, gathered over all axes but `tensor`.
    """
    shape = plan.setting.model
    layers = sum(flops.layer_matmul_weights(shape, kind) for kind in shape.layer_types)
    tensor = max(_TENSOR_SIZES[-1], plan.setting.mesh["tensor"])
    return max(layers / count, flops.mixer_matmul_weights(shape) / tensor)


def _without_unread(job: JobConfig, values: list[Changes]) -> list[Changes]:
    """Drops keys that a job does not read, and changes that become empty."""

    def reads(key: str) -> bool:
        if any(key == name or key.startswith(f"{name}.") for name in getattr(job, "unread", ())):
            return False
        return hasattr(job, key.partition(".")[0])

    filtered = [{key: value for key, value in each.items() if reads(key)} for each in values]
    return [each for each in filtered if each]


def _candidate_changes(plan: MemoryPlan) -> Iterator[list[Changes]]:
    config = plan.setting.config
    remats = (*REMAT, "offload_full")
    next_remat = (
        remats.index(config.model.remat) + 1 if config.model.remat in remats else len(remats)
    )
    yield [{"model.remat": name} for name in remats[next_remat:]]

    tokens, width = config.trainer.max_tokens_per_microbatch, config.max_sequence_tokens
    fewer = _halves(tokens // width * width, width)
    yield [{"trainer.max_tokens_per_microbatch": size} for size in fewer if size < tokens]

    slots = plan.setting.num_slots
    yield [{"rollout.num_slots": size} for size in _halves(slots, 8) if size < slots]

    optimizers = {"trainer.optimizer": config.trainer.optimizer}
    if requirements.requirements(config.algorithm).critic:
        optimizers["critic.optimizer"] = config.critic.optimizer
    averages = any(each.name == "schedule_free" for each in optimizers.values())  # in float32
    moments = {
        f"{key}.moment_dtype": "bfloat16"
        for key, each in optimizers.items()
        if each.moment_dtype == "float32" and each.name != "schedule_free"
    }
    dtypes = [moments] if moments else []
    if config.model.param_dtype == "float32" and not averages:
        dtypes.append({"model.param_dtype": "bfloat16", **moments})
    yield dtypes

    has_reference = plan.setting.has_role("reference")
    offload_options = (
        [("reference",)] * has_reference
        + [("optimizer",)]
        + [("optimizer", "reference")] * has_reference
    )
    offloaded = set(config.mesh.on_host)
    yield [{"mesh.on_host": names} for names in offload_options if offloaded < set(names)]


def _halves(size: int, smallest: int) -> Iterator[int]:
    while size > smallest:
        yield size
        size //= 2
    yield smallest


def _candidate_meshes(plan: MemoryPlan, count: int) -> Iterator[Changes]:
    """Yields changes to meshes over `count` devices, those closest to the run's own first."""
    config = plan.setting.config
    if len(plan.pools) > 1:
        if config.placement.choice in CHOICES:
            yield {"placement.choice": "colocate"}
        return
    current = plan.setting.mesh
    max_tensor = 4 * plan.setting.policy.num_kv_heads
    tensors = [size for size in _TENSOR_SIZES if count % size == 0 and size <= max_tensor]
    varied_axes = "tensor", "expert", "stage"
    stage_sizes = dict.fromkeys((current["stage"], 1))
    combinations = itertools.product(tensors, expert_axis_sizes(plan.setting.policy), stage_sizes)
    splits = [
        {**dict(zip(varied_axes, axis_sizes, strict=True)), "fsdp": count // math.prod(axis_sizes)}
        for axis_sizes in combinations
        if count % math.prod(axis_sizes) == 0
    ]
    splits.sort(key=lambda split: sum(abs(math.log2(split[a] / current[a])) for a in varied_axes))
    for rollout in dict.fromkeys((config.mesh.rollout, "train")):
        for split in splits:
            sizes = dict.fromkeys(AXES, 1) | split
            if sizes != current or rollout != config.mesh.rollout:
                changes: Changes = {f"mesh.{axis}": size for axis, size in sizes.items()}
                changes["mesh.rollout"] = rollout
                yield {k: v for k, v in changes.items() if getattr(config.mesh, k[5:]) != v}
