"""Builds the models of a job without weights: networks, meshes, shardings, tokenizer."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxrl_llm.algorithms import requirements
from jaxrl_llm.config import (
    ConfigError,
    JobConfig,
    LoraConfig,
    ModelConfig,
    RLConfig,
)
from jaxrl_llm.config.placement import ROLES
from jaxrl_llm.data.images import ImagePreprocessor
from jaxrl_llm.learner import router_replay
from jaxrl_llm.learner.batches import Packer
from jaxrl_llm.learner.vision.feature_cache import ImageFeatureCache
from jaxrl_llm.models import attention, context_parallel, flops, lora
from jaxrl_llm.models.architecture import Architecture, architecture_from_config
from jaxrl_llm.models.hf import checkpoint, config_reader, vision_config, vocabulary
from jaxrl_llm.models.hf.vocabulary import TokenRanges
from jaxrl_llm.models.pipeline import checks
from jaxrl_llm.models.quantized import checks as quantized_checks
from jaxrl_llm.models.quantized import kernels
from jaxrl_llm.models.recurrent import checks as recurrent_checks
from jaxrl_llm.models.recurrent.sequence_memory import has_state
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.packing import row_layout
from jaxrl_llm.sharding import device_pools
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.storage import model_folder

_VISION_KEY = 3  # folded into the seed of a randomly initialized vision encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class Models:
    """Networks, meshes and tokenizer of a job."""

    meshes: Mapping[str, Mesh]  # by role; all the same unless RL puts roles on separate devices
    tokenizer: "PreTrainedTokenizerBase"
    eos_tokens: tuple[int, ...]
    policy: Network
    value: Network  # scalar head per token or sequence: critics, reward and cost models
    packer: Packer
    image_processor: ImagePreprocessor | None = None  # image preprocessing; None: text-only model
    image_feature_cache: ImageFeatureCache | None = (
        None  # cached image features, and the vision encoder
    )
    # Token ids that stand for no text: beyond the tokenizer's vocabulary, or image placeholders.
    unused_tokens: TokenRanges = ()

    @property
    def mesh(self) -> Mesh:
        """The policy's mesh."""
        return self.meshes["policy"]

    @property
    def platform(self) -> str:
        """Platform of the mesh's devices: "cpu", "tpu" or "gpu"."""
        return self.mesh.devices.flat[0].platform

    @functools.cached_property
    def policy_shardings(self) -> Params:
        return train_shardings(self.policy, self.mesh)


def load_tokenizer(config: ModelConfig) -> "PreTrainedTokenizerBase":
    """The job's tokenizer: from its folder, or the built-in character tokenizer.

    Raises:
      CheckpointFormatError, DataError: If there is no model folder, or no tokenizer in it.
    """
    if config.path:
        config_reader.read_config(config.path)  # reports a broken model folder first
    # Imported late: tokenizers take seconds to import, and plans need none.
    from jaxrl_llm.data import tokenizer as tokenizer_lib

    path = config.tokenizer or config.path
    reads_images = _random_model_reads_images(config)
    treatment = config.special_tokens_in_messages
    return tokenizer_lib.load_tokenizer(
        path, config.chat_template, reads_images, config.words, treatment
    )


def _random_model_reads_images(config: ModelConfig) -> bool:
    """Whether a randomly initialized model reads images."""
    return not config.path and config.has_vision


def make_models(config: JobConfig, meshes: Mapping[str, Mesh] | None = None) -> Models:
    """The models of a job. Reads configuration files, allocates no weights.

    `meshes` are by role; by default one mesh over the devices of the run.

    Raises:
      ConfigError, families.FormatError: If mesh, model folder or tokenizer cannot work.
    """
    model, tokenizer = config.model, load_tokenizer(config.model)
    eos = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    marks: set[int] = set()
    if model.path:
        shape = checkpoint.read_architecture(model.path)
        checkpoint.check_vocabulary(shape, tokenizer)
        eos |= set(config_reader.eos_token_ids(model.path))
        marks |= set(checkpoint.multimodal_token_ids(model.path, shape))
    else:
        shape = architecture_from_config(model, len(tokenizer))
        if shape.vision is not None:
            token: Any = tokenizer.convert_tokens_to_ids("<|image_pad|>")
            vision = dataclasses.replace(shape.vision, image_token=token)
            shape = dataclasses.replace(shape, vision=vision)
            marks |= set(builtin_image_token_ids(tokenizer))
    if config.trains_vision_tower and shape.vision is None:
        raise ConfigError(
            f"config.trainer.tower_learning_rate: {config.trainer.tower_learning_rate}, but the"
            " model reads no images; set it to 0"
        )
    unused = vocabulary.unused_tokens(
        shape.vocab_size,
        tokenizer_ids=tokenizer.get_vocab().values(),
        multimodal_ids=marks,
        eos_token_ids=eos,
    )
    models = build_models(
        config, meshes or shared_mesh(config), tokenizer, shape, tuple(sorted(eos)), unused
    )
    return models if shape.vision is None else _with_vision_encoder(config, models, shape)


