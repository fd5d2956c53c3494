"""How many bytes each program of a run needs on a device: an estimate in closed form.

What a program is given (weights, optimizer, cache) is counted exactly, by the sharding rules
of the run. What it makes and drops (gradients, activations, logits, temporaries) follows from
the phases it goes through: the most that exists at one time is what counts. How many copies a
compiler keeps is calibrated against compilers' reports; `docs/memory.md` has the comparison.
"""

import dataclasses
import math
from collections.abc import Mapping

from jaxrl_llm.config import Config
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.planning.sizes import ITEM_BYTES, counts
from jaxrl_llm.sharding import mesh as mesh_lib

PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "cache",
    "temporary",
)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Bytes on one device by what they hold; `host` lies in the host's memory."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    cache: float = 0.0
    temporary: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of device memory."""
        return sum(getattr(self, name) for name in PARTS)

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(
            **{
                field.name: getattr(self, field.name) + getattr(other, field.name)
                for field in dataclasses.fields(self)
            }
        )


@dataclasses.dataclass(frozen=True)
class Compiler:
    """What a compiler keeps of what it could have dropped, in copies.

    Attributes:
      gradients: Of a whole gradient while the head, the layers and the optimizer work, with a
        critic; of two models trained in one program, one may wait for the other.
      head_sums: Of the float32 sum [V, D] of the head's gradient.
      chunk: Of one chunk of float32 logits, in scoring and in training.
      attention: Of a layer's float32 attention weights, in a forward and in a backward pass.
      saved_attention: The same, kept of every layer when nothing is recomputed.
      casts_ahead: Whether all weights are cast before the loop over layers, not within it.
      gathered_layers: Of one layer's gathered weights while scoring.
    """

    gradients: tuple[float, float, float]
    head_sums: float
    chunk: tuple[float, float]
    attention: tuple[float, float]
    saved_attention: float
    casts_ahead: bool
    gathered_layers: float


# GPUs are planned as TPUs: the same compiler before its last stages.
COMPILERS: Mapping[str, Compiler] = {
    "tpu": Compiler((1.0, 2.0, 2.8), 2.0, (1.0, 1.6), (1.0, 4.0), 2.25, True, 0.7),
    "cpu": Compiler((3.2, 4.2, 4.2), 1.0, (2.0, 3.0), (2.0, 4.0), 3.0, False, 0.5),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A run on a mesh: all that an estimate follows from.

    Attributes:
      config: The run.
      policy: Shape of policy, reference and critics.
      scorers: Shapes of the reward and cost models.
      mesh: Sizes of the mesh axes, none of them -1.
      backend: "tpu" or "cpu", whose compiler's habits are assumed.
    """

    config: Config
    policy: Shape
    scorers: tuple[Shape, ...]
    mesh: Mapping[str, int]
    backend: str = "tpu"

    @property
    def num_devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def row_shards(self) -> int:
        """Devices that the rows of a batch are split over."""
        return self.mesh["data"] * self.mesh["fsdp"]

    @property
    def width(self) -> int:
        """Tokens of the longest sequence."""
        return self.config.max_sequence_tokens

    @property
    def minibatch_tokens(self) -> int:
        """Tokens of one optimizer update."""
        return self.config.minibatch_size * self.width

    @property
    def num_slots(self) -> int:
        most = 64 if self.backend == "cpu" else 256
        return self.config.rollout.num_slots or min(self.config.sequences_per_step, most)

    def split(self, size: int, axis: str) -> int:
        """Returns `size` on one device: divided by the axis where that divides it."""
        return size // self.mesh[axis] if size % self.mesh[axis] == 0 else size

    def rows(self, num_sequences: int) -> int:
        """Returns the rows of one microbatch on one device when all sequences are longest."""
        room = max(1, self.config.trainer.max_tokens_per_microbatch // self.width)
        return min(room, -(-num_sequences // self.row_shards))

    def num_microbatches(self, num_sequences: int) -> int:
        return -(-num_sequences // (self.rows(num_sequences) * self.row_shards))


def estimate(setting: Setting) -> dict[str, Parts]:
    """Returns what each program itself needs: its arguments, what it keeps and what it drops.

    Programs are named as in `learner/lowering.py`; what lies beside a program while it runs is
    not in it, see `resident`.
    """
    programs = {
        "prefill": _prefill(setting),
        "decode": _decode(setting),
        "score": _score(setting, "lm"),
        "train": _train(setting),
        "reshard": _reshard(setting),
        "reshard_layer": _reshard_layer(setting),
    }
    if setting.config.algorithm.needs_critic:
        programs["score_critic"] = _score(setting, "scalar")
    return programs


def resident(setting: Setting) -> Parts:
    """Returns what lies on a device all through a step: every model, optimizer, rollout copy."""
    config = setting.config
    critics = config.algorithm.needs_critic + config.algorithm.safe
    parts = _trained(setting, "lm")
    for _ in range(critics):
        parts += _trained(setting, "scalar")
    frozen = [("lm", setting.policy)] * config.algorithm.needs_reference
    frozen += [("scalar", shape) for shape in setting.scorers]
    item = ITEM_BYTES[config.model.param_dtype]
    for head, shape in frozen:
        held = counts(shape, head, mesh_lib.TRAIN, setting.mesh)
        parts += Parts(weights=held.all * item)
    return parts + Parts(weights=_rollout_weights(setting))


def role_bytes(setting: Setting) -> dict[str, float]:
    """Returns what each of four roles keeps on a device all through a step."""
    item = ITEM_BYTES[setting.config.model.param_dtype]
    judge = setting.scorers[0] if setting.scorers else setting.policy
    return {
        "policy": _trained(setting, "lm").total + _rollout_weights(setting),
        "critic": _trained(setting, "scalar").total,
        "reference": float(_counted(setting, "lm").all * item),
        "reward": float(counts(judge, "scalar", mesh_lib.TRAIN, setting.mesh).all * item),
    }


def role_work(setting: Setting) -> dict[str, float]:
    """Returns the most that the programs of each of four roles make and drop at one time."""
    given = _arguments(setting)
    own = {name: (parts + _negative(given[name])).total for name, parts in estimate(setting).items()}
    trained = own["train"]
    if setting.config.algorithm.needs_critic:
        trained -= (COMPILERS[setting.backend].gradients[0] - 1) * 4.0 * _counted(setting, "lm").all
    scored = own["score"]
    return {
        "policy": max(trained, scored, own["decode"], own["prefill"]),
        "critic": trained,
        "reference": scored,
        "reward": scored,
    }


def step(setting: Setting) -> dict[str, Parts]:
    """Returns what is on a device while each program runs: the program and all that lies beside."""
    beside = resident(setting)
    arguments = _arguments(setting)
    return {
        name: beside + own + _negative(arguments[name]) for name, own in estimate(setting).items()
    }


def peak(setting: Setting) -> float:
    """Returns the most bytes that a device holds during a step."""
    return max(parts.total for parts in step(setting).values())


def _negative(parts: Parts) -> Parts:
    return Parts(**{k: -v for k, v in dataclasses.asdict(parts).items()})


def _arguments(setting: Setting) -> dict[str, Parts]:
    """Returns the arguments of each program that are part of `resident`."""
    rollout = Parts(weights=_rollout_weights(setting))
    learners = _trained(setting, "lm")
    for _ in range(setting.config.algorithm.needs_critic + setting.config.algorithm.safe):
        learners += _trained(setting, "scalar")
    end, layer = _rollout_ends(setting)
    policy = _counted(setting, "lm")
    item = ITEM_BYTES[setting.config.model.param_dtype]
    return {
        "prefill": rollout,
        "decode": rollout,
        "score": Parts(weights=policy.all * item),
        "score_critic": Parts(weights=_counted(setting, "scalar").all * item),
        "train": learners,
        "reshard": Parts(weights=end + (policy.embed + policy.rest) * item),
        "reshard_layer": Parts(weights=layer + policy.layers * item),
    }


# What programs are given.


def _counted(setting: Setting, head: str):
    return counts(setting.policy, head, mesh_lib.TRAIN, setting.mesh)


def _trained(setting: Setting, head: str) -> Parts:
    """Returns weights and optimizer of one trained model."""
    config = setting.config
    chosen = config.trainer.optimizer if head == "lm" else config.critic.optimizer
    held = _counted(setting, head).all
    item = ITEM_BYTES[config.model.param_dtype]
    # The first moment has a dtype of its own, the second is float32.
    return Parts(weights=held * item, optimizer=held * (ITEM_BYTES[chosen.moment_dtype] + 4))


def _rollout_item(setting: Setting) -> int:
    config = setting.config
    dtype = config.rollout.dtype
    return ITEM_BYTES[config.model.compute_dtype if dtype == "compute" else dtype]


def _rollout_counts(setting: Setting):
    rules = mesh_lib.LAYOUTS[setting.config.mesh.rollout]
    return counts(setting.policy, "lm", rules, setting.mesh)


def _rollout_weights(setting: Setting) -> float:
    return _rollout_counts(setting).all * _rollout_item(setting)


def _rollout_ends(setting: Setting) -> tuple[float, float]:
    """Returns bytes of the rollout copy's ends and of one of its layers."""
    held, item = _rollout_counts(setting), _rollout_item(setting)
    return (held.embed + held.rest) * item, held.layers // setting.policy.num_layers * item


def _batch(setting: Setting) -> float:
    """Returns bytes of what the update reads of a step's sequences, a whole copy everywhere."""
    tokens = setting.config.sequences_per_step * setting.width
    chosen = setting.config.minibatch_size * setting.width
    return tokens * (4 + 2 * 1 + 9 * 4) + chosen * 2 * 4


# What programs make and drop.


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


def _train(setting: Setting) -> Parts:
    config, shape = setting.config, setting.policy
    compiler = COMPILERS[setting.backend]
    work = _Work.of(setting, config.minibatch_size)
    critics = config.algorithm.needs_critic + config.algorithm.safe
    given = _trained(setting, "lm")
    for _ in range(critics):
        given += _trained(setting, "scalar")

    held = _counted(setting, "lm")
    gradient = held.all * 4.0
    with_head, with_layers, with_optimizer = (n * gradient for n in compiler.gradients)
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
    return given + busiest + Parts(activations=_batch(setting), host=offloaded)


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


def _score(setting: Setting, head: str) -> Parts:
    config = setting.config
    compiler = COMPILERS[setting.backend]
    work = _Work.of(setting, config.sequences_per_step)
    held = _counted(setting, head)
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
    item = _rollout_item(setting)
    return 2.0 * shape.num_layers * slots * heads * setting.width * shape.head_size * item


def _decode(setting: Setting) -> Parts:
    shape = setting.policy
    cache = cache_bytes(setting)
    slots = max(1, setting.num_slots // setting.row_shards)
    vocab = setting.split(shape.vocab_size, "tensor")
    table = vocab * shape.hidden_size * _rollout_item(setting)
    temporary = 0.0
    if setting.backend != "cpu":
        temporary += 1.25 * table  # in the order that the head's product wants
        # Heads smaller than a register's 128 lanes are kept padded or in another order.
        temporary += cache if shape.head_size % 128 else 0.0
    if setting.config.mesh.rollout == "train" and setting.mesh["fsdp"] > 1:
        layers = _Work.of(setting, setting.config.sequences_per_step).layer
        temporary += 2 * table + min(8, shape.num_layers) * layers
    return Parts(
        weights=_rollout_weights(setting),
        cache=cache,
        logits=3.0 * slots * vocab * 4,
        temporary=temporary,
    )


def _prefill(setting: Setting) -> Parts:
    config, shape = setting.config, setting.policy
    width = config.data.max_prompt_tokens
    rows = max(1, min(config.trainer.prompts_per_step, 4096 // width))
    rows = rows // setting.row_shards if rows % setting.row_shards == 0 else rows
    heads = setting.split(shape.num_heads, "tensor")
    kv_heads = setting.split(shape.num_kv_heads, "tensor")
    item = _rollout_item(setting)
    kept = 2.0 * shape.num_layers * rows * kv_heads * width * shape.head_size * item
    attention = rows * heads * width * width * 4.0
    mlp = rows * width * setting.split(shape.mlp_size, "tensor") * item
    return Parts(
        weights=_rollout_weights(setting),
        cache=kept,
        activations=COMPILERS[setting.backend].attention[0] * attention + 3 * mlp,
        logits=rows * setting.split(shape.vocab_size, "tensor") * 4.0,
    )


def _reshard(setting: Setting) -> Parts:
    held = _counted(setting, "lm")
    item = ITEM_BYTES[setting.config.model.param_dtype]
    ends, _ = _rollout_ends(setting)
    return Parts(weights=(held.embed + held.rest) * item + ends, temporary=ends)


def _reshard_layer(setting: Setting) -> Parts:
    held = _counted(setting, "lm")
    item = ITEM_BYTES[setting.config.model.param_dtype]
    _, layer = _rollout_ends(setting)
    return Parts(weights=held.layers * item + layer, temporary=layer / 2)
