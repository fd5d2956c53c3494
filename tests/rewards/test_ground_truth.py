"""Ground truths of every type: read as the task writes its answers, or refused with the rule."""

import decimal
import doctest
import math

import numpy as np
import pytest

from jaxrl_llm.rewards import functions, ground_truth
from jaxrl_llm.rewards.functions import resolve, truth_check, truth_problems

UNREADABLE = [None, math.nan, math.inf, "", "  ", "N/A", "nan", "None", "null", [72], {}, True]


def score(name, solution, truth):
    return resolve(name)("source", solution, truth, {})["score"]


@pytest.mark.parametrize("module", [ground_truth, functions], ids=lambda m: m.__name__)
def test_documented_examples(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    "truth",
    [
        72, 72.0, "72", " 72", "72 ", "72.0", "+72", "$72", "#### 72", "72.",
        np.int64(72), np.float32(72), decimal.Decimal("72.00"), "So 9 * 8 = 72.\n#### 72",
    ],
)  # fmt: skip
def test_gsm8k_reads_every_form_of_a_number(truth):
    assert score("gsm8k", "so #### 72", truth) == 1.0
    assert score("gsm8k", "so #### 73", truth) == 0.0


@pytest.mark.parametrize(
    "truth, solution",
    [
        ("1,234", "#### 1234"),
        (1234.0, "#### 1,234"),
        (-5, "#### -5"),
        ("\N{MINUS SIGN}5", "#### -5"),
        (0.5, "#### 0.5"),
        (0.00001, "#### 0.00001"),
        (1e21, "#### 1000000000000000000000"),
        ("72.0", "#### 72.0"),
    ],
)
def test_gsm8k_compares_digits(truth, solution):
    assert score("gsm8k", solution, truth) == 1.0


@pytest.mark.parametrize("name", ["gsm8k", "arithmetic", "math"])
@pytest.mark.parametrize("truth", UNREADABLE, ids=repr)
def test_invalid_ground_truth_is_refused_and_never_right(name, truth):
    assert truth_problems(resolve(name), ["7", truth, 8]).keys() == {1}
    for said in ("#### ", "#", "\\boxed{"):
        with pytest.raises(ValueError, match="ground_truth"):
            score(name, f"{said}{truth}{'}' * said.endswith('{')}", truth)


@pytest.mark.parametrize("truth", ["seventy", "1,23", "7 apples", "7%", "7 8", "1e5", "."])
def test_gsm8k_ground_truths_are_numbers(truth):
    assert "must be one number" in truth_problems(resolve("gsm8k"), [truth])[0]


@pytest.mark.parametrize(
    "truth, solution, expected",
    [
        (9, "#9", 1.0),
        (9.0, "#9", 1.0),
        (" 9\n", "#9", 1.0),
        (0.00001, "#0.00001", 1.0),
        ("nine", "# nine", 1.0),
        (9, "#09", 0.0),
    ],
)
def test_arithmetic_reads_numbers_as_its_task_writes_them(truth, solution, expected):
    assert score("arithmetic", solution, truth) == expected


@pytest.mark.parametrize(
    "truth, answer, expected",
    [
        (7, "7", 1.0),
        (7.0, "7", 1.0),
        (7, "7.0", 0.0),
        (-5, "5", 0.0),  # no sign is lost
        ("3.14", "314", 0.0),  # and no point
        ("1,234", "1234", 1.0),
        ([7, "seven"], "seven", 1.0),
        ({"target": [7]}, "7", 1.0),
        (np.array(["a b", "c"]), "C", 1.0),
        ("A", "A", 1.0),  # a choice, not an article
        ("A", "B", 0.0),
        ("None", "none", 1.0),  # a word here
    ],
    ids=repr,
)
def test_exact_match_reads_numbers_and_lists(truth, answer, expected):
    assert score("exact_match", f"<answer>{answer}</answer>", truth) == expected


@pytest.mark.parametrize(
    "truth", [None, math.nan, "", True, [], [None], {"goal": "x"}, {"target": None}, [["x"]]]
)
def test_exact_match_refuses_what_holds_no_answer(truth):
    assert truth_problems(resolve("exact_match"), [truth]).keys() == {0}


@pytest.mark.parametrize(
    "truth",
    [
        None,
        {"inputs": "12", "outputs": "34"},  # would be two tests of a character each
        {"inputs": [None], "outputs": ["1"]},
        {"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]},  # arguments, no stdin
        {"tests": [1]},
    ],
)
def test_code_refuses_what_is_no_test(truth):
    assert (
        "ground_truth needs 'inputs' and 'outputs'" in truth_problems(resolve("code"), [truth])[0]
    )


def test_a_list_of_statements_is_run():
    """Its text would be an expression, which every program passes."""
    truth = {"tests": ["assert f(1) == 1", "assert f(2) == 4"]}
    solution = "```python\ndef f(x): return {}\n```"
    assert score("code", solution.format("x * x"), truth) == 1.0
    assert score("code", solution.format("x"), truth) == 0.0


def test_functions_that_read_no_truth_have_no_check():
    assert truth_check(resolve("format")) is None and truth_check(resolve("length")) is None
    assert truth_problems(resolve("length"), [None]) == {}
