"""Folders of random models, for tests and for dry runs before a model is downloaded.

`EXAMPLES` has a tiny config.json of every family. A folder of any other config, such as that of a
published model with fewer layers, is written in the same way.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from jaxrl_llm.models.hf import checkpoint, config_reader
from jaxrl_llm.models.hf.families import FAMILIES
from jaxrl_llm.models.hf.family_format import CheckpointFormatError
from jaxrl_llm.models.transformer import Network

_SIZES: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_WINDOW = 24
_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_LATENTS = {
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
}
# Many heads: a key that none of them sees has index score 0, and top-k may choose either of equals.
_INDEXER = {"index_topk": 11, "index_n_heads": 24, "index_head_dim": 14, **_LATENTS}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
_GATED_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}
_SHARED_EXPERT = {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 20}
_GATED_DELTA_MOE = {
    **_GATED_DELTA,
    **_SHARED_EXPERT,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 2,
}
_MROPE = {
    "rope_type": "default",
    "rope_theta": 500.0,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}
_GATED_MROPE = {
    "rope_parameters": {**_MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
}
_ENCODER: Mapping[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 4,
    "intermediate_size": 48,
    "out_hidden_size": 32,
    "num_position_embeddings": 25,
}
_TOWER = {"image_token_id": 95, "vision_config": _ENCODER}
_TOWER_WITH_DEEPSTACK = {
    **_TOWER,
    "vision_config": {**_ENCODER, "deepstack_visual_indexes": [0, 1]},
}
_LOCAL_ROPE = {"rope_type": "default", "rope_theta": 100.0}
# What sets a tiny model of each family apart, beside `_SIZES`.
_OWN_KEYS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"rope_parameters": _YARN},
    "qwen2": {"head_dim": 8, "tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "qwen2_5_vl": {
        "head_dim": 8,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
        "image_token_id": 95,
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 4,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {"rope_parameters": _MROPE, **_TOWER_WITH_DEEPSTACK},
    "qwen3_vl_moe": {
        **_EXPERTS,
        "num_experts": 4,
        "mlp_only_layers": [1],
        "rope_parameters": _MROPE,
        **_TOWER_WITH_DEEPSTACK,
    },
    "mistral": {"sliding_window": _WINDOW},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **_EXPERTS,
        "num_experts": 4,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
    },
    "gemma2": {
        "sliding_window": _WINDOW,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "num_hidden_layers": 6,
        "sliding_window": _WINDOW,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
            "sliding_attention": _LOCAL_ROPE,
        },
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": _WINDOW,
        "rope_parameters": {**_YARN, "truncate": False},
    },
    "deepseek_v3": {
        **_EXPERTS,
        **_LATENTS,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.707},
    },
    "glm4": {},
    "glm4_moe": {**_EXPERTS, "n_routed_experts": 4, "use_qk_norm": True, "attention_bias": True},
    "llama4_text": {
        "num_hidden_layers": 5,
        "no_rope_layer_interval": 3,
        "intermediate_size_mlp": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": _WINDOW,
        "floor_scale": 8,
    },
    "smollm3": {"no_rope_layer_interval": 3},
    "olmo2": {"num_key_value_heads": 1},
    "olmo3": {
        "sliding_window": _WINDOW,
        "rope_parameters": {"full_attention": _YARN, "sliding_attention": _LOCAL_ROPE},
    },
    "phi3": {"head_dim": 8, "sliding_window": 17, "tie_word_embeddings": True},
    "minimax_m2": {
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "rope_parameters": {"rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    },
    "deepseek_v32": {
        **_EXPERTS,
        **_INDEXER,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 2,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.707},
    },
    "glm_moe_dsa": {
        **_EXPERTS,
        **_INDEXER,
        "n_routed_experts": 4,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
    },
    "qwen3_next": {**_GATED_DELTA, **_SHARED_EXPERT},
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_5_moe_text": _GATED_DELTA_MOE,
    "qwen3_5": {**_GATED_DELTA, **_GATED_MROPE, **_TOWER},
    "qwen3_5_moe": {**_GATED_DELTA_MOE, **_GATED_MROPE, **_TOWER},
}
# By family, the contents of config.json.
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    family: {
        **_SIZES,
        **keys,
        "model_type": family,
        "architectures": [config_reader.hf_class_name(family, "lm")],
    }
    for family, keys in _OWN_KEYS.items()
}


def example(family: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny model of a family, with some keys changed.

    Raises CheckpointFormatError if the family is unknown.
    """
    if family not in EXAMPLES:
        raise CheckpointFormatError(
            f"{family!r} is no known family of models; known: {', '.join(FAMILIES)}"
        )
    return {**EXAMPLES[family], **changes}


def save(
    folder: str | pathlib.Path,
    config: Mapping[str, Any],
    *,
    seed: int = 0,
    dtype: str = "float32",
    tokenizer: Any = None,
    source: str = "config.json",
) -> None:
    """Writes a model folder with random weights: normal(0.02), norms one, biases zero.

    The weights are made on this process's first device before they are written.

    Args:
      config: Contents of a config.json: of `example`, or of any model of a known family.
      dtype: Of the stored tensors: "float32", "bfloat16" or "float16".
      tokenizer: Its files are written too; None: none are.
      source: What error messages call the config.

    Raises:
      CheckpointFormatError: If the config cannot be read, the tokenizer has more tokens than the
        vocabulary, or the folder holds something other than an earlier export.
    """
    network = Network(config_reader.architecture_from_config(config, source))
    with jax.default_device(jax.local_devices()[0]):
        params = jax.jit(network.init)(jax.random.key(seed))
    checkpoint.save(folder, network, params, tokenizer, source_config=config, dtype=dtype)
