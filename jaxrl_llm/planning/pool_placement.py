"""Placement of a run's models on device pools, ranked by the predicted step time.

A grouping is a partition of policy, critic, reference and reward model; rollout belongs to the
policy. Each group gets a pool of devices with the fastest mesh that fits. A step has three stages:
within a stage pools run in parallel, and the models of one pool take turns.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping

from jaxrl_llm.config import ConfigError, PlacementConfig, PoolConfig
from jaxrl_llm.config.placement import ROLES as ALL_ROLES
from jaxrl_llm.models.pipeline import checks
from jaxrl_llm.planning import memory, step_time
from jaxrl_llm.planning.accelerators import GIB, Device
from jaxrl_llm.planning.memory_plan import MemoryPlan, mesh_axes_text
from jaxrl_llm.planning.run_setting import RunSetting, expert_axis_sizes
from jaxrl_llm.sharding.mesh import AXES, STAGE

ROLES = ("policy", "critic", "reference", "reward")
Grouping = tuple[tuple[str, ...], ...]

# Phases of each stage of a step, with the role each belongs to.
_STAGES: Mapping[str, Mapping[str, str]] = {
    "generate": {
        "reshard": "policy",
        "tower": "policy",
        "prefill": "rollout",
        "decode": "rollout",
    },
    "score": {
        "score": "policy",
        **{f"score_{role}": role for role in ROLES[1:]},
        "score_teacher": "reward",
    },
    "learn": {"train": "policy", "train_critic": "critic"},
}


@dataclasses.dataclass(frozen=True)
class PlannedPool:
    """A group of roles on a device pool of its own."""

    roles: tuple[str, ...]
    setting: RunSetting  # on the pool's mesh
    device: Device

    @functools.cached_property
    def peak_bytes(self) -> float:  # peak per device
        return memory.peak_bytes(self.setting, self.roles) + self.device.process_bytes

    @functools.cached_property
    def costs(self) -> dict[str, step_time.PhaseCost]:  # of the phases of its roles
        names = {
            n for phases in _STAGES.values() for n, role in phases.items() if role in self.roles
        }
        return {
            k: v for k, v in step_time.phase_costs(self.setting, self.device).items() if k in names
        }

    @functools.cached_property
    def stage_seconds(self) -> list[float]:  # seconds per stage, in the order of `_STAGES`
        costs = self.costs
        return [sum(costs[n].seconds for n in phases if n in costs) for phases in _STAGES.values()]


@dataclasses.dataclass(frozen=True)
class Placement:
    """A grouping with its best pools; without pools it does not fit at any division."""

    grouping: Grouping
    pools: tuple[PlannedPool, ...]
    step_s: float

    @property
    def fits(self) -> bool:
        return bool(self.pools)

    @property
    def name(self) -> str:
        return " | ".join("+".join(group) for group in self.grouping)

    def explanation(self) -> str:
        if not self.fits:
            return "does not fit: some pool is too small for its models at every division"
        devices = sum(pool.setting.num_devices for pool in self.pools)
        busy_s = sum(sum(pool.stage_seconds) * pool.setting.num_devices for pool in self.pools)
        idle_share = 1 - busy_s / (self.step_s * devices) if self.step_s else 0.0
        fullest = max(pool.peak_bytes for pool in self.pools) / GIB
        stage_times = zip(_STAGES, _stage_seconds(self.pools), strict=True)
        seconds = ", ".join(f"{name} {time:.1f} s" for name, time in stage_times)
        return f"{seconds}; devices idle {idle_share:.0%} of the step; fullest {fullest:.1f} GiB"

    def config(self) -> PlacementConfig:
        by_name = {"_".join(pool.roles): pool for pool in self.pools}
        roles = {role: name for name, pool in by_name.items() for role in pool.roles}
        pools = {
            name: PoolConfig(devices=pool.setting.num_devices, **pool.setting.mesh)
            for name, pool in by_name.items()
        }
        all_roles = {role: roles.get(role, roles["policy"]) for role in ALL_ROLES}
        return PlacementConfig(choice="by_hand", pools=pools, roles=all_roles)


def groupings(roles: tuple[str, ...] = ROLES) -> Iterator[Grouping]:
    """Yields every partition of the roles; four roles have 15."""
    if not roles:
        yield ()
        return
    first, rest = roles[0], roles[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            remaining = tuple(role for role in rest if role not in others)
            for grouping in groupings(remaining):
                yield ((first, *others), *grouping)


def rank_placements(
    setting: RunSetting, device: Device, num_devices: int, num_hosts: int = 1
) -> list[Placement]:
    """All placements of a run's models, independent of its mesh; those that fit come first.

    Ranked by step time (if known), then by the number of pools.
    """
    best_pool = functools.cache(functools.partial(_best_pool, setting, device))
    # Pipeline stages pay off where links between domains of devices are slow.
    max_stages = max(1, num_devices // device.domain)
    stage_counts = [1 << i for i in range(max_stages.bit_length())]
    placements = []
    for grouping in groupings(tuple(role for role in ROLES if setting.has_role(role))):
        best = Placement(grouping, (), math.inf)
        divisions = _divisions(num_devices, len(grouping))
        for counts, stages in itertools.product(divisions, stage_counts):
            if any(count % num_hosts for count in counts):
                continue
            # All pools have the same number of stages.
            pool_for_group = functools.partial(best_pool, stages=stages)
            pools = tuple(filter(None, map(pool_for_group, grouping, counts)))
            step_s = sum(_stage_seconds(pools))
            if len(pools) == len(grouping) and step_s < best.step_s:
                best = Placement(grouping, pools, step_s)
        placements.append(best)
    return sorted(placements, key=lambda placement: (placement.step_s, len(placement.grouping)))


@dataclasses.dataclass(frozen=True)
class StepSpeed:
    """Predicted time of a step, throughput and MFU."""

    step_s: float
    tokens_per_s_per_device: float  # of prompts and responses
    mfu: float  # useful FLOPs over the devices' peak in that time, 0 to 1
    phases: Mapping[str, step_time.PhaseCost]  # per device of its pool


def step_speed(plan: MemoryPlan) -> StepSpeed:
    """Predicts step time, throughput and MFU of a plan."""
    pools = [PlannedPool(roles, setting, plan.device) for roles, setting in plan.pools.items()]
    costs = {name: cost for pool in pools for name, cost in pool.costs.items()}
    step_s = sum(_stage_seconds(pools))
    config = plan.setting.config
    tokens = config.sequences_per_step * config.max_sequence_tokens
    useful = sum(cost.useful_flops * cost.num_devices for cost in costs.values())
    mfu = useful / (step_s * plan.device.flops * plan.num_devices)
    return StepSpeed(step_s, tokens / step_s / plan.num_devices, mfu, costs)


def _stage_seconds(pools: Collection[PlannedPool]) -> list[float]:
    """Seconds of each stage of a step: those of its slowest pool."""
    return [max(stage) for stage in zip(*(pool.stage_seconds for pool in pools), strict=True)]


def _divisions(num_devices: int, num_pools: int) -> Iterator[tuple[int, ...]]:
    """Yields pool sizes that add up to the devices: multiples of an eighth, and powers of two.

    Model dims divide by powers of two: of 96 devices, a pool of 64 holds more than one of 72.
    """
    unit = max(1, num_devices // 8)
    sizes = {*range(unit, num_devices, unit), *(1 << i for i in range(num_devices.bit_length()))}
    for first in itertools.product(sorted(sizes), repeat=num_pools - 1):
        last = num_devices - sum(first)
        if last in sizes or (num_pools == 1 and last == num_devices):
            yield (*first, last)


def _best_pool(
    setting: RunSetting, device: Device, group: tuple[str, ...], count: int, stages: int
) -> PlannedPool | None:
    """The group on the fastest mesh over `count` devices on which it fits, or None."""
    roles = (*group, "rollout") if "policy" in group else group
    fitting = []
    # Across slow links, either weights are gathered, or each domain has a full copy of the weights
    # and only gradients are summed.
    domains = math.gcd(count, max(1, count // device.domain))
    for tensor, expert, domain_replicas in itertools.product(
        (1, 2, 4, 8), expert_axis_sizes(setting.policy), sorted({1, domains // stages or 1})
    ):
        if count % (stages * tensor * expert * domain_replicas) == 0:
            # A power of two, as model dims divide by these; the rest goes to data.
            weight_shards = count // (stages * tensor * expert * domain_replicas)
            fsdp = weight_shards & -weight_shards
            data = domain_replicas * weight_shards // fsdp
            axis_sizes = {"data": data, "fsdp": fsdp, "expert": expert, "tensor": tensor}
            mesh = dict.fromkeys(AXES, 1) | axis_sizes | {STAGE: stages}
            if stages > 1 and not _supports_stages(setting, mesh):
                continue
            pool = PlannedPool(roles, dataclasses.replace(setting, mesh=mesh), device)
            if pool.peak_bytes <= device.memory_bytes:
                fitting.append(pool)
    return min(fitting, key=lambda pool: sum(pool.stage_seconds), default=None)


def _supports_stages(setting: RunSetting, mesh: Mapping[str, int]) -> bool:
    try:
        checks.check_roles(setting.config, {"policy": mesh})
        for shape in (setting.model, *(scorer.shape for scorer in setting.scorers)):
            checks.check_layers(setting.config, shape, mesh[STAGE])
    except ConfigError:
        return False
    return True


def ranking_table(ranking: list[Placement]) -> str:
    """The ranking as a text table, with pools, meshes and reasons."""
    lines = []
    for number, placement in enumerate(ranking, 1):
        time = f"{placement.step_s:8.1f} s" if placement.fits else "       - "
        settings = [pool.setting for pool in placement.pools]
        pools = ", ".join(
            f"{setting.num_devices} ({mesh_axes_text(setting.mesh)})" for setting in settings
        )
        lines.append(
            f"{number:2} {time}  {placement.name:44} {pools}\n{'':15}{placement.explanation()}"
        )
    return "\n".join(lines)
