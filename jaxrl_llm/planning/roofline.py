"""How long each phase of a step takes: arithmetic, memory and links, whichever is slowest.

A phase takes the longest of these: its operations, its memory bytes and its link bytes, each over
what the device does a second, times the share that programs reach (`REACHED`). Phases do not
overlap. Host work, evaluation and checkpoints are left out.
"""

import dataclasses
import math

import numpy as np

from jaxrl_llm.algorithms import needs
from jaxrl_llm.models import flops
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.planning.devices import Device
from jaxrl_llm.planning.setting import Head, Setting, num_params

REACHED = {"flops": 0.55, "memory": 0.75, "links": 0.7}


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a phase asks of one device in a whole step."""

    flops: float  # recomputation included
    useful_flops: float  # and not
    memory_bytes: float  # read and written
    link_bytes: float  # sent
    seconds: float  # by the roofline
    num_devices: int  # that share the phase


def phases(setting: Setting, device: Device) -> dict[str, Cost]:
    """Returns the cost of every phase of a step, by name.

    All sequences are as long as the run allows. A phase that the run does not have is left out.
    """
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
    for shape in setting.scorers:
        scorer = dataclasses.replace(setting, policy=shape)
        found["score_reward"] = _pass(scorer, device, "scalar", trained=False)
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
    sequences, width, params = config.sequences_per_step, setting.width, num_params(shape)
    forward = flops.forward(shape, np.full(sequences, width), int(head == "scalar"))
    forward /= setting.num_devices
    tensor, shards, data = mesh["tensor"], mesh["fsdp"], mesh["data"]
    weights = params * setting.compute_item / tensor
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
    links = weights * (shards - 1) / shards * passes * microbatches
    # Two sums over the tensor axis a layer and direction, each sent and received in pieces.
    links += passes * shape.num_layers * 2 * 2 * carry * (tensor - 1) / tensor
    if trained:
        held = params / (tensor * shards)
        memory += updates * held * (2 * 4 * 3 + 4 * 2)  # weights and moments in and out, gradients
        links += updates * 2 * params / (tensor * shards) * 4 * (data - 1) / data
    memory += shape.num_layers * carry * 12 * passes
    return _cost(setting, device, work, useful, memory, links, setting.num_devices)


def _recomputed(remat: str, shape: Shape) -> float:
    """Returns the share of a forward pass that the backward pass does again."""
    output = shape.num_heads * shape.head_size * shape.hidden_size
    mlp = shape.mlp_size * shape.hidden_size
    layer = flops.layer_products(shape)
    kept = {"attention": output + 2 * mlp, "projections": output, "dots": 0.0, "none": 0.0}
    return kept.get(remat.removeprefix("offload_"), layer) / layer


def _prefill(setting: Setting, device: Device) -> Cost:
    config, shape, tensor = setting.config, setting.policy, setting.mesh["tensor"]
    prompts, tokens = config.trainer.prompts_per_step, config.data.max_prompt_tokens
    work = flops.forward(shape, np.full(prompts, tokens), 1) / setting.num_devices
    weights = num_params(shape) * setting.compute_item / tensor
    batches = max(1, prompts * tokens / 4096)
    links = 4 * shape.num_layers * prompts * tokens / setting.row_shards * shape.hidden_size
    links *= (tensor - 1) / tensor
    return _cost(setting, device, work, work, weights * batches, links, tensor)


def _decode(setting: Setting, device: Device) -> Cost:
    config, shape, item = setting.config, setting.policy, setting.compute_item
    tensor, fsdp = setting.mesh["tensor"], setting.mesh["fsdp"]
    slots, response = setting.num_slots, config.rollout.max_response_tokens
    steps = math.ceil(config.sequences_per_step / slots) * response
    local = slots / setting.row_shards
    held = num_params(shape) / tensor
    mean = config.data.max_prompt_tokens + response / 2
    attended = 4 * shape.num_layers * shape.num_heads * shape.head_size * mean / tensor
    work = steps * local * (2 * held + attended)
    heads = setting.split(shape.num_kv_heads)
    cache = 2 * shape.num_layers * local * heads * mean * shape.head_size * item
    links = steps * 4 * shape.num_layers * local * shape.hidden_size * item * (tensor - 1) / tensor
    if config.mesh.rollout == "train":
        links += steps * held * item * (fsdp - 1) / fsdp
    return _cost(setting, device, work, work, steps * (held * item + cache), links, tensor)


def _reshard(setting: Setting, device: Device) -> Cost:
    shards = 1 if setting.config.mesh.rollout == "train" else setting.mesh["fsdp"]
    arriving = num_params(setting.policy) * setting.compute_item / setting.mesh["tensor"]
    links = arriving * (shards - 1) / shards
    return _cost(setting, device, 0.0, 0.0, 2 * arriving, links, setting.num_devices)
