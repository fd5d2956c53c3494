"""Every row's ground truth is read before a run: one report, or rows that are left out."""

import dataclasses
import logging

import pytest

from jaxrl_llm.config.rollout_data import RewardFunctionConfig, RewardsConfig
from jaxrl_llm.data.datasets import Dataset
from jaxrl_llm.data.mixtures import MixtureSchedule
from jaxrl_llm.data.streams import MixedRows
from jaxrl_llm.rewards import truth_checks
from jaxrl_llm.rewards.reward_pool import RewardError
from jaxrl_llm.types import Prompt


def dataset(*truths, source="a"):
    return Dataset(
        tuple(
            Prompt((1,), "?", source, truth, {}, i, where=f"f.jsonl, row {i + 1}")
            for i, truth in enumerate(truths)
        )
    )


def config(function="gsm8k", **settings):
    term = RewardFunctionConfig(function=function, data_source=settings.pop("source", "*"))
    return RewardsConfig(functions={"answer": term}, num_workers=1, **settings)


def truths(split):
    return [prompt.ground_truth for prompt in split.prompts]


def test_one_report_names_file_and_row_of_all_splits():
    splits = {
        "train": (dataset("72", None, 7, [1]), config()),
        "eval": (dataset("x"), config("math")),
    }
    splits["eval"] = (dataset("N/A"), config("math"))
    with pytest.raises(RewardError) as error:
        truth_checks.without_unreadable_truths(splits)
    lines = str(error.value).splitlines()
    assert lines[0] == "3 of 5 rows have a ground truth that no answer can equal:"
    assert lines[1].startswith("  f.jsonl, row 2: 'gsm8k' (answer): got None; ground_truth must")
    assert lines[2].startswith("  f.jsonl, row 4: 'gsm8k' (answer): got list [1];")
    assert lines[3].startswith("  f.jsonl, row 1: 'math' (answer): got 'N/A', which stands for no")
    assert lines[4].endswith("rewards.unreadable_truths='leave_out' to go on without them")


def test_a_long_report_is_cut():
    with pytest.raises(RewardError, match=r"25 of 25 rows(.*\n){11}  ... and 15 more\n"):
        truth_checks.without_unreadable_truths({"train": (dataset(*[None] * 25), config())})


def test_rows_may_be_left_out_and_are_counted(caplog):
    given = dataset("72", None, 7), config(unreadable_truths="leave_out")
    with caplog.at_level(logging.WARNING):
        found = truth_checks.without_unreadable_truths({"train": given})["train"]
    assert truths(found) == ["72", 7] and [p.index for p in found.prompts] == [0, 2]
    assert "train split: left out 1 of 3 rows" in caplog.text and "f.jsonl, row 2" in caplog.text
    with pytest.raises(RewardError, match="leaves none of the 1 rows of the train split"):
        truth_checks.without_unreadable_truths({"train": (dataset(None), given[1])})


def test_mixtures_lose_the_same_rows():
    whole = dataset("72", None, 7)
    parts = tuple(whole.prompts[:2]), tuple(whole.prompts[2:])
    mixed = dataclasses.replace(
        whole, rows=MixedRows(parts, MixtureSchedule((1.0, 1.0), (1.0, 1.0), 0))
    )
    settings = config(unreadable_truths="leave_out")
    found = truth_checks.without_unreadable_truths({"train": (mixed, settings)})["train"].rows
    assert [[prompt.ground_truth for prompt in part] for part in found.parts] == [["72"], [7]]


def test_only_rows_that_a_function_scores_are_asked():
    given = dataset(None, source="b"), config(source="a")
    assert truths(truth_checks.without_unreadable_truths({"train": given})["train"]) == [None]
    given = dataset(None), config("length")
    assert truths(truth_checks.without_unreadable_truths({"train": given})["train"]) == [None]


USER_FILE = """
def even(ground_truth):
    if ground_truth == "exit":
        raise SystemExit(3)
    if ground_truth % 2:
        raise ValueError(f"{ground_truth} is odd; write an even number")

def mine(data_source, solution_str, ground_truth, extra_info):
    return 1.0

def unchecked(data_source, solution_str, ground_truth, extra_info):
    return 1.0

mine.check_truth = even
"""


def test_a_function_of_the_user_has_its_own_check(tmp_path):
    """It runs in a process of its own; one that dies is the fault of its row."""
    (tmp_path / "own.py").write_text(USER_FILE)
    given = dataset(2, 3, "exit", "x", 4), config(f"{tmp_path / 'own.py'}:mine")
    with pytest.raises(RewardError) as error:
        truth_checks.without_unreadable_truths({"train": given})
    said = str(error.value)
    assert said.startswith("3 of 5 rows")
    assert "f.jsonl, row 2: " in said and "3 is odd; write an even number" in said
    assert "f.jsonl, row 3: " in said and "its check_truth failed: SystemExit: 3" in said
    assert "f.jsonl, row 4: " in said and "TypeError" in said
    given = given[0], config(f"{tmp_path / 'own.py'}:unchecked")
    assert len(truth_checks.without_unreadable_truths({"train": given})["train"]) == 5
