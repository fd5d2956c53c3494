"""Predicts the time of each phase of a training step on one device (a roofline model).

A phase takes the longest of its FLOPs, its memory bytes and its link bytes, each over the device's
rate times the fraction that programs reach (`EFFICIENCY`). Pipeline bubbles make a phase longer.
Phases do not overlap. Host work, evaluation and checkpoints are left out.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from jaxrl_llm.algorithms import requirements
from jaxrl_llm.models import flops
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.pipeline import schedule
from jaxrl_llm.models.recurrent.sequence_memory import paged_layers
from jaxrl_llm.planning import vision_costs
from jaxrl_llm.planning.accelerators import Device
from jaxrl_llm.planning.run_setting import SCORING_PROGRAMS, Head, LayerParams, RunSetting

EFFICIENCY = {"flops": 0.55, "memory": 0.75, "links": 0.7}


@dataclasses.dataclass(frozen=True)
class PhaseCost:
    """Cost of a phase per device, over a whole step."""

    flops: float  # including recomputation
    useful_flops: float  # without recomputation
    memory_bytes: float  # read and written
    link_bytes: float  # sent
    seconds: float
    num_devices: int  # that the phase runs on

    def scaled_by(self, count: float) -> "PhaseCost":
        """The cost of `count` repetitions in sequence."""
        totals = {k: count * v for k, v in vars(self).items() if k != "num_devices"}
        return dataclasses.replace(self, **totals)


def phase_costs(setting: RunSetting, device: Device) -> dict[str, PhaseCost]:
    """Cost of every phase of a step by name, with all sequences of maximum length."""
    needed = requirements.requirements(setting.config.algorithm)
    costs = {
        "prefill": _prefill(setting, device),
        "decode": _decode(setting, device),
        "score": _pass(setting, device, "lm", trained=False),
        "train": _pass(setting, device, "lm", trained=True),
        "reshard": _reshard(setting, device),
    }
    if setting.policy.vision:
        costs["tower"] = _tower(setting, device)
    if needed.reference:
        costs["score_reference"] = costs["score"]
    if needed.critic:
        costs["score_critic"] = _pass(setting, device, "scalar", trained=False)
        costs["train_critic"] = _pass(setting, device, "scalar", trained=True)
    for name, head in SCORING_PROGRAMS:
        passes = [
            _pass(dataclasses.replace(setting, model=scorer.shape), device, head, trained=False)
            for scorer in setting.scorers
            if scorer.head == head
        ]
        if passes:  # one after the other
            names = vars(passes[0]).keys() - {"num_devices"}
            sums = {name: sum(getattr(cost, name) for cost in passes) for name in names}
            costs[name] = dataclasses.replace(passes[0], **sums)
    return costs


def call_limits(setting: RunSetting, device: Device) -> dict[str, float]:
    """Least seconds that one call of a program can take on a device, by program.

    Scoring and updates: their useful FLOPs at the device's peak; a chunk of decode steps: reading
    weights and the cache of full slots at its memory bandwidth.
    """
    if not device.flops:
        return {}
    config = setting.config
    costs = phase_costs(setting, device)
    updates = config.trainer.epochs * config.sequences_per_step / config.minibatch_size
    useful = {"score": costs["score"].useful_flops}
    useful["train"] = costs["train"].useful_flops / updates
    if "score_critic" in costs:
        useful["score_critic"] = costs["score_critic"].useful_flops
        useful["train"] += costs["train_critic"].useful_flops / updates
    limits = {name: work / device.flops for name, work in useful.items()}
    slots = setting.num_slots
    step = decode_step(setting, device, slots, slots * config.max_sequence_tokens)
    chunk = step.scaled_by(config.rollout.chunk_steps)
    return {**limits, "decode": chunk.memory_bytes / device.memory_bandwidth}


def _cost(
    setting: RunSetting,
    device: Device,
    work_flops: float,
    useful_flops: float,
    memory_bytes: float,
    links: Mapping[int, float],  # bytes sent, by the size of the group of neighbouring devices
    busy_share: float = 1.0,  # fraction of the time that is not pipeline bubble
) -> PhaseCost:
    seconds = 0.0
    if device.flops:

        def send_seconds(group: int) -> float:
            in_domain = group <= device.domain
            bandwidth = device.link_bandwidth if in_domain else device.network_bandwidth
            return links[group] / (bandwidth * EFFICIENCY["links"])

        # A float32 matmul costs four 16-bit ones.
        flops_factor = 1.0 if setting.config.model.compute_dtype == "bfloat16" else 4.0
        seconds = max(
            flops_factor * work_flops / (device.flops * EFFICIENCY["flops"]),
            memory_bytes / (device.memory_bandwidth * EFFICIENCY["memory"]),
            sum(map(send_seconds, links)),
        )
    link_bytes = sum(links.values())
    return PhaseCost(
        work_flops,
        useful_flops,
        memory_bytes,
        link_bytes,
        seconds / busy_share,
        setting.num_devices,
    )


def _pass(setting: RunSetting, device: Device, head: Head, *, trained: bool) -> PhaseCost:
    """Cost of a forward, or forward and backward, pass over all sequences of a step."""
    config, shape, mesh = setting.config, setting.policy, setting.mesh
    sequences, width = config.sequences_per_step, config.max_sequence_tokens
    forward = flops.forward(shape, np.full(sequences, width), int(head == "scalar"))
    forward /= setting.num_devices
    tensor, data, stages = mesh["tensor"], mesh["data"], setting.stages
    weights = sum(setting.computed_params()) * setting.compute_item
    epochs = config.trainer.epochs if trained else 1
    passes = 3 if trained else 1
    tokens_per_update = config.minibatch_size * width if trained else sequences * width
    updates = epochs * sequences * width / tokens_per_update
    useful = forward * (passes * epochs)
    work = useful + (
        forward * _recompute_share(config.model.remat, shape) * epochs if trained else 0.0
    )

    count = setting.rows(tokens_per_update // width).num_microbatches
    microbatches = updates * count
    memory = weights * passes * microbatches
    tokens = epochs * sequences * width / setting.row_shards
    carry = tokens * shape.hidden_size * setting.compute_item
    links = _all_gather_bytes(setting, setting.computed_params()) * passes * microbatches
    links += passes * _all_to_all_bytes(setting, tokens) / stages
    # Two all-reduces over the tensor axis per layer and direction: reduce-scatter and all-gather.
    links += passes * shape.num_layers / stages * 2 * 2 * carry * (tensor - 1) / tensor
    data_parallel_bytes = 0.0
    if trained:
        params = setting.local_params(head).total()
        # Weights and moments read and written; gradients.
        memory += updates * params * (2 * 4 * 3 + 4 * 2)
        data_parallel_bytes = updates * 2 * params * 4 * (data - 1) / data
    memory += shape.num_layers / stages * carry * 12 * passes
    # Hidden states to the next stage in every round, and to the first stage and back.
    stage_bytes = (1 + trained) * epochs * carry * (shape.rounds + 1) * (stages > 1)
    link_bytes: dict[int, float] = {}
    stage_devices = setting.num_devices // stages
    for group, group_bytes in (
        (stage_devices // data, links),
        (stage_devices, data_parallel_bytes),
        (setting.num_devices, stage_bytes),
    ):
        link_bytes[group] = link_bytes.get(group, 0.0) + group_bytes
    busy = count * shape.rounds / schedule.busy_steps(count, stages, shape.rounds)[1]
    return _cost(setting, device, work, useful, memory, link_bytes, busy)


def _all_gather_bytes(setting: RunSetting, used: LayerParams, stages: int = 1) -> float:
    """Bytes that a device receives in one all-gather of the weights it computes with."""
    shards, expert_shards = setting.mesh["fsdp"] * stages, setting.mesh["expert"]
    received_params = used.experts * (1 - 1 / shards) + used.rest * (
        1 - 1 / (shards * expert_shards)
    )
    return received_params * setting.compute_item


def _all_to_all_bytes(setting: RunSetting, tokens: float) -> float:
    """Bytes that a device sends to experts and back (all-to-all) for `tokens` of its own."""
    shape, expert_shards = setting.policy, setting.mesh["expert"]
    if shape.experts is None:
        return 0.0
    layers = sum(kind.experts for kind in shape.layer_types)
    visits = tokens * shape.experts.per_token * (1 - 1 / expert_shards)
    return layers * 2 * visits * shape.hidden_size * setting.compute_item


def _recompute_share(remat: str, shape: Architecture) -> float:
    """Share of a forward pass that the backward pass recomputes under a remat policy.

    Results of experts are never saved.
    """
    output = shape.num_heads * shape.value_size * shape.hidden_size
    total = recomputed = 0.0
    for kind in shape.layer_types:
        layer, mlp = flops.layer_matmul_weights(shape, kind), flops.mlp_matmul_weights(shape, kind)
        always, optional = (mlp, 0.0) if kind.experts else (0.0, 2 / 3 * mlp)
        recomputed_by_policy = {
            "attention": output + optional,
            "projections": output,
            "dots": 0.0,
            "none": 0.0,
        }
        partial = recomputed_by_policy.get(remat.removeprefix("offload_"))
        total += layer
        recomputed += layer if partial is None else partial + always
    return recomputed / total


def _prefill(setting: RunSetting, device: Device) -> PhaseCost:
    config, shape, tensor = setting.config, setting.policy, setting.mesh["tensor"]
    prompts, tokens = config.trainer.prompts_per_step, config.data.max_prompt_tokens
    work = flops.forward(shape, np.full(prompts, tokens), 1) / setting.num_devices
    weights = sum(setting.computed_params(sampling=True)) * setting.compute_item
    batches = max(1, prompts * tokens / 4096)
    local_tokens = prompts * tokens / setting.sampling_shards
    carry = local_tokens * shape.hidden_size * setting.compute_item
    # Two all-reduces per layer: reduce-scatter and all-gather.
    links = shape.num_layers * 2 * 2 * carry * (tensor - 1) / tensor
    links += _all_to_all_bytes(setting, local_tokens)
    return _cost(setting, device, work, work, weights * batches, {tensor: links})


def _tower(setting: RunSetting, device: Device) -> PhaseCost:
    """Cost of encoding the images of a step.

    A frozen vision encoder reads each image once per run; this assumes that all are new. A trained
    one reads them for the engine, and again for every log-prob pass and update.
    """
    forward_flops = vision_costs.vision_flops(setting)
    useful = recomputed = 0.0
    if setting.trains_vision_encoder():
        config = setting.config
        num_passes = 1 + requirements.requirements(config.algorithm).reference
        useful = forward_flops * (num_passes + 3 * config.trainer.epochs)
        recomputed = 0.0 if config.model.remat == "none" else forward_flops * config.trainer.epochs
    weights = 1.0 * setting.vision_params * setting.param_item
    work, links = forward_flops + useful, {setting.num_devices: weights}
    return _cost(setting, device, work + recomputed, work, weights, links)


def _decode(setting: RunSetting, device: Device) -> PhaseCost:
    config, slots = setting.config, setting.num_slots
    response = config.rollout.max_response_tokens
    steps = math.ceil(config.sequences_per_step / slots) * response
    mean = config.data.max_prompt_tokens + response / 2
    return decode_step(setting, device, slots, slots * mean).scaled_by(steps)


def decode_step(
    setting: RunSetting, device: Device, num_slots: float, num_tokens: float
) -> PhaseCost:
    """Cost of one decode step of `num_slots` slots with `num_tokens` cached tokens in total."""
    config, shape, item = setting.config, setting.policy, setting.compute_item
    tensor, expert_shards = setting.mesh["tensor"], setting.mesh["expert"]
    local_slots, local_tokens = (
        count / setting.sampling_shards for count in (num_slots, num_tokens)
    )
    experts, rest = used = setting.computed_params(sampling=True)
    active_params = read_params = 0.0  # expert parameters: active per token, read per step
    if moe := shape.experts:
        active_params = experts * expert_shards * moe.per_token / moe.num
        read_params = experts * min(1.0, local_slots * moe.per_token * expert_shards / moe.num)
    kv_heads, key_size, value_size = shape.kv_cache_sizes
    score_and_value_size = key_size + (shape.latent.kv_rank if shape.latent else value_size)
    num_paged = len(paged_layers(shape))
    attention_flops = 2 * num_paged * shape.num_heads * score_and_value_size * local_tokens / tensor
    work = local_slots * 2 * (rest + active_params) + attention_flops
    heads = setting.tensor_shard(kv_heads)
    cache = num_paged * local_tokens * heads * (key_size + value_size) * item
    # Every step reads and writes the states.
    cache += 2 * setting.state_bytes(round(num_slots))
    links = 4 * shape.num_layers * local_slots * shape.hidden_size * item * (tensor - 1) / tensor
    links += _all_to_all_bytes(setting, local_slots)
    if config.mesh.rollout == "train":
        links += _all_gather_bytes(setting, used)
    memory = (rest + read_params) * item + cache
    return _cost(setting, device, work, work, memory, {tensor * expert_shards: links})


def _reshard(setting: RunSetting, device: Device) -> PhaseCost:
    used = setting.computed_params(sampling=True)
    as_trained = setting.config.mesh.rollout == "train"
    links = 0.0 if as_trained else _all_gather_bytes(setting, used, setting.stages)
    received_bytes = sum(used) * setting.compute_item
    return _cost(setting, device, 0.0, 0.0, 2 * received_bytes, {setting.num_devices: links})
