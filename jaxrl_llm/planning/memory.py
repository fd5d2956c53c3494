"""Closed-form estimate of the bytes per device that each program of a run needs.

Arguments of a program are counted exactly (`run_setting.py`). Temporaries (gradients, activations,
logits) are estimated for each of its phases, of which the largest counts. `_COMPILERS` has the
differences between compilers; `docs/memory.md` compares plans with the compilers' reports.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from jaxrl_llm.algorithms import requirements
from jaxrl_llm.config.placement import ROLES
from jaxrl_llm.config.rollout_data import PREFILL_CHUNK_TOKENS
from jaxrl_llm.models import attention, heads
from jaxrl_llm.models.architecture import LayerType
from jaxrl_llm.models.moe import expert_mlp
from jaxrl_llm.models.recurrent.gated_delta_rule import CHUNK_TOKENS
from jaxrl_llm.models.recurrent.sequence_memory import paged_layers
from jaxrl_llm.planning import vision_costs
from jaxrl_llm.planning.run_setting import (
    SCORING_PROGRAMS,
    Head,
    MemoryParts,
    RunSetting,
    num_layer_params,
    num_params,
)


@dataclasses.dataclass(frozen=True)
class _Compiler:
    """Copies that a compiler keeps of arrays it could have dropped."""

    # Of the critic while the policy is trained: on CPU its old weights; on TPU its accumulated
    # gradient where both optimizers come last, as in programs of 8B but not of 0.5B models.
    idle_critic: float
    head_gradients: float  # of the head's gradient, besides the microbatch's, in its phase
    optimizer_gradients: float  # of the policy's gradient, during the optimizer's phase
    logit_copies: tuple[float, float]  # of one chunk's float32 logits, in scoring and in training
    head_chunks: float  # of one chunk of the head while it is gathered
    hoisted_heads: float  # more of them if the only chunk is gathered before its loop
    layer_copies: float  # of one layer's gathered weights in the backward pass
    cut_heads: float  # of the device's shard of the head, cut into chunks
    layer_gradients_at_head: bool  # whether the layers' gradient exists during the head's phase
    fragmentation: float  # allocated memory over the bytes of arrays


_COMPILERS: Mapping[str, _Compiler] = {
    "tpu": _Compiler(0.5, 0.0, 1.0, (1.0, 1.0), 1.0, 0.0, 1.0, 1.0, True, 1.0),
    "gpu": _Compiler(0.5, 0.0, 1.0, (1.0, 1.0), 1.0, 0.0, 1.0, 0.0, True, 1.0),
    "cpu": _Compiler(1.0, 1.0, 2.75, (3.0, 2.0), 2.0, 1.0, 2.4, 1.0, True, 1.15),
    # A single device gathers nothing.
    "one cpu": _Compiler(1.0, 1.0, 2.2, (3.0, 2.0), 1.0, 0.0, 3.0, 0.0, False, 1.2),
}


def _compiler(setting: RunSetting) -> _Compiler:
    is_single_cpu = (setting.backend, setting.num_devices) == ("cpu", 1)
    return _COMPILERS["one cpu" if is_single_cpu else setting.backend]


_HEADS: Mapping[str, Head] = {"policy": "lm", "critic": "scalar"}

# Per query and key of a block that an indexer compares: the score and the sorted numbers and
# indices of top-k, 4 bytes each, and the mask.
_SELECTION_BYTES = 13.0


def program_parts(setting: RunSetting, roles: Collection[str] = ROLES) -> dict[str, MemoryParts]:
    """Arguments and temporaries of each program of `planning/compiled_memory.py`."""
    learners = [role for role in ("policy", "critic") if role in roles and setting.has_role(role)]
    by_program: dict[str, MemoryParts] = {}
    if "rollout" in roles:
        by_program |= {"prefill": _prefill(setting), "decode": _decode(setting)}
    if "policy" in roles or (
        "reference" in roles and requirements.requirements(setting.config.algorithm).reference
    ):
        by_program["score"] = _score(setting, "lm")
    if "critic" in learners:
        by_program["score_critic"] = _score(setting, "scalar")
    if "reward" in roles and setting.scorers:
        for name, head in SCORING_PROGRAMS:
            shapes = [scorer.shape for scorer in setting.scorers if scorer.head == head]
            if shapes:
                largest = dataclasses.replace(setting, model=max(shapes, key=num_params))
                by_program[name] = _score(largest, head)
                if head == "lm":
                    teacher_bytes = setting.teacher_bytes(setting.config.sequences_per_step)
                    by_program[name] += MemoryParts(activations=teacher_bytes)
    if learners:
        by_program["train"] = _train(setting, learners)
    if "policy" in roles:
        by_program |= _reshard(setting)
    if "policy" in roles and setting.policy.vision:
        by_program["tower"] = vision_costs.vision_encoder_memory(setting)
    return by_program


def resident_memory(setting: RunSetting, roles: Collection[str] = ROLES) -> MemoryParts:
    """Arrays on a device during the whole step: models, optimizers, the rollout copy.

    An asynchronous run may have the rollout copy twice: the old one serves while the new one is
    copied to a pool of its own, or until samples in flight are drained. The policy comes with the
    vision encoder that reads images for the engine: a frozen one, or a copy of the trained one.
    """
    parts = sum((setting.resident_parts(role) for role in roles), MemoryParts())
    drains = setting.config.trainer.new_weights == "drain"
    if setting.config.max_staleness and "rollout" in roles and (drains or "policy" not in roles):
        parts += setting.resident_parts("rollout")
    if "policy" in roles:
        parts += MemoryParts(weights=1.0 * setting.vision_params * setting.param_item)
    return parts


def step_memory(setting: RunSetting, roles: Collection[str] = ROLES) -> dict[str, MemoryParts]:
    """Bytes on a device while each program runs, resident arrays included."""
    beside = resident_memory(setting, roles)
    totals = {
        name: beside + parts - _resident_arguments(setting, name, parts, roles)
        for name, parts in program_parts(setting, roles).items()
    }
    if {"policy", "rollout"} <= set(roles) and setting.config.trainer.sampling == "sync":
        # after `PolicySampler.release`
        for name in {"score", "score_critic", "train"} & set(totals):
            totals[name] -= setting.resident_parts("rollout")
    return totals


def peak_bytes(setting: RunSetting, roles: Collection[str] = ROLES) -> float:
    return max((parts.total for parts in step_memory(setting, roles).values()), default=0.0)


def _resident_arguments(
    setting: RunSetting, program: str, own: MemoryParts, roles: Collection[str]
) -> MemoryParts:
    """Arguments of a program that `resident_memory` counts too."""
    if program == "train":
        learners = [role for role in ("policy", "critic") if role in roles]
        return sum((setting.resident_parts(role) for role in learners), MemoryParts())
    if program == "score" and setting.resident_parts("reference").host:
        # Loaded from host memory: a copy that `resident_memory` does not count.
        return MemoryParts()
    resharded = {} if "rollout" in roles else setting.resharded_bytes
    return MemoryParts(weights=own.weights - resharded.get(program, 0.0))


@dataclasses.dataclass(frozen=True)
class _MLP:
    """Bytes per device of temporaries in the MLP, or the experts, of one layer."""

    inner: float  # one result that `remat` may save; with experts, of the shared MLP
    weights: float  # of the whole layer, gathered
    experts: float = 0.0  # part of `weight_bytes`: experts gathered at one time
    rows: float = 0.0  # inputs of the experts, a row per token and chosen expert
    results: float = 0.0  # one inner result of the experts

    @classmethod
    def from_layer(
        cls, setting: RunSetting, kind: LayerType, tokens: int, exchanges: bool = True
    ) -> "_MLP":
        shape, item, moe = setting.policy, setting.compute_item, setting.policy.experts
        stack = next(name for name, stack in shape.layer_stacks.items() if stack.layer == kind)
        params = setting.gathered_layer_params()[stack]
        if not kind.experts or moe is None:
            inner = tokens * setting.tensor_shard(shape.mlp_size) * item
            return cls(inner, (params.experts + params.rest) * item)
        expert_shards, visits = setting.mesh["expert"], tokens * moe.per_token
        expert_bytes = 1.0 * params.experts * item
        if expert_shards > 1 and exchanges:
            visits = expert_shards * expert_mlp.round_capacity(visits, expert_shards)
        shards, inner = (
            setting.mesh["fsdp"] * setting.mesh["sequence"],
            setting.tensor_shard(moe.size),
        )
        if expert_shards == 1 and shards > 1 and inner % shards == 0:
            expert_bytes /= expert_mlp.num_weight_chunks(expert_bytes, inner // shards)
        return cls(
            inner=tokens * setting.tensor_shard(moe.shared_size) * item,
            weights=params.rest * item + expert_bytes,
            experts=expert_bytes,
            rows=visits * shape.hidden_size * item,
            results=visits * inner * item,
        )


class _MicrobatchBytes:
    """Bytes per device of the arrays in a pass over one microbatch."""

    def __init__(self, setting: RunSetting, num_sequences: int):
        config, shape, item = setting.config, setting.policy, setting.compute_item
        rows = setting.rows(num_sequences)
        tokens = round(rows.rows * rows.width) // setting.mesh["sequence"]
        query_heads = setting.tensor_shard(shape.num_heads)
        self.carry = tokens * shape.hidden_size * item  # input of one layer
        self.queries = tokens * query_heads * shape.head_size * item  # of one layer
        self.attended = tokens * query_heads * shape.value_size * item
        kv_heads = setting.tensor_shard(shape.num_kv_heads)
        self.keys = tokens * kv_heads * shape.head_size * item
        self.values = tokens * kv_heads * shape.value_size * item
        latent = shape.latent
        # Latent attention: the compressed vectors of queries, and of keys and values.
        self.query_latents = tokens * latent.q_rank * item if latent else 0
        self.kv_latents = tokens * sum(shape.kv_cache_sizes) * item if latent else 0
        self.mlps = {
            kind: _MLP.from_layer(setting, kind, tokens) for kind in set(shape.layer_types)
        }
        # Float32 arrays of a gated delta net: values, keys, and decays and scores within a chunk.
        self.recurrence = 0.0
        if (delta := shape.gated_delta) is not None:
            per_head = 2 * delta.value_size + 2 * delta.key_size + 3 * CHUNK_TOKENS
            self.recurrence = 4.0 * tokens * setting.tensor_shard(delta.num_value_heads) * per_head
        # Float32 attention weights of one block of queries; kernels materialize none.
        block = 1.0 if rows.key_copies else min(1.0, attention.QUERY_BLOCK / rows.width)
        scores = tokens * query_heads * rows.keys * 4.0 * block
        self.scores = scores if setting.attention_kernel == "xla" or shape.indexer else 0.0
        self.selection = 0.0  # of the keys of one block of queries; has no backward pass
        if indexer := shape.indexer:
            self.selection = tokens * rows.keys * block * _SELECTION_BYTES
            self.selection += tokens * indexer.num_heads * indexer.head_size * item
        # Scores that a layer saves for its backward pass, and keys gathered for them. With several
        # blocks of queries, scores are recomputed.
        one_block = rows.keys <= attention.QUERY_BLOCK
        self.saved_scores = (self.scores + rows.key_copies * (self.keys + self.values)) * one_block

        vocab = setting.tensor_shard(shape.vocab_size)  # rows of the head in the computation
        # rows of the stored shard
        local_vocab = setting.local_params("lm")["embed"] // shape.hidden_size
        scored_tokens = (
            round(rows.rows * rows.scored_tokens) if setting.mesh["sequence"] == 1 else tokens
        )
        num_chunks = heads.num_vocab_chunks(
            local_vocab, vocab // local_vocab, scored_tokens, config.model.vocab_chunk
        )
        self.is_one_chunk = num_chunks == 1  # whether the head is computed in one chunk
        self.head_shard = local_vocab * shape.hidden_size * item  # the stored shard of the head
        # The embedding, resharded by features for the lookup.
        is_relaid = vocab > local_vocab or config.model.param_dtype != config.model.compute_dtype
        self.embedding_slices = self.head_shard if is_relaid else 0.0
        # One chunk of the head, gathered.
        self.head_chunk = vocab // num_chunks * shape.hidden_size * item
        self.chunk_logits = scored_tokens * (vocab // num_chunks) * 4.0  # its float32 logits
        # Besides a chunk, while it is gathered.
        self.gather_buffer = (
            0.0 if self.is_one_chunk else (_compiler(setting).head_chunks - 1) * self.head_chunk
        )

    def head_copies(self, compiler: _Compiler, passes: int) -> float:
        # A single chunk may be gathered before its loop.
        return (
            compiler.hoisted_heads * passes * self.head_chunk
            if self.is_one_chunk
            else compiler.cut_heads * self.head_shard
        )


def _train(setting: RunSetting, roles: Sequence[str]) -> MemoryParts:
    """Memory of one optimizer update: of the policy, its critics, or all of them."""
    compiler, work = _compiler(setting), _MicrobatchBytes(setting, setting.config.minibatch_size)
    arguments = sum((setting.update_arguments(role) for role in roles), MemoryParts())
    critic_learned = setting.num_trained("scalar")
    # Policy and critics are updated one after the other; the larger of the two counts.
    learned = max({"policy": setting.num_trained("lm"), "critic": critic_learned}[r] for r in roles)
    # One microbatch's gradient in `compute_dtype`, and a float32 accumulator if there are several.
    microbatch_gradient = 1.0 * learned * setting.compute_item
    accumulates = (
        setting.stages > 1 or setting.rows(setting.config.minibatch_size).num_microbatches > 1
    )
    if setting.stages > 1:  # the layers of one round, and their weights if cast
        local_params = setting.local_params("lm")
        layer_share = (
            1.0
            if setting.trains_adapters("lm")
            else num_layer_params(local_params) / local_params.total()
        )
        copies = 1 + (setting.param_item > setting.compute_item)
        microbatch_gradient *= copies * layer_share / setting.policy.rounds
    accumulated = microbatch_gradient + 4.0 * learned * accumulates
    trains_both = len(roles) > 1
    idle_critic = 4.0 * critic_learned * compiler.idle_critic if trains_both else 0.0
    saved_activations, offloaded = _saved_activations(setting, work)
    base = MemoryParts(
        activations=saved_activations,
        temporary=idle_critic + work.embedding_slices * (1 + trains_both),
    )
    # Besides the logits and the chunk of the head: their gradients, whichever is larger.
    buffers = max((compiler.logit_copies[1] - 1) * work.chunk_logits, work.gather_buffer)
    head_gradients = (
        0.0 if setting.trains_adapters("lm") else compiler.head_gradients * work.head_shard
    )
    at_head = base + MemoryParts(
        gradients=(
            accumulated if compiler.layer_gradients_at_head else accumulated - microbatch_gradient
        )
        + head_gradients,
        logits=work.chunk_logits,
        temporary=work.head_chunk + buffers + work.head_copies(compiler, passes=2),
    )
    attention_bytes = (
        4 * work.scores + work.selection + 2 * (work.queries + work.keys + work.values)
    )
    layers = [
        base
        + MemoryParts(
            gradients=accumulated,
            activations=max(attention_bytes, 2 * work.recurrence)
            + 4 * mlp.inner
            + 6 * mlp.rows
            + 4 * mlp.results,
            temporary=compiler.layer_copies * mlp.weights + 2 * mlp.experts,
        )
        for mlp in work.mlps.values()
    ]
    at_optimizer = MemoryParts(
        gradients=compiler.optimizer_gradients
        * (4.0 * learned if accumulates else microbatch_gradient),
        temporary=idle_critic
        + max(setting.optimizer_bytes(_HEADS[r], in_loop=True) for r in roles),
    )
    phases = [at_head] * ("policy" in roles) + [*layers, at_optimizer]
    if "policy" in roles and setting.trains_vision_encoder():
        phases.append(
            vision_costs.vision_training_memory(setting)
            + MemoryParts(gradients=accumulated, temporary=idle_critic)
        )
    busiest = max(phases, key=lambda parts: parts.total)
    # The step's batch as the update reads it: replicated on every device.
    config, width = setting.config, setting.config.max_sequence_tokens
    batch = 1.0 * config.sequences_per_step * width * (4 + 2 * 1 + 9 * 4)
    batch += config.minibatch_size * width * 2 * 4
    if "policy" in roles:
        batch += setting.teacher_bytes(config.minibatch_size)
        batch += setting.support_bytes(config.minibatch_size)
        batch += vision_costs.image_feature_bytes(setting)
        batch += vision_costs.image_input_bytes(
            setting, config.minibatch_size
        ) + vision_costs.feature_gradient_bytes(setting)
    batch_parts = MemoryParts(activations=batch, host=offloaded)
    return arguments + busiest * compiler.fragmentation + batch_parts


def _saved_activations(setting: RunSetting, work: _MicrobatchBytes) -> tuple[float, float]:
    """Activations saved for the backward pass: bytes on the device, and on the host."""
    remat, lora = setting.config.model.remat, setting.config.lora
    results = {
        "q": work.queries + work.query_latents,
        "k": work.kv_latents or work.keys,
        "v": work.keys + work.values if work.kv_latents else work.values,
        "o": work.carry,
    }
    attention_inputs = work.queries + work.keys + work.values + work.attended

    def layer_bytes(mlp: _MLP) -> float:
        matmul_outputs = results | {"gate": mlp.inner, "up": mlp.inner}
        # Matmuls of LoRA adapters have results of their own.
        adapted = sum(matmul_outputs.get(n, 0.0) for n in lora.targets) if lora.rank else 0.0
        # Input and result of both norms, in float32 too.
        all_activations = (
            7 * work.carry
            + max(attention_inputs + work.queries + work.saved_scores, work.recurrence)
            + 3 * mlp.inner
        )
        return {
            "full": work.carry,
            "attention": work.carry + attention_inputs,
            "projections": work.carry + attention_inputs + 2 * mlp.inner,
            "dots": work.carry + sum(matmul_outputs.values()) + adapted,
            "none": all_activations + mlp.experts + 2 * mlp.rows + 3 * mlp.results,
        }[remat.removeprefix("offload_")]

    # Layers on stages, for one microbatch at a time, are not saved at the same time as the others.
    unstaged = staged = 0.0
    for stack in setting.policy.layer_stacks.values():
        layers = len(stack.layer_indices) * layer_bytes(work.mlps[stack.layer])
        if stack.stages > 1:
            staged += layers / (stack.stages * setting.policy.rounds)
        else:
            unstaged += layers
    total, stage_buffers = max(unstaged, staged), 0.0
    if setting.stages > 1:  # inputs of all microbatches, results, and their gradients
        turns = _turns(setting, setting.config.minibatch_size)
        stage_buffers = ((setting.policy.rounds + 2) * setting.stages + 3) * turns * work.carry
    # A CPU device's memory is the host's.
    offloads = remat.startswith("offload_") and setting.backend != "cpu"
    return (stage_buffers, total) if offloads else (stage_buffers + total, 0.0)


def _turns(setting: RunSetting, num_sequences: int) -> int:
    """Turns of microbatches through the pipeline, see `PackedBatch.to_stages`."""
    return -(-setting.rows(num_sequences).num_microbatches // setting.stages)


def _score(setting: RunSetting, head: Head) -> MemoryParts:
    """Memory of a forward pass over a step's sequences, of a policy or a critic."""
    compiler = _compiler(setting)
    work = _MicrobatchBytes(setting, setting.config.sequences_per_step)
    phases = [MemoryParts(temporary=work.embedding_slices)]
    for mlp in work.mlps.values():
        mlp_bytes = 2 * mlp.inner + 2 * mlp.rows + mlp.results
        mixed = max(2 * work.scores + work.selection, work.recurrence)
        layer = work.carry + mixed + mlp_bytes
        phases.append(MemoryParts(activations=layer, temporary=mlp.weights))
    base, tables = MemoryParts(temporary=work.embedding_slices), 1
    if setting.stages > 1:  # inputs of a round, and the stages' inputs and outputs
        turns = _turns(setting, setting.config.sequences_per_step)
        base += MemoryParts(activations=(setting.stages + 2) * turns * work.carry)
    if head == "lm":
        phases += [
            MemoryParts(logits=compiler.logit_copies[0] * work.chunk_logits),
            MemoryParts(logits=work.chunk_logits, temporary=work.head_chunk),
            MemoryParts(temporary=work.head_chunk + work.gather_buffer),
        ]
        base += MemoryParts(temporary=work.head_copies(compiler, passes=1))
        tables = 3  # log-probs, entropies, squares
    busiest = base + max(phases, key=lambda parts: parts.total)
    tokens = setting.config.sequences_per_step * setting.config.max_sequence_tokens
    batch_bytes = tokens * (4 + 8 + 4 * tables) + vision_costs.image_feature_bytes(setting)
    if head == "lm":
        batch_bytes += vision_costs.image_input_bytes(setting, setting.config.sequences_per_step)
    return busiest + MemoryParts(weights=setting.weight_bytes(head), activations=batch_bytes)


