"""Reads and writes the config.json keys of gated delta net layers."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.architecture import Architecture, GatedDeltaSizes, Mixer

# Attention type of `layer_types` -> `LayerType.mixer`.
MIXERS: Mapping[str, Mixer] = {"linear_attention": "gated_delta"}
_SIZE_KEYS = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_size": "linear_key_head_dim",
    "value_size": "linear_value_head_dim",
    "convolution_tokens": "linear_conv_kernel_dim",
}
# Values of absent keys, as transformers has them.
DEFAULTS: Mapping[str, Any] = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
}


def attention_type(config: Mapping[str, Any], number: int) -> str:
    """The type of layer `number` of a config without `layer_types`."""
    interval = config.get("full_attention_interval", 4)
    return "linear_attention" if (number + 1) % interval else "full_attention"


def gated_delta_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `Architecture` field `gated_delta`.

    Raises ValueError if the heads do not divide, or no layer attends.
    """
    sizes = GatedDeltaSizes(**{field: config[key] for field, key in _SIZE_KEYS.items()})
    if sizes.num_value_heads % sizes.num_key_heads:
        raise ValueError(
            f"linear_num_key_heads={sizes.num_key_heads} does not divide"
            f" linear_num_value_heads={sizes.num_value_heads}"
        )
    count = config["num_hidden_layers"]
    types = config.get("layer_types") or [attention_type(config, i) for i in range(count)]
    if set(types) == {"linear_attention"}:
        raise ValueError(
            f"layer_types: none of {count} layers is 'full_attention'; the engine needs one"
        )
    return {"gated_delta": sizes if "linear_attention" in types else None}


def gated_delta_keys(shape: Architecture) -> dict[str, Any]:
    """The config.json keys for which `gated_delta_fields` returns this shape's sizes."""
    sizes = shape.gated_delta
    if sizes is None:
        return {}
    return {key: getattr(sizes, field) for field, key in _SIZE_KEYS.items()}
