"""config.json of the supported model families, read as a `Shape` and written."""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.models.family_table import (
    FAMILIES,
    LATENT,
    CheckpointFormatError,
    Family,
    Mixture,
    rope_type,
    yarn_growth,
)
from jaxrl_llm.models.shape import Experts, Layer, RopeScaling, Shape

Config = Mapping[str, Any]
Fields = dict[str, Any]

HEADS: Mapping[str, str] = {"lm": "ForCausalLM", "scalar": "ForSequenceClassification"}

# Keys that change the arithmetic, and the only value each may have.
_FIXED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
}
# Fields of a shape, and their keys in config.json: those that must be there, and all.
_REQUIRED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "mlp_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
_KEYS = {
    **_REQUIRED,
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "rope_theta": "rope_theta",
}
# Fields of a layer by its type, and their keys.
_ATTENTION: Mapping[str, Mapping[str, str]] = {
    "full_attention": {},
    "sliding_attention": {"window": "sliding_window"},
    "chunked_attention": {"chunk": "attention_chunk_size"},
}
_ORIGINAL = {"original_max_positions": "original_max_position_embeddings"}
# By type of scaling: fields and keys that must be there.
_ROPE = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        **_ORIGINAL,
    },
    "yarn": {"factor": "factor", **_ORIGINAL},
}
_YARN = {"fast_turns": "beta_fast", "slow_turns": "beta_slow", "whole_dims": "truncate"}


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointFormatError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointFormatError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def read_config(folder: str | pathlib.Path) -> dict[str, Any]:
    """Returns the contents of a model folder's config.json.

    Raises:
      CheckpointFormatError: If there is no such folder or no readable config.json in it.
    """
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        name = pathlib.PurePath(folder).name
        raise CheckpointFormatError(
            f"{folder}: no such folder; give a local folder with config.json and safetensors. A"
            " model is not downloaded by its name on Hugging Face:"
            f" `hf download {folder} --local-dir {name}` makes such a folder"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointFormatError(f"{folder}: has no config.json; is it a model folder?")
    config = _read_json(folder / "config.json")
    if "model_type" not in config and "trainer" in config:
        raise CheckpointFormatError(
            f"{folder}: the folder of a run, not of a model; give it as --workdir, or make a"
            f" model's folder of it: launch/export.py --workdir={folder} --out=FOLDER"
        )
    return config


def eos_token_ids(folder: str | pathlib.Path) -> tuple[int, ...]:
    """Returns the tokens that end a response: of generation_config.json, else config.json, or ().

    Raises:
      CheckpointFormatError: If the folder or a readable config.json is missing.
    """
    generation = pathlib.Path(folder) / "generation_config.json"
    configs = [read_config(folder)]
    if generation.is_file():
        configs.insert(0, _read_json(generation))
    for config in configs:
        ids = config.get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def architecture(config: Mapping[str, Any], source: str = "config.json") -> tuple[str, str]:
    """Returns (family, head) of a model: ("llama", "lm"), ("qwen3", "scalar"), ...

    Raises:
      CheckpointFormatError: If the model is of no known family, or has a head of another kind;
        begins with `source`.
    """
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        raise CheckpointFormatError(
            f"{source}: model_type is {family!r}; known families: {', '.join(FAMILIES)}"
        )
    known = {_class_name(family, head): head for head in HEADS}
    names = config.get("architectures") or []
    for name in names:
        if name in known:
            return family, known[name]
    raise CheckpointFormatError(
        f"{source}: architectures is {names}; known for {family}: {', '.join(known)}"
    )


def _class_name(family: str, head: str) -> str:
    row = FAMILIES[family]
    return ((head == "scalar" and row.classifier) or row.model_class) + HEADS[head]


def shape_from_config(config: Mapping[str, Any], source: str = "config.json") -> Shape:
    """Returns the shape that the contents of a config.json describe.

    Rotary settings are read as `rope_theta` with `rope_scaling`, and as `rope_parameters`.

    Raises:
      CheckpointFormatError: On an unknown family, a missing key, or an option that would
        change the arithmetic in a way that is not implemented; begins with `source`.
    """
    name, _ = architecture(config, source)
    row = FAMILIES[name]
    config = {k: v for k, v in {**row.defaults, **config}.items() if v is not None}
    if row.mixture and "num_local_experts" in config:
        config.setdefault(row.mixture.keys["num"], config["num_local_experts"])
    keys = {**_KEYS, **row.keys}
    _check_keys(config, name, keys, source)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    config.setdefault("head_dim", hidden // heads)
    config.setdefault("num_key_value_heads", heads)
    fields: Fields = {
        "family": name,
        "norm_eps": 1e-6,
        **{field: config[key] for field, key in keys.items() if key in config},
        **_rope(config, row, source),
        **row.traits,
    }
    fields.setdefault("tie_embeddings", False)
    if row.mixture:
        fields["experts"] = _experts(config, row.mixture)
    fields["layers"] = _layers(config, row, source)
    try:
        for part in row.further:
            fields |= part.read(config)
    except KeyError as error:
        raise CheckpointFormatError(f"{source}: lacks {error.args[0]}") from error
    shape = Shape(**{field: _as_declared(field, value) for field, value in fields.items()})
    if heads % shape.num_kv_heads:
        raise CheckpointFormatError(
            f"{source}: num_key_value_heads={shape.num_kv_heads} does not divide"
            f" num_attention_heads={heads}"
        )
    if (shape.rope_size or shape.head_size) % 2:
        raise CheckpointFormatError(
            f"{source}: heads of {shape.head_size}; rotary embeddings need an even size"
        )
    return shape


def _check_keys(config: Config, name: str, keys: Mapping[str, str], source: str) -> None:
    row = FAMILIES[name]
    required = [keys[field] for field in _REQUIRED]
    if row.mixture:
        required += [row.mixture.keys[field] for field in ("num", "per_token", "size")]
    missing = [key for key in required if not isinstance(config.get(key), int)]
    if missing:
        raise CheckpointFormatError(f"{source}: {', '.join(missing)} missing or no integer")
    free = {*row.keys.values(), *row.defaults}
    for key, value in {**{k: v for k, v in _FIXED.items() if k not in free}, **row.only}.items():
        if config.get(key, value) != value:
            raise CheckpointFormatError(
                f"{source}: {key} is {config[key]!r}; only {value!r} is implemented for {name}"
            )
    if stored := config.get("quantization_config"):
        raise CheckpointFormatError(
            f"{source}: quantization_config is {stored}; quantized weights are not read, use a"
            " folder of bfloat16 or float32 weights"
        )


def _experts(config: Config, mixture: Mixture) -> Experts:
    fields = {field: config[key] for field, key in mixture.keys.items() if key in config}
    shared = {"": 0, "one": 1}.get(mixture.shared)
    if shared is None:
        shared = config.get(mixture.shared, 0)
    return Experts(**{**fields, **mixture.traits}, shared_size=shared * fields["size"])


def _layers(config: Config, row: Family, source: str) -> tuple[Layer, ...]:
    numbers = range(config["num_hidden_layers"])
    attention = row.attention or (lambda config, number: "full_attention")
    types: Sequence[str] = [attention(config, number) for number in numbers]
    known = {t for t, keys in _ATTENTION.items() if set(keys.values()) <= config.keys()}
    if not row.attention or not row.lists_layers:
        known = set(types)
    types = config.get("layer_types", types)
    if set(types) - known or len(types) != len(numbers):
        if len(types) == len(numbers) or set(types) - known:
            what = f"{sorted(set(types))}; only {', '.join(sorted(known))} is implemented"
        else:
            what = f"of {len(types)} layers, num_hidden_layers is {len(numbers)}"
        raise CheckpointFormatError(f"{source}: layer_types is {what}")
    sparse = row.mixture.layers.read(config) if row.mixture else lambda number: False
    layers = tuple(
        Layer(
            **{field: config[key] for field, key in _ATTENTION[types[number]].items()},
            rope=row.rope(config, number, types[number]),
            experts=sparse(number),
        )
        for number in numbers
    )
    return () if set(layers) <= {Layer()} else layers


def _rope(config: Config, row: Family, source: str) -> Fields:
    """Returns the fields of a shape that are about rotary embeddings."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    fields: Fields = {}
    if "local_rope_theta" in row.keys and "full_attention" in rope:
        local = rope.get("sliding_attention") or {}
        if rope_type(local) != "default":
            raise CheckpointFormatError(f"{source}: {key}.sliding_attention must not be scaled")
        if "rope_theta" in local:
            fields["local_rope_theta"] = local["rope_theta"]
        rope = rope["full_attention"]
    fields["rope_theta"] = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if part != 1.0:
        if "partial_rotary_factor" not in row.defaults:
            raise CheckpointFormatError(f"{source}: {key}.partial_rotary_factor must be 1")
        fields["rope_size"] = int(config["head_dim"] * part)
    kind = rope_type(rope)
    if kind == "default" and not any(isinstance(value, Mapping) for value in rope.values()):
        return fields
    if kind not in _ROPE:
        raise CheckpointFormatError(
            f"{source}: {key} is {dict(rope)}; rope_type must be 'default' or"
            f" {', '.join(map(repr, _ROPE))}, the same for all layers"
        )
    missing = [name for name in _ROPE[kind].values() if name not in rope]
    if missing:
        raise CheckpointFormatError(f"{source}: {key} of type {kind} lacks {', '.join(missing)}")
    found = {field: rope[name] for field, name in _ROPE[kind].items()}
    if kind == "yarn":
        found |= {f: rope[name] for f, name in _YARN.items() if rope.get(name) is not None}
        found["magnitude"] = _yarn_magnitude(rope)
    types = RopeScaling.__annotations__
    found = {f: types[f](value) for f, value in found.items()}
    return {**fields, "rope_scaling": RopeScaling(**{**found, "kind": kind})}


def _yarn_magnitude(rope: Config) -> float:
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    of_rotated, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if of_rotated and of_all:
        return yarn_growth(rope["factor"], of_rotated) / yarn_growth(rope["factor"], of_all)
    return yarn_growth(rope["factor"], 1.0)


def _as_declared(field: str, value: Any) -> Any:
    kind = Shape.__annotations__[field]
    return kind(value) if kind in (int, float, bool) else value


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
    replaced: tuple[str, ...] = (
        "rope_parameters",
        "torch_dtype",
        "dtype",
        "id2label",
        "label2id",
        "num_labels",
    )
    replaced += ("quantization_config", "layer_types", "num_local_experts", "num_experts")
    config = {k: v for k, v in (source_config or {}).items() if k not in replaced}
    keys = {**_KEYS, **row.keys}
    config |= {key: getattr(shape, field) or None for field, key in keys.items()}
    config |= {key: getattr(shape, f) for f, key in keys.items() if getattr(shape, f) is False}
    config.update(
        model_type=shape.family,
        architectures=[_class_name(shape.family, head)],
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
    for kind, keys in _ATTENTION.items():
        for field, key in keys.items():
            sizes = [getattr(layer, field) for layer in shape.kinds]
            types = [kind if size else old for size, old in zip(sizes, types, strict=True)]
            if key in row.defaults:
                config[key] = max(sizes) or None
    return {**config, "layer_types": types} if row.lists_layers else config


def _written_rope(shape: Shape) -> Fields | None:
    scaling = shape.rope_scaling
    if scaling.factor == 1.0:
        return None
    rope: Fields = {"rope_type": scaling.kind}
    rope |= {key: getattr(scaling, field) for field, key in _ROPE[scaling.kind].items()}
    if scaling.kind == "yarn":
        rope |= {key: getattr(scaling, field) for field, key in _YARN.items()}
        rope["attention_factor"] = scaling.magnitude
        if shape.latent and shape.query_scale:
            growth = math.sqrt(shape.query_scale * shape.head_size**0.5)
            rope["mscale_all_dim"] = round((growth - 1.0) / (0.1 * math.log(scaling.factor)), 9)
    return rope
