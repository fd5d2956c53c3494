"""Model folders: bit-identical there and back, onto meshes, and every refusal."""

import dataclasses
import json
import warnings

import hf_checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import transformers

from jaxrl_llm.config import MeshConfig
from jaxrl_llm.models.hf import checkpoint, config_reader, parameter_reader, safetensors_file
from jaxrl_llm.models.hf.config_reader import CheckpointFormatError
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.sharding.mesh import TRAIN, make_mesh, shardings

STORED = (
    ("llama", "lm", "float32"),
    ("llama", "scalar", "float16"),
    ("qwen2", "lm", "bfloat16"),
    ("qwen3", "lm", "float16"),
    ("qwen3", "scalar", "bfloat16"),
)


class Tokenizer:
    """The part of a tokenizer that export needs."""

    bos_token_id, eos_token_id, pad_token_id = 1, 2, 0

    def __init__(self, size=96):
        self.size = size

    def __len__(self):
        return self.size

    def save_pretrained(self, folder):
        with open(f"{folder}/tokenizer.json", "w") as file:
            file.write("{}")


def hf_shape():
    """A small tied Qwen2."""
    config = {**hf_checkpoints.kept("qwen2")[1]["lm"], "tie_word_embeddings": True}
    return config_reader.architecture_from_config(config)


def tensors_of(folder):
    """Every stored tensor as raw bytes with its dtype and shape."""
    found = safetensors_file.open_folder(folder)
    return {
        k: (t.dtype_code, t.shape, np.ascontiguousarray(t.view()).tobytes())
        for k, t in found.items()
    }


def mesh_shardings(network, **sizes):
    mesh = make_mesh(MeshConfig(**sizes))
    return shardings(
        network.abstract_params(), network.logical_axes(), mesh, TRAIN, network.sharding_units
    )


def assert_same_tree(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("family, head, dtype", STORED)
def test_import_then_export_gives_the_same_bits(family, head, dtype, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    hf_checkpoints.make(source, family, head, dtype, max_shard_bytes=20_000)
    assert (source / safetensors_file.INDEX_FILE).exists()
    network = Network(checkpoint.read_architecture(source), head)
    # Held in float32 the low-precision numbers are exact, and come back as they were.
    params = checkpoint.load(source, network, mesh_shardings(network, fsdp=4, tensor=2))
    assert params["embed"].dtype == jnp.float32
    checkpoint.save(out, network, params, dtype=dtype, max_shard_bytes=20_000)
    assert (out / safetensors_file.INDEX_FILE).exists()
    assert tensors_of(out) == tensors_of(source)

    stored = checkpoint.load(out, network, dtype=dtype)
    checkpoint.save(tmp_path / "single", network, stored)
    assert (tmp_path / "single" / safetensors_file.SINGLE_FILE).exists()
    assert tensors_of(tmp_path / "single") == tensors_of(source)


@pytest.mark.parity
@pytest.mark.parametrize("family", hf_checkpoints.FAMILIES)
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_transformers_loads_an_export(family, head, torch, tmp_path):
    hf_checkpoints.make(tmp_path / "source", family, head)
    network = Network(checkpoint.read_architecture(tmp_path / "source"), head)
    params = checkpoint.load(tmp_path / "source", network)
    checkpoint.save(tmp_path / "out", network, params, Tokenizer(), max_shard_bytes=30_000)
    auto = {
        "lm": transformers.AutoModelForCausalLM,
        "scalar": transformers.AutoModelForSequenceClassification,
    }[head]
    theirs = auto.from_pretrained(tmp_path / "source").eval()
    again, info = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert again.config.eos_token_id == 2 and again.config.pad_token_id == 0
    tokens = torch.arange(4, 44).reshape(2, 20)
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens).logits, theirs(tokens).logits)


@pytest.mark.parity
@pytest.mark.parametrize("family, head, dtype", STORED)
def test_checkpoints_are_what_transformers_writes(family, head, dtype, torch, tmp_path):
    """Those of the other tests, in several files too."""
    import make_transformers

    auto = make_transformers.KINDS[head]
    hf_checkpoints.make(tmp_path / "ours", family, head, dtype)
    model = auto.from_pretrained(tmp_path / "ours", dtype=getattr(torch, dtype))
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / safetensors_file.INDEX_FILE).exists()
    assert tensors_of(tmp_path / "theirs") == tensors_of(tmp_path / "ours")
    assert config_reader.read_config(tmp_path / "theirs") == config_reader.read_config(
        tmp_path / "ours"
    )


