"""Rows of published datasets, read by their presets and by columns, and what is refused."""

import json
import os
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_rows import LAYOUTS, OTHERS

from jaxrl_llm.config import DataConfig
from jaxrl_llm.config.datasets.presets import PRESETS
from jaxrl_llm.data.chat.formats import sft_dialogue
from jaxrl_llm.data.datasets import pair_of_dialogues
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.rows.row_mapping import example_columns, pair_columns, prompt_columns
from jaxrl_llm.data.tasks import prompt_row, task_rows
from jaxrl_llm.rewards.functions import gsm8k

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SYSTEM = {"role": "system", "content": "Be kind."}


def config(**settings):
    return DataConfig(**{"task": "files", "train_files": ("a.jsonl",), **settings})


def prompt(row, **settings):
    return prompt_row(config(**settings), row, "a.jsonl, row 1")


def spoken(messages):
    return [(message["role"], message["content"]) for message in messages]


@pytest.mark.parametrize("name", [*LAYOUTS, *OTHERS])
def test_published_layouts(name):
    layout = LAYOUTS.get(name) or OTHERS[name]
    data, row = config(**{"preset": name, **layout.changes}), layout.rows[0]
    assert not list(data.problems())
    if layout.job == "rl":
        mapped = prompt_row(data, row, "row")
        assert spoken(mapped["prompt"]) == layout.messages
        assert mapped["reward_model"]["ground_truth"] == layout.answer and mapped["data_source"]
    elif layout.job == "sft":
        dialogue = sft_dialogue(example_columns(data, row, "row"), "row")
        assert spoken(dialogue.messages) == layout.messages
    else:
        chosen, rejected = pair_of_dialogues(data, row, "row")
        assert spoken(chosen.messages) == layout.messages and chosen.first == rejected.first
        assert spoken(rejected.messages) == [*layout.messages[:-1], ("assistant", layout.answer)]
        assert chosen.first == len(layout.messages) - 1


def test_every_preset_has_its_layout():
    assert [name for name in PRESETS if name != "none"] == list(LAYOUTS)


GSM8K = pathlib.Path(
    os.environ.get("JAXRL_GSM8K", pathlib.Path(__file__).parents[4] / "shared" / "data" / "gsm8k")
)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="needs the folder of GSM8K beside the repository")
@pytest.mark.parametrize(
    ("split", "count"), [pytest.param("train", 7473, marks=pytest.mark.slow), ("eval", 1319)]
)
def test_all_of_gsm8k_is_read(split, count):
    files = {"train_files": (f"{GSM8K}/train.jsonl",), "eval_files": (f"{GSM8K}/test.jsonl",)}
    rows = task_rows(config(preset="gsm8k", **files), split, 0)
    of_task = task_rows(DataConfig(task="gsm8k", **files), split, 0)
    assert len(rows) == len(of_task) == count
    for row, other in zip(rows, of_task, strict=True):
        assert row["prompt"] == other["prompt"] and row["data_source"] == other["data_source"]
        truth, worked = row["reward_model"]["ground_truth"], row["extra_info"]["answer"]
        assert truth.replace(",", "") == other["reward_model"]["ground_truth"]
        assert gsm8k("", worked, truth, {})["score"] == 1.0


def test_presets_serve_several_jobs():
    row = LAYOUTS["gsm8k"].rows[0]
    dialogue = sft_dialogue(example_columns(config(preset="gsm8k"), row, "row"), "row")
    assert spoken(dialogue.messages)[1] == ("assistant", row["answer"])
    row = LAYOUTS["ultrafeedback"].rows[0]
    ultrafeedback = config(preset="ultrafeedback")
    assert spoken(prompt_row(ultrafeedback, row, "row")["prompt"]) == [("user", "Greet me.")]
    row = {name: row[name] for name in ("chosen", "rejected")}  # trl-lib's columns
    assert spoken(pair_of_dialogues(ultrafeedback, row, "row")[1].messages)[-1][1] == "No."


