"""Whether a run fits its devices, by how much, and the nearest run that does."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxrl_llm.algorithms import needs
from jaxrl_llm.config import ConfigError, JobConfig
from jaxrl_llm.config.placement import CHOICES, ROLES
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.planning import jobs, memory, stages
from jaxrl_llm.planning.devices import DEVICES, GIB, Device
from jaxrl_llm.planning.setting import Parts, Scorer, Setting, expert_axes
from jaxrl_llm.sharding import pools
from jaxrl_llm.sharding.mesh import AXES, mesh_sizes

Changes = dict[str, Any]  # values by config key, in the order of the config

# What the backward pass computes again, from the least work to the least memory.
REMAT = ("none", "dots", "projections", "attention", "full")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run needs on its devices."""

    job: JobConfig
    pools: Mapping[tuple[str, ...], Setting]  # by the roles of each pool; most runs have one
    device: Device
    # All bytes on a device while each program runs. With several pools, names end with the roles.
    programs: Mapping[str, Parts]

    @property
    def setting(self) -> Setting:  # where the policy lives
        return next(setting for roles, setting in self.pools.items() if "policy" in roles)

    @property
    def num_devices(self) -> int:
        return sum(setting.num_devices for setting in self.pools.values())

    @property
    def peak(self) -> float:  # most bytes on a device; on a CPU with those of the process itself
        return max(parts.total for parts in self.programs.values()) + self.device.process_bytes

    @property
    def room(self) -> float:  # bytes that are left at the busiest moment; negative: missing
        return self.device.memory_bytes - self.peak

    @property
    def fits(self) -> bool:
        return self.room >= 0


@dataclasses.dataclass(frozen=True)
class Advice:
    """The nearest run that fits: settings to change, and its plan."""

    changes: Changes
    plan: Plan

    def __str__(self) -> str:
        device = self.plan.device
        values = {k: f'"{v}"' if isinstance(v, tuple) else v for k, v in self.changes.items()}
        flags = " ".join(f"--config.{key}={value}" for key, value in values.items())
        left = f"{self.plan.peak / GIB:.1f} of {device.memory_bytes / GIB:.1f} GiB a device"
        where = f"{self.plan.num_devices} x {device.name}"
        return f"on {where}: {flags or 'no change of settings'} ({left})"


def axes(mesh: Mapping[str, int]) -> str:
    """Returns the axes of a mesh that are larger than 1: "fsdp 8 x tensor 2"."""
    return " x ".join(f"{axis} {n}" for axis, n in mesh.items() if n > 1) or "one device"


def make(
    config: JobConfig, policy: Shape, scorers: tuple[Scorer, ...], device: Device, num_devices: int
) -> Plan:
    """Returns the plan of a run whose `placement.choice` is not "auto"; raises as `pools.sizes`."""
    if not config.learns_from_samples:
        return _of_job(config, policy, device, num_devices)
    config = config.require_rl()
    meshes: dict[tuple[str, ...], dict[str, int]] = {}
    if config.placement.choice == "colocate":
        meshes[ROLES] = mesh_sizes(config.mesh, num_devices)
    else:
        needed = needs.of(config.algorithm)
        has = {"critic": needed.critic, "reference": needed.reference, "reward": bool(scorers)}
        used = [role for role in ROLES if has.get(role, True)]
        by_pool, homes = pools.sizes(config.placement, config.mesh, used, num_devices, 1)
        for name, mesh in by_pool.items():
            meshes[tuple(role for role in used if homes[role] == name)] = mesh
    of_roles = {role: sizes for roles, sizes in meshes.items() for role in roles}
    stages.check_roles(config, of_roles)
    for shape in (policy, *(scorer.shape for scorer in scorers)):
        stages.check_layers(config, shape, of_roles["policy"]["stage"])
    found = {
        roles: Setting(
            config, policy, scorers, mesh, device.backend, device.memory_bytes, full=True
        )
        for roles, mesh in meshes.items()
    }
    programs = {
        name if len(found) == 1 else f"{name} ({'+'.join(roles)})": parts
        for roles, setting in found.items()
        for name, parts in memory.step(setting, roles).items()
    }
    return Plan(config, found, device, programs)


def _of_job(job: JobConfig, policy: Shape, device: Device, num_devices: int) -> Plan:
    mesh = mesh_sizes(job.mesh, num_devices)
    stages.check_roles(job, {"policy": mesh})
    stages.check_layers(job, policy, mesh["stage"])
    programs: dict[str, Parts] = {}
    planned = jobs.of(job)
    settings = [
        Setting(
            each.config,
            policy,
            (),
            mesh,
            device.backend,
            device.memory_bytes,
            full=True,
            scalar_adapters="policy" not in each.roles,
        )
        for each in planned
    ]
    for each, setting in zip(planned, settings, strict=True):
        made = memory.step(setting, each.roles)
        programs |= {name: parts for name, parts in made.items() if name in each.programs}
    return Plan(job, {("policy",): settings[0]}, device, programs)


def changed(group: Any, changes: Changes) -> Any:
    """Returns the config with some settings, named as on the command line, at other values."""
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        value = changed(getattr(group, name), {rest: value}) if rest else value
        group = dataclasses.replace(group, **{name: value})
    return group


def nearest(plan: Plan) -> Advice:
    """Returns the nearest run that fits: the plan's own if it does.

    Fewest kinds of settings changed first (recomputation, microbatch, slots, dtypes of weights
    and moments, what rests on the host, mesh and rollout layout), then the least of each. If no
    change is enough, it uses the fewest devices of the same kind, doubled again and again; else
    the fewest of other kinds, the smallest first. Raises ConfigError if there is no such run.
    """
    if plan.fits:
        return Advice({}, plan)
    counts = [plan.num_devices << i for i in range(12)]
    others = sorted(DEVICES.values(), key=lambda other: other.memory_bytes)
    for devices in ([plan.device], others):
        for count, device in itertools.product(counts, devices):
            if found := _search(plan, device, count):
                return found
    raise ConfigError(
        f"no number of {plan.device.name} and no change of settings fits this run; use a smaller"
        " model"
    )


