"""Models in GGUF files: the same numbers as in the folder they came from, and every refusal."""

import gguf
import gguf_files
import hf_checkpoints
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from jaxrl_llm.models.architecture import RopeScaling
from jaxrl_llm.models.finite import NotFiniteError
from jaxrl_llm.models.hf import checkpoint, config_reader, gguf_file, tensor_names
from jaxrl_llm.models.hf.config_reader import CheckpointFormatError
from jaxrl_llm.models.transformer import Network

LLAMA3 = np.array([1.0, 1.0, 6.0, 8.0], np.float32)


def read(file):
    """Returns shape, and every tensor by transformers' name."""
    shape = gguf_file.read_architecture(file)
    contents = gguf_file.tensor_reader(file, Network(shape), np.dtype(np.float32))
    return shape, {
        file_name: contents(name, layer, 0)
        for name in tensor_names.tensor_names(shape)
        for layer, file_name in enumerate(name.file_names)
    }


@pytest.mark.parametrize("family", hf_checkpoints.FAMILIES)
def test_shape_and_weights_are_those_of_the_folder(tmp_path, family):
    path = gguf_files.make(tmp_path / "model.gguf", family)
    shape, found = read(gguf_file.open_file(path))
    config = {**hf_checkpoints.kept(family)[1]["lm"], "vocab_size": gguf_files.VOCABULARY}
    theta = config.pop("rope_parameters")["rope_theta"]
    assert shape == config_reader.architecture_from_config({**config, "rope_theta": theta})
    expected = gguf_files.tensors(family)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_quantized_matrices_are_what_the_library_reads(tmp_path):
    kinds = [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]
    for kind in kinds:
        path = gguf_files.make(tmp_path / f"{kind.name}.gguf", "qwen2", kind)
        found = read(gguf_file.open_file(path))[1]
        name = "model.layers.1.self_attn.v_proj.weight"
        array = gguf_files.tensors("qwen2")[name]
        expected = gguf.dequantize(gguf.quantize(array, kind), kind)
        np.testing.assert_array_equal(found[name], expected)
        # Steps of 4 bits over the range of a block of 32 numbers.
        np.testing.assert_allclose(found[name], array, atol=np.ptp(array) / 14)


def test_llama3_scaling_is_found_by_its_factors(tmp_path):
    wavelengths = 2 * np.pi * 500_000.0 ** (np.arange(4) / 4)
    keep = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    factors = (1 / (keep + (1 - keep) / 8)).astype(np.float32)
    theta = {"llama.rope.freq_base": 500_000.0}
    tensor = {"rope_freqs.weight": (Kind.F32, factors)}
    path = gguf_files.make(tmp_path / "a.gguf", "llama", more_tensors=tensor, **theta)
    assert gguf_file.read_architecture(gguf_file.open_file(path)).rope_scaling == RopeScaling(8.0)
    tensor = {"rope_freqs.weight": (Kind.F32, factors + np.float32([0, 0.1, 0, 0]))}
    path = gguf_files.make(tmp_path / "b.gguf", "llama", more_tensors=tensor, **theta)
    with pytest.raises(CheckpointFormatError, match=r"rope_freqs.weight is not Llama 3's scaling"):
        read(gguf_file.open_file(path))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"general.type": "adapter"}, "holds 'adapter', not a model"),
        ({"split.count": 3}, "one of 3 parts of a model; .* --merge"),
        ({"llama.block_count": 2}, "llama has no blk.2"),
        ({"llama.block_count": 4}, "blk.3.* is missing; copy it again"),
        ({"llama.feed_forward_length": 64}, r"blk.0.ffn_\w+.weight is \[.*48.*\], expected \[.*64"),
        ({"llama.context_length": None}, "llama.context_length is None; expected one number"),
        ({"llama.attention.head_count": [4, 2]}, r"head_count is \[4, 2\]; expected one number"),
        ({"llama.attention.value_length": 4}, "value_length is 4, but heads have 8"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type is 'yarn'; .* not implemented"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8; it is not implemented"),
    ],
)
def test_gguf_features_that_are_not_supported_are_refused(tmp_path, changes, message):
    path = gguf_files.make(tmp_path / "model.gguf", "llama", **changes)
    with pytest.raises(CheckpointFormatError, match=f"^{path}: .*?{message}"):
        read(gguf_file.open_file(path))


def test_other_networks_are_refused(tmp_path):
    path = gguf_files.write(tmp_path / "a.gguf", "mamba", {}, {})
    with pytest.raises(CheckpointFormatError, match="architecture is 'mamba'; known: llama, qwen2"):
        read(gguf_file.open_file(path))
    path = gguf_files.write(tmp_path / "b.gguf", "llama", {}, {})
    with pytest.raises(CheckpointFormatError, match=r"token_embd.weight is missing"):
        read(gguf_file.open_file(path))
    bias = {"blk.0.attn_q.bias": (Kind.F32, np.zeros(32, np.float32))}
    path = gguf_files.make(tmp_path / "c.gguf", "llama", more_tensors=bias)
    with pytest.raises(CheckpointFormatError, match=r"llama has no blk.0.attn_q.bias"):
        read(gguf_file.open_file(path))


def test_damaged_files_are_named(tmp_path):
    path = gguf_files.make(tmp_path / "model.gguf", "llama")
    whole = path.read_bytes()
    draw = np.random.default_rng(0)
    for length in [0, 3, 4, 20, *draw.integers(24, len(whole), 20), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointFormatError, match=f"^{path}: not a complete GGUF file"):
            gguf_file.open_file(path)
    path.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(CheckpointFormatError, match="magic invalid; copy it again"):
        gguf_file.open_file(path)
    with pytest.raises(CheckpointFormatError, match=r"no such file; .* ends in \.gguf"):
        gguf_file.open_file(tmp_path / "none.gguf")
    for place in draw.integers(4, 2000, 40):  # a byte of the header: another model, or none
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            read(gguf_file.open_file(path))
        except CheckpointFormatError as error:
            assert str(error).startswith(str(path))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_none_are_named(tmp_path, bad):
    name = "blk.1.ffn_up.weight"
    kind, array = gguf_files.network_tensors("llama")[name]
    array = np.array(array)
    array.flat[5] = bad
    more = {name: (kind, array)}
    file = gguf_file.open_file(gguf_files.make(tmp_path / "m.gguf", "llama", more_tensors=more))
    network = Network(gguf_file.read_architecture(file))
    out = tmp_path / "out"
    contents = gguf_file.tensor_reader(file, network, np.dtype(np.float32))
    with pytest.raises(NotFiniteError, match=rf"m\.gguf: {name} has 1 NaN or infinite numbers"):
        checkpoint.save_streamed(out, network, contents, np.dtype(np.float32))
    assert not out.exists()
