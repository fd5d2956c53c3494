"""The metrics file of a resumed run equals that of a run never interrupted."""

import json
import logging

import jax
import numpy as np
import pytest
from tensorboardX import proto

from jaxrl_llm.config import MetricsConfig
from jaxrl_llm.metrics.writer import Writer

QUIET = MetricsConfig(console=False, tensorboard=False)


def write_steps(writer, steps):
    for step in steps:
        writer.write(step, {"critic/score/mean": 0.5 * step}, {"b": step})


def test_a_line_a_call_that_is_there_at_once(tmp_path):
    writer = Writer(tmp_path, QUIET)
    writer.write(1, {"a": np.float32(0.5), "b": jax.numpy.ones(())}, {"a": 2})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "data": {"a": 2.0, "b": 1.0}}\n'


def test_numbers_that_are_not_finite_are_null(tmp_path):
    writer = Writer(tmp_path, QUIET)
    writer.write(1, {"nan": float("nan"), "inf": np.float32(-np.inf), "one": 1.0})

    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert record["data"] == {"nan": None, "inf": None, "one": 1.0}


@pytest.mark.parametrize(
    "crash",
    [
        lambda path: None,
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b'{"step": 8, "da'),
    ],
    ids=["clean", "cut", "newline_missing", "begun"],
)
def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path, crash):
    """Steps 4 to 7 were written after the checkpoint of step 3, and are taken again."""
    with Writer(tmp_path / "whole", QUIET) as writer:
        write_steps(writer, range(1, 10))
    with Writer(tmp_path / "resumed", QUIET) as writer:
        write_steps(writer, range(1, 8))
    crash(tmp_path / "resumed" / "metrics.jsonl")
    with Writer(tmp_path / "resumed", QUIET, first_step=4) as writer:
        write_steps(writer, range(4, 10))
    whole, resumed = (tmp_path / name / "metrics.jsonl" for name in ("whole", "resumed"))
    assert resumed.read_bytes() == whole.read_bytes()
    assert [path.name for path in resumed.parent.iterdir()] == ["metrics.jsonl"]


def test_a_cut_last_line_of_a_kept_step_is_dropped_with_a_warning(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "data": {}}\n{"step": 2, "da')
    with caplog.at_level(logging.WARNING):
        Writer(tmp_path, QUIET, first_step=9).write(9, {})
    assert path.read_text() == '{"step": 1, "data": {}}\n{"step": 9, "data": {}}\n'
    assert "metrics.jsonl:2: not a metrics record" in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"step": "1", "data": {}}',
        b'{"step": NaN, "data": {}}',
        b'{"step": 1, "data": {"\xff": 1}}',
        b"7",
        b"\0" * 20,
        b"",
    ],
)
def test_a_line_that_no_run_wrote_is_dropped_with_a_warning(tmp_path, caplog, line):
    path = tmp_path / "metrics.jsonl"
    first = b'{"step": 1, "data": {"a\\u2028": 1}}\n'
    path.write_bytes(first + line + b"\n" + first)
    Writer(tmp_path, QUIET, first_step=9).write(9, {})
    assert path.read_bytes() == first * 2 + b'{"step": 9, "data": {}}\n'
    assert "metrics.jsonl:2: not a metrics record" in caplog.text


def test_due_on_multiples(tmp_path):
    writer = Writer(tmp_path, MetricsConfig(every=3, console=False, tensorboard=False))
    assert [step for step in range(1, 8) if writer.is_due(step)] == [3, 6]


def test_only_process_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with Writer(tmp_path, MetricsConfig()) as writer:
        write_steps(writer, [1])
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_gets_the_finite_numbers(tmp_path):
    with Writer(tmp_path, MetricsConfig(console=False)) as writer:
        writer.write(7, {"a/b": 0.25, "bad": float("nan")})
    (file,) = (tmp_path / "tensorboard").iterdir()
    scalars, data = {}, file.read_bytes()
    while data:  # a record: length, its checksum, an event, its checksum
        length = int.from_bytes(data[:8], "little")
        event = proto.event_pb2.Event.FromString(data[12 : 12 + length])
        scalars |= {v.tag: (event.step, v.simple_value) for v in event.summary.value}
        data = data[16 + length :]
    assert scalars == {"a/b": (7, 0.25)}
