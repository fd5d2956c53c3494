"""Rows in S3 and in Google Cloud Storage, by servers on this machine."""

import gzip
import io
import json

import bucket_servers
import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from jaxrl_llm.data import streaming
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.files import read_rows
from jaxrl_llm.storage import files


@pytest.fixture(params=["s3", "gs"])
def bucket(request, monkeypatch):
    with bucket_servers.running_server(request.param) as endpoint:
        for name, value in bucket_servers.client_environment(request.param, endpoint).items():
            monkeypatch.setenv(name, value)
        system = fsspec.get_filesystem_class(request.param)
        system.clear_instance_cache()
        yield files.file_system(f"{request.param}://"), f"{request.param}://{bucket_servers.BUCKET}"
        system.clear_instance_cache()


@pytest.mark.slow
def test_rows_of_a_bucket_are_read_and_streamed(bucket):
    system, address = bucket
    rows = [{"number": i} for i in range(30)]
    sink = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows[:20]), sink, row_group_size=7)
    lines = "".join(json.dumps(row) + "\n" for row in rows[20:]).encode()
    system.pipe_file(f"{address}/rows/a.parquet", sink.getvalue())
    system.pipe_file(f"{address}/rows/b/c.jsonl.gz", gzip.compress(lines))
    for entry, wanted in (
        ("rows", rows),
        ("rows/*.parquet[90%:]", rows[18:20]),
        ("rows/**[10:-3]", rows[10:27]),
        ("rows/b/c.jsonl.gz", rows[20:]),
    ):
        assert [row for _, row in read_rows([f"{address}/{entry}"])] == wanted
        streamed = streaming.StreamedRows([f"{address}/{entry}"], lambda row, *_: (row,), 9, "")
        source = streaming.EpochSource(streamed, 0, False)
        assert [source[i][1][0] for i in range(len(streamed))] == wanted
    with pytest.raises(DataError, match="no files with rows at this address"):
        list(read_rows([f"{address}/none"]))
