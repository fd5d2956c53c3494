"""Slices of rows: by hand, and for any sizes and bounds."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.config import DataConfig
from jaxrl_llm.config.datasets.slices import RowSlice, overlap_problem, slice_problem, split_slice

PERCENTS = st.integers(0, 10_000).map(lambda n: f"{n // 100}.{n % 100:02}%")
ROWS = st.integers(0, 50).map(str)
BOUNDS = st.one_of(PERCENTS, ROWS, ROWS.map("-{}".format), PERCENTS.map("-{}".format), st.just(""))


@pytest.mark.parametrize(
    ("text", "num_rows", "wanted"),
    [
        ("[:90%]", 15, range(0, 13)),  # 13.5, rounded down
        ("[90%:]", 15, range(13, 15)),
        ("[-10%:]", 15, range(13, 15)),  # as 90%
        ("[33.3%:66.6%]", 1000, range(333, 666)),
        ("[100:200]", 150, range(100, 150)),
        ("[-2:]", 15, range(13, 15)),
        ("[-20:]", 15, range(0, 15)),
        ("[:-2]", 15, range(0, 13)),
        ("[5:-12]", 15, range(5, 5)),
        ("[:]", 3, range(0, 3)),
        ("[200:]", 150, range(150, 150)),
    ],
)
def test_slices_by_hand(text, num_rows, wanted):
    address, rows = split_slice(f"a/train.parquet{text}")
    assert address == "a/train.parquet" and rows.rows(num_rows) == wanted


@pytest.mark.parametrize(
    "address", ["a.jsonl", "a/*.jsonl", "a/[ab].jsonl", "data[1]", "hf://datasets/a/b@v1/c#d"]
)
def test_other_addresses_have_no_slice(address):
    assert split_slice(address) == (address, None) and not slice_problem(address)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("a[:1.5]", "1.5 is no number of rows"),
        ("a[:101%]", "101% is outside [-100%, 100%]"),
        ("a[-101%:]", "-101% is outside"),
        ("a[50%:50%]", "[50%:50%] holds no rows"),
        ("a[9:3]", "[9:3] holds no rows"),
        ("a[:0]", "[:0] holds no rows"),
        ("a[100%:]", "[100%:] holds no rows"),
        ("a[-3:-9]", "[-3:-9] holds no rows"),
        ("a[90%]", "[90%] is no slice of rows; write [:90%]"),
        ("a[1:2:3]", "[1:2:3] is no slice of rows"),
        ("a[a:b]", "[a:b] is no slice of rows"),
    ],
)
def test_bad_slices_are_named(address, message):
    assert message in slice_problem(address)
    for field in ("train_files", "eval_files"):
        files = {"train_files": ("b",), field: (address,)}
        ((where, text),) = DataConfig(task="files", **files).problems()
        assert where == f"{field}[0]" and message in text


@given(num_rows=st.integers(0, 10**7), bound=st.one_of(PERCENTS, ROWS, ROWS.map("-{}".format)))
def test_a_bound_cuts_the_rows_in_two(num_rows, bound):
    first, second = RowSlice("", bound).rows(num_rows), RowSlice(bound, "").rows(num_rows)
    assert (first.start, first.stop, second.stop) == (0, second.start, num_rows)
    if bound.endswith("%"):  # the rule of docs/data.md
        assert first.stop == num_rows * Fraction(bound[:-1]) // 100


@given(num_rows=st.integers(0, 200), bounds=st.tuples(BOUNDS, BOUNDS, BOUNDS, BOUNDS))
def test_slices_without_a_problem_never_overlap(num_rows, bounds):
    train, held_out = RowSlice(*bounds[:2]), RowSlice(*bounds[2:])
    texts = [f"a[{rows.start}:{rows.stop}]" for rows in (train, held_out)]
    if any(map(slice_problem, texts)):
        return
    problem = overlap_problem(texts[1], texts[0])
    config = DataConfig(task="files", train_files=("b", texts[0]), eval_files=(texts[1],))
    assert list(config.problems()) == [
        ("eval_files[0]", f"{texts[1]} {each}") for each in [problem] if each
    ]
    if not problem:
        assert not {*train.rows(num_rows)} & {*held_out.rows(num_rows)}
    elif "may" not in problem:  # with enough rows they do overlap
        assert {*train.rows(20_000)} & {*held_out.rows(20_000)}


def test_slices_of_other_files_may_overlap():
    assert overlap_problem("a[:90%]", "b[:90%]") == overlap_problem("a", "a[:90%]") == ""
    assert "write all bounds in rows, or all in percent" in overlap_problem("a[9:]", "a[:90%]")
