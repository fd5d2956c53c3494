"""One row per model family: how its config.json maps to a `Architecture`, and its module names."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.architecture import Architecture, LatentAttentionSizes
from jaxrl_llm.models.hf import gated_delta_config, indexer_config, vision_config
from jaxrl_llm.models.hf.family_format import (
    ALL_SPARSE,
    SPARSE_AFTER_FIRST_K,
    SPARSE_BY_TYPE,
    SPARSE_EVERY_N,
    SPARSE_IF_LISTED,
    Config,
    FieldCodec,
    Fields,
    ModelFamily,
    MoEFormat,
)

# Names that older files have for a type of scaling.
_OLDER_ROPE_TYPES: Mapping[str, str] = {"su": "longrope"}


def _alternating_attention(config: Config, number: int) -> str:
    return "full_attention" if number % 2 else "sliding_attention"


def _patterned_attention(config: Config, number: int) -> str:
    length = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    return "sliding_attention" if (number + 1) % length else "full_attention"


def _indexed_attention(config: Config, number: int) -> str:
    return "indexed_attention"


def _every_fourth_full(config: Config, number: int) -> str:
    return "sliding_attention" if (number + 1) % 4 else "full_attention"


def _sliding_without_rope(config: Config, number: int) -> str:
    is_sliding = config.get("use_sliding_window") and config.get("sliding_window")
    return (
        "sliding_attention" if is_sliding and not _uses_rope(config, number) else "full_attention"
    )


def _sliding_attention(config: Config, number: int) -> str:
    return "sliding_attention" if config.get("sliding_window") else "full_attention"


def _uses_rope(config: Config, number: int) -> bool:
    interval = config.get("no_rope_layer_interval", 4)
    rope_flags = config.get("no_rope_layers")
    return bool(rope_flags[number] if rope_flags else (number + 1) % interval)


def _chunked_if_rope(config: Config, number: int) -> str:
    return "chunked_attention" if _uses_rope(config, number) else "full_attention"


def _read_query_scale(config: Config) -> Fields:
    scalar = config["query_pre_attn_scalar"]
    return {"query_scale": 0.0 if scalar == config["head_dim"] else scalar**-0.5}


def _write_query_scale(shape: Architecture) -> Fields:
    scalar = round(shape.query_scale**-2, 6) if shape.query_scale else shape.head_size
    return {"query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar}


def _no_fields(config: Config) -> Fields:
    return {}


def rope_type(rope: Config) -> str:
    """The scaling type named in rotary settings: "default", "yarn", ..."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    return _OLDER_ROPE_TYPES.get(kind, kind)


def yarn_mscale(factor: float, magnitude: float) -> float:
    """YaRN's scale of the rotated vectors (arXiv:2309.00071, Eq. 22)."""
    return 0.1 * magnitude * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _read_mla(config: Config) -> Fields:
    nope_size, rope_size = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    fields: Fields = {
        "head_size": nope_size + rope_size,
        "rope_size": rope_size,
        "latent": LatentAttentionSizes(
            kv_rank=config["kv_lora_rank"],
            plain_size=nope_size,
            value_size=config["v_head_dim"],
            q_rank=config.get("q_lora_rank", 0),
        ),
    }
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("mscale_all_dim") and rope_type(rope) != "default":
        mscale = yarn_mscale(rope["factor"], rope["mscale_all_dim"])
        fields["query_scale"] = (nope_size + rope_size) ** -0.5 * mscale**2
    return fields


def _write_mla(shape: Architecture) -> Fields:
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


def _read_long_query_scale(config: Config) -> Fields:
    is_tuned = config.get("attn_temperature_tuning", True)
    return {"long_query_scale": config.get("attn_scale", 0.1) if is_tuned else 0.0}


def _write_long_query_scale(shape: Architecture) -> Fields:
    is_tuned = bool(shape.long_query_scale)
    scale = {"attn_scale": shape.long_query_scale} if is_tuned else {}
    return {"attn_temperature_tuning": is_tuned, **scale}


