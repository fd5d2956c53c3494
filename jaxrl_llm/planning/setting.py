"""A run on a mesh, and what its programs are given: weights, optimizer, rollout copy.

All of it is counted exactly, by the sharding rules of the run.
"""

import dataclasses
import math
from collections.abc import Mapping

from jaxrl_llm.config import Config
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.planning.sizes import ITEM_BYTES, Counts, counts
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
        critic: of two models trained in one program, one waits for the other.
      waiting: How much of that is for the one that waits; not there without a critic.
      head_sums: Of the float32 sum [V, D] of the head's gradient.
      chunk: Of one chunk of float32 logits, in scoring and in training.
      attention: Of a layer's float32 attention weights, in a forward and in a backward pass.
      saved_attention: The same, kept of every layer when nothing is recomputed.
      casts_ahead: Whether all weights are cast before the loop over layers, not within it.
      gathered_layers: Of one layer's gathered weights while scoring.
    """

    gradients: tuple[float, float, float]
    waiting: float
    head_sums: float
    chunk: tuple[float, float]
    attention: tuple[float, float]
    saved_attention: float
    casts_ahead: bool
    gathered_layers: float


# GPUs are planned as TPUs: the same compiler before its last stages.
COMPILERS: Mapping[str, Compiler] = {
    "tpu": Compiler((1.0, 2.0, 2.8), 0.8, 2.0, (1.0, 1.6), (1.0, 4.0), 2.25, True, 0.7),
    "cpu": Compiler((3.2, 4.2, 4.2), 1.1, 1.0, (2.0, 3.0), (2.0, 4.0), 3.0, False, 0.5),
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


def counted(setting: Setting, head: str) -> Counts:
    """Returns the policy's, or a critic's, parameters on a device in the training layout."""
    return counts(setting.policy, head, mesh_lib.TRAIN, setting.mesh)


def trained(setting: Setting, head: str) -> Parts:
    """Returns weights and optimizer of one trained model: of adapters, the frozen base too."""
    config = setting.config
    chosen = config.trainer.optimizer if head == "lm" else config.critic.optimizer
    learned = num_learned(setting, head)
    item = ITEM_BYTES[config.model.param_dtype]
    weights = counted(setting, head).all
    if learned != weights:
        weights += learned
    # The first moment has a dtype of its own, the second is float32.
    moments = ITEM_BYTES[chosen.moment_dtype] + 4
    return Parts(weights=weights * item, optimizer=learned * moments)


def num_learned(setting: Setting, head: str) -> int:
    """Returns the parameters that are trained, on a device; adapters as if whole there."""
    lora, shape = setting.config.lora, setting.policy
    if head != "lm" or not lora.rank:
        return counted(setting, head).all
    heads, kv_heads = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    hidden, mlp = shape.hidden_size, shape.mlp_size
    ends = {
        "q": hidden + heads,
        "k": hidden + kv_heads,
        "v": hidden + kv_heads,
        "o": heads + hidden,
        "gate": hidden + mlp,
        "up": hidden + mlp,
        "down": mlp + hidden,
    }
    return shape.num_layers * lora.rank * sum(ends[name] for name in lora.targets)


def rollout_item(setting: Setting) -> int:
    """Returns bytes of a number of the rollout copy and the cache."""
    config = setting.config
    dtype = config.rollout.dtype
    return ITEM_BYTES[config.model.compute_dtype if dtype == "compute" else dtype]


def rollout_counts(setting: Setting) -> Counts:
    """Returns the rollout copy's parameters on a device."""
    rules = mesh_lib.LAYOUTS[setting.config.mesh.rollout]
    return counts(setting.policy, "lm", rules, setting.mesh)


def rollout_weights(setting: Setting) -> float:
    """Returns bytes of the rollout copy on a device."""
    return rollout_counts(setting).all * rollout_item(setting)


def rollout_ends(setting: Setting) -> tuple[float, float]:
    """Returns bytes of the rollout copy's ends and of one of its layers."""
    held, item = rollout_counts(setting), rollout_item(setting)
    return (held.embed + held.rest) * item, held.layers // setting.policy.num_layers * item


def batch_bytes(setting: Setting) -> float:
    """Returns bytes of what the update reads of a step's sequences, a whole copy everywhere."""
    tokens = setting.config.sequences_per_step * setting.width
    chosen = setting.config.minibatch_size * setting.width
    return tokens * (4 + 2 * 1 + 9 * 4) + chosen * 2 * 4
