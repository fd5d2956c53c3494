"""Every field of every job: what it admits and refuses, and that files and flags carry it.

All fields are asked at once, since a config names all its problems. How the effect of each shows is
in `test_keys.py`, that the site has a row for each in `tests/docs/test_site.py`.
"""

import json
import math
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import pytest
from config_fields import DeclaredField, declared, nested, other_value, value_at

from jaxrl_llm.commands import command_line
from jaxrl_llm.commands.options import PlanOptions
from jaxrl_llm.config import ConfigError, yaml_file
from jaxrl_llm.config.bridge import JOBS, default_config_dict, from_config_dict, to_dict
from jaxrl_llm.config.flags import load, unknown_overrides
from jaxrl_llm.config.validation import ConfigGroup, Range, TextField

NUMBERS = (math.nan, math.inf, -math.inf, -1, 0, 1e-30, 1e30, 2**31, 2**63)
TEXTS = ("", "x" * 2**20, "a\ud800b", "a\0b")
FIELDS = {
    job: [field for field in declared(cls) if field.key != "job"] for job, cls in JOBS.items()
}


def description(job: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """A job with fields at values, all of whose mappings of groups have an entry."""
    entries = {field.key.partition(".NAME.")[0] for field in FIELDS[job] if ".NAME." in field.key}
    return nested({"job": job, **{f"{entry}.NAME": {} for entry in entries}, **values})


def problems(job: str, values: Mapping[str, Any]) -> dict[str, str]:
    """The first problem of each field at a value; a tuple's is that of its first item."""
    try:
        from_config_dict(description(job, values))
    except ConfigError as error:
        said = [problem.removeprefix("config.").partition(": ") for problem in error.problems]
        return {where.removesuffix("[0]"): message for where, _, message in reversed(said)}
    return {}


def fields_of_kind(job: str, kind: Any) -> Iterator[DeclaredField]:
    return (field for field in FIELDS[job] if field.kind is kind)


def other_values(job: str) -> dict[str, Any]:
    """Another value of every field, which its declaration admits."""
    return {field.key: other_value(field, field.default) for field in FIELDS[job]}


@pytest.fixture
def no_rules(monkeypatch):
    """Values need not suit each other, each must be admitted by its field."""
    monkeypatch.setattr(ConfigGroup, "problems", ConfigGroup._field_problems)


@pytest.mark.parametrize("job", JOBS)
def test_every_number_and_text_declares_what_it_may_be(job):
    """Nothing is missing from the list that the documentation is made of."""
    numbers = [*fields_of_kind(job, int), *fields_of_kind(job, float)]
    assert len(numbers) > (100 if job == "rl" else 50)
    for field in numbers:
        assert isinstance(field.rule, Range), field
        assert math.nan not in field.rule and -math.inf not in field.rule, field
        if field.kind is int:
            assert 2**63 not in field.rule, field
            assert all(high < 2**32 for _, high, *_ in field.rule.intervals), field
        assert field.is_tuple or field.default in field.rule, field
    texts = {field.key for field in fields_of_kind(job, str) if isinstance(field.rule, TextField)}
    assert {"model.path", "data.train_files", "alerts.webhook"} <= texts
    assert len(FIELDS["rl"]) > 150 and "alerts.kl.limit" in map(str, numbers)
    for field in FIELDS[job]:
        if typing.get_origin(field.hint) is Literal:
            assert field.default in typing.get_args(field.hint), field


@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize("job", JOBS)
def test_every_number_is_admitted_or_refused_as_declared(job, number):
    for kind in (int, float):
        asked = list(fields_of_kind(job, kind))
        values = {f.key: (number,) if f.is_tuple else number for f in asked}
        found = problems(job, values)
        for field in asked:
            said = found.get(field.key, "")
            if kind is int and not isinstance(number, int):
                assert said.startswith("expected "), (field, said)
            elif number in field.rule:
                assert "must be" not in said and "expected" not in said, (field, said)
            else:
                assert f"must be {field.rule}, got" in said, (field, said)


@pytest.mark.parametrize("text", TEXTS, ids=["empty", "long", "surrogate", "nul"])
@pytest.mark.parametrize("job", JOBS)
def test_every_text_refuses_what_no_file_or_name_can_be(job, text):
    asked = [field for field in fields_of_kind(job, str) if isinstance(field.rule, TextField)]
    found = problems(job, {f.key: (text,) if f.is_tuple else text for f in asked})
    assert all(len(said) < 1000 for said in found.values())
    for field in asked if text else ():
        said = found[field.key]
        assert "characters, got" in said or "must " in said, (field, said)


@pytest.mark.parametrize("text", TEXTS, ids=["empty", "long", "surrogate", "nul"])
def test_names_of_entries_and_pools_are_texts_too(text):
    answer = {"function": "arithmetic"}
    with pytest.raises(ConfigError):
        from_config_dict({"rewards": {"functions": {text: answer}}})
    placement = {"choice": "by_hand", "roles": {"policy": text}}
    with pytest.raises(ConfigError) as error:
        from_config_dict({"rewards": {"functions": {"a": answer}}, "placement": placement})
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("wrong", [None, {"a": 1}, object()], ids=["none", "group", "object"])
@pytest.mark.parametrize("job", JOBS)
def test_every_field_refuses_another_type(job, wrong):
    """None is a field that is left out."""
    found = problems(job, {field.key: wrong for field in FIELDS[job]})
    for field in FIELDS[job]:
        said = found.get(field.key, "")
        mapping = typing.get_origin(field.hint) is Mapping and isinstance(wrong, dict)
        assert said.startswith("expected ") == (wrong is not None and not mapping), (field, said)


@pytest.mark.parametrize("job", JOBS)
def test_a_misspelt_field_is_named_with_the_nearest(job):
    found = problems(job, {f"{field.key}{field.key[-1]}": 1 for field in FIELDS[job]})
    for field in FIELDS[job]:
        key, name = f"{field.key}{field.key[-1]}", field.key.rpartition(".")[2]
        assert found[key] == f"unknown field; did you mean {name!r}?"
        if "NAME" not in key and job == "rl":
            (said,) = unknown_overrides(["train", f"--config.{key}=1"])
            assert said == f"config.{key}: {found[key]}"


@pytest.mark.parametrize("job", JOBS)
def test_every_field_is_written_and_read_back(job, no_rules, tmp_path):
    """As JSON in a run's folder and as YAML, at another value and, where admitted, at infinity."""
    values = other_values(job)
    infinite = {f.key: math.inf for f in FIELDS[job] if f.kind is float and math.inf in f.rule}
    assert infinite or job != "rl"
    tuples = {f.key for f in FIELDS[job] if f.is_tuple}
    for changed in (
        values,
        values | {key: (value,) if key in tuples else value for key, value in infinite.items()},
    ):
        config = from_config_dict(description(job, changed))
        assert {key: value_at(config, key) for key in changed} == changed
        text = json.dumps(to_dict(config), allow_nan=False)
        assert from_config_dict(json.loads(text)) == config
        for name, written in {
            "a.yaml": yaml_file.text(to_dict(config)),
            "config.json": text,
        }.items():
            (tmp_path / name).write_text(written)
            assert from_config_dict(load(str(tmp_path / name))) == config


@pytest.mark.parametrize("job", JOBS)
def test_every_field_can_be_set_on_the_command_line(job, no_rules, tmp_path):
    """No key is forgotten in the file, typed wrongly or overwritten."""
    entries = {key.partition(".NAME.")[0] for key in map(str, FIELDS[job]) if ".NAME." in key}
    file = tmp_path / "run.py"
    file.write_text(
        "from jaxrl_llm.config.bridge import default_config_dict\n"
        f"def get_config():\n    config = default_config_dict({job!r})\n"
        + "".join(f"    config.{entry}.NAME = dict()\n" for entry in sorted(entries))
        + "    return config\n"
    )
    # A mapping of names is set as a whole.
    wanted = {k: value for k, value in other_values(job).items() if not isinstance(value, Mapping)}
    typed = {k: str(v).lower() if isinstance(v, bool) else v for k, v in wanted.items()}
    words = [f"--config={file}", *(f"--config.{key}={value}" for key, value in typed.items())]
    config = command_line.parse(PlanOptions, words).config
    assert {key: value_at(config, key) for key in wanted} == wanted


@pytest.mark.parametrize("job", JOBS.values())
def test_every_field_has_a_default(job):
    """A field that is left out takes it."""
    assert job() == job(**vars(job()))


@pytest.mark.parametrize("job", JOBS)
def test_the_default_config_dict_holds_every_key_and_changes_nothing(job, no_rules):
    values = default_config_dict(job)
    for field in FIELDS[job]:
        if ".NAME." not in field.key:
            *groups, name = field.key.split(".")
            assert name in (value_at(values, ".".join(groups)) if groups else values), field
    assert from_config_dict(values) == from_config_dict({"job": job})


@pytest.mark.parametrize(
    "rule, inside, outside, said",
    [
        (Range("[0, 1)"), (0, 0.5), (-1e-9, 1, math.nan), "in [0, 1)"),
        (Range("(0, inf]", "inf: off"), (1e-30, math.inf), (0, -1), "in (0, inf] (inf: off)"),
        (Range("0 or [1e-4, 9]", "0: no"), (0, 1e-4, 9), (1e-5, 9.1), "0 or in [1e-4, 9] (0: no)"),
        (Range("-1 or [1, 4294967295]"), (-1, 2**32 - 1), (0, 2**32), "-1 or in [1, 4294967295]"),
    ],
)
def test_range_membership_and_text(rule, inside, outside, said):
    assert all(value in rule for value in inside) and not any(value in rule for value in outside)
    assert str(rule) == said
