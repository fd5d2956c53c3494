"""The models of a job without their weights: networks, meshes, shardings, tokenizer."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxrl_llm.algorithms import needs
from jaxrl_llm.config import (
    ConfigError,
    JobConfig,
    LoraConfig,
    ModelConfig,
    RLConfig,
)
from jaxrl_llm.config.placement import ROLES
from jaxrl_llm.data.pictures import Pictures
from jaxrl_llm.learner import routing
from jaxrl_llm.learner.batches import Packer
from jaxrl_llm.learner.gallery import Gallery
from jaxrl_llm.models import (
    attention,
    families,
    flops,
    huggingface,
    lora,
    sequence_attention,
    vocabulary,
)
from jaxrl_llm.models.shape import Shape, random_model
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.models.vocabulary import TokenRanges
from jaxrl_llm.planning import filling, stages
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.sharding import pools

_TOWER = 3  # folded into the seed for the weights of a random tower

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class Models:
    """Networks, meshes and tokenizer of a job."""

    meshes: Mapping[str, Mesh]  # of each role; the same mesh unless RL places roles apart
    tokenizer: "PreTrainedTokenizerBase"
    eos_tokens: tuple[int, ...]
    policy: Network
    value: Network  # one number for each token or sequence: critics, reward and cost models
    packer: Packer
    pictures: Pictures | None = None  # prepares images; None: the model reads text alone
    gallery: Gallery | None = None  # what its tower sees in them, and the tower's weights
    # Ids of the policy's vocabulary that stand for no text: past the tokenizer's end, or of images.
    unused_tokens: TokenRanges = ()

    @property
    def mesh(self) -> Mesh:
        """The policy's mesh."""
        return self.meshes["policy"]

    @property
    def platform(self) -> str:
        """Of the mesh's devices: "cpu", "tpu", "gpu"."""
        return self.mesh.devices.flat[0].platform

    @functools.cached_property
    def policy_shardings(self) -> Params:
        return train_shardings(self.policy, self.mesh)


def load_tokenizer(config: ModelConfig) -> "PreTrainedTokenizerBase":
    """Returns the job's tokenizer: of its folder, or the built-in one of characters.

    Raises:
      CheckpointFormatError, DataError: If there is no model folder, or no tokenizer in it.
    """
    if config.path:
        families.read_config(config.path)  # a folder that is wrong is reported as such
    # Tokenizers take seconds to import, and plans need none.
    from jaxrl_llm.data import tokenizer as tokenizer_lib

    path = config.tokenizer or config.path
    images = _reads_images(config)
    treatment = config.special_tokens_in_messages
    return tokenizer_lib.load_tokenizer(path, config.chat_template, images, config.words, treatment)


def _reads_images(config: ModelConfig) -> bool:
    """Returns whether a random model reads images."""
    return not config.path and config.family == "qwen2_5_vl"


def of_job(config: JobConfig, meshes: Mapping[str, Mesh] | None = None) -> Models:
    """Returns the models of a job. Reads configuration files, allocates no weights.

    `meshes` are of each role; by default one mesh over all devices.

    Raises:
      ConfigError, families.FormatError: If mesh, model folder or tokenizer cannot work.
    """
    model, tokenizer = config.model, load_tokenizer(config.model)
    eos = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    marks: set[int] = set()
    if model.path:
        shape = huggingface.read_shape(model.path)
        huggingface.check_vocabulary(shape, tokenizer)
        eos |= set(families.eos_token_ids(model.path))
        marks |= set(huggingface.image_marks(model.path, shape))
    else:
        shape = random_model(model, len(tokenizer))
        if shape.vision is not None:
            token: Any = tokenizer.convert_tokens_to_ids("<|image_pad|>")
            vision = dataclasses.replace(shape.vision, image_token=token)
            shape = dataclasses.replace(shape, vision=vision)
            marks |= set(built_in_image_marks(tokenizer))
    if config.trains_vision_tower and shape.vision is None:
        raise ConfigError(
            f"config.trainer.tower_learning_rate: {config.trainer.tower_learning_rate}, but the"
            " model reads no images; set it to 0"
        )
    unused = vocabulary.unused_tokens(
        shape.vocab_size, known=tokenizer.get_vocab().values(), marks=marks, ends=eos
    )
    models = build(config, meshes or one_mesh(config), tokenizer, shape, tuple(sorted(eos)), unused)
    return models if shape.vision is None else _with_tower(config, models, shape)


