"""Messages between processes: any text of a tool arrives as a text that UTF-8 holds."""

import datetime
import json

import pytest

from jaxrl_llm.processes.messages import from_json_text, to_json_text


def nested(depth):
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


def test_halves_of_surrogate_pairs_arrive_as_replacement_characters():
    date = datetime.date(2024, 2, 29)
    sent = {"a\ud83d": ["b\udc00", "\ud83d\ude00", "\U0001f600", r"\ud83d"], "when": date, "n": 1}
    got = {"a\ufffd": ["b\ufffd", "\U0001f600", "\U0001f600", r"\ud83d"], "when": date, "n": 1}
    assert from_json_text(to_json_text(sent)) == got
    assert from_json_text(b'{"a": "\\uD83D"}') == {"a": "\ufffd"}  # as other writers spell it
    assert from_json_text(to_json_text({("x", 1): b"\xff"})) == {("x", 1): b"\xff"}


def test_malformed_messages_raise_type_or_value_errors():
    with pytest.raises(TypeError, match="nested too deep"):
        to_json_text(nested(5000))
    for text in ("[" * 100_000, b'"\xed\xa0\xbd"', b"\xff", '{"a": "\\ud83d"' + "[" * 5000):
        with pytest.raises(ValueError):
            from_json_text(text)
    assert json.dumps(from_json_text(to_json_text(nested(60)))) == json.dumps(nested(60))
