"""Does a run fit its devices, by how much, and the nearest change that makes it fit."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.planning import memory
from jaxrl_llm.planning.devices import DEVICES, GIB, Device
from jaxrl_llm.planning.memory import Parts, Setting
from jaxrl_llm.sharding.mesh import AXES

Changes = tuple[tuple[str, Any], ...]  # (config key, value), in the order of the config


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run needs on its devices.

    Attributes:
      setting: The run on its mesh.
      device: What it runs on.
      programs: What is on a device while each program runs, all that lies beside it included.
    """

    setting: Setting
    device: Device
    programs: Mapping[str, Parts]

    @property
    def peak(self) -> float:
        """Most bytes on a device during a step."""
        return max(parts.total for parts in self.programs.values())

    @property
    def room(self) -> float:
        """Bytes that are left at the busiest moment; negative: bytes that are missing."""
        return self.device.memory_bytes - self.peak

    @property
    def fits(self) -> bool:
        return self.room >= 0


@dataclasses.dataclass(frozen=True)
class Advice:
    """The nearest run that fits: settings to change, devices to use, what is then left."""

    changes: Changes
    device: Device
    num_devices: int
    plan: Plan

    def __str__(self) -> str:
        where = f"{self.num_devices} x {self.device.name}"
        flags = " ".join(f"--config.{key}={value}" for key, value in self.changes)
        left = f"{self.plan.peak / GIB:.1f} of {self.device.memory_bytes / GIB:.1f} GiB a device"
        return f"on {where}: {flags or 'no change of settings'} ({left})"


