"""A run on a mesh, and the arguments of its programs, counted exactly by the sharding rules."""

import dataclasses
import functools
import math
import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxrl_llm.algorithms import needs
from jaxrl_llm.config import RLConfig
from jaxrl_llm.config.room import cache_pages, chosen_room
from jaxrl_llm.models import attention, casting, flops
from jaxrl_llm.models.layers import Products
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.planning import filling
from jaxrl_llm.sharding import mesh as mesh_lib

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "fp8": 1}
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "cache", "temporary")
Head = Literal["lm", "scalar"]


# Programs of frozen models that read a step's sequences, and the heads of these.
SCORING: tuple[tuple[str, Head], ...] = (("score_reward", "scalar"), ("score_teacher", "lm"))


@functools.lru_cache(maxsize=4096)
def _counted(network: Network, layout: str, mesh: tuple, adapters: bool) -> Counter[str]:
    """Returns the parameters, or adapters, of a network on each device by group of the tree.

    Each stack of layers is a group: "layers.0", ...
    """
    tree = network.abstract_adapters() if adapters else network.abstract()
    names = network.adapter_axes() if adapters else network.logical_axes()
    return _by_group(tree, names, jax.tree.map(lambda _: 1, tree), network, layout, mesh)


@functools.lru_cache(maxsize=4096)
def _bytes_as(network: Network, layout: str, mesh: tuple, dtype: str) -> Counter[str]:
    """Returns the bytes of a network's parameters, cast to a dtype; as `_counted`."""
    tree, names = network.abstract(), network.logical_axes()
    items = jax.tree.map(lambda of: jnp.dtype(of).itemsize, casting.dtypes(tree, dtype))
    return _by_group(tree, names, items, network, layout, mesh)


def _by_group(tree, names, items, network: Network, layout: str, mesh: tuple) -> Counter[str]:
    axes, sizes = zip(*mesh, strict=True)
    rules = mesh_lib.ROLLOUT_WEIGHTS[layout]
    split = mesh_lib.shardings(tree, names, AbstractMesh(sizes, axes), rules, network.units)
    size = lambda a, s, item: math.prod(s.shard_shape(a.shape)) * item  # noqa: E731
    held = jax.tree.map(size, tree, split, items)
    stacks = {f"layers.{name}": stack for name, stack in held.pop("layers").items()}
    return Counter({group: sum(jax.tree.leaves(of)) for group, of in {**held, **stacks}.items()})


def in_layers(held: Counter[str]) -> int:
    """Returns how many of the parameters of `Setting.counted` are of layers."""
    return sum(number for group, number in held.items() if group.startswith("layers."))


class LayerParams(NamedTuple):
    """Parameters of one layer on a device."""

    experts: int
    rest: int


@functools.lru_cache(maxsize=4096)
def _computed(network: Network, mesh: tuple) -> dict[str, LayerParams]:
    """Returns the parameters that a device computes one layer of each stack with."""
    axes, sizes = zip(*mesh, strict=True)
    tree, names = network.abstract()["layers"], network.logical_axes()["layers"]
    split = mesh_lib.shardings(
        tree, names, AbstractMesh(sizes, axes), mesh_lib.ROLLOUT, network.units
    )
    found = {}
    for name, stack in network.shape.stacks.items():
        held = jax.tree.map(lambda a, s: math.prod(s.shard_shape(a.shape)), tree[name], split[name])
        experts = jax.tree.map(lambda n, of: n * ("experts" in of), held, names[name])
        whole, of_experts = (sum(jax.tree.leaves(t)) // len(stack.numbers) for t in (held, experts))
        found[name] = LayerParams(of_experts, whole - of_experts)
    return found


def expert_axes(shape: Shape) -> list[int]:
    """Returns the sizes of the expert axis to try: powers of two that divide the experts."""
    num = shape.experts.num if shape.experts else 1
    return [1 << i for i in range(num.bit_length()) if num % (1 << i) == 0]


@functools.cache
def num_params(shape: Shape) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(Network(shape).abstract()))


@dataclasses.dataclass(frozen=True)
class Parts:
    """Bytes on one device by what they hold."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    cache: float = 0.0
    temporary: float = 0.0
    host: float = 0.0  # in the host's memory

    @property
    def total(self) -> float:  # of device memory
        return sum(getattr(self, name) for name in PARTS)

    def __mul__(self, factor: float) -> "Parts":
        return Parts(*(factor * size for size in vars(self).values()))

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: "Parts") -> "Parts":
        return Parts(*map(operator.sub, vars(self).values(), vars(other).values()))


class Scorer(NamedTuple):
    """A frozen model that reads a step's sequences: a reward or cost model, or a teacher."""

    shape: Shape
    head: Head


