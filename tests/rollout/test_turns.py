"""What turns cost beside new tokens, as `benchmarks/agents.py` counts it."""

import importlib.util
import pathlib

import pytest


@pytest.mark.slow
def test_later_turns_prefill_new_tokens_without_compiling():
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "agents.py"
    spec = importlib.util.spec_from_file_location("agents_benchmark", path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    sizes = "--episodes=8 --turns=4 --turn_tokens=40 --calls=2 --tool_s=0.1 --hidden=32 --layers=1"
    found = benchmark.main(benchmark.arguments([*sizes.split(), "--repeats=1"]))
    # The last token of a turn is read with what follows it.
    assert 1.0 <= found["prefilled"]["ratio"] <= 1.1
    assert found["tools"]["compiled"] == 0 and found["tools"]["all_s"] > 3 * 0.1
