"""Model folders of the hub, of buckets and of this machine, through one reader."""

import json
import shutil
import sys

import fsspec
import hf_checkpoints
import hub_server
import jax
import numpy as np
import pytest

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.hf import checkpoint, config_reader, safetensors_file
from jaxrl_llm.models.hf.config_reader import CheckpointFormatError
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.storage import bucket, hub, model_folder
from jaxrl_llm.storage import files as files_lib
from jaxrl_llm.storage.bucket import BucketError
from jaxrl_llm.storage.hub import HubError
from jaxrl_llm.storage.model_folder import RemoteFile

DUPLICATES = {"pytorch_model.bin": b"x" * 1000, "onnx/model.onnx": b"x" * 1000, "a.gguf": b"x"}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "folder"
    hf_checkpoints.make(path, "qwen2", max_shard_bytes=20_000)
    (path / "generation_config.json").write_text('{"eos_token_id": 7}')
    return path


@pytest.fixture
def server(monkeypatch, tmp_path):
    with hub_server.HubServer() as hub_of_test:
        hub_server.use_hub(monkeypatch, hub_of_test, tmp_path / "hf")
        yield hub_of_test


def size(folder, pattern):
    return sum(path.stat().st_size for path in folder.glob(pattern))


def assert_loads_as(address, folder):
    network = Network(checkpoint.read_architecture(folder))
    assert checkpoint.read_architecture(address) == network.shape
    expected, params = checkpoint.load(folder, network), checkpoint.load(address, network)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert config_reader.eos_token_ids(address) == (7,)


def test_a_name_is_downloaded_once_and_only_what_is_read(server, folder):
    server.add("org/name", folder)
    server.add("org/name", DUPLICATES)
    assert_loads_as("org/name", folder)
    needed = size(folder, "*.json") + size(folder, "*.safetensors")
    assert server.traffic[""].file_bytes == needed
    model_folder.forget_folders()
    assert_loads_as("hf://org/name", folder)
    assert server.traffic[""].file_bytes == needed


def test_a_folder_within_a_repository(server, folder):
    commit = server.add("org/name", {f"sub/{p.name}": p for p in folder.iterdir()})
    address = f"hf://org/name@{commit}/sub"
    assert_loads_as(address, folder)
    assert model_folder.model_name(address) == "sub"
    assert model_folder.model_name("org/name") == "name"


def test_what_was_downloaded_is_read_offline(server, folder, monkeypatch):
    server.add("org/name", folder)
    checkpoint.read_architecture("org/name")
    hub_server.set_offline(monkeypatch)
    model_folder.forget_folders()
    network = Network(checkpoint.read_architecture("org/name"))
    with pytest.raises(CheckpointFormatError, match="HF_HUB_OFFLINE is set: unset it"):
        checkpoint.check("org/name", network)
    monkeypatch.undo()


def test_a_repository_that_is_no_model(server):
    server.add("org/name", {"README.md": b"", "pytorch_model.bin": b"x"})
    with pytest.raises(CheckpointFormatError, match=r"org/name: has no config\.json"):
        config_reader.read_config("org/name")
    with pytest.raises(CheckpointFormatError, match=r"pytorch_model\.bin; pickled weights"):
        safetensors_file.open_folder("org/name")
    with pytest.raises(HubError, match="no model of this name"):
        config_reader.read_config("org/none")


def test_the_weights_of_several_processes_are_read_by_ranges(server, folder):
    server.add("org/name", folder)
    stored = safetensors_file.open_folder("org/name", by_ranges=True)
    local = safetensors_file.open_folder(folder)
    for name, tensor in local.items():
        assert isinstance(stored[name].file, RemoteFile)
        array = np.asarray(tensor.view())
        np.testing.assert_array_equal(stored[name].view()[:], array)
        if array.ndim == 2:
            before = server.traffic[""].file_bytes
            np.testing.assert_array_equal(stored[name].view()[3:5], array[3:5])
            assert server.traffic[""].file_bytes - before == array[3:5].nbytes
            for block in ((slice(3, 4), slice(2, 7)), (slice(1, 9, 3), slice(2, 3))):
                np.testing.assert_array_equal(stored[name].view()[block], array[block])
            rows, columns = np.arange(4)[:, None], np.arange(2)
            np.testing.assert_array_equal(stored[name].view()[rows, columns], array[rows, columns])
    assert_loads_as("org/name", folder)  # downloads them
    model_folder.forget_folders()
    cached = safetensors_file.open_folder("org/name", by_ranges=True)
    assert not any(tensor.is_remote for tensor in cached.values())


