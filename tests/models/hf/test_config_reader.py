"""config.json in both spellings, there and back, and what is refused."""

import dataclasses
import json

import pytest

from jaxrl_llm.models.architecture import Architecture, RopeScaling
from jaxrl_llm.models.hf import config_reader, config_writer
from jaxrl_llm.models.hf.config_reader import CheckpointFormatError
from jaxrl_llm.storage.hub import HubError

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
LLAMA_SHAPE = Architecture(
    family="llama",
    vocab_size=128256,
    hidden_size=2048,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_size=64,
    mlp_size=8192,
    max_positions=131072,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192),
    norm_eps=1e-5,
    tie_embeddings=True,
)
QWEN = {**LLAMA, "rope_scaling": None, "rope_theta": 1e6, "use_sliding_window": False}
QWEN2 = {**QWEN, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**QWEN, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128}


def test_both_spellings_of_rotary_settings():
    assert config_reader.architecture_from_config(LLAMA) == LLAMA_SHAPE
    rest = {k: v for k, v in LLAMA.items() if not k.startswith("rope")}
    inner = {**LLAMA["rope_scaling"], "rope_theta": 500000.0}
    assert config_reader.architecture_from_config({**rest, "rope_parameters": inner}) == LLAMA_SHAPE
    outer = {**rest, "rope_theta": 500000.0, "rope_parameters": LLAMA["rope_scaling"]}
    assert config_reader.architecture_from_config(outer) == LLAMA_SHAPE
    old = dict(LLAMA["rope_scaling"])
    old["type"] = old.pop("rope_type")
    assert config_reader.architecture_from_config({**LLAMA, "rope_scaling": old}) == LLAMA_SHAPE


def test_families_differ_as_they_should():
    qwen2, qwen3 = (
        config_reader.architecture_from_config(QWEN2),
        config_reader.architecture_from_config(QWEN3),
    )
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_size) == (True, False, 64)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_size) == (False, True, 128)
    assert qwen2.rope_scaling == RopeScaling() and qwen2.rope_theta == 1e6
    # Qwen3's head size does not follow from the others; 128 is its default.
    without = {k: v for k, v in QWEN3.items() if k != "head_dim"}
    assert config_reader.architecture_from_config(without).head_size == 128


@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3], ids=lambda c: c["model_type"])
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_config_written_and_read_is_the_same(config, head):
    shape = config_reader.architecture_from_config(config)
    written = json.loads(json.dumps(config_writer.to_hf_config(shape, head, "bfloat16")))
    assert config_reader.architecture_from_config(written) == shape
    assert config_reader.family_and_head(written) == (config["model_type"], head)


def test_other_keys_of_the_source_are_kept_and_stale_ones_replaced():
    source = {
        **{k: v for k, v in LLAMA.items() if not k.startswith("rope")},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1.0},
        "bos_token_id": 7,
        "dtype": "float16",
        "id2label": {"0": "a", "1": "b"},
    }
    written = config_writer.to_hf_config(LLAMA_SHAPE, "scalar", "float32", source)
    assert written["bos_token_id"] == 7
    assert written["torch_dtype"] == "float32" and "dtype" not in written
    assert len(written["id2label"]) == 1
    assert config_reader.architecture_from_config(written) == LLAMA_SHAPE


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"model_type": "gpt2"},
            r"here: model_type is 'gpt2'; known families: llama, qwen2, qwen3",
        ),
        (
            {"architectures": ["LlamaForTokenClassification"]},
            "known for llama: LlamaForCausalLM, LlamaForSequenceClassification",
        ),
        ({"architectures": None}, "here: architectures is "),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is implemented"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is"),
        ({"quantization_config": ["fp8"]}, r"quantization_config is \['fp8'\]; only"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["sliding_attention"]}, "layer_types is .* only full_attention"),
        ({"num_key_value_heads": 5}, "num_key_value_heads=5 does not divide"),
        ({"vocab_size": None}, "here: vocab_size missing or no integer"),
        ({"head_dim": 7}, "heads of 7; rotary embeddings need an even size"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "of type yarn lacks original_max_position",
        ),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "'default' or 'linear', 'llama3', 'yarn'"),
        ({"rope_scaling": {"full_attention": {"rope_theta": 1.0}}}, "the same for all layers"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}},
            "lacks low_freq_factor, high_freq_factor, original_max_position_embeddings",
        ),
    ],
)
def test_unsupported_configs_are_refused(changes, message):
    with pytest.raises(CheckpointFormatError, match=message):
        config_reader.architecture_from_config({**LLAMA, **changes}, "here")


def test_unwritable_shapes_are_refused():
    with pytest.raises(CheckpointFormatError, match="family is 'gpt2'; known families: llama"):
        config_writer.to_hf_config(dataclasses.replace(LLAMA_SHAPE, family="gpt2"))
    with pytest.raises(CheckpointFormatError, match="llama models have qkv_bias=False"):
        config_writer.to_hf_config(dataclasses.replace(LLAMA_SHAPE, qkv_bias=True))


def test_other_kinds_of_folders_are_named(tmp_path):
    with pytest.raises(CheckpointFormatError, match="or a name of the hub: org/name"):
        config_reader.read_config("Qwen3-8B")
    with pytest.raises(HubError, match=r"HF_HUB_OFFLINE is set; .*no such local folder"):
        config_reader.read_config("Qwen/Qwen3-8B")
    (tmp_path / "config.json").write_text('{"trainer": {"num_steps": 1}}')
    with pytest.raises(CheckpointFormatError, match=r"a run folder, .* give it as"):
        config_reader.read_config(tmp_path)


@pytest.mark.parametrize("bracket", ["[", '{"a":'])
@pytest.mark.parametrize("end", ["", "}"])
def test_brackets_without_end_are_no_config(tmp_path, bracket, end):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "x": ' + bracket * 100_000 + end)
    with pytest.raises(CheckpointFormatError) as raised:
        config_reader.read_config(tmp_path)
    said = f"{path}: cannot be read as JSON: brackets are nested too deep; copy the file again"
    assert str(raised.value) == said


def test_end_of_sequence_ids(tmp_path):
    with pytest.raises(CheckpointFormatError, match="no such folder"):
        config_reader.eos_token_ids(tmp_path / "absent")
    with pytest.raises(CheckpointFormatError, match=r"has no config\.json"):
        config_reader.eos_token_ids(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert config_reader.eos_token_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert config_reader.eos_token_ids(tmp_path) == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    assert config_reader.eos_token_ids(tmp_path) == (5, 9)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointFormatError, match="cannot be read as JSON"):
        config_reader.eos_token_ids(tmp_path)
