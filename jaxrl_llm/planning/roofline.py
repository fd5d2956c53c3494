"""How long each phase of a step takes: arithmetic, memory and links, whichever is slowest.

A phase's time is the largest of its operations over what the device multiplies, its bytes
over what the memory delivers, and its link bytes over what the links carry, each times the
share that programs reach in practice (`REACHED`). Nothing overlaps that the roofline does not
say; host work, evaluation and checkpoints are left out.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from jaxrl_llm.algorithms import needs
from jaxrl_llm.models import flops
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.planning.devices import Device
from jaxrl_llm.planning.setting import ITEM_BYTES, Setting, num_params

REACHED = {"flops": 0.55, "memory": 0.75, "links": 0.7}


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a phase asks of one device in a whole step.

    Attributes:
      flops: Operations, recomputation included.
      useful_flops: Operations that are not recomputation.
      memory_bytes, link_bytes: Read and written; sent.
      seconds: By the roofline.
      num_devices: That share the phase.
    """

    flops: float
    useful_flops: float
    memory_bytes: float
    link_bytes: float
    seconds: float
    num_devices: int


def phases(setting: Setting, device: Device) -> dict[str, Cost]:
    """Returns the cost of every phase of a step, by name.

    `prefill`, `decode`, `score` (policy), `score_reference`, `score_critic`, `score_reward`,
    `train` (policy), `train_critic`, `reshard`; those that the run has. Sequences are taken to be
    as long as the run allows.
    """
    config = setting.config
    sequences, width = config.sequences_per_step, setting.width
    found = {
        "prefill": _prefill(setting, device),
        "decode": _decode(setting, device),
        "score": _pass(setting, device, sequences, width, trained=False, head="lm"),
        "train": _pass(setting, device, sequences, width, trained=True, head="lm"),
        "reshard": _reshard(setting, device),
    }
    if needs.of(config.algorithm).reference:
        found["score_reference"] = found["score"]
    if needs.of(config.algorithm).critic:
        critic = _pass(setting, device, sequences, width, trained=False, head="scalar")
        found["score_critic"] = critic
        found["train_critic"] = _pass(
            setting, device, sequences, width, trained=True, head="scalar"
        )
    for shape in setting.scorers:
        judge = dataclasses.replace(setting, policy=shape)
        found["score_reward"] = _pass(judge, device, sequences, width, trained=False, head="scalar")
    return found


@dataclasses.dataclass(frozen=True)
class Speed:
    """A step by the roofline.

    Attributes:
      step_s: Seconds.
      tokens_per_s_per_device: Prompt and response tokens of a step over its time.
      mfu: Useful operations over what the devices could do in that time, 0 to 1.
      phases: Seconds by phase.
    """

    step_s: float
    tokens_per_s_per_device: float
    mfu: float
    phases: Mapping[str, Cost]

    def dollars(self, price: float, num_devices: int, num_steps: int) -> float:
        """Returns the price of a run at so much for each device and hour."""
        return price * num_devices * num_steps * self.step_s / 3600


def speed(
    setting: Setting, device: Device, num_devices: int, costs: Mapping[str, Cost], step_s: float
) -> Speed:
    """Returns how fast a run takes steps.

    Args:
      setting: The run.
      device: Of known speed.
      num_devices: Of all pools.
      costs: Of each phase, on a device of its pool.
      step_s: Seconds of a step, which may do several phases at one time.
    """
    tokens = setting.config.sequences_per_step * setting.width
    useful = sum(cost.useful_flops * cost.num_devices for cost in costs.values())
    return Speed(
        step_s=step_s,
        tokens_per_s_per_device=tokens / step_s / num_devices,
        mfu=useful / (step_s * device.flops * num_devices),
        phases=costs,
    )


def _cost(setting: Setting, device: Device, work, useful, memory, links, group) -> Cost:
    if not device.flops:
        return Cost(work, useful, memory, links, 0.0, setting.num_devices)
    bandwidth = device.link_bandwidth if group <= device.domain else device.network_bandwidth
    # float32 products take four passes of 16-bit ones.
    slow = 1.0 if setting.config.model.compute_dtype == "bfloat16" else 4.0
    seconds = max(
        slow * work / (device.flops * REACHED["flops"]),
        memory / (device.memory_bandwidth * REACHED["memory"]),
        links / (bandwidth * REACHED["links"]),
    )
    return Cost(work, useful, memory, links, seconds, setting.num_devices)


