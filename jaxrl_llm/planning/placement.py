"""How long a step takes, and where the models of a run should live.

A phase takes the longest of these: its operations, its memory bytes and its link bytes, each over
what the device does a second, times the share that programs reach (`REACHED`). Phases do not
overlap. Host work, evaluation and checkpoints are left out.

A grouping is a partition of policy, critic, reference and reward model; rollout belongs to the
policy. Each group gets a pool of devices and the fastest mesh over it that fits. A step has three
stages. Pools work at the same time within a stage; models of one pool take turns.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from jaxrl_llm.algorithms import needs
from jaxrl_llm.config import PlacementConfig, PoolConfig
from jaxrl_llm.config.placement import ROLES as ALL_ROLES
from jaxrl_llm.models import flops
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.planning import memory
from jaxrl_llm.planning.devices import GIB, Device
from jaxrl_llm.planning.fit import Plan, axes
from jaxrl_llm.planning.setting import SCORING, Head, Setting, expert_axes
from jaxrl_llm.sharding.mesh import AXES

ROLES = ("policy", "critic", "reference", "reward")
Grouping = tuple[tuple[str, ...], ...]

# The phases of each stage of a step, with the role that each is of.
_STAGES: Mapping[str, Mapping[str, str]] = {
    "generate": {"reshard": "policy", "prefill": "rollout", "decode": "rollout"},
    "score": {
        "score": "policy",
        **{f"score_{role}": role for role in ROLES[1:]},
        "score_teacher": "reward",
    },
    "learn": {"train": "policy", "train_critic": "critic"},
}
REACHED = {"flops": 0.55, "memory": 0.75, "links": 0.7}


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a phase asks of one device in a whole step."""

    flops: float  # recomputation included
    useful_flops: float  # and not
    memory_bytes: float  # read and written
    link_bytes: float  # sent
    seconds: float
    num_devices: int  # that share the phase


def phases(setting: Setting, device: Device) -> dict[str, Cost]:
    """Returns the cost of every phase of a step by name, when all sequences are longest."""
    needed = needs.of(setting.config.algorithm)
    found = {
        "prefill": _prefill(setting, device),
        "decode": _decode(setting, device),
        "score": _pass(setting, device, "lm", trained=False),
        "train": _pass(setting, device, "lm", trained=True),
        "reshard": _reshard(setting, device),
    }
    if needed.reference:
        found["score_reference"] = found["score"]
    if needed.critic:
        found["score_critic"] = _pass(setting, device, "scalar", trained=False)
        found["train_critic"] = _pass(setting, device, "scalar", trained=True)
    for name, head in SCORING:
        passes = [
            _pass(dataclasses.replace(setting, policy=scorer.shape), device, head, trained=False)
            for scorer in setting.scorers
            if scorer.head == head
        ]
        if passes:  # one after the other
            names = vars(passes[0]).keys() - {"num_devices"}
            sums = {name: sum(getattr(each, name) for each in passes) for name in names}
            found[name] = dataclasses.replace(passes[0], **sums)
    return found


def _cost(setting: Setting, device: Device, work, useful, memory, links, group) -> Cost:
    seconds = 0.0
    if device.flops:
        bandwidth = device.link_bandwidth if group <= device.domain else device.network_bandwidth
        # A float32 matmul takes four passes of 16-bit ones.
        slow = 1.0 if setting.config.model.compute_dtype == "bfloat16" else 4.0
        seconds = max(
            slow * work / (device.flops * REACHED["flops"]),
            memory / (device.memory_bandwidth * REACHED["memory"]),
            links / (bandwidth * REACHED["links"]),
        )
    return Cost(work, useful, memory, links, seconds, setting.num_devices)


