"""Reads the config.json of the supported model families into an `Architecture`.

`config_writer` writes it back.
"""

import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl_llm.models.architecture import Architecture, Experts, LayerType, RopeScaling
from jaxrl_llm.models.hf import config_schema, contradictions, safetensors_file, vision_config
from jaxrl_llm.models.hf.families import (
    FAMILIES,
    MODEL_TYPE_ALIASES,
    TEXT_MODEL_TYPES,
    rope_type,
    yarn_mscale,
)
from jaxrl_llm.models.hf.family_format import CheckpointFormatError, ModelFamily, MoEFormat
from jaxrl_llm.storage import model_folder
from jaxrl_llm.storage.model_folder import PathLike

Config = Mapping[str, Any]
Fields = dict[str, Any]

HEAD_CLASS_SUFFIXES: Mapping[str, str] = {
    "lm": "ForCausalLM",
    "scalar": "ForSequenceClassification",
}

_CONFIG_FILE = "config.json"
_QUANTIZATION_METHODS = ("mxfp4", "fp8")  # those that `quantized_file` reads
# Keys that change the arithmetic, with the only implemented value of each.
_REQUIRED_VALUES: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
}
# Fields of a `Architecture` and their keys in config.json: the required ones, then all.
_REQUIRED_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "mlp_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
ARCHITECTURE_KEYS = {
    **_REQUIRED_KEYS,
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "rope_theta": "rope_theta",
}
# Fields of a `LayerType` and their keys, by attention type.
ATTENTION_KEYS: Mapping[str, Mapping[str, str]] = {
    "full_attention": {},
    "sliding_attention": {"window": "sliding_window"},
    "chunked_attention": {"chunk": "attention_chunk_size"},
    "indexed_attention": {"top_keys": "index_topk"},
}
_ORIGINAL_CONTEXT = {"original_max_positions": "original_max_position_embeddings"}
# Required fields of `RopeScaling` and their keys, by scaling type.
ROPE_KEYS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        **_ORIGINAL_CONTEXT,
    },
    "yarn": {"factor": "factor", **_ORIGINAL_CONTEXT},
    "longrope": {
        "short_factors": "short_factor",
        "long_factors": "long_factor",
        **_ORIGINAL_CONTEXT,
    },
}
YARN_KEYS = {"fast_turns": "beta_fast", "slow_turns": "beta_slow", "whole_dims": "truncate"}


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file; CheckpointFormatError if the file does not hold one."""
    try:
        contents = json.loads(path.read_text(), object_pairs_hook=safetensors_file.unique_keys)
    except (OSError, ValueError, RecursionError) as error:
        too_deep = "brackets are nested too deep; copy the file again"
        problem = too_deep if isinstance(error, RecursionError) else error
        raise CheckpointFormatError(f"{path}: cannot be read as JSON: {problem}") from error
    if not isinstance(contents, dict):
        raise CheckpointFormatError(
            f"{path}: expected a JSON object, got {type(contents).__name__}"
        )
    return contents


def read_config(folder: PathLike) -> dict[str, Any]:
    """The contents of a model folder's config.json, reduced to the text model if only that is read.

    The folder may have any address (`storage/model_folder.py`).

    Raises:
      CheckpointFormatError: If there is no such folder or no readable config.json in it.
    """
    address, folder = folder, model_folder.local_folder(folder)
    if not model_folder.may_exist(address):
        raise CheckpointFormatError(
            f"{folder}: no such folder; give a folder with config.json and safetensors, or a name"
            " of the hub: org/name, hf://org/name@revision"
        )
    if "config.json" not in model_folder.file_names(address):
        hint = model_folder.offline_hint(address)
        raise CheckpointFormatError(f"{address}: has no config.json; is it a model folder?{hint}")
    config = read_json(folder / "config.json")
    if "model_type" not in config and "trainer" in config:
        raise CheckpointFormatError(
            f"{folder}: a run folder, not a model folder; give it as --workdir, or make a"
            f" model's folder of it: launch/export.py --workdir={folder} --out=FOLDER"
        )
    if problem := next(_text_config_contradictions(config), ""):
        raise CheckpointFormatError(f"{folder / 'config.json'}: {problem}")
    config = vision_config.flat_config(config)
    return _text_only_config(config) if _reads_text_alone(config) else config


def _reads_text_alone(config: Config) -> bool:
    """Whether only the text model of a multimodal config is read."""
    model_type = str(config.get("model_type"))
    has_encoder = model_type in vision_config.FORMATS and "vision_config" in config
    return model_type in TEXT_MODEL_TYPES and not has_encoder


def _text_config_contradictions(config: Config) -> Iterator[str]:
    """Contradictions in a multimodal config that reading its text_config alone would hide."""
    if config.get("model_type") in vision_config.FORMATS:
        yield from contradictions.text_config_contradictions(config, config_schema.NUMERIC_KEYS)
    text = config.get("text_config")
    family = TEXT_MODEL_TYPES.get(str(config.get("model_type")))
    if family and isinstance(text, Mapping) and not any(config_schema.schema_violations(text)):
        yield from contradictions.config_contradictions({**text, "model_type": family})


def _text_only_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the text model inside a multimodal config."""
    import transformers  # slow import; its classes know the defaults of keys left out here

    family = TEXT_MODEL_TYPES[config["model_type"]]
    text_config = {k: v for k, v in config.get("text_config", {}).items() if k != "model_type"}
    text = transformers.AutoConfig.for_model(family, **text_config).to_dict()
    outer_keys = {k: v for k, v in config.items() if k.endswith(("_token_id", "dtype", "_config"))}
    kept_keys = {k: v for k, v in outer_keys.items() if k not in ("text_config", "vision_config")}
    class_names = config.get("architectures") or []
    causal_classes = [
        hf_class_name(family, "lm") if name.endswith("ForConditionalGeneration") else name
        for name in class_names
    ]
    return {**text, **kept_keys, "architectures": causal_classes, "model_type": family}


