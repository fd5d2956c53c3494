"""Small random checkpoints of each family, made by transformers."""

import json

import torch
import transformers

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 0,
}
# Of the four wavelengths (6, 30, 140 and 660 tokens) one is kept, one blended, two stretched.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = {
    "llama": (
        transformers.LlamaConfig,
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-5},
    ),
    "qwen2": (
        transformers.Qwen2Config,
        {"tie_word_embeddings": False, "rope_parameters": {"rope_theta": 1e4}},
    ),
    "qwen3": (
        transformers.Qwen3Config,
        {"tie_word_embeddings": False, "head_dim": 16, "rope_parameters": {"rope_theta": 1e6}},
    ),
}


def make(folder, family, head="lm", dtype="float32", seed=0, max_shard_size="5GB", **changes):
    """Saves a random model of `family` in `folder` and returns it."""
    config_class, own = CONFIGS[family]
    config = config_class(**{**SIZES, **own, **changes})
    torch.manual_seed(seed)
    if head == "scalar":
        config.num_labels = 1
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # biases and norms too: their defaults would hide a mistake
        for name, parameter in model.named_parameters():
            kind = 1.0 if "norm" in name else 0.0
            parameter.copy_(kind + torch.randn_like(parameter) * (0.5 if kind else 0.15))
    model = model.to(getattr(torch, dtype)).eval()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def edit_config(folder, **changes):
    """Changes keys of a folder's config.json; `...` removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
