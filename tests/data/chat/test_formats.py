"""The layouts of rows with answers, from every kind of file, and what becomes of long rows."""

import json

import pyarrow
import pytest
from chat_dialogues import DROPPING
from pyarrow import parquet

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.datasets import (
    labeled_examples,
    load_dataset,
    preference_pairs,
    worked_examples,
)
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.streams import Stream
from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.data.truncation import truncate, truncate_example, truncate_pair
from jaxrl_llm.types import Example, PreferencePair

ASK, GOOD, BAD = "1+1=", "2", "3"
QUESTION = [{"role": "user", "content": ASK}]
RIGHT = [{"role": "assistant", "content": GOOD}]
WRONG = [{"role": "assistant", "content": BAD}]
TOOLS = [{"type": "function", "function": {"name": "add"}}]

EXAMPLES = [
    {"messages": QUESTION + RIGHT},
    {"prompt": ASK, "completion": GOOD},
    {"prompt": QUESTION, "completion": RIGHT},
    {"prompt": QUESTION, "completion": GOOD, "source": 1},
]
PAIRS = [
    {"prompt": ASK, "chosen": GOOD, "rejected": BAD},
    {"prompt": QUESTION, "chosen": RIGHT, "rejected": WRONG},
    {"chosen": QUESTION + RIGHT, "rejected": QUESTION + WRONG},
    {"prompt": ASK, "chosen": QUESTION + RIGHT, "rejected": QUESTION + WRONG},
]


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


@pytest.fixture
def config(tmp_path):
    def write(rows, suffix="jsonl", **options):
        path = tmp_path / f"rows.{suffix}"
        if suffix == "parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        elif suffix == "json":
            path.write_text(json.dumps(rows, indent=1))
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return DataConfig(task="files", train_files=(str(tmp_path),), **options)

    return write


def shown(tokenizer, found):
    """Returns the text of an example, and of its tokens that bear loss."""
    masked = [token for token, bears in zip(found.tokens, found.mask, strict=True) if bears]
    return tokenizer.decode(found.tokens), tokenizer.decode(masked)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("row", EXAMPLES, ids=range(len(EXAMPLES)))
def test_every_layout_of_an_example(tokenizer, config, row, suffix):
    found = worked_examples(config([row, row], suffix), tokenizer, "train", 0)
    wanted = "<bos><user>1+1=<eos><assistant>2<eos>", "2<eos>"
    assert [shown(tokenizer, each) for each in found] == [wanted] * 2


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("row", PAIRS, ids=range(len(PAIRS)))
def test_every_layout_of_a_pair(tokenizer, config, row, suffix):
    (pair,) = preference_pairs(config([row], suffix), tokenizer, "train", 0)
    begin = "<bos><user>1+1=<eos><assistant>"
    assert shown(tokenizer, pair.chosen) == (f"{begin}2<eos>", "2<eos>")
    assert shown(tokenizer, pair.rejected) == (f"{begin}3<eos>", "3<eos>")


def test_plain_text_has_no_template(tokenizer, config):
    (found,) = worked_examples(config([EXAMPLES[1]], chat_template=False), tokenizer, "train", 0)
    assert shown(tokenizer, found) == ("1+1=2<eos>", "2<eos>")
    (pair,) = preference_pairs(config([PAIRS[0]], chat_template=False), tokenizer, "train", 0)
    assert shown(tokenizer, pair.rejected) == ("1+1=3<eos>", "3<eos>")


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_template_sees_tools_and_variables(config, suffix, as_text):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ tools[0].function.name }}{{ tone }}" + tokenizer.chat_template
    options = {"tools": TOOLS, "chat_template_kwargs": {"tone": "!"}}
    options = {name: json.dumps(value) if as_text else value for name, value in options.items()}
    others = {"tools": TOOLS, "chat_template_kwargs": {"tone": "?", "else": 1}}
    others = {name: json.dumps(value) if as_text else value for name, value in others.items()}
    rows = [{"data_source": "s", **EXAMPLES[1], **each} for each in (options, others)]
    written = config(rows, suffix)
    examples = worked_examples(written, tokenizer, "train", 0)
    assert [tokenizer.decode(each.tokens)[:4] for each in examples] == ["add!", "add?"]
    prompts = load_dataset(written, tokenizer, "train", 0).prompts
    assert [prompt.text[:4] for prompt in prompts] == ["add!", "add?"]