def _pass(
    setting: Setting, device: Device, sequences: int, width: int, *, trained: bool, head: str
) -> Cost:
    """Returns a forward, or a forward and backward, pass over all sequences of a step."""
    config, shape, mesh = setting.config, setting.policy, setting.mesh
    lengths = np.full(sequences, width)
    forward = flops.forward(shape, lengths, int(head == "scalar")) / setting.num_devices
    again = _recomputed(config.model.remat, shape)
    times = config.trainer.epochs if trained else 1
    useful = forward * (3 * times if trained else 1)
    work = useful + (forward * again * times if trained else 0.0)

    item = ITEM_BYTES[config.model.compute_dtype]
    tensor = mesh["tensor"]
    weights = num_params(shape) * item / tensor
    each = config.minibatch_size * width if trained else sequences * width
    updates = times * sequences * width / each
    microbatches = updates * setting.rows(each // width).count
    passes = 3 if trained else 1
    memory = weights * passes * microbatches
    if trained:
        held = num_params(shape) / (tensor * mesh["fsdp"])
        memory += updates * held * (2 * 4 * 3 + 4 * 2)  # weights and moments in and out, gradients
    tokens = times * sequences * width / setting.row_shards
    carry = tokens * shape.hidden_size * item
    memory += shape.num_layers * carry * 12 * passes

    shards = mesh["fsdp"]
    links = weights * (shards - 1) / shards * passes * microbatches
    # Two sums over the tensor axis a layer and direction, each sent and received in pieces.
    links += passes * shape.num_layers * 2 * 2 * carry * (tensor - 1) / tensor
    if trained:
        data = mesh["data"]
        links += updates * 2 * num_params(shape) / (tensor * shards) * 4 * (data - 1) / data
    return _cost(setting, device, work, useful, memory, links, setting.num_devices)


def _recomputed(remat: str, shape: Shape) -> float:
    """Returns the share of a forward pass that the backward pass does again."""
    attended = shape.num_heads * shape.head_size
    output, mlp = attended * shape.hidden_size, shape.mlp_size * shape.hidden_size
    projections = output + 2 * shape.num_kv_heads * shape.head_size * shape.hidden_size
    layer = projections + output + 3 * mlp
    kept = {"attention": output + 2 * mlp, "projections": output, "dots": 0.0, "none": 0.0}
    return kept.get(remat.removeprefix("offload_"), layer) / layer


def _prefill(setting: Setting, device: Device) -> Cost:
    config, shape = setting.config, setting.policy
    prompts = config.trainer.prompts_per_step
    tokens = config.data.max_prompt_tokens
    work = flops.forward(shape, np.full(prompts, tokens), 1) / setting.num_devices
    weights = num_params(shape) * ITEM_BYTES[config.model.compute_dtype] / setting.mesh["tensor"]
    batches = max(1, prompts * tokens / 4096)
    links = 4 * shape.num_layers * prompts * tokens / setting.row_shards * shape.hidden_size
    links *= (setting.mesh["tensor"] - 1) / setting.mesh["tensor"]
    group = setting.mesh["tensor"]
    return _cost(setting, device, work, work, weights * batches, links, group)


def _decode(setting: Setting, device: Device) -> Cost:
    config, shape, mesh = setting.config, setting.policy, setting.mesh
    slots = setting.num_slots
    waves = math.ceil(config.sequences_per_step / slots)
    steps = waves * config.rollout.max_response_tokens
    item = ITEM_BYTES[config.model.compute_dtype]
    local = slots / setting.row_shards
    held = num_params(shape) / mesh["tensor"]
    mean = config.data.max_prompt_tokens + config.rollout.max_response_tokens / 2
    attended = 4 * shape.num_layers * shape.num_heads * shape.head_size * mean / mesh["tensor"]
    work = steps * local * (2 * held + attended)
    heads = setting.split(shape.num_kv_heads)
    cache = 2 * shape.num_layers * local * heads * mean * shape.head_size * item
    tensor = mesh["tensor"]
    links = steps * 4 * shape.num_layers * local * shape.hidden_size * item * (tensor - 1) / tensor
    if config.mesh.rollout == "train":
        links += steps * held * item * (mesh["fsdp"] - 1) / mesh["fsdp"]
    return _cost(setting, device, work, work, steps * (held * item + cache), links, tensor)


def _reshard(setting: Setting, device: Device) -> Cost:
    item = ITEM_BYTES[setting.config.model.compute_dtype]
    shards = 1 if setting.config.mesh.rollout == "train" else setting.mesh["fsdp"]
    arriving = num_params(setting.policy) * item / setting.mesh["tensor"]
    links = arriving * (shards - 1) / shards
    return _cost(setting, device, 0.0, 0.0, 2 * arriving, links, setting.num_devices)
