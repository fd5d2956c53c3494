"""The simulation of goodput: known results without failures and with rare ones; more tiers help."""

import importlib.util
import pathlib
import sys

import pytest

PATH = pathlib.Path(__file__).parents[1] / "benchmarks" / "goodput_simulation.py"


@pytest.fixture(scope="module")
def simulation():
    spec = importlib.util.spec_from_file_location("goodput_simulation", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_without_failures_only_saves_cost(simulation, monkeypatch):
    parts = simulation.Parts()
    monkeypatch.setattr(simulation, "failures", lambda *_: iter(()))
    for tiers in simulation.TIERS:
        every, copy_every = simulation.intervals(4096, tiers, parts)
        lost = parts.save / every + (parts.copy / copy_every if copy_every else 0.0)
        expected = parts.step / (parts.step + lost)
        found = simulation.goodput(4096, tiers, 30, parts, 0, False)
        assert found == pytest.approx(expected, rel=1e-3)


def test_one_failure_costs_its_parts(simulation, monkeypatch):
    parts = simulation.Parts(save=0.0, copy=0.0)
    monkeypatch.setattr(simulation, "intervals", lambda *_: (100, 1))
    for loses_host, loses_partner, tiers, lost_steps, read in (
        (False, False, 1, 50, parts.read),
        (False, False, 2, 0, parts.read_memory),
        (True, False, 2, 50, parts.read),
        (True, False, 3, 0, parts.read_partner),
        (True, True, 3, 50, parts.read),
    ):
        # Half a step after step 150; the last durable save is of step 100.
        failure = simulation.Failure(150.5 * parts.step, loses_host, loses_partner)
        monkeypatch.setattr(simulation, "failures", lambda *_, f=failure: iter((f,)))
        days = 500 * parts.step / 86_400
        down = parts.notice + parts.restart + read + (lost_steps + 0.5) * parts.step
        expected = 1 - down / (500 * parts.step)
        found = simulation.goodput(8, tiers, days, parts, 0, False)
        assert found == pytest.approx(expected, abs=0.004), tiers


def test_failures_have_the_published_rate(simulation):
    for bursts in (False, True):
        traces = [
            list(simulation.failures(16_384, 54 * 86_400, simulation.Parts(), seed, bursts))
            for seed in range(20)
        ]
        assert sum(map(len, traces)) / 20 == pytest.approx(419, rel=0.05)
        hosts = sum(failure.loses_host for trace in traces for failure in trace)
        assert hosts / sum(map(len, traces)) == pytest.approx(simulation.HOST_LOST, abs=0.02)


def test_each_tier_helps_large_runs(simulation):
    parts = simulation.Parts()
    found = [simulation.goodput(16_384, tiers, 20, parts, 1, False) for tiers in simulation.TIERS]
    assert found == sorted(found) and found[-1] > 0.97
