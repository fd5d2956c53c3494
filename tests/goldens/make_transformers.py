"""Makes `FAMILY.safetensors`: a tiny random model of each family and what transformers computes.

`pip install -e '.[parity]'`, then `python tests/goldens/make_transformers.py`. A file holds

- the weights of a language model and of a classifier on the same body, by transformers' names;
- adapters by peft's names, as peft writes them;
- `rows.*`: token rows, their lengths, and what the models say of them: logits, scores, and the
  last row's logits with the adapters;
- `greedy.*`: prompts and what the model answers them with;

and in its metadata the folders' config.json, as JSON. `tests/hf_checkpoints.py` reads it.
"""

import json
import pathlib
import tempfile

import numpy as np
import peft
import safetensors.numpy
import torch
import transformers

GOLDENS = pathlib.Path(__file__).parent
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
LENGTHS = (64, 40, 1, 17)
PROMPTS = (1, 30, 17, 8)  # their lengths
NUM_GREEDY = 24
LORA = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj"]}
LORA["target_modules"] += ["down_proj"]
KINDS = {
    "lm": transformers.AutoModelForCausalLM,
    "scalar": transformers.AutoModelForSequenceClassification,
}


def randomize(model):
    """Biases and norms too: their defaults would hide a mistake. Scores large enough to tell."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm, score = "norm" in name, "score" in name
            size = 0.5 if norm else 1.0 if score else 0.15
            parameter.copy_(float(norm) + size * torch.randn_like(parameter))


def compute(family):
    """Returns what the family's file holds: arrays by name, and its metadata."""
    config_class, own = CONFIGS[family]
    torch.manual_seed(0)
    arrays, configs = {}, {}
    tokens = np.random.default_rng(0).integers(4, 96, (len(LENGTHS), max(LENGTHS)))
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    tokens = np.where(mask, tokens, 0)
    arrays |= {"rows.tokens": tokens.astype(np.int32), "rows.lengths": np.array(LENGTHS, np.int32)}
    rows = {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask)}
    body = None
    for head, auto in KINDS.items():
        config = config_class(**SIZES, **own)
        if head == "scalar":
            config.num_labels = 1
        model = auto.from_config(config).eval()
        randomize(model)
        if body is None:
            body = model.model.state_dict()
        model.model.load_state_dict(body)
        with torch.no_grad():
            found = model(**rows).logits.numpy()
        arrays["rows.logits" if head == "lm" else "rows.scores"] = (
            found[mask] if head == "lm" else found[:, 0]
        )
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            arrays |= safetensors.numpy.load_file(f"{folder}/model.safetensors")
            configs[head] = (pathlib.Path(folder) / "config.json").read_text()
        if head == "lm":
            arrays |= answers(model)
            language_model = model
    adapted, configs["adapters"] = adapters(language_model, rows, mask)
    return {k: np.ascontiguousarray(v) for k, v in (arrays | adapted).items()}, configs


def answers(model):
    """Greedy continuations, those that end early filled with the padding token."""
    random = np.random.default_rng(0)
    found = {}
    for number, length in enumerate(PROMPTS):
        prompt = random.integers(4, 96, length)
        tokens = torch.tensor(prompt[None])
        whole = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=NUM_GREEDY,
        )
        found[f"greedy.{number}.prompt"] = prompt.astype(np.int32)
        found[f"greedy.{number}.answer"] = whole[0, length:].numpy().astype(np.int32)
    return found


def adapters(model, rows, mask):
    """Adapters that have learned something, as peft writes them, and the logits with them."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **LORA)).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
        logits = adapted(**rows).logits.numpy()[-1][mask[-1]]  # one row is enough
    with tempfile.TemporaryDirectory() as folder:
        adapted.save_pretrained(folder)
        arrays = safetensors.numpy.load_file(f"{folder}/adapter_model.safetensors")
        config = (pathlib.Path(folder) / "adapter_config.json").read_text()
    return {**arrays, "rows.adapted_logits": logits}, config


def main():
    for family in CONFIGS:
        arrays, configs = compute(family)
        configs["made_by"] = json.dumps(
            {m.__name__: m.__version__ for m in (transformers, torch, peft)}
        )
        safetensors.numpy.save_file(arrays, GOLDENS / f"{family}.safetensors", configs)


if __name__ == "__main__":
    main()
