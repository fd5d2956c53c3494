"""Reads and writes the config.json keys of the vision encoder and of multimodal positions."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.architecture import Architecture, VisionArchitecture

# Families with a vision encoder; keys of their text model are at the top level or in text_config.
MODEL_TYPES = ("qwen2_5_vl",)
_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "num_heads": 16,
    "intermediate_size": 3420,
    "fullatt_block_indexes": (7, 15, 23, 31),
    "window_size": 112,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_REQUIRED_VALUES = {"hidden_act": "silu", "in_channels": 3, "in_chans": 3}
_DEFAULT_IMAGE_TOKEN = 151655


def flat_config(config: dict[str, Any]) -> dict[str, Any]:
    """A config with the keys of text_config moved to the top level, as in files on the hub."""
    if config.get("model_type") not in MODEL_TYPES or not config.get("text_config"):
        return config
    text_config = {k: v for k, v in config["text_config"].items() if v is not None}
    outer = {k: v for k, v in config.items() if k != "text_config" and v is not None}
    tie_embeddings = text_config.get("tie_word_embeddings") or outer.get("tie_word_embeddings")
    return {**text_config, **outer, "tie_word_embeddings": bool(tie_embeddings)}


def vision_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `Architecture` fields of the vision encoder: `vision` and `rope_sections`.

    Raises ValueError on unimplemented or impossible values; the message begins with the key.
    """
    if not isinstance(config["vision_config"], Mapping):
        raise ValueError(f"vision_config must be an object, got {config['vision_config']!r:.60}")
    vision_keys = {k: v for k, v in config["vision_config"].items() if v is not None}
    for key, value in _REQUIRED_VALUES.items():
        if vision_keys.get(key, value) != value:
            raise ValueError(
                f"vision_config.{key} is {vision_keys[key]!r}; only {value!r} is known"
            )
    settings = {**_DEFAULTS, **{k: v for k, v in vision_keys.items() if k in _DEFAULTS}}
    full_layers = settings.pop("fullatt_block_indexes")
    for key, value in settings.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise ValueError(f"vision_config.{key} must be an integer from 1 on, got {value!r}")
    vision = VisionArchitecture(
        num_layers=settings["depth"],
        hidden_size=settings["hidden_size"],
        num_heads=settings["num_heads"],
        mlp_size=settings["intermediate_size"],
        full_layers=tuple(full_layers),
        window_size=settings["window_size"],
        patch_size=settings["patch_size"],
        merge_size=settings["spatial_merge_size"],
        frames=settings["temporal_patch_size"],
        image_token=config.get("image_token_id", _DEFAULT_IMAGE_TOKEN),
    )
    if vision.hidden_size % vision.num_heads or vision.head_size % 4:
        raise ValueError(
            f"vision_config: {vision.num_heads} heads share {vision.hidden_size} dims; each needs"
            " the same number, a multiple of 4"
        )
    if not vision.window:
        raise ValueError("vision_config.window_size is less than the pixels of one token")
    if vision_keys.get("out_hidden_size", config["hidden_size"]) != config["hidden_size"]:
        raise ValueError(
            f"vision_config.out_hidden_size is {vision_keys['out_hidden_size']}, hidden_size is"
            f" {config['hidden_size']}; they must be the same"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    sections = tuple(rope.get("mrope_section", (16, 24, 24)))
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if len(sections) != 3 or 2 * sum(sections) != head_size:
        raise ValueError(
            f"mrope_section is {list(sections)}; its three parts must add up to half a head,"
            f" {head_size // 2}"
        )
    return {"vision": vision, "rope_sections": sections}


def vision_config_keys(shape: Architecture) -> dict[str, Any]:
    """The config.json keys for which `vision_fields` returns this shape, except the rotary
    settings.
    """
    vision = shape.vision
    if vision is None:
        return {}
    return {
        "image_token_id": vision.image_token,
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": vision.num_layers,
            "hidden_size": vision.hidden_size,
            "num_heads": vision.num_heads,
            "intermediate_size": vision.mlp_size,
            "out_hidden_size": shape.hidden_size,
            "fullatt_block_indexes": list(vision.full_layers),
            "window_size": vision.window_size,
            "patch_size": vision.patch_size,
            "spatial_patch_size": vision.patch_size,
            "spatial_merge_size": vision.merge_size,
            "temporal_patch_size": vision.frames,
            "hidden_act": vision.act,
            "in_chans": 3,
        },
    }
