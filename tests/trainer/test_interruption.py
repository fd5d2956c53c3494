"""A request to end is heard where nothing is lost, and only there."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import jax
import pytest
import quick_compiler
import recipe_settings
import runs

from jaxrl_llm.errors import Interrupted
from jaxrl_llm.sharding import multihost
from jaxrl_llm.trainer import rl
from jaxrl_llm.trainer.interruption import InterruptionHandler


def ask(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_while_a_step_samples_it_is_given_up(number, caplog):
    before, saved = signal.getsignal(number), []
    with pytest.raises(Interrupted) as ended, InterruptionHandler(60.0) as interruption:
        interruption.set_resume_point(6, lambda: saved.append(6))
        ask(number)
        raise AssertionError("not heard")
    assert saved == [6] and ended.value.exit_code == 75
    assert f"{number.name}: ended after step 6; start again" in caplog.text
    assert signal.getsignal(number) is before


def test_while_a_step_learns_it_is_completed_first():
    saved, reached = [], []
    with pytest.raises(Interrupted), InterruptionHandler(60.0) as interruption:
        interruption.set_resume_point(6, lambda: saved.append(6))
        interruption.commit_step()
        ask()
        reached.append("the end of the step")
        interruption.set_resume_point(7, lambda: saved.append(7))
    assert (saved, reached) == ([7], ["the end of the step"])


def test_the_state_is_saved_after_steps_that_outlast_the_grace_time():
    with InterruptionHandler(0.05) as interruption:

        def wants_save(held_s, saving=False):
            interruption.set_resume_point(1, lambda: None)
            interruption.commit_step()
            time.sleep(held_s)
            return interruption.step_exceeds_grace(saving)

        assert not wants_save(0.1)  # the first compiles
        assert not wants_save(0.0)
        assert wants_save(0.1)
        assert wants_save(0.0)  # the next may be as long again
        assert not wants_save(0.1, saving=True)


def test_several_processes_save_in_the_same_step(monkeypatch):
    """Another process was slow, or is still writing: this one hears of it."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    others = iter([0, [True, False], [True, False], [False, False], [False, True]])
    monkeypatch.setattr(multihost, "allgather", lambda mine: [mine, next(others)])
    interruption = InterruptionHandler(60.0)
    interruption.set_resume_point(1, lambda: None)
    asked = [interruption.step_exceeds_grace(saving=False) for _ in range(4)]
    assert asked == [False, True, True, False]  # the first compiles


def test_before_the_first_step_there_is_nothing_to_save():
    with pytest.raises(Interrupted), InterruptionHandler(60.0):
        ask()


def test_other_ends_save_nothing():
    with pytest.raises(ZeroDivisionError), InterruptionHandler(60.0) as interruption:
        interruption.set_resume_point(6, lambda: pytest.fail("saved"))
        1 / 0  # noqa: B018


def test_a_request_is_heard_between_steps_and_the_first_counts():
    saved = []
    with pytest.raises(Interrupted) as ended, InterruptionHandler(60.0) as interruption:
        interruption.set_resume_point(1, lambda: saved.append(1))
        interruption.commit_step()
        interruption.request_stop("an alert")
        ask()
        interruption.set_resume_point(2, lambda: saved.append(2))
    assert (saved, ended.value.exit_code, str(ended.value)) == ([2], 3, "an alert")


def test_several_processes_end_at_the_same_step(monkeypatch):
    """The signal reached another process; this one hears of it between two steps."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    others = iter([0, 75])
    monkeypatch.setattr(multihost, "allgather", lambda mine: [mine, next(others)])
    with pytest.raises(Interrupted) as ended, InterruptionHandler(60.0) as interruption:
        interruption.set_resume_point(1, lambda: None)
        interruption.commit_step()
        interruption.set_resume_point(2, lambda: None)
    assert ended.value.exit_code == 75


END = """
import os, signal, sys, time
from jaxrl_llm.trainer.interruption import InterruptionHandler

with InterruptionHandler(float(sys.argv[1])) as interruption:
    interruption.commit_step()
    os.kill(os.getpid(), signal.SIGINT)
    if sys.argv[2] == "twice":
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
"""


@pytest.mark.parametrize(
    "grace_s, how, said",
    [("0.2", "once", "the grace time of 0.2 s is over"), ("60", "twice", "a second SIGINT")],
)
def test_run_that_does_not_stop_is_killed(grace_s, how, said):
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(END), grace_s, how],
        env={"PYTHONPATH": str(runs.ROOT), "PATH": "", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 75, result.stderr
    assert said in result.stderr and "goes on from the last checkpoint" in result.stderr


@pytest.mark.slow
def test_a_signal_in_an_update_that_outlasts_the_grace_time_loses_no_completed_step(
    tmp_path, cache
):
    settings = {
        "warm_start.num_steps": 0,
        "trainer.num_steps": 5,
        "trainer.minibatch_size": 16,
        "evaluation.every": 0,
        "checkpoint.every": 0,
        "checkpoint.grace_s": 1.0,
    }
    arguments = [*runs.flags("grpo_tiny", settings), f"--workdir={tmp_path / 'run'}"]
    program = pathlib.Path(__file__).with_name("long_update.py")
    ended = subprocess.run(
        [sys.executable, program, *arguments],
        cwd=runs.ROOT,
        env={**os.environ, "PYTHONPATH": str(runs.ROOT), "XLA_FLAGS": quick_compiler.flags(1)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 75, ended.stderr[-4000:]
    assert "the grace time of 1 s is over" in ended.stderr
    assert max(runs.metrics_written(tmp_path / "run")) == 3
    resumed = runs.finish(runs.start("train", arguments, cache))
    assert resumed.returncode == 0 and "resumed after step 3" in resumed.stderr
    assert list(runs.metrics(tmp_path / "run")) == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_an_alert_stops_the_run_after_a_save(tmp_path, one_device):
    changes = {
        "warm_start": {"num_steps": 0},
        "trainer": {"num_steps": 5},
        "alerts": {"entropy": {"limit": 100.0, "steps": 2, "action": "stop"}},
    }
    with pytest.raises(Interrupted, match="alert entropy in step 2") as ended:
        rl.train(recipe_settings.config("grpo", changes), tmp_path / "run")
    assert ended.value.exit_code == 3
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]
    found = recipe_settings.metrics(tmp_path / "run")
    assert [found[step]["alerts/entropy"] for step in (1, 2)] == [0.0, 1.0]


@pytest.mark.slow
def test_an_alert_leaves_updates_out(tmp_path, one_device):
    changes = {
        "warm_start": {"num_steps": 0},
        "trainer": {"num_steps": 2},
        "alerts": {"entropy": {"limit": 100.0, "action": "skip"}},
    }
    state = rl.train(recipe_settings.config("grpo", changes), tmp_path / "run")
    assert state.policy.num_updates == 0
    assert "actor/loss" not in recipe_settings.metrics(tmp_path / "run")[2]
