"""The metrics file of a resumed run equals that of a run never interrupted."""

import io
import json
import logging
import sys
import time
import types

import jax
import numpy as np
import pytest
from tensorboardX import proto

from jaxrl_llm.config import ConfigError, MetricsConfig
from jaxrl_llm.metrics import console
from jaxrl_llm.metrics.writer import Writer, check

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


def test_due_on_multiples(tmp_path):
    writer = Writer(tmp_path, MetricsConfig(every=3, console=False, tensorboard=False))
    assert [step for step in range(1, 8) if writer.due(step)] == [3, 6]


def test_only_process_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with Writer(tmp_path, MetricsConfig()) as writer:
        write_steps(writer, [1])
    assert list(tmp_path.iterdir()) == []


STEP = {
    "critic/score/mean": 0.53125, "response_length/mean": 93.25, "actor/ppo_kl": -1e-9,
    "actor/entropy": 1.2034, "timing_s/step": 4.0, "perf/total_num_tokens": 20_000.0,
    "something/else": 7.0,
}  # fmt: skip


def test_console_without_a_terminal_is_a_line_a_step(tmp_path, capsys):
    writer = Writer(tmp_path, MetricsConfig(tensorboard=False), total_steps=800)
    writer.write(799, STEP)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        "step 799/800  reward 0.5312  length 93.25  kl 0  entropy 1.2  4 s  5000 tokens/s"
        "  4.0 s left"
    )
    writer.write(800, {"c": 1.0}, {"val-core/sums/mean@2": 0.5, "val-core/b/c/mean@2": 1})
    shown = capsys.readouterr().out
    assert shown == "step 800/800  evaluation: sums mean@2 0.5; b/c mean@2 1\n"
    writer.close()


def test_console_on_a_terminal_shows_a_bar(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    with Writer(tmp_path, MetricsConfig(tensorboard=False), total_steps=8) as writer:
        writer.write(2, STEP)
        wait_until(lambda: "reward 0.5312" in terminal.getvalue())
        writer.write(2, {"val-core/sums/mean@2": 0.5})
    shown = terminal.getvalue()
    assert "━" in shown and "step 2/8" in shown and "24.0 s left" in shown
    assert "step 2/8  evaluation: sums mean@2 0.5\n" in shown
    assert shown.endswith("24.0 s left\n")  # the bar is gone, the last step stays


def wait_until(condition):
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_end_compares_the_evaluations_and_names_the_files(tmp_path, capsys):
    with Writer(tmp_path, QUIET) as writer:
        for step, value in ((0, 0.25), (1, None), (2, 0.5), (3, 0.75)):
            found = {"val-core/sums/mean@2": value, "val-core/sums/pass@2": np.nan}
            writer.write(step, STEP, {} if value is None else found)
    console.closing(tmp_path, 75.0, [("numbers", tmp_path / "metrics.jsonl")])
    time_line, heads, rule, mean, passed, numbers = capsys.readouterr().out.splitlines()
    assert time_line == "done in 1 min 15 s" and heads.split() == ["step", "0", "step", "3"]
    assert mean.split() == ["sums/mean@2", "0.25", "0.75"]
    assert passed.split() == ["sums/pass@2", "nan", "nan"] and rule.startswith("──")
    assert numbers.split() == ["numbers", str(tmp_path / "metrics.jsonl")]


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


def test_wandb_is_named_when_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = MetricsConfig(console=False, tensorboard=False, wandb_project="mine")
    with pytest.raises(ConfigError, match=r"wandb_project: 'mine' needs .*jaxrl_llm\[wandb\]"):
        check(config)


def test_wandb_continues_its_run(tmp_path, monkeypatch):
    runs, logged = [], []

    def init(**arguments):
        runs.append(arguments)
        return types.SimpleNamespace(
            log=lambda data, step: logged.append((step, data)), finish=lambda: logged.append("end")
        )

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    config = MetricsConfig(console=False, tensorboard=False, wandb_project="mine")
    for step in (1, 2):
        with Writer(tmp_path, config, first_step=step) as writer:
            writer.write(step, {"a": 1})
    assert logged == [(1, {"a": 1.0}), "end", (2, {"a": 1.0}), "end"]
    assert runs[0] == runs[1] and runs[0]["project"] == "mine" and len(runs[0]["id"]) == 32