def eos_token_ids(folder: PathLike) -> tuple[int, ...]:
    """The token ids that end a response: from generation_config.json, else config.json, else ().

    Raises:
      CheckpointFormatError: If the folder or a readable config.json is missing, or an end token is
        outside the vocabulary.
    """
    config = read_config(folder)
    local = model_folder.local_folder(folder)
    for name, values in (
        ("generation_config.json", generation_config(folder)),
        (_CONFIG_FILE, config),
    ):
        if (ids := values.get("eos_token_id")) is not None:
            location, vocab_size = f"{local / name}: eos_token_id", config.get("vocab_size")
            return _validated_token_ids(
                ids, location, vocab_size if isinstance(vocab_size, int) else 2**31
            )
    return ()


def generation_config(folder: PathLike) -> dict[str, Any]:
    """The contents of a model folder's generation_config.json; empty without one."""
    path = model_folder.local_folder(folder) / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def _validated_token_ids(ids: Any, location: str, vocab_size: int) -> tuple[int, ...]:
    tokens = tuple(ids) if isinstance(ids, list) else (ids,)
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool):
            raise CheckpointFormatError(
                f"{location} is {ids!r:.80}; write a token id, or a list of token ids"
            )
        if not 0 <= token < vocab_size:
            raise CheckpointFormatError(
                f"{location}: {token} is not in the vocabulary, tokens 0 to {vocab_size - 1};"
                " leave it out or correct it"
            )
    return tokens


def family_name(config: Mapping[str, Any]) -> str:
    """The row of `FAMILIES` that a config's model_type names, known or not."""
    model_type = str(config.get("model_type"))
    return MODEL_TYPE_ALIASES.get(model_type, model_type)


def family_and_head(config: Mapping[str, Any], source: str = "config.json") -> tuple[str, str]:
    """The family and head of a model: ("llama", "lm"), ("qwen3", "scalar"), ...

    Raises:
      CheckpointFormatError: If the family is unknown or the head is of another kind; the message
        begins with `source`.
    """
    family = family_name(config)
    if family not in FAMILIES:
        raise CheckpointFormatError(
            f"{source}: model_type is {family!r}; known families: {', '.join(FAMILIES)}"
        )
    heads_by_class = {hf_class_name(family, head): head for head in HEAD_CLASS_SUFFIXES}
    names = config.get("architectures") or []
    for name in names:
        if name in heads_by_class:
            return family, heads_by_class[name]
    raise CheckpointFormatError(
        f"{source}: architectures is {names}; known for {family}: {', '.join(heads_by_class)}"
    )


def hf_class_name(family: str, head: str) -> str:
    """The transformers class of a family and head, such as "LlamaForCausalLM"."""
    row = FAMILIES[family]
    if head == "lm" and row.causal_lm_class:
        return row.causal_lm_class
    return ((head == "scalar" and row.classifier_class) or row.model_class) + HEAD_CLASS_SUFFIXES[
        head
    ]


