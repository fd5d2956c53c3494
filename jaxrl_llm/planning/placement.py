"""Where the four models of PPO should live: all groupings over pools of devices, ranked.

A grouping is a partition of policy, critic, reference and reward model; each group gets a
pool of devices and the fastest mesh over it that fits. Groups work at the same time where the
step allows it: sampling goes first, then every model scores, then policy and critic learn.
Within a pool models take turns.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

from jaxrl_llm.planning import memory, report, roofline
from jaxrl_llm.planning.devices import GIB, Device
from jaxrl_llm.planning.memory import Setting

ROLES = ("policy", "critic", "reference", "reward")
Grouping = tuple[tuple[str, ...], ...]

# What each role does in each stage of a step.
_GENERATE = {"policy": ("prefill", "decode", "reshard")}
_SCORE = {
    "policy": ("score",),
    "critic": ("score_critic",),
    "reference": ("score_reference",),
    "reward": ("score_reward",),
}
_LEARN = {"policy": ("train",), "critic": ("train_critic",)}
_PARTS = 8  # pools are multiples of an eighth of the devices


@dataclasses.dataclass(frozen=True)
class Pool:
    """A group of roles on devices of their own.

    Attributes:
      roles: Who lives there.
      num_devices: How many devices.
      mesh: Sizes of the axes.
      bytes: Most on a device.
      stages: Seconds of generating, scoring and learning.
    """

    roles: tuple[str, ...]
    num_devices: int
    mesh: Mapping[str, int]
    bytes: float
    stages: tuple[float, float, float]


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
        stages = zip(*(pool.stages for pool in self.pools), strict=True)
        longest = [max(stage) for stage in stages]
        idle = 1 - sum(sum(p.stages) * p.num_devices for p in self.pools) / (
            self.step_s * sum(p.num_devices for p in self.pools)
        )
        fullest = max(pool.bytes for pool in self.pools) / GIB
        return (
            f"generate {longest[0]:.0f} s, score {longest[1]:.0f} s, learn {longest[2]:.0f} s;"
            f" devices idle {idle:.0%} of the step; fullest {fullest:.1f} GiB"
        )


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


def rank(setting: Setting, device: Device) -> list[Placement]:
    """Returns all 15 placements of PPO's models on the setting's devices, fastest first.

    Args:
      setting: A run with a critic, a reference and a reward model; its mesh only says how many
        devices there are.
      device: Their kind.

    Returns:
      Those that fit by the time of a step, then those that do not.
    """
    pools: dict[tuple[tuple[str, ...], int], Pool | None] = {}

    def pool(group: tuple[str, ...], count: int) -> Pool | None:
        if (group, count) not in pools:
            pools[group, count] = _best_pool(setting, device, group, count)
        return pools[group, count]

    found = []
    for grouping in groupings():
        best = Placement(grouping, (), float("inf"))
        for counts in _divisions(setting.num_devices, len(grouping)):
            made = [pool(group, n) for group, n in zip(grouping, counts, strict=True)]
            chosen = tuple(one for one in made if one is not None)
            if len(chosen) == len(made):
                stages = zip(*(one.stages for one in chosen), strict=True)
                seconds = sum(max(stage) for stage in stages)
                if seconds < best.step_s:
                    best = Placement(grouping, chosen, seconds)
        found.append(best)
    return sorted(found, key=lambda placement: (placement.step_s, len(placement.grouping)))


def _divisions(num_devices: int, num_pools: int) -> Iterator[tuple[int, ...]]:
    """Yields the sizes of pools that fill the devices, each a multiple of an eighth of them."""
    parts = min(_PARTS, num_devices)
    unit = num_devices // parts
    for cuts in itertools.combinations(range(1, parts), num_pools - 1):
        ends = (0, *cuts, parts)
        yield tuple((b - a) * unit for a, b in itertools.pairwise(ends))


def _best_pool(setting: Setting, device: Device, group: tuple[str, ...], count: int) -> Pool | None:
    """Returns the fastest mesh over `count` devices on which a group fits, None without one."""
    best = None
    for tensor in (1, 2, 4, 8):
        if count % tensor:
            continue
        # Dims of models divide by powers of two; what is odd in a pool's size goes to data.
        fsdp = (count // tensor) & -(count // tensor)
        mesh = {"data": count // tensor // fsdp, "fsdp": fsdp, "sequence": 1, "tensor": tensor}
        here = dataclasses.replace(setting, mesh=mesh)
        held = memory.role_bytes(here)
        work = memory.role_work(here)
        needed = sum(held[role] for role in group) + max(work[role] for role in group)
        if needed > device.memory_bytes:
            continue
        costs = roofline.phases(here, device)
        stages = tuple(
            sum(
                costs[phase].seconds
                for role in group
                for phase in stage.get(role, ())
                if phase in costs
            )
            for stage in (_GENERATE, _SCORE, _LEARN)
        )
        made = Pool(group, count, mesh, needed, (stages[0], stages[1], stages[2]))
        if best is None or sum(made.stages) < sum(best.stages):
            best = made
    return best


def table(ranking: list[Placement]) -> str:
    """Returns the ranking as text, with pools, meshes and why."""
    lines = []
    for number, placement in enumerate(ranking, 1):
        time = f"{placement.step_s:8.1f} s" if placement.fits else "       - "
        pools = ", ".join(
            f"{pool.num_devices} ({report.axes(pool.mesh)})" for pool in placement.pools
        )
        lines.append(f"{number:2} {time}  {placement.name:44} {pools}\n{'':15}{placement.why()}")
    return "\n".join(lines)
