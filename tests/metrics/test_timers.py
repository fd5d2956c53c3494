"""Phases add up, also when one of them fails; what runs meanwhile is counted where it belongs."""

import threading

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.config import ProfilerConfig
from jaxrl_llm.metrics import timers
from jaxrl_llm.metrics.timers import Clock, Profiler


def test_phases_add_up_and_survive_an_error():
    ticks = iter([0.0, 1.0, 2.0, 5.0, 9.0, 10.0])
    clock = Clock(now=lambda: next(ticks))
    with clock("gen"):
        pass
    with pytest.raises(RuntimeError), clock("gen"):
        raise RuntimeError
    # 1 to 2 and 5 to 9
    assert clock.seconds() == {"timing_s/gen": 5.0, "timing_s/step": 10.0}


class Hand:
    """A clock that moves when the test moves it."""

    def __init__(self):
        self.time, self.read = 0.0, threading.Event()

    def __call__(self):
        time = self.time
        self.read.set()
        return time


class Result:
    """An array of a slow device."""

    def __init__(self, *devices):
        self.ready = threading.Event()
        self.devices = devices

    def block_until_ready(self):
        assert self.ready.wait(100.0)

    def finish(self, hand, time):
        """Is ready at that time; returns when the clock has seen it."""
        hand.time = time
        hand.read.clear()
        self.ready.set()
        assert hand.read.wait(100.0)


def test_a_watched_phase_ends_when_its_result_is_ready():
    hand, first, second = Hand(), Result(), Result()
    clock = Clock(hand)
    with clock("predict") as watch:
        assert watch(first) is first
    with clock("update") as watch:  # nobody waited: the first is ready below
        watch({"loss": second})
    first.finish(hand, 2.0)
    second.finish(hand, 6.0)
    # Handed over at once, but the device was busy with the phase before.
    assert clock.seconds() == {
        "timing_s/predict": 2.0,
        "timing_s/update": 4.0,
        "timing_s/step": 6.0,
    }


def test_phases_on_different_devices_overlap(monkeypatch):
    monkeypatch.setattr(timers, "_devices", lambda watched: frozenset(watched[0].devices))
    hand, policy, critic, both = Hand(), Result("a"), Result("b"), Result("a", "b")
    clock = Clock(hand)
    for phase, result in (("ref", policy), ("values", critic), ("update", both)):
        with clock(phase) as watch:
            watch(result)
    critic.finish(hand, 2.0)
    policy.finish(hand, 4.0)
    both.finish(hand, 6.0)
    wanted = {"ref": 4.0, "values": 2.0, "update": 2.0, "step": 6.0}
    assert clock.seconds() == {f"timing_s/{phase}": seconds for phase, seconds in wanted.items()}


def test_a_failed_result_is_reported():
    class Failed:
        def block_until_ready(self):
            raise ValueError("the device is gone")

    clock = Clock()
    with clock("update") as watch:
        watch(Failed())
    with pytest.raises(ValueError, match="the device is gone"):
        clock.seconds()


def test_the_window_is_recorded(tmp_path):
    with Profiler(ProfilerConfig(first_step=2, num_steps=2), tmp_path / "profile") as profiler:
        for step in (1, 2, 3, 4):
            profiler.begin(step)
            assert any((tmp_path / "profile").rglob("*.xplane.pb")) == (step == 4)
            jax.block_until_ready(jnp.ones(3) + step)
    assert (tmp_path / "profile/process_0/memory.prof").stat().st_size
    with Profiler(ProfilerConfig(), tmp_path / "none") as profiler:
        profiler.begin(1)
    assert not (tmp_path / "none").exists()


def test_processes_of_a_host_write_no_common_file(tmp_path, monkeypatch):
    for process in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        with Profiler(ProfilerConfig(first_step=1, num_steps=9), tmp_path) as profiler:
            profiler.begin(1)
    folders = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*.xplane.pb")}
    assert folders == {"process_0", "process_1"}


def test_a_window_that_outlives_the_run_is_written(tmp_path):
    with Profiler(ProfilerConfig(first_step=1, num_steps=99), tmp_path / "profile") as profiler:
        profiler.begin(1)
    assert any((tmp_path / "profile").rglob("*.xplane.pb"))
