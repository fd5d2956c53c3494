"""Makes configs.json: of a model of each family what transformers writes, at its published sizes.

python tests/goldens/make_configs.py
"""

import json
import pathlib

import transformers

YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 5000000.0,
    "mrope_section": [24, 20, 20],
    "mrope_interleaved": True,
}
# What differs from the defaults of the class.
MODELS = {
    "Llama-3.2-1B": (
        "Llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 500000.0, **LLAMA3},
            "tie_word_embeddings": True,
            "head_dim": 64,
        },
    ),
    "Qwen2.5-0.5B": (
        "Qwen2",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-0.6B": (
        "Qwen3",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-VL-8B": (
        "Qwen3VL",
        {
            "text_config": {
                "intermediate_size": 12288,
                "num_hidden_layers": 36,
                "num_key_value_heads": 8,
                "max_position_embeddings": 262144,
                "rope_parameters": MROPE,
            },
            "vision_config": {"out_hidden_size": 4096},
        },
    ),
    "Qwen3-VL-30B-A3B": (
        "Qwen3VLMoe",
        {
            "text_config": {
                "intermediate_size": 6144,
                "num_hidden_layers": 48,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "max_position_embeddings": 262144,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "rope_parameters": MROPE,
                "tie_word_embeddings": False,
            },
            "vision_config": {"out_hidden_size": 2048},
        },
    ),
    "Qwen3.5 with images": ("Qwen3_5", {"vision_config": {"out_hidden_size": 4096}}),
    "Qwen3.5 with experts and images": ("Qwen3_5Moe", {"vision_config": {"out_hidden_size": 2048}}),
    "Mistral-7B-v0.1": ("Mistral", {}),
    "Mixtral-8x7B-v0.1": ("Mixtral", {"vocab_size": 32000}),
    "Qwen3-30B-A3B": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "norm_topk_prob": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "gemma-2-9b": (
        "Gemma2",
        {
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "query_pre_attn_scalar": 256,
        },
    ),
    "gemma-3-1b": (
        "Gemma3Text",
        {
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "sliding_window": 512,
            "max_position_embeddings": 32768,
        },
    ),
    "gpt-oss-20b": ("GptOss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "DeepSeek-V3": (
        "DeepseekV3",
        {
            "max_position_embeddings": 163840,
            "rope_parameters": {
                **YARN,
                "rope_theta": 10000.0,
                "factor": 40.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "GLM-4-9B-0414": ("Glm4", {}),
    "GLM-4.5-Air": ("Glm4Moe", {"attention_bias": True, "head_dim": 128}),
    "Llama-4-Scout": (
        "Llama4Text",
        {"interleave_moe_layer_step": 1, "use_qk_norm": True, "vocab_size": 202048},
    ),
}
MODELS |= {
    "SmolLM3-3B": (
        "SmolLM3",
        {
            "max_position_embeddings": 65536,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0},
        },
    ),
    "OLMo-2-1124-7B": (
        "Olmo2",
        {
            "vocab_size": 100352,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "Olmo-3-7B": (
        "Olmo3",
        {
            "vocab_size": 100278,
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "full_attention": {
                    **YARN,
                    "rope_theta": 500000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                    "attention_factor": 1.2079441541679836,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            },
        },
    ),
    "Phi-4": (
        "Phi3",
        {
            "vocab_size": 100352,
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "max_position_embeddings": 16384,
            "original_max_position_embeddings": 16384,
            "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0},
        },
    ),
    "DeepSeek-V3.2": (
        "DeepseekV32",
        {"rope_parameters": MODELS["DeepSeek-V3"][1]["rope_parameters"]},
    ),
    "GLM-5": (
        "GlmMoeDsa",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    ),
    "MiniMax-M2": (
        "MiniMaxM2",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "Qwen3-Next-80B-A3B": (
        "Qwen3Next",
        {
            "max_position_embeddings": 262144,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000.0,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
    # The defaults of the classes.
    "Qwen3.5": ("Qwen3_5Text", {}),
    "Qwen3.5 with experts": ("Qwen3_5MoeText", {}),
}
# What transformers would put inside `text_config`, as the file on the hub has it: beside the rest.
AS_PUBLISHED = {
    "Kimi-K2": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "vocab_size": 163840,
        "hidden_size": 7168,
        "hidden_act": "silu",
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 32.0,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
    "Qwen2.5-VL-7B": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "hidden_act": "silu",
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "image_token_id": 151655,
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    },
}

if __name__ == "__main__":
    configs = {}
    for name, (cls, own) in MODELS.items():
        config = getattr(transformers, f"{cls}Config")(**own)
        configs[name] = config.to_diff_dict()
        configs[name].pop("transformers_version", None)
        task = "ForConditionalGeneration" if "vision_config" in own else "ForCausalLM"
        configs[name]["architectures"] = [f"{cls.removesuffix('Text')}{task}"]
    configs |= AS_PUBLISHED
    path = pathlib.Path(__file__).parent / "configs.json"
    lines = (f"{json.dumps(name)}: {json.dumps(config)}" for name, config in configs.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
