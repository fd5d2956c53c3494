"""Phases add up, also when one of them fails; what runs meanwhile is counted where it belongs."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.config import ProfilerConfig
from jaxrl_llm.metrics import clock as clock_lib
from jaxrl_llm.metrics.clock import Clock, Profiler


def test_phases_add_up_and_survive_an_error():
    ticks = iter([0.0, 1.0, 2.0, 5.0, 9.0, 10.0])
    clock = Clock(now=lambda: next(ticks))
    with clock("gen"):
        pass
    with pytest.raises(RuntimeError), clock("gen"):
        raise RuntimeError
    # 1 to 2 and 5 to 9
    assert clock.seconds() == {"timing_s/gen": 5.0, "timing_s/step": 10.0}


class Result:
    """An array of a slow device."""

    def __init__(self, *devices):
        self.ready = threading.Event()
        self.devices = devices

    def block_until_ready(self):
        self.ready.wait(10.0)


def test_a_watched_phase_ends_when_its_result_is_ready():
    clock, first, second = Clock(), Result(), Result()
    begin = time.perf_counter()
    with clock("predict") as watch:
        assert watch(first) is first
    with clock("update") as watch:
        watch({"loss": second})
    assert time.perf_counter() - begin < 0.1  # nobody waited
    time.sleep(0.2)
    first.ready.set()
    time.sleep(0.4)
    second.ready.set()
    found = clock.seconds()
    assert found["timing_s/predict"] == pytest.approx(0.2, abs=0.1)
    # Handed over at once, but the device was busy with the phase before.
    assert found["timing_s/update"] == pytest.approx(0.4, abs=0.1)


def test_phases_on_different_devices_overlap(monkeypatch):
    monkeypatch.setattr(clock_lib, "_devices", lambda watched: frozenset(watched[0].devices))
    clock, policy, critic, both = Clock(), Result("a"), Result("b"), Result("a", "b")
    for phase, result in (("ref", policy), ("values", critic), ("update", both)):
        with clock(phase) as watch:
            watch(result)
    time.sleep(0.2)
    critic.ready.set()
    time.sleep(0.2)
    policy.ready.set()
    time.sleep(0.2)
    both.ready.set()
    found = clock.seconds()
    wanted = {"ref": 0.4, "values": 0.2, "update": 0.2, "step": 0.6}
    assert found == {f"timing_s/{k}": pytest.approx(v, abs=0.1) for k, v in wanted.items()}


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
    assert (tmp_path / "profile/memory_0.prof").stat().st_size
    with Profiler(ProfilerConfig(), tmp_path / "none") as profiler:
        profiler.begin(1)
    assert not (tmp_path / "none").exists()


def test_a_window_that_outlives_the_run_is_written(tmp_path):
    with Profiler(ProfilerConfig(first_step=1, num_steps=99), tmp_path / "profile") as profiler:
        profiler.begin(1)
    assert any((tmp_path / "profile").rglob("*.xplane.pb"))