def _with_tower(config: JobConfig, models: Models, shape: Shape) -> Models:
    """Returns models whose images a tower reads; a frozen one's weights come with the first."""
    assert shape.vision is not None
    path, vision, mesh = config.model.path, shape.vision, models.mesh
    if path:
        pictures = Pictures.of_folder(path, vision.image_token)
    else:
        sizes = vision.patch_size, vision.merge_size, vision.frames
        pictures = Pictures.of_sizes(*sizes, vision.image_token)
    whole = dataclasses.replace(models.policy, shape=shape)

    def load() -> Params:
        places = train_shardings(whole, mesh)["vision"]
        if path:
            return huggingface.load(path, whole, {"vision": places}, part="vision")["vision"]
        key = jax.random.fold_in(jax.random.key(config.seed), _TOWER)
        return jax.jit(whole.tower.init, out_shardings=places)(key)

    gallery = Gallery(whole.tower, pictures, mesh, load, config.trains_vision_tower)
    return dataclasses.replace(models, pictures=pictures, gallery=gallery)


def one_mesh(config: JobConfig, devices: Sequence[Any] = ()) -> dict[str, Mesh]:
    """Returns the same mesh for every role, over all devices unless some are given.

    Raises ConfigError if it does not fit the devices.
    """
    whole = mesh_lib.make_mesh(config.mesh, *([list(devices)] if devices else []))
    return dict.fromkeys(ROLES, whole)


def role_meshes(config: RLConfig, devices: Sequence[Any] = ()) -> dict[str, Mesh]:
    """Returns the mesh of each role, as `config.placement` says; without `devices`, over all.

    Raises ConfigError if the devices cannot be shared out so.
    """
    if config.placement.choice == "colocate":
        return one_mesh(config, devices)
    needed = needs.of(config.algorithm)
    has = {
        "policy": True,
        "rollout": True,
        "critic": needed.critic,
        "reference": needed.reference,
        "reward": config.has_scorers,
    }
    used = {role for role, wanted in has.items() if wanted}
    return pools.meshes(config.placement, config.mesh, used, list(devices) or jax.devices())


def build(
    config: JobConfig,
    meshes: Mapping[str, Mesh],
    tokenizer: "PreTrainedTokenizerBase",
    shape: Shape,
    eos: tuple[int, ...],
    unused_tokens: TokenRanges = (),
) -> Models:
    """Returns the models of a job on meshes whose devices may be absent; allocates nothing.

    In RL the policy's log-probs are of the distribution that its samples are drawn from: without
    `unused_tokens`, unless the config allows them.

    Raises ConfigError if a mesh cannot hold this job's sequences and heads.
    """
    for mesh in set(meshes.values()):
        _check_mesh(config, mesh, shape)
    stages.check_roles(config, {role: mesh.shape for role, mesh in meshes.items()})
    mesh = meshes["policy"]
    decoder = dataclasses.replace(shape, vision=None)  # a frozen tower is beside it
    policy = network(config, shape if config.trains_vision_tower else decoder, "lm", mesh)
    if config.learns_from_samples:
        suppressed = suppressed_tokens(config.require_rl(), unused_tokens)
        policy = dataclasses.replace(policy, suppressed_tokens=suppressed)
    return Models(
        meshes=meshes,
        tokenizer=tokenizer,
        eos_tokens=eos,
        policy=policy,
        value=network(config, decoder, "scalar", mesh),
        packer=packer(config, meshes, policy),
        unused_tokens=unused_tokens,
    )


def suppressed_tokens(config: RLConfig, unused_tokens: TokenRanges) -> TokenRanges:
    """The tokens that a policy never samples; a stop token that the config names may be."""
    if not config.rollout.suppress_unused_tokens:
        return ()
    tokens = {token for first, end in unused_tokens for token in range(first, end)}
    return vocabulary.to_ranges(tokens - set(config.rollout.stop_tokens))