def test_a_cut_file_on_the_hub_is_told(server, folder):
    shard = min(folder.glob("*.safetensors"))
    server.add("org/name", folder)
    server.add("org/name", {shard.name: shard.read_bytes()[:-5]})
    for by_ranges in (True, False):
        with pytest.raises(CheckpointFormatError, match="cut short"):
            safetensors_file.open_folder("org/name", by_ranges)
    server.add("org/name", {shard.name: b"version https://git-lfs.github.com/spec/v1\n"})
    model_folder.forget_folders()
    with pytest.raises(CheckpointFormatError, match="Git LFS pointer"):
        safetensors_file.open_folder("org/name", by_ranges=True)


@pytest.fixture
def memory_folder(folder):
    files = fsspec.filesystem("memory")
    files.put(f"{folder}/", "/models/a/", recursive=True)
    yield "memory://models/a"
    files.rm("/models", recursive=True)
    model_folder.forget_folders()


def test_a_folder_in_a_bucket_is_read_without_a_copy(memory_folder, folder, monkeypatch):
    sizes = []
    read_range = bucket.read_range

    def counted(address, name, begin, end):
        sizes.append((name, end - begin))
        return read_range(address, name, begin, end)

    monkeypatch.setattr(bucket, "read_range", counted)
    assert_loads_as(memory_folder, folder)
    small = model_folder.local_folder(memory_folder)
    assert {path.name for path in small.iterdir()} == {p.name for p in folder.glob("*.json")}
    index = json.loads((folder / safetensors_file.INDEX_FILE).read_text())
    shards = set(index["weight_map"].values())
    contents = size(folder, "*.safetensors")
    headers = sum(min((folder / name).stat().st_size, 1 << 15) for name in shards)
    assert sum(n for name, n in sizes if name in shards) <= contents + headers
    assert model_folder.model_name(memory_folder) == "a"


def test_what_to_do_about_buckets(memory_folder, monkeypatch):
    with pytest.raises(BucketError, match=r"no such f.*check the address"):
        config_reader.read_config("memory://models/none")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "s3fs", None)
        loaded = sys.modules["fsspec.registry"]._registry
        patch.delitem(loaded, "s3", raising=False)
        files_lib._connect.cache_clear()
        with pytest.raises(ConfigError, match=r"pip install 'jaxrl_llm\[s3\]'"):
            bucket.list_files(bucket.BucketAddress("s3", "a"))

    files, failures = fsspec.filesystem("memory"), [OSError("503"), TimeoutError()]
    cat_file = type(files).cat_file

    def failing(self, *arguments, **settings):
        if failures:
            raise failures.pop()
        return cat_file(self, *arguments, **settings)

    monkeypatch.setattr(type(files), "cat_file", failing)
    with hub_server.without_delays(monkeypatch) as waits:
        assert config_reader.read_config(memory_folder)["model_type"] == "qwen2"
        assert len(waits) == 2
    address = bucket.BucketAddress("memory", "models/a")
    failures += [OSError("503")] * 6
    with (
        hub_server.without_delays(monkeypatch),
        pytest.raises(BucketError, match="after 6 attempts"),
    ):
        bucket.read_range(address, "config.json", 0, 1)
    failures[:] = [PermissionError("no")]
    with pytest.raises(BucketError, match=r"after 1 attempts .*credentials"):
        bucket.read_range(address, "config.json", 0, 1)
    with pytest.raises(BucketError, match="cut short"):
        bucket.read_range(address, "generation_config.json", 0, 1000)


def test_single_files(server, memory_folder, folder):
    server.add("org/name", DUPLICATES)
    assert model_folder.local_file("hf://org/name/a.gguf").read_bytes() == b"x"
    copied = model_folder.local_file(f"{memory_folder}/config.json")
    assert copied.read_bytes() == (folder / "config.json").read_bytes()
    assert model_folder.local_file("a/b.gguf").as_posix() == "a/b.gguf"
    with pytest.raises(HubError, match=r"has no file 'b\.gguf'"):
        model_folder.local_file("hf://org/name/b.gguf")
    shutil.rmtree(copied.parent)


def test_a_repository_is_of_one_commit_while_the_process_lives(server, folder):
    server.add("org/name", folder)
    before = model_folder.local_folder("org/name")
    server.add("org/name", {"config.json": b"{}"})
    assert model_folder.local_folder("org/name") == before
    assert hub.resolve_commit(hub.HubAddress("org/name")).commit != before.name
