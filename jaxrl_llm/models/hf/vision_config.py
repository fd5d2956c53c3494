"""Reads and writes the config.json keys of vision encoders and of multimodal positions."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.architecture import Architecture, VisionArchitecture, VisionKind

_SIZE_KEYS = {
    "num_layers": "depth",
    "hidden_size": "hidden_size",
    "num_heads": "num_heads",
    "mlp_size": "intermediate_size",
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "frames": "temporal_patch_size",
}
_THETA = 10_000.0  # of the encoders' rotary embeddings
_WINDOWS = {"fullatt_block_indexes": (7, 15, 23, 31), "window_size": 112}
_POSITIONS = "num_position_embeddings"
_DEEPSTACK = "deepstack_visual_indexes"


@dataclasses.dataclass(frozen=True)
class VisionFormat:
    """How the config.json of a family with images describes its vision encoder."""

    kind: VisionKind
    defaults: Mapping[str, Any]  # of keys of vision_config
    image_token: int
    # Required values of other keys of vision_config.
    required_values: Mapping[str, Any]
    rope_sections: tuple[int, ...]  # of a config without any
    config_type: str  # model_type of vision_config
    text_type: str = ""  # model_type of text_config; "": files are written without one
    deepstack: bool = False
    # The family of its text model alone; "": there is none.
    text_family: str = ""

    @property
    def is_nested(self) -> bool:
        """Whether files have the text model in text_config, and under model.language_model."""
        return bool(self.text_type)


_QWEN2_5 = VisionFormat(
    kind="qwen2_5",
    defaults={
        "depth": 32,
        "hidden_size": 3584,
        "num_heads": 16,
        "intermediate_size": 3420,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        **_WINDOWS,
    },
    image_token=151655,
    required_values={"hidden_act": "silu", "in_channels": 3, "in_chans": 3},
    rope_sections=(16, 24, 24),
    config_type="qwen2_5_vl",
)
_QWEN3 = VisionFormat(
    kind="qwen3",
    defaults={
        "depth": 27,
        "hidden_size": 1152,
        "num_heads": 16,
        "intermediate_size": 4304,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        _POSITIONS: 2304,
        _DEEPSTACK: (8, 16, 24),
    },
    image_token=151655,
    required_values={"hidden_act": "gelu_pytorch_tanh", "in_channels": 3},
    rope_sections=(24, 20, 20),
    config_type="qwen3_vl",
    text_type="qwen3_vl_text",
    deepstack=True,
)
_QWEN3_5 = dataclasses.replace(
    _QWEN3,
    defaults={key: value for key, value in _QWEN3.defaults.items() if key != _DEEPSTACK},
    image_token=248056,
    rope_sections=(11, 11, 10),
    config_type="qwen3_5",
    text_type="qwen3_5_text",
    text_family="qwen3_5_text",
    deepstack=False,
)
# Families with a vision encoder; keys of their text model are at the top level or in text_config.
FORMATS: Mapping[str, VisionFormat] = {
    "qwen2_5_vl": _QWEN2_5,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": dataclasses.replace(
        _QWEN3, config_type="qwen3_vl_moe", text_type="qwen3_vl_moe_text"
    ),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": dataclasses.replace(
        _QWEN3_5,
        config_type="qwen3_5_moe",
        text_type="qwen3_5_moe_text",
        text_family="qwen3_5_moe_text",
    ),
}
# Keys that a nested config.json has at its top level, beside ids of tokens that stand for images.
_OUTER_KEYS = (
    *("architectures", "model_type", "vision_config", "tie_word_embeddings", "torch_dtype"),
    *("dtype", "transformers_version", "quantization_config", "id2label", "label2id"),
)
_OUTER_PREFIXES = ("image_", "video_", "vision_")


def flat_config(config: dict[str, Any]) -> dict[str, Any]:
    """A config with the keys of text_config moved to the top level, as in files on the hub."""
    has_encoder = config.get("model_type") in FORMATS and config.get("vision_config")
    if not has_encoder or not config.get("text_config"):
        return config
    text_config = {k: v for k, v in config["text_config"].items() if v is not None}
    outer = {k: v for k, v in config.items() if k != "text_config" and v is not None}
    tie_embeddings = outer.get("tie_word_embeddings")
    if not FORMATS[config["model_type"]].is_nested:
        tie_embeddings = text_config.get("tie_word_embeddings") or tie_embeddings
    return {**text_config, **outer, "tie_word_embeddings": bool(tie_embeddings)}


def nested_config(config: dict[str, Any]) -> dict[str, Any]:
    """A config as its family's files have it; the inverse of `flat_config`."""
    vision_format = FORMATS.get(str(config.get("model_type")))
    if vision_format is None or not vision_format.is_nested:
        return config
    outer = {
        key: value
        for key, value in config.items()
        if key in _OUTER_KEYS or key.startswith(_OUTER_PREFIXES)
    }
    text_config = {key: value for key, value in config.items() if key not in outer}
    for key in ("tie_word_embeddings", "torch_dtype"):
        if key in outer:
            text_config[key] = outer[key]
    return {**outer, "text_config": {**text_config, "model_type": vision_format.text_type}}


def readable_alone(shape: Architecture) -> Architecture:
    """The architecture as its folder has it: a decoder without its encoder is a text model."""
    vision_format = FORMATS.get(shape.family)
    if shape.vision is not None or vision_format is None or not vision_format.text_family:
        return shape
    text_fields: dict[str, Any] = {"rope_sections": (), "rope_sections_interleaved": False}
    return dataclasses.replace(shape, family=vision_format.text_family, **text_fields)


