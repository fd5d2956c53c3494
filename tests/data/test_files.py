"""Files and rows, good and hostile."""

import json
import re

import pyarrow
import pytest
from pyarrow import parquet

from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.files import checked_row, in_memory_rows, read_rows

GOOD = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "1+1="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0, "split": "train"},
}


# What is not used stays where reward functions see it.
CHECKED = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "1+1="}],
    "reward_model": {"ground_truth": "2"},
    "extra_info": {
        "index": 0, "split": "train", "ability": "math", "reward_model": {"style": "rule"}
    },
}  # fmt: skip


def write_jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path, *rows, **options):
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, **options)
    return str(path)


def test_parquet_and_jsonl_give_the_same_rows_in_order(tmp_path):
    rows = [{**GOOD, "extra_info": {"index": i, "split": "train"}} for i in range(5)]
    files = [
        write_parquet(tmp_path / "a.parquet", *rows[:3], row_group_size=2),
        write_jsonl(tmp_path / "b.JSONL", *rows[3:]),
    ]
    read = list(read_rows(files))
    assert [row for _, row in read] == rows
    assert [checked_row(row, where) for where, row in read] == [
        {**CHECKED, "extra_info": {**CHECKED["extra_info"], "index": i}} for i in range(5)
    ]
    assert [where.removeprefix(str(tmp_path)) for where, _ in read] == [
        "/a.parquet, row 1", "/a.parquet, row 2", "/a.parquet, row 3",
        "/b.JSONL, row 1", "/b.JSONL, row 2",
    ]  # fmt: skip


def test_blank_lines_are_skipped_but_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(f"\n{json.dumps(GOOD)}\n  \n{json.dumps(GOOD)}\n\n")
    assert [where.rsplit(" ", 1)[1] for where, _ in read_rows([str(path)])] == ["2", "4"]


def test_prompts_in_either_form_and_under_any_name():
    text = {**{k: v for k, v in GOOD.items() if k != "prompt"}, "question": "1+1="}
    assert checked_row(text, "row", "question") == CHECKED
    talk = [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]
    assert checked_row({**GOOD, "prompt": talk}, "row")["prompt"] == talk


def test_missing_columns_get_defaults():
    row = checked_row({"data_source": "s", "prompt": "hi", "extra_info": None}, "row")
    assert row["reward_model"] == {"ground_truth": None}
    assert row["extra_info"] == {}


def test_no_column_is_lost():
    talk = [{"role": "tool", "content": "4", "tool_call_id": "a", "name": None}]
    row = {**GOOD, "prompt": talk, "index": 7, "agent_name": "search", "images": None, "old": {}}
    found = checked_row(row, "row")
    assert found["extra_info"] == {
        **CHECKED["extra_info"], "row/index": 7, "agent_name": "search"
    }  # fmt: skip
    assert found["prompt"] == [{"role": "tool", "content": "4", "tool_call_id": "a"}]


NULLS = {"extra_info": {"n": None, "deep": [{"a": None}]}, "reward_model": {"ground_truth": {}}}


def test_nulls_of_json_stay_and_those_that_arrow_fills_in_go(tmp_path):
    """A row must not see what another row has, and a default must be taken."""
    plain = {"data_source": "s", "prompt": "1"}
    one = {**plain, "extra_info": {"max_characters": 9, "deep": [{"a": 1}]}}
    one |= {"reward_model": {"ground_truth": {"target": ["2"]}}}
    two = {**plain, "extra_info": {"level": 1, "deep": [{"b": 2}, {"a": 3}]}}
    two |= {"reward_model": {"ground_truth": {"numbers": [1, None]}}}
    read = lambda path: [checked_row(row, where) for where, row in read_rows([path])]  # noqa: E731
    wanted = [one, two]
    for path in (
        write_parquet(tmp_path / "a.parquet", one, two),
        write_jsonl(tmp_path / "a.jsonl", one, two),
    ):
        found = read(path)
        assert [row["extra_info"] for row in found] == [row["extra_info"] for row in wanted]
        assert [row["reward_model"] for row in found] == [row["reward_model"] for row in wanted]
        assert found[1]["extra_info"].get("max_characters", 1024) == 1024
    (row,) = read(write_jsonl(tmp_path / "b.jsonl", {**plain, **NULLS}))
    assert row["extra_info"] == NULLS["extra_info"]


