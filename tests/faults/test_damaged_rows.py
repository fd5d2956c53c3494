"""Damaged rows and files of every layout and format: each is answered with place and remedy."""

import copy
import json
import pathlib
import random
import re
from collections.abc import Callable
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data import streaming
from jaxrl_llm.data.datasets import load_dataset, preference_pairs, worked_examples
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.prompt_stream import PromptIterator
from jaxrl_llm.data.streams import Stream
from jaxrl_llm.data.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer()
ROWS = 6  # of a file
# What the value must be, or what to do.
SAID = re.compile(r"must |; |is the file complete\? Save it again")


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


# By layout: what reads it, a row of it, and the columns that it cannot do without.
LAYOUTS: dict[str, tuple[str, Callable[[int], dict[str, Any]], tuple[str, ...]]] = {
    "verl": (
        "rl",
        lambda i: {
            "data_source": "sums",
            "prompt": [user(f"{i}+1=")],
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"index": i},
        },
        ("data_source", "prompt"),
    ),
    "prompt as text": (
        "rl",
        lambda i: {"data_source": "sums", "prompt": f"{i}+1="},
        ("data_source", "prompt"),
    ),
    "messages": (
        "sft",
        lambda i: {"messages": [user(f"{i}+1="), assistant(str(i + 1))]},
        ("messages",),
    ),
    "completion": (
        "sft",
        lambda i: {"prompt": f"{i}+1=", "completion": str(i + 1)},
        ("prompt", "completion"),
    ),
    "pairs": (
        "pairs",
        lambda i: {"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i)},
        ("prompt", "chosen", "rejected"),
    ),
    "dialogues": (
        "pairs",
        lambda i: {
            "chosen": [user(f"{i}+1="), assistant(str(i + 1))],
            "rejected": [user(f"{i}+1="), assistant(str(i))],
        },
        ("chosen", "rejected"),
    ),
}


def lists_of(row):
    """Returns the columns that hold messages."""
    return [name for name, value in row.items() if isinstance(value, list)]


def remove(row, needed, draw):
    del row[draw.choice(needed)]


def nothing(row, needed, draw):
    row[draw.choice(needed)] = None


def blank(row, needed, draw):
    name = draw.choice(needed)
    row[name] = [] if isinstance(row[name], list) else ""


def renamed(row, needed, draw):
    name = draw.choice(needed)
    row[f"{name}s"] = row.pop(name)


def another_type(row, needed, draw):
    row[draw.choice(needed)] = draw.choice([7, 2.5, True, {"text": "1"}, [3], [["1"]]])


def half_a_character(row, needed, draw):
    name = draw.choice(needed)
    if isinstance(row[name], list):
        row[name][-1]["content"] = "\udc80"
    else:
        row[name] = "\ud800"


def message_without(row, needed, draw):
    for name in lists_of(row)[:1]:
        del draw.choice(row[name])[draw.choice(["role", "content"])]
    return bool(lists_of(row))


def message_of_another_type(row, needed, draw):
    for name in lists_of(row)[:1]:
        row[name][0] = draw.choice(["1+1=", 3, [user("1")]])
    return bool(lists_of(row))


def content_of_another_type(row, needed, draw):
    for name in lists_of(row)[:1]:
        draw.choice(row[name])["content"] = draw.choice([3, {"text": "1"}, None])
    return bool(lists_of(row))


def nobody_answers(row, needed, draw):
    if "messages" not in row:
        return False
    row["messages"] = [user("1+1=")]
    return True


def another_beginning(row, needed, draw):
    if "prompt" in row or "chosen" not in row:
        return False
    row["rejected"][0] = user("another question")
    return True


def no_mapping(row, needed, draw):
    if "extra_info" not in row:
        return False
    row[draw.choice(["extra_info", "reward_model"])] = draw.choice(["easy", 3, [1]])
    return True


def broken_tools(row, needed, draw):
    row["tools"] = draw.choice(["[{", '{"name": "f"}', "[1]", "f"])


def reserved_variable(row, needed, draw):
    row["chat_template_kwargs"] = draw.choice(['{"tokenize": true}', "{", "[1]"])


def no_row(row, needed, draw):
    return draw.choice([[1], "text", 3])


OF_ROWS = [
    remove, nothing, blank, renamed, another_type, half_a_character, message_without,
    message_of_another_type, content_of_another_type, nobody_answers, another_beginning, no_mapping,
    broken_tools, reserved_variable, no_row,
]  # fmt: skip
JSON_ONLY = (no_row, half_a_character)

# Damage of a line of JSON; of a whole file (None: any).
OF_LINES = {
    "cut": lambda line, draw: line[: draw.randrange(1, len(line) - 1)],
    "comma": lambda line, draw: line[:-1] + b",}",
    "two objects": lambda line, draw: line + b" " + line,
    "no UTF-8": lambda line, draw: line.replace(b"1", b"\xff", 1),
    "NaN": lambda line, draw: line[:-1] + b', "more": NaN}',
    "huge": lambda line, draw: line[:-1] + b', "more": 1e999}',
    "many digits": lambda line, draw: line[:-1] + b', "more": ' + b"9" * 5000 + b"}",
    "key twice": lambda line, draw: line[:-1] + b', "more": 1, "more": 2}',
    "deep": lambda line, draw: line[:-1] + b', "more": ' + b"[" * 70 + b"]" * 70 + b"}",
    "control": lambda line, draw: line.replace(b"1", b"\x01", 1),
}