def is_text_model_too(family: str) -> bool:
    """Whether models of a family with images are trained on text alone as often as on images."""
    return family in FORMATS and bool(FORMATS[family].text_family)


def file_tensor_name(family: str, name: str) -> str:
    """The name that a family's folders have for a tensor of `tensor_names`."""
    vision_format = FORMATS.get(family)
    if vision_format is None or not vision_format.is_nested:
        return name
    if name.startswith("visual."):
        return f"model.{name}"
    is_text = name.startswith("model.")
    return f"model.language_model.{name.removeprefix('model.')}" if is_text else name


def vision_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `Architecture` fields of the vision encoder and of its positions.

    Raises ValueError on unimplemented or impossible values; the message begins with the key.
    """
    vision_format = FORMATS[config["model_type"]]
    if not isinstance(config["vision_config"], Mapping):
        raise ValueError(f"vision_config must be an object, got {config['vision_config']!r:.60}")
    vision_keys = {k: v for k, v in config["vision_config"].items() if v is not None}
    for key, value in vision_format.required_values.items():
        if vision_keys.get(key, value) != value:
            raise ValueError(
                f"vision_config.{key} is {vision_keys[key]!r}; only {value!r} is known"
            )
    settings = {key: vision_keys.get(key, value) for key, value in vision_format.defaults.items()}
    for key, value in settings.items():
        if key not in ("fullatt_block_indexes", _DEEPSTACK):
            _check_size(key, value)
    theta = (vision_keys.get("rope_parameters") or {}).get("rope_theta", _THETA)
    if theta != _THETA:
        raise ValueError(
            f"vision_config.rope_parameters.rope_theta is {theta}; only {_THETA:g} is known"
        )
    if not vision_format.deepstack and vision_keys.get(_DEEPSTACK):
        raise ValueError(f"vision_config.{_DEEPSTACK}: this family has no deepstack features")
    own_fields = _windows(settings) if vision_format.kind == "qwen2_5" else _positions(settings)
    vision = VisionArchitecture(
        **{field: settings[key] for field, key in _SIZE_KEYS.items()},
        **own_fields,
        kind=vision_format.kind,
        image_token=config.get("image_token_id", vision_format.image_token),
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
    num_deepstack = len(vision.deepstack_layers)
    if num_deepstack > config["num_hidden_layers"]:
        raise ValueError(
            f"vision_config.{_DEEPSTACK} lists {num_deepstack} layers, and each adds to a decoder"
            f" layer, of which there are {config['num_hidden_layers']}"
        )
    return {"vision": vision, "num_deepstack": num_deepstack, **_rope_fields(config, vision_format)}


def _check_size(key: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise ValueError(f"vision_config.{key} must be an integer from 1 on, got {value!r}")


def _windows(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "full_layers": tuple(settings["fullatt_block_indexes"]),
        "window_size": settings["window_size"],
    }


def _positions(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an encoder with learned positions, in which all layers see the whole image."""
    depth, layers = settings["depth"], tuple(settings.get(_DEEPSTACK, ()))
    are_layers = all(isinstance(n, int) and 0 <= n < depth for n in layers)
    if not are_layers or len(set(layers)) < len(layers):
        raise ValueError(
            f"vision_config.{_DEEPSTACK} is {list(layers)}; list layers, from 0 to {depth - 1},"
            " each once"
        )
    side = math.isqrt(settings[_POSITIONS])
    if side**2 != settings[_POSITIONS]:
        raise ValueError(
            f"vision_config.{_POSITIONS} is {settings[_POSITIONS]}; they are a square table, the"
            " square of a number"
        )
    return {
        "full_layers": tuple(range(depth)),
        "window_size": 0,
        "position_side": side,
        "deepstack_layers": layers,
    }


def _rope_fields(config: Mapping[str, Any], vision_format: VisionFormat) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    sections = tuple(rope.get("mrope_section", vision_format.rope_sections))
    are_counts = all(isinstance(n, int) and n >= 0 for n in sections)
    interleaved = vision_format.kind != "qwen2_5"
    if interleaved and (len(sections) != 3 or not are_counts):
        raise ValueError(f"mrope_section is {list(sections)}; it needs three counts of pairs")
    if rope.get("mrope_interleaved", interleaved) != interleaved:
        raise ValueError(f"mrope_interleaved must be {str(interleaved).lower()}")
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if not interleaved and (len(sections) != 3 or 2 * sum(sections) != head_size):
        raise ValueError(
            f"mrope_section is {list(sections)}; its three parts must add up to half a head,"
            f" {head_size // 2}"
        )
    return {"rope_sections": sections, "rope_sections_interleaved": interleaved}


def vision_config_keys(shape: Architecture) -> dict[str, Any]:
    """The config.json keys for which `vision_fields` returns this shape, except the rotary
    settings.
    """
    vision = shape.vision
    if vision is None:
        return {}
    vision_format = FORMATS[shape.family]
    keys: dict[str, Any] = {key: getattr(vision, field) for field, key in _SIZE_KEYS.items()}
    if vision.kind == "qwen2_5":
        keys |= {
            "fullatt_block_indexes": list(vision.full_layers),
            "window_size": vision.window_size,
            "spatial_patch_size": vision.patch_size,
            "hidden_act": vision.act,
            "in_chans": 3,
        }
    else:
        keys |= {_POSITIONS: vision.position_side**2, **vision_format.required_values}
    if vision_format.deepstack:
        keys[_DEEPSTACK] = list(vision.deepstack_layers)
    return {
        "image_token_id": vision.image_token,
        "vision_config": {
            "model_type": vision_format.config_type,
            **keys,
            "out_hidden_size": shape.hidden_size,
        },
    }