def built_in_image_marks(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The ids of the built-in tokenizer's marks of images."""
    from jaxrl_llm.data.tokenizer import IMAGE_TOKENS

    vocab = tokenizer.get_vocab()
    return [vocab[token] for token in IMAGE_TOKENS]


def packer(config: JobConfig, meshes: Mapping[str, Mesh], policy: Network) -> Packer:
    """Returns what packs sequences into rows that every model can split; raises as `row_split`."""
    split = row_split(config, meshes)
    share = config.trainer.shared_prompts == "auto" and attention.shares_prefixes(policy.kernel)
    return Packer(
        *split,
        attention_parity=flops.attention_parity(policy.shape) if share else 0,
        max_scored=config.max_scored_tokens,
        fewest_tokens=filling.fewest_tokens(meshes["policy"].devices.flat[0].platform, split[1]),
        stages=meshes["policy"].shape["stage"],
    )


def row_split(config: JobConfig, meshes: Mapping[str, Mesh | AbstractMesh]) -> tuple[int, int, int]:
    """Returns tokens of a device in one microbatch, and over how many rows and lengths are split.

    Every model can then split the same rows over its own mesh. Raises ConfigError if the mesh with
    the fewest shards cannot hold its part of the rows.
    """
    splits = {mesh_lib.row_shards(mesh) for role, mesh in meshes.items() if role != "rollout"}
    rows, length = (math.lcm(*numbers) for numbers in zip(*splits, strict=True))
    # The devices of the mesh with the fewest shards hold the most.
    fewest, most = min(a * b for a, b in splits), rows * length
    budget = config.microbatch_tokens * fewest // most
    if len(splits) > 1 and budget * length < config.max_sequence_tokens:
        raise ConfigError(
            f"config.placement: microbatches are split over {most} devices, and a pool of"
            f" {fewest} holds as much of them on each; rows of {config.max_sequence_tokens}"
            " tokens need trainer.max_tokens_per_microbatch >="
            f" {-(-config.max_sequence_tokens * most // (fewest * length))}, or pools of more"
            " equal size"
        )
    return budget, rows, length


def check_stop_tokens(config: RLConfig, shape: Shape) -> None:
    """Raises ConfigError if the model can never sample one of `rollout.stop_tokens`."""
    if beyond := [token for token in config.rollout.stop_tokens if token >= shape.vocab_size]:
        raise ConfigError(
            f"config.rollout.stop_tokens: {beyond} are not in the vocabulary, tokens 0 to"
            f" {shape.vocab_size - 1}; leave them out"
        )


def _check_mesh(config: JobConfig, mesh: Mesh, shape: Shape) -> None:
    """Raises ConfigError if the mesh cannot hold the job's sequences, heads and host arrays."""
    shards, budget = mesh.shape["sequence"], config.microbatch_tokens
    widest = sequence_attention.row_width(config.max_sequence_tokens, shards)
    if widest > budget * shards:
        raise ConfigError(
            f"config.trainer.max_tokens_per_microbatch: {budget} x {shards} sequence shards"
            f" cannot hold one row of {widest} tokens; use at least {widest // shards}"
        )
    if config.mesh.on_host and (found := pools.host_problem(mesh)):
        raise ConfigError(f"config.mesh.on_host: {found}; leave it empty")
    check_heads(config, mesh, shape)
    routing.check(config.router, shape)
    ways, num = mesh.shape["expert"], shape.experts.num if shape.experts else 0
    if ways > 1 and (not num or num % ways):
        has = f"{num} experts do not divide by" if num else "no layer has experts; it asks for"
        fits = max(n for n in range(1, min(ways, max(1, num)) + 1) if not num % n)
        raise ConfigError(f"config.mesh.expert: {has} {ways} devices; use {fits if num else 1}")


def check_heads(config: JobConfig, mesh: Mesh, shape: Shape) -> None:
    """Raises ConfigError if the mesh cannot share the heads, or the layers, of a model."""
    stages.check_layers(config, shape, mesh.shape["stage"])
    sizes = shape.num_heads, mesh.shape["tensor"], mesh.shape["sequence"]
    if found := sequence_attention.problem(config.mesh.sequence_attention, *sizes, shape.rings):
        raise ConfigError(f"config.mesh.sequence: {found}")


def network(config: JobConfig, shape: Shape, head: Literal["lm", "scalar"], mesh: Mesh) -> Network:
    """Returns the network of one role, for devices and stages like those of `mesh`."""
    shape = shape.on_stages(mesh.shape["stage"], config.mesh.stage_rounds)
    model, platform = config.model, mesh.devices.flat[0].platform
    return Network(
        shape,
        head=head,
        param_dtype=model.param_dtype,
        compute_dtype=model.compute_dtype,
        remat="none" if model.remat == "auto" else model.remat,  # of a run: `planned.settled`
        lora=config.lora,
        sequence_attention=config.mesh.sequence_attention,
        kernel=attention.implementation_for(
            model.attention, platform, model.compute_dtype, shape.head_size
        ),
    )


def train_shardings(net: Network, mesh: Mesh) -> Params:
    """Returns how the parameters of a network are split in training and scoring."""
    return mesh_lib.shardings(net.abstract(), net.logical_axes(), mesh, mesh_lib.TRAIN, net.units)


def adapter_shardings(net: Network, mesh: Mesh) -> Params:
    """Returns how the adapters of a network are split: as the kernels that they belong to."""
    adapters, axes = net.abstract_adapters(), net.adapter_axes()
    return mesh_lib.shardings(adapters, axes, mesh, mesh_lib.TRAIN, net.units)


def merge_adapters(config: LoraConfig) -> Callable[[Params], Params]:
    """Returns what merges adapters into plain weights; the identity with rank 0."""
    if not config.rank:
        return lambda tree: tree
    return functools.partial(lora.merged, scale=config.scale)
