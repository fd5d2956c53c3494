"""A run on a mesh, and what its programs are given: weights, optimizer, rollout copy.

All of it is counted exactly, by the sharding rules of the run.
"""

import dataclasses
import math
from collections.abc import Mapping

from jaxrl_llm.algorithms import needs
from jaxrl_llm.config import RLConfig
from jaxrl_llm.models import attention, flops
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.planning import filling
from jaxrl_llm.planning.sizes import ITEM_BYTES, Counts, counts, num_adapters
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

    def scaled(self, factor: float) -> "Parts":
        """Returns as many times of what is on the device."""
        return Parts(**{name: factor * getattr(self, name) for name in PARTS}, host=self.host)

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(
            **{
                field.name: getattr(self, field.name) + getattr(other, field.name)
                for field in dataclasses.fields(self)
            }
        )


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

    config: RLConfig
    policy: Shape
    scorers: tuple[Shape, ...]
    mesh: Mapping[str, int]
    backend: str = "tpu"

    @property
    def num_devices(self) -> int:
        return math.prod(self.mesh.values())

    def has(self, role: str) -> bool:
        """Returns whether the run has such a role with arrays of its own."""
        needed = needs.of(self.config.algorithm)
        return {
            "policy": True,
            "rollout": True,
            "critic": needed.critic,
            # Below adapters the policy itself stays as it is and is the reference.
            "reference": needed.reference and not self.config.lora.rank,
            "reward": bool(self.scorers),
        }[role]

    @property
    def num_critics(self) -> int:
        return needs.of(self.config.algorithm).num_critics

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

    @property
    def kernel(self) -> attention.Implementation:
        """What attends over whole rows; GPUs are planned as TPUs."""
        model = self.config.model
        return attention.implementation_for(
            model.attention, self.backend, model.compute_dtype, self.policy.head_size
        )

    def rows(self, num_sequences: int) -> filling.Shape:
        """Returns the rows of one microbatch on one device when all sequences are longest."""
        config, length = self.config, self.mesh["sequence"]
        share = config.trainer.shared_prompts == "auto" and length == 1
        share = share and attention.shares_prefixes(self.kernel)
        return filling.longest(
            num_sequences,
            config.algorithm.samples_per_prompt,
            config.data.max_prompt_tokens,
            config.rollout.max_response_tokens,
            max(config.trainer.max_tokens_per_microbatch * length, self.width),
            self.row_shards,
            flops.attention_parity(self.policy) if share else 0,
            filling.fewest_tokens(self.backend, self.row_shards),
        )


def counted(setting: Setting, head: str) -> Counts:
    """Returns the policy's, or a critic's, parameters on a device in the training layout."""
    return counts(setting.policy, head, mesh_lib.TRAIN, setting.mesh)


def trained(setting: Setting, head: str) -> Parts:
    """Returns weights and optimizer of one trained model: of adapters, the frozen base too."""
    config = setting.config
    chosen = config.trainer.optimizer if head == "lm" else config.critic.optimizer
    learned = num_learned(setting, head)
    weights = counted(setting, head).all * ITEM_BYTES[config.model.param_dtype]
    if head == "lm" and config.lora.rank:
        weights += learned * 4  # adapters are float32, whatever lies below them
    # The first moment has a dtype of its own, the second is float32.
    moments = ITEM_BYTES[chosen.moment_dtype] + 4
    return Parts(weights=weights, optimizer=learned * moments)


def given(setting: Setting, role: str) -> Parts:
    """Returns weights and optimizer of all models of a trained role, as an update takes them."""
    if role == "policy":
        return trained(setting, "lm")
    return sum((trained(setting, "scalar") for _ in range(setting.num_critics)), Parts())


def resting(setting: Setting, role: str) -> Parts:
    """Returns what a role keeps on a device, and in the host's memory, all through a step."""
    if not setting.has(role):
        return Parts()
    config = setting.config
    item = ITEM_BYTES[config.model.param_dtype]
    if role == "rollout":
        return Parts(weights=rollout_weights(setting))
    if role == "reward":
        held = (counts(s, "scalar", mesh_lib.TRAIN, setting.mesh).all for s in setting.scorers)
        return Parts(weights=sum(held) * item)
    if role == "reference":
        whole = counted(setting, "lm").all * item
        on_host = "reference" in config.mesh.on_host
        return Parts(host=whole) if on_host else Parts(weights=whole)
    parts = given(setting, role)
    if "optimizer" in config.mesh.on_host:
        return dataclasses.replace(parts, optimizer=0.0, host=parts.optimizer)
    return parts


def num_learned(setting: Setting, head: str) -> int:
    """Returns the parameters that are trained, on a device: all of them, or the adapters."""
    lora = setting.config.lora
    if head != "lm" or not lora.rank:
        return counted(setting, head).all
    return num_adapters(setting.policy, lora, mesh_lib.TRAIN, setting.mesh)


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
