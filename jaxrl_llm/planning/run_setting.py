"""A run on a mesh, and exact sizes of its programs' arguments by the sharding rules.

Counts and bytes are per device.
"""

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

from jaxrl_llm.algorithms import requirements
from jaxrl_llm.config import OptimizerConfig, RLConfig
from jaxrl_llm.config.kv_cache_sizing import cache_pages, choose_slots, page_tokens
from jaxrl_llm.learner import optimizer
from jaxrl_llm.models import attention, flops, mixed_precision
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.layers import NO_ADAPTERS, MatmulImpl
from jaxrl_llm.models.recurrent.sequence_memory import (
    has_state,
    layer_rings,
    paged_layers,
    state_numbers,
)
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.packing import row_layout as row_layout_lib
from jaxrl_llm.sharding import mesh as mesh_lib

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "fp8": 1}
DEVICE_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "cache", "temporary")
Head = Literal["lm", "scalar"]


# Scoring programs of frozen models, and the heads of these models.
SCORING_PROGRAMS: tuple[tuple[str, Head], ...] = (
    ("score_reward", "scalar"),
    ("score_teacher", "lm"),
)


@functools.lru_cache(maxsize=4096)
def _param_counts(network: Network, layout: str, mesh: tuple, adapters: bool) -> Counter[str]:
    """Parameters, or adapters, of a network per device by group of the tree.

    Each stack of layers is a group: "layers.0", ...
    """
    tree = network.abstract_adapters() if adapters else network.abstract_params()
    names = network.adapter_axes() if adapters else network.logical_axes()
    return _by_group(tree, names, jax.tree.map(lambda _: 1, tree), network, layout, mesh)


@functools.lru_cache(maxsize=4096)
def _param_bytes(network: Network, layout: str, mesh: tuple, dtype: str) -> Counter[str]:
    """Bytes of a network's parameters cast to a dtype, by group as in `_param_counts`."""
    tree, names = network.abstract_params(), network.logical_axes()
    items = jax.tree.map(
        lambda of: jnp.dtype(of).itemsize, mixed_precision.cast_dtypes(tree, dtype)
    )
    return _by_group(tree, names, items, network, layout, mesh)


def _by_group(tree, names, items, network: Network, layout: str, mesh: tuple) -> Counter[str]:
    axes, sizes = zip(*mesh, strict=True)
    rules = mesh_lib.ROLLOUT_WEIGHTS[layout]
    shardings = mesh_lib.shardings(
        tree, names, AbstractMesh(sizes, axes), rules, network.sharding_units
    )
    size = lambda a, s, item: math.prod(s.shard_shape(a.shape)) * item  # noqa: E731
    local_sizes = jax.tree.map(size, tree, shardings, items)
    stacks = {f"layers.{name}": stack for name, stack in local_sizes.pop("layers").items()}
    return Counter(
        {group: sum(jax.tree.leaves(of)) for group, of in {**local_sizes, **stacks}.items()}
    )


@functools.lru_cache(maxsize=4096)
def _optimizer_bytes(
    network: Network, mesh: tuple, adapters: bool, config: OptimizerConfig, in_loop: bool
) -> Counter[str]:
    """Bytes of the optimizer state of parameters, or adapters, by group as in `_param_counts`.

    With `in_loop` those that the loops over layers of an update write.
    """
    item_bytes = optimizer.loop_bytes if in_loop else optimizer.state_bytes
    tree = network.abstract_adapters() if adapters else network.abstract_params()
    names = network.adapter_axes() if adapters else network.logical_axes()
    items = jax.tree_util.tree_map_with_path(
        lambda path, a: item_bytes(config, path, a.shape), tree
    )
    return _by_group(tree, names, items, network, "train", mesh)


def num_layer_params(held: Counter[str]) -> int:
    """Number of parameters in layers, from `RunSetting.count_params`."""
    return sum(number for group, number in held.items() if group.startswith("layers."))


class LayerParams(NamedTuple):
    """Parameters of one layer per device."""

    experts: int
    rest: int


