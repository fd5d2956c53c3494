"""What every field declares is what is admitted: all numbers and texts that users get wrong."""

import itertools
import json
import math
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from config_fields import listed

from jaxrl_llm.config import ConfigError, RLConfig
from jaxrl_llm.config.bridge import from_config_dict, to_dict
from jaxrl_llm.config.validation import Range, TextField

NUMBERS = (math.nan, math.inf, -math.inf, -1, 0, 1e-30, 1e30, 2**31, 2**63)
TEXTS = ("", "x" * 2**20, "a\ud800b", "a\0b")
FIELDS = {key: (hint, rule) for key, hint, rule in listed(RLConfig)}
BASE: dict[str, Any] = {
    "rewards": {
        "functions": {"NAME": {"function": "arithmetic"}},
        "models": {"MODEL": {"path": "a"}},
        "cost_functions": {"NAME": {"function": "length"}},
        "cost_models": {"NAME": {"path": "a"}},
    },
    "evaluation": {"functions": {"NAME": {"function": "arithmetic"}}},
}


def with_field(key: str, value: Any) -> dict[str, Any]:
    """Returns the smallest description of a run with one field at a value."""
    values = json.loads(json.dumps(BASE))
    *groups, last = key.removeprefix("config.").split(".")
    if groups[:2] == ["rewards", "models"]:
        groups[2] = "MODEL"
    group = values
    for name in groups:
        group = group.setdefault(name, {})
    hint, _ = FIELDS[key]
    group[last] = (value,) if typing.get_origin(hint) is tuple else value
    if groups[:2] == ["placement", "pools"]:
        values["placement"]["choice"] = "by_hand"
    return values


def numeric() -> Iterator[tuple[str, type]]:
    for key, (hint, _) in FIELDS.items():
        kind = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
        if kind in (int, float):
            yield key, kind


def test_every_number_and_text_declares_what_it_may_be():
    """Nothing is missing from the list that the documentation is made of."""
    assert len(FIELDS) > 150 and len(list(numeric())) > 100
    for key, kind in numeric():
        rule = FIELDS[key][1]
        assert isinstance(rule, Range), key
        assert math.nan not in rule and -math.inf not in rule, key
        if kind is int:
            assert 2**63 not in rule and all(high < 2**32 for _, high, *_ in rule.intervals), key
    texts = [key for key, (hint, rule) in FIELDS.items() if isinstance(rule, TextField)]
    assert {"config.model.path", "config.data.train_files", "config.alerts.webhook"} <= {*texts}


def test_every_field_refuses_what_it_does_not_declare():
    """All fields x all values: admitted by the declaration, or one clear problem that names it."""
    count = 0
    for (key, kind), value in itertools.product(numeric(), NUMBERS):
        typed = kind is float or isinstance(value, int)
        where = key.replace(".models.NAME", ".models.MODEL")
        try:
            config = from_config_dict(with_field(key, value))
        except ConfigError as error:
            mine = [problem for problem in error.problems if problem.startswith(where)]
            if not typed:
                assert "expected" in mine[0], error
            elif value not in FIELDS[key][1]:
                assert f"must be {FIELDS[key][1]}, got" in mine[0], error
        else:
            assert typed and value in FIELDS[key][1], (key, value)
            if math.isinf(value):
                assert from_config_dict(json.loads(json.dumps(to_dict(config)))) == config
        count += 1
    assert count > 900


@pytest.mark.parametrize("text", TEXTS, ids=["empty", "long", "surrogate", "nul"])
def test_every_text_refuses_what_no_file_or_name_can_be(text):
    for key, (_, rule) in FIELDS.items():
        if not isinstance(rule, TextField):
            continue
        try:
            from_config_dict(with_field(key, text))
        except ConfigError as error:
            assert len(str(error)) < 1000, key
            if text:
                assert "characters, got" in str(error) or "must " in str(error), error
        else:
            assert not text, key
    values = json.loads(json.dumps(BASE))
    values["rewards"]["functions"][text] = {"function": "arithmetic"}
    with pytest.raises(ConfigError):
        from_config_dict(values)
    with pytest.raises(ConfigError) as error:
        from_config_dict({**BASE, "placement": {"choice": "by_hand", "roles": {"policy": text}}})
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "rule, inside, outside, said",
    [
        (Range("[0, 1)"), (0, 0.5), (-1e-9, 1, math.nan), "in [0, 1)"),
        (Range("(0, inf]", "inf: off"), (1e-30, math.inf), (0, -1), "in (0, inf] (inf: off)"),
        (Range("0 or [1e-4, 9]", "0: no"), (0, 1e-4, 9), (1e-5, 9.1), "0 or in [1e-4, 9] (0: no)"),
        (Range("-1 or [1, 4294967295]"), (-1, 2**32 - 1), (0, 2**32), "-1 or in [1, 4294967295]"),
    ],
)
def test_a_range(rule, inside, outside, said):
    assert all(value in rule for value in inside) and not any(value in rule for value in outside)
    assert str(rule) == said
