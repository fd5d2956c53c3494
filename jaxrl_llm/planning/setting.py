"""A run on a mesh, and what its programs are given: weights, optimizer, rollout copy.

All of it is counted exactly, by the sharding rules of the run (`sharding/mesh.py`).
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping
from typing import Any

import jax

from jaxrl_llm.algorithms import needs
from jaxrl_llm.config import RLConfig
from jaxrl_llm.config.rollout import chosen_slots
from jaxrl_llm.models import attention, flops
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.planning import filling
from jaxrl_llm.sharding import mesh as mesh_lib

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "cache", "temporary")


@dataclasses.dataclass(frozen=True)
class Counts:
    """Parameters that one device holds."""

    layers: int = 0
    embed: int = 0
    rest: int = 0  # head, final norm

    @property
    def all(self) -> int:
        return self.layers + self.embed + self.rest


@functools.lru_cache(maxsize=256)
def _leaves(network: Network, adapters: bool) -> list[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    """Returns group, shape and names of the dims of every parameter."""
    tree = network.abstract_adapters() if adapters else network.abstract()
    axes = network.adapter_axes() if adapters else network.logical_axes()
    names = jax.tree.leaves(axes, is_leaf=lambda n: isinstance(n, tuple))
    leaves = zip(jax.tree.leaves_with_path(tree), names, strict=True)
    return [(str(path[0].key), leaf.shape, dims) for (path, leaf), dims in leaves]


@functools.lru_cache(maxsize=4096)
def _counts(network: Network, adapters: bool, rules: tuple, mesh: tuple) -> Counts:
    sizes, split_by = dict(mesh), dict(rules)
    held = dict.fromkeys(("layers", "embed", "rest"), 0)
    for group, dims, names in _leaves(network, adapters):
        spec = mesh_lib.partition_spec(dims, names, split_by, sizes, network.units)
        axes = [axis for of_dim in spec for axis in jax.tree.leaves(of_dim)]
        shards = math.prod(sizes[axis] for axis in axes)
        held[group if group in held else "rest"] += math.prod(dims) // shards
    return Counts(**held)


def counts(shape: Shape, head: str, rules: mesh_lib.Rules, mesh: Mapping[str, int]) -> Counts:
    """Returns the parameters that each device holds of a network with an "lm" or "scalar" head.

    Args:
      rules: E.g. `sharding.mesh.TRAIN`; `{}` is a whole copy.
    """
    network = Network(shape, head="scalar" if head == "scalar" else "lm")
    return _counts(network, False, _frozen(rules), _frozen(mesh))


def _frozen(mapping: Mapping[str, Any]) -> tuple:
    return tuple(sorted(mapping.items()))


def num_params(shape: Shape) -> int:
    """Returns the parameters of a network."""
    return counts(shape, "lm", {}, {}).all


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
        return Parts(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: "Parts") -> "Parts":
        return Parts(*map(operator.sub, vars(self).values(), vars(other).values()))


@dataclasses.dataclass(frozen=True)
class Setting:
    """A run on a mesh: all that an estimate follows from."""

    config: RLConfig
    policy: Shape  # of reference and critics too
    scorers: tuple[Shape, ...]  # reward and cost models
    mesh: Mapping[str, int]  # sizes of the axes, none of them -1
    backend: str = "tpu"  # whose compiler is assumed; or "cpu"
    memory_bytes: float = math.inf  # of a device

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
            # With adapters, the policy's frozen weights are the reference.
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
    def num_slots(self) -> int:
        """Sequences decoded at one time, by the engine's own rule."""
        config = self.config

        def needed(slots: int) -> float:
            rows = slots * (1 + config.rollout.speculation.draft_tokens)
            rows = rows // self.row_shards if rows % self.row_shards == 0 else rows
            logits = 3.0 * rows * self.split(self.policy.vocab_size) * 4
            return self.cache_bytes(slots, self.width) + logits

        return config.rollout.num_slots or chosen_slots(
            config.sequences_per_step, self.backend, self.num_devices, self.memory_bytes, needed
        )

    def cache_bytes(self, rows: int, width: int) -> float:
        """Returns bytes of keys and values of so many sequences on one device."""
        shape = self.policy
        rows = rows // self.row_shards if rows % self.row_shards == 0 else rows
        entries = rows * self.split(shape.num_kv_heads) * width * shape.head_size
        return 2.0 * shape.num_layers * entries * rollout_item(self)

    def split(self, size: int) -> int:
        """Returns `size` on one device: divided by the tensor axis where that divides it."""
        tensor = self.mesh["tensor"]
        return size // tensor if size % tensor == 0 else size

    @property
    def kernel(self) -> attention.Implementation:
        """What attends over whole rows; GPUs are planned as TPUs."""
        model = self.config.model
        return attention.implementation_for(
            model.attention, self.backend, model.compute_dtype, self.policy.head_size
        )

    def rows(self, num_sequences: int) -> filling.RowsShape:
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


def given(setting: Setting, role: str) -> Parts:
    """Returns weights and optimizer of the policy or of all critics, as an update takes them."""
    config = setting.config
    head, number, chosen = "lm", 1, config.trainer.optimizer
    if role == "critic":
        head, number, chosen = "scalar", setting.num_critics, config.critic.optimizer
    learned = num_learned(setting, head)
    weights = counted(setting, head).all * ITEM_BYTES[config.model.param_dtype]
    if head == "lm" and config.lora.rank:
        weights += learned * 4  # adapters are float32
    # The first moment has a dtype of its own, the second is float32.
    moments = ITEM_BYTES[chosen.moment_dtype] + 4
    return Parts(weights=number * weights, optimizer=number * learned * moments)


def resting(setting: Setting, role: str) -> Parts:
    """Returns what a role keeps on a device, and in the host's memory, all through a step."""
    if not setting.has(role):
        return Parts()
    config = setting.config
    item = ITEM_BYTES[config.model.param_dtype]
    if role == "rollout":
        return Parts(weights=rollout_counts(setting).all * rollout_item(setting))
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
    network = Network(setting.policy, lora=lora)
    return _counts(network, True, _frozen(mesh_lib.TRAIN), _frozen(setting.mesh)).all


def rollout_item(setting: Setting) -> int:
    """Returns bytes of a number of the rollout copy and the cache."""
    dtype = setting.config.rollout.dtype
    return ITEM_BYTES[setting.config.model.compute_dtype if dtype == "compute" else dtype]


def rollout_counts(setting: Setting) -> Counts:
    """Returns the rollout copy's parameters on a device."""
    rules = mesh_lib.LAYOUTS[setting.config.mesh.rollout]
    return counts(setting.policy, "lm", rules, setting.mesh)


def rollout_ends(setting: Setting) -> tuple[float, float]:
    """Returns bytes of the rollout copy's ends and of one of its layers."""
    held, item = rollout_counts(setting), rollout_item(setting)
    return (held.embed + held.rest) * item, held.layers // setting.policy.num_layers * item


def batch_bytes(setting: Setting) -> float:
    """Returns bytes of what the update reads of a step's sequences, a whole copy everywhere."""
    tokens = setting.config.sequences_per_step * setting.width
    chosen = setting.config.minibatch_size * setting.width
    return tokens * (4 + 2 * 1 + 9 * 4) + chosen * 2 * 4