@pytest.mark.parity
@pytest.mark.parametrize("family", hf_checkpoints.FAMILIES)
def test_kept_numbers_are_those_of_transformers(family, torch):
    import make_transformers

    arrays, documents = make_transformers.compute(family)
    kept, kept_documents = hf_checkpoints.kept(family)
    assert arrays.keys() == kept.keys()
    for name, array in arrays.items():
        if name in ("rows.logits", "rows.scores", "rows.adapted_logits"):
            # Another processor adds in another order: 2.4e-6 between two that were tried.
            np.testing.assert_allclose(kept[name], array, atol=5e-6 * np.abs(array).max())
        else:
            np.testing.assert_array_equal(kept[name], array)
    for head in make_transformers.KINDS:
        assert json.loads(documents[head]) == kept_documents[head]


def test_each_shard_holds_its_part(tmp_path):
    hf_checkpoints.make(tmp_path, "qwen3")
    network = Network(checkpoint.read_architecture(tmp_path))
    want = checkpoint.load(tmp_path, network)
    for sizes in ({"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}):
        places = mesh_shardings(network, **sizes)
        got = checkpoint.load(tmp_path, network, places)
        assert_same_tree(got, want)
        same = jax.tree.map(lambda x, s: x.sharding == s, got, places)
        assert all(jax.tree.leaves(same))
    assert not got["embed"].is_fully_replicated


def test_parameters_that_rest_in_host_memory(tmp_path):
    network = Network(hf_shape())
    params = network.init(jax.random.key(0))
    checkpoint.save(tmp_path / "a", network, params)
    places = jax.tree.map(
        lambda s: s.with_memory_kind("pinned_host"), mesh_shardings(network, fsdp=8)
    )
    got = checkpoint.load(tmp_path / "a", network, places)
    assert all(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(got))
    checkpoint.save(tmp_path / "b", network, got)
    assert tensors_of(tmp_path / "b") == tensors_of(tmp_path / "a")


def test_shard_is_read_once_without_its_neighbors(tmp_path, monkeypatch):
    hf_checkpoints.make(tmp_path, "qwen2")
    network = Network(checkpoint.read_architecture(tmp_path))
    blocks = []
    read_block = parameter_reader._read_block

    def counted(name, tensors, dtype, block):
        array = read_block(name, tensors, dtype, block)
        blocks.append((name.path, array.size))
        return array

    monkeypatch.setattr(parameter_reader, "_read_block", counted)
    params = checkpoint.load(tmp_path, network, mesh_shardings(network, data=2, fsdp=2, tensor=2))
    total = sum(x.size for x in jax.tree.leaves(params))
    assert sum(size for _, size in blocks) == total
    gate = [size for path, size in blocks if path == ("layers", "0", "mlp", "gate", "kernel")]
    assert gate == [params["layers"]["0"]["mlp"]["gate"]["kernel"].size // 4] * 4


def test_causal_lm_starts_a_critic_at_zero(tmp_path):
    hf_checkpoints.make(tmp_path, "qwen2")
    shape = checkpoint.read_architecture(tmp_path)
    policy = checkpoint.load(tmp_path, Network(shape))
    critic = Network(shape, "scalar")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the unread lm_head is as it should be
        params = checkpoint.load(tmp_path, critic, mesh_shardings(critic, fsdp=8))
    assert params["score"].shape == (1, 32) and not params["score"].any()
    policy.pop("head")
    params.pop("score")
    assert_same_tree(params, policy)


def test_unused_tensors_are_named(tmp_path):
    hf_checkpoints.make(tmp_path, "llama")
    path = tmp_path / safetensors_file.SINGLE_FILE
    tensors = safetensors.numpy.load_file(path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    tensors["model.layers.0.strange"] = np.zeros(4, np.float32)
    safetensors.numpy.save_file(tensors, path)
    with pytest.warns(
        UserWarning, match=r"not used by this lm network: model\.layers\.0\.strange$"
    ):
        checkpoint.load(tmp_path, Network(checkpoint.read_architecture(tmp_path)))


def edited_tensors(folder, edit):
    path = folder / safetensors_file.SINGLE_FILE
    tensors = safetensors.numpy.load_file(path)
    edit(tensors)
    safetensors.numpy.save_file(tensors, path)


def test_faults_of_weights_are_named(tmp_path, monkeypatch):
    hf_checkpoints.make(tmp_path, "llama", "scalar")
    network = Network(checkpoint.read_architecture(tmp_path), "scalar")
    monkeypatch.setattr(parameter_reader, "assemble", lambda *_: pytest.fail("touched a device"))

    def refused(*messages, network=network):
        with pytest.raises(CheckpointFormatError) as error:
            checkpoint.load(tmp_path, network)
        for message in (str(tmp_path), *messages):
            assert message in str(error.value)

    def break_some(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.norm.weight"] = np.zeros(31, np.float32)
        tensors["score.weight"] = np.zeros((2, 32), np.float32)
        tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((48, 32), np.int32)

    edited_tensors(tmp_path, break_some)
    refused(
        "model.layers.1.mlp.up_proj.weight is missing, expected [48, 32]",
        "model.norm.weight in model.safetensors is [31], expected [32]",
        "score.weight in model.safetensors is [2, 32], expected [1, 32]; a scalar head has one",
        "model.layers.2.mlp.up_proj.weight in model.safetensors is stored as I32; only F32",
    )
    edited_tensors(tmp_path, lambda tensors: tensors.pop("score.weight"))
    refused("score.weight is missing")

    path = tmp_path / safetensors_file.SINGLE_FILE
    path.write_bytes(path.read_bytes()[:-5])
    refused("cut short", "model.safetensors")

    other = dataclasses.replace(network.shape, rope_theta=7.0, num_layers=2)
    refused(
        "num_layers is 3 there and 2 in the network",
        "rope_theta is 500.0 there and 7.0",
        "read_shape(folder)",
        network=Network(other, "scalar"),
    )
    path.rename(tmp_path / "pytorch_model.bin")
    refused("only pytorch_model.bin; pickled weights can run code and are never read")
    (tmp_path / "pytorch_model.bin").unlink()
    refused("has neither model.safetensors nor model.safetensors.index.json")
    with pytest.raises(CheckpointFormatError, match="no such folder; give a folder"):
        checkpoint.load(tmp_path / "Qwen" / "Qwen3-8B", network)


def test_faults_of_an_index_are_named(tmp_path):
    hf_checkpoints.make(tmp_path, "qwen2", max_shard_bytes=20_000)
    network = Network(checkpoint.read_architecture(tmp_path))
    index = tmp_path / safetensors_file.INDEX_FILE
    contents = json.loads(index.read_text())
    weight_map = contents["weight_map"]
    files = sorted(set(weight_map.values()))

    first = next(name for name, file in weight_map.items() if file == files[0])
    index.write_text(json.dumps({"weight_map": {**weight_map, first: files[1]}}))
    with pytest.raises(CheckpointFormatError, match=f"{first} is not in {files[1]} as the index"):
        checkpoint.load(tmp_path, network)
    for broken in ("[]", '{"a":' * 100_000):
        index.write_text(broken)
        with pytest.raises(CheckpointFormatError, match="not a valid index"):
            checkpoint.load(tmp_path, network)
    index.write_text(json.dumps(contents))
    (tmp_path / files[0]).unlink()
    with pytest.raises(CheckpointFormatError, match=f"1 of {len(files)} files .*: {files[0]}"):
        checkpoint.load(tmp_path, network)


def test_an_export_is_whole_or_absent(tmp_path):
    network = Network(hf_shape())
    params = network.init(jax.random.key(0))
    out = tmp_path / "deep" / "out"

    class Failing(Tokenizer):
        def save_pretrained(self, folder):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(out, network, params, Failing())
    assert not out.exists() and not any(out.parent.iterdir())

    checkpoint.save(out, network, params, Tokenizer())
    (out / "README.md").write_text("mine")
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(out, network, jax.tree.map(jnp.zeros_like, params), Failing())
    assert_same_tree(checkpoint.load(out, network), params)

    # Replaced by one in several files: nothing of the single file stays, others' files do.
    checkpoint.save(out, network, params, max_shard_bytes=20_000)
    assert not (out / safetensors_file.SINGLE_FILE).exists()
    assert (out / "README.md").read_text() == "mine"
    assert_same_tree(checkpoint.load(out, network), params)
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_other_peoples_folders_are_not_overwritten(tmp_path):
    hf_checkpoints.make(tmp_path, "llama")
    before = tensors_of(tmp_path)
    network = Network(checkpoint.read_architecture(tmp_path))
    params = checkpoint.load(tmp_path, network)
    with pytest.raises(CheckpointFormatError, match="was not written by an earlier export"):
        checkpoint.save(tmp_path, network, params)
    assert tensors_of(tmp_path) == before


def test_token_ids_of_an_export(tmp_path):
    network = Network(hf_shape())
    params = network.init(jax.random.key(0))

    def written(**settings):
        checkpoint.save(tmp_path / "out", network, params, **settings)
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
        assert generation.get("eos_token_id") == config["eos_token_id"]
        return config["eos_token_id"]

    assert written() is None
    assert written(tokenizer=Tokenizer()) == 2
    assert written(tokenizer=Tokenizer(), source_config={"eos_token_id": [7, 8]}) == [7, 8]
    assert written(source_config={"eos_token_id": 7}, eos_token_ids=(4, 5)) == [4, 5]
    assert config_reader.eos_token_ids(tmp_path / "out") == (4, 5)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    network = Network(hf_shape())
    checkpoint.check_vocabulary(network.shape, Tokenizer(96))
    with pytest.raises(CheckpointFormatError, match=r"97 tokens, the model's vocabulary only 96"):
        checkpoint.save(tmp_path, network, network.init(jax.random.key(0)), Tokenizer(97))