@pytest.mark.parametrize(
    ("pairs", "row", "message"),
    [
        (
            False,
            {"text": "x"},
            "this job needs the columns messages, or prompt and completion, got",
        ),
        (False, PAIRS[0], "['chosen', 'prompt', 'rejected']; these rows are for job='dpo'"),
        (False, {"prompt": "x"}, "prompts without answers are for job='rl'"),
        (False, {"conversations": []}, "write them as messages of role and content"),
        (False, {"messages": QUESTION}, "no assistant tokens"),
        (False, {"messages": "x"}, "no assistant tokens"),
        (False, {"messages": [{"role": "user"}]}, "content of message 1 must be a text"),
        (False, {"prompt": ASK, "completion": ""}, "completion is empty"),
        (False, {**EXAMPLES[0], "tools": "{"}, "tools must be a list of JSON schemas, or one wr"),
        (False, {**EXAMPLES[0], "tools": {"a": 1}}, "tools must be a list of JSON schemas, got d"),
        (False, {**EXAMPLES[0], "tools": ["add"]}, "tool 1 is str"),
        (False, {**EXAMPLES[0], "chat_template_kwargs": [1]}, "must be a mapping, got list"),
        (False, {**EXAMPLES[0], "chat_template_kwargs": {"tokenize": 1}}, "not 'tokenize'; leave"),
        (True, EXAMPLES[1], "needs the columns chosen and rejected, and prompt, got ['completion'"),
        (True, {"chosen": GOOD, "rejected": BAD}, "chosen is a text, so that where its prompt"),
        (True, {"chosen": RIGHT, "rejected": WRONG}, "begin with 0 equal messages of 1 and 1"),
        (True, {"chosen": QUESTION, "rejected": QUESTION}, "begin with 1 equal messages of 1 and"),
    ],
)
def test_rows_that_cannot_be_used(tokenizer, config, pairs, row, message):
    read = preference_pairs if pairs else worked_examples
    with pytest.raises(DataError) as error:
        read(config([(PAIRS if pairs else EXAMPLES)[0], row]), tokenizer, "train", 0)
    assert "rows.jsonl, row 2" in str(error.value) and message in str(error.value)


ROW = Example(tuple(range(6)), (False, False, True, True, False, False))


def test_rows_are_cut_at_the_chosen_side():
    assert [truncate("abcdef", n, "left") for n in (1, 5)] == [("f",), tuple("bcdef")]
    assert [truncate("abcdef", n, "right") for n in (1, 5)] == [("a",), tuple("abcde")]
    assert [truncate("abcdef", n, "middle") for n in (1, 4, 5)] == [
        ("f",),
        tuple("abef"),
        tuple("abdef"),
    ]
    assert truncate_example(ROW, 3, "right", "").tokens == (0, 1, 2)
    assert truncate_example(ROW, 3, "left", "").mask == (True, False, False)
    assert truncate_example(ROW, 4, "middle", "") is None  # nothing of the answer is left
    assert truncate_example(ROW, 6, "error", "") == truncate_example(ROW, 0, "error", "") == ROW
    with pytest.raises(DataError, match=r"row 7: 6 tokens, more than 5; raise trainer\.max_seq"):
        truncate_example(ROW, 5, "error", "row 7")