def _with_vision_encoder(config: JobConfig, models: Models, shape: Architecture) -> Models:
    """Adds the vision encoder; frozen weights are loaded with the first image."""
    assert shape.vision is not None
    path, vision, mesh = config.model.path, shape.vision, models.mesh
    image_processor: ImagePreprocessor | None
    if path and _is_text_folder(path, shape):
        image_processor = None
    elif path:
        image_processor = ImagePreprocessor.from_folder(path, vision.image_token)
    else:
        image_processor = ImagePreprocessor.from_sizes(
            vision.patch_size, vision.merge_size, vision.frames, vision.image_token
        )
    network = dataclasses.replace(models.policy, shape=shape)

    def load() -> Params:
        shardings = train_shardings(network, mesh)["vision"]
        if path:
            return checkpoint.load(path, network, {"vision": shardings}, subtree="vision")["vision"]
        key = jax.random.fold_in(jax.random.key(config.seed), _VISION_KEY)
        return jax.jit(network.vision_encoder.init, out_shardings=shardings)(key)

    gallery = ImageFeatureCache(
        network.vision_encoder, image_processor, mesh, load, config.trains_vision_tower
    )
    return dataclasses.replace(models, image_processor=image_processor, image_feature_cache=gallery)


def _is_text_folder(path: str, shape: Architecture) -> bool:
    """Whether a folder of text and images lacks what prepares images: it is trained on text."""
    has_file = "preprocessor_config.json" in model_folder.file_names(path)
    return not has_file and vision_config.is_text_model_too(shape.family)


def shared_mesh(config: JobConfig, devices: Sequence[Any] = ()) -> dict[str, Mesh]:
    """One mesh shared by every role, over `devices` or else those of the run.

    Raises ConfigError if it does not fit the devices.
    """
    mesh = mesh_lib.make_mesh(config.mesh, *([list(devices)] if devices else []))
    return dict.fromkeys(ROLES, mesh)


def role_meshes(config: RLConfig, devices: Sequence[Any] = ()) -> dict[str, Mesh]:
    """The mesh of each role by `config.placement`, over `devices` or else those of the run.

    Raises ConfigError if the devices cannot be divided that way.
    """
    if config.placement.choice == "colocate":
        return shared_mesh(config, devices)
    needed = requirements.requirements(config.algorithm)
    needed_roles = {
        "policy": True,
        "rollout": True,
        "critic": needed.critic,
        "reference": needed.reference,
        "reward": config.has_scorers,
    }
    used_roles = {role for role, is_used in needed_roles.items() if is_used}
    return device_pools.role_meshes(
        config.placement, config.mesh, used_roles, list(devices) or mesh_lib.run_devices()
    )


def build_models(
    config: JobConfig,
    meshes: Mapping[str, Mesh],
    tokenizer: "PreTrainedTokenizerBase",
    shape: Architecture,
    eos: tuple[int, ...],
    unused_tokens: TokenRanges = (),
) -> Models:
    """The models of a job on meshes whose devices may be absent; allocates nothing.

    In RL the policy's log-probs belong to the distribution it samples from: `unused_tokens` are
    masked out, unless the config allows them.

    Raises ConfigError if a mesh cannot hold this job's sequences and heads.
    """
    for mesh in set(meshes.values()):
        _check_mesh(config, mesh, shape)
    checks.check_roles(config, {role: mesh.shape for role, mesh in meshes.items()})
    mesh = meshes["policy"]
    # a frozen vision encoder is kept outside the network
    decoder = dataclasses.replace(shape, vision=None)
    policy = make_network(config, shape if config.trains_vision_tower else decoder, "lm", mesh)
    value = make_network(config, decoder, "scalar", mesh)
    if config.trained_head == "lm":
        policy = _with_quantized_base(config, policy, mesh)
    else:
        value = _with_quantized_base(config, value, mesh)
    if config.learns_from_samples:
        suppressed = suppressed_tokens(config.require_rl(), unused_tokens)
        policy = dataclasses.replace(policy, suppressed_tokens=suppressed)
    return Models(
        meshes=meshes,
        tokenizer=tokenizer,
        eos_tokens=eos,
        policy=policy,
        value=value,
        packer=make_packer(config, meshes, policy),
        unused_tokens=unused_tokens,
    )


