"""A run on a mesh, and the arguments of its programs: weights, optimizer, rollout copy.

They are counted exactly, by the sharding rules of the run (`sharding/mesh.py`).
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping
from typing import Literal

import jax
from jax.sharding import AbstractMesh

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
Head = Literal["lm", "scalar"]


@dataclasses.dataclass(frozen=True)
class Counts:
    """Parameters that one device holds."""

    layers: int = 0
    embed: int = 0
    rest: int = 0  # head, final norm

    @property
    def all(self) -> int:
        return self.layers + self.embed + self.rest


@functools.lru_cache(maxsize=4096)
def _counts(network: Network, adapters: bool, rules: tuple, mesh: tuple) -> Counts:
    tree = network.abstract_adapters() if adapters else network.abstract()
    names = network.adapter_axes() if adapters else network.logical_axes()
    axes, sizes = zip(*mesh, strict=True)
    split = mesh_lib.shardings(tree, names, AbstractMesh(sizes, axes), dict(rules), network.units)
    held = dataclasses.asdict(Counts())
    for group in tree:
        parts = jax.tree.map(
            lambda a, s: math.prod(s.shard_shape(a.shape)), tree[group], split[group]
        )
        held[group if group in held else "rest"] += sum(jax.tree.leaves(parts))
    return Counts(**held)


def _counted(
    network: Network, rules: mesh_lib.Rules, mesh: Mapping[str, int], adapters: bool = False
) -> Counts:
    """Returns the parameters, or adapters, of a network on each device."""
    return _counts(network, adapters, tuple(rules.items()), tuple(mesh.items()))


@functools.cache
def num_params(shape: Shape) -> int:
    """Returns the parameters of a network."""
    return sum(leaf.size for leaf in jax.tree.leaves(Network(shape).abstract()))


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

    def __mul__(self, factor: float) -> "Parts":
        return Parts(*(factor * size for size in vars(self).values()))

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
    def row_shards(self) -> int:
        """Devices that the rows of a batch are split over."""
        return self.mesh["data"] * self.mesh["fsdp"]

    @property
    def width(self) -> int:
        """Tokens of the longest sequence."""
        return self.config.max_sequence_tokens

    @property
    def param_item(self) -> int:
        """Bytes of a number of trained weights."""
        return ITEM_BYTES[self.config.model.param_dtype]

    @property
    def compute_item(self) -> int:
        """Bytes of a number in training and scoring."""
        return ITEM_BYTES[self.config.model.compute_dtype]

    @property
    def rollout_item(self) -> int:
        """Bytes of a number of the rollout copy and the cache."""
        dtype = self.config.rollout.dtype
        return self.compute_item if dtype == "compute" else ITEM_BYTES[dtype]

    @property
    def num_slots(self) -> int:
        """Sequences decoded at one time, by the engine's own rule."""
        config = self.config

        def needed(slots: int) -> float:
            rows = self.rows_here(slots * (1 + config.rollout.speculation.draft_tokens))
            logits = 3.0 * rows * self.split(self.policy.vocab_size) * 4
            return self.cache_bytes(slots, self.width) + logits

        return config.rollout.num_slots or chosen_slots(
            config.sequences_per_step, self.backend, self.num_devices, self.memory_bytes, needed
        )

    def cache_bytes(self, rows: int, width: int) -> float:
        """Returns bytes of keys and values of so many sequences on one device."""
        shape = self.policy
        entries = self.rows_here(rows) * self.split(shape.num_kv_heads) * width * shape.head_size
        return 2.0 * shape.num_layers * entries * self.rollout_item

    def rows_here(self, rows: int) -> int:
        """Returns the rows on one device: all of them where the row shards do not divide them."""
        return _share(rows, self.row_shards)

    def split(self, size: int) -> int:
        """Returns `size` on one device: divided by the tensor axis where that divides it."""
        return _share(size, self.mesh["tensor"])

    @property
    def kernel(self) -> attention.Implementation:
        """The kernel of attention over whole rows; GPUs are planned as TPUs."""
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

    def held(self, head: Head) -> Counts:
        """Returns the policy's, or a critic's, parameters on a device in training."""
        return _counted(Network(self.policy, head=head), mesh_lib.TRAIN, self.mesh)

    def weights(self, head: Head) -> float:
        """Returns bytes of `held`."""
        return self.held(head).all * self.param_item

    def layer_params(self) -> int:
        """Returns the parameters of one of the policy's layers, gathered for use on a device."""
        whole = {axis: size if axis == "tensor" else 1 for axis, size in self.mesh.items()}
        layers = _counted(Network(self.policy), mesh_lib.TRAIN, whole).layers
        return layers // self.policy.num_layers

    def num_learned(self, head: Head) -> int:
        """Returns the parameters that are trained, on a device: all of them, or the adapters."""
        lora = self.config.lora
        if head != "lm" or not lora.rank:
            return self.held(head).all
        return _counted(Network(self.policy, lora=lora), mesh_lib.TRAIN, self.mesh, True).all

    @property
    def rollout_held(self) -> Counts:
        """The rollout copy's parameters on a device."""
        rules = mesh_lib.ROLLOUT_WEIGHTS[self.config.mesh.rollout]
        return _counted(Network(self.policy), rules, self.mesh)

    @property
    def rollout_weights(self) -> float:
        """Bytes of `rollout_held`."""
        return self.rollout_held.all * self.rollout_item

    @property
    def resharded(self) -> dict[str, float]:
        """Bytes of the rollout copy that a program makes: embedding, head and norm; one layer."""
        held, item = self.rollout_held, self.rollout_item
        layer = held.layers // self.policy.num_layers * item
        return {"reshard": (held.embed + held.rest) * item, "reshard_layer": layer}

    def given(self, role: str) -> Parts:
        """Returns weights and optimizer of the policy or all critics, as an update takes them."""
        config = self.config
        head: Head = "lm"
        number, chosen = 1, config.trainer.optimizer
        if role == "critic":
            head, chosen = "scalar", config.critic.optimizer
            number = needs.of(config.algorithm).num_critics
        learned, weights = self.num_learned(head), self.weights(head)
        if head == "lm" and config.lora.rank:
            weights += learned * 4  # adapters are float32
        # The first moment has a dtype of its own, the second is float32.
        moments = ITEM_BYTES[chosen.moment_dtype] + 4
        return Parts(weights=number * weights, optimizer=number * learned * moments)

    def resting(self, role: str) -> Parts:
        """Returns what a role keeps on a device, and in the host's memory, during all of a step."""
        on_host = self.config.mesh.on_host
        if not self.has(role):
            return Parts()
        if role == "rollout":
            return Parts(weights=self.rollout_weights)
        if role == "reward":
            networks = (Network(shape, head="scalar") for shape in self.scorers)
            held = sum(_counted(each, mesh_lib.TRAIN, self.mesh).all for each in networks)
            return Parts(weights=held * self.param_item)
        if role == "reference":
            whole = self.weights("lm")
            return Parts(host=whole) if "reference" in on_host else Parts(weights=whole)
        parts = self.given(role)
        if "optimizer" in on_host:
            return dataclasses.replace(parts, optimizer=0.0, host=parts.optimizer)
        return parts

    @property
    def batch_bytes(self) -> float:
        """Bytes of a step's sequences as the update reads them, a whole copy on every device."""
        tokens = self.config.sequences_per_step * self.width
        chosen = self.config.minibatch_size * self.width
        return tokens * (4 + 2 * 1 + 9 * 4) + chosen * 2 * 4


def _share(size: int, parts: int) -> int:
    return size // parts if size % parts == 0 else size
