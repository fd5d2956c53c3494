"""Models as GGUF files: what llama.cpp's converter writes, what comes back, and every refusal."""

import dataclasses
import json
import pathlib
import zlib

import gguf
import gguf_models
import numpy as np
import pytest

from jaxrl_llm.data import gguf_tokenizer
from jaxrl_llm.models.architecture import LayerType, RopeScaling
from jaxrl_llm.models.finite import NotFiniteError
from jaxrl_llm.models.hf import gguf_file, gguf_writer, tensor_names
from jaxrl_llm.models.hf.config_reader import CheckpointFormatError
from jaxrl_llm.models.transformer import Network

CONVERTED = json.loads((pathlib.Path(__file__).parents[2] / "goldens/llama_cpp.json").read_text())
READ_BACK = ("llama", "qwen2", "qwen3")


def write(path, name, kind="f16", network=None, read=None):
    network = network or gguf_models.network(name)
    tokenizer = gguf_models.tokenizer(name)
    fields = gguf_tokenizer.to_fields(tokenizer, network.shape.vocab_size)
    gguf_writer.save(
        path,
        network,
        read or gguf_models.contents(network),
        fields,
        weight_type=kind,
        general_fields={"general.name": name},
    )
    return path


def described(path):
    """Returns fields and tensors as `goldens/make_llama_cpp.py` describes them."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for name, value in fields.items():
        if isinstance(value, list) and len(value) > 8:
            fields[name] = [len(value), zlib.crc32(json.dumps(value).encode())]
    tensors = {
        tensor.name: [tensor.tensor_type.name, tensor.shape.tolist(), zlib.crc32(tensor.data)]
        for tensor in reader.tensors
    }
    return fields, tensors


@pytest.mark.parametrize("name", gguf_models.CONFIGS)
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_fields_and_tensors_are_the_converters(tmp_path, name, kind):
    fields, tensors = described(write(tmp_path / "model.gguf", name, kind))
    expected = CONVERTED[f"{name}.{kind}"]
    # Computed in another order of operations, see the test of its values.
    assert (
        tensors.pop("rope_freqs.weight", [0])[0]
        == expected["tensors"].pop("rope_freqs.weight", [0])[0]
    )
    assert tensors == expected["tensors"]

    theirs, architecture = expected["fields"], fields["general.architecture"]
    differing = {key for key in fields | theirs if fields.get(key) != theirs.get(key)}
    differing -= {"GGUF.kv_count", "general.name"}
    # Written always, where the converter leaves llama.cpp's default.
    differing -= {f"tokenizer.ggml.{key}" for key in ("add_bos_token", "add_eos_token")}
    if name in ("mistral", "gemma2"):
        # Without a file of SentencePiece's own the converter has no scores, and takes <unk> for
        # a control token.
        differing -= {f"tokenizer.ggml.{key}" for key in ("scores", "token_type")}
        differing -= {"tokenizer.ggml.add_space_prefix"} if name == "mistral" else set()
    if name == "gemma2":  # whose default is 10,000
        assert fields["gemma2.rope.freq_base"] == 10_000.0
        differing.remove("gemma2.rope.freq_base")
    if name == "qwen2_yarn":  # the value that llama.cpp computes
        differing.remove("qwen2.rope.scaling.yarn_attn_factor")
    assert not differing, architecture


def tensors_by_name(path):
    """Returns a file's tensors as our importer reads them."""
    file = gguf_file.open_file(path)
    network = Network(gguf_file.read_architecture(file))
    read = gguf_file.tensor_reader(file, network, np.dtype(np.float32))
    names = tensor_names.tensor_names(network.shape)
    return network.shape, {
        file_name: read(name, layer, 0)
        for name in names
        for layer, file_name in enumerate(name.file_names)
    }


def drawn(network):
    read = gguf_models.contents(network)
    return {
        file_name: read(name, layer, 0)
        for name in tensor_names.tensor_names(network.shape)
        for layer, file_name in enumerate(name.file_names)
    }


@pytest.mark.parametrize("name", READ_BACK)
def test_float16_comes_back(tmp_path, name):
    network = gguf_models.network(name)
    if name == "llama":  # among Llama 3's settings only the factor is read back
        scaling = RopeScaling(8.0, original_max_positions=8192)
        shape = dataclasses.replace(network.shape, rope_scaling=scaling, rope_theta=500_000.0)
        network = Network(shape)
    shape, tensors = tensors_by_name(write(tmp_path / "model.gguf", name, network=network))
    assert shape == network.shape
    expected = drawn(network)
    assert tensors.keys() == expected.keys()
    for tensor_name, array in expected.items():
        stored = array.astype(np.float16) if array.ndim > 1 else array
        np.testing.assert_array_equal(tensors[tensor_name], stored, err_msg=tensor_name)


@pytest.mark.parametrize("name", READ_BACK[1:])
def test_eight_bits_are_within_half_a_step(tmp_path, name):
    network = gguf_models.network(name)
    _, tensors = tensors_by_name(write(tmp_path / "model.gguf", name, "q8_0"))
    for tensor_name, array in drawn(network).items():
        if array.ndim == 1:
            np.testing.assert_array_equal(tensors[tensor_name], array)
            continue
        blocks, stored = (a.reshape(-1, 32) for a in (array, tensors[tensor_name]))
        # A scale is the largest of 32 numbers over 127, as a float16: it may be 2 ** -11 smaller,
        # which moves the largest number by 127 * 2 ** -11 of a step.
        step = np.abs(blocks).max(1, keepdims=True) / 127
        assert (np.abs(stored - blocks) <= step * (0.5 + 127 * 2.0**-11)).all(), tensor_name
        assert np.abs(stored - blocks).max() > 0


