"""The simulation of decoding: one clock for two caches, by the engine's scheduler."""

import importlib.util
import pathlib

import pytest


@pytest.fixture(scope="module")
def simulation():
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "simulate.py"
    spec = importlib.util.spec_from_file_location("simulation", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_pages_decode_more_with_the_same_memory(simulation):
    args = simulation.arguments(["--prompts=16", "--samples=8"])
    found = simulation.simulate(args)
    longest, pages = found["longest"], found["pages"]
    # The same memory, but for whole sequences and pages.
    assert longest.cache_tokens <= pages.cache_tokens < longest.cache_tokens + 8704
    assert pages.read_over_live < 1.4 < 2.0 < longest.read_over_live
    assert pages.tokens_per_s > 1.5 * longest.tokens_per_s
    for each in found.values():
        assert each.tokens_per_s * each.seconds == pytest.approx(simulation.lengths_of(args).sum())


@pytest.mark.slow
def test_too_many_slots_put_samples_back(simulation):
    """More slots than the pages hold: all samples end, some are read again."""
    sizes = ["--prompts=8", "--samples=8", "--slots=64", "--longest=4096", "--sigma=0.1"]
    args = simulation.arguments([*sizes, "--median=4000", "--cache_tokens=40000"])
    pages = simulation.simulate(args)["pages"]
    assert pages.put_back > 0 and pages.reread_tokens > 0
    assert pages.cache_tokens <= 40000 + 128 and pages.mean_active < 40
