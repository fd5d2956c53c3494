"""Published folders of Qwen3.5 with experts: stacked, inside a multimodal model, with MTP."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
import tiny
from kinds_of_layers import NETWORKS

from jaxrl_llm.models.hf import checkpoint, safetensors_file
from jaxrl_llm.models.hf.config_reader import CheckpointFormatError
from jaxrl_llm.models.hf.stacked_experts import split_experts
from jaxrl_llm.models.transformer import Network

EXPERTS = "mlp.experts"
STATES = NETWORKS["states"]
SHAPE = dataclasses.replace(
    STATES,
    family="qwen3_5_moe_text",
    tie_embeddings=False,
    mlp_size=0,
    layers=tuple(dataclasses.replace(kind, experts=True) for kind in STATES.layers),
)


def publish(ours, folder):
    """Writes the folder of a multimodal model around the text model that `ours` holds."""
    tensors = safetensors.numpy.load_file(ours / "model.safetensors")
    for layer in range(SHAPE.num_layers):
        prefix = f"model.layers.{layer}.{EXPERTS}"
        pop = lambda e, part, prefix=prefix: tensors.pop(f"{prefix}.{e}.{part}_proj.weight")  # noqa: E731
        experts = range(SHAPE.experts.num)
        gate_up = [np.concatenate([pop(e, "gate"), pop(e, "up")]) for e in experts]
        tensors[f"{prefix}.gate_up_proj"] = np.stack(gate_up)
        tensors[f"{prefix}.down_proj"] = np.stack([pop(e, "down") for e in experts])
    published = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in tensors.items()
    }
    extra = {"model.visual.patch_embed.proj.weight": (4, 3), "mtp.fc.weight": (32, 64)}
    published |= {name: np.zeros(dims, np.float32) for name, dims in extra.items()}
    folder.mkdir()
    safetensors.numpy.save_file(published, folder / "model.safetensors")
    text = json.loads((ours / "config.json").read_text())
    outer = {"model_type": "qwen3_5_moe", "text_config": {**text, "model_type": SHAPE.family}}
    outer["architectures"] = ["Qwen3_5MoeForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(outer))


def test_a_published_folder_is_read_and_written_as_a_text_model(tmp_path):
    network = Network(SHAPE)
    params = tiny.params(network)
    checkpoint.save(tmp_path / "ours", network, params)
    publish(tmp_path / "ours", tmp_path / "theirs")
    assert checkpoint.read_architecture(tmp_path / "theirs") == SHAPE
    with pytest.warns(UserWarning, match=r"1 tensors of multi-token prediction \(mtp.fc.weight"):
        found = checkpoint.load(tmp_path / "theirs", network)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    checkpoint.save(tmp_path / "again", network, found)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("ours", "again")]
    assert files[0] == files[1]


def test_parts_of_a_stack_lie_behind_each_other(tmp_path):
    stack = np.arange(2 * 6 * 4, dtype=np.float32).reshape(2, 6, 4)
    name = f"model.layers.3.{EXPERTS}"
    tensors = {f"{name}.gate_up_proj": stack, f"{name}.down_proj": stack, "other": stack}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    found = split_experts(safetensors_file.open_folder(tmp_path))
    assert len(found) == 1 + 2 * 3
    np.testing.assert_array_equal(found[f"{name}.1.gate_proj.weight"].view(), stack[1, :3])
    np.testing.assert_array_equal(found[f"{name}.1.up_proj.weight"].view(), stack[1, 3:])
    np.testing.assert_array_equal(found[f"{name}.0.down_proj.weight"].view(), stack[0])
    np.testing.assert_array_equal(found["other"].view(), stack)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_key_heads": 3}, "linear_num_key_heads=3 does not divide"),
        ({"layer_types": ["linear_attention"] * 3}, "none of 3 layers is 'full_attention'"),
        ({"attn_output_gate": False}, "attn_output_gate is False; only True is implemented"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer"),
    ],
)
def test_configs_that_are_not_implemented_are_refused(changes, message, tmp_path):
    checkpoint.save(tmp_path, Network(SHAPE), tiny.params(Network(SHAPE)))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointFormatError, match=message):
        checkpoint.read_architecture(tmp_path)
