"""Rows sent from process to process are the rows."""

import dataclasses
import datetime
import decimal
import math

import pytest

from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.rows import row_json
from jaxrl_llm.types import Example, PreferencePair, Prompt, PromptImage

EXAMPLE = Example((1, 2, 3), (False, True, True))
VALUES = {
    "number": 3,
    "text": "ü\n",
    "nothing": None,
    "infinite": math.inf,
    "list": [1, [2.5, {"a": []}]],
    "bytes": b"\x00\xff",
    "decimal": decimal.Decimal("1.20"),
    "time": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC),
    "date": datetime.date(2026, 1, 2),
    "of day": datetime.time(3, 4, 5),
    "length": datetime.timedelta(days=-3, microseconds=7),
    "dict": {"bytes of a row": "not tagged", "other": 1},
}


def test_rows_round_trip():
    prompt = Prompt((4, 5), "text", "source", decimal.Decimal(3), VALUES, 7)
    picture = PromptImage(b"\x89PNG", "a digest", (2, 3), 4)
    seen = Example((9,) * 12, (True,) * 12, (picture,))
    rows = {
        0: prompt,
        2: dataclasses.replace(prompt, images=(picture, picture)),
        5: EXAMPLE,
        6: PreferencePair(EXAMPLE, seen._replace(desirable=False)),
        8: None,
    }
    found = row_json.deserialize(row_json.serialize(rows))
    assert found == rows
    assert [type(row) for row in found.values()] == [
        Prompt,
        Prompt,
        Example,
        PreferencePair,
        type(None),
    ]
    assert found[0].tokens == (4, 5) and type(found[6].rejected) is Example


def test_other_values_are_refused():
    prompt = Prompt((4,), "", "", None, {"set": {1}}, 0)
    with pytest.raises(DataError, match=r"holds \{1\} of type set, which processes cannot send"):
        row_json.serialize({0: prompt})