def test_truncation_cuts_the_longer_of_a_pair_first():
    short = Example(ROW.tokens[:3], ROW.mask[:3])
    found = truncate_pair(PreferencePair(ROW, short), 7, "right", "")
    assert [len(each.tokens) for each in found] == [4, 3]
    assert [
        len(each.tokens) for each in truncate_pair(PreferencePair(ROW, ROW), 6, "left", "")
    ] == [3, 3]
    assert truncate_pair(PreferencePair(ROW, short), 8, "drop", "") is None
    assert truncate_pair(PreferencePair(ROW, short), 9, "error", "") == PreferencePair(ROW, short)


def test_long_rows_of_files(tokenizer, config, caplog):
    rows = [{"prompt": "1+1=", "completion": "2" * n} for n in (1, 9)]
    read = lambda how, most: worked_examples(  # noqa: E731
        config(rows, chat_template=False, long_rows=how), tokenizer, "train", 0, most
    )
    assert len(read("drop", 6)) == 1 and "dropped 1 of 2 rows" in caplog.text
    assert [tokenizer.decode(each.tokens) for each in read("right", 6)] == ["1+1=2<eos>", "1+1=22"]
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2: 14 tokens, more than 6; raise"):
        read("error", 6)
    with pytest.raises(DataError, match=r"all 2 rows have more tokens than trainer\.max_seq"):
        read("drop", 5)


@pytest.mark.parametrize(("how", "text"), [("left", "345"), ("right", "123"), ("middle", "145")])
def test_long_prompts_of_rl_are_cut(tokenizer, config, how, text):
    written = config(
        [{"data_source": "s", "prompt": "12345"}],
        chat_template=False,
        max_prompt_tokens=3,
        long_rows=how,
    )
    (prompt,) = load_dataset(written, tokenizer, "train", 0).prompts
    assert prompt.text == text and tokenizer.decode(prompt.tokens) == text


TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "x|b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "y|d"},
]


def test_a_row_gives_a_sequence_for_each_rewritten_turn(config, caplog):
    caplog.set_level("INFO")
    tokenizer = character_tokenizer()
    tokenizer.chat_template = DROPPING
    rows = [{"messages": TURNS}, {"messages": TURNS[:2]}]
    found = worked_examples(config(rows), tokenizer, "train", 0)
    assert [shown(tokenizer, each) for each in found] == [
        ("<user>a<eos><assistant>x|b<eos>", "x|b<eos>"),
        ("<user>a<eos><assistant>b<eos><user>c<eos><assistant>y|d<eos>", "y|d<eos>"),
        ("<user>a<eos><assistant>x|b<eos>", "x|b<eos>"),
    ]
    assert "train split: 2 rows gave 3 sequences" in caplog.text
    # A sequence that is too long is dropped alone.
    assert len(worked_examples(config(rows), tokenizer, "train", 0, 10)) == 2
    assert "dropped 1 of 3 sequences longer" in caplog.text
    found = worked_examples(config(rows, rewritten_turns="whole"), tokenizer, "train", 0)
    assert [shown(tokenizer, each)[1] for each in found] == ["b<eos>y|d<eos>", "x|b<eos>"]
    assert "train split: 2 rows have 1 turns that are trained as the chat template" in caplog.text