def _write_rope_layers(shape: Architecture) -> Fields:
    return {"no_rope_layers": [int(layer.rope != "none") for layer in shape.layer_types]}


def _write_use_of_window(shape: Architecture) -> Fields:
    return {"use_sliding_window": any(layer.window for layer in shape.layer_types)}


def _read_rotary_dims(config: Config) -> Fields:
    """The rotated dims of MiniMax-M2, in its published files a key of its own."""
    if set(config.get("attn_type_list", [1])) != {1}:
        raise ValueError("attn_type_list must be 1 for all layers: no linear attention is read")
    rotated = config.get("rotary_dim", config["head_dim"])
    return {"rope_size": rotated} if rotated != config["head_dim"] else {}


def _write_rotary_dims(shape: Architecture) -> Fields:
    return {"rotary_dim": shape.rope_size or shape.head_size}


_QUERY_SCALE = FieldCodec(_read_query_scale, _write_query_scale)
MLA_CODEC = FieldCodec(_read_mla, _write_mla)
_INDEXER = FieldCodec(indexer_config.indexer_fields, indexer_config.indexer_config_keys)
_LONG_QUERY_SCALE = FieldCodec(_read_long_query_scale, _write_long_query_scale)
_ROPE_LAYERS = FieldCodec(_no_fields, _write_rope_layers)
_USE_OF_WINDOW = FieldCodec(_no_fields, _write_use_of_window)
_ROTARY_DIMS = FieldCodec(_read_rotary_dims, _write_rotary_dims)
_VISION = FieldCodec(vision_config.vision_fields, vision_config.vision_config_keys)

_GEMMA_FIELDS = {"act": "gelu", "norm_offset": 1.0, "post_norms": True, "scale_embeddings": True}
_GEMMA_KEYS = {"score_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"}
_GEMMA_REQUIRED = {
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
_OLMO_FIELDS = {"wide_qk_norm": True, "pre_norms": False, "post_norms": True}
_OLMO_MODULES = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_MIXTRAL_MODULES = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.expert.gate": "block_sparse_moe.experts.{}.w1",
    "mlp.expert.up": "block_sparse_moe.experts.{}.w3",
    "mlp.expert.down": "block_sparse_moe.experts.{}.w2",
}
_EXPERT_KEYS = {"num": "num_local_experts", "per_token": "num_experts_per_tok"}
_SIGMOID_MOE = MoEFormat(
    config_keys={
        "num": "n_routed_experts",
        "per_token": "num_experts_per_tok",
        "size": "moe_intermediate_size",
        "normalized": "norm_topk_prob",
        "scale": "routed_scaling_factor",
        "groups": "n_group",
        "top_groups": "topk_group",
    },
    fixed_fields={"scores": "sigmoid", "selection_bias": True},
    sparse_layers=SPARSE_AFTER_FIRST_K,
    shared_experts="n_shared_experts",
)

