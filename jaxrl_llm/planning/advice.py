"""The nearest run that fits: what to change of one that does not."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from jaxrl_llm.algorithms import needs
from jaxrl_llm.config import ConfigError, RLConfig
from jaxrl_llm.config.placement import CHOICES
from jaxrl_llm.planning import fit
from jaxrl_llm.planning.devices import DEVICES, GIB, Device
from jaxrl_llm.planning.fit import Plan

Changes = dict[str, Any]  # values by config key, in the order of the config

# What the forward pass keeps on the device, from most to least.
_REMAT = ("none", "dots", "projections", "attention", "full", "offload_full")
_DOUBLINGS = 12  # of the number of devices, before other kinds are tried


@dataclasses.dataclass(frozen=True)
class Advice:
    """The nearest run that fits: settings to change, and its plan."""

    changes: Changes
    plan: Plan

    def __str__(self) -> str:
        device = self.plan.device
        flags = " ".join(f"--config.{key}={_quoted(value)}" for key, value in self.changes.items())
        left = f"{self.plan.peak / GIB:.1f} of {device.memory_bytes / GIB:.1f} GiB a device"
        where = f"{self.plan.num_devices} x {device.name}"
        return f"on {where}: {flags or 'no change of settings'} ({left})"


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, tuple) else str(value)


def changed(config: RLConfig, changes: Changes) -> RLConfig:
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
    if plan.fits:
        return Advice({}, plan)
    counts = [plan.num_devices << i for i in range(_DOUBLINGS)]
    others = sorted(DEVICES.values(), key=lambda other: other.memory_bytes)
    for devices in ([plan.device], others):
        for count, device in itertools.product(counts, devices):
            if found := _search(plan, device, count):
                return found
    name = plan.device.name
    raise ConfigError(
        [f"no number of {name} and no change of settings fits this run; use a smaller model"]
    )


def _search(plan: Plan, device: Device, count: int) -> Advice | None:
    """Returns the nearest change with which the run fits `count` devices, None without one.

    Of every kind of setting but the mesh, the last value needs the least memory. So the last values
    show which kinds must change; only changes of those kinds are tried one by one.
    """

    def fitting(changes: Changes) -> Plan | None:
        setting = plan.setting
        config = changed(setting.config, changes)
        try:
            made = fit.make(config, setting.policy, setting.scorers, device, count)
        except ConfigError:  # the devices cannot be divided into the pools
            return None
        return made if made.fits else None

    def enough(kinds: list[list[Changes]], meshes: list[Changes]) -> bool:
        """Returns whether the run fits with the last values, on one of the meshes."""
        last = _joined(values[-1] for values in kinds)
        return any(fitting(last | mesh) for mesh in meshes)

    kinds = [values for values in _kinds(plan) if values]
    meshes = list(_meshes(plan, count))
    if not enough(kinds, [{}, *meshes]):
        return None
    # On other devices a new mesh does not count as a change.
    same = plan.num_devices == count and plan.device == device
    options = [*kinds, meshes] if same else kinds
    for number in range(len(options) + 1):
        found: list[tuple[int, Advice]] = []
        for chosen in itertools.combinations(options, number):
            own = [values for values in chosen if values is not meshes]
            where = meshes if len(own) < number else [{}] if same else [{}, *meshes]
            if not enough(own, where):
                continue
            steps = itertools.product(*(enumerate(values) for values in [*own, where]))
            for picks in sorted(steps, key=_distance):
                changes = _joined(values for _, values in picks)
                if made := fitting(changes):
                    found.append((_distance(picks), Advice(changes, made)))
                    break
        if found:
            return min(found, key=lambda one: one[0])[1]
    return None


def _joined(changes: Iterable[Changes]) -> Changes:
    return {key: value for each in changes for key, value in each.items()}


def _distance(picks: Iterable[tuple[int, Changes]]) -> int:
    return sum(step for step, _ in picks)


def _kinds(plan: Plan) -> Iterator[list[Changes]]:
    """Yields the changes of each kind of setting, the nearest first."""
    config = plan.setting.config
    known = _REMAT.index(config.model.remat) + 1 if config.model.remat in _REMAT else len(_REMAT)
    yield [{"model.remat": name} for name in _REMAT[known:]]

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
    tensors.sort(key=lambda tensor: abs(math.log2(tensor / now["tensor"])))
    for rollout in dict.fromkeys((config.mesh.rollout, "train")):
        for tensor in tensors:
            sizes = {"data": 1, "fsdp": count // tensor, "sequence": 1, "tensor": tensor}
            if sizes != now or rollout != config.mesh.rollout:
                changes = {f"mesh.{axis}": size for axis, size in sizes.items()}
                changes["mesh.rollout"] = rollout
                yield {k: v for k, v in changes.items() if getattr(config.mesh, k[5:]) != v}
