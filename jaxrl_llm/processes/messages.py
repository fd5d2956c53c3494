"""Messages between processes, as JSON: no process unpickles what another one sends.

They hold what rows of a file hold: beside JSON's own values bytes, dates, decimals, UUIDs, arrays
(which arrive as lists), and mappings with keys of any such kind.
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
# Kind -> (class, to what JSON holds, back); a datetime is a date too.
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
    """Sends a message; raises TypeError if it holds what no message can."""
    connection.send_bytes(as_text(message).encode())


def receive(connection: Connection) -> Any:
    """Returns the next message; raises EOFError if the other side has closed the connection."""
    return from_text(connection.recv_bytes(MAX_BYTES))


def as_text(message: Any) -> str:
    """Returns a message as JSON; raises TypeError if it holds what no message can."""
    try:
        return json.dumps(_plain(message))
    except RecursionError as error:
        raise TypeError("lists and mappings are nested too deep for a message") from error


def from_text(text: str | bytes) -> Any:
    """Returns what `as_text` was given, but for tuples and arrays, which are lists.

    Halves of surrogate pairs become U+FFFD: tools, environments and rewards may send any text.
    Raises ValueError if the text is no message.
    """
    text = text if isinstance(text, str) else text.decode()
    try:
        if "\\ud" in text.lower():
            text = json.dumps(clean_json(json.loads(text), sys.getrecursionlimit()))
        return json.loads(text, object_hook=_restored)
    except RecursionError as error:
        raise ValueError("a message whose brackets are nested too deep") from error


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _KIND not in value:
            return {key: _plain(entry) for key, entry in value.items()}
        pairs = [[_plain(key), _plain(entry)] for key, entry in value.items()]
        return {_KIND: "mapping", "value": pairs}
    for kind, (cls, to_json, _) in _KINDS.items():
        if isinstance(value, cls):
            return {_KIND: kind, "value": to_json(value)}
    raise TypeError(f"a {type(value).__name__} cannot be sent to a process")


def _restored(found: dict[str, Any]) -> Any:
    kind = found.get(_KIND)
    if kind is None:
        return found
    if kind == "mapping":
        return {tuple(k) if isinstance(k, list) else k: entry for k, entry in found["value"]}
    return _KINDS[kind][2](found["value"])
