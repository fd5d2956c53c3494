"""What the networks of a run are, before there are any weights: shapes, kernels, layouts."""

import functools
from collections.abc import Callable
from typing import Literal

from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.config import Config, ConfigError, LoraConfig, ModelConfig
from jaxrl_llm.data import tokenizer as tokenizer_lib
from jaxrl_llm.models import attention, families, huggingface, lora, sequence_attention
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.sharding import resting


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Returns the run's tokenizer: of its folder, or the built-in one of characters.

    Raises:
      CheckpointFormatError: If there is no model folder to look into.
      DataError: If the folder has no tokenizer that can be read.
    """
    if config.path:
        families.read_config(config.path)  # what is wrong there is not the tokenizer's fault
    folder = config.tokenizer or config.path
    if not folder:
        return tokenizer_lib.character_tokenizer()
    return tokenizer_lib.load_tokenizer(folder, config.chat_template)


def model_shape(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Shape:
    """Returns the architecture of a folder, or of the config's random model."""
    if config.path:
        shape = huggingface.read_shape(config.path)
        huggingface.check_vocabulary(shape, tokenizer)
        return shape
    return Shape(
        family=config.family,
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        mlp_size=config.mlp_size,
        rope_theta=config.rope_theta,
        qkv_bias=config.family == "qwen2",
        qk_norm=config.family == "qwen3",
        tie_embeddings=config.tie_embeddings,
    )


def check_stop_tokens(config: Config, shape: Shape) -> None:
    """Raises ConfigError if the model can never sample one of `rollout.stop_tokens`."""
    if beyond := [token for token in config.rollout.stop_tokens if token >= shape.vocab_size]:
        raise ConfigError(
            [
                f"config.rollout.stop_tokens: {beyond} are not in the vocabulary, tokens 0 to"
                f" {shape.vocab_size - 1}; leave them out"
            ]
        )


def check_mesh(config: Config, mesh: Mesh, shape: Shape) -> None:
    """Raises ConfigError if the mesh cannot hold this run's sequences, heads and what rests."""
    shards = mesh.shape["sequence"]
    budget = config.trainer.max_tokens_per_microbatch
    widest = sequence_attention.row_width(config.max_sequence_tokens, shards)
    if widest > budget * shards:
        raise ConfigError(
            [
                f"config.trainer.max_tokens_per_microbatch: {budget} x {shards} sequence shards"
                f" cannot hold one row of {widest} tokens; use at least {widest // shards}"
            ]
        )
    if config.mesh.on_host and (found := resting.problem(mesh)):
        raise ConfigError([f"config.mesh.on_host: {found}; leave it empty"])
    check_heads(config, mesh, shape)


def check_heads(config: Config, mesh: Mesh, shape: Shape) -> None:
    """Raises ConfigError if the mesh cannot share the heads of a model."""
    form, sizes = config.mesh.sequence_attention, mesh.shape
    found = sequence_attention.problem(form, shape.num_heads, sizes["tensor"], sizes["sequence"])
    if found:
        raise ConfigError([f"config.mesh.sequence: {found}"])


def network(config: Config, shape: Shape, head: Literal["lm", "scalar"], platform: str) -> Network:
    """Returns the network of one role, on devices of a platform."""
    model = config.model
    return Network(
        shape,
        head=head,
        param_dtype=model.param_dtype,
        compute_dtype=model.compute_dtype,
        remat="none" if model.remat == "auto" else model.remat,  # of a run: `automatic.sized`
        sequence_attention=config.mesh.sequence_attention,
        kernel=attention.implementation_for(
            model.attention, platform, model.compute_dtype, shape.head_size
        ),
    )


def scorer_network(config: Config, path: str, platform: str) -> Network:
    """Returns the network of a reward or cost model in a folder; its shape is its own."""
    return network(config, huggingface.read_shape(path), "scalar", platform)


def train_shardings(net: Network, mesh: Mesh) -> Params:
    """Returns how the parameters of a network are split in training and scoring."""
    return mesh_lib.shardings(net.abstract(), net.logical_axes(), mesh, mesh_lib.TRAIN, net.units)


def adapter_shardings(net: Network, mesh: Mesh) -> Params:
    """Returns how the adapters of a network are split: as the kernels that they belong to."""
    adapters, axes = net.abstract_adapters(), net.adapter_axes()
    return mesh_lib.shardings(adapters, axes, mesh, mesh_lib.TRAIN, net.units)


def merge_adapters(config: LoraConfig) -> Callable[[Params], Params]:
    """Returns what makes plain weights of weights with adapters; the identity with rank 0."""
    if not config.rank:
        return lambda tree: tree
    return functools.partial(lora.merged, scale=config.scale)
