"""The length filter, streams that resume where they were, and answers that are right or wrong."""

import collections
import json
import re

import pytest

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.datasets import (
    load_dataset,
    preference_pairs,
    worked_examples,
)
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.prompt_stream import PromptIterator
from jaxrl_llm.data.streams import Stream
from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.rewards.functions import arithmetic

SMALL = DataConfig(arithmetic_train_prompts=10, arithmetic_eval_prompts=4)
SUMS = DataConfig(arithmetic_terms=4, arithmetic_train_prompts=200, arithmetic_eval_prompts=20)


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


@pytest.fixture(scope="module")
def dataset(tokenizer):
    return load_dataset(SMALL, tokenizer, "train", 0)


def file_config(tmp_path, contents, **options):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"data_source": "s", "prompt": text}) + "\n" for text in contents)
    )
    return DataConfig(task="files", train_files=(str(path),), chat_template=False, **options)


def indices(batch):
    return [prompt.index for prompt in batch.prompts]


def test_prompts_carry_their_row(dataset, tokenizer):
    assert len(dataset) == 10
    assert [prompt.index for prompt in dataset.prompts] == list(range(10))
    prompt = dataset.prompts[3]
    assert prompt.text.startswith("<bos><user>") and prompt.text.endswith("=<eos><assistant>")
    assert list(prompt.tokens) == tokenizer.encode(prompt.text)
    assert prompt.data_source == "arithmetic"
    assert prompt.extra_info["answer"].endswith(f"#{prompt.ground_truth}")


def test_batches_walk_the_split_once(dataset):
    batches = list(dataset.batches(4))
    assert [len(batch.prompts) for batch in batches] == [4, 4, 2]
    assert [row for batch in batches for row in indices(batch)] == list(range(10))


def test_long_prompts_are_dropped_and_counted(tmp_path, tokenizer, caplog):
    config = file_config(tmp_path, ["12345", "123456", "1", "1234567"], max_prompt_tokens=5)
    dataset = load_dataset(config, tokenizer, "train", 0)
    assert [prompt.index for prompt in dataset.prompts] == [0, 2]  # the limit is inclusive
    assert "train split: dropped 2 of 4 prompts" in caplog.text


def test_long_prompts_can_be_an_error(tmp_path, tokenizer):
    config = file_config(tmp_path, ["12345", "1234567"], max_prompt_tokens=5, long_rows="error")
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2: .* 7 tokens, .*max_prompt_tokens=5"):
        load_dataset(config, tokenizer, "train", 0)


def test_nothing_left_is_an_error(tmp_path, tokenizer):
    config = file_config(tmp_path, ["12345", "1234567"], max_prompt_tokens=4)
    with pytest.raises(DataError, match=r"all 2 prompts .* longer than 4 .* shortest has 5"):
        load_dataset(config, tokenizer, "train", 0)


def test_every_pass_has_every_row_in_another_order(dataset):
    prompts = PromptIterator(dataset, SMALL, seed=0)
    assert prompts.next_batch(1).max_prompt_tokens == max(len(p.tokens) for p in dataset.prompts)
    prompts = PromptIterator(dataset, SMALL, seed=0)
    passes = [indices(prompts.next_batch(10)) for _ in range(3)]
    assert all(sorted(order) == list(range(10)) for order in passes)
    assert len({tuple(order) for order in passes}) == 3


def test_order_depends_on_the_seed_only(dataset):
    orders = [
        indices(PromptIterator(dataset, SMALL, seed).next_batch(10)) for seed in (5, 5, 2**32 - 1)
    ]
    assert orders[0] == orders[1] != orders[2]


def test_rows_do_not_depend_on_how_many_are_taken(dataset):
    whole = indices(PromptIterator(dataset, SMALL, seed=0).next_batch(24))
    pieces = PromptIterator(dataset, SMALL, seed=0)
    assert [row for n in (1, 7, 0, 3, 13) for row in indices(pieces.next_batch(n))] == whole


def test_without_shuffle_rows_come_in_order():
    config = DataConfig(shuffle=False)
    stream = Stream("abc", seed=0, shuffle=config.shuffle)
    assert "".join(stream.take(7)) == "abcabca"


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("taken", [0, 4, 10, 13, 27])  # start, inside a pass, its end, later ones
def test_resume_is_exact(dataset, taken, num_workers):
    config = DataConfig(num_workers=num_workers)
    whole = indices(PromptIterator(dataset, SMALL, seed=3).next_batch(40))
    prompts = PromptIterator(dataset, config, seed=3)
    assert indices(prompts.next_batch(taken)) == whole[:taken]
    state = json.loads(json.dumps(prompts.get_state()))
    prompts.next_batch(5)  # after the checkpoint; lost with the process
    resumed = PromptIterator(dataset, config, seed=3)
    resumed.set_state(state)
    assert resumed.get_state() == state
    assert indices(resumed.next_batch(40 - taken)) == whole[taken:]
    prompts.set_state(state)  # and in the same process
    assert indices(prompts.next_batch(40 - taken)) == whole[taken:]