def test_an_answer_of_a_pair_is_one_sequence(config, caplog):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = DROPPING
    other = [*TURNS[:3], {"role": "assistant", "content": "z|e"}]
    late = {"prompt": TURNS[:3], "chosen": TURNS[3:], "rejected": other[3:]}
    for row in (late, {"chosen": TURNS, "rejected": other}):
        (pair,) = preference_pairs(config([row]), tokenizer, "train", 0)
        assert [shown(tokenizer, each)[1] for each in pair] == ["y|d<eos>", "z|e<eos>"]
    early = {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": other[1:]}
    with pytest.raises(DataError, match=r"rows.jsonl, row 2: chosen has 1 turns that the chat te"):
        preference_pairs(config([late, early]), tokenizer, "train", 0)
    (pair,) = preference_pairs(config([early], rewritten_turns="whole"), tokenizer, "train", 0)
    assert [shown(tokenizer, each)[1] for each in pair] == ["b<eos>y|d<eos>", "b<eos>z|e<eos>"]
    assert "1 rows have 2 turns that are trained as" in caplog.text


EQUAL = [
    {"prompt": ASK, "chosen": GOOD, "rejected": GOOD},
    {"prompt": ASK, "chosen": GOOD, "rejected": f"{GOOD}<eos>"},
    {"prompt": QUESTION, "chosen": RIGHT, "rejected": RIGHT},
    {"chosen": QUESTION + RIGHT, "rejected": QUESTION + RIGHT},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("row", EQUAL, ids=range(len(EQUAL)))
def test_pairs_of_equal_answers_are_left_out_and_counted(tokenizer, config, caplog, row, stream):
    rows = config([row, PAIRS[0], row, row], stream=stream)
    found = preference_pairs(rows, tokenizer, "train", 0)
    taken = Stream(found, 0).take(2) if stream else [*found, *found]
    assert [shown(tokenizer, pair.rejected)[1] for pair in taken] == ["3<eos>"] * 2
    assert "pairs whose chosen answer equals the rejected" in caplog.text
    assert stream or "dropped 3 of 4 pairs" in caplog.text
    with pytest.raises(DataError, match="all 2 rows have a chosen answer that equals the rejec"):
        preference_pairs(config([row, row]), tokenizer, "train", 0)


def test_answers_that_a_cut_makes_equal_are_left_out(tokenizer, config, caplog):
    rows = [{"prompt": ASK, "chosen": "22222223", "rejected": "22222224"}, PAIRS[0]]
    found = preference_pairs(config(rows, long_rows="right"), tokenizer, "train", 0, max_tokens=22)
    assert len(found) == 1 and "dropped 1 of 2 pairs whose chosen" in caplog.text


def test_an_answer_under_a_template_has_one_end(tokenizer, config):
    rows = [{"prompt": ASK, "completion": f"{GOOD}<eos>"}, {"messages": [*QUESTION, *RIGHT]}]
    first, second = worked_examples(config(rows), tokenizer, "train", 0)
    assert first == second and shown(tokenizer, first)[1] == "2<eos>"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("labels", [(True, False), (1, 0), ("true", "False")])
def test_answers_with_a_label(tokenizer, config, suffix, labels):
    rows = [{**EXAMPLES[1], "label": label} for label in labels]
    found = labeled_examples(config(rows, suffix), tokenizer, "train", 0)
    assert [example.desirable for example in found] == [True, False]
    assert shown(tokenizer, found[1]) == ("<bos><user>1+1=<eos><assistant>2<eos>", "2<eos>")
    renamed = [{**EXAMPLES[1], "good": label} for label in labels]
    again = labeled_examples(
        config(renamed, suffix, columns={"label": "good"}), tokenizer, "train", 0
    )
    assert again == found


@pytest.mark.parametrize(
    "row, message",
    [
        (
            EXAMPLES[1],
            r"row 1: this loss needs a label for each answer, got .*add the column 'label'",
        ),
        (PAIRS[0], r"these rows are pairs: set dpo\.loss to one of pairs, such as 'sigmoid', or"),
        (
            {**EXAMPLES[1], "label": "good"},
            r"label must be true or false \(or 1 or 0\), got 'good'",
        ),
        ({**EXAMPLES[1], "label": [1]}, "label must be true or false"),
        ({**EXAMPLES[1], "label": 2}, "label must be true or false"),
    ],
)
def test_rows_without_a_label_are_refused(tokenizer, config, row, message):
    with pytest.raises(DataError, match=message):
        labeled_examples(config([row]), tokenizer, "train", 0)


def test_rows_with_a_label_are_no_pairs(tokenizer, config):
    with pytest.raises(DataError, match=r"these rows are for a dpo\.loss on single answers"):
        preference_pairs(config([{**EXAMPLES[1], "label": True}]), tokenizer, "train", 0)
