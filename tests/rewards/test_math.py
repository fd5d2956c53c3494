"""The forms of answers that docs/answers.md lists, each with the verdict that stands there."""

import doctest
import pathlib
import re
import time

import pytest

from jaxrl_llm.rewards import answers
from jaxrl_llm.rewards.answers import final_answer, parse_answer
from jaxrl_llm.rewards.math import math_answer

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "answers.md"
_CELL = re.compile(r"(?<!\\)\|")
_OPTIONS = {"True": True, "False": False}


def cases():
    """Truth, response, score and options of each row of the page's tables of forms."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in _CELL.split(line)[1:-1]]
        if len(cells) != 4 or cells[2] not in ("right", "wrong"):
            continue
        truth, response, option = (
            cell.strip("`").replace("\\|", "|").replace("⏎", "\n").replace("(empty)", "")
            for cell in (cells[0], cells[1], cells[3])
        )
        name, _, value = option.partition("=")
        options = {name: _OPTIONS.get(value, value)} if option else {}
        yield pytest.param(truth, response, float(cells[2] == "right"), options, id=line[:90])


CASES = list(cases())


def test_the_page_has_its_cases():
    assert len(CASES) >= 280


@pytest.mark.parametrize("truth, response, expected, options", CASES)
def test_a_form_has_its_verdict(truth, response, expected, options):
    assert math_answer("source", response, truth, options)["score"] == expected


def test_documented_examples():
    assert doctest.testmod(answers).failed == 0


@pytest.mark.parametrize(
    "truth, solution", [(0.00001, r"\boxed{0.00001}"), (12, "12"), (12.0, "12"), ("$12$", "12")]
)
def test_numbers_of_files_are_read(truth, solution):
    assert math_answer("source", solution, truth, {})["score"] == 1.0


@pytest.mark.parametrize("truth", [None, float("nan"), "N/A", [1, 2], True, "", "nan", "None"])
def test_a_missing_truth_is_never_right(truth):
    with pytest.raises(ValueError, match="ground_truth must be"):
        math_answer("source", rf"\boxed{{{truth}}}", truth, {})


@pytest.mark.parametrize(
    "solution",
    [
        r"\boxed{" * 5000,
        r"\boxed{" * 5000 + "2" + "}" * 5000,
        r"\boxed{2} " * 20_000,
        "".join(rf"\boxed{{{i}}} " for i in range(5000)),
        "<answer>" * 20_000 + "2",
        "the answer is " * 10_000,
        "$" * 60_000,
        r"\(" * 30_000,
        "1," * 30_000,
        "{" * 30_000 + r"\boxed{3}",
        r"\boxed{" + r"\text{" * 300 + "2" + "}" * 301,
        "answer" + " " * 60_000,
    ],
    ids=lambda text: text[:12],
)
def test_a_hostile_response_takes_no_time(solution):
    """A call that takes too long, or nests too deep, would be a failed call."""
    began = time.perf_counter()
    parse_answer(final_answer(solution).text)
    assert time.perf_counter() - began < 2.0