@functools.lru_cache(maxsize=4096)
def _gathered_layer_params(network: Network, mesh: tuple) -> dict[str, LayerParams]:
    """Parameters that a device computes with in one layer of each stack, gathered."""
    axes, sizes = zip(*mesh, strict=True)
    tree, names = network.abstract_params()["layers"], network.logical_axes()["layers"]
    shardings = mesh_lib.shardings(
        tree, names, AbstractMesh(sizes, axes), mesh_lib.ROLLOUT, network.sharding_units
    )
    by_stack = {}
    for name, stack in network.shape.layer_stacks.items():
        local_sizes = jax.tree.map(
            lambda a, s: math.prod(s.shard_shape(a.shape)), tree[name], shardings[name]
        )
        experts = jax.tree.map(
            lambda n, axis_names: n * ("experts" in axis_names), local_sizes, names[name]
        )
        total, expert_params = (
            sum(jax.tree.leaves(t)) // len(stack.layer_indices) for t in (local_sizes, experts)
        )
        by_stack[name] = LayerParams(expert_params, total - expert_params)
    return by_stack


def expert_axis_sizes(shape: Architecture) -> list[int]:
    """Candidate sizes of the expert axis: powers of two that divide the number of experts."""
    num = shape.experts.num if shape.experts else 1
    return [1 << i for i in range(num.bit_length()) if num % (1 << i) == 0]


@functools.cache
def num_params(shape: Architecture) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(Network(shape).abstract_params()))


@dataclasses.dataclass(frozen=True)
class MemoryParts:
    """Bytes per device by kind of content."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    cache: float = 0.0
    temporary: float = 0.0
    host: float = 0.0  # in host memory

    @property
    def total(self) -> float:  # of device memory
        return sum(getattr(self, name) for name in DEVICE_PARTS)

    def __mul__(self, factor: float) -> "MemoryParts":
        return MemoryParts(*(factor * size for size in vars(self).values()))

    def __add__(self, other: "MemoryParts") -> "MemoryParts":
        return MemoryParts(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: "MemoryParts") -> "MemoryParts":
        return MemoryParts(*map(operator.sub, vars(self).values(), vars(other).values()))


class ScoringModel(NamedTuple):
    """A frozen model that scores a step's sequences: a reward model, cost model or teacher."""

    shape: Architecture
    head: Head


