"""Streamed rows: each once in a pass, the same for any number of processes, resumed exactly."""

import collections
import functools
import json
import pathlib
import subprocess
import sys

import pyarrow
import pytest
from chat_dialogues import DROPPING
from pyarrow import parquet

import jaxrl_llm
from jaxrl_llm.config import DataConfig
from jaxrl_llm.data import files, streaming
from jaxrl_llm.data.datasets import (
    load_dataset,
    preference_pairs,
    worked_examples,
)
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.prompt_stream import PromptIterator
from jaxrl_llm.data.streams import Stream
from jaxrl_llm.data.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer()


@pytest.fixture(params=["parquet", "jsonl", "jsonl.gz", "jsonl.zst"])
def config(request, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "_WINDOW_BYTES", 600)  # two or three pieces
    monkeypatch.setattr(streaming, "_LINES_BYTES", 200)
    for name, count in (("a", 23), ("b", 20)):
        rows = [
            {"data_source": name, "prompt": f"{name}{i}=", "completion": str(i) * 3}
            for i in range(count)
        ]
        path = tmp_path / "rows" / f"{name}.{request.param}"
        path.parent.mkdir(exist_ok=True)
        if request.param == "parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=5)
        else:
            lines = [json.dumps(row) + "\n" + "\n" * (i % 7 == 0) for i, row in enumerate(rows)]
            content = "".join(lines).rstrip().encode()
            codec = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
            with pyarrow.output_stream(path, compression=codec) as file:
                file.write(content)
    given = (str(tmp_path / "rows"),)
    return functools.partial(
        DataConfig, task="files", train_files=given, stream=True, chat_template=False
    )


def texts(rows):
    return [TOKENIZER.decode(row.tokens).partition("=")[0] for row in rows]


def stream(config, seed=3, shuffle=True, max_tokens=0, num_workers=0):
    rows = worked_examples(config, TOKENIZER, "train", 0, max_tokens)
    return Stream(rows, seed, shuffle, num_workers)


def test_streamed_rows_are_those_of_memory(config):
    wanted = worked_examples(config(stream=False), TOKENIZER, "train", 0)
    assert len(wanted) == 43
    assert stream(config(), shuffle=False).take(43) == tuple(wanted)
    passes = [stream(config()).take(86)[i : i + 43] for i in (0, 43)]
    assert all(sorted(each) == sorted(wanted) for each in passes) and passes[0] != passes[1]
    assert set(texts(passes[0])[:10]) != set(texts(wanted)[:10])
    assert stream(config(), seed=4).take(43) != passes[0]
    assert stream(config(), num_workers=3).take(43) == passes[0]


@pytest.mark.parametrize("taken, num_workers", [(0, 0), (7, 0), (7, 2), (43, 0), (60, 2)])
def test_resume_is_exact(config, taken, num_workers):
    whole = stream(config(), max_tokens=8).take(90)  # some rows are dropped
    first = stream(config(), max_tokens=8, num_workers=num_workers)
    assert first.take(taken) == whole[:taken]
    state = json.loads(json.dumps(first.get_state()))
    resumed = stream(config(), max_tokens=8)
    resumed.set_state(state)
    assert resumed.take(90 - taken) == whole[taken:]
    with pytest.raises(DataError, match="the saved data position has num_rows="):
        Stream([1], 3).set_state(state)


