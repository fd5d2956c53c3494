"""Rows read by row group: each once in a pass, the same for any number of processes, resumed."""

import collections
import functools
import json
import subprocess
import sys

import pyarrow
import pytest
from pyarrow import parquet

import jaxrl_llm
from jaxrl_llm.config import DataConfig
from jaxrl_llm.data import files, streaming
from jaxrl_llm.data.datasets import Stream, load_dataset, mixed, preference_pairs, worked_examples
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.types import Pair

TOKENIZER = character_tokenizer()


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "_WINDOW_BYTES", 600)  # about two groups
    for name, count in (("a", 23), ("b", 20)):
        rows = [{"prompt": f"{name}{i}=", "completion": str(i) * 3} for i in range(count)]
        table = pyarrow.Table.from_pylist(rows)
        parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=5)
    return functools.partial(
        DataConfig, task="files", train_files=(str(tmp_path),), stream=True, chat_template=False
    )


def texts(rows):
    return [TOKENIZER.decode(row.tokens).partition("=")[0] for row in rows]


def stream(config, seed=3, shuffle=True, max_tokens=0):
    rows = worked_examples(config, TOKENIZER, "train", 0, max_tokens)
    return Stream(rows, seed, shuffle)


def test_streamed_rows_are_those_of_memory(config):
    wanted = worked_examples(config(stream=False), TOKENIZER, "train", 0)
    assert stream(config(), shuffle=False).take(43) == tuple(wanted)
    passes = [stream(config()).take(86)[i : i + 43] for i in (0, 43)]
    assert all(sorted(each) == sorted(wanted) for each in passes) and passes[0] != passes[1]
    assert set(texts(passes[0])[:10]) != set(texts(wanted)[:10])
    assert stream(config(), seed=4).take(43) != passes[0]


@pytest.mark.parametrize("taken", [0, 7, 43, 60])
def test_resume_is_exact(config, taken):
    whole = stream(config(), max_tokens=8).take(90)  # some rows are dropped
    first = stream(config(), max_tokens=8)
    assert first.take(taken) == whole[:taken]
    state = json.loads(json.dumps(first.get_state()))
    resumed = stream(config(), max_tokens=8)
    resumed.set_state(state)
    assert resumed.take(90 - taken) == whole[taken:]
    with pytest.raises(DataError, match="num_rows=43"):
        Stream([1], 3).set_state(state)


def test_every_process_reads_its_groups_and_gets_all_rows(config, monkeypatch):
    wanted = stream(config()).take(30)
    opened = collections.defaultdict(set)
    parts = {}
    monkeypatch.setattr(streaming.jax, "process_count", lambda: 2)
    for index in (0, 1, 0, 1):  # a first time to know what the other process would send
        monkeypatch.setattr(streaming.jax, "process_index", lambda index=index: index)

        def together(action, index=index):
            parts[index] = json.loads(json.dumps(action()))
            return list(parts.values())

        monkeypatch.setattr(streaming.hosts, "together", together)
        reader = streaming.parquet.ParquetFile

        class Reader(reader):
            def read_row_group(self, number, index=index, **options):
                opened[index].add((self.metadata.num_rows, number))
                return super().read_row_group(number, **options)

        monkeypatch.setattr(streaming.parquet, "ParquetFile", Reader)
        cursor = streaming.Cursor(worked_examples(config(), TOKENIZER, "train", 0), 3, True)
        found = cursor._made(range(30))
    assert tuple(found) == wanted
    assert not opened[0] & opened[1] and opened[0] and opened[1]


def test_pairs_come_back_from_other_processes():
    (row,) = worked_examples(DataConfig(arithmetic_train_prompts=1), TOKENIZER, "train", 0)
    for each in (row, Pair(row, row), None):
        assert streaming._restored(json.loads(json.dumps(each))) == each


