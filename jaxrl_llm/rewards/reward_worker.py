"""Worker process that calls reward functions, one at a time, in its main thread.

The pool starts it (`processes/child.py`) with a socket. It receives the names of the functions and
its memory limit, reports whether it found them, then answers calls until the socket closes. It must
not import jax: the devices belong to the training process.
"""

import asyncio
import contextlib
import inspect
import json
import math
import resource
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from jaxrl_llm.processes.messages import from_json_text, receive, send, to_json_text
from jaxrl_llm.rewards.functions import (
    RewardFunction,
    resolve,
    truth_check,
    truth_problems,
)
from jaxrl_llm.text import clean_json

MAX_ANSWER_BYTES = 1 << 20
LARGEST_SCORE = float(np.finfo(np.float32).max)  # rewards are float32 on the devices


def serve(connection: Connection) -> None:
    """Answers the pool until it closes the connection."""
    try:
        names, memory_gib = receive(connection)
        if not math.isinf(memory_gib):
            num_bytes = int(memory_gib * 2**30)  # of address space
            resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
        functions = {name: resolve(name) for name in names}
    except ValueError as error:
        cause = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ else ""
        connection.send_bytes(_encoded({"error": f"{error}\n{cause}".strip()}))
        return
    send(connection, {})
    while True:
        request = receive(connection)
        number = {"number": request["number"]}
        try:
            name, arguments = from_json_text(request["call"])
        except Exception:
            text = f"the row cannot be loaded:\n{traceback.format_exc()}"
            connection.send_bytes(_encoded({**number, "error": text}))
        else:
            connection.send_bytes(_answer(number, functions[name], arguments))


def _answer(
    number: Mapping[str, int], function: RewardFunction, arguments: Mapping[str, Any]
) -> bytes:
    try:
        if "ground_truths" in arguments:
            problems = truth_problems(function, arguments["ground_truths"])
            texts = {str(index): problem[:500] for index, problem in problems.items()}
            has_check = truth_check(function) is not None
            details = {"problems": texts, "has_check": has_check}
            return _encoded({**number, "score": 0.0, "details": details})
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(_await_result(result))
        return _encoded({**number, **checked_result(result)})
    except BaseException as error:  # sys.exit() in a reward function must not end the worker
        text = "".join(traceback.format_exception(error))
        return _encoded({**number, "error": f"{type(error).__name__}: {error}\n{text}"})


async def _await_result(result):
    return await result


def checked_result(result: Any) -> dict[str, Any]:
    """The result of a reward function as `score`, a float, and `details`, its other keys.

    TypeError if there is no numeric score, ValueError if it is not finite in float32.
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
    """An answer as JSON bytes for the pool; one over the size limit becomes an error.

    Lone surrogates become U+FFFD. ValueError if it is nested too deep.
    """
    text = json.dumps(answer, default=_to_list)
    data = to_json_text(clean_json(json.loads(text))).encode()
    if len(data) <= MAX_ANSWER_BYTES:
        return data
    error = f"returned {len(data)} bytes beside the score; at most {MAX_ANSWER_BYTES} are allowed"
    if "error" in answer:
        error = f"{answer['error'][: MAX_ANSWER_BYTES // 16]} ..."
    return to_json_text({"error": error, "number": answer.get("number", 0)}).encode()


def _to_list(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    rule = "beside the score it may hold what JSON can: numbers, texts, lists and dicts"
    raise TypeError(f"returned a dict with a {type(value).__name__}; {rule}")


def main(connection_fd: int) -> None:
    """Serves the pool on a socket until the pool is gone."""
    with contextlib.suppress(EOFError, ConnectionError):
        serve(Connection(connection_fd))
