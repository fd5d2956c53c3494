"""The nearest run that fits: what to change of one that does not."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.algorithms import needs
from jaxrl_llm.config import ConfigError, RLConfig
from jaxrl_llm.config.placement import CHOICES
from jaxrl_llm.planning import fit
from jaxrl_llm.planning.devices import DEVICES, GIB, Device, backend
from jaxrl_llm.planning.fit import Plan

Changes = tuple[tuple[str, Any], ...]  # (config key, value), in the order of the config
# Values of one kind of setting, as changes: first as it is, then further and further from it.
_Kind = list[dict[str, Any]]

# What the backward pass finds again, from most to least on the device.
_REMAT = ("none", "dots", "projections", "attention", "full", "offload_full")
_DOUBLINGS = 12  # of the devices, before other kinds are asked


@dataclasses.dataclass(frozen=True)
class Advice:
    """The nearest run that fits: settings to change, devices to use, and its plan."""

    changes: Changes
    device: Device
    num_devices: int
    plan: Plan

    def __str__(self) -> str:
        where = f"{self.num_devices} x {self.device.name}"
        flags = " ".join(f"--config.{key}={_quoted(value)}" for key, value in self.changes)
        left = f"{self.plan.peak / GIB:.1f} of {self.device.memory_bytes / GIB:.1f} GiB a device"
        return f"on {where}: {flags or 'no change of settings'} ({left})"


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, tuple) else str(value)


def changed(config: RLConfig, changes: Mapping[str, Any]) -> RLConfig:
    """Returns the config with some settings, named as on the command line, at other values."""
    for key, value in changes.items():
        config = _replaced(config, key, value)
    return config


def _replaced(group: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    value = _replaced(getattr(group, name), rest, value) if rest else value
    return dataclasses.replace(group, **{name: value})


def nearest(plan: Plan) -> Advice:
    """Returns the nearest run that fits: the plan's own if it does.

    Fewest kinds of settings changed first (recomputation, microbatch, slots, dtypes of weights
    and moments, what rests on the host, mesh and rollout layout), then the least of each. If no
    change is enough, it uses the fewest devices of the same kind, doubled again and again; else
    the fewest of other kinds, the smallest first.

    Raises:
      ConfigError: If there is none.
    """
    count, device = plan.num_devices, plan.device
    if plan.fits:
        return Advice((), device, count, plan)
    counts = [count << i for i in range(_DOUBLINGS)]
    others = sorted(DEVICES.values(), key=lambda other: other.memory_bytes)
    for kinds in ([device], others):
        for count, kind in itertools.product(counts, kinds):
            if found := _search(plan, kind, count):
                return found
    raise ConfigError(
        [f"no number of {device.name} and no change of settings fits this run; use a smaller model"]
    )


def _search(plan: Plan, device: Device, count: int) -> Advice | None:
    """Returns the nearest change with which the run fits `count` devices, None without one.

    Of every kind of setting but the mesh, the last value needs the least memory. So the last values
    show which kinds must change; only changes of those kinds are tried one by one.
    """
    kinds = list(_kinds(plan))
    meshes = list(_meshes(plan, count))
    same = plan.num_devices == count and plan.device == device
    everything = {key: value for values in kinds for key, value in values[-1].items()}
    if not any(_tried(plan, device, count, {**everything, **mesh}) for mesh in [{}, *meshes]):
        return None
    of_mesh = [len(kinds)] if same else []  # over other devices, a mesh is no change of its own
    for number in range(len(kinds) + len(of_mesh) + 1):
        found: list[tuple[int, Changes, Plan]] = []
        for chosen in itertools.combinations([*range(len(kinds)), *of_mesh], number):
            own = [kinds[i][1:] for i in chosen if i < len(kinds)]
            where = meshes if len(kinds) in chosen else [{}] if same else [{}, *meshes]
            if not all(own):
                continue
            least = {key: value for values in own for key, value in values[-1].items()}
            if any(_tried(plan, device, count, {**least, **mesh}) for mesh in where):
                found += _first(plan, device, count, [*own, where])
        if found:
            _, changes, nearest = min(found, key=lambda one: one[0])
            return Advice(changes, device, count, nearest)
    return None


def _first(
    plan: Plan, device: Device, count: int, kinds: list[_Kind]
) -> Iterator[tuple[int, Changes, Plan]]:
    """Yields the least of all changes of these kinds, after how far they go, or nothing."""
    steps = [list(enumerate(values)) for values in kinds]
    for picks in sorted(itertools.product(*steps), key=lambda picks: sum(i for i, _ in picks)):
        changes = {key: value for _, pick in picks for key, value in pick.items()}
        if made := _tried(plan, device, count, changes):
            yield sum(i for i, _ in picks), tuple(changes.items()), made
            return


def _tried(plan: Plan, device: Device, count: int, changes: Mapping[str, Any]) -> Plan | None:
    """Returns the plan with these changes if it fits the device."""
    setting = plan.setting
    config = changed(setting.config, changes)
    try:
        made = fit.make(config, setting.policy, setting.scorers, device, count, backend(device))
    except ConfigError:  # pools that so many devices cannot be shared out to
        return None
    return made if made.fits else None


def _kinds(plan: Plan) -> Iterator[_Kind]:
    """Yields, kind by kind, what the run's settings may be."""
    config = plan.setting.config
    known = _REMAT.index(config.model.remat) + 1 if config.model.remat in _REMAT else len(_REMAT)
    yield [{}] + [{"model.remat": name} for name in _REMAT[known:]]

    tokens, width = config.trainer.max_tokens_per_microbatch, config.max_sequence_tokens
    yield [{}] + [
        {"trainer.max_tokens_per_microbatch": fewer}
        for fewer in _halves(tokens // width * width, width)
        if fewer < tokens
    ]

    slots = plan.setting.num_slots
    yield [{}] + [{"rollout.num_slots": fewer} for fewer in _halves(slots, 8) if fewer < slots]

    dtypes: _Kind = [{}]
    moments = {"trainer.optimizer.moment_dtype": "bfloat16"}
    if needs.of(config.algorithm).critic:
        moments["critic.optimizer.moment_dtype"] = "bfloat16"
    if config.trainer.optimizer.moment_dtype == "float32":
        dtypes.append(moments)
    if config.model.param_dtype == "float32":
        dtypes.append({"model.param_dtype": "bfloat16", **moments})
    yield dtypes

    frozen = plan.setting.has("reference")
    moved = [("reference",)] * frozen + [("optimizer",)] + [("optimizer", "reference")] * frozen
    here = set(config.mesh.on_host)
    yield [{}] + [{"mesh.on_host": names} for names in moved if here < set(names)]


def _halves(size: int, smallest: int) -> Iterator[int]:
    while size > smallest:
        yield size
        size //= 2
    yield smallest


def _meshes(plan: Plan, count: int) -> Iterator[dict[str, Any]]:
    """Yields meshes over `count` devices, the nearest to the run's own first."""
    config = plan.setting.config
    if len(plan.pools) > 1:
        if config.placement.choice in CHOICES:
            yield {"placement.choice": "colocate"}
        return
    now = plan.setting.mesh
    most = 4 * plan.setting.policy.num_kv_heads
    tensors = [2**i for i in range(6) if count % 2**i == 0 and 2**i <= most]
    tensors.sort(key=lambda tensor: abs(math.log2(tensor / now["tensor"])))
    for rollout in dict.fromkeys((config.mesh.rollout, "train")):
        for tensor in tensors:
            sizes = {"data": 1, "fsdp": count // tensor, "sequence": 1, "tensor": tensor}
            if sizes != now or rollout != config.mesh.rollout:
                changes = {f"mesh.{axis}": size for axis, size in sizes.items()}
                changes["mesh.rollout"] = rollout
                yield {k: v for k, v in changes.items() if getattr(config.mesh, k[5:]) != v}