def test_what_reward_functions_get():
    row = {**LAYOUTS["math"].rows[1], "extra_info": {"level": "own"}}
    mapped = prompt(row, preset="math")
    assert mapped["data_source"] == "hendrycks_math"
    assert mapped["extra_info"] == {
        "level": "own", "row/level": "Level 2", "type": "Prealgebra",
        "problem": "Find $2-5$.", "solution": "It is $\\boxed{-3}$.",
    }  # fmt: skip
    assert prompt(row, preset="math", extra_columns=("type",))["extra_info"] == {
        "level": "own", "type": "Prealgebra"
    }  # fmt: skip
    # The messages of an episode have this name; those of the prompt are no extra.
    assert "messages" not in prompt(LAYOUTS["rlvr"].rows[0], preset="rlvr")["extra_info"]
    # What a column of ours covers is not lost, and verl's own columns stay.
    row = {"prompt": 7, "q": "Hi", "reward_model": {"style": "rule"}, "data_source": "own"}
    mapped = prompt(row, columns={"prompt": "q", "answer": "prompt"}, data_source="other")
    assert mapped["reward_model"] == {"ground_truth": 7} and mapped["data_source"] == "own"
    assert mapped["extra_info"] == {"prompt": 7, "reward_model": {"style": "rule"}}
    assert spoken(mapped["prompt"]) == [("user", "Hi")]
    with pytest.raises(
        DataError, match=r"row 1: no column 'promt' for data.extra_columns; did you"
    ):
        prompt(row, preset="math", extra_columns=("promt",), prompt_template="{q}", columns={
            "answer": "prompt"
        })  # fmt: skip


def test_a_row_without_settings_is_the_row():
    row = {"prompt": "a", "messages": TALK}
    assert all(
        columns(config(), row, "row") is row
        for columns in (prompt_columns, example_columns, pair_columns)
    )


def test_the_column_that_is_set_decides_the_layout():
    row = {"problem": "1+1", "solution": "2", "messages": TALK}  # NuminaMath's
    by_columns = config(columns={"prompt": "problem", "completion": "solution"})
    assert sft_dialogue(example_columns(by_columns, row, "row"), "row").text == ("1+1", "2")
    of_messages = config(columns={"messages": "messages"})
    assert sft_dialogue(example_columns(of_messages, row, "row"), "row").messages == TALK