def _pass(setting: Setting, device: Device, head: Head, *, trained: bool) -> Cost:
    """Returns a forward, or a forward and backward, pass over all sequences of a step."""
    config, shape, mesh = setting.config, setting.policy, setting.mesh
    sequences, width = config.sequences_per_step, config.max_sequence_tokens
    forward = flops.forward(shape, np.full(sequences, width), int(head == "scalar"))
    forward /= setting.num_devices
    tensor, data = mesh["tensor"], mesh["data"]
    weights = sum(setting.used()) * setting.compute_item
    times = config.trainer.epochs if trained else 1
    passes = 3 if trained else 1
    each = config.minibatch_size * width if trained else sequences * width
    updates = times * sequences * width / each
    useful = forward * (passes * times)
    work = useful + (forward * _recomputed(config.model.remat, shape) * times if trained else 0.0)

    microbatches = updates * setting.rows(each // width).count
    memory = weights * passes * microbatches
    tokens = times * sequences * width / setting.row_shards
    carry = tokens * shape.hidden_size * setting.compute_item
    links = _gathered(setting) * passes * microbatches
    links += passes * _exchanged(setting, tokens)
    # Two sums over the tensor axis a layer and direction, each sent and received in pieces.
    links += passes * shape.num_layers * 2 * 2 * carry * (tensor - 1) / tensor
    if trained:
        held = setting.held(head).total()
        memory += updates * held * (2 * 4 * 3 + 4 * 2)  # weights and moments in and out, gradients
        links += updates * 2 * held * 4 * (data - 1) / data
    memory += shape.num_layers * carry * 12 * passes
    return _cost(setting, device, work, useful, memory, links, setting.num_devices)


def _gathered(setting: Setting) -> float:
    """Returns the bytes that reach a device where all weights are gathered for use, once."""
    experts, rest = setting.used()
    shards, ways = setting.mesh["fsdp"], setting.mesh["expert"]
    arriving = experts * (1 - 1 / shards) + rest * (1 - 1 / (shards * ways))
    return arriving * setting.compute_item


def _exchanged(setting: Setting, tokens: float) -> float:
    """Returns the bytes that a device sends to experts and back, for so many of its tokens."""
    shape, ways = setting.policy, setting.mesh["expert"]
    if shape.experts is None:
        return 0.0
    layers = sum(kind.experts for kind in shape.kinds)
    visits = tokens * shape.experts.per_token * (1 - 1 / ways)
    return layers * 2 * visits * shape.hidden_size * setting.compute_item


def _recomputed(remat: str, shape: Shape) -> float:
    """Returns the share of a forward pass that the backward pass does again.

    What experts multiply is never kept.
    """
    output = shape.num_heads * shape.value_size * shape.hidden_size
    whole = again = 0.0
    for kind in shape.kinds:
        layer, mlp = flops.layer_products(shape, kind), flops.mlp_products(shape, kind)
        never, inner = (mlp, 0.0) if kind.experts else (0.0, 2 / 3 * mlp)
        kept = {"attention": output + inner, "projections": output, "dots": 0.0, "none": 0.0}
        partly = kept.get(remat.removeprefix("offload_"))
        whole += layer
        again += layer if partly is None else partly + never
    return again / whole


def _prefill(setting: Setting, device: Device) -> Cost:
    config, shape, tensor = setting.config, setting.policy, setting.mesh["tensor"]
    prompts, tokens = config.trainer.prompts_per_step, config.data.max_prompt_tokens
    work = flops.forward(shape, np.full(prompts, tokens), 1) / setting.num_devices
    weights = sum(setting.used()) * setting.compute_item
    batches = max(1, prompts * tokens / 4096)
    here = prompts * tokens / setting.row_shards
    links = 4 * shape.num_layers * here * shape.hidden_size * (tensor - 1) / tensor
    links += _exchanged(setting, here)
    return _cost(setting, device, work, work, weights * batches, links, tensor)


def _decode(setting: Setting, device: Device) -> Cost:
    config, shape, item = setting.config, setting.policy, setting.compute_item
    tensor, ways = setting.mesh["tensor"], setting.mesh["expert"]
    slots, response = setting.num_slots, config.rollout.max_response_tokens
    steps = math.ceil(config.sequences_per_step / slots) * response
    local = slots / setting.row_shards
    experts, rest = setting.used()
    visited = read = 0.0  # parameters of experts that a token meets, and that a step reads
    if of := shape.experts:
        visited = experts * ways * of.per_token / of.num
        read = experts * min(1.0, local * of.per_token * ways / of.num)
    mean = config.data.max_prompt_tokens + response / 2
    held_heads, of_key, of_value = shape.cached
    of_pair = of_key + (shape.latent.kv_rank if shape.latent else of_value)
    attended = 2 * shape.num_layers * shape.num_heads * of_pair * mean / tensor
    work = steps * local * (2 * (rest + visited) + attended)
    heads = setting.split(held_heads)
    cache = shape.num_layers * local * heads * mean * (of_key + of_value) * item
    links = steps * 4 * shape.num_layers * local * shape.hidden_size * item * (tensor - 1) / tensor
    links += steps * _exchanged(setting, local)
    if config.mesh.rollout == "train":
        links += steps * _gathered(setting)
    memory = steps * ((rest + read) * item + cache)
    return _cost(setting, device, work, work, memory, links, tensor * ways)


def _reshard(setting: Setting, device: Device) -> Cost:
    links = 0.0 if setting.config.mesh.rollout == "train" else _gathered(setting)
    arriving = sum(setting.used()) * setting.compute_item
    return _cost(setting, device, 0.0, 0.0, 2 * arriving, links, setting.num_devices)


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
    def costs(self) -> dict[str, Cost]:  # of the phases that its roles go through
        names = {n for of in _STAGES.values() for n, role in of.items() if role in self.roles}
        return {k: v for k, v in phases(self.setting, self.device).items() if k in names}

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
    found = []
    for grouping in groupings(tuple(role for role in ROLES if setting.has(role))):
        best = Placement(grouping, (), math.inf)
        for counts in _divisions(num_devices, len(grouping)):
            if any(count % num_hosts for count in counts):
                continue
            pools = tuple(filter(None, map(best_pool, grouping, counts)))
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
    phases: Mapping[str, Cost]  # each on a device of its pool


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


def _best_pool(setting: Setting, device: Device, group: tuple[str, ...], count: int) -> Pool | None:
    """Returns the group on the fastest mesh over `count` devices on which it fits, if any."""
    roles = (*group, "rollout") if "policy" in group else group
    fitting = []
    for tensor, expert in itertools.product((1, 2, 4, 8), expert_axes(setting.policy)):
        if count % (tensor * expert) == 0:
            # A power of two, as dims of models divide by these; the rest goes to data.
            rest = count // (tensor * expert)
            fsdp = rest & -rest
            split = {"data": rest // fsdp, "fsdp": fsdp, "expert": expert, "tensor": tensor}
            mesh = dict.fromkeys(AXES, 1) | split
            pool = Pool(roles, dataclasses.replace(setting, mesh=mesh), device)
            if pool.bytes <= device.memory_bytes:
                fitting.append(pool)
    return min(fitting, key=lambda pool: sum(pool.stages), default=None)


def table(ranking: list[Placement]) -> str:
    """Returns the ranking as text, with pools, meshes and why."""
    lines = []
    for number, placement in enumerate(ranking, 1):
        time = f"{placement.step_s:8.1f} s" if placement.fits else "       - "
        settings = [pool.setting for pool in placement.pools]
        pools = ", ".join(f"{each.num_devices} ({axes(each.mesh)})" for each in settings)
        lines.append(f"{number:2} {time}  {placement.name:44} {pools}\n{'':15}{placement.why()}")
    return "\n".join(lines)