@dataclasses.dataclass(frozen=True)
class RunSetting:
    """A run on a mesh: everything an estimate depends on."""

    config: (
        RLConfig  # for supervised jobs an RL run with the same programs, see `jobs.planned_runs`
    )
    model: Architecture  # of policy, reference and critics, before the split into stages
    scorers: tuple[ScoringModel, ...]
    mesh: Mapping[str, int]  # sizes of the axes, none of them -1
    backend: str = "tpu"  # whose compiler is assumed: "tpu", "gpu" or "cpu"
    memory_bytes: float = math.inf  # per device
    full_microbatches: bool = False  # whether microbatches are assumed to be full
    scalar_adapters: bool = False  # whether LoRA adapts the scalar network, not the policy

    @property
    def num_devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def stages(self) -> int:
        return self.mesh.get(mesh_lib.STAGE, 1)

    @functools.cached_property
    def policy(self) -> Architecture:
        """Shape of policy, reference and critics, with layers split into stages."""
        return self.staged_shape(self.model)

    def staged_shape(self, shape: Architecture) -> Architecture:
        return shape.with_stages(self.stages, self.config.mesh.stage_rounds)

    def has_role(self, role: str) -> bool:
        """Whether the run has this role with arrays of its own."""
        required = requirements.requirements(self.config.algorithm)
        # With adapters, the policy's frozen weights are the reference.
        reference = required.reference and not self.config.lora.rank
        needs_role = {
            "critic": required.critic,
            "reference": reference,
            "reward": bool(self.scorers),
        }
        return needs_role.get(role, True)

    def trains_vision_encoder(self, head: Head = "lm") -> bool:
        """Whether the vision encoder is trained with a network, as part of the policy's weights."""
        is_trained = self.config.trainer.tower_learning_rate > 0
        return head == "lm" and self.model.vision is not None and is_trained

    @property
    def vision_params(self) -> int:  # parameters of the vision encoder per device in training
        return self.count_params(Network(self.policy))["vision"] if self.model.vision else 0

    def network(self, head: Head = "lm", **settings: Any) -> Network:
        """The policy's, or a critic's, network without the vision encoder."""
        return Network(dataclasses.replace(self.policy, vision=None), head=head, **settings)

    @property
    def row_shards(self) -> int:  # devices that shard the rows of a microbatch
        return self.mesh["data"] * self.mesh["fsdp"] * self.mesh["expert"]

    @property
    def sampling_shards(self) -> int:  # devices that shard slots and prompts
        return self.row_shards * self.stages

    @property
    def param_item(self) -> int:  # bytes per trained weight
        return ITEM_BYTES[self.config.model.param_dtype]

    @property
    def compute_item(self) -> int:  # bytes per number in training and scoring
        return ITEM_BYTES[self.config.model.compute_dtype]

    @property
    def rollout_dtype(self) -> str:  # dtype in which sampling computes
        dtype = self.config.rollout.dtype
        return self.config.model.compute_dtype if dtype == "compute" else dtype

    @property
    def rollout_item(self) -> int:  # bytes per number in sampling
        return ITEM_BYTES[self.rollout_dtype]

    @property
    def cache_item(self) -> int:  # bytes per number in the KV cache
        dtype = self.config.rollout.cache_dtype
        return self.rollout_item if dtype == "rollout" else ITEM_BYTES[dtype]

    @property
    def num_slots(self) -> int:  # by the engine's rule
        return self._slots_and_tokens[0]

    @property
    def cache_tokens(self) -> int:  # over all slots
        return self._slots_and_tokens[1]

    @functools.cached_property
    def _slots_and_tokens(self) -> tuple[int, int]:
        config, rollout = self.config, self.config.rollout

        def logits_bytes(slots: int) -> float:
            rows = self.local_rows(slots * (1 + rollout.speculation.draft_tokens))
            return 3.0 * rows * self.tensor_shard(self.policy.vocab_size) * 4

        slots, tokens = choose_slots(
            config.sequences_per_step,
            config.sampled_lengths,
            self.backend,
            self.num_devices,
            self.sampling_shards,
            self.memory_bytes,
            lambda tokens, slots: self.cache_bytes(slots, tokens / slots),
            logits_bytes,
            rollout.num_slots,
        )
        shards = self.sampling_shards if slots % self.sampling_shards == 0 else 1
        cache_args = rollout.cache_tokens or tokens, self.backend, config.max_sequence_tokens
        pages, page = cache_pages(*cache_args, slots, shards)
        return slots, pages * page

    def teacher_bytes(self, num_sequences: int) -> float:
        """Bytes of the teachers' top log-probs for `num_sequences` sequences."""
        settings = self.config.distillation
        size = settings.num_listed * 8 if settings.teachers else 0
        return self._num_positions(num_sequences) * size

    def support_bytes(self, num_sequences: int) -> float:
        """Bytes of the supports of tokens for `num_sequences` sequences."""
        return self._num_positions(num_sequences) * self.config.rollout.support_tokens * 4

    def _num_positions(self, num_sequences: int) -> float:
        rows = self.rows(num_sequences)
        return rows.num_microbatches * rows.rows * rows.width / self.mesh["sequence"]

    def cache_bytes(self, rows: int, width: float) -> float:
        """Bytes of the pages, rings and states of `rows` sequences of `width` tokens."""
        rings = [pages for pages in self.rings if pages]
        num_whole = len(paged_layers(self.policy)) - len(rings)
        tokens = num_whole * width + sum(rings) * page_tokens(self.backend)
        return tokens * self.entry_bytes(rows) + self.state_bytes(rows)

    @property
    def rings(self) -> tuple[int, ...]:
        """Pages of a slot's ring for each layer with pages, as in `layer_rings`."""
        config = self.config
        if not config.rollout.keeps_windows_only(config.agent):
            return ()
        return layer_rings(self.policy, page_tokens(self.backend), config.max_sequence_tokens)

    def entry_bytes(self, rows: int) -> float:
        """Bytes of what one layer caches of one token of each of `rows` sequences."""
        heads, key_size, value_size = self.policy.kv_cache_sizes
        entries = self.local_rows(rows) * self.tensor_shard(heads) * (key_size + value_size)
        return 1.0 * entries * self.cache_item

    def state_bytes(self, rows: int) -> float:
        """Bytes of the states of recurrent layers of `rows` sequences."""
        if (sizes := self.policy.gated_delta) is None:
            return 0.0
        narrow, wide = state_numbers(self.policy)
        heads = sizes.num_value_heads
        share = self.tensor_shard(heads) / heads
        return self.local_rows(rows) * share * (narrow * self.compute_item + 4.0 * wide)

    def local_rows(self, rows: int) -> int:
        """Rows that one device samples: all of them if they do not divide over the devices."""
        return rows // self.sampling_shards if rows % self.sampling_shards == 0 else rows

    def tensor_shard(self, size: int) -> int:
        """`size` per device: divided by the tensor axis where that divides it."""
        return size // self.mesh["tensor"] if size % self.mesh["tensor"] == 0 else size

    @property
    def attention_kernel(
        self,
    ) -> attention.AttentionImplementation:  # implementation of full-row attention
        model = self.config.model
        return attention.implementation_for(
            model.attention, self.backend, model.compute_dtype, self.policy.head_size
        )

    def rows(self, num_sequences: int) -> row_layout_lib.RowsShape:
        """Rows of one microbatch per device when all sequences have maximum length.

        With `full_microbatches`, enough rows for the most tokens, as shorter sequences may fill
        them.
        """
        config, length = self.config, self.mesh["sequence"]
        shares_prompts = config.trainer.shared_prompts == "auto" and length == 1
        shares_prompts = shares_prompts and attention.supports_prefixes(self.attention_kernel)
        shares_prompts = shares_prompts and not has_state(self.policy)
        budget = max(config.trainer.max_tokens_per_microbatch * length, config.max_sequence_tokens)
        row_layout = row_layout_lib.worst_case_rows(
            num_sequences,
            config.algorithm.samples_per_prompt,
            config.data.max_prompt_tokens,
            config.rollout.max_response_tokens,
            budget,
            self.row_shards,
            flops.attention_crossover_keys(self.policy) if shares_prompts else 0,
            row_layout_lib.min_efficient_tokens(self.backend, self.row_shards),
            self.stages,
        )
        if not self.full_microbatches:
            return row_layout
        max_rows_tokens = min(budget, num_sequences * config.max_sequence_tokens / self.row_shards)
        return dataclasses.replace(
            row_layout, rows=max(row_layout.rows, max_rows_tokens / row_layout.width)
        )

    def count_params(
        self, network: Network, layout: str = "train", adapters: bool = False
    ) -> Counter[str]:
        """Parameters, or adapters, of a network per device by group, in a rollout layout."""
        return _param_counts(network, layout, tuple(self.mesh.items()), adapters)

    def local_params(self, head: Head) -> Counter[str]:
        """The policy's, or a critic's, parameters per device in training, by group."""
        return self.count_params(self.network(head))

    def base_matmuls(self, head: Head) -> MatmulImpl:
        """How a network's kernels are stored in training: quantized under its adapters."""
        is_quantized = self.trains_adapters(head)
        return MatmulImpl(quantization=self.config.model.quantization if is_quantized else "none")

    def stored_bytes(self, head: Head) -> Counter[str]:
        """Bytes of the policy's, or a critic's, weights per device in training, by group."""
        param_dtype = self.config.model.param_dtype
        network = self.network(head, param_dtype=param_dtype, matmuls=self.base_matmuls(head))
        return _param_bytes(network, "train", tuple(self.mesh.items()), param_dtype)

    def weight_bytes(self, head: Head) -> float:
        tower = self.trains_vision_encoder(head) * self.vision_params * self.param_item
        return 1.0 * self.stored_bytes(head).total() + tower

    def gathered_layer_params(self) -> dict[str, LayerParams]:
        """Parameters of one gathered layer of the policy, by stack."""
        return _gathered_layer_params(self.network(), tuple(self.mesh.items()))

    def computed_params(self, sampling: bool = False) -> LayerParams:
        """The policy's parameters that a device computes with, over all layers.

        `rest` includes the embedding, head and final norm. In `sampling` a device computes all
        layers, else those of its stage.
        """
        layer_params, stacks = self.gathered_layer_params(), self.policy.layer_stacks
        layers = [
            (layer_params[name], len(stack.layer_indices) // (1 if sampling else stack.stages))
            for name, stack in stacks.items()
        ]
        params = self.count_params(self.network(), "tensor")
        non_layer = params.total() - num_layer_params(params)
        expert_params = sum(count * params_of_layer.experts for params_of_layer, count in layers)
        return LayerParams(
            expert_params,
            non_layer + sum(count * params_of_layer.rest for params_of_layer, count in layers),
        )

    def num_trained(self, head: Head) -> int:
        """Number of trained parameters per device: all of them, or the adapters."""
        if not self.trains_adapters(head):
            return (
                self.local_params(head).total()
                + self.trains_vision_encoder(head) * self.vision_params
            )
        shape = self.policy if self.trains_vision_encoder(head) else self.network().shape
        return self.count_params(Network(shape, lora=self.config.lora), adapters=True).total()

    def trains_adapters(self, head: Head) -> bool:
        """Whether only adapters of a network are trained."""
        return bool(self.config.lora.rank) and (head == "scalar") == self.scalar_adapters

    @property
    def rollout_params(self) -> Counter[str]:  # parameters of the rollout copy per device, by group
        return self.count_params(self.network(), self.config.mesh.rollout)

    @property
    def _rollout_bytes(self) -> Counter[str]:
        """Bytes of the rollout copy by group; routers and quantized weights keep their dtypes.

        A quantized base has its adapters beside it.
        """
        rollout, param_dtype = self.config.rollout, self.config.model.param_dtype
        products, lora = self.base_matmuls("lm"), NO_ADAPTERS
        if products.quantization == "none":
            products = MatmulImpl(quantization=rollout.quantization)
        else:
            lora = self.config.lora
        network = self.network(param_dtype=param_dtype, matmuls=products, lora=lora)
        layout, mesh = self.config.mesh.rollout, tuple(self.mesh.items())
        weights = _param_bytes(network, layout, mesh, self.rollout_dtype)
        if lora.rank:
            adapters = _param_counts(network, layout, mesh, adapters=True)
            weights = weights + Counter({k: n * self.rollout_item for k, n in adapters.items()})
        return weights

    @property
    def rollout_bytes(self) -> float:  # bytes of the rollout copy
        return 1.0 * self._rollout_bytes.total()

    @property
    def resharded_bytes(self) -> dict[str, float]:
        """Bytes that each reshard program writes: embedding, head and norm; one layer per stage."""
        rollout_bytes = self._rollout_bytes
        name, stack = list(self.policy.layer_stacks.items())[-1]  # a MoE stack, if there is one
        # one of each stage
        layer = rollout_bytes[f"layers.{name}"] / len(stack.layer_indices) * stack.stages
        return {
            "reshard": 1.0 * rollout_bytes.total() - num_layer_params(rollout_bytes),
            "reshard_layer": layer,
        }

    def update_arguments(self, role: str) -> MemoryParts:
        """Weights and optimizer state of the policy or all critics, as arguments of an update."""
        config, critic = self.config, role == "critic"
        head: Head = "scalar" if critic else "lm"
        num_networks = requirements.requirements(config.algorithm).num_critics if critic else 1
        learned, weights = self.num_trained(head), self.weight_bytes(head)
        if self.trains_adapters(head):
            weights += learned * 4  # adapters are float32
        return MemoryParts(
            weights=num_networks * weights, optimizer=num_networks * self.optimizer_bytes(head)
        )

    def optimizer_bytes(self, head: Head, in_loop: bool = False) -> float:
        """Bytes of the optimizer state of the policy, or of one critic; see `_optimizer_bytes`."""
        config = self.config.critic.optimizer if head == "scalar" else self.config.trainer.optimizer
        adapters, mesh = self.trains_adapters(head), tuple(self.mesh.items())
        trains_tower = self.trains_vision_encoder(head)
        shape = self.policy if trains_tower else self.network().shape
        lora = self.config.lora if adapters else NO_ADAPTERS
        network = Network(shape, head=head, lora=lora)
        return 1.0 * _optimizer_bytes(network, mesh, adapters, config, in_loop).total()

    def resident_parts(self, role: str) -> MemoryParts:
        """Memory of a role on the device and on the host during the whole step."""
        on_host = self.config.mesh.on_host
        if not self.has_role(role):
            return MemoryParts()
        if role == "rollout":
            return MemoryParts(weights=self.rollout_bytes)
        if role == "reward":
            networks = (Network(self.staged_shape(s.shape), head=s.head) for s in self.scorers)
            num_params = sum(self.count_params(network).total() for network in networks)
            return MemoryParts(weights=num_params * self.param_item)
        if role == "reference":
            weight_bytes = self.weight_bytes("lm")
            return (
                MemoryParts(host=weight_bytes)
                if "reference" in on_host
                else MemoryParts(weights=weight_bytes)
            )
        parts = self.update_arguments(role)
        if "optimizer" in on_host:
            return dataclasses.replace(parts, optimizer=0.0, host=parts.optimizer)
        return parts
