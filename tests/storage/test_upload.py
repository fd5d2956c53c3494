"""Uploads to the hub's stand-in and into a bucket: what is there then, and every refusal."""

import hub_server
import huggingface_hub
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from huggingface_hub import constants

from jaxrl_llm.storage import bucket, upload
from jaxrl_llm.storage.address import parse_address
from jaxrl_llm.storage.upload import UploadError

CARD = "---\nlibrary_name: transformers\ntags:\n- jaxrl_llm\n---\n# A model\n"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_server.HubServer() as server:
        server.orgs = {"alice": ["lab"]}
        hub_server.use_hub(monkeypatch, server, tmp_path / "hf", token="hf_alice")
        yield server


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    write(path, {"README.md": CARD, "config.json": "{}", "model.safetensors": "weights"})
    return path


def write(folder, files):
    for path in folder.iterdir():
        path.unlink()
    for name, text in files.items():
        (folder / name).write_text(text)


def send(folder, name, **options):
    address = parse_address(name, names="model")
    return upload.upload_folder(folder, address, message="step 3", **options)


def refused(folder, name, **options):
    with pytest.raises(UploadError) as caught:
        send(folder, name, **options)
    return str(caught.value)


def test_a_repository_is_made_private_with_one_commit(hub, folder):
    assert send(folder, "alice/model") == f"{hub.endpoint}/alice/model"
    repo = hub.repos["model", "alice/model"]
    assert repo.private and repo.messages == ["initial commit", "step 3"]
    files = hub.files("alice/model")
    assert files.pop(".gitattributes") is not None
    assert files == {path.name: path.read_bytes() for path in folder.iterdir()}
    send(folder, "lab/model", public=True)
    assert not hub.repos["model", "lab/model"].private


def test_a_second_upload_replaces_weights_and_keeps_the_rest(hub, folder):
    send(folder, "alice/model")
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    write(folder, {"README.md": CARD, **dict.fromkeys(shards, "new")})
    send(folder, "alice/model")
    kept = {".gitattributes", "README.md", "config.json"}
    assert hub.files("alice/model").keys() == kept | {*shards}
    # A file of another type lies beside them; a branch is made of the first.
    write(folder, {"README.md": CARD, "model-F16.gguf": "GGUF"})
    send(folder, "alice/model@files")
    assert hub.files("alice/model").keys() == kept | {*shards}
    found = hub.files("alice/model", revision="files").keys()
    assert found == kept | {*shards, "model-F16.gguf"}


def test_what_is_not_of_an_upload_stays(hub, folder):
    hub.add("alice/notes", {"notes.txt": b"mine"}, private=True, readers=frozenset(["alice"]))
    message = refused(folder, "alice/notes")
    assert (
        "--to=alice/notes: has files that no export wrote (notes.txt); give another name" in message
    )
    for card in (b"# Notes", b"---\n: [\n---\n"):
        hub.add("alice/notes", {"README.md": card})
        assert "no export wrote" in refused(folder, "alice/notes")
    hub.add("alice/notes", {"sub/README.md": CARD.encode(), "sub/config.json": b"{}"})
    assert "no export wrote" in refused(folder, "alice/notes")  # that is of another folder
    send(folder, "hf://alice/notes/sub")
    assert hub.files("alice/notes")["sub/model.safetensors"] == b"weights"
    assert hub.files("alice/notes")["notes.txt"] == b"mine"
    assert not upload.is_own_card("# jaxrl_llm")


def test_nothing_becomes_public_by_accident(hub, folder):
    hub.add("alice/open", {"README.md": CARD.encode(), "config.json": b"{}"})
    assert "exists and is public; give --public, or use another name" in refused(
        folder, "alice/open"
    )
    send(folder, "alice/open", public=True)
    send(folder, "alice/closed")
    assert "exists and is private; leave out --public" in refused(
        folder, "alice/closed", public=True
    )