def _search(plan: Plan, device: Device, count: int) -> Advice | None:
    """Returns the nearest change with which the run fits `count` devices, None without one.

    Of every kind of setting but the mesh, the last value needs the least memory. So the last values
    show which kinds must change; only changes of those kinds are tried one by one.
    """
    setting = plan.setting

    def fitting(picked: Iterable[Changes]) -> Advice | None:
        changes = {key: value for each in picked for key, value in each.items()}
        config = changed(plan.job, changes)
        try:
            made = make(config, setting.model, setting.scorers, device, count)
        except ConfigError:  # the devices cannot be divided into the pools
            return None
        return Advice(changes, made) if made.fits else None

    kinds = [values for values in (_read(plan.job, each) for each in _kinds(plan)) if values]
    meshes = list(_meshes(plan, count))
    anywhere = [{}, *meshes]

    def enough(kinds: Iterable[list[Changes]], meshes: list[Changes]) -> bool:
        last = (values[-1:] for values in kinds)
        return any(map(fitting, itertools.product(*last, meshes)))

    if not enough(kinds, anywhere):
        return None
    # On other devices a new mesh does not count as a change.
    same = plan.num_devices == count and plan.device == device
    options = [*kinds, meshes] if same else kinds
    for number in range(len(options) + 1):
        found: list[tuple[int, Advice]] = []
        for chosen in itertools.combinations(options, number):
            moves = same and meshes in chosen[-1:]
            where = meshes if moves else [{}] if same else anywhere
            of_kinds = chosen[:-1] if moves else chosen
            if not enough(of_kinds, where):
                continue
            tried = (*of_kinds, where)
            steps = itertools.product(*map(range, map(len, tried)))
            for picks in sorted(steps, key=sum):
                if made := fitting(values[i] for values, i in zip(tried, picks, strict=True)):
                    found.append((sum(picks), made))
                    break
        if found:
            return min(found, key=lambda one: one[0])[1]
    return None


def _read(job: JobConfig, values: list[Changes]) -> list[Changes]:
    """Returns the changes without keys that a job does not read, and without those left empty."""

    def reads(key: str) -> bool:
        if any(key == name or key.startswith(f"{name}.") for name in getattr(job, "unread", ())):
            return False
        return hasattr(job, key.partition(".")[0])

    found = [{key: value for key, value in each.items() if reads(key)} for each in values]
    return [each for each in found if each]


def _kinds(plan: Plan) -> Iterator[list[Changes]]:
    config = plan.setting.config
    remats = (*REMAT, "offload_full")
    known = remats.index(config.model.remat) + 1 if config.model.remat in remats else len(remats)
    yield [{"model.remat": name} for name in remats[known:]]

    tokens, width = config.trainer.max_tokens_per_microbatch, config.max_sequence_tokens
    fewer = _halves(tokens // width * width, width)
    yield [{"trainer.max_tokens_per_microbatch": size} for size in fewer if size < tokens]

    slots = plan.setting.num_slots
    yield [{"rollout.num_slots": size} for size in _halves(slots, 8) if size < slots]

    moments = {"trainer.optimizer.moment_dtype": "bfloat16"}
    if needs.of(config.algorithm).critic:
        moments["critic.optimizer.moment_dtype"] = "bfloat16"
    dtypes = [moments] if config.trainer.optimizer.moment_dtype == "float32" else []
    if config.model.param_dtype == "float32":
        dtypes.append({"model.param_dtype": "bfloat16", **moments})
    yield dtypes

    frozen = plan.setting.has("reference")
    moved = [("reference",)] * frozen + [("optimizer",)] + [("optimizer", "reference")] * frozen
    here = set(config.mesh.on_host)
    yield [{"mesh.on_host": names} for names in moved if here < set(names)]


def _halves(size: int, smallest: int) -> Iterator[int]:
    while size > smallest:
        yield size
        size //= 2
    yield smallest


def _meshes(plan: Plan, count: int) -> Iterator[Changes]:
    """Yields meshes over `count` devices, the nearest to the run's own first."""
    config = plan.setting.config
    if len(plan.pools) > 1:
        if config.placement.choice in CHOICES:
            yield {"placement.choice": "colocate"}
        return
    now = plan.setting.mesh
    most = 4 * plan.setting.policy.num_kv_heads
    tensors = [2**i for i in range(6) if count % 2**i == 0 and 2**i <= most]
    moved = "tensor", "expert", "stage"
    ways_of_layers = dict.fromkeys((now["stage"], 1))
    splits = itertools.product(tensors, expert_axes(plan.setting.policy), ways_of_layers)
    pairs = [
        {**dict(zip(moved, ways, strict=True)), "fsdp": count // math.prod(ways)}
        for ways in splits
        if count % math.prod(ways) == 0
    ]
    pairs.sort(key=lambda split: sum(abs(math.log2(split[a] / now[a])) for a in moved))
    for rollout in dict.fromkeys((config.mesh.rollout, "train")):
        for split in pairs:
            sizes = dict.fromkeys(AXES, 1) | split
            if sizes != now or rollout != config.mesh.rollout:
                changes = {f"mesh.{axis}": size for axis, size in sizes.items()}
                changes["mesh.rollout"] = rollout
                yield {k: v for k, v in changes.items() if getattr(config.mesh, k[5:]) != v}
