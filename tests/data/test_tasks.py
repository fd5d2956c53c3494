"""Rows of the built-in tasks, scored by the reward functions that belong to them."""

import json
import os
import pathlib
import re

import pytest

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tasks import GSM8K_INSTRUCTION, task_rows, worked_sum
from jaxrl_llm.rewards.functions import resolve

GSM8K = pathlib.Path(os.environ.get("JAXRL_GSM8K", "JAXRL_GSM8K is not set"))

NATURAL = {
    "question": "Ann has 1,000 nuts and buys 2 more. How many?",
    "answer": "She has 1000+2=<<1000+2=1002>>1002.\n#### 1,002",
}


def score(name, row, solution):
    found = resolve(name)(
        row["data_source"], solution, row["reward_model"]["ground_truth"], row["extra_info"]
    )
    return found["score"]


def questions(config, split, seed=0):
    return [row["prompt"][0]["content"] for row in task_rows(config, split, seed)]


def gsm8k_config(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(task="gsm8k", train_files=(str(path),))


def test_worked_sum_by_hand():
    assert worked_sum([3, 4, 2]) == "3+4=7,7+2=9#9"
    assert worked_sum([3, 4]) == "3+4=7#7"
    assert worked_sum([3, 4, 2], wrong_step=0, error=1) == "3+4=8,8+2=10#10"
    assert worked_sum([3, 4, 2], wrong_step=1, error=-2) == "3+4=7,7+2=7#7"


@pytest.mark.parametrize("terms", [3, 4, 16])
def test_arithmetic_splits_are_distinct_and_disjoint(terms):
    config = DataConfig(arithmetic_terms=terms)
    train, held_out = questions(config, "train"), questions(config, "eval")
    assert (len(train), len(held_out)) == (512, 128)
    assert len({*train, *held_out}) == 640
    assert all(question.count("+") == terms - 1 for question in train)


def test_arithmetic_uses_the_last_sum_when_the_space_is_just_enough():
    config = DataConfig(arithmetic_terms=2, arithmetic_train_prompts=90, arithmetic_eval_prompts=10)
    assert len({*questions(config, "train"), *questions(config, "eval")}) == 100


def test_arithmetic_depends_on_the_seed_only():
    config = DataConfig()
    assert questions(config, "train", 1) == questions(config, "train", 1)
    assert questions(config, "train", 1) != questions(config, "train", 2)


def test_arithmetic_rows_are_right_and_their_answers_score():
    for row in task_rows(DataConfig(), "train", 0):
        question = row["prompt"][0]["content"]
        truth = row["reward_model"]["ground_truth"]
        assert eval(question.rstrip("=")) == int(truth)
        for step in row["extra_info"]["answer"].partition("#")[0].split(","):
            left, _, right = step.partition("=")
            assert eval(left) == int(right)
        assert score("arithmetic", row, row["extra_info"]["answer"]) == 1.0
        assert score("arithmetic", row, f"#{int(truth) + 1}") == 0.0
    assert row["data_source"] == "arithmetic" and row["reward_model"]["style"] == "rule"
    assert row["extra_info"]["split"] == "train" and row["extra_info"]["index"] == 511


def test_too_few_sums_are_an_error_with_numbers():
    config = DataConfig(arithmetic_terms=2, arithmetic_train_prompts=90)
    message = "90 and arithmetic_eval_prompts=128 are 218 .* arithmetic_terms=2 .* only 100 sums"
    ((field, _),) = config.problems()
    assert field == "arithmetic_train_prompts"
    with pytest.raises(DataError, match=message):
        task_rows(config, "train", 0)
    assert not list(DataConfig().problems())


def test_gsm8k_row_has_prompt_and_answer(tmp_path):
    (row,) = task_rows(gsm8k_config(tmp_path, NATURAL), "train", 0)
    assert row["data_source"] == "openai/gsm8k"
    assert row["prompt"] == [
        {"role": "user", "content": f"{NATURAL['question']} {GSM8K_INSTRUCTION}"}
    ]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1002"}
    assert row["extra_info"] == {"split": "train", "index": 0, **NATURAL}
    assert score("gsm8k", row, NATURAL["answer"]) == 1.0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"answer": "She has 1002."}, r"row 2: answer must end in '#### number'"),
        ({"answer": None}, r"row 2: answer must be a text, got None"),
        ({"question": " "}, r"row 2: question must be a text, got ' '"),
        ({"question": ["a"]}, r"row 2: question must be a text"),
    ],
)
def test_gsm8k_rows_that_are_none(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        task_rows(gsm8k_config(tmp_path, NATURAL, {**NATURAL, **change}), "train", 0)


def test_a_split_without_files_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"config\.data\.eval_files: task='gsm8k'"):
        task_rows(gsm8k_config(tmp_path, NATURAL), "eval", 0)


def test_several_files_are_one_dataset(tmp_path):
    paths = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({"data_source": name, "text": f"prompt {name}"}))
        paths.append(str(path))
    config = DataConfig(task="files", train_files=tuple(paths), prompt_column="text")
    assert [row["data_source"] for row in task_rows(config, "train", 0)] == ["a", "b"]


@pytest.mark.skipif(not GSM8K.is_dir(), reason="needs JAXRL_GSM8K, the folder of GSM8K")
@pytest.mark.parametrize("split, count", [("train", 7473), ("eval", 1319)])
def test_every_answer_of_gsm8k_scores(split, count):
    files = {"train": "train.jsonl", "eval": "test.jsonl"}
    config = DataConfig(
        task="gsm8k",
        train_files=(str(GSM8K / files["train"]),),
        eval_files=(str(GSM8K / files["eval"]),),
    )
    rows = task_rows(config, split, 0)
    assert len(rows) == count
    assert sum(score("gsm8k", row, row["extra_info"]["answer"]) for row in rows) == count


def test_stories_are_right_disjoint_and_come_after_examples():
    config = DataConfig(task="stories", arithmetic_train_prompts=300, arithmetic_eval_prompts=50)
    train, held_out = (task_rows(config, split, 1) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (300, 50)
    assert len({row["extra_info"]["question"] for row in (*train, *held_out)}) == 350
    assert train == task_rows(config, "train", 1) != task_rows(config, "train", 2)
    for row in train:
        asked = [m["content"] for m in row["prompt"] if m["role"] == "user"]
        answers = [m["content"] for m in row["prompt"] if m["role"] == "assistant"]
        assert asked[-1] == row["extra_info"]["question"] and len(asked) == 3
        assert answers == ["6 + 9 = 15 #15", "14 - 5 = 9 #9"]
        worked, truth = row["extra_info"]["answer"], row["reward_model"]["ground_truth"]
        assert eval(worked.partition("=")[0]) == int(truth) >= 0
        assert score("arithmetic", row, worked) == 1.0
        numbers = re.findall(r"\d+", asked[-1])
        assert numbers == worked.split()[:3:2]
