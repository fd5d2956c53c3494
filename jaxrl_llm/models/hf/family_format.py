"""The format of a model family: how its config.json and its tensors differ from the others."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.architecture import Architecture, Mixer


class CheckpointFormatError(UserError, ValueError):
    """A model folder that cannot be read or written; the message names file and remedy."""


Config = Mapping[str, Any]  # contents of config.json, without null keys
Fields = dict[str, Any]


class FieldCodec(NamedTuple):
    """Reads fields of a `Architecture` that need more than a key each, and writes their keys."""

    read: Callable[[Config], Any]
    write: Callable[[Architecture], Fields]


@dataclasses.dataclass(frozen=True)
class MoEFormat:
    """How a family's config.json describes its mixture of experts."""

    config_keys: Mapping[str, str]  # field of `Experts` -> key
    fixed_fields: Fields  # fields of `Experts` that are the same in all its models
    # which layers have experts: `vision_fields` gives a predicate on the layer index
    sparse_layers: FieldCodec
    shared_experts: Literal["", "one", "n_shared_experts"] = (
        ""  # number of shared experts, or its key
    )


def _all_sparse(config: Config) -> Callable[[int], bool]:
    return lambda number: True


def _dense_layers(shape: Architecture) -> list[int]:
    return [number for number, layer in enumerate(shape.layer_types) if not layer.experts]


def _sparse_every_n(config: Config) -> Callable[[int], bool]:
    step, dense_layers = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", ())
    return lambda number: number not in dense_layers and (number + 1) % step == 0


def _sparse_after_first_k(config: Config) -> Callable[[int], bool]:
    return lambda number: number >= config.get("first_k_dense_replace", 0)


def _sparse_by_type(config: Config) -> Callable[[int], bool]:
    types = config.get("mlp_layer_types")
    if types is None:
        return _sparse_after_first_k(config)
    return lambda number: number < len(types) and types[number] == "sparse"


def _sparse_if_listed(config: Config) -> Callable[[int], bool]:
    step = config.get("interleave_moe_layer_step", 1)
    moe_layers = config.get("moe_layers", range(step - 1, config["num_hidden_layers"], step))
    return lambda number: number in moe_layers


# Which layers have experts, as the families write it.
ALL_SPARSE = FieldCodec(_all_sparse, lambda shape: {})
SPARSE_EVERY_N = FieldCodec(
    _sparse_every_n,
    lambda shape: {"decoder_sparse_step": 1, "mlp_only_layers": _dense_layers(shape)},
)
SPARSE_AFTER_FIRST_K = FieldCodec(
    _sparse_after_first_k, lambda shape: {"first_k_dense_replace": len(_dense_layers(shape))}
)
SPARSE_BY_TYPE = FieldCodec(
    _sparse_by_type,
    lambda shape: {
        "first_k_dense_replace": len(_dense_layers(shape)),
        "mlp_layer_types": ["sparse" if kind.experts else "dense" for kind in shape.layer_types],
    },
)
SPARSE_IF_LISTED = FieldCodec(
    _sparse_if_listed,
    lambda shape: {
        "moe_layers": [n for n, layer in enumerate(shape.layer_types) if layer.experts],
        "interleave_moe_layer_step": 1,
    },
)


@dataclasses.dataclass(frozen=True)
class ModelFamily:
    """How one `model_type` differs from the others; keys are keys of config.json."""

    model_class: str  # prefix of its class names
    # `Architecture` fields that are the same in all its models.
    fixed_fields: Fields = dataclasses.field(default_factory=dict)
    # `Architecture` field -> key, in addition to `ARCHITECTURE_KEYS`.
    config_keys: Fields = dataclasses.field(default_factory=dict)
    defaults: Fields = dataclasses.field(default_factory=dict)  # values of absent keys
    # the only implemented value of a key
    required_values: Fields = dataclasses.field(default_factory=dict)
    codecs: tuple[FieldCodec, ...] = ()  # fields of a `Architecture` that need code
    # Attention type of a layer, by index; None: full in all layers.
    attention_type: Callable[[Config, int], str] | None = None
    # Rotary embedding of a layer, by index and attention type.
    rope_kind: Callable[[Config, int, str], Literal["main", "local", "none"]] = (
        lambda config, number, attention: "main"
    )
    mixers: Mapping[str, Mixer] = dataclasses.field(default_factory=dict)  # by attention type
    has_layer_types: bool = True  # config.json has `layer_types` unless all layers are alike
    moe: MoEFormat | None = None
    classifier_class: str = ""  # class name prefix of its classifier, if different
    causal_lm_class: str = ""  # name of its causal LM class, if different
    # Module names that differ, see `tensor_names`.
    module_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fused_qkv: bool = False  # query, key and value projections share one tensor
    fused_gate_up: bool = False  # gate and up projections share one tensor
    fused_experts: Literal["", "halves", "interleaved"] = ""  # the same, stacked over all experts
    # Whether published folders stack experts that transformers writes one by one.
    stacks_experts: bool = False
    # Whether transformers writes fused experts as [E, out, in], and published folders have the
    # other layout: both are read, and that of transformers is written.
    transposes_experts: bool = False
    # Whether a gated delta net has two tensors, in_proj_qkvz and in_proj_ba, in which outputs are
    # grouped by key head; else in_proj_qkv, in_proj_z, in_proj_b and in_proj_a.
    delta_by_key_head: bool = False
    has_mtp_layers: bool = False  # files may hold multi-token prediction layers