def mesh_sizes(config: Config, num_devices: int) -> dict[str, int]:
    """Returns the size of every mesh axis over so many devices.

    Raises:
      ConfigError: If the axes do not fill the devices.
    """
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    sizes = {a: num_devices // fixed if size == -1 else size for a, size in sizes.items()}
    if math.prod(sizes.values()) != num_devices:
        given = " x ".join(f"{axis} {getattr(config.mesh, axis)}" for axis in AXES)
        raise ConfigError(
            [f"config.mesh: {given} does not fill {num_devices} devices; set one axis to -1"]
        )
    return sizes


def make(
    config: Config,
    policy: Shape,
    scorers: tuple[Shape, ...],
    device: Device,
    num_devices: int,
    backend: str = "tpu",
) -> Plan:
    """Returns the plan of a run on so many devices of a kind.

    Args:
      config: The run.
      policy: Shape of policy, reference and critics.
      scorers: Shapes of reward and cost models.
      device: The kind.
      num_devices: How many.
      backend: Whose compiler's habits are assumed: "tpu", for GPUs too, or "cpu".

    Raises:
      ConfigError: If the mesh does not fill the devices.
    """
    setting = Setting(config, policy, scorers, mesh_sizes(config, num_devices), backend)
    return Plan(setting, device, memory.step(setting))


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """Returns the config with some settings, named as on the command line, at other values."""
    for key, value in changes.items():
        *groups, last = key.split(".")
        config = _replaced(config, groups, last, value)
    return config


def _replaced(node, groups: list[str], last: str, value):
    if not groups:
        return dataclasses.replace(node, **{last: value})
    inner = _replaced(getattr(node, groups[0]), groups[1:], last, value)
    return dataclasses.replace(node, **{groups[0]: inner})


def advise(plan: Plan) -> Advice:
    """Returns the nearest run that fits, the plan's own if it does.

    Fewest kinds of settings changed first (recomputation, microbatch, slots, dtypes of weights
    and moments, mesh and rollout layout), then the least of each; if no change is enough, the
    fewest devices of the same kind in powers of two, then other kinds, the smallest first.
    """
    config, device = plan.setting.config, plan.device
    count = plan.setting.num_devices
    if plan.fits:
        return Advice((), device, count, plan)
    while count <= 65_536:
        if found := _search(plan, config, device, count):
            return found
        count *= 2
    for other in sorted(DEVICES.values(), key=lambda d: d.memory_bytes):
        if found := _search(plan, config, other, plan.setting.num_devices):
            return found
    raise ConfigError(
        [f"no number of {device.name} and no change of settings fits this run; use a smaller model"]
    )


def _search(plan: Plan, config: Config, device: Device, count: int) -> Advice | None:
    """Returns the first of all changes, nearest first, with which the run fits `count` devices."""
    axes = list(_choices(plan, config, count))
    # Where even the least of everything is too much, there is nothing to search.
    least = [list(enumerate(choices))[-1:] for choices in axes[:-1]]
    if not any(_tried(plan, config, device, p) for p in itertools.product(*least, _all(axes[-1]))):
        return None
    ranked = sorted(
        itertools.product(*map(_all, axes)),
        key=lambda picks: (sum(i > 0 for i, _ in picks), sum(i for i, _ in picks)),
    )
    for picks in ranked:
        if found := _tried(plan, config, device, picks):
            changes = tuple((key, value) for _, pick in picks for key, value in pick.items())
            return Advice(changes, device, count, found)
    return None


def _all(choices: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    return list(enumerate(choices))


def _tried(plan: Plan, config: Config, device: Device, picks) -> Plan | None:
    """Returns the plan with these choices if it fits the device."""
    for _, pick in picks:
        config = changed(config, pick)
    count = math.prod(getattr(config.mesh, axis) for axis in AXES)
    if count < 0:
        count = plan.setting.num_devices
    setting = dataclasses.replace(plan.setting, config=config, mesh=mesh_sizes(config, count))
    made = Plan(setting, device, memory.step(setting))
    return made if made.fits else None


def _choices(plan: Plan, config: Config, count: int) -> Iterator[list[dict[str, Any]]]:
    """Yields, setting by setting, what it may be: as it is, then ever further from it."""
    remat = ["none", "dots", "full"]
    if config.model.remat in remat:
        remat = remat[remat.index(config.model.remat) :]
    yield [{}] + [{"model.remat": name} for name in remat[1:]]

    tokens, width = config.trainer.max_tokens_per_microbatch, config.max_sequence_tokens
    yield [{}] + [
        {"trainer.max_tokens_per_microbatch": fewer}
        for fewer in _halves(tokens // width * width, width)
        if fewer < tokens
    ]

    slots = plan.setting.num_slots
    yield [{}] + [{"rollout.num_slots": fewer} for fewer in _halves(slots, 8) if fewer < slots]

    dtypes: list[dict[str, Any]] = [{}]
    moments = {
        "trainer.optimizer.moment_dtype": "bfloat16",
        "critic.optimizer.moment_dtype": "bfloat16",
    }
    if not config.algorithm.needs_critic:
        del moments["critic.optimizer.moment_dtype"]
    if config.trainer.optimizer.moment_dtype == "float32":
        dtypes.append(moments)
    if config.model.param_dtype == "float32":
        dtypes.append({"model.param_dtype": "bfloat16", **moments})
    yield dtypes
    yield list(_meshes(plan, config, count))


def _halves(size: int, smallest: int) -> Iterator[int]:
    while size > smallest:
        yield size
        size //= 2
    yield smallest


def _meshes(plan: Plan, config: Config, count: int) -> Iterator[dict[str, Any]]:
    """Yields meshes over `count` devices, the run's own first if it can be had."""
    if plan.setting.num_devices == count:
        yield {}
    now = plan.setting.mesh["tensor"]
    kv_heads = plan.setting.policy.num_kv_heads
    tensors = [2**i for i in range(6) if count % 2**i == 0 and 2**i <= 4 * kv_heads]
    for tensor in sorted(tensors, key=lambda t: abs(math.log2(t / now))):
        sizes = {"data": 1, "fsdp": count // tensor, "sequence": 1, "tensor": tensor}
        if sizes == plan.setting.mesh:
            continue
        changes = {f"mesh.{axis}": size for axis, size in sizes.items()}
        yield {k: v for k, v in changes.items() if getattr(config.mesh, k[5:]) != v}
    if config.mesh.rollout != "train":
        sizes = {"mesh.data": 1, "mesh.fsdp": count, "mesh.sequence": 1, "mesh.tensor": 1}
        yield {**sizes, "mesh.rollout": "train"}
