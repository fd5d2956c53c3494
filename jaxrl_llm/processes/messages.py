"""Messages between processes as JSON, so that no process unpickles data of another one.

They can hold all values of a data row: besides JSON's own, bytes, dates, decimals, UUIDs, arrays
(which arrive as lists), and mappings with keys of these types.
"""

import base64
import datetime
import decimal
import json
import sys
import uuid
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from jaxrl_llm.text import clean_json

MAX_BYTES = 1 << 30

_KIND = "__kind__"
# Kind -> (class, encoder to JSON values, decoder); datetime before date, its base class.
_KINDS: Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    **{
        cls.__name__: (cls, lambda v: v.isoformat(), cls.fromisoformat)
        for cls in (datetime.datetime, datetime.date, datetime.time)
    },
    "timedelta": (
        datetime.timedelta,
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda v: datetime.timedelta(*v),
    ),
    "bytes": (bytes, lambda v: base64.b64encode(v).decode(), base64.b64decode),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "uuid": (uuid.UUID, str, uuid.UUID),
}


def send(connection: Connection, message: Any) -> None:
    """Sends a message; raises TypeError if a value cannot be encoded."""
    connection.send_bytes(to_json_text(message).encode())


def receive(connection: Connection, max_bytes: int = MAX_BYTES) -> Any:
    """Receives the next message; raises EOFError if the other side has closed the connection.

    OSError if it has more than `max_bytes`, ValueError if it is not a message.
    """
    return from_json_text(connection.recv_bytes(max_bytes))


def to_json_text(message: Any) -> str:
    """Encodes a message as JSON; raises TypeError if a value cannot be encoded."""
    try:
        return json.dumps(_to_json_value(message))
    except RecursionError as error:
        raise TypeError("lists and mappings are nested too deep for a message") from error


def from_json_text(text: str | bytes) -> Any:
    """Decodes a message of `to_json_text`; tuples and arrays become lists.

    Lone surrogates become U+FFFD: tools, environments and rewards may send any text. Raises
    ValueError if the text is not a message.
    """
    text = text if isinstance(text, str) else text.decode()
    try:
        if "\\ud" in text.lower():
            text = json.dumps(clean_json(json.loads(text), sys.getrecursionlimit()))
        return json.loads(text, object_hook=_from_json_object)
    except RecursionError as error:
        raise ValueError("a message whose brackets are nested too deep") from error


def _to_json_value(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_to_json_value(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _KIND not in value:
            return {key: _to_json_value(entry) for key, entry in value.items()}
        pairs = [[_to_json_value(key), _to_json_value(entry)] for key, entry in value.items()]
        return {_KIND: "mapping", "value": pairs}
    for kind, (cls, to_json, _) in _KINDS.items():
        if isinstance(value, cls):
            return {_KIND: kind, "value": to_json(value)}
    raise TypeError(f"a {type(value).__name__} cannot be sent to a process")


def _from_json_object(json_object: dict[str, Any]) -> Any:
    kind = json_object.get(_KIND)
    if kind is None:
        return json_object
    if kind == "mapping":
        return {
            tuple(key) if isinstance(key, list) else key: entry
            for key, entry in json_object["value"]
        }
    return _KINDS[kind][2](json_object["value"])