def test_nulls_of_given_rows():
    row = {"data_source": "s", "prompt": "1", "extra_info": {"n": None, "m": 1}}
    with in_memory_rows({"train": [row]}) as names:
        ((_, found),) = read_rows([names["train"]])
        assert found["extra_info"] == {"n": None, "m": 1}
    # As a Dataset of Hugging Face, which reads Arrow.
    rows = type("Dataset", (), {"features": {}, "__iter__": lambda self: iter([row])})()
    with in_memory_rows({"train": rows}) as names:
        ((_, found),) = read_rows([names["train"]])
        assert found["extra_info"] == {"m": 1}


def test_other_line_ends_than_a_line_feed_are_part_of_a_text(tmp_path):
    path = tmp_path / "a.jsonl"
    text = "a\u2028b\u2029c\u0085d\x0b"
    rows = [{"a": text}, {"a": 1}]
    path.write_bytes("\r\n".join(json.dumps(r, ensure_ascii=False) for r in rows).encode())
    assert [row for _, row in read_rows([str(path)])] == rows


@pytest.mark.parametrize(
    "change, message",
    [
        ({"prompt": None}, "row 7: prompt is missing"),
        ({"prompt": ""}, "row 7: prompt is empty"),
        ({"prompt": " \n"}, "row 7: prompt is empty"),
        ({"prompt": []}, "row 7: prompt is empty"),
        ({"prompt": [{"role": "user", "content": ""}]}, "row 7: prompt is empty"),
        ({"prompt": 5}, "list of {role, content} messages or one text, got int"),
        ({"prompt": {"role": "user", "content": "x"}}, "or one text, got dict"),
        ({"prompt": ["hi"]}, "message 1 is str"),
        ({"prompt": [{"content": "x"}]}, "role of message 1 must be a text, got None"),
        ({"prompt": [{"role": "user"}]}, "content of message 1 must be a text, got None"),
        ({"prompt": [{"role": "user", "content": [{"type": "audio"}]}]}, "has type 'audio'"),
        ({"prompt": "half a character \ud83d"}, "content of message 1 must be a text"),
        ({"data_source": None}, "row 7: data_source must be a text"),
        ({"data_source": ""}, "row 7: data_source must be a text"),
        ({"data_source": 3}, "data_source must be a text that names the row's origin, got 3"),
        ({"reward_model": "2"}, "row 7: reward_model must be a mapping, got str"),
        ({"extra_info": [1]}, "row 7: extra_info must be a mapping, got list"),
    ],
)
def test_hostile_rows_are_named(change, message):
    with pytest.raises(DataError) as error:
        checked_row({**GOOD, **change}, "f.jsonl, row 7")
    assert str(error.value).startswith("f.jsonl, row 7: ") and message in str(error.value)


