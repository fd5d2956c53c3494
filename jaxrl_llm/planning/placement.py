"""Where the models of a run should live: all groupings over pools of devices, ranked.

A grouping is a partition of the run's policy, critic, reference and reward model; rollout belongs
to the policy. Each group gets a pool of devices and the fastest mesh over it that fits. A step has
three stages: sampling, scoring, learning. Pools work at the same time within a stage; models of
one pool take turns.
"""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping

from jaxrl_llm.config import PlacementConfig, PoolConfig
from jaxrl_llm.config.placement import ROLES as ALL_ROLES
from jaxrl_llm.planning import memory, roofline
from jaxrl_llm.planning.devices import GIB, Device
from jaxrl_llm.planning.fit import Plan, axes
from jaxrl_llm.planning.setting import Setting

ROLES = ("policy", "critic", "reference", "reward")
Grouping = tuple[tuple[str, ...], ...]

# The phases of each role in the three stages of a step (`roofline.phases`).
_STAGES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "generate": {"policy": ("reshard",), "rollout": ("prefill", "decode")},
    "score": {
        "policy": ("score",),
        "critic": ("score_critic",),
        "reference": ("score_reference",),
        "reward": ("score_reward",),
    },
    "learn": {"policy": ("train",), "critic": ("train_critic",)},
}
_TENSOR = (1, 2, 4, 8)
_PARTS = 8


@dataclasses.dataclass(frozen=True)
class Pool:
    """A group of roles on devices of their own."""

    roles: tuple[str, ...]
    num_devices: int
    mesh: Mapping[str, int]
    bytes: float  # most on a device
    costs: Mapping[str, roofline.Cost]  # of the phases that its roles go through

    @functools.cached_property
    def stages(self) -> list[float]:
        """Seconds of each of `_STAGES`."""
        names = ([n for role in self.roles for n in of.get(role, ())] for of in _STAGES.values())
        return [sum(self.costs[n].seconds for n in some if n in self.costs) for some in names]


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
        """Roles joined by "+" share a pool."""
        return " | ".join("+".join(group) for group in self.grouping)

    def why(self) -> str:
        """Returns in one line what bounds the placement."""
        if not self.fits:
            return "does not fit: some pool is too small for its models at every division"
        devices = sum(pool.num_devices for pool in self.pools)
        busy = sum(sum(pool.stages) * pool.num_devices for pool in self.pools)
        idle = 1 - busy / (self.step_s * devices) if self.step_s else 0.0
        fullest = max(pool.bytes for pool in self.pools) / GIB
        longest = zip(_STAGES, _stage_seconds(self.pools), strict=True)
        seconds = ", ".join(f"{name} {time:.1f} s" for name, time in longest)
        return f"{seconds}; devices idle {idle:.0%} of the step; fullest {fullest:.1f} GiB"

    def config(self) -> PlacementConfig:
        """Returns the placement as a run is told of it, by hand."""
        pools: dict[str, PoolConfig] = {}
        roles: dict[str, str] = {}
        for pool in self.pools:
            name = "_".join(pool.roles)
            pools[name] = PoolConfig(devices=pool.num_devices, **pool.mesh)
            roles |= dict.fromkeys(pool.roles, name)
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
    """Returns all placements of a run's models on some devices.

    Those that fit come first, by the time of a step; where the speed of the devices is not known,
    by the number of pools. Every pool takes as many devices of each host. The mesh of `setting` is
    not used.
    """
    best_pool = functools.cache(functools.partial(_best_pool, setting, device))
    found = []
    for grouping in groupings(tuple(role for role in ROLES if setting.has(role))):
        best = Placement(grouping, (), float("inf"))
        for counts in _divisions(num_devices, len(grouping)):
            if any(count % num_hosts for count in counts):
                continue
            pools = tuple(filter(None, map(best_pool, grouping, counts)))
            if len(pools) == len(grouping) and sum(_stage_seconds(pools)) < best.step_s:
                best = Placement(grouping, pools, sum(_stage_seconds(pools)))
        found.append(best)
    return sorted(found, key=lambda placement: (placement.step_s, len(placement.grouping)))


