"""Small models of each family that GGUF files hold: settings, and weights drawn by name."""

import zlib

import gguf_files
import numpy as np

from jaxrl_llm.data import gguf_tokenizer
from jaxrl_llm.models.hf import config_reader
from jaxrl_llm.models.hf.families import FAMILIES
from jaxrl_llm.models.transformer import Network

_SIZES = {
    "vocab_size": gguf_files.VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_GEMMA = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "num_hidden_layers": 6,
}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_NUM_PIECES = 269  # of `gguf_files.sentence_piece`
_EXPERTS = {"num_experts_per_tok": 2}
CONFIGS = {
    "llama": {"rope_scaling": _LLAMA3, "tie_word_embeddings": True},
    "llama_linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "mistral": {"sliding_window": None, "vocab_size": _NUM_PIECES},
    "mixtral": {**_EXPERTS, "num_local_experts": 4, "sliding_window": None},
    "qwen2": {},
    "qwen2_yarn": {"rope_scaling": _YARN},
    "qwen3": {},
    "qwen3_moe": {
        **_EXPERTS,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gemma2": {**_GEMMA, **_CAPS, "vocab_size": _NUM_PIECES},
    # Its converter cuts the embedding to the tokens, those that are added counted twice.
    "gemma3_text": {**_GEMMA, "rope_local_base_freq": 5_000.0, "vocab_size": 272},
}
TOKENIZERS = {
    "llama": gguf_files.byte_level("llama-bpe"),
    "gemma2": gguf_files.sentence_piece(**{"tokenizer.ggml.add_space_prefix": False}),
    "mistral": gguf_files.sentence_piece(),
}


def network(name):
    """Returns a model; the part of its name after a family's is a setting."""
    family = next(f for f in (name, name.rpartition("_")[0]) if f in FAMILIES)
    config = {**_SIZES, **CONFIGS[name], "model_type": family}
    config["architectures"] = [config_reader.hf_class_name(family, "lm")]
    return Network(config_reader.architecture_from_config(config))


def tokenizer(name):
    return gguf_tokenizer.from_fields(TOKENIZERS.get(name, gguf_files.byte_level("qwen2")), name)


def contents(network):
    """Returns a reader of weights that are drawn by the names of their tensors."""
    leaves = network.abstract_params()

    def read(name, layer, expert):
        leaf = leaves
        for key in name.path:
            leaf = leaf[key]
        shape = name.stored_shape(leaf.shape)
        seed = zlib.crc32(name.name.format(layer, expert).encode())
        drawn = np.random.default_rng(seed).standard_normal(shape, np.float32)
        if name.path[-1] == "scale":
            return 1 - network.shape.norm_offset + 0.1 * drawn
        return drawn * np.float32(shape[-1] ** -0.5 if len(shape) > 1 else 0.1)

    return read
