"""How many bytes each program of a run needs on a device: an estimate in closed form.

What a program is given is counted exactly (`setting.py`). What it makes and drops (gradients,
activations, logits) follows from the phases that it goes through: the largest counts. Where
compilers differ stands in `_COMPILERS`; `docs/memory.md` compares with their reports.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from jaxrl_llm.algorithms import needs
from jaxrl_llm.config.placement import ROLES
from jaxrl_llm.models import attention, heads
from jaxrl_llm.planning.setting import (
    ITEM_BYTES,
    PARTS,
    Parts,
    Setting,
    batch_bytes,
    counted,
    counts,
    given,
    num_learned,
    num_params,
    resting,
    rollout_counts,
    rollout_ends,
    rollout_item,
)
from jaxrl_llm.sharding import mesh as mesh_lib

__all__ = ["PARTS", "Parts", "Setting", "peak", "programs", "resident", "step"]


@dataclasses.dataclass(frozen=True)
class _Compiler:
    """What a compiler keeps of what it could have dropped, in copies."""

    # Of the critic while the policy learns: on CPU its old weights; on TPU its summed gradient
    # where both optimizers come last, as in 8B's programs but not in 0.5B's.
    waiting: float
    of_head: float  # of the head's gradient, beside the microbatch's, while the head works
    optimizing: float  # of the policy's gradient, while the optimizer works
    chunks: tuple[float, float]  # of one piece's float32 logits, in scoring and in training
    tables: float  # of one piece's weights while it is gathered
    hoisted: float  # of them, once more, where a single piece leaves its loop
    layers: float  # of one layer's gathered weights in the backward pass
    laid: float  # of the head's own share, laid out in pieces
    body: bool  # whether the gradient of the layers is there while the head works
    host: bool  # whether the host's memory is another than the device's
    packing: float  # what arrays need over their bytes when they lie one beside the other


# GPUs are planned as TPUs: the same compiler before its last stages.
_COMPILERS: Mapping[str, _Compiler] = {
    "tpu": _Compiler(0.5, 0.0, 1.0, (1.0, 1.0), 1.0, 0.0, 1.0, 1.0, True, True, 1.0),
    "cpu": _Compiler(1.0, 1.0, 2.75, (3.0, 2.0), 2.0, 1.0, 2.4, 1.0, True, False, 1.15),
    # One device gathers nothing.
    "one cpu": _Compiler(1.0, 1.0, 2.2, (3.0, 2.0), 1.0, 0.0, 3.0, 0.0, False, False, 1.2),
}
_PIECE_TOKENS = 2048  # of one prompt, read at one time (`rollout/programs.py`)


def _compiler(setting: Setting) -> _Compiler:
    alone = (setting.backend, setting.num_devices) == ("cpu", 1)
    return _COMPILERS["one cpu" if alone else setting.backend]


def programs(setting: Setting, roles: Collection[str] = ROLES) -> dict[str, Parts]:
    """Returns what each program itself needs: its arguments, what it keeps and what it drops.

    Programs are named as in `learner/lowering.py`, and `score_reward`. What else is on the device
    while a program runs is not included, see `step`. Roles that the run does not have are nothing.
    """
    learners = [role for role in ("policy", "critic") if role in roles and setting.has(role)]
    has_reference = "reference" in roles and needs.of(setting.config.algorithm).reference
    found = {}
    if "rollout" in roles:
        found["prefill"] = _prefill(setting)
        found["decode"] = _decode(setting)
    if "policy" in roles or has_reference:
        found["score"] = _score(setting, "lm")
    if "critic" in learners:
        found["score_critic"] = _score(setting, "scalar")
    if "reward" in roles and setting.scorers:
        found["score_reward"] = _score(_largest_scorer(setting), "scalar")
    if learners:
        found["train"] = _train(setting, learners)
    if "policy" in roles:
        found["reshard"] = _reshard(setting)
        found["reshard_layer"] = _reshard_layer(setting)
    return found


def resident(setting: Setting, roles: Collection[str] = ROLES) -> Parts:
    """Returns what lies on a device all through a step: every model, optimizer, rollout copy."""
    return sum((resting(setting, role) for role in roles), Parts())


def step(setting: Setting, roles: Collection[str] = ROLES) -> dict[str, Parts]:
    """Returns what is on a device while each program runs: the program and all that lies beside."""
    beside = resident(setting, roles)
    return {
        name: beside + own - _resting_arguments(setting, name, roles)
        for name, own in programs(setting, roles).items()
    }


def peak(setting: Setting, roles: Collection[str] = ROLES) -> float:
    """Returns the most bytes that a device holds during a step."""
    return max((parts.total for parts in step(setting, roles).values()), default=0.0)


def _largest_scorer(setting: Setting) -> Setting:
    """Returns the setting with the largest of its reward and cost models as the policy."""
    return dataclasses.replace(setting, policy=max(setting.scorers, key=num_params))


def _resting_arguments(setting: Setting, program: str, roles: Collection[str]) -> Parts:
    """Returns the arguments of a program that `resident` has counted already."""
    if program == "train":
        return sum((resting(setting, r) for r in ("policy", "critic") if r in roles), Parts())
    if program in ("prefill", "decode"):
        return resting(setting, "rollout")
    item = ITEM_BYTES[setting.config.model.param_dtype]
    if program == "score_critic":
        return Parts(weights=counted(setting, "scalar").all * item)
    if program == "score_reward":
        return Parts(weights=counted(_largest_scorer(setting), "scalar").all * item)
    policy = counted(setting, "lm")
    if program == "score":
        # What rests in the host's memory is brought back whole: a copy that `resident` has not.
        brought = "reference" in setting.config.mesh.on_host and setting.has("reference")
        return Parts(weights=0.0 if brought else policy.all * item)
    end, layer = rollout_ends(setting) if "rollout" in roles else (0.0, 0.0)
    if program == "reshard":
        return Parts(weights=end + (policy.embed + policy.rest) * item)
    return Parts(weights=layer + policy.layers * item)


@dataclasses.dataclass(frozen=True)
class _Work:
    """Bytes of the pieces that a pass over one microbatch is made of, on one device."""

    tokens: int  # of the microbatch
    carry: float  # one layer's input
    queries: float  # one layer's
    keys: float  # and as much of values
    mlp: float  # one intermediate of the gated MLP
    scores: float  # float32 attention weights of one block of queries
    kept: float  # of them, what a layer keeps for its backward pass, and keys gathered for them
    layer: float  # one layer's weights, gathered for use
    slices: float  # the embedding, split by features for its look-up
    share: float  # the head's own share, laid out in pieces
    table: float  # one piece of the head, gathered
    chunk: float  # its float32 logits
    alone: bool  # whether there is one piece

    @classmethod
    def of(cls, setting: Setting, num_sequences: int) -> "_Work":
        config, shape = setting.config, setting.policy
        item = ITEM_BYTES[config.model.compute_dtype]
        split = setting.mesh["sequence"]
        rows = setting.rows(num_sequences)
        tokens = rows.tokens // split
        query_heads = setting.split(shape.num_heads)
        kv_heads = setting.split(shape.num_kv_heads)
        whole = {axis: size if axis == "tensor" else 1 for axis, size in setting.mesh.items()}
        layer = counts(shape, "lm", mesh_lib.TRAIN, whole).layers // shape.num_layers
        vocab = setting.split(shape.vocab_size)  # rows of the head that are computed with
        share = counted(setting, "lm").embed // shape.hidden_size  # that rest here
        scored = rows.rows * rows.scored if split == 1 else tokens
        pieces = heads.num_pieces(share, vocab // share, scored, config.model.vocab_chunk)
        own = share * shape.hidden_size * item
        moved = vocab > share or config.model.param_dtype != config.model.compute_dtype
        keys = tokens * kv_heads * shape.head_size * item
        # Attention weights of a block of queries; a kernel keeps none.
        block = 1.0 if rows.gathered else min(1.0, attention.QUERY_BLOCK / rows.width)
        scores = tokens * query_heads * rows.keys * 4.0 * block if setting.kernel == "xla" else 0.0
        # Where queries come in several blocks, scores are computed again.
        at_once = rows.keys <= attention.QUERY_BLOCK
        return cls(
            tokens=tokens,
            carry=tokens * shape.hidden_size * item,
            queries=tokens * query_heads * shape.head_size * item,
            keys=keys,
            mlp=tokens * setting.split(shape.mlp_size) * item,
            scores=scores,
            kept=(scores + 2 * rows.gathered * keys) * at_once,
            layer=layer * item,
            slices=own if moved else 0.0,
            share=own,
            table=vocab // pieces * shape.hidden_size * item,
            chunk=scored * (vocab // pieces) * 4.0,
            alone=pieces == 1,
        )

    def pieces(self, compiler: _Compiler, passes: int) -> float:
        """Returns bytes of the head in pieces; a single piece may be gathered before its loop."""
        return compiler.hoisted * passes * self.table if self.alone else compiler.laid * self.share

    def arriving(self, compiler: _Compiler) -> float:
        """Returns bytes that are there beside a piece while it is gathered."""
        return 0.0 if self.alone else (compiler.tables - 1) * self.table


def _train(setting: Setting, roles: Sequence[str]) -> Parts:
    """Returns what one optimizer update needs: of the policy, its critics, or all of them."""
    config, compiler = setting.config, _compiler(setting)
    work = _Work.of(setting, config.minibatch_size)
    arguments = sum((given(setting, role) for role in roles), Parts())
    # Policy and critics learn one after the other; the larger of the two counts.
    heads_of = {"policy": "lm", "critic": "scalar"}
    learned = max(num_learned(setting, heads_of[role]) for role in roles)
    # Float32 sums over microbatches, if there are several, and one's gradient in `compute_dtype`.
    narrow = learned * ITEM_BYTES[config.model.compute_dtype]
    several = setting.rows(config.minibatch_size).count > 1
    summed = narrow + 4.0 * learned * several
    both = len(roles) > 1
    waiting = 4.0 * num_learned(setting, "scalar") * compiler.waiting if both else 0.0
    saved, offloaded = _saved(setting, work)
    beside = Parts(activations=saved, temporary=waiting + work.slices * (1 + both))
    # Beside logits and their piece: the logits' gradient, or the piece's.
    more = max((compiler.chunks[1] - 1) * work.chunk, work.arriving(compiler))
    of_head = 0.0 if config.lora.rank else compiler.of_head * work.share
    at_head = beside + Parts(
        gradients=(summed if compiler.body else summed - narrow) + of_head,
        logits=work.chunk,
        temporary=work.table + more + work.pieces(compiler, passes=2),
    )
    in_layers = beside + Parts(
        gradients=summed,
        activations=4 * work.scores + 4 * work.mlp + 2 * (work.queries + 2 * work.keys),
        temporary=compiler.layers * work.layer,
    )
    at_end = Parts(
        gradients=compiler.optimizing * (4.0 * learned if several else narrow), temporary=waiting
    )
    busiest = max((at_head, in_layers, at_end), key=lambda parts: parts.total)
    busiest = busiest.scaled(compiler.packing)
    return arguments + busiest + Parts(activations=batch_bytes(setting), host=offloaded)


def _saved(setting: Setting, work: _Work) -> tuple[float, float]:
    """Returns what the forward pass keeps for the backward pass, on the device and on the host."""
    remat = setting.config.model.remat
    around = 2 * work.queries + 2 * work.keys  # queries, keys, values and what is mixed of them
    each = {
        "full": work.carry,
        "attention": work.carry + around,
        "projections": work.carry + around + 2 * work.mlp,
        "dots": 2 * work.carry + work.queries + 2 * work.keys + 2 * work.mlp,
        "offload_full": work.carry,
        "offload_attention": work.carry + around,
        # Twice what is normalized and twice what comes of it, float32 and not.
        "none": 7 * work.carry + around + work.queries + 3 * work.mlp + work.kept,
    }[remat]
    everything = each * setting.policy.num_layers
    moved = remat.startswith("offload") and _compiler(setting).host
    return (0.0, everything) if moved else (everything, 0.0)


def _score(setting: Setting, head: str) -> Parts:
    """Returns what a forward pass over a step's sequences needs: of a policy or a critic."""
    config, compiler = setting.config, _compiler(setting)
    work = _Work.of(setting, config.sequences_per_step)
    layers = work.carry + 2 * work.scores + 2 * work.mlp
    phases = [
        Parts(temporary=work.slices),
        Parts(activations=layers, temporary=work.layer),
    ]
    between = Parts(temporary=work.slices)
    if head == "lm":
        phases += [
            Parts(logits=compiler.chunks[0] * work.chunk),
            Parts(logits=work.chunk, temporary=work.table),
            Parts(temporary=work.table + work.arriving(compiler)),
        ]
        between += Parts(temporary=work.pieces(compiler, passes=1))
    busiest = between + max(phases, key=lambda parts: parts.total)
    tokens = config.sequences_per_step * setting.width
    tables = 3 if head == "lm" else 1  # log-probs, entropies, squares
    weights = counted(setting, head).all * ITEM_BYTES[config.model.param_dtype]
    return busiest + Parts(weights=weights, activations=tokens * (4 + 8 + 4 * tables))