def test_system_prompts():
    settings = {"data_source": "s", "system_prompt": "Be kind."}
    assert prompt({"prompt": "Hi"}, **settings)["prompt"][0] == SYSTEM
    own = [{"role": "system", "content": "Mine."}, TALK[0]]
    assert prompt({"prompt": own}, **settings)["prompt"] == own
    assert prompt({"prompt": json.dumps(own)}, **settings)["prompt"] == own
    column = {**settings, "columns": {"system": "s?"}}
    assert spoken(prompt({"prompt": "Hi", "s": "Yes."}, **column)["prompt"])[0][1] == "Yes."
    for row in ({"prompt": "Hi", "s": None}, {"prompt": "Hi"}, {"prompt": "Hi", "s": " "}):
        assert prompt(row, **column)["prompt"][0] == SYSTEM

    kind = config(system_prompt="Be kind.")
    for row in (
        {"messages": TALK},
        {"prompt": "Hi", "completion": "Hello"},
        {"conversations": TALK},
    ):
        dialogue = sft_dialogue(example_columns(kind, row, "row"), "row")
        assert dialogue.messages == [SYSTEM, *TALK]
    sharegpt = {"conversations": TALK, "system": "Mine."}
    found = sft_dialogue(example_columns(kind, sharegpt, "row"), "row").messages
    assert spoken(found) == [("system", "Mine."), *spoken(TALK)]

    bye = [TALK[0], {"role": "assistant", "content": "Bye"}]
    for row in (
        {"prompt": "Hi", "chosen": "Hello", "rejected": "Bye"},
        {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": bye[1:]},
        {"prompt": "Hi", "chosen": TALK, "rejected": bye},
        {"chosen": TALK, "rejected": bye},
        {"chosen": json.dumps(TALK), "rejected": json.dumps(bye)},
    ):
        chosen, rejected = pair_of_dialogues(kind, row, "row")
        assert chosen.messages == [SYSTEM, *TALK] and chosen.first == 2
        assert rejected.messages == [SYSTEM, *bye]


@pytest.mark.parametrize(
    ("solution", "wanted"),
    [
        (r"\boxed{3}", "3"),
        (r"so \boxed 3.", "3"),
        (r"\fbox{3}", "3"),
        (r"$\boxed{\text{(B)}}$ or $\boxed{\$5}$", r"\$5"),
        (
            r"\boxed{\left\{\frac{1}{\sqrt{2^{3}}}\right\}}",
            r"\left\{\frac{1}{\sqrt{2^{3}}}\right\}",
        ),
        (r"\boxed{\begin{pmatrix} 1 & {a_{b_{c}}} \end{pmatrix}} here.", None),
        (r"\boxed {x}", "x"),
        (r"$\boxed7$", "7"),
    ],
)
def test_boxed_answers(solution, wanted):
    found = prompt({"problem": "p", "solution": solution}, preset="math")
    wanted = wanted or r"\begin{pmatrix} 1 & {a_{b_{c}}} \end{pmatrix}"
    assert found["reward_model"]["ground_truth"] == wanted


@pytest.mark.parametrize("solution", ["3", r"\boxed{}", r"\boxed{3", r"\boxed{ }"])
def test_solutions_without_an_answer_are_refused(solution):
    with pytest.raises(
        DataError, match=r"a\.jsonl, row 1: the answer has no match of data\.answer"
    ):
        prompt({"problem": "p", "solution": solution}, preset="math")


QUESTION = {"question": "Why?", "answer": "It is so. #### 4"}


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        (
            {"questoin": "Why?", "answer": "#### 4"},
            {"preset": "gsm8k"},
            "no column 'question' for data.prompt_template; did you mean 'questoin'? The row has:"
            " answer, questoin",
        ),
        (
            QUESTION,
            {"columns": {"prompt": "question", "answer": "answers"}},
            "no column 'answers' for data.columns.answer; did you mean 'answer'? The row has:",
        ),
        (
            {**QUESTION, "answer": None},
            {"columns": {"prompt": "question", "answer": "answer"}},
            "the column 'answer' (data.columns.answer) is null; leave the row out, or let it be"
            " missing with data.columns.answer='answer?'",
        ),
        (
            {**QUESTION, "answer": "4"},
            {"preset": "gsm8k"},
            "the answer has no match of data.answer",
        ),
        (
            {**QUESTION, "answer": 4},
            {"preset": "gsm8k"},
            "the answer must be a text for data.answer",
        ),
        (
            {**QUESTION, "question": ["Why?"]},
            {"preset": "gsm8k"},
            "the column 'question' must be a text or a number for data.prompt_template, got [",
        ),
        (
            QUESTION,
            {"columns": {"answer": "answer"}},
            "no column 'prompt' for the prompt (data.columns.prompt); The row has: answer",
        ),
        (
            {**QUESTION, "question": " "},
            {"columns": {"prompt": "question"}, "data_source": "s"},
            "prompt is empty",
        ),
        (
            {**QUESTION, "s": 3},
            {"columns": {"prompt": "question", "system": "s"}},
            "data.columns.system must be a text, got 3",
        ),
        (
            QUESTION,
            {"columns": {"prompt": "question"}},
            "data_source must be a text that names the row's origin, got None;",
        ),
    ],
)
def test_rows_that_do_not_fit_are_named(row, settings, message):
    with pytest.raises(DataError) as error:
        prompt(row, **settings)
    assert str(error.value).startswith("a.jsonl, row 1: ") and message in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"chosen": "Human: a", "rejected": "b"},
            "rejected must begin with one of Human:, Assistant",
        ),
        ({"chosen": "a\n\nHuman: b", "rejected": "c"}, "chosen must begin with one of Human:"),
        ({"chosen": "Human: a", "rejected": None}, "the column 'rejected' (data.columns.rejected)"),
        (
            {"chosen": "Human: a"},
            "no column 'rejected' for data.columns.rejected; The row has: chosen",
        ),
        (
            {"chosen": "Human: a\n\nAssistant:", "rejected": "Human: a\n\nAssistant: b"},
            "chosen is empty",
        ),
    ],
)
def test_transcripts_that_are_none_are_named(row, message):
    with pytest.raises(DataError) as error:
        pair_of_dialogues(config(preset="hh_rlhf"), row, "a.jsonl, row 1")
    assert str(error.value).startswith("a.jsonl, row 1: ") and message in str(error.value)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).map(str.strip).filter(bool)


@given(turns=st.lists(TEXTS, min_size=1, max_size=5))
def test_transcripts_keep_every_turn(turns):
    names = ("Human", "Assistant")
    if any(f"\n\n{name}:" in f"\n\n{turn}"[i:] for turn in turns for name in names for i in (0, 2)):
        return
    text = "".join(f"\n\n{names[i % 2]}: {turn}" for i, turn in enumerate(turns))
    row = {"prompt": text, "data_source": "s"}
    found = prompt(row, transcript_roles=("Human:user", "Assistant:assistant"))["prompt"]
    assert [message["content"] for message in found] == turns
    assert [message["role"] for message in found] == [
        ("user", "assistant")[i % 2] for i in range(len(turns))
    ]
