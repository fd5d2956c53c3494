"""A line that no run wrote, in metrics or dumps, is left out and counted; the others are shown."""

import json

import made_runs
import pytest
from rich.console import Console
from starlette.testclient import TestClient

from jaxrl_llm.viewer import curve_plot, terminal
from jaxrl_llm.viewer.app import make_app
from jaxrl_llm.viewer.runs import NotARunError, RecordedRun

DEEP = b"[" * 100_000 + b"]" * 100_000
BAD_RECORDS = {
    "text for a number": b'{"step": 3, "data": {"critic/score/mean": "high"}}',
    "number in a text": b'{"step": 3, "data": {"critic/score/mean": "0.5"}}',
    "list for a number": b'{"step": 3, "data": {"critic/score/mean": [1]}}',
    "no UTF-8": b'{"step": 3, "data": {"critic/score/\xff": 1}}',
    "half a pair in bytes": b'{"step": 3, "data": {"\xed\xa0\x80": 1}}',
    "brackets": DEEP,
    "deep data": b'{"step": 3, "data": {"a": ' + DEEP + b"}}",
    "step as text": b'{"step": "3", "data": {}}',
    "step NaN": b'{"step": NaN, "data": {}}',
    "step infinite": b'{"step": Infinity, "data": {}}',
    "step too large": b'{"step": 1' + b"0" * 40 + b', "data": {}}',
    "step missing": b'{"data": {"a": 1}}',
    "value too large": b'{"step": 3, "data": {"a": 1' + b"0" * 400 + b"}}",
    "digits": b'{"step": 3, "data": {"a": ' + b"9" * 5000 + b"}}",
    "number": b"7",
    "list": b"[1]",
    "data is a list": b'{"step": 3, "data": [1]}',
    "zeros": b"\0" * 50,
    "empty": b"",
    "cut": b'{"step": 3, "da',
}
BAD_SAMPLES = {
    "text for a number": b'{"score": "high", "output": "a"}',
    "truth for a number": b'{"num_tokens": "7", "output": "a"}',
    "no UTF-8": b'{"score": 1, "output": "\xff"}',
    "brackets": DEEP,
    "deep": b'{"score": 1, "details": ' + DEEP + b"}",
    "list": b"[1]",
    "number": b"7",
    "null": b"null",
    "zeros": b"\0" * 50,
    "tokens": b'{"score": 1, "tokens": "abc"}',
    "advantages": b'{"score": 1, "advantages": ["a"]}',
    "pieces": b'{"score": 1, "pieces": [1]}',
    "missing lists": b'{"score": 1, "pieces": ["a"]}',
    "messages": b'{"score": 1, "messages": [7]}',
    "cut": b'{"score": 1, "outp',
}
NOT_FINITE = b'{"step": 41, "data": {"perf/planned_memory_gb": NaN, "a": 1e999, "b\\ud800": 1}}'


@pytest.fixture
def folder(tmp_path):
    return made_runs.make(tmp_path / "run", 40, 6, dumps=[20])


def client_of(*folders):
    return TestClient(make_app([RecordedRun(each) for each in folders], ["t"]), base_url="http://t")


def curves(run):
    return {name: run.curve(name) for name in run.columns}


def with_line(path, line, at=3):
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:at], line, *lines[at:]]))


@pytest.mark.parametrize("kind", BAD_RECORDS)
def test_a_bad_record_is_left_out_and_counted(folder, kind):
    whole = RecordedRun(folder)
    with_line(folder / "metrics.jsonl", BAD_RECORDS[kind])
    run = RecordedRun(folder)
    assert (run.bad_lines, run.last_step) == (1, 40) and curves(run) == curves(whole)
    about = client_of(folder).get("/api/runs").json()
    assert about["runs"][0]["bad_lines"] == 1 and about["runs"][0]["last_step"] == 40


