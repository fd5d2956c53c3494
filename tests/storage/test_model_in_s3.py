"""A model folder in S3, by moto's server."""

import bucket_servers
import hf_checkpoints
import jax
import numpy as np
import pytest
import s3fs

from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.storage import bucket, files, model_folder
from jaxrl_llm.storage.bucket import BucketError


@pytest.fixture(scope="module")
def endpoint():
    with bucket_servers.running_server("s3") as address:
        yield address


def connect(address, monkeypatch):
    for name, value in bucket_servers.client_environment("s3", address).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    return files.file_system("s3://")


@pytest.fixture
def store(endpoint, monkeypatch):
    yield connect(endpoint, monkeypatch)
    model_folder.forget_folders()


@pytest.mark.slow
def test_a_folder_in_s3_is_read_by_ranges(store, tmp_path):
    folder = tmp_path / "folder"
    hf_checkpoints.make(folder, "llama", max_shard_bytes=20_000)
    address = f"s3://{bucket_servers.BUCKET}/models/a"
    store.put(f"{folder}/", f"{address}/", recursive=True)
    network = Network(checkpoint.read_architecture(address))
    expected, params = checkpoint.load(folder, network), checkpoint.load(address, network)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert all(path.suffix == ".json" for path in model_folder.local_folder(address).iterdir())
    with pytest.raises(BucketError, match="check the address"):
        checkpoint.read_architecture(f"s3://{bucket_servers.BUCKET}/models/b")
    with pytest.raises(BucketError, match="check the address"):
        checkpoint.read_architecture("s3://no-such-bucket/models/b")


@pytest.mark.nightly  # minutes: the bounded retries of reads
def test_a_store_that_fails_often_and_one_that_is_gone(store, endpoint, monkeypatch):
    store.pipe(f"{bucket_servers.BUCKET}/models/c/config.json", b"0123456789" * 100)
    proxy = bucket_servers.FaultyProxy(endpoint, share=0.2)
    monkeypatch.setattr(bucket, "RETRY_DELAYS_S", (0.01,) * 5)
    address = bucket.BucketAddress("s3", f"{bucket_servers.BUCKET}/models/c")
    connect(proxy.endpoint, monkeypatch)
    for begin in range(40):
        data = bucket.read_range(address, "config.json", begin, begin + 10)
        assert data == (b"0123456789" * 100)[begin : begin + 10]
    assert proxy.num_failures
    proxy.shutdown()
    proxy.server_close()
    connect("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(BucketError, match="after 6 attempts"):
        bucket.read_range(address, "config.json", 0, 10)