def suppressed_tokens(config: RLConfig, unused_tokens: TokenRanges) -> TokenRanges:
    """Tokens that the policy never samples; stop tokens named in the config are exempt."""
    if not config.rollout.suppress_unused_tokens:
        return ()
    tokens = {token for first, end in unused_tokens for token in range(first, end)}
    return vocabulary.to_ranges(tokens - set(config.rollout.stop_tokens))


def builtin_image_token_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Ids of the image tokens of the built-in tokenizer."""
    from jaxrl_llm.data.tokenizer import IMAGE_TOKENS

    vocab = tokenizer.get_vocab()
    return [vocab[token] for token in IMAGE_TOKENS]


def make_packer(config: JobConfig, meshes: Mapping[str, Mesh], policy: Network) -> Packer:
    """The packer of sequences into rows that every model can split; raises as `row_split`."""
    split = row_split(config, meshes)
    share = config.trainer.shared_prompts == "auto" and attention.supports_prefixes(policy.kernel)
    share = share and not has_state(policy.shape)
    is_rl = config.learns_from_samples
    return Packer(
        *split,
        attention_parity=flops.attention_crossover_keys(policy.shape) if share else 0,
        max_scored=config.max_scored_tokens,
        scores_observations=is_rl and config.require_rl().algorithm.observation_coef > 0,
        min_efficient_tokens=row_layout.min_efficient_tokens(
            meshes["policy"].devices.flat[0].platform, split[1]
        ),
        stages=meshes["policy"].shape["stage"],
    )


def row_split(config: JobConfig, meshes: Mapping[str, Mesh | AbstractMesh]) -> tuple[int, int, int]:
    """Microbatch tokens per device, and the row and sequence shards that every mesh divides.

    Every model can then split the same rows over its own mesh. Raises ConfigError if the mesh with
    the fewest shards cannot hold its part of the rows.
    """
    splits = {mesh_lib.num_row_shards(mesh) for role, mesh in meshes.items() if role != "rollout"}
    rows, length = (math.lcm(*numbers) for numbers in zip(*splits, strict=True))
    # The devices of the mesh with the fewest shards hold the most.
    fewest_shards, most_shards = min(a * b for a, b in splits), rows * length
    budget = config.microbatch_tokens * fewest_shards // most_shards
    if len(splits) > 1 and budget * length < config.max_sequence_tokens:
        raise ConfigError(
            f"config.placement: microbatches are split over {most_shards} devices, and a pool of"
            f" {fewest_shards} holds as much of them on each; rows of {config.max_sequence_tokens}"
            " tokens need trainer.max_tokens_per_microbatch >="
            f" {-(-config.max_sequence_tokens * most_shards // (fewest_shards * length))}, or"
            " pools of more equal size"
        )
    return budget, rows, length


def check_stop_tokens(config: RLConfig, shape: Architecture) -> None:
    """Raises ConfigError if the model can never sample one of `rollout.stop_tokens`."""
    if unknown := [token for token in config.rollout.stop_tokens if token >= shape.vocab_size]:
        raise ConfigError(
            f"config.rollout.stop_tokens: {unknown} are not in the vocabulary, tokens 0 to"
            f" {shape.vocab_size - 1}; leave them out"
        )


def _check_mesh(config: JobConfig, mesh: Mesh, shape: Architecture) -> None:
    """Raises ConfigError if the mesh cannot hold the job's sequences, heads and host arrays."""
    shards, budget = mesh.shape["sequence"], config.microbatch_tokens
    widest = context_parallel.padded_row_width(config.max_sequence_tokens, shards)
    if widest > budget * shards:
        raise ConfigError(
            f"config.trainer.max_tokens_per_microbatch: {budget} x {shards} sequence shards"
            f" cannot hold one row of {widest} tokens; use at least {widest // shards}"
        )
    if config.mesh.on_host and (problem := device_pools.host_offload_problem(mesh)):
        raise ConfigError(f"config.mesh.on_host: {problem}; leave it empty")
    check_heads(config, mesh, shape)
    recurrent_checks.check_settings(config, shape)
    router_replay.check_router_config(config.router, shape)
    expert_shards, num_experts = mesh.shape["expert"], shape.experts.num if shape.experts else 0
    if expert_shards > 1 and (not num_experts or num_experts % expert_shards):
        reason = (
            f"{num_experts} experts do not divide by"
            if num_experts
            else "no layer has experts; it asks for"
        )
        largest = max(
            n for n in range(1, min(expert_shards, max(1, num_experts)) + 1) if not num_experts % n
        )
        raise ConfigError(
            f"config.mesh.expert: {reason} {expert_shards} devices;"
            f" use {largest if num_experts else 1}"
        )


