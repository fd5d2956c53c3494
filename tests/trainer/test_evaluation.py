"""mean@k, pass@k and maj@k by hand."""

import itertools

import numpy as np
import pytest

from jaxrl_llm.trainer.evaluation import answer_metrics


def test_evaluation_with_one_sample():
    found = answer_metrics(np.array([[1.0], [0.0], [1.0], [1.0]]), [("a",), ("b",), ("c",), ("d",)])
    assert found == {"mean@1": 0.75, "pass@1": 0.75}


def test_four_samples_by_hand():
    scores = np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    answers = [("7", "8", "9", "7"), ("1", "1", "2", "3")]
    assert answer_metrics(scores, answers) == {
        "mean@4": 0.25,  # 2 of 8
        "pass@1": 0.25,  # (2/4 + 0) / 2
        "pass@2": pytest.approx(5 / 12),  # (1 - C(2,2)/C(4,2) + 0) / 2 = (5/6) / 2
        "pass@4": 0.5,  # one prompt of two was answered by some sample
        "maj@4": 0.5,  # "7" twice and right; "1" twice and wrong
    }


def test_pass_at_j_is_the_mean_over_all_subsets():
    """What makes it unbiased: every choice of j of the k samples counts the same."""
    scores = np.array([[0, 1, 0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0, 1]], float)
    found = answer_metrics(scores, [tuple("abcdefgh")] * 2)
    for j in (1, 2, 4, 8):
        subsets = [list(rows) for rows in itertools.combinations(range(8), j)]
        expected = np.mean([scores[:, rows].max(1) for rows in subsets])
        assert found[f"pass@{j}"] == pytest.approx(expected)


def test_a_k_that_is_no_power_of_two():
    found = answer_metrics(np.array([[1.0, 0.0, 0.0]]), [("a", "b", "c")])
    assert set(found) == {"mean@3", "pass@1", "pass@2", "pass@3", "maj@3"}
    assert found["pass@2"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "answers, scores, expected",
    [
        (("x", "y", "y", "x"), [1, 0, 0, 1], 1.0),  # a tie: "x" was sampled first
        (("y", "x", "x", "y"), [0, 1, 1, 0], 0.0),  # the same tie the other way round
        (("x", "y", "z", "w"), [0, 1, 1, 1], 0.0),  # all differ: the first
        (("x", "y", "y", "z"), [1, 0, 0, 1], 0.0),  # the majority is wrong
    ],
)
def test_majority_and_its_ties(answers, scores, expected):
    assert answer_metrics(np.array([scores], float), [answers])["maj@4"] == expected


def test_partial_credit_counts_in_the_mean_and_does_not_pass():
    found = answer_metrics(np.array([[0.5, 0.9]]), [("a", "b")])
    assert (found["mean@2"], found["pass@2"], found["maj@2"]) == (0.7, 0.0, 0.5)
