"""What each program makes and drops: gradients, activations, logits, temporaries.

A program goes through phases; the most that exists at one time is what counts. How many
copies a compiler keeps is `setting.COMPILERS`; `docs/memory.md` compares with its reports.
"""

import dataclasses

from jaxrl_llm.planning.setting import (
    COMPILERS,
    Parts,
    Setting,
    batch_bytes,
    counted,
    num_learned,
    rollout_ends,
    rollout_item,
    rollout_weights,
    trained,
)
from jaxrl_llm.planning.sizes import ITEM_BYTES, counts
from jaxrl_llm.sharding import mesh as mesh_lib


@dataclasses.dataclass(frozen=True)
class _Work:
    """Bytes of the pieces that a pass over one microbatch is made of, on one device."""

    rows: int  # sequences
    carry: float  # one layer's input
    attention: float  # one layer's float32 attention weights, [rows, heads, T, T]
    dots: float  # outputs of one layer's matrix products
    around: float  # queries, keys, values and what attention mixes of them
    mlp: float  # one intermediate of the gated MLP
    layer: float  # one layer's weights, gathered for use
    table: float  # one table [V, D], gathered for use
    sums: float  # the same, float32
    chunk: float  # one chunk of float32 logits

    @classmethod
    def of(cls, setting: Setting, num_sequences: int) -> "_Work":
        config, shape = setting.config, setting.policy
        item = ITEM_BYTES[config.model.compute_dtype]
        rows = setting.rows(num_sequences)
        length = setting.split(setting.width, "sequence")
        tokens = rows * length
        heads = setting.split(shape.num_heads, "tensor")
        kv_heads = setting.split(shape.num_kv_heads, "tensor")
        mlp = setting.split(shape.mlp_size, "tensor")
        vocab = setting.split(shape.vocab_size, "tensor")
        projected = (heads + 2 * kv_heads) * shape.head_size
        whole = {axis: size if axis == "tensor" else 1 for axis, size in setting.mesh.items()}
        layer = counts(shape, "lm", mesh_lib.TRAIN, whole).layers // shape.num_layers
        return cls(
            rows=rows,
            carry=tokens * shape.hidden_size * item,
            attention=tokens * heads * setting.width * 4.0 if _holds_scores(setting) else 0.0,
            dots=tokens * (projected + 2 * shape.hidden_size + 2 * mlp) * item,
            around=tokens * 2 * (heads + kv_heads) * shape.head_size * item,
            mlp=tokens * mlp * item,
            layer=layer * item,
            table=vocab * shape.hidden_size * item,
            sums=vocab * shape.hidden_size * 4.0,
            chunk=min(tokens, config.model.vocab_chunk) * vocab * 4.0,
        )


def _holds_scores(setting: Setting) -> bool:
    """Returns whether attention weights are ever whole arrays: not so within a kernel."""
    kernel = setting.config.model.attention
    return kernel == "xla" or (kernel == "auto" and setting.backend == "cpu")


def _gathered(setting: Setting, size: float) -> float:
    """Returns what a gathered copy costs: nothing where every device has the whole anyway."""
    config = setting.config
    same = config.model.param_dtype == config.model.compute_dtype
    return 0.0 if setting.mesh["fsdp"] == 1 and same else size


def train(setting: Setting) -> Parts:
    """Returns what one optimizer update of all trained models needs."""
    config = setting.config
    compiler = COMPILERS[setting.backend]
    work = _Work.of(setting, config.minibatch_size)
    critics = config.algorithm.needs_critic + config.algorithm.safe
    given = trained(setting, "lm")
    for _ in range(critics):
        given += trained(setting, "scalar")

    held = counted(setting, "lm")
    # Policy and critic learn one after the other; the larger of the two counts.
    learned = [num_learned(setting, "lm")] + [num_learned(setting, "scalar")] * bool(critics)
    gradient = max(learned) * 4.0
    alone = 0.0 if critics else compiler.waiting
    with_head, with_layers, with_optimizer = (
        max(1.0, copies - alone) * gradient for copies in compiler.gradients
    )
    layer, table = _gathered(setting, work.layer), _gathered(setting, work.table)
    cast = _cast_ahead(setting, held.layers)

    saved, offloaded = _saved(setting, work, layer)

    at_head = Parts(
        gradients=with_head + work.sums * (compiler.head_sums if setting.row_shards > 1 else 1.0),
        activations=saved + 3 * work.carry,
        logits=compiler.chunk[1] * work.chunk,
        temporary=table,
    )
    in_layers = Parts(
        gradients=with_layers,
        activations=saved + compiler.attention[1] * work.attention + 4 * work.mlp + work.dots,
        temporary=cast + 3 * layer,
    )
    # What the last microbatch saved is not reused before the optimizer's work begins.
    at_end = Parts(
        gradients=with_optimizer + work.sums,
        activations=saved,
        temporary=cast + 1.2 * table,
    )
    busiest = max((at_head, in_layers, at_end), key=lambda parts: parts.total)
    return given + busiest + Parts(activations=batch_bytes(setting), host=offloaded)


