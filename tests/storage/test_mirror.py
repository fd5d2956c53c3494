"""What a library writes into a local folder comes to lie in the bucket."""

import pytest

from jaxrl_llm.storage import files
from jaxrl_llm.storage.mirror import mirrored_folder


def test_a_local_folder_is_itself(tmp_path):
    with mirrored_folder(tmp_path / "tensorboard") as folder:
        assert folder == tmp_path / "tensorboard"


def test_files_are_copied_regularly_and_at_the_end(s3_folder):
    with mirrored_folder(s3_folder / "profile", copy_s=0.01) as local:
        (local / "a").mkdir()
        (local / "a" / "trace").write_bytes(b"begun")
        for _ in range(1000):
            if files.exists(s3_folder / "profile" / "a" / "trace"):
                break
        assert files.read_bytes(s3_folder / "profile" / "a" / "trace") == b"begun"
    with mirrored_folder(s3_folder / "profile", copy_s=100.0) as local:
        (local / "memory").write_bytes(b"x")
        assert list(local.iterdir()) == [local / "memory"]
    assert not local.exists()
    assert sorted(files.files_below(s3_folder / "profile")) == ["a/trace", "memory"]


def test_a_failed_copy_is_logged_and_repeated(s3_folder, monkeypatch, caplog):
    write, failures = files.replace_bytes, [OSError("s3://runs: 503")]

    def replace_bytes(path, content):
        if failures:
            raise failures.pop()
        write(path, content)

    monkeypatch.setattr(files, "replace_bytes", replace_bytes)
    with mirrored_folder(s3_folder, copy_s=0.01) as local:
        (local / "x").write_bytes(b"1")
        for _ in range(1000):
            if files.exists(s3_folder / "x"):
                break
    assert files.read_bytes(s3_folder / "x") == b"1"
    assert "503" in caplog.text


@pytest.mark.parametrize("content", [b"", bytes(1 << 20)])
def test_contents_are_copied_whole(s3_folder, content):
    with mirrored_folder(s3_folder) as local:
        (local / "x").write_bytes(content)
    assert files.read_bytes(s3_folder / "x") == content