def architecture_from_config(
    config: Mapping[str, Any], source: str = "config.json"
) -> Architecture:
    """The `Architecture` described by the contents of a config.json.

    Rotary settings may be `rope_theta` with `rope_scaling`, or `rope_parameters`.

    Raises:
      CheckpointFormatError: On an unknown family, a missing key, or an option whose
        arithmetic is not implemented; the message begins with `source`.
    """
    if invalid := list(config_schema.schema_violations(config)):
        raise CheckpointFormatError(f"{source}: {'; '.join(invalid)}")
    family, _ = family_and_head(config, source)
    row, original_config = FAMILIES[family], config
    config = {k: v for k, v in {**row.defaults, **config}.items() if v is not None}
    if row.moe and "num_local_experts" in config:
        config.setdefault(row.moe.config_keys["num"], config["num_local_experts"])
    keys = {**ARCHITECTURE_KEYS, **row.config_keys}
    _check_required_keys(config, family, keys, source)
    num_heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
    config.setdefault("head_dim", hidden_size // num_heads)
    config.setdefault("num_key_value_heads", num_heads)
    fields: Fields = {
        "family": family,
        "norm_eps": 1e-6,
        **{field: config[key] for field, key in keys.items() if key in config},
        **_rope_fields(config, row, source),
        **row.fixed_fields,
    }
    fields.setdefault("tie_embeddings", False)
    if row.moe:
        fields["experts"] = _experts_spec(config, row.moe, source)
    fields["layers"] = _layer_specs(config, row, source)
    try:
        for codec in row.codecs:
            fields |= codec.read(config)
    except KeyError as error:
        raise CheckpointFormatError(f"{source}: lacks {error.args[0]}") from error
    except ValueError as error:
        raise CheckpointFormatError(f"{source}: {error}") from error
    shape = Architecture(
        **{field: _cast_to_field_type(field, value) for field, value in fields.items()}
    )
    if num_heads % shape.num_kv_heads:
        raise CheckpointFormatError(
            f"{source}: num_key_value_heads={shape.num_kv_heads} does not divide"
            f" num_attention_heads={num_heads}"
        )
    if (shape.rope_size or shape.head_size) % 2:
        raise CheckpointFormatError(
            f"{source}: heads of {shape.head_size}; rotary embeddings need an even size"
        )
    if conflicts := list(contradictions.config_contradictions(original_config)):
        raise CheckpointFormatError(f"{source}: {'; '.join(conflicts)}")
    return shape


def _check_required_keys(config: Config, family: str, keys: Mapping[str, str], source: str) -> None:
    row = FAMILIES[family]
    required = [keys[field] for field in _REQUIRED_KEYS]
    if row.moe:
        required += [row.moe.config_keys[field] for field in ("num", "per_token", "size")]
    missing = [key for key in required if not isinstance(config.get(key), int)]
    if missing:
        raise CheckpointFormatError(f"{source}: {', '.join(missing)} missing or no integer")
    overridable = {*row.config_keys.values(), *row.defaults}
    fixed = {k: v for k, v in _REQUIRED_VALUES.items() if k not in overridable}
    for key, value in {**fixed, **row.required_values}.items():
        if config.get(key, value) != value:
            raise CheckpointFormatError(
                f"{source}: {key} is {config[key]!r}; only {value!r} is implemented for {family}"
            )
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if quantization and method not in _QUANTIZATION_METHODS:
        raise CheckpointFormatError(
            f"{source}: quantization_config is {quantization}; only"
            f" {' and '.join(_QUANTIZATION_METHODS)} are read, use a folder of bfloat16 or float32"
            " weights"
        )


def _experts_spec(config: Config, mixture: MoEFormat, source: str) -> Experts:
    fields = {field: config[key] for field, key in mixture.config_keys.items() if key in config}
    num_shared = {"": 0, "one": 1}.get(mixture.shared_experts)
    if num_shared is None:
        num_shared = config.get(mixture.shared_experts, 0)
    fields.setdefault("shared_size", num_shared * fields["size"])
    experts = Experts(**{**fields, **mixture.fixed_fields})
    reachable = experts.num // experts.groups * experts.top_groups
    if (
        experts.num % experts.groups
        or experts.top_groups > experts.groups
        or experts.per_token > reachable
    ):
        raise CheckpointFormatError(
            f"{source}: a token cannot visit {experts.per_token} of {experts.num} experts in"
            f" {experts.top_groups} of {experts.groups} equal groups"
        )
    return experts


def _layer_specs(config: Config, row: ModelFamily, source: str) -> tuple[LayerType, ...]:
    layer_indices = range(config["num_hidden_layers"])
    if 0 < len(config.get("no_rope_layers", ())) != len(layer_indices):
        num_listed = len(config["no_rope_layers"])
        problem = f"of {num_listed} layers, num_hidden_layers is {len(layer_indices)}"
        raise CheckpointFormatError(f"{source}: no_rope_layers is {problem}")
    attention_type = row.attention_type or (lambda config, layer: "full_attention")
    layer_types: Sequence[str] = [attention_type(config, layer) for layer in layer_indices]
    implemented = {t for t, keys in ATTENTION_KEYS.items() if set(keys.values()) <= config.keys()}
    implemented |= row.mixers.keys()
    if not row.attention_type or not row.has_layer_types:
        implemented = set(layer_types)
    layer_types = config.get("layer_types", layer_types)
    if set(layer_types) - implemented or len(layer_types) != len(layer_indices):
        if len(layer_types) == len(layer_indices) or set(layer_types) - implemented:
            problem = (
                f"{sorted(set(layer_types))}; only {', '.join(sorted(implemented))} is implemented"
            )
        else:
            problem = f"of {len(layer_types)} layers, num_hidden_layers is {len(layer_indices)}"
        raise CheckpointFormatError(f"{source}: layer_types is {problem}")
    has_experts = row.moe.sparse_layers.read(config) if row.moe else lambda layer: False
    layers = tuple(
        LayerType(
            **{f: config[key] for f, key in ATTENTION_KEYS.get(layer_types[layer], {}).items()},
            mixer=row.mixers.get(layer_types[layer], "attention"),
            rope=row.rope_kind(config, layer, layer_types[layer]),
            experts=has_experts(layer),
        )
        for layer in layer_indices
    )
    return () if set(layers) <= {LayerType()} else layers


def _rope_fields(config: Config, row: ModelFamily, source: str) -> Fields:
    """The fields of a `Architecture` for rotary embeddings."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    fields: Fields = {}
    if "local_rope_theta" in row.config_keys and "full_attention" in rope:
        local = rope.get("sliding_attention") or {}
        if rope_type(local) != "default":
            raise CheckpointFormatError(f"{source}: {key}.sliding_attention must not be scaled")
        if "rope_theta" in local:
            fields["local_rope_theta"] = local["rope_theta"]
        rope = rope["full_attention"]
    fields["rope_theta"] = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    rotary_fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if rotary_fraction != 1.0:
        if "partial_rotary_factor" not in row.defaults:
            raise CheckpointFormatError(f"{source}: {key}.partial_rotary_factor must be 1")
        fields["rope_size"] = int(config["head_dim"] * rotary_fraction)
    kind = rope_type(rope)
    if kind == "mrope" and "vision_config" in config:
        kind = "default"  # `vision_config` reads its sections
    if kind == "default" and not any(isinstance(value, Mapping) for value in rope.values()):
        return fields
    if kind not in ROPE_KEYS:
        raise CheckpointFormatError(
            f"{source}: {key} is {dict(rope)}; rope_type must be 'default' or"
            f" {', '.join(map(repr, ROPE_KEYS))}, the same for all layers"
        )
    if kind == "longrope":  # older files have it beside the other keys
        rope = {k: config[k] for k in _ORIGINAL_CONTEXT.values() if k in config} | dict(rope)
    missing = [name for name in ROPE_KEYS[kind].values() if name not in rope]
    if missing:
        raise CheckpointFormatError(f"{source}: {key} of type {kind} lacks {', '.join(missing)}")
    scaling = {field: rope[name] for field, name in ROPE_KEYS[kind].items()}
    if kind == "yarn":
        scaling |= {f: rope[name] for f, name in YARN_KEYS.items() if rope.get(name) is not None}
        scaling["magnitude"] = _yarn_magnitude(rope)
    if kind == "longrope":
        num_pairs = (fields.get("rope_size") or config["head_dim"]) // 2
        scaling |= _longrope_fields(rope, config, f"{source}: {key}", num_pairs)
    types = RopeScaling.__annotations__
    scaling = {f: types[f](value) for f, value in scaling.items()}
    return {**fields, "rope_scaling": RopeScaling(**{**scaling, "kind": kind})}


def _yarn_magnitude(rope: Config) -> float:
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_mscale(rope["factor"], mscale) / yarn_mscale(rope["factor"], mscale_all_dim)
    return yarn_mscale(rope["factor"], 1.0)


def _longrope_fields(rope: Config, config: Config, location: str, num_pairs: int) -> Fields:
    """The factor and magnitude of longrope, whose files may leave both to their readers."""
    for name in ("short_factor", "long_factor"):
        if len(rope[name]) != num_pairs:
            raise CheckpointFormatError(
                f"{location}.{name} has {len(rope[name])} numbers; each of the {num_pairs} rotated"
                " pairs of a head needs one"
            )
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or config.get("max_position_embeddings", original) / original
    magnitude = rope.get("attention_factor")
    if magnitude is None:
        is_longer = factor > 1 < original
        magnitude = math.sqrt(1.0 + math.log(factor) / math.log(original)) if is_longer else 1.0
    return {"factor": factor, "magnitude": magnitude}


def _cast_to_field_type(field: str, value: Any) -> Any:
    kind = Architecture.__annotations__[field]
    return kind(value) if kind in (int, float, bool) else value
