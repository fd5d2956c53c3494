"""The hub through `huggingface_hub`, against a stand-in: names, files, ranges, failures."""

import hashlib
import random
import shutil

import hub_server
import huggingface_hub
import pytest
from huggingface_hub import constants

from jaxrl_llm.storage import hub as hub_lib
from jaxrl_llm.storage.address import HubAddress, parse_address
from jaxrl_llm.storage.hub import HubError

WEIGHTS = random.Random(0).randbytes(300_000)
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "sub/a.txt": b"a", "sub/b.bin": b"b"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_server.HubServer() as server:
        hub_server.use_hub(monkeypatch, server, tmp_path / "hf")
        server.commit_id = server.add("org/name", FILES)
        yield server


def messages(address: str, action=hub_lib.resolve_commit) -> str:
    with pytest.raises(HubError) as caught:
        action(parse_address(address, "model"))
    return str(caught.value)


def test_a_name_becomes_the_commit_of_its_branch(hub):
    pinned = hub_lib.resolve_commit(HubAddress("org/name"))
    assert pinned.text == f"hf://org/name@main#{hub.commit_id}"
    newer = hub.add("org/name", {"config.json": b"[]"})
    assert newer != hub.commit_id
    assert hub_lib.resolve_commit(pinned).commit == hub.commit_id
    assert hub_lib.resolve_commit(HubAddress("org/name")).commit == newer
    hub.repos["model", "org/name"].tags["v1"] = hub.commit_id
    assert hub_lib.resolve_commit(HubAddress("org/name", revision="v1")).commit == hub.commit_id


def test_files_are_listed_with_sizes_page_by_page(hub):
    hub.page_size = 2
    files = hub_lib.list_files(HubAddress("org/name"))
    assert files == tuple(sorted((path, len(data)) for path, data in FILES.items()))
    below = hub_lib.list_files(HubAddress("org/name", path="sub"))
    assert [file.path for file in below] == ["sub/a.txt", "sub/b.bin"]
    assert hub_lib.list_files(HubAddress("org/name", path="sub/a.txt")) == (("sub/a.txt", 1),)


def test_patterns_stop_at_slashes(hub):
    def paths(pattern: str) -> list[str]:
        return [file.path for file in hub_lib.matching_files(HubAddress("org/name", path=pattern))]

    assert paths("*.json") == ["config.json"]
    assert paths("sub/?.*") == ["sub/a.txt", "sub/b.bin"]
    assert paths("**/*.txt") == ["sub/a.txt"]
    assert paths("**") == sorted(FILES)
    message = messages("hf://org/name/*.parquet", hub_lib.matching_files)
    assert "no file '*.parquet'" in message and "config.json" in message


def test_only_the_named_files_are_downloaded_once(hub):
    names = ["config.json", "model.safetensors"]
    folder = hub_lib.download(HubAddress("org/name"), names)
    assert {p.name for p in folder.iterdir()} == set(names)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    sent = hub.traffic[""].file_bytes
    assert sent == len(WEIGHTS) + len(b"{}")
    assert hub_lib.download(hub_lib.resolve_commit(HubAddress("org/name")), names) == folder
    assert hub.traffic[""].file_bytes == sent


