"""Values as JSON that come back as they were: tuples, and mappings with keys that are no texts."""

import json
from typing import Any

_TUPLE, _ITEMS = "__tuple__", "__items__"


def to_typed_json(value: Any) -> str:
    """A value of lists, tuples, mappings, texts, numbers and None as JSON text.

    Raises:
      TypeError: If it holds anything else.

    >>> from_typed_json(to_typed_json({"grid": ((1, 2), (3, 4)), "seen": {0: [True, None]}}))
    {'grid': ((1, 2), (3, 4)), 'seen': {0: [True, None]}}
    """
    return json.dumps(_to_json(value))


def from_typed_json(text: str) -> Any:
    """The value that `to_typed_json` encoded."""
    return _from_json(json.loads(text))


def _to_json(value: Any) -> Any:
    if hasattr(value, "item") and not isinstance(value, (list, tuple, dict)):
        value = value.item()  # a numpy scalar
    if isinstance(value, tuple):
        return {_TUPLE: [_to_json(each) for each in value]}
    if isinstance(value, list):
        return [_to_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    is_plain = all(isinstance(key, str) for key in value) and not {_TUPLE, _ITEMS} & {*value}
    if is_plain:
        return {key: _to_json(each) for key, each in value.items()}
    return {_ITEMS: [[_to_json(key), _to_json(each)] for key, each in value.items()]}


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(_from_json(each) for each in value[_TUPLE])
    if _ITEMS in value:
        return {_from_json(key): _from_json(each) for key, each in value[_ITEMS]}
    return {key: _from_json(each) for key, each in value.items()}