@dataclasses.dataclass(frozen=True)
class Setting:
    """A run on a mesh: all that an estimate follows from."""

    config: RLConfig  # of another job: a run with the same programs, see `jobs.of`
    model: Shape  # of policy, reference and critics, without the stages of the mesh
    scorers: tuple[Scorer, ...]
    mesh: Mapping[str, int]  # sizes of the axes, none of them -1
    backend: str = "tpu"  # whose compiler is assumed; or "cpu"
    memory_bytes: float = math.inf  # of a device
    full: bool = False  # whether microbatches have the most tokens that they may have
    scalar_adapters: bool = False  # whether adapters are the scalar network's, not the policy's

    @property
    def num_devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def stages(self) -> int:
        return self.mesh.get(mesh_lib.STAGE, 1)

    @functools.cached_property
    def policy(self) -> Shape:
        """The shape of policy, reference and critics as this run stores them."""
        return self.stored(self.model)

    def stored(self, shape: Shape) -> Shape:
        return shape.on_stages(self.stages, self.config.mesh.stage_rounds)

    def has(self, role: str) -> bool:
        """Returns whether the run has such a role with arrays of its own."""
        needed = needs.of(self.config.algorithm)
        # With adapters, the policy's frozen weights are the reference.
        reference = needed.reference and not self.config.lora.rank
        has = {"critic": needed.critic, "reference": reference, "reward": bool(self.scorers)}
        return has.get(role, True)

    def learns_tower(self, head: Head = "lm") -> bool:
        """Returns whether a tower learns with a network; the policy's weights have it then."""
        learns = self.config.trainer.tower_learning_rate > 0
        return head == "lm" and self.model.vision is not None and learns

    @property
    def tower(self) -> int:  # parameters of a tower on a device in training
        return self.counted(Network(self.policy))["vision"] if self.model.vision else 0

    def network(self, head: Head = "lm", **settings: Any) -> Network:
        """Returns the policy's, or a critic's, network without its tower."""
        return Network(dataclasses.replace(self.policy, vision=None), head=head, **settings)

    @property
    def row_shards(self) -> int:  # devices that the rows of a microbatch are split over
        return self.mesh["data"] * self.mesh["fsdp"] * self.mesh["expert"]

    @property
    def sampling_shards(self) -> int:  # devices that slots and prompts are split over
        return self.row_shards * self.stages

    @property
    def param_item(self) -> int:  # bytes of a number of trained weights
        return ITEM_BYTES[self.config.model.param_dtype]

    @property
    def compute_item(self) -> int:  # bytes of a number in training and scoring
        return ITEM_BYTES[self.config.model.compute_dtype]

    @property
    def rollout_dtype(self) -> str:  # of what sampling computes
        dtype = self.config.rollout.dtype
        return self.config.model.compute_dtype if dtype == "compute" else dtype

    @property
    def rollout_item(self) -> int:  # bytes of a number that sampling computes
        return ITEM_BYTES[self.rollout_dtype]

    @property
    def cache_item(self) -> int:  # bytes of a number of the cache
        dtype = self.config.rollout.cache_dtype
        return self.rollout_item if dtype == "rollout" else ITEM_BYTES[dtype]

    @property
    def num_slots(self) -> int:  # by the engine's own rule
        return self._room[0]

    @property
    def cache_tokens(self) -> int:  # of all slots
        return self._room[1]

    @functools.cached_property
    def _room(self) -> tuple[int, int]:
        config, rollout = self.config, self.config.rollout

        def of_logits(slots: int) -> float:
            rows = self.rows_here(slots * (1 + rollout.speculation.draft_tokens))
            return 3.0 * rows * self.split(self.policy.vocab_size) * 4

        slots, tokens = chosen_room(
            config.sequences_per_step,
            config.sampled_lengths,
            self.backend,
            self.num_devices,
            self.sampling_shards,
            self.memory_bytes,
            lambda tokens, slots: self.cache_bytes(slots, tokens / slots),
            of_logits,
            rollout.num_slots,
        )
        shards = self.sampling_shards if slots % self.sampling_shards == 0 else 1
        given = rollout.cache_tokens or tokens, self.backend, config.max_sequence_tokens
        pages, page = cache_pages(*given, slots, shards)
        return slots, pages * page

    def lessons(self, num_sequences: int) -> float:
        """Returns bytes on a device of what teachers say of so many sequences."""
        settings, rows = self.config.distillation, self.rows(num_sequences)
        places = rows.count * rows.rows * rows.width / self.mesh["sequence"]
        return places * settings.num_listed * 8 if settings.teachers else 0.0

    def cache_bytes(self, rows: int, width: float) -> float:
        """Returns bytes of keys and values of so many sequences on one device."""
        heads, of_key, of_value = self.policy.cached
        entries = self.rows_here(rows) * self.split(heads) * width * (of_key + of_value)
        return 1.0 * self.policy.num_layers * entries * self.cache_item

    def rows_here(self, rows: int) -> int:
        """Returns the rows that one device samples: all of them where they do not divide."""
        return rows // self.sampling_shards if rows % self.sampling_shards == 0 else rows

    def split(self, size: int) -> int:
        """Returns `size` on one device: divided by the tensor axis where that divides it."""
        return size // self.mesh["tensor"] if size % self.mesh["tensor"] == 0 else size

    @property
    def kernel(self) -> attention.Implementation:  # of attention over whole rows
        model = self.config.model
        return attention.implementation_for(
            model.attention, self.backend, model.compute_dtype, self.policy.head_size
        )

    def rows(self, num_sequences: int) -> filling.RowsShape:
        """Returns the rows of one microbatch on one device when all sequences are longest.

        With `full`, so many of them that it has the most tokens, as shorter sequences may.
        """
        config, length = self.config, self.mesh["sequence"]
        share = config.trainer.shared_prompts == "auto" and length == 1
        share = share and attention.shares_prefixes(self.kernel)
        budget = max(config.trainer.max_tokens_per_microbatch * length, config.max_sequence_tokens)
        found = filling.longest(
            num_sequences,
            config.algorithm.samples_per_prompt,
            config.data.max_prompt_tokens,
            config.rollout.max_response_tokens,
            budget,
            self.row_shards,
            flops.attention_parity(self.policy) if share else 0,
            filling.fewest_tokens(self.backend, self.row_shards),
            self.stages,
        )
        if not self.full:
            return found
        most = min(budget, num_sequences * config.max_sequence_tokens / self.row_shards)
        return dataclasses.replace(found, rows=max(found.rows, most / found.width))

    def counted(
        self, network: Network, layout: str = "train", adapters: bool = False
    ) -> Counter[str]:
        """Returns the parameters, or adapters, of a network on a device, in a rollout layout."""
        return _counted(network, layout, tuple(self.mesh.items()), adapters)

    def held(self, head: Head) -> Counter[str]:
        """Returns the policy's, or a critic's, parameters on a device in training."""
        return self.counted(self.network(head))

    def weights(self, head: Head) -> float:
        return (self.held(head).total() + self.learns_tower(head) * self.tower) * self.param_item

    def computed(self) -> dict[str, LayerParams]:
        """Returns by stack the parameters of one of the policy's layers, gathered for use."""
        return _computed(self.network(), tuple(self.mesh.items()))

    def used(self, sampling: bool = False) -> LayerParams:
        """Returns the policy's parameters that a device computes with, one layer after another.

        Its ends are among the rest. In `sampling` it computes all layers, else those of its stage.
        """
        of_layers, stacks = self.computed(), self.policy.stacks
        layers = [
            (of_layers[name], len(stack.numbers) // (1 if sampling else stack.stages))
            for name, stack in stacks.items()
        ]
        held = self.counted(self.network(), "tensor")
        ends = held.total() - in_layers(held)
        found = sum(count * of.experts for of, count in layers)
        return LayerParams(found, ends + sum(count * of.rest for of, count in layers))

    def num_learned(self, head: Head) -> int:
        """Returns the parameters that are trained, on a device: all of them, or the adapters."""
        if not self.adapts(head):
            return self.held(head).total() + self.learns_tower(head) * self.tower
        shape = self.policy if self.learns_tower(head) else self.network().shape
        return self.counted(Network(shape, lora=self.config.lora), adapters=True).total()

    def adapts(self, head: Head) -> bool:
        """Returns whether only adapters of a network are trained."""
        return bool(self.config.lora.rank) and (head == "scalar") == self.scalar_adapters

    @property
    def rollout_held(self) -> Counter[str]:  # the rollout copy's parameters on a device
        return self.counted(self.network(), self.config.mesh.rollout)

    @property
    def _rollout_bytes(self) -> Counter[str]:
        """Bytes of the rollout copy by group; routers and rounded weights have their own dtypes."""
        rollout, param_dtype = self.config.rollout, self.config.model.param_dtype
        products = Products(quantization=rollout.quantization)
        network = self.network(param_dtype=param_dtype, products=products)
        layout, mesh = self.config.mesh.rollout, tuple(self.mesh.items())
        return _bytes_as(network, layout, mesh, self.rollout_dtype)

    @property
    def rollout_weights(self) -> float:  # bytes of the rollout copy
        return 1.0 * self._rollout_bytes.total()

    @property
    def resharded(self) -> dict[str, float]:
        """Bytes of the rollout copy that a program makes: embedding, head and norm; one layer."""
        held = self._rollout_bytes
        name, stack = list(self.policy.stacks.items())[-1]  # of experts, if there are any
        layer = held[f"layers.{name}"] / len(stack.numbers) * stack.stages  # one of each stage
        return {"reshard": 1.0 * held.total() - in_layers(held), "reshard_layer": layer}

    def given(self, role: str) -> Parts:
        """Returns weights and optimizer of the policy or all critics, as an update takes them."""
        config, critic = self.config, role == "critic"
        head: Head = "scalar" if critic else "lm"
        number = needs.of(config.algorithm).num_critics if critic else 1
        chosen = config.critic.optimizer if critic else config.trainer.optimizer
        learned, weights = self.num_learned(head), self.weights(head)
        if self.adapts(head):
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
            networks = (Network(self.stored(s.shape), head=s.head) for s in self.scorers)
            held = sum(self.counted(network).total() for network in networks)
            return Parts(weights=held * self.param_item)
        if role == "reference":
            whole = self.weights("lm")
            return Parts(host=whole) if "reference" in on_host else Parts(weights=whole)
        parts = self.given(role)
        if "optimizer" in on_host:
            return dataclasses.replace(parts, optimizer=0.0, host=parts.optimizer)
        return parts