def _decode(setting: Setting) -> Parts:
    """Returns what a chunk of decode steps needs."""
    shape, rollout = setting.policy, setting.config.rollout
    cache = setting.cache_bytes(setting.num_slots, setting.width)
    slots = max(1, setting.num_slots // setting.row_shards)
    places = 1 + rollout.speculation.draft_tokens
    recent = cache * rollout.chunk_steps * places / setting.width  # not yet joined to the cache
    vocab = setting.split(shape.vocab_size)
    table = vocab * shape.hidden_size * rollout_item(setting)
    temporary = 0.0
    if setting.backend != "cpu":
        temporary += 1.25 * table  # in the order that the head's product wants
        # Values of heads smaller than a register's 128 lanes are kept in another order.
        temporary += 0.5 * cache if shape.head_size % 128 else 0.0
    if setting.config.mesh.rollout == "train" and setting.mesh["fsdp"] > 1:
        layers = _Work.of(setting, setting.config.sequences_per_step).layer
        temporary += 2 * table + min(8, shape.num_layers) * layers
    return Parts(
        weights=rollout_counts(setting).all * rollout_item(setting),
        cache=cache + recent,
        logits=3.0 * slots * places * vocab * 4,
        temporary=temporary,
    )


def _prefill(setting: Setting) -> Parts:
    """Returns what reading the largest batch of prompts needs."""
    config, shape = setting.config, setting.policy
    width = config.data.max_prompt_tokens
    prompts = max(1, min(config.trainer.prompts_per_step, 4096 // width))
    rows = prompts // setting.row_shards if prompts % setting.row_shards == 0 else prompts
    block = attention.QUERY_BLOCK if width <= _PIECE_TOKENS else _PIECE_TOKENS
    scores = rows * setting.split(shape.num_heads) * width * min(width, block) * 4.0
    mlp = rows * width * setting.split(shape.mlp_size) * rollout_item(setting)
    return Parts(
        weights=rollout_counts(setting).all * rollout_item(setting),
        cache=setting.cache_bytes(prompts, width),
        activations=2 * scores + 3 * mlp,
        logits=rows * setting.split(shape.vocab_size) * 4.0,
    )


def _reshard(setting: Setting) -> Parts:
    """Returns what moving embedding, head and norm to the rollout layout needs."""
    held, (ends, _) = counted(setting, "lm"), rollout_ends(setting)
    gathered = rollout_counts(setting).embed > held.embed
    # In the layout of training each table is copied by itself.
    temporary = ends if gathered else ends / 2 * _compiler(setting).laid
    own = (held.embed + held.rest) * ITEM_BYTES[setting.config.model.param_dtype]
    return Parts(weights=own + ends, temporary=temporary)


def _reshard_layer(setting: Setting) -> Parts:
    """Returns what moving one layer to the rollout layout needs."""
    held, (_, layer) = counted(setting, "lm"), rollout_ends(setting)
    gathered = rollout_counts(setting).layers > held.layers
    own = held.layers * ITEM_BYTES[setting.config.model.param_dtype]
    return Parts(weights=own + layer, temporary=layer / 2 if gathered else 0.0)