def test_all_bad_records_together_end_nothing(folder, tmp_path):
    path = folder / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(b"\n".join([*BAD_RECORDS.values(), NOT_FINITE, b'{"step": 42, "da']))
    client = client_of(folder)
    for _ in range(2):  # read once, not again with each refresh
        about = client.get("/api/runs").json()
        assert about["runs"][0]["bad_lines"] == len(BAD_RECORDS)
    # What is not finite is a gap, and the memory is the newest that was measured.
    assert about["runs"][0]["memory"]["perf/planned_memory_gb"] == 2.0
    assert {"a", "b\N{REPLACEMENT CHARACTER}"} <= set(about["metrics"])
    assert client.get("/api/curves", params={"name": "a"}).json() == {"a": [[[41], [None]]]}
    console = Console(record=True, width=110, file=open("/dev/null", "w"))  # noqa: SIM115
    terminal.print_runs([RecordedRun(folder)], console)
    assert f"run: {len(BAD_RECORDS)} lines of metrics.jsonl are no records" in console.export_text()
    curve_plot.save_curves([RecordedRun(folder)], str(tmp_path / "curves.png"))


@pytest.mark.parametrize("kind", BAD_SAMPLES)
def test_a_bad_sample_is_left_out_and_counted(folder, kind):
    with_line(folder / "rollouts" / "20.jsonl", BAD_SAMPLES[kind])
    client = client_of(folder)
    for query in ("step=20", "", "order=score", "min_score=0", "text=a", "stopped=yes"):
        reply = client.get(f"/api/runs/0/samples?{query}")
        assert reply.status_code == 200 and reply.json()["bad_lines"] == 1
    rows = client.get("/api/runs/0/samples?step=20").json()["samples"]
    assert [row["row"] for row in rows] == [0, 1, 2, 4, 5, 6]  # numbers of lines
    assert client.get("/api/runs/0/samples/20/3").status_code == 404
    assert client.get("/api/runs/0/samples/20/4").json()["output"]
    console = Console(record=True, width=110, file=open("/dev/null", "w"))  # noqa: SIM115
    terminal.print_runs([RecordedRun(folder)], console)
    assert "score 1.0" in console.export_text()


def test_numbers_and_characters_that_json_has_not_are_shown_as_gaps(folder):
    path = folder / "rollouts" / "20.jsonl"
    line = {"score": float("nan"), "output": "a\ud83d", "gts": float("inf"), "terms": {"t": 1}}
    with_line(path, json.dumps(line).encode(), at=0)
    client = client_of(folder)
    (first, *_) = client.get("/api/runs/0/samples?step=20").json()["samples"]
    assert (first["score"], first["output"]) == (None, "a\N{REPLACEMENT CHARACTER}")
    whole = client.get("/api/runs/0/samples/20/0").json()
    assert whole["gts"] is None and whole["terms"] == {"t": 1}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/runs/0/samples?step=inf", 200),
        ("/api/runs/0/samples?first=1e400", 200),
        ("/api/runs/0/samples?step=1e308", 200),
        ("/api/runs/0/samples?step=-7", 200),
        ("/api/runs/0/samples?step=x", 400),
        ("/api/runs/0/samples/" + "9" * 5000 + "/0", 404),
        ("/api/runs/0/samples/20/" + "9" * 5000, 404),
        ("/api/runs/" + "9" * 5000 + "/samples", 404),
        ("/api/runs/-1/samples", 404),
        ("/api/runs/x/samples", 404),
    ],
)
def test_addresses_that_no_page_asks_for(folder, path, status):
    assert client_of(folder).get(path).status_code == status


def test_folders_in_the_place_of_files(folder, tmp_path):
    (folder / "rollouts" / "30.jsonl").mkdir()
    (folder / "rollouts" / "\u0663.jsonl").write_text("{}\n")  # digits, but not a step's
    client = client_of(folder)
    assert client.get("/api/runs").json()["runs"][0]["dumps"] == [20, 30]
    assert client.get("/api/runs/0/samples?step=30").json()["total"] == 0
    # The list goes on with what it has read when the file cannot be read any more.
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    assert client.get("/api/runs").json()["runs"][0]["last_step"] == 40
    with pytest.raises(NotARunError, match=r"metrics\.jsonl: Is a directory"):
        RecordedRun(folder)


def test_a_curve_of_the_largest_numbers_is_drawn():
    assert terminal.sparkline([-1.7e308, 0.0, 1.7e308, 1.7e308], width=2) == "▁█"
