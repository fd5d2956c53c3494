"""config.json of the supported model families, read as a `Shape`; `written_config` writes it."""

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl_llm.models import config_values, contradictions, safetensors_file, vision_config
from jaxrl_llm.models.family_table import (
    FAMILIES,
    TEXT_OF,
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

_CONFIG = "config.json"
_QUANTIZED = ("mxfp4", "fp8")  # what `quantized_file` reads
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
KEYS = {
    **_REQUIRED,
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "rope_theta": "rope_theta",
}
# Fields of a layer by its type, and their keys.
ATTENTION: Mapping[str, Mapping[str, str]] = {
    "full_attention": {},
    "sliding_attention": {"window": "sliding_window"},
    "chunked_attention": {"chunk": "attention_chunk_size"},
}
_ORIGINAL = {"original_max_positions": "original_max_position_embeddings"}
# By type of scaling: fields and keys that must be there.
ROPE = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        **_ORIGINAL,
    },
    "yarn": {"factor": "factor", **_ORIGINAL},
}
YARN = {"fast_turns": "beta_fast", "slow_turns": "beta_slow", "whole_dims": "truncate"}


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file; CheckpointFormatError if there is none."""
    try:
        found = json.loads(path.read_text(), object_pairs_hook=safetensors_file.unique_keys)
    except (OSError, ValueError, RecursionError) as error:
        deep = "brackets are nested too deep; copy the file again"
        problem = deep if isinstance(error, RecursionError) else error
        raise CheckpointFormatError(f"{path}: cannot be read as JSON: {problem}") from error
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
        raise CheckpointFormatError(
            f"{folder}: no such folder; give a local folder with config.json and safetensors. A"
            " model is not downloaded by its name on Hugging Face:"
            f" `hf download {folder} --local-dir {folder.name}` makes such a folder"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointFormatError(f"{folder}: has no config.json; is it a model folder?")
    config = read_json(folder / "config.json")
    if "model_type" not in config and "trainer" in config:
        raise CheckpointFormatError(
            f"{folder}: the folder of a run, not of a model; give it as --workdir, or make a"
            f" model's folder of it: launch/export.py --workdir={folder} --out=FOLDER"
        )
    if problem := next(_between_parts(config), ""):
        raise CheckpointFormatError(f"{folder / 'config.json'}: {problem}")
    config = vision_config.flat(config)
    return _of_text(config) if config.get("model_type") in TEXT_OF else config


def _between_parts(config: Config) -> Iterator[str]:
    """Yields contradictions of a config of text and images that its text model would hide."""
    if config.get("model_type") in vision_config.TYPES:
        yield from contradictions.of_text_and_images(config, config_values.NUMBERS)
    text = config.get("text_config")
    family = TEXT_OF.get(str(config.get("model_type")))
    if family and isinstance(text, Mapping) and not any(config_values.problems(text)):
        yield from contradictions.in_config({**text, "model_type": family})


def _of_text(config: dict[str, Any]) -> dict[str, Any]:
    """Returns what a config of text and images says of the text model alone."""
    import transformers  # takes seconds; its classes know the keys that such a config leaves out

    family = TEXT_OF[config["model_type"]]
    given = {k: v for k, v in config.get("text_config", {}).items() if k != "model_type"}
    text = transformers.AutoConfig.for_model(family, **given).to_dict()
    outer = {k: v for k, v in config.items() if k.endswith(("_token_id", "dtype", "_config"))}
    kept = {k: v for k, v in outer.items() if k not in ("text_config", "vision_config")}
    classes = config.get("architectures") or []
    causal = [name.replace("ForConditionalGeneration", "ForCausalLM") for name in classes]
    return {**text, **kept, "architectures": causal, "model_type": family}


def eos_token_ids(folder: str | pathlib.Path) -> tuple[int, ...]:
    """Returns the tokens that end a response: of generation_config.json, else config.json, or ().

    Raises:
      CheckpointFormatError: If the folder or a readable config.json is missing, or an end token is
        no token of the vocabulary.
    """
    folder = pathlib.Path(folder)
    config = read_config(folder)
    for name, values in (("generation_config.json", generation_config(folder)), (_CONFIG, config)):
        if (ids := values.get("eos_token_id")) is not None:
            where, vocab_size = f"{folder / name}: eos_token_id", config.get("vocab_size")
            return _checked_tokens(ids, where, vocab_size if isinstance(vocab_size, int) else 2**31)
    return ()


def generation_config(folder: str | pathlib.Path) -> dict[str, Any]:
    """The contents of a model folder's generation_config.json; empty without one."""
    path = pathlib.Path(folder) / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def _checked_tokens(ids: Any, where: str, vocab_size: int) -> tuple[int, ...]:
    tokens = tuple(ids) if isinstance(ids, list) else (ids,)
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool):
            raise CheckpointFormatError(
                f"{where} is {ids!r:.80}; write a token id, or a list of token ids"
            )
        if not 0 <= token < vocab_size:
            raise CheckpointFormatError(
                f"{where}: {token} is not in the vocabulary, tokens 0 to {vocab_size - 1}; leave it"
                " out or correct it"
            )
    return tokens


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
    known = {class_name(family, head): head for head in HEADS}
    names = config.get("architectures") or []
    for name in names:
        if name in known:
            return family, known[name]
    raise CheckpointFormatError(
        f"{source}: architectures is {names}; known for {family}: {', '.join(known)}"
    )


