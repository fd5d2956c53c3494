"""What each model family says in its config.json, and what it calls its modules: a row each."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import vision_config
from jaxrl_llm.models.shape import Latent, Shape


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
    language_model: str = ""  # name of the class that predicts tokens, if another
    modules: Mapping[str, str] = dataclasses.field(
        default_factory=dict
    )  # names, see `tensor_names`
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


def rope_type(rope: Config) -> str:
    """Returns the kind of scaling that rotary settings name."""
    return rope.get("rope_type", rope.get("type", "default"))


def yarn_growth(factor: float, magnitude: float) -> float:
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
    if rope.get("mscale_all_dim") and rope_type(rope) != "default":
        growth = yarn_growth(rope["factor"], rope["mscale_all_dim"])
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
LATENT = Both(_read_latent, _write_latent)
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

# Families of text in models of text and images, of which they are read.
TEXT_OF: Mapping[str, str] = {"gemma3": "gemma3_text", "llama4": "llama4_text"}
FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama"),
    "qwen2": Family("Qwen2", {"qkv_bias": True}),
    "qwen3": Family("Qwen3", {"qk_norm": True}, defaults={"head_dim": 128}),
    "qwen2_5_vl": Family(
        "Qwen2_5_VL",
        {"qkv_bias": True},
        defaults={"rope_theta": 1e6},
        further=(Both(vision_config.read, vision_config.write),),
        language_model="Qwen2_5_VLForConditionalGeneration",
    ),
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
        further=(LATENT,),
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