@dataclasses.dataclass(frozen=True)
class Speed:
    """A step by the roofline."""

    step_s: float
    tokens_per_s_per_device: float  # of prompts and responses
    mfu: float  # useful operations over what the devices could do in that time, 0 to 1
    phases: Mapping[str, roofline.Cost]  # each on a device of its pool


def speed(plan: Plan) -> Speed:
    """Returns how fast a run takes steps: pools at the same time, models of one in turns."""
    device, num_devices = plan.device, plan.num_devices
    pools = [_pool(setting, device, roles) for roles, setting in plan.pools.items()]
    phases = {name: cost for pool in pools for name, cost in pool.costs.items()}
    step_s = sum(_stage_seconds(pools))
    tokens = plan.setting.config.sequences_per_step * plan.setting.width
    useful = sum(cost.useful_flops * cost.num_devices for cost in phases.values())
    mfu = useful / (step_s * device.flops * num_devices)
    return Speed(step_s, tokens / step_s / num_devices, mfu, phases)


def _stage_seconds(pools: Collection[Pool]) -> list[float]:
    """Returns the seconds of each stage of a step: those of its slowest pool."""
    return [max(stage) for stage in zip(*(pool.stages for pool in pools), strict=True)]


def _divisions(num_devices: int, num_pools: int) -> Iterator[tuple[int, ...]]:
    """Yields the sizes of pools that fill the devices: eighths of them, and powers of two.

    Dims of models divide by powers of two: of 96 devices, a pool of 64 holds more than one of 72.
    """
    unit = max(1, num_devices // _PARTS)
    sizes = {*range(unit, num_devices, unit), *(1 << i for i in range(num_devices.bit_length()))}
    for first in itertools.product(sorted(sizes), repeat=num_pools - 1):
        last = num_devices - sum(first)
        if last in sizes or (num_pools == 1 and last == num_devices):
            yield (*first, last)


def _best_pool(setting: Setting, device: Device, group: tuple[str, ...], count: int) -> Pool | None:
    """Returns the fastest mesh over `count` devices on which a group fits, None without one."""
    roles = (*group, "rollout") if "policy" in group else group
    fitting = []
    for tensor in _TENSOR:
        if count % tensor == 0:
            # Dims of models divide by powers of two; the rest of a pool's size goes to data.
            fsdp = (count // tensor) & -(count // tensor)
            mesh = {"data": count // tensor // fsdp, "fsdp": fsdp, "sequence": 1, "tensor": tensor}
            pool = _pool(dataclasses.replace(setting, mesh=mesh), device, roles)
            if pool.bytes <= device.memory_bytes:
                fitting.append(pool)
    return min(fitting, key=lambda pool: sum(pool.stages), default=None)


def _pool(setting: Setting, device: Device, roles: tuple[str, ...]) -> Pool:
    """Returns what roles need, and how long they take, on the setting's mesh."""
    names = {name for stage in _STAGES.values() for role in roles for name in stage.get(role, ())}
    costs = {k: cost for k, cost in roofline.phases(setting, device).items() if k in names}
    needed = memory.peak(setting, roles) + device.process_bytes
    return Pool(roles, setting.num_devices, setting.mesh, needed, costs)


def table(ranking: list[Placement]) -> str:
    """Returns the ranking as text, with pools, meshes and why."""
    lines = []
    for number, placement in enumerate(ranking, 1):
        time = f"{placement.step_s:8.1f} s" if placement.fits else "       - "
        pools = ", ".join(f"{pool.num_devices} ({axes(pool.mesh)})" for pool in placement.pools)
        lines.append(f"{number:2} {time}  {placement.name:44} {pools}\n{'':15}{placement.why()}")
    return "\n".join(lines)