def _decode(setting: RunSetting) -> MemoryParts:
    shape, rollout = setting.policy, setting.config.rollout
    cache = setting.cache_bytes(setting.num_slots, setting.cache_tokens / setting.num_slots)
    slots = max(1, setting.num_slots // setting.sampling_shards)
    positions = 1 + rollout.speculation.draft_tokens
    # The write buffer of a chunk of steps, with a copy of the states.
    tokens = len(paged_layers(shape)) * rollout.chunk_steps * positions
    recent = tokens * setting.entry_bytes(setting.num_slots)
    recent += setting.state_bytes(setting.num_slots)
    vocab = setting.tensor_shard(shape.vocab_size)
    table = vocab * shape.hidden_size * setting.rollout_item
    temporary = 0.0
    if setting.backend == "tpu" and (latent := shape.latent):
        # The up-projections of latents, laid out for two matmuls.
        inner = setting.tensor_shard(shape.num_heads) * (latent.plain_size + latent.value_size)
        temporary += shape.num_layers * latent.kv_rank * inner * setting.rollout_item
    if shape.indexer:  # selects keys of sequences that lie side by side, out of their pages
        temporary += setting.cache_bytes(setting.num_slots, setting.config.max_sequence_tokens)
    if setting.config.mesh.rollout == "train" and setting.mesh["fsdp"] > 1:
        layer = (
            max(sum(params) for params in setting.gathered_layer_params().values())
            * setting.compute_item
        )
        tables = 3.25 if setting.backend == "tpu" else 2.0
        temporary += tables * table + min(8, shape.num_layers) * layer
    return MemoryParts(
        weights=setting.rollout_bytes,
        cache=cache + recent,
        logits=3.0 * slots * positions * vocab * 4,
        temporary=temporary,
    )


def _prefill(setting: RunSetting) -> MemoryParts:
    config, shape = setting.config, setting.policy
    width = config.data.max_prompt_tokens
    prompts = max(1, min(config.trainer.prompts_per_step, 4096 // width))
    rows = setting.local_rows(prompts)
    block = attention.QUERY_BLOCK if width <= PREFILL_CHUNK_TOKENS else PREFILL_CHUNK_TOKENS
    scores = rows * setting.tensor_shard(shape.num_heads) * width * min(width, block) * 4.0
    # splash attention does not prefill
    scores *= setting.attention_kernel != "cudnn" or bool(shape.indexer)
    if shape.indexer:
        scores += rows * width * min(width, block) * _SELECTION_BYTES
    tokens = rows * width
    exchanges = prompts % setting.sampling_shards == 0
    mlps = [_MLP.from_layer(setting, kind, tokens, exchanges) for kind in set(shape.layer_types)]
    mlp_bytes = max(3 * mlp.inner + 4 * mlp.rows + 3 * mlp.results for mlp in mlps)
    # Keys and values of all prompts, replicated, as any slot may need any; on GPUs also a copy
    # before they are concatenated.
    cache = setting.cache_bytes(prompts, width) * prompts / rows
    return MemoryParts(
        weights=setting.rollout_bytes,
        cache=cache * (1 + (setting.backend == "gpu")),
        activations=2 * scores
        + mlp_bytes
        + vision_costs.prefill_feature_bytes(setting, prompts * width),
        logits=rows * setting.tensor_shard(shape.vocab_size) * 4.0,
    )


def _reshard(setting: RunSetting) -> dict[str, MemoryParts]:
    train_params, rollout_params = setting.local_params("lm"), setting.rollout_params
    train_bytes = setting.stored_bytes("lm")
    non_layer_bytes, layer_bytes = setting.resharded_bytes.values()
    train_non_layer = train_params.total() - num_layer_params(train_params)
    gathers_head = rollout_params["embed"] > train_params["embed"]
    if setting.backend == "gpu":  # the device's shard of the gathered arrays, cast
        non_layer_temporary = 1.0 * gathers_head * train_non_layer * setting.rollout_item
    else:  # tables sharded as in training are copied one by one
        non_layer_temporary = (
            non_layer_bytes if gathers_head else non_layer_bytes / 2 * _compiler(setting).cut_heads
        )
    layer_temporary = (
        layer_bytes / 2
        if num_layer_params(rollout_params) > num_layer_params(train_params)
        else 0.0
    )
    last_stack = train_bytes[f"layers.{list(setting.policy.layer_stacks)[-1]}"]
    train_non_layer_bytes = train_bytes.total() - num_layer_params(train_bytes)
    return {
        "reshard": MemoryParts(
            train_non_layer_bytes + non_layer_bytes, temporary=non_layer_temporary
        ),
        "reshard_layer": MemoryParts(last_stack + layer_bytes, temporary=layer_temporary),
    }
