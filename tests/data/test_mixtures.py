"""Mixtures: shares that hold after any number of rows, move, and are resumed exactly."""

import collections
import json

import pyarrow
import pytest
from pyarrow import parquet

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.datasets import load_dataset, worked_examples
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.mixtures import MixedIterator, MixtureSchedule
from jaxrl_llm.data.prompt_stream import PromptIterator
from jaxrl_llm.data.streams import Stream
from jaxrl_llm.data.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer()


def counted(mixed, count):
    return collections.Counter(mixed.take(count))


def sources(*names):
    return [Stream(name, 0) for name in names]


def test_no_source_is_a_row_ahead_of_its_share():
    shares = MixtureSchedule((5.0, 3.0, 0.0, 1.0), (5.0, 3.0, 0.0, 1.0), 0)
    mixed = MixedIterator(sources("a", "b", "c", "d"), shares)
    rows = mixed.take(900)
    for end in (1, 2, 7, 50, 333, 900):
        found = collections.Counter(rows[:end])
        for name, share in zip("abcd", shares.shares_at(0), strict=True):
            assert found[name] < end * share + 1
    assert collections.Counter(rows) == {"a": 500, "b": 300, "d": 100}
    again = MixedIterator(sources("a", "b", "c", "d"), shares)
    assert tuple(row for n in (0, 3, 1, 896) for row in again.take(n)) == rows


def test_weights_move_in_a_line():
    mixed = MixedIterator(sources("a", "b"), MixtureSchedule((1.0, 0.0), (0.0, 3.0), 100))
    found = [counted(mixed, 50)["b"] for _ in range(4)]
    # The share of b is 3x / (1 - x + 3x) at the part x of the way: its mean is 0.46, then 0.89.
    assert found[0] == pytest.approx(23, abs=1) and found[1] == pytest.approx(44.6, abs=1)
    assert found[2:] == [50, 50]


def test_resume_is_exact():
    shares = MixtureSchedule((2.0, 1.0), (1.0, 5.0), 30)
    whole = MixedIterator(sources("abcde", "xyz"), shares).take(60)
    first = MixedIterator(sources("abcde", "xyz"), shares)
    assert first.take(17) == whole[:17]
    state = json.loads(json.dumps(first.get_state()))
    resumed = MixedIterator(sources("abcde", "xyz"), shares)
    resumed.set_state(state)
    assert resumed.take(43) == whole[17:]
    other = MixedIterator(sources("abcde", "xyz"), MixtureSchedule((2.0, 1.0), (1.0, 5.0), 31))
    with pytest.raises(DataError, match=r"num_rows=30, this run has 31: restore data\.train_w"):
        other.set_state(state)


@pytest.mark.parametrize("stream", [False, True])
def test_files_have_the_shares_of_their_weights(stream, tmp_path):
    for name, count in (("a", 4), ("b", 6)):
        row = {"data_source": name, "prompt": f"{name}=", "completion": name}
        parquet.write_table(pyarrow.Table.from_pylist([row] * count), tmp_path / f"{name}.parquet")
    config = DataConfig(
        task="files",
        train_files=(str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")),
        train_weights=(3.0, 1.0),
        stream=stream,
        chat_template=False,
    )
    dataset = load_dataset(config, TOKENIZER, "train", 0)
    prompts = PromptIterator(dataset, config, 0).next_batch(40).prompts
    assert collections.Counter(prompt.data_source for prompt in prompts) == {"a": 30, "b": 10}
    rows = Stream(worked_examples(config, TOKENIZER, "train", 0), 0).take(40)
    assert sum(TOKENIZER.decode(row.tokens).startswith("a") for row in rows) == 30
    if not stream:
        path = tmp_path / "a.parquet"
        row = {"data_source": "a", "prompt": "a" * 300, "completion": "a"}
        parquet.write_table(pyarrow.Table.from_pylist([row]), path)
        with pytest.raises(DataError, match=r"a\.parquet: all rows of it are too long; leave it"):
            load_dataset(config, TOKENIZER, "train", 0)


@pytest.mark.parametrize(
    "changes, field, message",
    [
        ({"train_weights": (1.0,)}, "train_weights", "1 weights for 2 train_files; give one for"),
        ({"train_weights": (0.0, 0.0)}, "train_weights", "all weights are 0"),
        ({"last_train_weights": (1.0, 1.0)}, "last_train_weights", "set train_weights too"),
        (
            {"train_weights": (1.0, 1.0), "last_train_weights": (1.0, 2.0)},
            "last_train_weights_after",
            "set both, or none",
        ),
        (
            {"task": "gsm8k", "train_weights": (1.0, 1.0)},
            "train_weights",
            "task='gsm8k' is no mixture of files",
        ),
        ({"task": "gsm8k", "stream": True}, "stream", "task='gsm8k' does not stream"),
    ],
)
def test_mixtures_that_cannot_work_are_refused(changes, field, message):
    config = DataConfig(**{"task": "files", "train_files": ("a", "b"), **changes})
    found = dict(config.problems())
    assert message in found[field]
