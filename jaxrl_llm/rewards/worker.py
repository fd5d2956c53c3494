"""A process that calls reward functions, one at a time, in its main thread; its messages.

`supervisor.py` starts it with a socket to the pool. It receives the names of the functions and its
limit of memory, answers whether it found them, then answers calls until the socket closes. It must
not import jax: the devices belong to the process that trains.

Messages are JSON, so that no process unpickles what another one sends. Those to the worker may also
hold what rows of a file can hold: bytes, dates, decimals, UUIDs, arrays (which arrive as lists),
and mappings with keys of any such kind.
"""

import asyncio
import base64
import contextlib
import datetime
import decimal
import inspect
import json
import math
import resource
import traceback
import uuid
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from jaxrl_llm.rewards.functions import RewardFunction, resolve

MAX_ANSWER_BYTES = 1 << 20
MAX_CALL_BYTES = 1 << 30
LARGEST_SCORE = float(np.finfo(np.float32).max)  # rewards are float32 on the devices

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
    """Sends a message to a worker; raises TypeError if it holds what no message can."""
    connection.send_bytes(json.dumps(_plain(message)).encode())


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


def _receive(connection: Connection) -> Any:
    return json.loads(connection.recv_bytes(MAX_CALL_BYTES), object_hook=_restored)


def _restored(found: dict[str, Any]) -> Any:
    kind = found.get(_KIND)
    if kind is None:
        return found
    if kind == "mapping":
        return {tuple(k) if isinstance(k, list) else k: entry for k, entry in found["value"]}
    return _KINDS[kind][2](found["value"])


def serve(connection: Connection) -> None:
    """Answers the pool until it closes the connection."""
    try:
        names, memory_gib = _receive(connection)
        if not math.isinf(memory_gib):
            num_bytes = int(memory_gib * 2**30)  # of address space
            resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
        functions = {name: resolve(name) for name in names}
    except ValueError as error:
        cause = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ else ""
        connection.send_bytes(_encoded({"error": f"{error}\n{cause}".strip()}))
        return
    connection.send_bytes(b"{}")
    while True:
        try:
            name, arguments = _receive(connection)
        except EOFError:
            return
        except Exception:
            answer = _encoded({"error": f"the row cannot be loaded:\n{traceback.format_exc()}"})
        else:
            answer = _answer(functions[name], arguments)
        connection.send_bytes(answer)


def _answer(function: RewardFunction, arguments: Mapping[str, Any]) -> bytes:
    try:
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return _encoded(checked_result(result))
    except BaseException as error:  # sys.exit() in a reward function must not end the worker
        text = "".join(traceback.format_exception(error))
        return _encoded({"error": f"{type(error).__name__}: {error}\n{text}"})


async def _awaited(result):
    return await result


def checked_result(result: Any) -> dict[str, Any]:
    """Returns `score` as a float and `details`, the other keys of a dict.

    TypeError if there is no number, ValueError if it is not finite in float32.
    """
    rule = "a reward function returns a finite number, or a dict with one as 'score'"
    details = dict(result) if isinstance(result, Mapping) else {"score": result}
    if "score" not in details:
        raise TypeError(f"returned a dict without 'score' (keys: {list(details)}); {rule}")
    score = details.pop("score")
    if isinstance(score, np.generic) or (isinstance(score, np.ndarray) and score.ndim == 0):
        score = score.item()
    if not isinstance(score, (bool, int, float)):
        raise TypeError(f"returned {type(score).__name__} {score!r:.100}; {rule}")
    if not -LARGEST_SCORE <= score <= LARGEST_SCORE:
        raise ValueError(f"returned {score!r:.100}; {rule}")
    return {"score": float(score), "details": details}


def _encoded(answer: Mapping[str, Any]) -> bytes:
    """Returns an answer as bytes that the pool takes; a longer one becomes an error."""
    data = json.dumps(answer, default=_listed).encode()
    if len(data) <= MAX_ANSWER_BYTES:
        return data
    if "error" in answer:
        return json.dumps({"error": f"{answer['error'][: MAX_ANSWER_BYTES // 16]} ..."}).encode()
    error = f"returned {len(data)} bytes beside the score; at most {MAX_ANSWER_BYTES} are taken"
    return json.dumps({"error": error}).encode()


def _listed(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    rule = "beside the score it may hold what JSON can: numbers, texts, lists and dicts"
    raise TypeError(f"returned a dict with a {type(value).__name__}; {rule}")


def main(connection_fd: int) -> None:
    """Serves on a socket to the pool until that has gone."""
    with contextlib.suppress(EOFError, ConnectionError):
        serve(Connection(connection_fd))
