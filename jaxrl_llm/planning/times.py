"""How long the phases of a step take on a device.

A phase takes the longest of these: its operations, its memory bytes and its link bytes, each over
what the device does a second, times the share that programs reach (`REACHED`). Pipeline stages that
wait make a phase longer. Phases do not overlap. Host work, evaluation and checkpoints are left out.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from jaxrl_llm.algorithms import needs
from jaxrl_llm.models import flops, pipeline
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.planning import towers
from jaxrl_llm.planning.devices import Device
from jaxrl_llm.planning.setting import SCORING, Head, LayerParams, Setting

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

    def times(self, count: float) -> "Cost":
        """Returns what so many of it ask, one after the other."""
        asked = {k: count * v for k, v in vars(self).items() if k != "num_devices"}
        return dataclasses.replace(self, **asked)


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
    if setting.policy.vision:
        found["tower"] = _tower(setting, device)
    if needed.reference:
        found["score_reference"] = found["score"]
    if needed.critic:
        found["score_critic"] = _pass(setting, device, "scalar", trained=False)
        found["train_critic"] = _pass(setting, device, "scalar", trained=True)
    for name, head in SCORING:
        passes = [
            _pass(dataclasses.replace(setting, model=scorer.shape), device, head, trained=False)
            for scorer in setting.scorers
            if scorer.head == head
        ]
        if passes:  # one after the other
            names = vars(passes[0]).keys() - {"num_devices"}
            sums = {name: sum(getattr(each, name) for each in passes) for name in names}
            found[name] = dataclasses.replace(passes[0], **sums)
    return found


def _cost(
    setting: Setting,
    device: Device,
    work: float,
    useful: float,
    memory: float,
    links: Mapping[int, float],  # bytes sent within groups of so many neighbouring devices
    busy: float = 1.0,  # the share of the time in which there is something to do
) -> Cost:
    seconds = 0.0
    if device.flops:

        def sending(group: int) -> float:
            near = group <= device.domain
            bandwidth = device.link_bandwidth if near else device.network_bandwidth
            return links[group] / (bandwidth * REACHED["links"])

        # A float32 matmul takes four passes of 16-bit ones.
        slow = 1.0 if setting.config.model.compute_dtype == "bfloat16" else 4.0
        seconds = max(
            slow * work / (device.flops * REACHED["flops"]),
            memory / (device.memory_bandwidth * REACHED["memory"]),
            sum(map(sending, links)),
        )
    sent = sum(links.values())
    return Cost(work, useful, memory, sent, seconds / busy, setting.num_devices)


def _pass(setting: Setting, device: Device, head: Head, *, trained: bool) -> Cost:
    """Returns a forward, or a forward and backward, pass over all sequences of a step."""
    config, shape, mesh = setting.config, setting.policy, setting.mesh
    sequences, width = config.sequences_per_step, config.max_sequence_tokens
    forward = flops.forward(shape, np.full(sequences, width), int(head == "scalar"))
    forward /= setting.num_devices
    tensor, data, stages = mesh["tensor"], mesh["data"], setting.stages
    weights = sum(setting.used()) * setting.compute_item
    times = config.trainer.epochs if trained else 1
    passes = 3 if trained else 1
    each = config.minibatch_size * width if trained else sequences * width
    updates = times * sequences * width / each
    useful = forward * (passes * times)
    work = useful + (forward * _recomputed(config.model.remat, shape) * times if trained else 0.0)

    count = setting.rows(each // width).count
    microbatches = updates * count
    memory = weights * passes * microbatches
    tokens = times * sequences * width / setting.row_shards
    carry = tokens * shape.hidden_size * setting.compute_item
    links = _gathered(setting, setting.used()) * passes * microbatches
    links += passes * _exchanged(setting, tokens) / stages
    # Two sums over the tensor axis a layer and direction, each sent and received in pieces.
    links += passes * shape.num_layers / stages * 2 * 2 * carry * (tensor - 1) / tensor
    over_data = 0.0
    if trained:
        held = setting.held(head).total()
        memory += updates * held * (2 * 4 * 3 + 4 * 2)  # weights and moments in and out, gradients
        over_data = updates * 2 * held * 4 * (data - 1) / data
    memory += shape.num_layers / stages * carry * 12 * passes
    # Hidden states to the neighbour in every round, and to the stages and back.
    between = (1 + trained) * times * carry * (shape.rounds + 1) * (stages > 1)
    by_group: dict[int, float] = {}
    of_stage = setting.num_devices // stages
    for group, sent in (
        (of_stage // data, links),
        (of_stage, over_data),
        (setting.num_devices, between),
    ):
        by_group[group] = by_group.get(group, 0.0) + sent
    busy = count * shape.rounds / pipeline.busy_steps(count, stages, shape.rounds)[1]
    return _cost(setting, device, work, useful, memory, by_group, busy)


def _gathered(setting: Setting, used: LayerParams, stages: int = 1) -> float:
    """Returns the bytes that reach a device where weights are gathered for use, once."""
    shards, ways = setting.mesh["fsdp"] * stages, setting.mesh["expert"]
    arriving = used.experts * (1 - 1 / shards) + used.rest * (1 - 1 / (shards * ways))
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
    weights = sum(setting.used(sampling=True)) * setting.compute_item
    batches = max(1, prompts * tokens / 4096)
    here = prompts * tokens / setting.sampling_shards
    links = 4 * shape.num_layers * here * shape.hidden_size * (tensor - 1) / tensor
    links += _exchanged(setting, here)
    return _cost(setting, device, work, work, weights * batches, {tensor: links})


def _tower(setting: Setting, device: Device) -> Cost:
    """Returns what reading the images of a step costs.

    A frozen tower reads each once in a run: this is of steps whose images are new. One that learns
    reads them for the engine and each time that log-probs are asked for or an update is taken.
    """
    once = towers.operations(setting)
    useful = again = 0.0
    if setting.learns_tower():
        config = setting.config
        scored = 1 + needs.of(config.algorithm).reference
        useful = once * (scored + 3 * config.trainer.epochs)
        again = 0.0 if config.model.remat == "none" else once * config.trainer.epochs
    weights = 1.0 * setting.tower * setting.param_item
    work, links = once + useful, {setting.num_devices: weights}
    return _cost(setting, device, work + again, work, weights, links)


def _decode(setting: Setting, device: Device) -> Cost:
    config, slots = setting.config, setting.num_slots
    response = config.rollout.max_response_tokens
    steps = math.ceil(config.sequences_per_step / slots) * response
    mean = config.data.max_prompt_tokens + response / 2
    return decode_step(setting, device, slots, slots * mean).times(steps)


def decode_step(setting: Setting, device: Device, num_slots: float, num_tokens: float) -> Cost:
    """Returns the cost of one decode step of slots that read so many cached tokens together."""
    config, shape, item = setting.config, setting.policy, setting.compute_item
    tensor, ways = setting.mesh["tensor"], setting.mesh["expert"]
    local, tokens = (each / setting.sampling_shards for each in (num_slots, num_tokens))
    experts, rest = used = setting.used(sampling=True)
    visited = read = 0.0  # parameters of experts that a token meets, and that a step reads
    if of := shape.experts:
        visited = experts * ways * of.per_token / of.num
        read = experts * min(1.0, local * of.per_token * ways / of.num)
    held_heads, of_key, of_value = shape.cached
    of_pair = of_key + (shape.latent.kv_rank if shape.latent else of_value)
    attended = 2 * shape.num_layers * shape.num_heads * of_pair * tokens / tensor
    work = local * 2 * (rest + visited) + attended
    heads = setting.split(held_heads)
    cache = shape.num_layers * tokens * heads * (of_key + of_value) * item
    links = 4 * shape.num_layers * local * shape.hidden_size * item * (tensor - 1) / tensor
    links += _exchanged(setting, local)
    if config.mesh.rollout == "train":
        links += _gathered(setting, used)
    memory = (rest + read) * item + cache
    return _cost(setting, device, work, work, memory, {tensor * ways: links})


def _reshard(setting: Setting, device: Device) -> Cost:
    used = setting.used(sampling=True)
    as_trained = setting.config.mesh.rollout == "train"
    links = 0.0 if as_trained else _gathered(setting, used, setting.stages)
    arriving = sum(used) * setting.compute_item
    return _cost(setting, device, 0.0, 0.0, 2 * arriving, {setting.num_devices: links})