@pytest.mark.parametrize("key", ["prompt", "data_source"])
def test_a_missing_column_is_named(key):
    row = {name: value for name, value in GOOD.items() if name != key}
    with pytest.raises(DataError, match=f"row 7: {key}"):
        checked_row(row, "row 7")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"x", "unsupported suffix '.txt'; known: .csv, .json, .jsonl, .parquet"),
        ("a.jsonl", None, "a.jsonl: no such file"),
        ("a.parquet", None, "a.parquet: no such file"),
        ("a.jsonl", b"", "a.jsonl: no rows in this file"),
        ("a.jsonl", b"\n \n", "a.jsonl: no rows in this file"),
        ("a.parquet", b"", "a.parquet: cannot be read"),
        ("a.parquet", b"not parquet at all", "a.parquet: cannot be read"),
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "a.jsonl, row 2: broken JSON in column 7: Expecting"),
        ("a.jsonl", b'{"a": 1}\n{"a": 2', "a.jsonl, row 2: broken JSON in column 8: Expecting"),
        ("a.jsonl", b"[\n{}\n]", "a.jsonl, row 1: broken JSON in column 2: Expecting value; each"),
        ("a.jsonl", b'{"\xc3\xa9": "\xff"}\n', "a.jsonl, row 1: broken JSON in column 8: invalid"),
        ("a.jsonl", b"\xff\xfe{\0}\0", "in column 1: invalid start byte; save the file as UTF-8"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, row 1: broken JSON in column 65: brackets deeper"),
        ("a.jsonl", b'{"a": [7, -' + b"1" * 5000 + b"]}", "column 11: an integer of 5001 digits"),
        ("a.jsonl", b'{"a": [], "b": 1e999}', "column 16: 1e999 is more than a float holds; write"),
        ("a.jsonl", b'{"a": {"NaN": "NaN", "b": NaN}}', "column 27: NaN is not a JSON number"),
        ("a.jsonl", b'{"a": -Infinity}', "column 7: -Infinity is not a JSON number; write null"),
        (
            "a.jsonl",
            rb'{"a": {"b": "\\"}, "b": [{"b": 1}, {"b": "a"}], "\u0061": 2}',
            "a.jsonl, row 1: broken JSON in column 49: the key 'a' a second time in one",
        ),
        ("a.jsonl", b"{}\n[1, 2]\n", "a.jsonl, row 2: must be a mapping of columns, got list"),
        ("a.json", b"[{},\n{]", "a.json: broken JSON in line 2, column 2: Expecting property name"),
        ("a.json", b"[{},\n 3]", "a.json, row 2: must be a mapping of columns, got int"),
        ("a.json", b"{}\n{", "a.json, row 2: broken JSON in column 2"),
        ("a.jsonl", b"null\n", "a.jsonl, row 1: must be a mapping of columns, got NoneType"),
    ],
)
def test_hostile_files_are_named(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        list(read_rows([str(tmp_path / name)]))
    assert message in str(error.value)


def test_json_at_its_bounds_is_read(tmp_path):
    brackets = b"[" * 63 + b'"}{[["' + b"]" * 63
    line = b'{"a": %b, "b": %b, "c": "%b"}' % (brackets, b"1" * 4300, b"[{" * 500)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + line)
    ((_, row),) = read_rows([str(tmp_path / "a.jsonl")])
    assert row["b"] == int("1" * 4300) and row["c"] == "[{" * 500


@pytest.mark.parametrize(
    "column, message",
    [
        (pyarrow.array([1], pyarrow.timestamp("ns")), "(timestamp[ns]): Nanosecond"),
        (pyarrow.array([2**30], pyarrow.date32()), "(date32[day]): "),
        (
            pyarrow.StringArray.from_buffers(
                1, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe")
            ),
            "(string): 'utf-8' codec can't decode",
        ),
    ],
    ids=["nanoseconds", "date", "text"],
)
def test_a_parquet_value_that_python_does_not_have_is_named(tmp_path, column, message):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"x": column}), path)
    with pytest.raises(DataError, match=rf"after row 0, column 'x' {re.escape(message)}"):
        list(read_rows([str(path)]))


def test_parquet_columns_of_one_name_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_arrays([pyarrow.array([1])] * 2, ["x", "x"]), path)
    with pytest.raises(DataError, match=r"a\.parquet: 2 columns are named 'x'; rename or drop"):
        list(read_rows([str(path)]))


def test_a_truncated_parquet_file_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, *[GOOD] * 100)
    whole = path.read_bytes()
    for size in (len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"a\.parquet(, after row \d+)?: cannot be read"):
            list(read_rows([str(path)]))
    # The foot is whole and a page in the middle is not.
    middle = len(whole) // 8
    path.write_bytes(whole[:middle] + b"\xff" * 64 + whole[middle + 64 :])
    with pytest.raises(DataError, match=r"a\.parquet(, after row \d+)?: cannot be read"):
        list(read_rows([str(path)]))


def test_a_parquet_file_without_rows_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([GOOD]).slice(0, 0), path)
    with pytest.raises(DataError, match="no rows in this file"):
        list(read_rows([str(path)]))
