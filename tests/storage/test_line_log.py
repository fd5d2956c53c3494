"""A log of lines reads the same from a local file and from the parts of a bucket."""

import pathlib

import pytest

from jaxrl_llm.storage import files, line_log
from jaxrl_llm.storage.line_log import BucketLog, append_line, read_log, replace_log

LINES = [f"line {number}\n".encode() for number in range(12)]


@pytest.fixture(params=["local", "s3"])
def path(request, tmp_path) -> pathlib.Path:
    folder = tmp_path if request.param == "local" else request.getfixturevalue("s3_folder")
    return folder / "log.jsonl"


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    monkeypatch.setattr(line_log, "PART_BYTES", 20)


def test_lines_are_appended_read_and_replaced(path):
    with pytest.raises(FileNotFoundError):
        read_log(path)
    for line in LINES:
        append_line(path, line.decode().removesuffix("\n"))
    content = b"".join(LINES)
    assert read_log(path) == content
    for start in (0, 7, 20, 30, len(content)):
        assert read_log(path, start) == content[start:]
    for count in (7, 3, 0):
        shorter = b"".join(LINES[:count])
        replace_log(path, shorter)
        assert read_log(path) == shorter
    append_line(path, "anew")
    assert read_log(path) == b"anew\n"


def test_a_bucket_holds_parts_of_whole_lines(s3_folder):
    path = s3_folder / "log.jsonl"
    files.replace_text(s3_folder / "log.jsonl.old", "another file")
    log = BucketLog(path, flush_s=None)
    for line in LINES[:7]:
        log.append(line)
    assert files.names(s3_folder) == ["log.jsonl.old"]  # nothing before a flush
    log.flush()
    parts = ["log.jsonl", "log.jsonl.1", "log.jsonl.2"]
    assert files.names(s3_folder) == [*parts, "log.jsonl.old"]
    assert all(files.read_bytes(s3_folder / part).endswith(b"\n") for part in parts)
    assert log.num_bytes == len(b"".join(LINES[:7]))
    log.close()
    again = BucketLog(path, flush_s=None)
    for line in LINES[7:]:
        again.append(line)
    again.close()
    assert read_log(path) == b"".join(LINES)


def test_a_thread_writes_lines_of_its_own_accord(s3_folder):
    log = BucketLog(s3_folder / "log.jsonl", flush_s=0.01)
    log.append(LINES[0])
    for _ in range(1000):
        if log._unwritten == {}:
            break
        line_log.threading.Event().wait(0.01)
    assert read_log(s3_folder / "log.jsonl") == LINES[0]
    log.close()


def test_lines_of_a_failed_flush_are_kept(s3_folder, monkeypatch):
    log = BucketLog(s3_folder / "log.jsonl", flush_s=None)
    log.append(LINES[0])
    write = files.replace_bytes
    monkeypatch.setattr(files, "replace_bytes", lambda *_: (_ for _ in ()).throw(OSError("503")))
    with pytest.raises(OSError, match="503"):
        log.flush()
    monkeypatch.setattr(files, "replace_bytes", write)
    log.append(LINES[1])
    log.close()
    assert read_log(s3_folder / "log.jsonl") == LINES[0] + LINES[1]


def test_a_process_that_lost_the_folder_writes_nothing(s3_folder):
    def lost() -> None:
        raise RuntimeError("taken over")

    log = BucketLog(s3_folder / "log.jsonl", lost, flush_s=None)
    log.append(LINES[0])
    with pytest.raises(RuntimeError, match="taken over"):
        log.flush()
    assert files.names(s3_folder) == []