def test_the_token_reaches_the_hub_and_not_its_storage(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    hub.repos["model", "org/name"].private = True
    hub.repos["model", "org/name"].readers = frozenset(["alice"])
    address = hub_lib.resolve_commit(HubAddress("org/name"))
    assert hub_lib.read_range(address, "model.safetensors", 10, 20) == WEIGHTS[10:20]
    folder = hub_lib.download(address, ["model.safetensors"])
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.traffic["alice"].file_bytes == len(WEIGHTS) + 10


def test_a_broken_download_goes_on_where_it_stopped(hub, monkeypatch):
    hub.breaks = [("model.safetensors", 100_000)]
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    with hub_server.without_delays(monkeypatch):
        folder = hub_lib.download(HubAddress("org/name"), ["model.safetensors"])
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert not hub.breaks
    assert hub.traffic[""].file_bytes == len(WEIGHTS)


@pytest.mark.parametrize("path", ["model.safetensors", "config.json"])
def test_ranges(hub, path):
    address, data = hub_lib.resolve_commit(HubAddress("org/name")), FILES[path]
    for begin, end in ((0, 1), (0, len(data)), (len(data) - 1, len(data)), (1, 1)):
        assert hub_lib.read_range(address, path, begin, end) == data[begin:end]
    with pytest.raises(HubError, match="shorter than the header"):
        hub_lib.read_range(address, path, 0, len(data) + 1)
    with pytest.raises(HubError, match="has no such file"):
        hub_lib.read_range(address, "other.json", 0, 1)


def test_a_hub_that_fails_often_is_asked_again(hub, monkeypatch):
    hub.busy_share = 0.3
    with hub_server.without_delays(monkeypatch) as waits:
        address = hub_lib.resolve_commit(HubAddress("org/name"))
        for begin in range(0, 1000, 100):
            data = hub_lib.read_range(address, "model.safetensors", begin, begin + 100)
            assert data == WEIGHTS[begin : begin + 100]
        assert len(hub_lib.list_files(address)) == len(FILES)
        folder = hub_lib.download(address, FILES)
    assert waits and (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_a_hub_that_always_fails_is_told_after_all_attempts(hub, monkeypatch):
    hub.busy_share = 1.0
    with hub_server.without_delays(monkeypatch) as waits:
        message = messages("org/name")
        assert "6 attempts" in message or "(429)" in message
    assert len(waits) == len(hub_lib.RETRY_DELAYS_S)
    hub.busy_headers = {"Retry-After": "7"}
    with hub_server.without_delays(monkeypatch) as waits:
        messages("org/name")
    assert min(waits) >= 7
    hub.busy_headers = {"Retry-After": "100000"}
    with hub_server.without_delays(monkeypatch) as waits:
        messages("org/name")
    assert not waits


def test_what_to_do_about_names_that_cannot_be_read(hub, monkeypatch):
    hub.add("org/gated", FILES, gated=True, readers=frozenset(["bob"]))
    download = lambda address: hub_lib.download(address, ["config.json"])  # noqa: E731
    missing = messages("org/nmae")
    assert "no model of this name" in missing and "did you mean org/name" in missing
    assert "did you mean org/name" in messages("ogr/name")
    assert "no such local path" in missing and "set HF_TOKEN" in missing
    revision = messages("hf://org/name@man")
    assert "no branch, tag or commit 'man'; it has main" in revision
    gated = messages("org/gated", download)
    assert "is gated; accept its terms on" in gated and "set HF_TOKEN" in gated
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    assert "your token has no access; accept its terms" in messages("org/gated", download)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the token is not valid (401)" in messages("org/name")
    monkeypatch.setenv("HF_TOKEN", "hf_bob")
    folder = hub_lib.download(HubAddress("org/gated"), ["config.json"])
    assert (folder / "config.json").exists()
    path = messages("hf://org/name/sbu", hub_lib.list_files)
    assert "has no file 'sbu'" in path


def test_offline_takes_the_cache_and_says_what_is_missing(hub, monkeypatch):
    hub_lib.download(HubAddress("org/name"), ["config.json"])
    hub_server.set_offline(monkeypatch)
    address = hub_lib.resolve_commit(HubAddress("org/name"))
    assert address.commit == hub.commit_id
    assert [file.path for file in hub_lib.list_files(address)] == ["config.json"]
    assert (hub_lib.download(address, ["config.json"]) / "config.json").exists()
    for message in (
        messages("org/name", lambda a: hub_lib.download(a, ["model.safetensors"])),
        messages("org/other"),
        messages("org/name", lambda a: hub_lib.read_range(a, "config.json", 0, 1)),
    ):
        assert "HF_HUB_OFFLINE is set" in message, message


def test_a_hub_that_is_not_there(hub, monkeypatch, caplog):
    hub_lib.download(HubAddress("org/name"), ["config.json"])
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with hub_server.without_delays(monkeypatch) as waits:
        assert "http://127.0.0.1:9 cannot be reached" in messages("org/other")
        assert len(waits) == len(hub_lib.CONNECTION_DELAYS_S)
        assert hub_lib.resolve_commit(HubAddress("org/name")).commit == hub.commit_id
    assert "takes commit" in caplog.text


def test_datasets(hub):
    data = {"main/train-0.parquet": b"PAR1", "main/test-0.parquet": b"PAR1PAR1"}
    hub.add("openai/gsm8k", data, "dataset")
    address = parse_address("hf://datasets/openai/gsm8k/main/train-*.parquet")
    assert isinstance(address, HubAddress)
    files = hub_lib.matching_files(address)
    assert files == (("main/train-0.parquet", 4),)
    folder = hub_lib.download(address, [file.path for file in files])
    assert (folder / "main/train-0.parquet").read_bytes() == b"PAR1"


def test_folders_are_uploaded_and_read_back(hub, monkeypatch, tmp_path):
    """The write endpoints of the stand-in, by the library's own upload."""
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    folder = tmp_path / "out"
    (folder / "sub").mkdir(parents=True)
    for path, data in FILES.items():
        (folder / path).write_bytes(data)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A\n")
    api = huggingface_hub.HfApi()
    api.create_repo("alice/new", private=True)
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError):
        api.create_repo("alice/new")
    api.create_repo("alice/new", exist_ok=True)
    info = api.upload_folder(repo_id="alice/new", folder_path=folder, commit_message="export")
    repo = hub.repos["model", "alice/new"]
    assert repo.private and repo.branches["main"] == info.oid and repo.messages[-1] == "export"
    stored = hub.files("alice/new")
    assert {path: stored[path] for path in FILES} == FILES
    assert hub.traffic["alice"].received_bytes >= len(WEIGHTS)
    # A second upload sends no large file again.
    sent = hub.traffic["alice"].received_bytes
    (folder / "config.json").write_bytes(b'{"a": 1}')
    api.upload_folder(repo_id="alice/new", folder_path=folder)
    assert hub.traffic["alice"].received_bytes - sent < len(WEIGHTS)
    read_back = hub_lib.download(HubAddress("alice/new"), ["model.safetensors"])
    digest = hashlib.sha256((read_back / "model.safetensors").read_bytes()).hexdigest()
    assert digest == hashlib.sha256(WEIGHTS).hexdigest()
    api.delete_file("sub/b.bin", "alice/new")
    assert "sub/b.bin" not in hub.files("alice/new")
    shutil.rmtree(tmp_path / "hf")
    monkeypatch.setenv("HF_TOKEN", "hf_bob")
    assert "no model of this name" in messages("alice/new")
