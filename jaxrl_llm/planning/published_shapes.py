"""Shapes of published models, to plan a run before the model is downloaded."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.config import ConfigError, ModelConfig, RLConfig
from jaxrl_llm.models.architecture import (
    Architecture,
    RopeScaling,
    VisionArchitecture,
    architecture_from_config,
)
from jaxrl_llm.models.hf import checkpoint, config_reader
from jaxrl_llm.planning.run_setting import Head, ScoringModel
from jaxrl_llm.storage.address import LocalAddress, parse_address
from jaxrl_llm.storage.model_folder import model_name

_LLAMA = {"family": "llama", "norm_eps": 1e-5, "head_size": 128}
_LLAMA2 = _LLAMA | {"vocab_size": 32_000, "tie_embeddings": False}
_LLAMA3 = _LLAMA | {"vocab_size": 128_256, "rope_theta": 500_000.0, "tie_embeddings": False}
_LLAMA31 = _LLAMA3 | {"rope_scaling": RopeScaling(factor=8.0)}
_LLAMA32 = _LLAMA3 | {"rope_scaling": RopeScaling(factor=32.0), "tie_embeddings": True}
_SMOLLM = _LLAMA | {"vocab_size": 49_152, "rope_theta": 100_000.0}
_QWEN = {"rope_theta": 1e6, "head_size": 128, "vocab_size": 151_936}
_QWEN2 = _QWEN | {"family": "qwen2", "max_positions": 32_768, "qkv_bias": True}
_QWEN2_LARGE = _QWEN2 | {"vocab_size": 152_064, "tie_embeddings": False}
_QWEN3 = _QWEN | {"family": "qwen3", "max_positions": 40_960, "qk_norm": True}
_QWEN3_LARGE = _QWEN3 | {"tie_embeddings": False}


def _shape(
    base: Mapping[str, Any], hidden, layers, heads, kv_heads, mlp, **changes
) -> Architecture:
    """A shape from the main sizes of a config.json."""
    sizes = {"hidden_size": hidden, "num_layers": layers, "mlp_size": mlp}
    sizes |= {"num_heads": heads, "num_kv_heads": kv_heads}
    return Architecture(**{**base, **sizes, **changes})


def _shape_from_hf(family: str, name: str, **config: Any) -> Architecture:
    """A shape from the fields of a Hugging Face config.json."""
    config |= {"model_type": family, "architectures": [f"{name}ForCausalLM"]}
    return config_reader.architecture_from_config(config)


def _hf_sizes(
    hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int
) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
    }


def _mixtral(*sizes: int) -> Architecture:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    return _shape_from_hf("mixtral", "Mixtral", **_hf_sizes(*sizes), **experts)


def _qwen3_moe(*sizes: int, inner: int) -> Architecture:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": inner}
    attention = {"head_dim": 128, "rope_theta": 1e6, "norm_topk_prob": True}
    return _shape_from_hf("qwen3_moe", "Qwen3Moe", **_hf_sizes(*sizes), **experts, **attention)


def _gemma3(*sizes: int, scalar: int) -> Architecture:
    return _shape_from_hf(
        "gemma3_text",
        "Gemma3",
        **_hf_sizes(*sizes),
        head_dim=scalar if scalar == 256 else 128,
        query_pre_attn_scalar=scalar,
        sliding_window=1024,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )


def _gpt_oss(layers: int, experts: int) -> Architecture:
    rope = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    return _shape_from_hf(
        "gpt_oss",
        "GptOss",
        **_hf_sizes(2880, layers, 64, 8, 2880, 201_088),
        num_local_experts=experts,
        num_experts_per_tok=4,
        rope_scaling={**rope, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    )


def _qwen_vl(base: Mapping[str, Any], *sizes: int, tower_mlp: int = 3420) -> Architecture:
    vision = VisionArchitecture(32, 1280, 16, tower_mlp, full_layers=(7, 15, 23, 31))
    overrides = {"family": "qwen2_5_vl", "rope_sections": (16, 24, 24), "max_positions": 128_000}
    return dataclasses.replace(_shape({**base, **overrides}, *sizes), vision=vision)


def _qwen3_vl(
    hidden, layers, heads, kv_heads, mlp, *, small_tower: bool = False, **config: Any
) -> Architecture:
    family = "qwen3_vl_moe" if "num_experts" in config else "qwen3_vl"
    tower: dict[str, Any] = {"out_hidden_size": hidden}
    if small_tower:
        tower |= {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}
        tower |= {"deepstack_visual_indexes": [5, 11, 17]}
    keys = {
        **_hf_sizes(hidden, layers, heads, kv_heads, mlp, 151_936),
        "head_dim": 128,
        "rope_theta": 5e6,
        "max_position_embeddings": 262_144,
        "vision_config": tower,
        "model_type": family,
        "architectures": [config_reader.hf_class_name(family, "lm")],
    }
    return config_reader.architecture_from_config({**keys, **config})


def _glm4_moe(
    hidden, layers, heads, kv_heads, mlp, *, experts: int, inner: int, dense: int, qk_norm=False
) -> Architecture:
    return _shape_from_hf(
        "glm4_moe",
        "Glm4Moe",
        **_hf_sizes(hidden, layers, heads, kv_heads, mlp, 151_552),
        head_dim=128,
        attention_bias=True,
        use_qk_norm=qk_norm,
        n_routed_experts=experts,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=inner,
        first_k_dense_replace=dense,
        rope_theta=1e6,
    )


def _olmo(version: str, *sizes: int) -> Architecture:
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    context: dict[str, Any] = {"max_position_embeddings": 4096}
    if version == "3":
        context = {"max_position_embeddings": 65_536, "rope_scaling": rope, "sliding_window": 4096}
    return _shape_from_hf(
        f"olmo{version}",
        f"Olmo{version}",
        **_hf_sizes(*sizes),
        **context,
        rope_theta=500_000.0,
        rms_norm_eps=1e-6,
    )


def _phi(*sizes: int, rope_theta: float, context: int) -> Architecture:
    return _shape_from_hf(
        "phi3",
        "Phi3",
        **_hf_sizes(*sizes),
        rope_theta=rope_theta,
        max_position_embeddings=context,
        original_max_position_embeddings=context,
    )


_DEEPSEEK_V3: Mapping[str, Any] = {
    **_hf_sizes(7168, 61, 128, 128, 18_432, 129_280),
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 163_840,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_KIMI_K2: Mapping[str, Any] = {
    **_DEEPSEEK_V3,
    **_hf_sizes(7168, 61, 64, 64, 18_432, 163_840),
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "rope_theta": 50_000.0,
    "max_position_embeddings": 131_072,
    "rope_scaling": {
        **_DEEPSEEK_V3["rope_scaling"],
        "factor": 32.0,
        "beta_fast": 1.0,
    },
}
_GLM_5: Mapping[str, Any] = {
    **_hf_sizes(6144, 78, 64, 64, 12_288, 154_880),
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "rope_theta": 1e6,
    "max_position_embeddings": 202_752,
}


SHAPES: Mapping[str, Architecture] = {
    "Qwen2.5-0.5B": _shape(_QWEN2, 896, 24, 14, 2, 4864, head_size=64),
    "Qwen2.5-1.5B": _shape(_QWEN2, 1536, 28, 12, 2, 8960),
    "Qwen2.5-3B": _shape(_QWEN2, 2048, 36, 16, 2, 11_008),
    "Qwen2.5-7B": _shape(_QWEN2_LARGE, 3584, 28, 28, 4, 18_944),
    "Qwen2.5-14B": _shape(_QWEN2_LARGE, 5120, 48, 40, 8, 13_824),
    "Qwen2.5-32B": _shape(_QWEN2_LARGE, 5120, 64, 40, 8, 27_648),
    "Qwen2.5-72B": _shape(_QWEN2_LARGE, 8192, 80, 64, 8, 29_568),
    "Qwen2.5-VL-3B": _qwen_vl(_QWEN2, 2048, 36, 16, 2, 11_008),
    "Qwen2.5-VL-7B": _qwen_vl(_QWEN2_LARGE, 3584, 28, 28, 4, 18_944),
    "Qwen2.5-VL-32B": _qwen_vl(_QWEN2_LARGE, 5120, 64, 40, 8, 27_648, tower_mlp=3456),
    "Qwen2.5-VL-72B": _qwen_vl(_QWEN2_LARGE, 8192, 80, 64, 8, 29_568, tower_mlp=3456),
    "Qwen3-VL-2B": _qwen3_vl(2048, 28, 16, 8, 6144, small_tower=True, tie_word_embeddings=True),
    "Qwen3-VL-4B": _qwen3_vl(2560, 36, 32, 8, 9728, small_tower=True, tie_word_embeddings=True),
    "Qwen3-VL-8B": _qwen3_vl(4096, 36, 32, 8, 12_288),
    "Qwen3-VL-32B": _qwen3_vl(5120, 64, 64, 8, 25_600),
    "Qwen3-VL-30B-A3B": _qwen3_vl(
        2048,
        48,
        32,
        4,
        6144,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "Qwen3-0.6B": _shape(_QWEN3, 1024, 28, 16, 8, 3072),
    "Qwen3-1.7B": _shape(_QWEN3, 2048, 28, 16, 8, 6144),
    "Qwen3-4B": _shape(_QWEN3, 2560, 36, 32, 8, 9728),
    "Qwen3-8B": _shape(_QWEN3_LARGE, 4096, 36, 32, 8, 12_288),
    "Qwen3-14B": _shape(_QWEN3_LARGE, 5120, 40, 40, 8, 17_408),
    "Qwen3-32B": _shape(_QWEN3_LARGE, 5120, 64, 64, 8, 25_600),
    "SmolLM2-135M": _shape(_SMOLLM, 576, 30, 9, 3, 1536, head_size=64),
    "Llama-2-7b": _shape(_LLAMA2, 4096, 32, 32, 32, 11_008),
    "Llama-2-13b": _shape(_LLAMA2, 5120, 40, 40, 40, 13_824),
    "Llama-2-34b": _shape(_LLAMA2, 8192, 48, 64, 8, 22_016),
    "Llama-2-70b": _shape(_LLAMA2, 8192, 80, 64, 8, 28_672),
    "Llama-3.2-1B": _shape(_LLAMA32, 2048, 16, 32, 8, 8192, head_size=64),
    "Llama-3.2-3B": _shape(_LLAMA32, 3072, 28, 24, 8, 8192),
    "Llama-3.1-8B": _shape(_LLAMA31, 4096, 32, 32, 8, 14_336),
    "Llama-3.1-70B": _shape(_LLAMA31, 8192, 80, 64, 8, 28_672),
    "Llama-3.3-70B": _shape(_LLAMA31, 8192, 80, 64, 8, 28_672),
    "Mixtral-8x7B": _mixtral(4096, 32, 32, 8, 14_336, 32_000),
    "Mixtral-8x22B": _mixtral(6144, 56, 48, 8, 16_384, 32_768),
    "Qwen3-30B-A3B": _qwen3_moe(2048, 48, 32, 4, 6144, 151_936, inner=768),
    "Qwen3-235B-A22B": _qwen3_moe(4096, 94, 64, 4, 12_288, 151_936, inner=1536),
    "gemma-3-12b": _gemma3(3840, 48, 16, 8, 15_360, 262_208, scalar=256),
    "gemma-3-27b": _gemma3(5376, 62, 32, 16, 21_504, 262_208, scalar=168),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "DeepSeek-V3": _shape_from_hf("deepseek_v3", "DeepseekV3", **_DEEPSEEK_V3),
    "DeepSeek-V3.1": _shape_from_hf("deepseek_v3", "DeepseekV3", **_DEEPSEEK_V3),
    "DeepSeek-V3.2": _shape_from_hf("deepseek_v32", "DeepseekV32", **_DEEPSEEK_V3),
    "DeepSeek-R1": _shape_from_hf("deepseek_v3", "DeepseekV3", **_DEEPSEEK_V3),
    "Kimi-K2": _shape_from_hf("deepseek_v3", "DeepseekV3", **_KIMI_K2),
    "GLM-4.5": _glm4_moe(5120, 92, 96, 8, 12_288, experts=160, inner=1536, dense=3, qk_norm=True),
    "GLM-4.5-Air": _glm4_moe(4096, 46, 96, 8, 10_944, experts=128, inner=1408, dense=1),
    "GLM-4.6": _glm4_moe(5120, 92, 96, 8, 12_288, experts=160, inner=1536, dense=3, qk_norm=True),
    "GLM-5": _shape_from_hf("glm_moe_dsa", "GlmMoeDsa", **_GLM_5),
    "MiniMax-M2": _shape_from_hf(
        "minimax_m2",
        "MiniMaxM2",
        **_hf_sizes(3072, 62, 48, 8, 1536, 200_064),
        num_local_experts=256,
        num_experts_per_tok=8,
        rotary_dim=64,
        max_position_embeddings=196_608,
    ),
    "SmolLM3-3B": _shape_from_hf(
        "smollm3",
        "SmolLM3",
        **_hf_sizes(2048, 36, 16, 4, 11_008, 128_256),
        rope_theta=5e6,
        max_position_embeddings=65_536,
    ),
    "OLMo-2-1124-7B": _olmo("2", 4096, 32, 32, 32, 11_008, 100_352),
    "OLMo-2-1124-13B": _olmo("2", 5120, 40, 40, 40, 13_824, 100_352),
    "OLMo-2-0325-32B": _olmo("2", 5120, 64, 40, 8, 27_648, 100_352),
    "Olmo-3-7B": _olmo("3", 4096, 32, 32, 32, 11_008, 100_278),
    "Olmo-3-1025-7B": _olmo("3", 4096, 32, 32, 32, 11_008, 100_278),
    "Olmo-3-32B": _olmo("3", 5120, 64, 40, 8, 27_648, 100_278),
    "Olmo-3-1125-32B": _olmo("3", 5120, 64, 40, 8, 27_648, 100_278),
    "phi-4": _phi(5120, 40, 40, 10, 17_920, 100_352, rope_theta=250_000.0, context=16_384),
}


def published_shape(name: str) -> Architecture:
    """The shape of the published model whose name is the longest prefix of `name`.

    Raises ConfigError if there is none.
    """
    matches = _published_names(name)
    if not matches:
        raise ConfigError(
            f"config.model.path: {name!r} is neither a local folder nor a known published model;"
            f" give a folder with config.json, org/name of the hub, or one of {', '.join(SHAPES)}"
        )
    return SHAPES[max(matches, key=len)]


def _published_names(name: str) -> list[str]:
    return [published for published in SHAPES if name.lower().startswith(published.lower())]


def policy_shape(config: ModelConfig, vocab_size: int) -> Architecture:
    """The shape of a run's policy: from its folder, by its name, or a random model's.

    Of a plain name `org/name` that is known here nothing is read from the hub. A run has the name
    with its commit (`pin_models`), and reads it.

    `vocab_size` is for the random model; a folder or a published model has its own.
    """
    if not config.path:
        return architecture_from_config(config, vocab_size)
    address = parse_address(config.path, "model")
    if isinstance(address, LocalAddress):
        folder = pathlib.Path(address.path)
        return (
            checkpoint.read_architecture(folder)
            if folder.is_dir()
            else published_shape(folder.name)
        )
    if config.path == getattr(address, "repo", "") and _published_names(model_name(config.path)):
        return published_shape(model_name(config.path))
    return checkpoint.read_architecture(config.path)


def scoring_models(config: RLConfig, policy: Architecture) -> tuple[ScoringModel, ...]:
    """A run's reward models, cost models and teachers; without a path, with the policy's shape."""

    def scorer(path: str, head: Head) -> ScoringModel:
        model_config = dataclasses.replace(config.model, path=path)
        return ScoringModel(policy_shape(model_config, 0) if path else policy, head)

    judges = (*config.rewards.models.values(), *config.rewards.cost_models.values())
    teachers = config.distillation.teachers.values()
    return (
        *(scorer(judge.path, "scalar") for judge in judges),
        *(scorer(teacher.path, "lm") for teacher in teachers),
    )
