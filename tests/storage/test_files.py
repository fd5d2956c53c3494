"""A local folder and a bucket behave alike; a store that fails is asked again, then reported."""

import pathlib

import pytest

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.storage import files
from jaxrl_llm.storage.files import StorageError


@pytest.fixture(params=["local", "s3"])
def folder(request, tmp_path) -> pathlib.Path:
    return tmp_path / "run" if request.param == "local" else request.getfixturevalue("s3_folder")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(files, "_FIRST_PAUSE_S", 0.0)


def test_files_are_written_read_listed_and_removed(folder):
    assert files.names(folder) == [] and not files.exists(folder)
    files.replace_text(folder / "a" / "x.txt", "one \ud83d")
    files.replace_text(folder / "a" / "x.txt", "two")
    files.replace_bytes(folder / "a" / "b" / "y", bytes(range(9)))
    files.replace_bytes(folder / "z", b"")
    assert files.names(folder) == ["a", "z"] and files.names(folder / "a") == ["b", "x.txt"]
    assert files.read_text(folder / "a" / "x.txt") == "two"
    assert files.read_bytes(folder / "a" / "b" / "y", start=6) == b"\6\7\10"
    assert files.exists(folder / "a") and not files.is_file(folder / "a")
    assert files.is_file(folder / "z") and files.read_bytes(folder / "z") == b""
    found = files.files_below(folder)
    assert {name: info.num_bytes for name, info in found.items()} == {
        "a/x.txt": 3,
        "a/b/y": 9,
        "z": 0,
    }
    digest = files.sha256(folder / "z")
    assert digest == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    files.remove(folder / "z")
    files.remove(folder / "z")
    files.remove_tree(folder / "a")
    files.remove_tree(folder / "a")
    assert files.names(folder) == []
    with pytest.raises(FileNotFoundError):
        files.read_bytes(folder / "z")


def test_the_checksum_of_an_object_follows_its_content(s3_folder):
    checksums = []
    for content in (b"a", b"b", b"a"):
        files.replace_bytes(s3_folder / "x", content)
        checksums.append(files.files_below(s3_folder)["x"].checksum)
    assert checksums[0] == checksums[2] != checksums[1] and checksums[0]


def test_a_failing_request_is_repeated():
    errors = [TimeoutError("slow"), PermissionError("expired"), OSError("503")]

    def send() -> str:
        if errors:
            raise errors.pop()
        return "answer"

    assert files.request("s3://b/x", "read", send) == "answer" and not errors


@pytest.mark.parametrize(
    ("error", "tries"), [(OSError("503 Slow Down"), files.MAX_TRIES), (PermissionError("403"), 3)]
)
def test_a_request_that_keeps_failing_is_reported(error, tries):
    calls = []

    def send() -> None:
        calls.append(1)
        raise error

    with pytest.raises(StorageError) as raised:
        files.request("s3://b/x", "written", send)
    assert len(calls) == tries
    message = str(raised.value)
    assert message.startswith(f"s3://b/x: could not be written, {tries} tries in 0 s (")
    assert str(error) in message and "--workdir" in message
    assert isinstance(raised.value, OSError)  # what `metrics.on_failure` handles


def test_a_missing_object_is_no_failure():
    calls = []

    def send() -> None:
        calls.append(1)
        raise FileNotFoundError("x")

    with pytest.raises(FileNotFoundError):
        files.request("s3://b/x", "read", send)
    assert len(calls) == 1


def test_a_failing_store_is_not_taken_for_an_empty_one(s3_folder, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("503")

    monkeypatch.setattr(files.file_system(s3_folder), "info", fail)
    for look in (files.exists, files.is_file):
        with pytest.raises(StorageError, match="could not be read"):
            look(s3_folder / "config.json")


def test_a_bucket_that_does_not_exist_is_reported(s3_folder):
    with pytest.raises(StorageError, match=r"s3://missing-bucket/x: could not be written"):
        files.replace_text(files.run_path("s3://missing-bucket/x"), "")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ftp://host/run", "cannot hold a run; use gs://, s3://"),
        ("s3://", "names no bucket"),
        ("gs:///run", "names no bucket"),
    ],
)
def test_an_address_that_holds_no_run_is_refused(address, message):
    with pytest.raises(ConfigError, match=message):
        files.run_path(address)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    files._connect.cache_clear()

    def no_module(name: str):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(files.importlib, "import_module", no_module)
    with pytest.raises(ConfigError, match=r"gs:// needs the package gcsfs.*jaxrl_llm\[gcs\]"):
        files.run_path("gs://bucket/run")
    with pytest.raises(ConfigError, match=r"s3:// needs the package s3fs.*jaxrl_llm\[s3\]"):
        files.run_path("s3://bucket/run")
    files._connect.cache_clear()


def test_the_name_of_a_run_is_that_of_its_folder(tmp_path, monkeypatch, s3_folder):
    monkeypatch.chdir(tmp_path)
    assert files.folder_name(".") == tmp_path.name
    assert files.folder_name(f"{s3_folder}/") == "run"
    assert str(files.absolute(s3_folder)) == str(s3_folder)
