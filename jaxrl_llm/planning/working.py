"""What each program makes and drops: gradients, activations, logits, temporaries.

A program goes through phases; the most that exists at one time is what counts. Where compilers
differ in what they keep stands in `COMPILERS`; `docs/memory.md` compares with their reports.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxrl_llm.models import attention, heads
from jaxrl_llm.planning import filling
from jaxrl_llm.planning.setting import (
    Parts,
    Setting,
    batch_bytes,
    counted,
    given,
    num_learned,
    rollout_counts,
    rollout_ends,
    rollout_item,
    rollout_weights,
)
from jaxrl_llm.planning.sizes import ITEM_BYTES, counts
from jaxrl_llm.sharding import mesh as mesh_lib


@dataclasses.dataclass(frozen=True)
class Compiler:
    """What a compiler keeps of what it could have dropped, in copies.

    Attributes:
      waiting: Of the critic, kept while the policy learns: on CPU its old weights; on TPU
        its summed gradient where both optimizers come last, as in 8B's programs but not in 0.5B's.
      of_head: Of the head's gradient, beside the microbatch's, while the head works.
      optimizing: Of the policy's gradient, while the optimizer works.
      chunks: Of one piece's float32 logits, in scoring and in training.
      tables: Of one piece's weights while it is gathered.
      hoisted: Of them, once more, where a single piece leaves its loop.
      layers: Of one layer's gathered weights in the backward pass.
      laid: Of the head's own share, laid out in pieces.
      body: Whether the gradient of the layers is there while the head works.
      host: Whether the host's memory is another than the device's.
      packing: What arrays need over their bytes when they are laid out one beside the other.
    """

    waiting: float
    of_head: float
    optimizing: float
    chunks: tuple[float, float]
    tables: float
    hoisted: float
    layers: float
    laid: float
    body: bool
    host: bool
    packing: float


_PIECE_TOKENS = 2048  # of one prompt, read at one time (`rollout/programs.py`)

# GPUs are planned as TPUs: the same compiler before its last stages.
COMPILERS: Mapping[str, Compiler] = {
    "tpu": Compiler(0.5, 0.0, 1.0, (1.0, 1.0), 1.0, 0.0, 1.0, 1.0, True, True, 1.0),
    "cpu": Compiler(1.0, 1.0, 2.75, (3.0, 2.0), 2.0, 1.0, 2.4, 1.0, True, False, 1.15),
    # One device gathers nothing.
    "one cpu": Compiler(1.0, 1.0, 2.2, (3.0, 2.0), 1.0, 0.0, 3.0, 0.0, False, False, 1.2),
}


def _compiler(setting: Setting) -> Compiler:
    return COMPILERS[
        "one cpu" if (setting.backend, setting.num_devices) == ("cpu", 1) else setting.backend
    ]


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
        query_heads = setting.split(shape.num_heads, "tensor")
        kv_heads = setting.split(shape.num_kv_heads, "tensor")
        whole = {axis: size if axis == "tensor" else 1 for axis, size in setting.mesh.items()}
        layer = counts(shape, "lm", mesh_lib.TRAIN, whole).layers // shape.num_layers
        vocab = setting.split(shape.vocab_size, "tensor")  # rows of the head that are computed with
        share = counted(setting, "lm").embed // shape.hidden_size  # that rest here
        scored = rows.rows * rows.scored if split == 1 else tokens
        pieces = heads.num_pieces(share, vocab // share, scored, config.model.vocab_chunk)
        resting = share * shape.hidden_size * item
        moved = vocab > share or config.model.param_dtype != config.model.compute_dtype
        keys = tokens * kv_heads * shape.head_size * item
        scores = _score_bytes(setting, rows, tokens, query_heads)
        # Where queries come in several blocks, scores are computed again.
        at_once = rows.keys <= attention.QUERY_BLOCK
        return cls(
            tokens=tokens,
            carry=tokens * shape.hidden_size * item,
            queries=tokens * query_heads * shape.head_size * item,
            keys=keys,
            mlp=tokens * setting.split(shape.mlp_size, "tensor") * item,
            scores=scores,
            kept=(scores + 2 * rows.gathered * keys) * at_once,
            layer=layer * item,
            slices=resting if moved else 0.0,
            share=resting,
            table=vocab // pieces * shape.hidden_size * item,
            chunk=scored * (vocab // pieces) * 4.0,
            alone=pieces == 1,
        )

    def pieces(self, compiler: Compiler, passes: int) -> float:
        """Returns bytes of the head as it is cut up: a single piece may be gathered beforehand."""
        return compiler.hoisted * passes * self.table if self.alone else compiler.laid * self.share

    def arriving(self, compiler: Compiler) -> float:
        """Returns bytes that are there beside a piece while it is gathered."""
        return 0.0 if self.alone else (compiler.tables - 1) * self.table


def _score_bytes(setting: Setting, rows: filling.Shape, tokens: int, num_heads: int) -> float:
    """Returns bytes of the attention weights of a block of queries; none exist within a kernel."""
    if setting.kernel != "xla":
        return 0.0
    block = 1.0 if rows.gathered else min(1.0, attention.QUERY_BLOCK / rows.width)
    return tokens * num_heads * rows.keys * 4.0 * block


def train(setting: Setting, roles: Sequence[str]) -> Parts:
    """Returns what one optimizer update needs: of the policy, its critics, or all of them."""
    config = setting.config
    compiler = _compiler(setting)
    work = _Work.of(setting, config.minibatch_size)
    arguments = sum((given(setting, role) for role in roles), Parts())
    # Policy and critics learn one after the other; the larger of the two counts.
    heads_of = {"policy": "lm", "critic": "scalar"}
    learned = max(num_learned(setting, heads_of[role]) for role in roles)
    # Float32 sums over microbatches, where there are several, and the gradient of one of them, as
    # narrow as the arithmetic.
    narrow = learned * ITEM_BYTES[config.model.compute_dtype]
    several = setting.rows(config.minibatch_size).count > 1
    summed = narrow + 4.0 * learned * several
    both = len(roles) > 1
    waiting = 4.0 * num_learned(setting, "scalar") * compiler.waiting if both else 0.0
    saved, offloaded = _saved(setting, work)
    beside = Parts(activations=saved, temporary=waiting + work.slices * (1 + both))
    # Beside logits and their piece: the logits' gradient, or the piece's.
    arriving = work.arriving(compiler)
    more = max((compiler.chunks[1] - 1) * work.chunk, arriving)
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


def score(setting: Setting, head: str) -> Parts:
    """Returns what a forward pass over a step's sequences needs: of a policy or a critic."""
    config = setting.config
    compiler = _compiler(setting)
    work = _Work.of(setting, config.sequences_per_step)
    held = counted(setting, head)
    between = Parts(temporary=work.slices)
    at_start = between + Parts(temporary=work.slices)
    in_layers = between + Parts(
        activations=work.carry + 2 * work.scores + 2 * work.mlp, temporary=work.layer
    )
    phases = [at_start, in_layers]
    if head == "lm":
        pieces = Parts(temporary=work.pieces(compiler, passes=1))
        phases += [
            between + Parts(logits=compiler.chunks[0] * work.chunk),
            between + Parts(logits=work.chunk, temporary=work.table),
            between + Parts(temporary=work.table + work.arriving(compiler)),
        ]
        phases = [phase + pieces for phase in phases]
    busiest = max(phases, key=lambda parts: parts.total)
    tokens = config.sequences_per_step * setting.width
    tables = 3 if head == "lm" else 1  # log-probs, entropies, squares
    weights = held.all * ITEM_BYTES[config.model.param_dtype]
    return busiest + Parts(weights=weights, activations=tokens * (4 + 8 + 4 * tables))