def cut(content, draw):
    """Returns a beginning that does not end with a whole line."""
    ends = range(1, len(content) - 8)
    return content[: draw.choice([end for end in ends if b"\n" not in content[end - 1 : end + 1]])]


OF_FILES = {
    "empty": lambda content, draw: b"",
    "blank": lambda content, draw: b"\n \n",
    "cut": cut,
    "zeros": lambda content, draw: bytes(len(content)),
    "text": lambda content, draw: b"These are no rows.",
    "without its end": lambda content, draw: content[:-2],
}


def write(path: pathlib.Path, rows: list[Any], damage=None, row=0, draw=None) -> None:
    """Writes rows in the format of the suffix; `damage` is of the bytes of one of them."""
    if path.suffix == ".parquet":
        names = dict.fromkeys(name for each in rows for name in each)
        whole = [{name: each.get(name) for name in names} for each in rows]
        parquet.write_table(pyarrow.Table.from_pylist(whole), path, row_group_size=4)
        return
    lines = [json.dumps(each).encode() for each in rows]
    if damage:
        lines[row] = damage(lines[row], draw)
    if path.suffix == ".json":
        path.write_bytes(b"[" + b",\n".join(lines) + b"]")
    else:
        path.write_bytes(b"".join(line + b"\n" for line in lines))


def read(job: str, config: DataConfig) -> None:
    """Reads all rows as a job does."""
    if job == "rl":
        dataset = load_dataset(config, TOKENIZER, "train", 0)
        PromptIterator(dataset, config, 0).next_batch(ROWS)
        return
    make = {"sft": worked_examples, "pairs": preference_pairs}[job]
    Stream(make(config, TOKENIZER, "train", 0), 0, shuffle=config.shuffle).take(ROWS)


def damaged(number: int, folder: pathlib.Path) -> tuple[str, str, str, DataConfig, str]:
    """Makes a damaged file; returns its job, layout, damage, the config and where the damage is."""
    draw = random.Random(f"damage {number}")
    layout = draw.choice(list(LAYOUTS))
    job, make, needed = LAYOUTS[layout]
    suffix = draw.choice([".jsonl", ".json", ".parquet"])
    path = folder / f"rows{suffix}"
    rows = [make(i) for i in range(1, ROWS + 1)]
    row = draw.randrange(ROWS)
    kind = draw.choice(["row", "row", "line", "file"])
    place = f"{path}, row {row + 1}"
    if kind == "line" and suffix != ".jsonl":
        suffix, path = ".jsonl", folder / "rows.jsonl"
        place = f"{path}, row {row + 1}"
    if kind == "row":
        while True:
            change = draw.choice(OF_ROWS)
            one = copy.deepcopy(rows[row])
            found = change(one, needed, draw)
            if found is False or (suffix == ".parquet" and change in JSON_ONLY):
                continue
            trial = [*rows[:row], found if change is no_row else one, *rows[row + 1 :]]
            try:
                write(path, trial)
            except (pyarrow.ArrowException, TypeError):
                continue  # no parquet file can hold such a row among the others
            break
        name = change.__name__
    elif kind == "line":
        name = draw.choice(list(OF_LINES))
        write(path, rows, OF_LINES[name], row, draw)
    else:
        name = draw.choice(list(OF_FILES))
        write(path, rows)
        content = path.read_bytes()
        path.write_bytes(OF_FILES[name](content, draw))
        place = str(path)
    stream = suffix != ".json" and draw.random() < 0.5
    given = str(folder if draw.random() < 0.3 else path)
    config = DataConfig(task="files", train_files=(given,), stream=stream, shuffle=not stream)
    return job, f"{layout} {suffix}", name, config, place


@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_damaged_rows_and_files(count, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "_LINES_BYTES", 64)
    seen = set()
    for number in range(count):
        folder = tmp_path / str(number)
        folder.mkdir()
        job, layout, name, config, place = damaged(number, folder)
        what = f"{number}: {layout}, {name}, stream={config.stream}"
        with pytest.raises(DataError) as found:
            read(job, config)
            pytest.fail(what)
        said = str(found.value)
        assert place in said, f"{what}: {said}"
        assert SAID.search(said), f"{what}: {said}"
        assert "Traceback" not in said and len(said) < 1000, f"{what}: {said}"
        seen.add((layout, name))
    assert len(seen) > 150


def test_without_damage_all_are_read(tmp_path):
    for layout, (job, make, _) in LAYOUTS.items():
        for suffix in (".jsonl", ".json", ".parquet"):
            path = tmp_path / f"{layout}{suffix}"
            write(path, [make(i) for i in range(1, ROWS + 1)])
            for stream in (False, True)[: 1 + (suffix != ".json")]:
                read(job, DataConfig(task="files", train_files=(str(path),), stream=stream))