def check_heads(config: JobConfig, mesh: Mesh, shape: Architecture) -> None:
    """Raises ConfigError if the mesh cannot split the heads or the layers of a model."""
    checks.check_layers(config, shape, mesh.shape["stage"])
    problem = context_parallel.sharding_problem(
        config.mesh.sequence_attention,
        shape.num_heads,
        mesh.shape["tensor"],
        mesh.shape["sequence"],
        shape.supports_ring,
    )
    if problem:
        raise ConfigError(f"config.mesh.sequence: {problem}")


def make_network(
    config: JobConfig, shape: Architecture, head: Literal["lm", "scalar"], mesh: Mesh
) -> Network:
    """The network of one role, for the platform and pipeline stages of `mesh`."""
    shape = shape.for_length(config.max_sequence_tokens)
    shape = shape.with_stages(mesh.shape["stage"], config.mesh.stage_rounds)
    model, platform = config.model, mesh.devices.flat[0].platform
    return Network(
        shape,
        head=head,
        param_dtype=model.param_dtype,
        compute_dtype=model.compute_dtype,
        remat="none"
        if model.remat == "auto"
        else model.remat,  # runs resolve it first: `planned.resolve`
        lora=config.lora,
        sequence_attention=config.mesh.sequence_attention,
        kernel=attention.implementation_for(
            model.attention, platform, model.compute_dtype, shape.head_size
        ),
    )


def _with_quantized_base(config: JobConfig, network: Network, mesh: Mesh) -> Network:
    """The trained network with kernels as in `model.quantization`; raises ConfigError."""
    format = config.model.quantization
    if format == "none":
        return network
    if problem := quantized_checks.problem(network.shape, format, mesh.shape["stage"]):
        raise ConfigError(f"config.model.quantization: {format!r}, but {problem}; use 'none'")
    return dataclasses.replace(
        network, matmuls=dataclasses.replace(network.matmuls, quantization=format)
    )


def train_shardings(net: Network, mesh: Mesh) -> Params:
    """Shardings of a network's parameters in training and scoring."""
    return mesh_lib.shardings(
        net.abstract_params(), net.logical_axes(), mesh, mesh_lib.TRAIN, net.sharding_units
    )


def adapter_shardings(net: Network, mesh: Mesh) -> Params:
    """Shardings of a network's adapters: the same as the kernels they belong to."""
    adapters, axes = net.abstract_adapters(), net.adapter_axes()
    return mesh_lib.shardings(adapters, axes, mesh, mesh_lib.TRAIN, net.sharding_units)


def adapter_merger(config: LoraConfig) -> Callable[[Params], Params]:
    """A function that merges LoRA adapters into plain weights; the identity for rank 0."""
    if not config.rank:
        return lambda tree: tree
    return functools.partial(lora.merge_adapters, scale=config.scale)


def plain_params(network: Network, params: Params) -> Params:
    """The parameters of `network.unquantized`: kernels dequantized, in the parameters' dtype."""
    if (format := network.matmuls.quantization) == "none":
        return params
    layers = {
        name: kernels.dequantize_layers(stack, format, network.param_dtype)
        for name, stack in params["layers"].items()
    }
    return {**params, "layers": layers}
