"""Settings of columns: what a preset gives, what replaces it, and what contradicts itself."""

import typing

import pytest

from jaxrl_llm.config import DataConfig
from jaxrl_llm.config.datasets.presets import (
    PRESETS,
    TARGETS,
    Preset,
    RowMapping,
    template_fields,
)
from jaxrl_llm.config.rollout_data import RewardModelConfig

FILES = {"task": "files", "train_files": ("a.jsonl",)}


def config(**settings):
    return DataConfig(**{**FILES, **settings})


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid_settings(preset):
    assert not list(PRESETS[preset].problems())
    assert not list(config(preset=preset).problems())
    assert config(preset=preset).row_mapping == PRESETS[preset]
    # Set by hand, they are the same.
    assert config(**vars(PRESETS[preset])).row_mapping == PRESETS[preset]
    assert not list(config(**vars(PRESETS[preset])).problems())


def test_the_names_of_presets_are_the_table():
    assert list(typing.get_args(Preset)) == list(PRESETS)


def test_settings_replace_what_a_preset_gives():
    mapping = config(preset="gsm8k", columns={"prompt": "problem"}).row_mapping
    assert mapping.columns == {"prompt": "problem", "answer": "answer", "completion": "answer"}
    assert not mapping.prompt_template and mapping.answer_pattern
    mapping = config(preset="gsm8k", columns={"answer": "final"}).row_mapping
    assert mapping.columns["answer"] == "final" and not mapping.answer_pattern
    mapping = config(preset="orca_dpo", prompt_template="Q: {question}").row_mapping
    assert "prompt" not in mapping.columns and mapping.prompt_template == "Q: {question}"
    mapping = config(preset="gsm8k", system_prompt="Be brief.", data_source="mine").row_mapping
    assert (mapping.system_prompt, mapping.data_source) == ("Be brief.", "mine")


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        ({"columns": {"promt": "a"}}, "columns", "unknown column 'promt'; did you mean 'prompt'?"),
        (
            {"columns": {"zzz": "a"}},
            "columns",
            f"unknown column 'zzz'; known: {', '.join(TARGETS)}",
        ),
        ({"columns": {"prompt": ""}}, "columns.prompt", "names no column; leave it out"),
        ({"columns": {"prompt": "?"}}, "columns.prompt", "names no column"),
        (
            {"prompt_template": "{a"},
            "prompt_template",
            "expected '}' before end of string; write {{",
        ),
        ({"prompt_template": "a}"}, "prompt_template", "Single '}' encountered"),
        ({"prompt_template": "{}"}, "prompt_template", "must be the name of a column, got ''"),
        ({"prompt_template": "{a!r}"}, "prompt_template", "the name of a column, got 'a'"),
        ({"prompt_template": "{a:3}"}, "prompt_template", "the name of a column, got 'a'"),
        ({"prompt_template": "a"}, "prompt_template", "names no column, so that all prompts are"),
        (
            {"prompt_template": "{a}", "columns": {"prompt": "a"}},
            "prompt_template",
            "makes the prompt, as columns.prompt does; leave one out",
        ),
        (
            {"answer_pattern": "("},
            "answer_pattern",
            "'(' is no regular expression: missing ), unter",
        ),
        ({"answer_pattern": "a"}, "answer_pattern", "'a' has 0 groups, but needs one group"),
        ({"answer_pattern": "(a)(b)"}, "answer_pattern", "'(a)(b)' has 2 groups, but needs one"),
        ({"answer_pattern": "(a)"}, "answer_pattern", "nothing is searched for it; name columns"),
        ({"transcript_roles": ("Human",)}, "transcript_roles", "'Human' is no alias; write it as"),
        (
            {"transcript_roles": ("A:user", "A:assistant")},
            "transcript_roles",
            "'A' has two meanings",
        ),
        (
            {"preset": "alpaca", "columns": {"messages": "a"}},
            "columns",
            "messages and completion are both set",
        ),
        (
            {"columns": {"prompt": "a"}, "prompt_column": "b"},
            "prompt_column",
            "columns.prompt or prompt_template says it already",
        ),
        ({"task": "gsm8k", "preset": "gsm8k"}, "preset", "task='gsm8k' has rows of its own; use"),
        (
            {"task": "arithmetic", "system_prompt": "a"},
            "system_prompt",
            "task='arithmetic' has rows",
        ),
    ],
)
def test_contradictions_are_named(settings, field, message):
    problems = list(config(**settings).problems())
    assert [where for where, _ in problems].count(field) == len(problems), problems
    assert any(message in problem for _, problem in problems), problems


def test_pairs_in_other_files_have_columns_of_their_own():
    data = config(
        preset="gsm8k", system_prompt="Think.", train_weights=(1.0,), max_prompt_tokens=99
    )
    pairs = data.with_pairs(("hh.jsonl",), "hh_rlhf")
    assert pairs == config(train_files=("hh.jsonl",), preset="hh_rlhf", max_prompt_tokens=99)
    ((field, message),) = RewardModelConfig(pairs_preset="hh_rlhf").problems()
    assert field == "pairs_preset" and "name some" in message


def test_template_fields_by_hand():
    assert template_fields("") == []
    assert template_fields("{a?} and {b c}") == [("", "a?"), (" and ", "b c")]
    assert RowMapping().with_preset(RowMapping()) == RowMapping()