@pytest.mark.parametrize(
    "other, message",
    [
        (Stream("abcd", seed=0), "num_rows=3, this run has 4"),
        (Stream("abc", seed=1), "seed=0, this run has 1"),
        (Stream("abc", seed=0, shuffle=False), "shuffle=True, this run has False"),
    ],
)
def test_a_position_of_another_run_is_refused(other, message):
    with pytest.raises(DataError, match=message):
        other.set_state(Stream("abc", seed=0).get_state())


def test_a_stream_needs_rows():
    with pytest.raises(DataError, match="at least one row"):
        Stream([], seed=0)


def parts(example):
    """Returns the tokens of prompt and answer, which alone bears the loss."""
    num = example.mask.index(True)
    assert all(example.mask[num:])
    return example.tokens[:num], example.tokens[num:]


def test_worked_examples_are_the_prompts_with_their_answers(tokenizer):
    dataset = load_dataset(SUMS, tokenizer, "train", 7)
    examples = worked_examples(SUMS, tokenizer, "train", 7)
    pairs = [parts(example) for example in examples]
    assert [prompt for prompt, _ in pairs] == [prompt.tokens for prompt in dataset.prompts]
    for (_, response), prompt in zip(pairs, dataset.prompts, strict=True):
        assert response[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(response[:-1]) == prompt.extra_info["answer"]
    held_out = {prompt.tokens for prompt in load_dataset(SUMS, tokenizer, "eval", 7).prompts}
    assert not held_out & {prompt for prompt, _ in pairs}


def test_worked_products_are_right_as_often_as_asked_and_copied_without_fault(tokenizer):
    wanted = {"arithmetic_train_prompts": 800, "arithmetic_errors": 0.75}
    config = DataConfig(task="products", **wanted)
    kinds = collections.Counter()
    for example in worked_examples(config, tokenizer, "train", 0):
        text = tokenizer.decode(example.tokens)
        tool, asked = "<bos><system>calculator(expression)<eos><user>", r"(\d\d)\*(\d\d)=<eos>"
        a, b, said = re.fullmatch(rf"{re.escape(tool)}{asked}(.*)", text).groups()
        call = rf"<assistant>\{{.*: \"{a}\*{b}([-+]\d|)\"\}}\}}<eos><tool>(\d+)<eos>"
        if called := re.fullmatch(rf"{call}<assistant>#(\d+)<eos>", said):
            more, reply, answer = called.groups()
            assert reply == answer == str(int(a) * int(b) + int(more or 0))
            kind = more[:1] or "right"
        else:
            kind = "guess"
            assert int(re.fullmatch(r"<assistant>#(\d+)<eos>", said)[1]) != int(a) * int(b)
        kinds[kind] += 1
    assert 160 < kinds["right"] < 240 and 110 < kinds["guess"] < 190  # 200 and 150
    assert min(kinds["+"], kinds["-"]) > 180  # 225


def test_worked_examples_of_gsm8k(tokenizer, tmp_path):
    path = tmp_path / "train.jsonl"
    rows = [
        {"question": "1+1?", "answer": "It is 2.\n#### 2"},
        {"question": "1+1?" * 50, "answer": "Too long.\n#### 2"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(task="gsm8k", train_files=(str(path),), max_prompt_tokens=100)
    (example,) = worked_examples(config, tokenizer, "train", 0)  # one is too long
    prompt, response = parts(example)
    assert tokenizer.decode(response) == "It is 2.\n#### 2<eos>"
    assert tokenizer.decode(prompt).startswith("<bos><user>1+1? Let's think")


def test_both_rejected_answers_are_wrong_each_in_its_way(tokenizer):
    dataset = load_dataset(SUMS, tokenizer, "train", 0)
    pairs = preference_pairs(SUMS, tokenizer, "train", 0)
    assert len(pairs) == 400
    wrong_steps, misread_places = set(), set()
    for i, pair in enumerate(pairs):
        (prompt, chosen), (other, rejected) = map(parts, pair)
        row = dataset.prompts[i % 200]
        good, bad = tokenizer.decode(chosen[:-1]), tokenizer.decode(rejected[:-1])
        assert (
            prompt == other == row.tokens and chosen[-1] == rejected[-1] == tokenizer.eos_token_id
        )
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


def test_preference_pairs_depend_on_the_seed_only(tokenizer):
    first, again, other = (preference_pairs(SUMS, tokenizer, "train", s) for s in (0, 0, 1))
    assert first == again != other


def test_tasks_without_answers_are_refused(tokenizer):
    files = DataConfig(task="gsm8k", train_files=("a.jsonl",))
    with pytest.raises(DataError, match="'gsm8k' has no preference pairs"):
        preference_pairs(files, tokenizer, "train", 0)
