"""What config.json says of a vision tower and of positions in three parts: read, and written."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.shape import Shape, Vision

# Families with one, whose keys of the text model stand beside those of the whole, or inside.
TYPES = ("qwen2_5_vl",)
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
_ONLY = {"hidden_act": "silu", "in_channels": 3, "in_chans": 3}
_IMAGE_TOKEN = 151655


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of the text model beside the others, as files on the hub have them."""
    if config.get("model_type") not in TYPES or not config.get("text_config"):
        return config
    text = {k: v for k, v in config["text_config"].items() if v is not None}
    whole = {k: v for k, v in config.items() if k != "text_config" and v is not None}
    tied = text.get("tie_word_embeddings") or whole.get("tie_word_embeddings")
    return {**text, **whole, "tie_word_embeddings": bool(tied)}


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a shape that are about images.

    Raises ValueError for what is not implemented or cannot be, beginning with the key.
    """
    if not isinstance(config["vision_config"], Mapping):
        raise ValueError(f"vision_config must be an object, got {config['vision_config']!r:.60}")
    found = {k: v for k, v in config["vision_config"].items() if v is not None}
    for key, value in _ONLY.items():
        if found.get(key, value) != value:
            raise ValueError(f"vision_config.{key} is {found[key]!r}; only {value!r} is known")
    known = {**_DEFAULTS, **{k: v for k, v in found.items() if k in _DEFAULTS}}
    layers = known.pop("fullatt_block_indexes")
    for key, value in known.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise ValueError(f"vision_config.{key} must be an integer from 1 on, got {value!r}")
    vision = Vision(
        num_layers=known["depth"],
        hidden_size=known["hidden_size"],
        num_heads=known["num_heads"],
        mlp_size=known["intermediate_size"],
        full_layers=tuple(layers),
        window_size=known["window_size"],
        patch_size=known["patch_size"],
        merge_size=known["spatial_merge_size"],
        frames=known["temporal_patch_size"],
        image_token=config.get("image_token_id", _IMAGE_TOKEN),
    )
    if vision.hidden_size % vision.num_heads or vision.head_size % 4:
        raise ValueError(
            f"vision_config: {vision.num_heads} heads share {vision.hidden_size} dims; each needs"
            " the same number, a multiple of 4"
        )
    if not vision.window:
        raise ValueError("vision_config.window_size is less than the pixels of one token")
    if found.get("out_hidden_size", config["hidden_size"]) != config["hidden_size"]:
        raise ValueError(
            f"vision_config.out_hidden_size is {found['out_hidden_size']}, hidden_size is"
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


def write(shape: Shape) -> dict[str, Any]:
    """Returns the keys that `read` reads, beside those of the rotary embedding."""
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
