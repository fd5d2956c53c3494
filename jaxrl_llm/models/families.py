"""Names of the supported model families on disk: what config.json says of them.

A family is a value of `model_type` in config.json; adding one is a row of `FAMILIES`, and a pair
of functions where config.json says something that no other family says. `tensor_names` has the
names in files of weights.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.shape import Experts, Latent, Layer, RopeScaling, Shape


class CheckpointFormatError(UserError, ValueError):
    """A model folder that cannot be read or written; the message names file and remedy."""


Config = Mapping[str, Any]  # of config.json, without keys that are null
Fields = dict[str, Any]


class Both(NamedTuple):
    """What config.json says in a way of its own: read from it, and written to it."""

    read: Callable[[Config], Any]
    write: Callable[[Shape], Fields]


@dataclasses.dataclass(frozen=True)
class Mixture:
    """How a family describes its experts."""

    keys: Mapping[str, str]  # of fields of `Experts`
    traits: Fields  # fields that all its models have
    layers: Both  # which layers have experts: read returns a function of a layer's number
    shared: Literal["", "one", "n_shared_experts"] = ""  # shared MLPs, of an expert's size each


@dataclasses.dataclass(frozen=True)
class Family:
    """How one `model_type` differs from the others."""

    model_class: str  # prefix of its class names
    traits: Fields = dataclasses.field(default_factory=dict)  # fields of all its shapes
    keys: Fields = dataclasses.field(default_factory=dict)  # of fields of a shape, beside `_KEYS`
    defaults: Fields = dataclasses.field(default_factory=dict)  # of keys that are absent
    only: Fields = dataclasses.field(default_factory=dict)  # as `_FIXED`
    further: tuple[Both, ...] = ()  # fields of a shape
    attention: Callable[[Config, int], str] | None = None  # type of a layer; None: all are full
    rope: Callable[[Config, int, str], Literal["main", "local", "none"]] = (
        lambda config, number, attention: "main"
    )  # of a layer with a type of attention
    lists_layers: bool = True  # config.json has `layer_types`, unless all layers are the same
    mixture: Mixture | None = None
    classifier: str = ""  # prefix of its classifier's name, if another
    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)  # names, see `tensor_names`
    fused_mlp: bool = False  # gate and up are one tensor
    fused_experts: Literal["", "halves", "interleaved"] = ""  # as are those of all experts
    extra_layers: bool = False  # files may hold layers that predict further tokens


def _every(config: Config) -> Callable[[int], bool]:
    return lambda number: True


def _dense(shape: Shape) -> list[int]:
    return [number for number, layer in enumerate(shape.kinds) if not layer.experts]


def _sparse_steps(config: Config) -> Callable[[int], bool]:
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", ())
    return lambda number: number not in dense and (number + 1) % step == 0


def _after_the_first(config: Config) -> Callable[[int], bool]:
    return lambda number: number >= config.get("first_k_dense_replace", 0)


def _listed_layers(config: Config) -> Callable[[int], bool]:
    step = config.get("interleave_moe_layer_step", 1)
    listed = config.get("moe_layers", range(step - 1, config["num_hidden_layers"], step))
    return lambda number: number in listed


_ALL_LAYERS = Both(_every, lambda shape: {})
_SPARSE_STEPS = Both(
    _sparse_steps, lambda shape: {"decoder_sparse_step": 1, "mlp_only_layers": _dense(shape)}
)
_AFTER_THE_FIRST = Both(
    _after_the_first, lambda shape: {"first_k_dense_replace": len(_dense(shape))}
)
_LISTED_LAYERS = Both(
    _listed_layers,
    lambda shape: {
        "moe_layers": [n for n, layer in enumerate(shape.kinds) if layer.experts],
        "interleave_moe_layer_step": 1,
    },
)


def _alternating(config: Config, number: int) -> str:
    return "full_attention" if number % 2 else "sliding_attention"


def _last_of_pattern(config: Config, number: int) -> str:
    length = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    return "sliding_attention" if (number + 1) % length else "full_attention"


def _all_sliding(config: Config, number: int) -> str:
    return "sliding_attention" if config.get("sliding_window") else "full_attention"


def _rotates(config: Config, number: int) -> bool:
    interval = config.get("no_rope_layer_interval", 4)
    listed = config.get("no_rope_layers")
    return bool(listed[number] if listed else (number + 1) % interval)


def _chunked_if_rotated(config: Config, number: int) -> str:
    return "chunked_attention" if _rotates(config, number) else "full_attention"


def _read_query_scalar(config: Config) -> Fields:
    scalar = config["query_pre_attn_scalar"]
    return {"query_scale": 0.0 if scalar == config["head_dim"] else scalar**-0.5}


def _write_query_scalar(shape: Shape) -> Fields:
    scalar = round(shape.query_scale**-2, 6) if shape.query_scale else shape.head_size
    return {"query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar}


def _yarn_growth(factor: float, magnitude: float) -> float:
    """Returns by how much vectors grow (arXiv:2309.00071, Eq. 22)."""
    return 0.1 * magnitude * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _read_latent(config: Config) -> Fields:
    plain, rotated = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    fields: Fields = {
        "head_size": plain + rotated,
        "rope_size": rotated,
        "latent": Latent(
            config["kv_lora_rank"], plain, config["v_head_dim"], config.get("q_lora_rank", 0)
        ),
    }
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("mscale_all_dim") and _rope_type(rope) != "default":
        growth = _yarn_growth(rope["factor"], rope["mscale_all_dim"])
        fields["query_scale"] = (plain + rotated) ** -0.5 * growth**2
    return fields


def _write_latent(shape: Shape) -> Fields:
    latent = shape.latent
    assert latent is not None
    return {
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank or None,
        "qk_nope_head_dim": latent.plain_size,
        "qk_rope_head_dim": shape.head_size - latent.plain_size,
        "qk_head_dim": shape.head_size,
        "head_dim": shape.head_size - latent.plain_size,
        "v_head_dim": latent.value_size,
    }


def _read_long_queries(config: Config) -> Fields:
    tuned = config.get("attn_temperature_tuning", True)
    return {"long_query_scale": config.get("attn_scale", 0.1) if tuned else 0.0}


def _write_long_queries(shape: Shape) -> Fields:
    tuned = bool(shape.long_query_scale)
    rotated = [int(layer.rope != "none") for layer in shape.kinds]
    scale = {"attn_scale": shape.long_query_scale} if tuned else {}
    return {"no_rope_layers": rotated, "attn_temperature_tuning": tuned, **scale}


_QUERY_SCALAR = Both(_read_query_scalar, _write_query_scalar)
_LATENT = Both(_read_latent, _write_latent)
_LONG_QUERIES = Both(_read_long_queries, _write_long_queries)

_GEMMA_TRAITS = {"act": "gelu", "norm_offset": 1.0, "post_norms": True, "scale_embeddings": True}
_GEMMA_KEYS = {"score_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"}
_GEMMA_ONLY = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": False,
}
_GEMMA_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True, "query_pre_attn_scalar": 256}
_GEMMA_MODULES = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_EXPERT_KEYS = {"num": "num_local_experts", "per_token": "num_experts_per_tok"}
_SIGMOID_MIXTURE = Mixture(
    {
        "num": "n_routed_experts",
        "per_token": "num_experts_per_tok",
        "size": "moe_intermediate_size",
        "normalized": "norm_topk_prob",
        "scale": "routed_scaling_factor",
        "groups": "n_group",
        "top_groups": "topk_group",
    },
    {"scores": "sigmoid", "selection_bias": True},
    _AFTER_THE_FIRST,
    "n_shared_experts",
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama"),
    "qwen2": Family("Qwen2", {"qkv_bias": True}),
    "qwen3": Family("Qwen3", {"qk_norm": True}, defaults={"head_dim": 128}),
    "mistral": Family(
        "Mistral",
        defaults={"sliding_window": 4096},
        attention=_all_sliding,
        lists_layers=False,
    ),
    "mixtral": Family(
        "Mixtral",
        defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5, "sliding_window": None},
        attention=_all_sliding,
        lists_layers=False,
        mixture=Mixture({**_EXPERT_KEYS, "size": "intermediate_size"}, {}, _ALL_LAYERS),
        modules={
            "mlp.router": "block_sparse_moe.gate",
            "mlp.expert.gate": "block_sparse_moe.experts.{}.w1",
            "mlp.expert.up": "block_sparse_moe.experts.{}.w3",
            "mlp.expert.down": "block_sparse_moe.experts.{}.w2",
        },
    ),
    "qwen3_moe": Family(
        "Qwen3Moe",
        {"qk_norm": True},
        mixture=Mixture(
            {
                "num": "num_experts",
                "per_token": "num_experts_per_tok",
                "size": "moe_intermediate_size",
                "normalized": "norm_topk_prob",
            },
            {},
            _SPARSE_STEPS,
        ),
        defaults={"norm_topk_prob": False},
    ),
    "gemma2": Family(
        "Gemma2",
        _GEMMA_TRAITS,
        _GEMMA_KEYS,
        {**_GEMMA_DEFAULTS, "sliding_window": 4096},
        _GEMMA_ONLY,
        (_QUERY_SCALAR,),
        _alternating,
        modules=_GEMMA_MODULES,
    ),
    "gemma3_text": Family(
        "Gemma3",
        {**_GEMMA_TRAITS, "qk_norm": True},
        {**_GEMMA_KEYS, "local_rope_theta": "rope_local_base_freq"},
        {
            **_GEMMA_DEFAULTS,
            "sliding_window": 4096,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10_000.0,
        },
        _GEMMA_ONLY,
        (_QUERY_SCALAR,),
        _last_of_pattern,
        lambda config, number, attention: "main" if attention == "full_attention" else "local",
        modules=_GEMMA_MODULES,
        classifier="Gemma3Text",
    ),
    "gpt_oss": Family(
        "GptOss",
        {"qkv_bias": True, "o_bias": True, "sinks": True},
        defaults={
            "head_dim": 64,
            "rope_theta": 150_000.0,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
        },
        only={"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        attention=_alternating,
        mixture=Mixture(
            {**_EXPERT_KEYS, "size": "intermediate_size"},
            {"bias": True, "act": "clamped"},
            _ALL_LAYERS,
        ),
        modules={
            "mlp.router": "mlp.router",
            "mlp.expert.gate_up": "mlp.experts.gate_up_proj",
            "mlp.expert.down": "mlp.experts.down_proj",
        },
        fused_experts="interleaved",
    ),
    "deepseek_v3": Family(
        "DeepseekV3",
        keys={"rope_interleaved": "rope_interleave"},
        defaults={"rope_interleave": True, "norm_topk_prob": True},
        only={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        further=(_LATENT,),
        mixture=_SIGMOID_MIXTURE,
        modules={"attention.q_norm": "self_attn.q_a_layernorm"},
        extra_layers=True,
    ),
    "glm4": Family(
        "Glm4",
        {"post_norms": True, "rope_interleaved": True},
        {"qkv_bias": "attention_bias"},
        {
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-7,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
        },
        modules={
            "attention_post_norm": "post_self_attn_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        },
        fused_mlp=True,
    ),
    "glm4_moe": Family(
        "Glm4Moe",
        keys={"qkv_bias": "attention_bias", "qk_norm": "use_qk_norm"},
        defaults={
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
        },
        mixture=_SIGMOID_MIXTURE,
        extra_layers=True,
    ),
    "llama4_text": Family(
        "Llama4",
        {"rope_interleaved": True},
        {
            "mlp_size": "intermediate_size_mlp",
            "unit_qk": "use_qk_norm",
            "long_query_from": "floor_scale",
        },
        {
            "head_dim": 128,
            "rope_theta": 500_000.0,
            "rms_norm_eps": 1e-5,
            "use_qk_norm": True,
            "attention_chunk_size": 8192,
        },
        further=(_LONG_QUERIES,),
        attention=_chunked_if_rotated,
        rope=lambda config, number, _: "main" if _rotates(config, number) else "none",
        mixture=Mixture(
            {**_EXPERT_KEYS, "size": "intermediate_size"},
            {"scores": "sigmoid", "normalized": False, "weighs_input": True},
            _LISTED_LAYERS,
            "one",
        ),
        modules={
            "mlp": "feed_forward",
            "mlp.router": "feed_forward.router",
            "mlp.shared": "feed_forward.shared_expert",
            "mlp.expert.gate_up": "feed_forward.experts.gate_up_proj",
            "mlp.expert.down": "feed_forward.experts.down_proj",
        },
        fused_experts="halves",
    ),
}
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
    stored = config.get("quantization_config") or {}
    known = {"mxfp4": name == "gpt_oss", "fp8": bool(stored.get("weight_block_size"))}
    if stored and not known.get(str(stored.get("quant_method"))):
        raise CheckpointFormatError(
            f"{source}: quantization_config is {stored}; only mxfp4 of gpt_oss and fp8 with"
            " weight_block_size are read"
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


def _rope_type(rope: Config) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def _rope(config: Config, row: Family, source: str) -> Fields:
    """Returns the fields of a shape that are about rotary embeddings."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    fields: Fields = {}
    if "local_rope_theta" in row.keys and "full_attention" in rope:
        local = rope.get("sliding_attention") or {}
        if _rope_type(local) != "default":
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
    kind = _rope_type(rope)
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
    return {**fields, "rope_scaling": RopeScaling(**found, kind=kind)}


def _yarn_magnitude(rope: Config) -> float:
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    of_rotated, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if of_rotated and of_all:
        return _yarn_growth(rope["factor"], of_rotated) / _yarn_growth(rope["factor"], of_all)
    return _yarn_growth(rope["factor"], 1.0)


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
    replaced = ("rope_parameters", "torch_dtype", "dtype", "id2label", "label2id", "num_labels")
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
    for field, used in {"experts": row.mixture, "latent": _LATENT in row.further}.items():
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
    rope = {"rope_type": scaling.kind}
    rope |= {key: getattr(scaling, field) for field, key in _ROPE[scaling.kind].items()}
    if scaling.kind == "yarn":
        rope |= {key: getattr(scaling, field) for field, key in _YARN.items()}
        rope["attention_factor"] = scaling.magnitude
        if shape.latent and shape.query_scale:
            growth = math.sqrt(shape.query_scale * shape.head_size**0.5)
            rope["mscale_all_dim"] = round((growth - 1.0) / (0.1 * math.log(scaling.factor)), 9)
    return rope
