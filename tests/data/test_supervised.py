"""Worked examples and preference pairs say what the reward function says."""

import json

import pytest

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.datasets import load_dataset
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.supervised import preference_pairs, worked_examples
from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.rewards.functions import arithmetic

CONFIG = DataConfig(arithmetic_terms=4, arithmetic_train_prompts=200, arithmetic_eval_prompts=20)


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


def test_worked_examples_are_the_prompts_with_their_answers(tokenizer):
    dataset = load_dataset(CONFIG, tokenizer, "train", 7)
    examples = worked_examples(CONFIG, tokenizer, "train", 7)
    assert [prompt for prompt, _ in examples] == [prompt.tokens for prompt in dataset.prompts]
    for (_, response), prompt in zip(examples, dataset.prompts, strict=True):
        assert response[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(response[:-1]) == prompt.extra_info["answer"]
    held_out = {prompt.tokens for prompt in load_dataset(CONFIG, tokenizer, "eval", 7).prompts}
    assert not held_out & {prompt for prompt, _ in examples}


def test_worked_examples_of_gsm8k(tokenizer, tmp_path):
    path = tmp_path / "train.jsonl"
    rows = [
        {"question": "1+1?", "answer": "It is 2.\n#### 2"},
        {"question": "1+1?" * 50, "answer": "Too long.\n#### 2"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(task="gsm8k", train_files=(str(path),), max_prompt_tokens=100)
    ((prompt, response),) = worked_examples(config, tokenizer, "train", 0)  # one is too long
    assert tokenizer.decode(response) == "It is 2.\n#### 2<eos>"
    assert tokenizer.decode(prompt).startswith("<bos><user>1+1? Let's think")


def test_both_rejected_answers_are_wrong_each_in_its_way(tokenizer):
    dataset = load_dataset(CONFIG, tokenizer, "train", 0)
    pairs = preference_pairs(CONFIG, tokenizer, "train", 0)
    assert len(pairs) == 400
    wrong_steps, misread_places = set(), set()
    for i, (prompt, chosen, rejected) in enumerate(pairs):
        row = dataset.prompts[i % 200]
        good, bad = tokenizer.decode(chosen[:-1]), tokenizer.decode(rejected[:-1])
        assert prompt == row.tokens and chosen[-1] == rejected[-1] == tokenizer.eos_token_id
        assert arithmetic("", good, row.ground_truth, {})["score"] == 1.0
        assert arithmetic("", bad, row.ground_truth, {})["score"] == 0.0
        assert int(bad.partition("#")[2]) >= 0
        steps = [text.partition("=") for text in bad.partition("#")[0].split(",")]
        wrong = [step for step, (sum_, _, got) in enumerate(steps) if eval(sum_) != int(got)]
        asked = row.extra_info["question"].rstrip("=").split("+")
        (first, _, second), *others = [sum_.partition("+") for sum_, _, _ in steps]
        read = [first, second, *(other[2] for other in others)]
        misread = [place for place, (x, y) in enumerate(zip(asked, read, strict=True)) if x != y]
        # One mistake, carried on.
        assert (len(wrong), len(misread)) == ((1, 0) if i < 200 else (0, 1))
        wrong_steps.update(wrong)
        misread_places.update(misread)
    assert wrong_steps == {0, 1, 2} and misread_places == {0, 1, 2, 3}


def test_preference_pairs_depend_on_the_seed_alone(tokenizer):
    first, again, other = (preference_pairs(CONFIG, tokenizer, "train", s) for s in (0, 0, 1))
    assert first == again != other


def test_tasks_without_answers_are_refused(tokenizer):
    files = DataConfig(task="files", train_files=("a.jsonl",))
    with pytest.raises(DataError, match="'files' has no worked answers"):
        worked_examples(files, tokenizer, "train", 0)
    with pytest.raises(DataError, match="'files' has no preference pairs"):
        preference_pairs(files, tokenizer, "train", 0)
