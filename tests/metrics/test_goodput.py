"""Goodput: where the time of a run went, over its restarts."""

import json
import shutil
import time

import pytest
import runs

from jaxrl_llm.metrics import goodput
from jaxrl_llm.trainer import rl


def log_of(folder, times, **fields):
    return goodput.GoodputLog(folder, now=iter(times).__next__, **fields)


def parts(folder):
    run = goodput.Breakdown(goodput.read_records(folder))
    return {name: round(seconds, 6) for name, seconds in run.parts.items() if seconds}


def test_parts_sum_to_the_time_of_all_processes(tmp_path):
    with log_of(
        tmp_path, [14.0, 14.5, 15.5, 17.0, 18.0, 18.0, 20.0], began=10.0, resumed_step=0
    ) as log:
        log.begin_step()
        with log.part("save"):
            pass
        log.add("evaluation", 0.25)
        assert log.goodput == pytest.approx((17.0 - 14.0 - 1.25) / 7.0)
        log.end_step(1)
        log.begin_step()
        log.end_step(2)
    assert parts(tmp_path) == {"start": 4.0, "steps": 4.75, "save": 1.0, "evaluation": 0.25}
    # A kill cut a line; the next process has lost step 2, had stages, and closes.
    path = tmp_path / goodput.FILE_NAME
    path.write_bytes(path.read_bytes() + b'{"step": 3, "beg')
    times = [33.0, 36.0, 37.0]
    with log_of(tmp_path, times, began=30.0, resumed_step=1, stages_s=2.0) as log:
        log.begin_step()
        log.end_step(2)
        log.end()
        line = log.summary()
    found = parts(tmp_path)
    assert found == {
        **{"start": 5.0, "steps": 2.75 + 3.0, "save": 2.0, "evaluation": 0.25},
        **{"down": 10.0, "stages": 2.0, "lost": 2.0},
    }
    assert sum(found.values()) == 37.0 - 10.0
    assert line.startswith("21% of the time in steps that counted; down 37%, start 19%, ")
    assert "compile" not in line


def test_a_clock_that_goes_back_gives_no_negative_time(tmp_path):
    with log_of(tmp_path, [5.0, 9.0, 7.0, 8.0], began=6.0, resumed_step=0) as log:
        log.begin_step()
        log.end_step(1)
        log.begin_step()
        log.end_step(2)
    assert parts(tmp_path) == {"steps": 3.0}


def test_a_process_that_does_not_write_measures_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with log_of(None, [1.0, 2.0, 2.0, 3.0], began=0.0, resumed_step=0) as log:
        log.begin_step()
        log.end_step(1)
        log.begin_step()
        assert log.goodput == 2 / 3
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_ends_no_run(tmp_path, monkeypatch, caplog):
    with log_of(tmp_path, [1.0, 2.0, 2.0, 3.0], began=0.0, resumed_step=0) as log:

        def fail(line):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(log, "_write", fail)
        log.begin_step()
        log.end_step(1)
        log.begin_step()
        assert log.goodput == 2 / 3
    assert len(goodput.read_records(tmp_path)) == 1


@pytest.mark.slow
def test_a_resumed_run_counts_what_it_lost(tmp_path, one_device):
    settings = {"warm_start.num_steps": 2, "trainer.num_steps": 2, "checkpoint.every": 1}
    settings |= {"evaluation.every": 0, "evaluation.before": False}
    begin = time.time()
    rl.train(runs.config("grpo_tiny", settings), tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/2")
    rl.train(runs.config("grpo_tiny", settings), tmp_path / "run")
    seconds = time.time() - begin
    found = parts(tmp_path / "run")
    assert sum(found.values()) == pytest.approx(seconds, rel=0.1)
    assert {"steps", "compile", "start", "stages", "lost", "save"} <= found.keys()
    assert found["compile"] > found["steps"]
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    shares = [line["data"]["perf/goodput"] for line in lines if "actor/loss" in line["data"]]
    assert len(shares) == 2 and all(0 <= value < 1 for value in shares)
    # A condition may name it.
    settings |= {"trainer.num_steps": 4, "trainer.stop_when": "perf/goodput>0"}
    rl.train(runs.config("grpo_tiny", settings), tmp_path / "run")
    assert [*runs.metrics(tmp_path / "run")][-1] == 3
