"""Rows by address: datasets on the hub by file, pattern, config and split, and buckets."""

import gzip
import io
import json

import fsspec
import hub_server
import pyarrow
import pytest
from published_rows import LAYOUTS
from pyarrow import parquet

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data import streaming
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.files import read_rows
from jaxrl_llm.data.rows.row_files import listed_files, pinned_entry
from jaxrl_llm.data.tasks import task_rows
from jaxrl_llm.errors import UserError

NAME = "openai/gsm8k"
CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test-*]
- config_name: socratic
  data_files:
    train: socratic/train-*
---
# Word problems
"""


def table(numbers):
    sink = io.BytesIO()
    rows = [{"question": f"What is {n}?", "answer": f"#### {n}"} for n in numbers]
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink, row_group_size=2)
    return sink.getvalue()


def lines(numbers):
    return "".join(json.dumps({"question": "?", "answer": f"#### {n}"}) + "\n" for n in numbers)


def answers(*entries):
    return [int(row["answer"].removeprefix("#### ")) for _, row in read_rows(entries)]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_server.HubServer() as server:
        hub_server.use_hub(monkeypatch, server, tmp_path / "hf")
        files = {
            "README.md": CARD.encode(),
            "main/train-00000-of-00002.parquet": table(range(5)),
            "main/train-00001-of-00002.parquet": table(range(5, 9)),
            "main/test-00000-of-00001.parquet": table((20, 21)),
            "socratic/train-00000-of-00001.parquet": table((30,)),
        }
        server.commit_id = server.add(NAME, files, "dataset")
        yield server


@pytest.mark.parametrize(
    ("entry", "wanted"),
    [
        (f"hf://datasets/{NAME}/main/train-*.parquet", range(9)),
        (f"hf://datasets/{NAME}/main/train-*.parquet[:50%]", range(4)),
        (f"hf://datasets/{NAME}@main/main/test-00000-of-00001.parquet", (20, 21)),
        (f"hf://datasets/{NAME}/socratic", (30,)),
        (f"hf://datasets/{NAME}/*/test-*", (20, 21)),
        (f"{NAME}:main:train", range(9)),
        (f"{NAME}:main:test", (20, 21)),
        (f"{NAME}@main:main:train[-2:]", (7, 8)),
        (f"hf://datasets/{NAME}:socratic:train", (30,)),
    ],
)
def test_rows_of_the_hub(hub, entry, wanted):
    assert answers(entry) == list(wanted)
    pinned = pinned_entry(entry)
    assert f"#{hub.commit_id}" in pinned and answers(pinned) == list(wanted)
    hub.add(NAME, {"main/train-00001-of-00002.parquet": table((99,))}, "dataset")
    assert answers(pinned) == list(wanted) and pinned_entry(pinned) == pinned
    assert pinned_entry(entry, (pinned,)) == pinned != pinned_entry(entry)
    assert pinned_entry(f"{entry}", ("other.jsonl", f"{pinned}[:1]")) != pinned


def test_the_commit_and_the_row_are_in_errors(hub):
    (entry,) = listed_files(f"hf://datasets/{NAME}/main/test-*")
    assert entry == f"hf://datasets/{NAME}@main/main/test-00000-of-00001.parquet#{hub.commit_id}"
    config = DataConfig(task="files", preset="alpaca", train_files=(f"{NAME}:main:test",))
    with pytest.raises(DataError, match="row 1: no column 'instruction'") as error:
        task_rows(config, "train", 0)
    assert str(error.value).startswith(entry)


def test_streamed_rows_of_the_hub(hub):
    rows = streaming.StreamedRows(
        [f"{NAME}:main:train[2:]", f"{NAME}:main:test"], lambda row, *_: (row["answer"],), 9, ""
    )
    source = streaming.EpochSource(rows, 3, True)
    found = [row for i in range(9) for row in source[i][1]]
    assert sorted(int(text[5:]) for text in found) == [2, 3, 4, 5, 6, 7, 8, 20, 21]
    files = hub.files(NAME, "dataset")
    sizes = sum(len(files[name]) for name in files if not name.startswith("socratic"))
    assert sum(each.file_bytes for each in hub.traffic.values()) == sizes  # each file once


def test_the_cache_is_enough_without_a_network(hub, monkeypatch):
    pinned = pinned_entry(f"{NAME}:main:train")
    answers(pinned)
    requests = len(hub.log)
    hub_server.set_offline(monkeypatch)
    assert answers(pinned) == list(range(9)) and len(hub.log) == requests
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        answers("org/other:train")


def test_splits_of_datasets_without_a_card(hub):
    files = {
        "train.jsonl": lines((1, 2)).encode(),
        "dev.jsonl.gz": gzip.compress(lines((3,)).encode()),
        "LICENSE.txt": b"",
    }
    hub.add("org/plain", files, "dataset")
    assert answers("org/plain:train") == [1, 2]
    assert answers("org/plain:validation") == answers("org/plain:default:validation") == [3]
    hub.add("org/alone", {"data/a.jsonl": lines((7,)).encode()}, "dataset")
    assert answers("org/alone") == answers("org/alone:train") == [7]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (f"{NAME}:main:trian", "no split 'trian'; did you mean 'train'? It has: train, test"),
        (f"{NAME}:mian:train", "no config 'mian'; did you mean 'main'? It has: main, socratic"),
        (f"{NAME}:train", f"has the configs main, socratic; name one, as {NAME}:main:train"),
        (NAME, f"has the configs main, socratic; name one, as {NAME}:main:train"),
        (f"hf://{NAME}/main", f"is the address of a model; write hf://datasets/{NAME}"),
        (f"hf://datasets/{NAME}/mian/*", "has no file 'mian/*' at"),
        (f"hf://datasets/{NAME}/README.md", "no files with rows at this address; known: .csv"),
        (f"{NAME}@v9:main:train", "has no branch, tag or commit 'v9'"),
        ("openai/gsm9k:main:train", "no dataset of this name"),
        ("missing/rows.jsonl", "no such file; give a path from"),
        ("missing/*.jsonl", "no files with rows match this pattern"),
        ("memory://bucket/none", "no files with rows at this address"),
        ("memory://bucket/none.jsonl", "no files with rows at this address"),
        ("s4://bucket/a.jsonl", "s4:// is not known; did you mean"),
    ],
)
def test_faults_are_named(hub, entry, message):
    with pytest.raises(UserError) as error:
        answers(entry)
    assert message in str(error.value)


@pytest.fixture
def bucket():
    files = fsspec.filesystem("memory")
    files.pipe("/bucket/rows/a.jsonl", lines(range(3)).encode())
    files.pipe("/bucket/rows/b.jsonl.gz", gzip.compress(lines(range(3, 6)).encode()))
    files.pipe("/bucket/rows/c/d.parquet", table(range(6, 12)))
    files.pipe("/bucket/rows/notes.txt", b"")
    yield files
    files.rm("/bucket", recursive=True)


@pytest.mark.parametrize(
    ("entry", "wanted"),
    [
        ("rows", range(12)),
        ("rows/", range(12)),
        ("rows[25%:-2]", range(3, 10)),
        ("rows/a.jsonl", range(3)),
        ("rows/*", range(6)),
        ("rows/**/*.parquet[1:3]", (7, 8)),
        ("rows/?.jsonl*", range(6)),
    ],
)
def test_rows_of_a_bucket(bucket, entry, wanted):
    entry = f"memory://bucket/{entry}"
    assert answers(entry) == list(wanted) and pinned_entry(entry) == entry
    rows = streaming.StreamedRows([entry], lambda row, *_: (row["answer"],), 9, "")
    found = [streaming.EpochSource(rows, 0, False)[i][1][0] for i in range(len(rows))]
    assert [int(text[5:]) for text in found] == list(wanted)


def test_only_row_groups_in_the_slice_are_read_from_a_bucket(bucket, monkeypatch):
    rows = [{"question": "?" * 10_000 + str(i), "answer": f"#### {i}"} for i in range(400)]
    sink = io.BytesIO()
    parquet.write_table(
        pyarrow.Table.from_pylist(rows), sink, row_group_size=20, compression="none",
        use_dictionary=False, write_statistics=False,
    )  # fmt: skip
    bucket.pipe("/bucket/large.parquet", sink.getvalue())
    read = 0

    class Counted(io.BytesIO):
        def read(self, size=-1):
            nonlocal read
            content = super().read(size)
            read += len(content)
            return content

    monkeypatch.setattr(type(bucket), "open", lambda *_: Counted(sink.getvalue()))
    assert answers("memory://bucket/large.parquet[95%:]") == list(range(380, 400))
    assert 200_000 < read < len(sink.getvalue()) / 8  # a twentieth, and twice the footer


def test_a_failing_store_is_an_error(bucket, monkeypatch):
    def fail(*_):
        raise RuntimeError("503 Slow Down")

    monkeypatch.setattr(type(bucket), "open", fail)
    with pytest.raises(DataError, match=r"cannot be read \(RuntimeError: 503 Slow Down\)"):
        answers("memory://bucket/rows/a.jsonl")


def test_presets_read_the_hub(hub):
    rows = "".join(json.dumps(row) + "\n" for row in LAYOUTS["gsm8k"].rows)
    hub.add("org/words", {"train.jsonl": rows.encode()}, "dataset")
    config = DataConfig(task="files", preset="gsm8k", train_files=("org/words",))
    assert [row["reward_model"]["ground_truth"] for row in task_rows(config, "train", 0)] == [
        "1,200", "1"
    ]  # fmt: skip
