"""A program in a response earns what its tests say, whatever else it tries."""

import json

import pytest

from jaxrl_llm.rewards.code import code

SQUARE = "Let us see.\n```python\nprint(int(input()) ** 2)\n```"
TESTS = {"inputs": ["2\n", "3\n", "4\n"], "outputs": ["4", "9\n", "16 \n"]}


@pytest.mark.parametrize("truth", [TESTS, json.dumps(TESTS)], ids=["mapping", "json"])
def test_every_test_must_pass(truth):
    found = code("s", SQUARE, truth, {})
    assert (found["score"], found["passed"], found["failure"]) == (1.0, 1.0, "")
    assert "network off by" in found["sandbox"]


def test_first_failing_test_is_reported():
    found = code("s", "```\nn = int(input())\nprint(4 if n == 2 else 1 // 0)\n```", TESTS, {})
    assert found["score"] == 0.0 and found["passed"] == pytest.approx(1 / 3)
    assert found["failure"].startswith("ZeroDivisionError")
    assert code("s", "```py\nprint(5)\n```", TESTS, {})["failure"] == "another output"
    for silent, why in (
        ("import os; os._exit(3)", "exit code 3"),
        ("import ctypes; ctypes.string_at(0)", "signal SIGSEGV"),
    ):
        assert code("s", f"```py\n{silent}\n```", TESTS, {})["failure"] == why
    assert code("s", "no program", TESTS, {})["failure"] == "no block of code"
    slow = code("s", "```python\nwhile True: pass\n```", TESTS, {"timeout_s": 0.5})
    assert slow["score"] == 0.0 and "more than" in slow["failure"]


def test_statements_after_the_program():
    truth = {"tests": "assert double(4) == 8"}
    assert code("s", "```python\ndef double(x): return 2 * x\n```", truth, {})["score"] == 1.0
    wrong = code("s", "```python\ndef double(x): return x\n```", truth, {})
    assert (wrong["score"], wrong["failure"]) == (0.0, "AssertionError")


@pytest.mark.parametrize("truth", ["", "[1]", {}, {"inputs": ["1"], "outputs": []}, None, 5])
def test_a_row_without_tests_is_an_error(truth):
    with pytest.raises(ValueError, match="ground_truth needs 'inputs' and 'outputs'"):
        code("s", SQUARE, truth, {})
