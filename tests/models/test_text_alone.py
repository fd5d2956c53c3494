"""The text model of a folder of text and images: its config and weights, read without the rest."""

import numpy as np
import pytest
import safetensors.numpy
import tiny

from jaxrl_llm.models.hf import checkpoint, random_model
from jaxrl_llm.models.transformer import Network

TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LATENTS = {k: v for k, v in random_model.example("deepseek_v3").items() if k != "architectures"}
FAMILIES = {
    "Kimi_K25": (
        LATENTS,
        {
            **{key: VISION[key] for key in VISION if key != "image_size"},
            "pos_emb_height": 4,
            "pos_emb_width": 4,
        },
    ),
    "Gemma3": ({"sliding_window": 24}, VISION),
    "Llama4": (
        {
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 16,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        {**VISION, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    ),
}


@pytest.mark.parity
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_text_are_those_of_the_whole_model(name, tmp_path):
    import torch
    import transformers

    of_text, vision = FAMILIES[name]
    outer = {"projection_hidden_size": 16, "tie_word_embeddings": False} if "Kimi" in name else {}
    config = getattr(transformers, f"{name}Config")(
        text_config={**TEXT, **of_text}, vision_config=vision, **outer
    )
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    theirs.save_pretrained(tmp_path)
    if "Kimi" in name:  # transformers 5.23 gives text layers the name of the tower's; files do not
        tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
        renamed = {
            k.replace("_model.model.blocks", "_model.model.layers"): tensors[k] for k in tensors
        }
        safetensors.numpy.save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    network = Network(checkpoint.read_architecture(tmp_path))
    params = checkpoint.load(tmp_path, network)
    tokens = np.random.default_rng(0).integers(3, 88, (2, 40)).astype(np.int32)
    with torch.no_grad():
        wanted = theirs(input_ids=torch.from_numpy(tokens).long()).logits.numpy()
    positions = np.broadcast_to(np.arange(40, dtype=np.int32), tokens.shape)
    found = network.logits(
        params, tiny.hidden_states(network)(params, tokens, positions, np.ones_like(tokens))
    )
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())
    out = tmp_path / "out"
    checkpoint.save(out, network, params)
    alone = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        again = alone(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(again, wanted, atol=2e-5 * np.abs(wanted).max())