# DeepSeek's sparse attention: latent attention and an indexer.
_DSA_DEFAULTS = {
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "index_topk": 2048,
    "index_head_dim": 128,
}
_DSA: Fields = {
    "fixed_fields": {"rope_interleaved": True},
    "required_values": {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    "codecs": (MLA_CODEC, _INDEXER),
    "attention_type": _indexed_attention,
    "moe": dataclasses.replace(_SIGMOID_MOE, sparse_layers=SPARSE_BY_TYPE),
    "module_names": {"attention.q_norm": "self_attn.q_a_layernorm"},
    "has_mtp_layers": True,
}
_GATED_DELTA: dict[str, Any] = {
    "fixed_fields": {"qk_norm": True, "output_gate": True, "norm_offset": 1.0},
    "required_values": {"attn_output_gate": True},
    "codecs": (
        FieldCodec(gated_delta_config.gated_delta_fields, gated_delta_config.gated_delta_keys),
    ),
    "attention_type": gated_delta_config.attention_type,
    "mixers": gated_delta_config.MIXERS,
    "rope_kind": lambda config, number, attention: (
        "main" if attention == "full_attention" else "none"
    ),
    "has_mtp_layers": True,
}
_SHARED_EXPERT_MODULES = {
    "mlp.shared": "mlp.shared_expert",
    "mlp.shared_gate": "mlp.shared_expert_gate",
}
_QWEN3_MOE_KEYS = {
    "num": "num_experts",
    "per_token": "num_experts_per_tok",
    "size": "moe_intermediate_size",
}
_QWEN_MOE_KEYS = {**_QWEN3_MOE_KEYS, "shared_size": "shared_expert_intermediate_size"}
_QWEN3_5 = ModelFamily(
    "Qwen3_5",
    **_GATED_DELTA,
    defaults={**gated_delta_config.DEFAULTS},
    classifier_class="Qwen3_5Text",
)
_QWEN3_5_MOE = ModelFamily(
    "Qwen3_5Moe",
    **_GATED_DELTA,
    # All layers have experts: there is no other MLP.
    defaults={**gated_delta_config.DEFAULTS, "intermediate_size": 0},
    moe=MoEFormat(
        config_keys=_QWEN_MOE_KEYS,
        fixed_fields={"shared_gate": True},
        sparse_layers=ALL_SPARSE,
    ),
    module_names=_SHARED_EXPERT_MODULES,
    stacks_experts=True,
)

# Multimodal model_type -> family of its text model, which alone is read, except where a config has
# a vision encoder that is read (`vision_config.FORMATS`).
TEXT_MODEL_TYPES: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "kimi_k25": "deepseek_v3",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
# model_type that is another name of a family; folders are written with the family's.
MODEL_TYPE_ALIASES: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
FAMILIES: Mapping[str, ModelFamily] = {
    "llama": ModelFamily("Llama"),
    "qwen2": ModelFamily("Qwen2", fixed_fields={"qkv_bias": True}),
    "qwen3": ModelFamily("Qwen3", fixed_fields={"qk_norm": True}, defaults={"head_dim": 128}),
    "qwen2_5_vl": ModelFamily(
        "Qwen2_5_VL",
        fixed_fields={"qkv_bias": True},
        defaults={"rope_theta": 1e6},
        codecs=(_VISION,),
        causal_lm_class="Qwen2_5_VLForConditionalGeneration",
    ),
    "qwen3_vl": ModelFamily(
        "Qwen3VL",
        fixed_fields={"qk_norm": True},
        defaults={"head_dim": 128, "rope_theta": 500_000.0},
        codecs=(_VISION,),
        causal_lm_class="Qwen3VLForConditionalGeneration",
    ),
    "qwen3_vl_moe": ModelFamily(
        "Qwen3VLMoe",
        fixed_fields={"qk_norm": True},
        moe=MoEFormat(
            config_keys=_QWEN3_MOE_KEYS,
            fixed_fields={},
            sparse_layers=SPARSE_EVERY_N,
        ),
        defaults={"rope_theta": 500_000.0},
        required_values={"norm_topk_prob": True},
        codecs=(_VISION,),
        causal_lm_class="Qwen3VLMoeForConditionalGeneration",
        module_names={
            "mlp.expert.gate_up": "mlp.experts.gate_up_proj",
            "mlp.expert.down": "mlp.experts.down_proj",
        },
        fused_experts="halves",
        transposes_experts=True,
    ),
    "mistral": ModelFamily(
        "Mistral",
        defaults={"sliding_window": 4096},
        attention_type=_sliding_attention,
        has_layer_types=False,
    ),
    "mixtral": ModelFamily(
        "Mixtral",
        defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5, "sliding_window": None},
        attention_type=_sliding_attention,
        has_layer_types=False,
        moe=MoEFormat(
            config_keys={**_EXPERT_KEYS, "size": "intermediate_size"},
            fixed_fields={},
            sparse_layers=ALL_SPARSE,
        ),
        module_names=_MIXTRAL_MODULES,
    ),
    "qwen3_moe": ModelFamily(
        "Qwen3Moe",
        fixed_fields={"qk_norm": True},
        moe=MoEFormat(
            config_keys={**_QWEN3_MOE_KEYS, "normalized": "norm_topk_prob"},
            fixed_fields={},
            sparse_layers=SPARSE_EVERY_N,
        ),
        defaults={"norm_topk_prob": False},
    ),
    "gemma2": ModelFamily(
        "Gemma2",
        fixed_fields=_GEMMA_FIELDS,
        config_keys=_GEMMA_KEYS,
        defaults={**_GEMMA_DEFAULTS, "sliding_window": 4096},
        required_values=_GEMMA_REQUIRED,
        codecs=(_QUERY_SCALE,),
        attention_type=_alternating_attention,
        module_names=_GEMMA_MODULES,
    ),
    "gemma3_text": ModelFamily(
        "Gemma3",
        fixed_fields={**_GEMMA_FIELDS, "qk_norm": True},
        config_keys={**_GEMMA_KEYS, "local_rope_theta": "rope_local_base_freq"},
        defaults={
            **_GEMMA_DEFAULTS,
            "sliding_window": 4096,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10_000.0,
        },
        required_values=_GEMMA_REQUIRED,
        codecs=(_QUERY_SCALE,),
        attention_type=_patterned_attention,
        rope_kind=lambda config, number, attention: (
            "main" if attention == "full_attention" else "local"
        ),
        module_names=_GEMMA_MODULES,
        classifier_class="Gemma3Text",
    ),
    "gpt_oss": ModelFamily(
        "GptOss",
        fixed_fields={"qkv_bias": True, "o_bias": True, "sinks": True},
        defaults={
            "head_dim": 64,
            "rope_theta": 150_000.0,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
        },
        required_values={"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        attention_type=_alternating_attention,
        moe=MoEFormat(
            config_keys={**_EXPERT_KEYS, "size": "intermediate_size"},
            fixed_fields={"bias": True, "act": "clamped"},
            sparse_layers=ALL_SPARSE,
        ),
        module_names={
            "mlp.router": "mlp.router",
            "mlp.expert.gate_up": "mlp.experts.gate_up_proj",
            "mlp.expert.down": "mlp.experts.down_proj",
        },
        fused_experts="interleaved",
    ),
    "deepseek_v3": ModelFamily(
        "DeepseekV3",
        config_keys={"rope_interleaved": "rope_interleave"},
        defaults={"rope_interleave": True, "norm_topk_prob": True},
        required_values={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        codecs=(MLA_CODEC,),
        moe=_SIGMOID_MOE,
        module_names={"attention.q_norm": "self_attn.q_a_layernorm"},
        has_mtp_layers=True,
    ),
    "glm4": ModelFamily(
        "Glm4",
        fixed_fields={"post_norms": True, "rope_interleaved": True},
        config_keys={"qkv_bias": "attention_bias"},
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-7,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
        },
        module_names={
            "attention_post_norm": "post_self_attn_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        },
        fused_gate_up=True,
    ),
    "glm4_moe": ModelFamily(
        "Glm4Moe",
        config_keys={"qkv_bias": "attention_bias", "qk_norm": "use_qk_norm"},
        defaults={
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
        },
        moe=_SIGMOID_MOE,
        has_mtp_layers=True,
    ),
    "llama4_text": ModelFamily(
        "Llama4",
        fixed_fields={"rope_interleaved": True},
        config_keys={
            "mlp_size": "intermediate_size_mlp",
            "unit_qk": "use_qk_norm",
            "long_query_from": "floor_scale",
        },
        defaults={
            "head_dim": 128,
            "rope_theta": 500_000.0,
            "rms_norm_eps": 1e-5,
            "use_qk_norm": True,
            "attention_chunk_size": 8192,
        },
        codecs=(_LONG_QUERY_SCALE, _ROPE_LAYERS),
        attention_type=_chunked_if_rope,
        rope_kind=lambda config, number, _: "main" if _uses_rope(config, number) else "none",
        moe=MoEFormat(
            config_keys={**_EXPERT_KEYS, "size": "intermediate_size"},
            fixed_fields={"scores": "sigmoid", "normalized": False, "weighs_input": True},
            sparse_layers=SPARSE_IF_LISTED,
            shared_experts="one",
        ),
        module_names={
            "mlp": "feed_forward",
            "mlp.router": "feed_forward.router",
            "mlp.shared": "feed_forward.shared_expert",
            "mlp.expert.gate_up": "feed_forward.experts.gate_up_proj",
            "mlp.expert.down": "feed_forward.experts.down_proj",
        },
        fused_experts="halves",
    ),
    "smollm3": ModelFamily(
        "SmolLM3",
        defaults={
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
        },
        codecs=(_ROPE_LAYERS, _USE_OF_WINDOW),
        attention_type=_sliding_without_rope,
        rope_kind=lambda config, number, _: "main" if _uses_rope(config, number) else "none",
    ),
    "olmo2": ModelFamily(
        "Olmo2",
        fixed_fields=_OLMO_FIELDS,
        defaults={"rms_norm_eps": 1e-5},
        module_names=_OLMO_MODULES,
    ),
    "olmo3": ModelFamily(
        "Olmo3",
        fixed_fields=_OLMO_FIELDS,
        config_keys={"local_rope_theta": "rope_theta"},
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096},
        attention_type=_every_fourth_full,
        rope_kind=lambda config, number, attention: (
            "main" if attention == "full_attention" else "local"
        ),
        module_names=_OLMO_MODULES,
    ),
    "phi3": ModelFamily(
        "Phi3",
        defaults={
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": 4096,
            "sliding_window": None,
        },
        attention_type=_sliding_attention,
        has_layer_types=False,
        fused_qkv=True,
        fused_gate_up=True,
    ),
    "minimax_m2": ModelFamily(
        "MiniMaxM2",
        fixed_fields={"wide_qk_norm": True},
        defaults={"head_dim": 128, "rope_theta": 5e6, "partial_rotary_factor": 1.0},
        required_values={
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "use_routing_bias": True,
            "shared_intermediate_size": 0,
        },
        codecs=(_ROTARY_DIMS,),
        moe=MoEFormat(
            config_keys={**_EXPERT_KEYS, "size": "intermediate_size"},
            fixed_fields={"scores": "sigmoid", "selection_bias": True},
            sparse_layers=ALL_SPARSE,
        ),
        module_names={**_MIXTRAL_MODULES, "mlp.router.selection": "block_sparse_moe"},
        has_mtp_layers=True,
    ),
    "deepseek_v32": ModelFamily(
        "DeepseekV32",
        defaults={**_DSA_DEFAULTS, "index_n_heads": 64},
        **_DSA,
    ),
    "glm_moe_dsa": ModelFamily(
        "GlmMoeDsa",
        defaults={
            **_DSA_DEFAULTS,
            "index_n_heads": 32,
            "rms_norm_eps": 1e-5,
            "indexer_rope_interleave": True,
        },
        **_DSA,
    ),
    "qwen3_next": ModelFamily(
        "Qwen3Next",
        **_GATED_DELTA,
        defaults={**gated_delta_config.DEFAULTS, "norm_topk_prob": True},
        moe=MoEFormat(
            config_keys={**_QWEN_MOE_KEYS, "normalized": "norm_topk_prob"},
            fixed_fields={"shared_gate": True},
            sparse_layers=SPARSE_EVERY_N,
        ),
        module_names=_SHARED_EXPERT_MODULES,
        delta_by_key_head=True,
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "qwen3_5": dataclasses.replace(
        _QWEN3_5,
        codecs=(*_QWEN3_5.codecs, _VISION),
        causal_lm_class="Qwen3_5ForConditionalGeneration",
    ),
    "qwen3_5_moe": dataclasses.replace(
        _QWEN3_5_MOE,
        codecs=(*_QWEN3_5_MOE.codecs, _VISION),
        causal_lm_class="Qwen3_5MoeForConditionalGeneration",
    ),
}
