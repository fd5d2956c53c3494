"""Where the models of a run should live, by the time of a step.

A grouping is a partition of policy, critic, reference and reward model; rollout belongs to the
policy. Each group gets a pool of devices and the fastest mesh over it that fits. A step has three
stages. Pools work at the same time within a stage; models of one pool take turns.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping

from jaxrl_llm.config import ConfigError, PlacementConfig, PoolConfig
from jaxrl_llm.config.placement import ROLES as ALL_ROLES
from jaxrl_llm.planning import memory, times
from jaxrl_llm.planning import stages as stages_lib
from jaxrl_llm.planning.devices import GIB, Device
from jaxrl_llm.planning.fit import Plan, axes
from jaxrl_llm.planning.setting import Setting, expert_axes
from jaxrl_llm.sharding.mesh import AXES, STAGE

ROLES = ("policy", "critic", "reference", "reward")
Grouping = tuple[tuple[str, ...], ...]

# The phases of each stage of a step, with the role that each is of.
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
class Pool:
    """A group of roles on devices of their own."""

    roles: tuple[str, ...]
    setting: Setting  # on the pool's mesh
    device: Device

    @functools.cached_property
    def bytes(self) -> float:  # most on a device
        return memory.peak(self.setting, self.roles) + self.device.process_bytes

    @functools.cached_property
    def costs(self) -> dict[str, times.Cost]:  # of the phases that its roles go through
        names = {n for of in _STAGES.values() for n, role in of.items() if role in self.roles}
        return {k: v for k, v in times.phases(self.setting, self.device).items() if k in names}

    @functools.cached_property
    def stages(self) -> list[float]:  # seconds of each of `_STAGES`
        own = self.costs
        return [sum(own[n].seconds for n in of if n in own) for of in _STAGES.values()]


@dataclasses.dataclass(frozen=True)
class Placement:
    """One grouping with its best pools; no pools: it does not fit at any size."""

    grouping: Grouping
    pools: tuple[Pool, ...]
    step_s: float

    @property
    def fits(self) -> bool:
        return bool(self.pools)

    @property
    def name(self) -> str:
        return " | ".join("+".join(group) for group in self.grouping)

    def why(self) -> str:
        if not self.fits:
            return "does not fit: some pool is too small for its models at every division"
        devices = sum(pool.setting.num_devices for pool in self.pools)
        busy = sum(sum(pool.stages) * pool.setting.num_devices for pool in self.pools)
        idle = 1 - busy / (self.step_s * devices) if self.step_s else 0.0
        fullest = max(pool.bytes for pool in self.pools) / GIB
        longest = zip(_STAGES, _stage_seconds(self.pools), strict=True)
        seconds = ", ".join(f"{name} {time:.1f} s" for name, time in longest)
        return f"{seconds}; devices idle {idle:.0%} of the step; fullest {fullest:.1f} GiB"

    def config(self) -> PlacementConfig:
        named = {"_".join(pool.roles): pool for pool in self.pools}
        roles = {role: name for name, pool in named.items() for role in pool.roles}
        pools = {
            name: PoolConfig(devices=pool.setting.num_devices, **pool.setting.mesh)
            for name, pool in named.items()
        }
        everyone = {role: roles.get(role, roles["policy"]) for role in ALL_ROLES}
        return PlacementConfig(choice="by_hand", pools=pools, roles=everyone)


def groupings(roles: tuple[str, ...] = ROLES) -> Iterator[Grouping]:
    """Yields every partition of the roles: 15 of four."""
    if not roles:
        yield ()
        return
    first, rest = roles[0], roles[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            left = tuple(role for role in rest if role not in others)
            for grouping in groupings(left):
                yield ((first, *others), *grouping)


def rank(setting: Setting, device: Device, num_devices: int, num_hosts: int = 1) -> list[Placement]:
    """Returns all placements of a run's models, whatever its mesh; those that fit come first.

    They are ranked by the time of a step (if known), then by the number of pools.
    """
    best_pool = functools.cache(functools.partial(_best_pool, setting, device))
    # Stages pay where the devices have thin links between their domains.
    most = max(1, num_devices // device.domain)
    all_stages = [1 << i for i in range(most.bit_length())]
    found = []
    for grouping in groupings(tuple(role for role in ROLES if setting.has(role))):
        best = Placement(grouping, (), math.inf)
        divisions = _divisions(num_devices, len(grouping))
        for counts, stages in itertools.product(divisions, all_stages):
            if any(count % num_hosts for count in counts):
                continue
            best_of = functools.partial(best_pool, stages=stages)  # all pools have as many
            pools = tuple(filter(None, map(best_of, grouping, counts)))
            step_s = sum(_stage_seconds(pools))
            if len(pools) == len(grouping) and step_s < best.step_s:
                best = Placement(grouping, pools, step_s)
        found.append(best)
    return sorted(found, key=lambda placement: (placement.step_s, len(placement.grouping)))


@dataclasses.dataclass(frozen=True)
class Speed:
    """The time of a step."""

    step_s: float
    tokens_per_s_per_device: float  # of prompts and responses
    mfu: float  # useful operations over what the devices could do in that time, 0 to 1
    phases: Mapping[str, times.Cost]  # each on a device of its pool


def speed(plan: Plan) -> Speed:
    pools = [Pool(roles, setting, plan.device) for roles, setting in plan.pools.items()]
    costs = {name: cost for pool in pools for name, cost in pool.costs.items()}
    step_s = sum(_stage_seconds(pools))
    config = plan.setting.config
    tokens = config.sequences_per_step * config.max_sequence_tokens
    useful = sum(cost.useful_flops * cost.num_devices for cost in costs.values())
    mfu = useful / (step_s * plan.device.flops * plan.num_devices)
    return Speed(step_s, tokens / step_s / plan.num_devices, mfu, costs)


def _stage_seconds(pools: Collection[Pool]) -> list[float]:
    """Returns the seconds of each stage of a step: those of its slowest pool."""
    return [max(stage) for stage in zip(*(pool.stages for pool in pools), strict=True)]


def _divisions(num_devices: int, num_pools: int) -> Iterator[tuple[int, ...]]:
    """Yields the sizes of pools that fill the devices: eighths of them, and powers of two.

    Dims of models divide by powers of two: of 96 devices, a pool of 64 holds more than one of 72.
    """
    unit = max(1, num_devices // 8)
    sizes = {*range(unit, num_devices, unit), *(1 << i for i in range(num_devices.bit_length()))}
    for first in itertools.product(sorted(sizes), repeat=num_pools - 1):
        last = num_devices - sum(first)
        if last in sizes or (num_pools == 1 and last == num_devices):
            yield (*first, last)


def _best_pool(
    setting: Setting, device: Device, group: tuple[str, ...], count: int, stages: int
) -> Pool | None:
    """Returns the group on the fastest mesh over `count` devices on which it fits, if any."""
    roles = (*group, "rollout") if "policy" in group else group
    fitting = []
    # Over thin links weights are gathered, or gradients alone are summed: then each domain has all.
    domains = math.gcd(count, max(1, count // device.domain))
    for tensor, expert, apart in itertools.product(
        (1, 2, 4, 8), expert_axes(setting.policy), sorted({1, domains // stages or 1})
    ):
        if count % (stages * tensor * expert * apart) == 0:
            # A power of two, as dims of models divide by these; the rest goes to data.
            rest = count // (stages * tensor * expert * apart)
            fsdp = rest & -rest
            data = apart * rest // fsdp
            split = {"data": data, "fsdp": fsdp, "expert": expert, "tensor": tensor}
            mesh = dict.fromkeys(AXES, 1) | split | {STAGE: stages}
            if stages > 1 and not _may_have_stages(setting, mesh):
                continue
            pool = Pool(roles, dataclasses.replace(setting, mesh=mesh), device)
            if pool.bytes <= device.memory_bytes:
                fitting.append(pool)
    return min(fitting, key=lambda pool: sum(pool.stages), default=None)


def _may_have_stages(setting: Setting, mesh: Mapping[str, int]) -> bool:
    try:
        stages_lib.check_roles(setting.config, {"policy": mesh})
        for shape in (setting.model, *(scorer.shape for scorer in setting.scorers)):
            stages_lib.check_layers(setting.config, shape, mesh[STAGE])
    except ConfigError:
        return False
    return True


def table(ranking: list[Placement]) -> str:
    """Returns the ranking as text, with pools, meshes and why."""
    lines = []
    for number, placement in enumerate(ranking, 1):
        time = f"{placement.step_s:8.1f} s" if placement.fits else "       - "
        settings = [pool.setting for pool in placement.pools]
        pools = ", ".join(f"{each.num_devices} ({axes(each.mesh)})" for each in settings)
        lines.append(f"{number:2} {time}  {placement.name:44} {pools}\n{'':15}{placement.why()}")
    return "\n".join(lines)
