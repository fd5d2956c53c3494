"""Files by folder, glob and slice, compressed ones, and CSV."""

import gzip
import json

import pyarrow
import pytest
from pyarrow import parquet

from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.files import READERS, read_rows
from jaxrl_llm.data.rows.row_files import SUFFIXES, listed_files

ROWS = [{"text": f"row {i}", "number": i} for i in range(10)]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def zstd(content):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def numbers(entry):
    return [row["number"] for _, row in read_rows([str(entry)])]


def write(path, rows):
    """Writes rows in the format of a path."""
    contents = {".jsonl": lines(rows), ".json": json.dumps(rows).encode()}
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
    elif path.suffix in (".gz", ".zst"):
        content = contents[path.with_suffix("").suffix]
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else zstd(content))
    else:
        path.write_bytes(contents[path.suffix])
    return path


def test_every_suffix_has_a_reader():
    assert tuple(READERS) == SUFFIXES


@pytest.mark.parametrize(
    "name",
    ["a.parquet", "a.jsonl", "a.json", "a.jsonl.gz", "a.JSONL.zst", "a.json.gz", "a.json.zst"],
)
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", range(10)),
        ("[:90%]", range(9)),
        ("[90%:]", range(9, 10)),
        ("[2:7]", range(2, 7)),
        ("[3:6]", range(3, 6)),  # a row group
        ("[-4:]", range(6, 10)),
        ("[25%:75%]", range(2, 7)),
    ],
)
def test_slices_of_every_format(name, text, wanted, tmp_path):
    path = write(tmp_path / name.lower(), ROWS)
    read = list(read_rows([f"{path}{text}"]))
    assert [row for _, row in read] == [ROWS[i] for i in wanted]
    assert [where for where, _ in read] == [f"{path}, row {i + 1}" for i in wanted]


def test_a_slice_is_of_all_files_of_its_entry(tmp_path):
    for i, name in enumerate(("a.jsonl", "b.parquet", "c.jsonl.gz")):
        write(tmp_path / name, [{"number": 10 * i + j} for j in range(4)])
    (tmp_path / "d.txt").write_text("passed over")
    for entry in (tmp_path, tmp_path / "*", tmp_path.parent / "**" / tmp_path.name / "*.*"):
        assert numbers(entry) == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]
        assert numbers(f"{entry}[25%:75%]") == [3, 10, 11, 12, 13, 20]
        assert numbers(f"{entry}[4:8]") == [10, 11, 12, 13]
    assert numbers(f"{tmp_path}/[ac].*[-5:]") == [3, 20, 21, 22, 23]


def test_blank_lines_count_in_a_slice(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" + lines(ROWS[:3]) + b"\n\n" + lines(ROWS[3:4]))
    assert numbers(f"{path}[:2]") == [0]
    assert [where for where, _ in read_rows([f"{path}[-3:]"])] == [f"{path}, row 7"]
    with pytest.raises(DataError, match=r"a.jsonl\[4:6\]: all lines of this slice are blank"):
        numbers(f"{path}[4:6]")


def test_rows_outside_a_slice_are_not_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(ROWS[:2]) + b"{broken\n" + lines(ROWS[3:]))
    assert numbers(f"{path}[:2]") == [0, 1] and numbers(f"{path}[3:]") == [*range(3, 10)]
    with pytest.raises(DataError, match=r"a\.jsonl, row 3: broken JSON"):
        numbers(f"{path}[1:]")


def test_globs_go_through_folders(tmp_path):
    for name in ("b/x.jsonl", "a/y.jsonl", "a/c/z.jsonl", "w[1].jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, ROWS)

    def names(text):
        return [path[len(f"{tmp_path}/") :] for path in listed_files(f"{tmp_path}/{text}")]

    assert names("*/*.jsonl") == ["a/y.jsonl", "b/x.jsonl"]
    assert names("**/?.jsonl") == ["a/c/z.jsonl", "a/y.jsonl", "b/x.jsonl"]
    assert names("a") == names("a/**") == ["a/c/z.jsonl", "a/y.jsonl"]
    assert names("w[1].jsonl") == ["w[1].jsonl"]  # it exists


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("b.jsonl", "b.jsonl: no such file; did you mean '{folder}/a.jsonl'?"),
        ("zzzzzzzz.parquet", "zzzzzzzz.parquet: no such file; give a path from"),
        ("none/a.jsonl", "none/a.jsonl: no such file; give a path from"),
        ("*.parquet", "*.parquet: no files with rows match this pattern; known: .csv, .json"),
        ("a.jsonl[90%:95%]", "a.jsonl[90%:95%]: no row of 10 is in this slice; choose another"),
        ("a.jsonl[10:]", "a.jsonl[10:]: no row of 10 is in this slice"),
        ("a.parquet.gz", "a.parquet.gz: unsupported suffix '.parquet.gz'; known: .csv, .json"),
        ("a.gz", "a.gz: unsupported suffix '.gz'"),
        ("cut.jsonl.gz", "cut.jsonl.gz: cannot be read: Truncated compressed stream; is the file"),
        ("cut.jsonl.zst", "cut.jsonl.zst: cannot be read: Truncated compressed stream; is the"),
        ("plain.json.gz", "plain.json.gz: cannot be read: zlib inflate failed: incorrect header"),
        ("empty.jsonl.zst", "empty.jsonl.zst: no rows in this file"),
    ],
)
def test_faults_are_named(entry, message, tmp_path):
    write(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "a.parquet.gz").touch()
    (tmp_path / "a.gz").touch()
    (tmp_path / "empty.jsonl.zst").touch()
    (tmp_path / "plain.json.gz").write_bytes(lines(ROWS))
    content = lines(ROWS * 1000)
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(content)[:-20])
    (tmp_path / "cut.jsonl.zst").write_bytes(zstd(content)[:-20])
    with pytest.raises(DataError) as error:
        numbers(tmp_path / entry)
    assert message.format(folder=tmp_path) in str(error.value)


def test_csv_values_are_texts(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfquestion,answer\r\n"1,5 + ""1""\nis",2.50\r\n\r\n"",7\r\n')
    wanted = [{"question": '1,5 + "1"\nis', "answer": "2.50"}, {"question": "", "answer": "7"}]
    assert list(read_rows([str(path)])) == [
        (f"{path}, row {i}", row) for i, row in enumerate(wanted, start=1)
    ]
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert [row for _, row in read_rows([f"{path}.gz[1:]"])] == wanted[1:]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b\n1,2\n1,2,3\n", "a.csv, row 2: 3 fields for 2 columns; quote a field that holds a"),
        (b"a,b\n1\n", "a.csv, row 1: 1 fields for 2 columns"),
        (b"a,b,a\n1,2,3\n", "a.csv: 2 columns are named 'a'; rename or drop them"),
        (b'a,b\n1,2\n1,"2\n', "a.csv, after row 1: unexpected end of data; save the file as UTF-8"),
        (b"a,b\n1,\xff\n", "a.csv, after row 0: 'utf-8' codec can't decode byte 0xff"),
        (b"a,b\n", "a.csv: no rows in this file"),
        (b"", "a.csv: no rows in this file"),
    ],
)
def test_faults_of_csv_are_named(content, message, tmp_path):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError) as error:
        list(read_rows([str(tmp_path / "a.csv")]))
    assert message in str(error.value)