def cache_bytes(setting: Setting) -> float:
    """Returns bytes of keys and values of all slots on one device."""
    shape = setting.policy
    slots = setting.num_slots
    slots = slots // setting.row_shards if slots % setting.row_shards == 0 else slots
    kv_heads = setting.split(shape.num_kv_heads, "tensor")
    item = rollout_item(setting)
    return 2.0 * shape.num_layers * slots * kv_heads * setting.width * shape.head_size * item


def decode(setting: Setting) -> Parts:
    """Returns what a chunk of decode steps needs."""
    shape = setting.policy
    cache = cache_bytes(setting)
    slots = max(1, setting.num_slots // setting.row_shards)
    rollout = setting.config.rollout
    places = 1 + rollout.speculation.draft_tokens
    recent = cache * rollout.chunk_steps * places / setting.width  # not yet joined to the cache
    vocab = setting.split(shape.vocab_size, "tensor")
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
        weights=rollout_weights(setting),
        cache=cache + recent,
        logits=3.0 * slots * places * vocab * 4,
        temporary=temporary,
    )


def prefill(setting: Setting) -> Parts:
    """Returns what reading the largest batch of prompts needs."""
    config, shape = setting.config, setting.policy
    width = config.data.max_prompt_tokens
    rows = max(1, min(config.trainer.prompts_per_step, 4096 // width))
    rows = rows // setting.row_shards if rows % setting.row_shards == 0 else rows
    query_heads = setting.split(shape.num_heads, "tensor")
    kv_heads = setting.split(shape.num_kv_heads, "tensor")
    item = rollout_item(setting)
    kept = 2.0 * shape.num_layers * rows * kv_heads * width * shape.head_size * item
    block = attention.QUERY_BLOCK if width <= _PIECE_TOKENS else _PIECE_TOKENS
    scores = rows * query_heads * width * min(width, block) * 4.0
    mlp = rows * width * setting.split(shape.mlp_size, "tensor") * item
    return Parts(
        weights=rollout_weights(setting),
        cache=kept,
        activations=2 * scores + 3 * mlp,
        logits=rows * setting.split(shape.vocab_size, "tensor") * 4.0,
    )


def reshard(setting: Setting) -> Parts:
    """Returns what moving embedding, head and norm to the rollout layout needs."""
    held = counted(setting, "lm")
    item = ITEM_BYTES[setting.config.model.param_dtype]
    ends, _ = rollout_ends(setting)
    gathered = rollout_counts(setting).embed > held.embed
    # In the layout of training each table is copied by itself.
    temporary = ends if gathered else ends / 2 * _compiler(setting).laid
    return Parts(weights=(held.embed + held.rest) * item + ends, temporary=temporary)


def reshard_layer(setting: Setting) -> Parts:
    """Returns what moving one layer to the rollout layout needs."""
    held = counted(setting, "lm")
    item = ITEM_BYTES[setting.config.model.param_dtype]
    _, layer = rollout_ends(setting)
    gathered = rollout_counts(setting).layers > held.layers
    temporary = layer / 2 if gathered else 0.0
    return Parts(weights=held.layers * item + layer, temporary=temporary)
