"""Writes the config.json of an `Architecture`; `config_reader` reads it."""

import math
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.hf import vision_config
from jaxrl_llm.models.hf.config_reader import (
    ARCHITECTURE_KEYS,
    ATTENTION_KEYS,
    ROPE_KEYS,
    YARN_KEYS,
    Fields,
    architecture_from_config,
    hf_class_name,
)
from jaxrl_llm.models.hf.families import FAMILIES, MLA_CODEC, MODEL_TYPE_ALIASES
from jaxrl_llm.models.hf.family_format import CheckpointFormatError, ModelFamily


def to_hf_config(
    shape: Architecture,
    head: str = "lm",
    dtype: str = "float32",
    source_config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The contents of a config.json for a shape; the inverse of `architecture_from_config`.

    The head "scalar" becomes a sequence classifier with one label. `dtype` is the dtype of the
    tensors. Keys of `source_config` that depend on none of these (token ids, dropout) are kept.

    Raises:
      CheckpointFormatError: If the family is unknown or cannot represent the shape.
    """
    shape = vision_config.readable_alone(shape)
    if shape.family not in FAMILIES:
        raise CheckpointFormatError(
            f"shape.family is {shape.family!r}; known families: {', '.join(FAMILIES)}"
        )
    row, shape = FAMILIES[shape.family], shape.as_published
    replaced_keys: tuple[str, ...]
    replaced_keys = (
        "rope_parameters",
        "torch_dtype",
        "dtype",
        "id2label",
        "label2id",
        "num_labels",
    )
    replaced_keys += (
        "vision_config",
        "quantization_config",
        "layer_types",
        "num_local_experts",
        "num_experts",
    )
    if (source_config or {}).get("model_type") in MODEL_TYPE_ALIASES:
        replaced_keys += ("auto_map",)  # code that belongs to the other name
    config = {k: v for k, v in (source_config or {}).items() if k not in replaced_keys}
    keys = {**ARCHITECTURE_KEYS, **row.config_keys}
    config |= {key: getattr(shape, field) or None for field, key in keys.items()}
    config |= {key: getattr(shape, f) for f, key in keys.items() if getattr(shape, f) is False}
    # Sizes that the family does not have.
    config = {key: v for key, v in config.items() if v is not None or row.defaults.get(key) != 0}
    config.update(
        model_type=shape.family,
        architectures=[hf_class_name(shape.family, head)],
        # The older spelling, which every reader understands.
        rope_scaling=_rope_scaling_keys(shape),
        torch_dtype=dtype,
    )
    config |= {"hidden_act": "silu", **row.required_values, **_layer_keys(shape, row)}
    if row.config_keys.get("local_rope_theta") == "rope_theta":
        config |= _rope_keys_by_attention(shape)
    if shape.rope_scaling.kind == "longrope":
        # Where Phi-3's readers look for it.
        config["original_max_position_embeddings"] = shape.rope_scaling.original_max_positions
    if "partial_rotary_factor" in row.defaults:
        config["partial_rotary_factor"] = (shape.rope_size or shape.head_size) / shape.head_size
    for field, is_used in {"experts": row.moe, "latent": MLA_CODEC in row.codecs}.items():
        if bool(getattr(shape, field)) != bool(is_used):
            raise _unrepresentable(shape, field, "some" if is_used else None)
    for codec in row.codecs:
        config |= codec.write(shape)
    if row.moe and shape.experts:
        config |= {key: getattr(shape.experts, f) for f, key in row.moe.config_keys.items()}
        config |= row.moe.sparse_layers.write(shape)
        if row.moe.shared_experts == "n_shared_experts":
            config[row.moe.shared_experts] = shape.experts.shared_size // shape.experts.size
    if head == "scalar":
        config.update(id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
    round_trip = architecture_from_config(config, "the config.json of this shape")
    for field in Architecture.__annotations__:
        if getattr(round_trip, field) != getattr(shape, field):
            raise _unrepresentable(shape, field, getattr(round_trip, field))
    return config


def _unrepresentable(shape: Architecture, field: str, family_value: Any) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"shape.{field} is {getattr(shape, field)}, but {shape.family} models have"
        f" {field}={family_value}; another reader would compute otherwise"
    )


def _layer_keys(shape: Architecture, row: ModelFamily) -> Fields:
    config: Fields = {}
    if not row.attention_type:
        return config
    layer_types = ["full_attention"] * shape.num_layers
    for kind, keys in ATTENTION_KEYS.items():
        for field, key in keys.items():
            sizes = [getattr(layer, field) for layer in shape.layer_types]
            layer_types = [
                kind if size else previous
                for size, previous in zip(sizes, layer_types, strict=True)
            ]
            if key in row.defaults:
                config[key] = max(sizes) or None
    by_mixer = {mixer: kind for kind, mixer in row.mixers.items()}
    layer_types = [
        by_mixer.get(layer.mixer, kind)
        for layer, kind in zip(shape.layer_types, layer_types, strict=True)
    ]
    return {**config, "layer_types": layer_types} if row.has_layer_types else config


def _rope_keys_by_attention(shape: Architecture) -> Fields:
    """Rotary settings by attention type, beside the older keys of full attention.

    Readers of the older keys alone give all layers the same theta, or sliding layers a default.
    """
    full = _rope_scaling_keys(shape) or {"rope_type": "default"}
    sliding = {"rope_type": "default", "rope_theta": shape.local_rope_theta}
    return {
        "rope_theta": shape.rope_theta,
        "rope_parameters": {
            "full_attention": {**full, "rope_theta": shape.rope_theta},
            "sliding_attention": sliding,
        },
    }


def _rope_scaling_keys(shape: Architecture) -> Fields | None:
    scaling = shape.rope_scaling
    sections: Fields = {"mrope_section": list(shape.rope_sections)} if shape.rope_sections else {}
    kind = {"type": "mrope"}
    if shape.rope_sections_interleaved:
        kind = {"rope_type": "default"}
        sections["mrope_interleaved"] = True
    if not scaling.changes_frequencies:
        return {**kind, **sections} if sections else None
    rope: Fields = {"rope_type": scaling.kind, **sections}
    rope |= {key: getattr(scaling, field) for field, key in ROPE_KEYS[scaling.kind].items()}
    if scaling.kind in ("yarn", "longrope"):
        rope["attention_factor"] = scaling.magnitude
    if scaling.kind == "longrope":
        rope |= {"short_factor": [*scaling.short_factors], "long_factor": [*scaling.long_factors]}
        rope["factor"] = scaling.factor
    if scaling.kind == "yarn":
        rope |= {key: getattr(scaling, field) for field, key in YARN_KEYS.items()}
        if shape.latent and shape.query_scale:
            mscale = math.sqrt(shape.query_scale * shape.head_size**0.5)
            rope["mscale_all_dim"] = round((mscale - 1.0) / (0.1 * math.log(scaling.factor)), 9)
    return rope