def _saved(setting: Setting, work: _Work, layer: float) -> tuple[float, float]:
    """Returns what the forward pass keeps for the backward pass, on the device and on the host."""
    remat = setting.config.model.remat
    each = {
        "full": work.carry,
        "attention": work.carry + work.around,
        "projections": work.carry + work.around + 2 * work.mlp,
        "dots": work.carry + work.dots,
        "offload_full": work.carry,
        "offload_attention": work.carry + work.around,
        "none": work.carry * 3
        + work.dots
        + work.mlp
        + layer
        + COMPILERS[setting.backend].saved_attention * work.attention,
    }[remat]
    everything = each * setting.policy.num_layers
    return (0.0, everything) if remat.startswith("offload") else (everything, 0.0)


def _cast_ahead(setting: Setting, num_params: int) -> float:
    """Returns bytes of a second copy of weights, in the dtype that is computed with."""
    model = setting.config.model
    if not COMPILERS[setting.backend].casts_ahead or model.param_dtype == model.compute_dtype:
        return 0.0
    return num_params * ITEM_BYTES[model.compute_dtype]


def score(setting: Setting, head: str) -> Parts:
    """Returns what a forward pass over a step's sequences needs: of a policy or a critic."""
    config = setting.config
    compiler = COMPILERS[setting.backend]
    work = _Work.of(setting, config.sequences_per_step)
    held = counted(setting, head)
    layer, table = _gathered(setting, work.layer), _gathered(setting, work.table)
    between = Parts(
        activations=3 * work.carry,
        temporary=_cast_ahead(setting, held.layers) + compiler.gathered_layers * layer,
    )
    at_head = between
    if head == "lm":
        split = setting.backend == "cpu" and setting.mesh["tensor"] > 1  # one more to be reduced
        at_head += Parts(logits=(compiler.chunk[0] + split) * work.chunk, temporary=table)
    in_layers = between + Parts(activations=compiler.attention[0] * work.attention + 3 * work.mlp)
    busiest = max((at_head, in_layers), key=lambda parts: parts.total)
    tokens = config.sequences_per_step * setting.width
    tables = 3 if head == "lm" else 1  # log-probs, entropies, squares
    weights = held.all * ITEM_BYTES[config.model.param_dtype]
    return busiest + Parts(weights=weights, activations=tokens * (4 + 8 + 4 * tables))


def cache_bytes(setting: Setting) -> float:
    """Returns bytes of keys and values of all slots on one device."""
    shape = setting.policy
    slots = setting.num_slots
    slots = slots // setting.row_shards if slots % setting.row_shards == 0 else slots
    heads = setting.split(shape.num_kv_heads, "tensor")
    item = rollout_item(setting)
    return 2.0 * shape.num_layers * slots * heads * setting.width * shape.head_size * item


def decode(setting: Setting) -> Parts:
    """Returns what a chunk of decode steps needs."""
    shape = setting.policy
    cache = cache_bytes(setting)
    slots = max(1, setting.num_slots // setting.row_shards)
    vocab = setting.split(shape.vocab_size, "tensor")
    table = vocab * shape.hidden_size * rollout_item(setting)
    temporary = 0.0
    if setting.backend != "cpu":
        temporary += 1.25 * table  # in the order that the head's product wants
        # Heads smaller than a register's 128 lanes are kept padded or in another order.
        temporary += cache if shape.head_size % 128 else 0.0
    if setting.config.mesh.rollout == "train" and setting.mesh["fsdp"] > 1:
        layers = _Work.of(setting, setting.config.sequences_per_step).layer
        temporary += 2 * table + min(8, shape.num_layers) * layers
    return Parts(
        weights=rollout_weights(setting),
        cache=cache,
        logits=3.0 * slots * vocab * 4,
        temporary=temporary,
    )


def prefill(setting: Setting) -> Parts:
    """Returns what reading the largest batch of prompts needs."""
    config, shape = setting.config, setting.policy
    width = config.data.max_prompt_tokens
    rows = max(1, min(config.trainer.prompts_per_step, 4096 // width))
    rows = rows // setting.row_shards if rows % setting.row_shards == 0 else rows
    heads = setting.split(shape.num_heads, "tensor")
    kv_heads = setting.split(shape.num_kv_heads, "tensor")
    item = rollout_item(setting)
    kept = 2.0 * shape.num_layers * rows * kv_heads * width * shape.head_size * item
    attention = rows * heads * width * width * 4.0
    mlp = rows * width * setting.split(shape.mlp_size, "tensor") * item
    return Parts(
        weights=rollout_weights(setting),
        cache=kept,
        activations=COMPILERS[setting.backend].attention[0] * attention + 3 * mlp,
        logits=rows * setting.split(shape.vocab_size, "tensor") * 4.0,
    )


def reshard(setting: Setting) -> Parts:
    """Returns what moving embedding, head and norm to the rollout layout needs."""
    held = counted(setting, "lm")
    item = ITEM_BYTES[setting.config.model.param_dtype]
    ends, _ = rollout_ends(setting)
    return Parts(weights=(held.embed + held.rest) * item + ends, temporary=ends)


def reshard_layer(setting: Setting) -> Parts:
    """Returns what moving one layer to the rollout layout needs."""
    held = counted(setting, "lm")
    item = ITEM_BYTES[setting.config.model.param_dtype]
    _, layer = rollout_ends(setting)
    return Parts(weights=held.layers * item + layer, temporary=layer / 2)
