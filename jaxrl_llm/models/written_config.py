"""config.json of a `Shape`: what `families` reads, written."""

import math
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.families import (
    ATTENTION,
    KEYS,
    ROPE,
    YARN,
    Fields,
    class_name,
    shape_from_config,
)
from jaxrl_llm.models.family_table import FAMILIES, LATENT, CheckpointFormatError, Family
from jaxrl_llm.models.shape import Shape


def to_hf_config(
    shape: Shape,
    head: str = "lm",
    dtype: str = "float32",
    source_config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the contents of a config.json; the inverse of `shape_from_config`.

    The head "scalar" becomes a sequence classifier with one label. `dtype` is that of the tensors.
    Keys of `source_config` that depend on none of these (token ids, dropout) are kept.

    Raises:
      CheckpointFormatError: If the family is unknown or the shape is not one it can have.
    """
    if shape.family not in FAMILIES:
        raise CheckpointFormatError(
            f"shape.family is {shape.family!r}; known families: {', '.join(FAMILIES)}"
        )
    row = FAMILIES[shape.family]
    replaced: tuple[str, ...]
    replaced = ("rope_parameters", "torch_dtype", "dtype", "id2label", "label2id", "num_labels")
    replaced += ("quantization_config", "layer_types", "num_local_experts", "num_experts")
    config = {k: v for k, v in (source_config or {}).items() if k not in replaced}
    keys = {**KEYS, **row.keys}
    config |= {key: getattr(shape, field) or None for field, key in keys.items()}
    config |= {key: getattr(shape, f) for f, key in keys.items() if getattr(shape, f) is False}
    config.update(
        model_type=shape.family,
        architectures=[class_name(shape.family, head)],
        # The older of the two spellings, which every reader knows.
        rope_scaling=_written_rope(shape),
        torch_dtype=dtype,
    )
    config |= {"hidden_act": "silu", **row.only, **_written_layers(shape, row)}
    if "partial_rotary_factor" in row.defaults:
        config["partial_rotary_factor"] = (shape.rope_size or shape.head_size) / shape.head_size
    for field, used in {"experts": row.mixture, "latent": LATENT in row.further}.items():
        if bool(getattr(shape, field)) != bool(used):
            raise _impossible(shape, field, "some" if used else None)
    for part in row.further:
        config |= part.write(shape)
    if row.mixture and shape.experts:
        config |= {key: getattr(shape.experts, f) for f, key in row.mixture.keys.items()}
        config |= row.mixture.layers.write(shape)
        if row.mixture.shared == "n_shared_experts":
            config[row.mixture.shared] = shape.experts.shared_size // shape.experts.size
    if head == "scalar":
        config.update(id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
    found = shape_from_config(config, "the config.json of this shape")
    for field in Shape.__annotations__:
        if getattr(found, field) != getattr(shape, field):
            raise _impossible(shape, field, getattr(found, field))
    return config


def _impossible(shape: Shape, field: str, theirs: Any) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"shape.{field} is {getattr(shape, field)}, but {shape.family} models have"
        f" {field}={theirs}; another reader would compute otherwise"
    )


def _written_layers(shape: Shape, row: Family) -> Fields:
    config: Fields = {}
    if not row.attention:
        return config
    types = ["full_attention"] * shape.num_layers
    for kind, keys in ATTENTION.items():
        for field, key in keys.items():
            sizes = [getattr(layer, field) for layer in shape.kinds]
            types = [kind if size else old for size, old in zip(sizes, types, strict=True)]
            if key in row.defaults:
                config[key] = max(sizes) or None
    return {**config, "layer_types": types} if row.lists_layers else config


def _written_rope(shape: Shape) -> Fields | None:
    scaling = shape.rope_scaling
    sections: Fields = {"mrope_section": list(shape.rope_sections)} if shape.rope_sections else {}
    if scaling.factor == 1.0:
        return {"type": "mrope", **sections} if sections else None
    rope: Fields = {"rope_type": scaling.kind, **sections}
    rope |= {key: getattr(scaling, field) for field, key in ROPE[scaling.kind].items()}
    if scaling.kind == "yarn":
        rope |= {key: getattr(scaling, field) for field, key in YARN.items()}
        rope["attention_factor"] = scaling.magnitude
        if shape.latent and shape.query_scale:
            growth = math.sqrt(shape.query_scale * shape.head_size**0.5)
            rope["mscale_all_dim"] = round((growth - 1.0) / (0.1 * math.log(scaling.factor)), 9)
    return rope