def class_name(family: str, head: str) -> str:
    row = FAMILIES[family]
    if head == "lm" and row.language_model:
        return row.language_model
    return ((head == "scalar" and row.classifier) or row.model_class) + HEADS[head]


def shape_from_config(config: Mapping[str, Any], source: str = "config.json") -> Shape:
    """Returns the shape that the contents of a config.json describe.

    Rotary settings are read as `rope_theta` with `rope_scaling`, and as `rope_parameters`.

    Raises:
      CheckpointFormatError: On an unknown family, a missing key, or an option that would
        change the arithmetic in a way that is not implemented; begins with `source`.
    """
    if wrong := list(config_values.problems(config)):
        raise CheckpointFormatError(f"{source}: {'; '.join(wrong)}")
    name, _ = architecture(config, source)
    row, as_written = FAMILIES[name], config
    config = {k: v for k, v in {**row.defaults, **config}.items() if v is not None}
    if row.mixture and "num_local_experts" in config:
        config.setdefault(row.mixture.keys["num"], config["num_local_experts"])
    keys = {**KEYS, **row.keys}
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
        fields["experts"] = _experts(config, row.mixture, source)
    fields["layers"] = _layers(config, row, source)
    try:
        for part in row.further:
            fields |= part.read(config)
    except KeyError as error:
        raise CheckpointFormatError(f"{source}: lacks {error.args[0]}") from error
    except ValueError as error:
        raise CheckpointFormatError(f"{source}: {error}") from error
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
    if found := list(contradictions.in_config(as_written)):
        raise CheckpointFormatError(f"{source}: {'; '.join(found)}")
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
    stored = config.get("quantization_config")
    method = stored.get("quant_method") if isinstance(stored, Mapping) else None
    if stored and method not in _QUANTIZED:
        raise CheckpointFormatError(
            f"{source}: quantization_config is {stored}; only {' and '.join(_QUANTIZED)} are read,"
            " use a folder of bfloat16 or float32 weights"
        )


def _experts(config: Config, mixture: Mixture, source: str) -> Experts:
    fields = {field: config[key] for field, key in mixture.keys.items() if key in config}
    shared = {"": 0, "one": 1}.get(mixture.shared)
    if shared is None:
        shared = config.get(mixture.shared, 0)
    found = Experts(**{**fields, **mixture.traits}, shared_size=shared * fields["size"])
    reachable = found.num // found.groups * found.top_groups
    if found.num % found.groups or found.top_groups > found.groups or found.per_token > reachable:
        raise CheckpointFormatError(
            f"{source}: a token cannot visit {found.per_token} of {found.num} experts in"
            f" {found.top_groups} of {found.groups} equal groups"
        )
    return found


def _layers(config: Config, row: Family, source: str) -> tuple[Layer, ...]:
    numbers = range(config["num_hidden_layers"])
    if 0 < len(config.get("no_rope_layers", ())) != len(numbers):
        listed = len(config["no_rope_layers"])
        what = f"of {listed} layers, num_hidden_layers is {len(numbers)}"
        raise CheckpointFormatError(f"{source}: no_rope_layers is {what}")
    attention = row.attention or (lambda config, number: "full_attention")
    types: Sequence[str] = [attention(config, number) for number in numbers]
    known = {t for t, keys in ATTENTION.items() if set(keys.values()) <= config.keys()}
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
            **{field: config[key] for field, key in ATTENTION[types[number]].items()},
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
    if kind == "mrope" and "vision_config" in config:
        kind = "default"  # of which `vision_config` reads the sections
    if kind == "default" and not any(isinstance(value, Mapping) for value in rope.values()):
        return fields
    if kind not in ROPE:
        raise CheckpointFormatError(
            f"{source}: {key} is {dict(rope)}; rope_type must be 'default' or"
            f" {', '.join(map(repr, ROPE))}, the same for all layers"
        )
    missing = [name for name in ROPE[kind].values() if name not in rope]
    if missing:
        raise CheckpointFormatError(f"{source}: {key} of type {kind} lacks {', '.join(missing)}")
    found = {field: rope[name] for field, name in ROPE[kind].items()}
    if kind == "yarn":
        found |= {f: rope[name] for f, name in YARN.items() if rope.get(name) is not None}
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