def test_whoever_may_not_write_learns_what_to_do(hub, folder, monkeypatch):
    message = refused(folder, "bob/model")
    assert "your token writes to alice, lab, not to 'bob'; give --to=alice/model" in message
    assert "for a local folder --out=bob/model" in message
    assert "is a dataset" in refused(folder, "hf://datasets/alice/data")
    hub.tokens["hf_other"] = "alice"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the token is not valid (401); set HF_TOKEN" in refused(folder, "alice/model")
    monkeypatch.setenv("HF_TOKEN", "")
    message = refused(folder, "alice/model")
    assert "no token of the hub; set HF_TOKEN to a token with the right to write" in message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set; unset it" in refused(folder, "alice/model")
    assert not hub.repos


def test_a_token_that_only_reads(hub, folder, monkeypatch):
    account = {"name": "alice", "auth": {"accessToken": {"role": "read"}}}
    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", lambda self: account)
    assert "the token may only read; set HF_TOKEN" in refused(folder, "alice/model")


def test_rights_and_names_of_an_organization(hub, folder):
    hub.add("lab/hidden", {"a.txt": b"a"}, private=True, readers=frozenset(["bob"]))
    message = refused(folder, "lab/hidden")
    assert "the name is taken by a repository that your token may not see" in message
    real_orgs, hub.orgs = hub.orgs, {}
    # The account names an organization that gives no right to write.
    with pytest.MonkeyPatch.context() as patch:
        account = {"name": "alice", "orgs": [{"name": "lab"}]}
        patch.setattr(huggingface_hub.HfApi, "whoami", lambda self: account)
        message = refused(folder, "lab/model")
    assert "the token may not write to 'lab' (403)" in message and "ask 'lab' for it" in message
    hub.orgs = real_orgs
    assert hub.files("lab/hidden") == {"a.txt": b"a"}


def test_a_busy_hub_is_asked_again(hub, folder, monkeypatch):
    hub.busy_share = 0.2
    with hub_server.without_delays(monkeypatch):
        send(folder, "alice/model")
    hub.busy_share = 0.0
    assert hub.files("alice/model")["model.safetensors"] == b"weights"


def test_a_bucket_gets_the_folder(folder):
    files = MemoryFileSystem()
    try:
        place = "memory://bucket/models/a"
        order = []
        real_put = MemoryFileSystem.put_file
        with pytest.MonkeyPatch.context() as patch:

            def put_file(self, source, target, **options):
                order.append(target.rpartition("/")[2])
                return real_put(self, source, target, **options)

            patch.setattr(MemoryFileSystem, "put_file", put_file)
            assert send(folder, place) == place
        assert order == ["README.md", "model.safetensors", "config.json"]  # the last makes it whole
        write(folder, {"README.md": CARD, "model-00001-of-00001.safetensors": "new"})
        send(folder, place)
        names = {path.rpartition("/")[2] for path in files.find("/bucket/models/a")}
        assert names == {"README.md", "config.json", "model-00001-of-00001.safetensors"}
        files.pipe("/bucket/other/data.txt", b"mine")
        message = refused(folder, "memory://bucket/other")
        assert "memory://bucket/other: has files that no export wrote" in message
        assert "data.txt" in message and "README.md" not in str(files.find("/bucket/other"))
    finally:
        files.store.clear()


def test_a_bucket_that_cannot_be_opened_or_written(folder, monkeypatch):
    def fail(*_, **__):
        raise ImportError("no module s3fs")

    monkeypatch.setattr(bucket.files, "file_system", fail)
    with pytest.raises(bucket.BucketError, match="needs a package that is missing"):
        send(folder, "s3://bucket/a")

    def deny(*_, **__):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "put_file", deny)
    with hub_server.without_delays(monkeypatch):
        message = refused(folder, "memory://bucket/a")
    assert "--to=memory://bucket/a: PermissionError: Access Denied; check the cred" in message
    MemoryFileSystem.store.clear()