@pytest.mark.parametrize("text", ["[:90%]", "[7:19]", "[-21:]", "[23:24]"])
def test_slices_of_streamed_rows_are_those_of_memory(config, text):
    folder = config().train_files[0]
    of_slice = functools.partial(config, train_files=(f"{folder}{text}",))
    wanted = worked_examples(of_slice(stream=False), TOKENIZER, "train", 0)
    count = len(wanted)
    assert 0 < count < 43 and stream(of_slice(), shuffle=False).take(count) == tuple(wanted)
    both = stream(of_slice()).take(2 * count)
    assert sorted(both[:count]) == sorted(both[count:]) == sorted(wanted)
    first = stream(of_slice())
    assert first.take(count // 2 + 1) == both[: count // 2 + 1]
    resumed = stream(of_slice())
    resumed.set_state(json.loads(json.dumps(first.get_state())))
    assert resumed.take(2 * count - count // 2 - 1) == both[count // 2 + 1 :]


def test_errors_in_a_slice_name_the_line(config):
    (folder,) = config().train_files
    with pytest.raises(DataError, match=r"a\.\S+, row 6: this job needs the columns chosen"):
        preference_pairs(config(train_files=(f"{folder}[5:]",)), TOKENIZER, "train", 0)
    with pytest.raises(DataError, match=r"\[99:\]: no row of \d+ is in this slice"):
        stream(config(train_files=(f"{folder}[99:]",)))


@pytest.mark.parametrize("weights", [(), (1.0,)])
def test_prompts_of_rl_stream_too(config, weights):
    in_memory = load_dataset(config(stream=False), TOKENIZER, "train", 0)
    dataset = load_dataset(config(train_weights=weights), TOKENIZER, "train", 0)
    assert (
        texts(dataset.prompts)[:3] == texts(in_memory.prompts)[:3]
        and dataset.max_prompt_tokens == 256
    )
    batch = PromptIterator(dataset, config(), 3).next_batch(43)
    assert batch.max_prompt_tokens == 256
    found = sorted(batch.prompts, key=lambda prompt: prompt.text)
    wanted = sorted(in_memory.prompts, key=lambda prompt: prompt.text)
    assert [(p.text, p.data_source) for p in found] == [(p.text, p.data_source) for p in wanted]
    assert len({prompt.index for prompt in found}) == 43
    few = load_dataset(config(max_prompt_tokens=3), TOKENIZER, "train", 0)
    assert sorted(texts(PromptIterator(few, config(), 3).next_batch(20).prompts)) == sorted(
        [f"{name}{i}" for name in "ab" for i in range(10)]
    )


def test_every_process_reads_its_pieces_and_gets_all_rows(config, monkeypatch):
    rows = worked_examples(config(), TOKENIZER, "train", 0, 8)
    wanted = [made for _, made in map(streaming.EpochSource(rows, 3, True).__getitem__, range(60))]
    opened = collections.defaultdict(set)
    sent = {}
    monkeypatch.setattr(streaming.jax, "process_count", lambda: 2)
    read = streaming._piece_content
    for index in (0, 1):
        monkeypatch.setattr(streaming.jax, "process_index", lambda index=index: index)
        monkeypatch.setattr(
            streaming,
            "_piece_content",
            lambda piece, index=index: opened[index].add(piece) or read(piece),
        )
        passes = streaming.EpochSource(rows, 3, True)
        entries = [passes[position] for position in range(60)]
        assert 10 < sum(mine for mine, _ in entries) < 50

        def together(action, index=index):
            sent[index] = json.loads(json.dumps(action()))
            return list(sent.values())

        monkeypatch.setattr(streaming.multihost, "run_on_all_hosts", together)
        if index == 0:
            with pytest.raises(KeyError):  # what the other one reads is not there yet
                streaming.gather_rows(lambda entries=entries: entries)
    assert streaming.gather_rows(lambda: entries) == wanted
    in_first_pass = len(rows.pieces)
    assert len(opened[0] | opened[1]) == in_first_pass
    assert min(map(len, opened.values())) > 1


def test_files_and_rows_that_cannot_stream_are_refused(config, tmp_path):
    with pytest.raises(DataError, match=r"all \d+ rows have more tokens than trainer\.max"):
        stream(config(), max_tokens=2).take(1)
    with pytest.raises(DataError, match=r"[ab]\.\S+, row \d+: this job needs the columns chosen"):
        preference_pairs(config(), TOKENIZER, "train", 0)
    for name, content, message in (
        ("c.json", "[{}]", r"c\.json: data\.stream reads \.parquet and \.jsonl files; write it"),
        ("c", "{}", r"c: unsupported suffix ''; known: \.csv, \.json, \.jsonl, \.parquet"),
        ("c.jsonl", "", r"c\.jsonl: no rows in this file; leave it out"),
        ("c.parquet", "PAR1", r"c\.parquet: cannot be read: .*; is the file complete\?"),
    ):
        path = tmp_path / "rows" / name
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            stream(config(train_files=(str(path),)))
        path.unlink()
    with pytest.raises(DataError, match=r"absent\.jsonl: no such file"):
        stream(config(train_files=("absent.jsonl",)))


def test_errors_name_the_line(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "_LINES_BYTES", 64)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1=", "completion": "1"}\n\n' * 20 + "[1]\n{")
    config = DataConfig(task="files", train_files=(str(path),), stream=True, chat_template=False)
    with pytest.raises(DataError, match=r"rows\.jsonl, row 41: must be a mapping of columns, got"):
        stream(config, shuffle=False).take(21)
    path.write_text(path.read_text().replace("[1]", ""))
    with pytest.raises(DataError, match=r"rows\.jsonl, row 42: broken JSON in column 2"):
        stream(config, shuffle=False).take(21)
    late = stream(config, shuffle=False)
    path.write_text("")
    with pytest.raises(DataError, match="it was changed while it was read; start the run again"):
        late.take(1)


def test_rows_from_python_are_read_like_a_file():
    rows = [{"prompt": f"{i}=", "completion": "1"} for i in range(3)]
    config = DataConfig(task="files", train_files=("rows of train",), chat_template=False)
    wanted = ["0", "1", "2"]
    for given in (rows, iter(rows)):
        with files.in_memory_rows({"train": given}):
            assert texts(worked_examples(config, TOKENIZER, "train", 0)) == wanted
    streamed = DataConfig(**{**vars(config), "stream": True})
    with files.in_memory_rows({"train": rows}):
        assert texts(stream(streamed, shuffle=False).take(4)) == [*wanted, "0"]
        assert files.registered_rows["rows of train"] is rows
    with pytest.raises(DataError, match="rows of train: unsupported suffix ''"):
        list(files.read_rows(config.train_files))
    for wrong, message in (
        ({"train": []}, "rows of train: no rows"),
        ({"train": 3}, "rows of train: must be an iterable of mappings .dicts., got int"),
        ({"train": "rows.jsonl"}, "rows of train: must be an iterable of mappings .dicts., got st"),
        ({"test": []}, "the splits are 'train' and, if wanted, 'eval', got"),
    ):
        with pytest.raises(DataError, match=message), files.in_memory_rows(wrong):
            pass
    sft = jaxrl_llm.default_config("sft")
    with pytest.raises(DataError, match="rows of train, row 1: this job needs the columns mess"):
        jaxrl_llm.train(sft, "unused", rows=[{"text": "x"}])
    with pytest.raises(DataError, match="rows of train, row 1: must be a mapping of columns, got"):
        jaxrl_llm.train(sft, "unused", rows=[1])
    assert not pathlib.Path("unused").exists()


PROGRAM = """
import hashlib, json, pathlib, sys, time
from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.datasets import worked_examples
from jaxrl_llm.data.streams import Stream
from jaxrl_llm.data.tokenizer import character_tokenizer
path, num_rows, num_workers, saved = sys.argv[1:]
config = DataConfig(task="files", train_files=(path,), stream=True, num_workers=int(num_workers))
begin = time.monotonic()
rows = worked_examples(config, character_tokenizer(), "train", 0, 512)
stream = Stream(rows, 0, True, config.num_workers)
if pathlib.Path(saved).exists():
    stream.set_state(json.loads(pathlib.Path(saved).read_text()))
    found = stream.take(64)
    seconds = time.monotonic() - begin
else:
    stream.take(64)
    seconds = time.monotonic() - begin
    assert len(rows) == int(num_rows)
    state = stream.get_state()
    state["position"]["next_index"] = len(rows) // 2
    stream.set_state(state)
    stream.take(50)
    pathlib.Path(saved).write_text(json.dumps(stream.get_state()))
    found = stream.take(64)
found += stream.take(2936)
digest = hashlib.sha256(repr(found).encode()).hexdigest()
status = pathlib.Path("/proc/self/status").read_text()
print(digest, seconds, int(status.partition("VmHWM:")[2].split()[0]) / 2**20)
"""


def write(path, num_rows, group):
    """Writes rows made by their number to a parquet or JSON lines file."""
    writer = None
    with open(path, "w" if path.suffix == ".jsonl" else "a") as lines:
        for start in range(0, num_rows, group):
            numbers = range(start, start + group)
            question = [f"What is {i} and {i * 7}? Think of it step by step." for i in numbers]
            answer = [f"{i} and {i * 7} are {i * 8}. " * 3 for i in numbers]
            if path.suffix == ".jsonl":
                rows = zip(question, answer, strict=True)
                lines.writelines(f'{{"prompt": "{q}", "completion": "{a}"}}\n' for q, a in rows)
                continue
            table = pyarrow.table({"prompt": question, "completion": answer})
            writer = writer or parquet.ParquetWriter(path, table.schema)
            writer.write_table(table, row_group_size=group)
    if writer:
        writer.close()


@pytest.mark.parametrize(
    "name, num_rows, group, num_workers",
    [
        pytest.param("rows.parquet", 20_000, 1000, 0, marks=pytest.mark.slow),
        pytest.param("rows.parquet", 5_000_000, 100_000, 0, marks=pytest.mark.nightly),
        pytest.param("rows.parquet", 5_000_000, 100_000, 4, marks=pytest.mark.nightly),
        pytest.param("rows.parquet", 5_000_000, 1_000_000, 0, marks=pytest.mark.nightly),
        pytest.param("rows.jsonl", 5_000_000, 100_000, 0, marks=pytest.mark.nightly),
    ],
)
def test_first_batch_memory_and_resume(name, num_rows, group, num_workers, tmp_path):
    path = tmp_path / name
    write(path, num_rows, group)
    arguments = [path, str(num_rows), str(num_workers), tmp_path / "state.json"]
    begun, resumed = (
        subprocess.run(
            [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    )
    print(f"{name}, {path.stat().st_size / 2**20:.0f} MiB, {group=}, {num_workers=}:")
    for what, (_, seconds, peak_gib) in (("begun", begun), ("resumed", resumed)):
        print(f"{what}: first batch {float(seconds):.2f} s, peak {float(peak_gib):.2f} GiB")
        assert float(seconds) < 10 and float(peak_gib) < 1
    assert begun[0] == resumed[0]


@pytest.fixture
def dialogues(tmp_path, monkeypatch):
    """Rows whose template drops what stands before a bar once others follow: 1 to 3 sequences."""
    monkeypatch.setattr(streaming, "_LINES_BYTES", 600)
    monkeypatch.setattr(streaming, "_WINDOW_BYTES", 1500)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = DROPPING
    rows = []
    for i in range(20):
        messages = []
        for turn in range(1 + i % 3):
            messages.append({"role": "user", "content": f"{i}?"})
            messages.append({"role": "assistant", "content": f"t{turn}|a{i}"})
        rows.append({"messages": messages})
    path = tmp_path / "dialogues.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = functools.partial(DataConfig, task="files", train_files=(str(path),))
    return config, tokenizer


def test_streamed_rows_of_several_sequences_are_those_of_memory(dialogues, caplog):
    config, tokenizer = dialogues
    caplog.set_level("INFO")
    whole = worked_examples(config(), tokenizer, "train", 0)
    assert len(whole) == sum(1 + i % 3 for i in range(20)) == 39
    assert "train split: 20 rows gave 39 sequences" in caplog.text
    rows = worked_examples(config(stream=True), tokenizer, "train", 0)
    assert Stream(rows, 0, shuffle=False).take(39) == tuple(whole)
    # The order does not depend on how many are taken at a time.
    by_one, by_seven = Stream(rows, 3), Stream(rows, 3)
    assert [by_one.take(1)[0] for _ in range(42)] == [x for _ in range(6) for x in by_seven.take(7)]
    assert "so far gave" in caplog.text


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_inside_a_row_is_exact(dialogues, num_workers):
    config, tokenizer = dialogues
    rows = worked_examples(config(stream=True), tokenizer, "train", 0)
    whole = Stream(rows, 3).take(90)
    inside = 0
    for taken in (0, 1, 2, 5, 7, 11, 19, 24, 38, 39, 40):
        first = Stream(rows, 3, True, num_workers)
        assert first.take(taken) == whole[:taken]
        state = json.loads(json.dumps(first.get_state()))
        inside += "inside" in state
        resumed = Stream(rows, 3, True, num_workers)
        resumed.set_state(state)
        assert json.loads(json.dumps(resumed.get_state())) == state
        assert resumed.take(5) == whole[taken : taken + 5]
        assert resumed.take(20) == whole[taken + 5 : taken + 25]
        assert first.take(25) == whole[taken : taken + 25]
    assert inside > 2