def test_what_cannot_be_streamed(config, tmp_path):
    with pytest.raises(DataError, match="all 43 rows have more tokens than"):
        stream(config(), max_tokens=2).take(1)
    with pytest.raises(DataError, match=r"config\.data\.stream: prompts of RL are all read"):
        load_dataset(config(), TOKENIZER, "train", 0)
    with pytest.raises(DataError, match=r"parquet, row \d+: this job needs the columns chosen"):
        Stream(preference_pairs(config(), TOKENIZER, "train", 0), 0).take(1)
    (tmp_path / "c.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"c\.jsonl: data\.stream reads parquet files"):
        stream(config())
    broken = tmp_path / "a.parquet"
    broken.write_bytes(broken.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as parquet"):
        stream(config())


def test_a_mixture_has_the_shares_of_its_weights(tmp_path):
    found = collections.Counter(mixed("aaaabbbbbbc", [0] * 4 + [1] * 6 + [2], (1.0, 1.0, 2.0)))
    assert found == {"a": 6, "b": 6, "c": 12}
    paths = []
    for name, count in (("a", 4), ("b", 6)):
        path = tmp_path / f"{name}.jsonl"
        row = {"data_source": name, "prompt": "1=", "completion": name}
        path.write_text((json.dumps(row) + "\n") * count)
        paths.append(str(path))
    config = DataConfig(task="files", train_files=tuple(paths), train_weights=(3.0, 1.0))
    prompts = load_dataset(config, TOKENIZER, "train", 0).prompts
    assert collections.Counter(p.data_source for p in prompts) == {"a": 18, "b": 6}
    assert len(worked_examples(config, TOKENIZER, "train", 0)) == 24
    ((field, message),) = DataConfig(
        task="files", train_files=("a",), train_weights=(1.0, 2.0)
    ).problems()
    assert field == "train_weights" and "2 weights for 1 train_files; give one for each" in message


def test_rows_from_python_are_read_like_a_file():
    rows = ({"prompt": f"{i}=", "completion": "1"} for i in range(3))
    config = DataConfig(task="files", train_files=("rows of train",), chat_template=False)
    with files.given({"train": rows}):
        assert texts(worked_examples(config, TOKENIZER, "train", 0)) == ["0", "1", "2"]
    with pytest.raises(DataError, match="no such file"):
        list(files.read_rows(config.train_files))
    for wrong, message in (
        ({"train": [1]}, "rows of train, row 1: must be a mapping of columns, got int"),
        ({"train": []}, "rows of train: no rows"),
        ({"test": []}, "the splits are 'train' and, if wanted, 'eval', got"),
    ):
        with pytest.raises(DataError, match=message), files.given(wrong):
            pass
    sft = jaxrl_llm.default_config("sft")
    with pytest.raises(DataError, match="rows of train, row 1: this job needs the columns mess"):
        jaxrl_llm.train(sft, "unused", rows=[{"text": "x"}])


FIVE_MILLION = """
import resource, sys, time
from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.datasets import Stream, worked_examples
from jaxrl_llm.data.tokenizer import character_tokenizer
config = DataConfig(task="files", train_files=(sys.argv[1],), stream=True)
tokenizer = character_tokenizer()
before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
rows = worked_examples(config, tokenizer, "train", 0, 512)
stream = Stream(rows, 0)
first = stream.take(64)
seconds = time.monotonic() - begin
state = stream.get_state() | {"position": 2_500_000 if len(rows) == 5_000_000 else -1}
stream.set_state(state)
stream.take(50)
state = stream.get_state()
wanted = stream.take(300)
again = Stream(worked_examples(config, tokenizer, "train", 0, 512), 0)
again.set_state(state)
assert again.take(300) == wanted
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(seconds, peak / 2**20, before / 2**20)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("group", [100_000, 1_000_000])
def test_five_million_rows(tmp_path, group):
    path = tmp_path / "rows.parquet"
    writer = None
    for start in range(0, 5_000_000, group):
        numbers = range(start, start + group)
        question = [f"What is {i} and {i * 7}? Think of it step by step." for i in numbers]
        answer = [f"{i} and {i * 7} are {i * 8}. " * 3 for i in numbers]
        table = pyarrow.table({"prompt": question, "completion": answer})
        writer = writer or parquet.ParquetWriter(path, table.schema)
        writer.write_table(table, row_group_size=group)
    writer.close()
    found = subprocess.run(
        [sys.executable, "-c", FIVE_MILLION, path], capture_output=True, text=True, check=True
    )
    seconds, peak_gib, before_gib = map(float, found.stdout.split())
    print(f"first batch {seconds:.2f} s, peak {peak_gib:.2f} GiB, {before_gib:.2f} before the rows")
    assert seconds < 10 and peak_gib < 1
