"""Long work is spoken of, short work is not."""

import io
import logging
import sys
import time

import jax

from jaxrl_llm.console import screen
from jaxrl_llm.console.screen import duration


def wait_until(condition):
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_work_is_spoken_of_when_it_is_long(caplog):
    with caplog.at_level(logging.INFO):
        with screen.work("being quick"):
            pass
        with screen.work("reading rows", 8) as advance:
            advance(2)
            wait_until(lambda: "reading rows" in caplog.text)
        assert list(screen.each("counting", "abc")) == ["a", "b", "c"]
    began, ended = [record.getMessage() for record in caplog.records]
    assert began.startswith("reading rows: 25 %, ")
    assert ended.startswith("reading rows: done in ")


def test_nothing_is_said_by_the_other_processes(caplog, monkeypatch):
    monkeypatch.setattr(screen.SCREEN, "silent", True)
    with caplog.at_level(logging.INFO), screen.work("reading rows"):
        time.sleep(2.5)
    assert not caplog.records


def test_bars_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    log = screen.LogHandler()
    with screen.work("reading rows", 8) as advance:
        advance(2)
        wait_until(lambda: "25 %" in terminal.getvalue())
        with screen.work("tokenizing"):  # two at a time
            wait_until(lambda: "tokenizing" in terminal.getvalue())
        log.emit(logging.makeLogRecord({"msg": "careful", "levelno": 30, "levelname": "WARNING"}))
    assert " warning: careful\n" in terminal.getvalue()
    assert screen.SCREEN._bars is None and sys.stderr is terminal


def test_what_is_compiled_has_its_name(monkeypatch, tmp_path):
    begun = []
    monkeypatch.setattr(screen.SCREEN, "begin", lambda work: begun.append(work.what))
    screen.show_compilations()

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
    assert [duration(s) for s in (0.04, 59.94, 60, 3599.4, 3600, 90_061)] == [
        "0.0 s", "59.9 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "25 h 01 min"
    ]  # fmt: skip
