"""The length filter, and streams that resume where they were."""

import json

import pytest

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.datasets import PromptIterator, Stream, load_dataset
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tokenizer import character_tokenizer

SMALL = DataConfig(arithmetic_train_prompts=10, arithmetic_eval_prompts=4)


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
    assert dataset.num_dropped == 2
    assert "train split: dropped 2 of 4 prompts" in caplog.text


def test_long_prompts_can_be_an_error(tmp_path, tokenizer):
    config = file_config(
        tmp_path, ["12345", "1234567"], max_prompt_tokens=5, filter_long_prompts=False
    )
    with pytest.raises(DataError, match=r"row 1: the prompt has 7 tokens, .*max_prompt_tokens=5"):
        load_dataset(config, tokenizer, "train", 0)


def test_nothing_left_is_an_error(tmp_path, tokenizer):
    config = file_config(tmp_path, ["12345", "1234567"], max_prompt_tokens=4)
    with pytest.raises(DataError, match=r"all 2 prompts .* longer than 4 .* shortest has 5"):
        load_dataset(config, tokenizer, "train", 0)


def test_every_pass_has_every_row_in_another_order(dataset):
    prompts = PromptIterator(dataset, SMALL, seed=0)
    assert prompts.batch(1).longest == max(len(p.tokens) for p in dataset.prompts)
    prompts = PromptIterator(dataset, SMALL, seed=0)
    passes = [indices(prompts.batch(10)) for _ in range(3)]
    assert all(sorted(order) == list(range(10)) for order in passes)
    assert len({tuple(order) for order in passes}) == 3


def test_the_order_is_the_seeds_alone(dataset):
    orders = [indices(PromptIterator(dataset, SMALL, seed).batch(10)) for seed in (5, 5, 2**32 - 1)]
    assert orders[0] == orders[1] != orders[2]


def test_rows_do_not_depend_on_how_many_are_taken(dataset):
    whole = indices(PromptIterator(dataset, SMALL, seed=0).batch(24))
    pieces = PromptIterator(dataset, SMALL, seed=0)
    assert [row for n in (1, 7, 0, 3, 13) for row in indices(pieces.batch(n))] == whole


def test_without_shuffle_rows_come_in_order():
    config = DataConfig(shuffle=False)
    stream = Stream("abc", seed=0, shuffle=config.shuffle)
    assert "".join(stream.take(7)) == "abcabca"


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("taken", [0, 4, 10, 13, 27])  # start, inside a pass, its end, later ones
def test_resume_is_exact(dataset, taken, num_workers):
    config = DataConfig(num_workers=num_workers)
    whole = indices(PromptIterator(dataset, SMALL, seed=3).batch(40))
    prompts = PromptIterator(dataset, config, seed=3)
    assert indices(prompts.batch(taken)) == whole[:taken]
    state = json.loads(json.dumps(prompts.get_state()))
    prompts.batch(5)  # after the checkpoint; lost with the process
    resumed = PromptIterator(dataset, config, seed=3)
    resumed.set_state(state)
    assert resumed.get_state() == state
    assert indices(resumed.batch(40 - taken)) == whole[taken:]
    prompts.set_state(state)  # and in the same process
    assert indices(prompts.batch(40 - taken)) == whole[taken:]


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
