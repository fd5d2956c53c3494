"""Long work is spoken of, short work is not; a run shows its steps and its result."""

import io
import logging
import sys
import time

import jax
import numpy as np

from jaxrl_llm import console
from jaxrl_llm.config import MetricsConfig
from jaxrl_llm.console import format_duration
from jaxrl_llm.metrics.writer import Writer

QUIET = MetricsConfig(console=False, tensorboard=False)


def wait_until(condition):
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_work_is_spoken_of_when_it_is_long(caplog):
    with caplog.at_level(logging.INFO):
        with console.show_progress("being quick"):
            pass
        with console.show_progress("reading rows", 8) as advance:
            advance(2)
            wait_until(lambda: "reading rows" in caplog.text)
        assert list(console.track("counting", "abc")) == ["a", "b", "c"]
    mine = [record for record in caplog.records if record.name == console.__name__]
    began, ended = [record.getMessage() for record in mine]
    assert began.startswith("reading rows: 25 %, ")
    assert ended.startswith("reading rows: done in ")


def test_only_process_0_prints(caplog, monkeypatch):
    monkeypatch.setattr(console.DISPLAY, "silent", True)
    with caplog.at_level(logging.INFO), console.show_progress("reading rows"):
        time.sleep(2.5)
    assert not [record for record in caplog.records if record.name == console.__name__]


def on_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    return terminal


def test_bars_on_a_terminal(monkeypatch):
    terminal = on_terminal(monkeypatch)
    log = console.LogHandler()
    with console.show_progress("reading rows", 8) as advance:
        advance(2)
        wait_until(lambda: "25 %" in terminal.getvalue())
        with console.show_progress("tokenizing"):  # two at a time
            wait_until(lambda: "tokenizing" in terminal.getvalue())
        log.emit(logging.makeLogRecord({"msg": "careful", "levelno": 30, "levelname": "WARNING"}))
    assert " warning: careful\n" in terminal.getvalue()
    assert console.DISPLAY._bars is None and sys.stderr is terminal


def test_compiled_programs_are_named(monkeypatch, tmp_path):
    begun = []
    monkeypatch.setattr(console.DISPLAY, "begin", lambda work: begun.append(work.description))
    console.show_compilations()

    def _take_update(x):
        return x * 3 + 1

    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", before or str(tmp_path))
    try:
        jax.jit(_take_update)(jax.numpy.ones(7))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert "compiling take update" in begun


def test_times_as_people_say_them():
    assert [format_duration(s) for s in (0.04, 59.94, 60, 3599.4, 3600, 90_061)] == [
        "0.0 s", "59.9 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "25 h 01 min"
    ]  # fmt: skip


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
    writer.write(801, {"dpo/loss": 0.5}, {"val/dpo/loss": 0.25, "val/rewards/margins": 1.0})
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("step 801/800  loss 0.5")
    assert shown[1] == "step 801/800  evaluation: dpo loss 0.25; rewards margins 1"
    writer.close()


def test_console_on_a_terminal_shows_a_bar(tmp_path, monkeypatch):
    terminal = on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "160")
    with Writer(tmp_path, MetricsConfig(tensorboard=False), total_steps=8) as writer:
        writer.write(2, STEP)
        wait_until(lambda: "reward 0.5312" in terminal.getvalue())
        writer.write(2, {"val-core/sums/mean@2": 0.5})
    shown = terminal.getvalue()
    assert "━" in shown and "step 2/8" in shown and "24.0 s left" in shown
    assert "step 2/8  evaluation: sums mean@2 0.5\n" in shown
    assert shown.endswith("24.0 s left\n")  # the bar is gone, the last step stays


def test_the_end_compares_the_evaluations_and_names_the_files(tmp_path, capsys):
    with Writer(tmp_path, QUIET) as writer:
        for step, value in ((0, 0.25), (1, None), (2, 0.5), (3, 0.75)):
            found = {"val-core/sums/mean@2": value, "val-core/sums/pass@2": np.nan}
            writer.write(step, STEP, {} if value is None else found)
    console.print_summary(
        (tmp_path / "metrics.jsonl").read_bytes(), 75.0, [("numbers", tmp_path / "metrics.jsonl")]
    )
    time_line, heads, rule, mean, passed, numbers = capsys.readouterr().out.splitlines()
    assert time_line == "done in 1 min 15 s" and heads.split() == ["step", "0", "step", "3"]
    assert mean.split() == ["sums/mean@2", "0.25", "0.75"]
    assert passed.split() == ["sums/pass@2", "nan", "nan"] and rule.startswith("──")
    assert numbers.split() == ["numbers", str(tmp_path / "metrics.jsonl")]