def test_llama3_scaling_divides_each_frequency(tmp_path):
    path = write(tmp_path / "model.gguf", "llama")
    (factors,) = (t.data for t in gguf.GGUFReader(path).tensors if t.name == "rope_freqs.weight")
    # Wavelengths of 2 pi 10 ** (i / 2): 6.3, 20, 63, 199, ... of 64 original positions. Up to a
    # quarter of them they stay, from all of them on they are divided by 8.
    keep = np.clip((64 / (2 * np.pi * 10.0 ** (np.arange(8) / 2)) - 1) / 3, 0, 1)
    np.testing.assert_allclose(factors, 1 / (keep + (1 - keep) / 8), rtol=1e-5)


def test_tensors_are_written_as_they_are_read(tmp_path):
    network = gguf_models.network("qwen3_moe")
    draw, path = gguf_models.contents(network), tmp_path / "model.gguf"
    sizes = []

    def read(name, layer, expert):
        sizes.append((tmp_path / ".model.gguf.partial").stat().st_size)
        assert not path.exists()
        return draw(name, layer, expert)

    write(path, "qwen3_moe", read=read)
    # Before each tensor those before it are in the file; the experts of a layer are one tensor.
    assert len(sizes) == sum(len(n.file_names) for n in tensor_names.tensor_names(network.shape))
    assert sizes == sorted(sizes) and len(set(sizes)) == len(gguf.GGUFReader(path).tensors)
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize(
    "value, error, message",
    [
        (np.nan, NotFiniteError, "token_embd.weight has NaN or infinite numbers; export another"),
        (1e5, CheckpointFormatError, r"numbers up to 1e\+05, float16 ends at 65504; .*=bf16"),
    ],
)
def test_numbers_that_a_file_cannot_hold(tmp_path, value, error, message):
    network, path = gguf_models.network("qwen2"), tmp_path / "model.gguf"
    before = write(path, "qwen2").read_bytes()
    draw = gguf_models.contents(network)

    def read(name, layer, expert):
        array = np.array(draw(name, layer, expert))
        if name.path == ("embed",):
            array[3, 5] = value
        return array

    with pytest.raises(error, match=message):
        write(path, "qwen2", read=read)
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]
    assert path.read_bytes() == before
    if error is CheckpointFormatError:
        for kind in ("bf16", "q8_0"):
            _, tensors = tensors_by_name(write(path, "qwen2", kind, read=read))
            stored = tensors["model.embed_tokens.weight"][3, 5]
            assert stored == pytest.approx(value, rel=2.0**-8)


LOCAL, FULL = LayerType(window=8, rope="local"), LayerType()


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("qwen2", {"family": "glm4"}, "the families that are written are llama, mistral"),
        ("qwen2", {"layers": (LayerType(window=8), FULL)}, "sliding windows, llama.cpp's .* none"),
        ("gemma3_text", {"layers": (LOCAL, FULL) * 3}, "every layer but each 6th has a sliding"),
        ("gemma3_text", {"query_scale": 0.5}, "scales scores by 0.5, llama.cpp by 0.25"),
        ("gemma2", {"tie_embeddings": False}, "output projection, llama.cpp uses the embedding"),
        ("qwen2", {"rope_scaling": RopeScaling(8.0)}, "Llama 3's rotary scaling"),
        (
            "qwen2_yarn",
            {"rope_scaling": RopeScaling(4.0, kind="yarn", magnitude=1.0)},
            r"its YaRN scales by 1, llama.cpp by 1\.13863",
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(tmp_path, name, changes, message):
    shape = dataclasses.replace(gguf_models.network(name).shape, **changes)
    with pytest.raises(CheckpointFormatError, match=rf"no GGUF file can hold .*{message}.*=hf"):
        write(tmp_path / "model.gguf", name, network=Network(shape))
    assert not any(tmp_path.iterdir())


def test_other_heads_and_weights_of_experts_are_refused():
    network = dataclasses.replace(gguf_models.network("qwen2"), head="scalar")
    with pytest.raises(CheckpointFormatError, match="it is a reward model"):
        gguf_writer.check(network)
    shape = gguf_models.network("qwen3_moe").shape
    experts = dataclasses.replace(shape.experts, normalized=False)
    with pytest.raises(CheckpointFormatError, match="expert weights are not normalized"):
        gguf_writer.check(Network(dataclasses.replace(shape, experts=experts)))
    layers = (LayerType(experts=True), LayerType())
    with pytest.raises(CheckpointFormatError, match="some layers have experts and others none"):
        gguf_writer.check(Network(dataclasses.replace(shape, layers=layers)))


def test_within_a_sliding_window_attention_is_full():
    shape = gguf_models.network("mistral").shape
    windowed = dataclasses.replace(shape, layers=(LayerType(window=100),) * shape.num_layers)
    gguf_writer.check(Network(windowed))
    assert gguf_writer.architecture_fields(windowed)["llama.context_length"] == 100
    assert gguf_writer.architecture_fields(shape)["llama.context_length"] == 256


def test_other_files_are_not_replaced(tmp_path):
    path = tmp_path / "notes.gguf"
    path.write_text("notes")
    with pytest.raises(CheckpointFormatError, match="exists and is no GGUF file; name another"):
        write(path, "qwen2")
    assert path.read_text() == "notes"
    with pytest.raises(CheckpointFormatError, match="is a folder; name a file"):
        write(tmp_path, "qwen2")
