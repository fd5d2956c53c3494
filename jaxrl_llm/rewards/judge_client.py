"""Requests to a judge at an OpenAI-compatible address, retried while that may help."""

import concurrent.futures
import contextlib
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.config.judges import JudgeConfig

_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 20.0  # between two attempts, doubled from one to the next
_RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
# Circuit breaker: after so many requests in a row that failed for good, none is sent for a while.
_BREAKER_FAILURES, _BREAKER_S = 8, 30.0


class JudgeError(Exception):
    """A judge gave no reply; the message says where and why."""


class JudgeClient(contextlib.AbstractContextManager["JudgeClient"]):
    """Sends requests of chat completions side by side; a context manager that ends its threads."""

    def __init__(self, config: JudgeConfig):
        self._config = config
        self._threads = concurrent.futures.ThreadPoolExecutor(config.max_requests, "judge")
        self._lock = threading.Lock()
        self._num_failures_in_a_row, self._closed_until = 0, 0.0

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def replies(self, bodies: Sequence[Mapping[str, Any]]) -> list[str | JudgeError]:
        """The text of the reply to each request, or why there is none."""
        return list(self._threads.map(self._reply, bodies))

    def _reply(self, body: Mapping[str, Any]) -> str | JudgeError:
        config = self._config
        with self._lock:
            if time.monotonic() < self._closed_until:
                message = f"{_BREAKER_FAILURES} requests in a row failed"
                return JudgeError(
                    f"{config.address}: {message}; asked again after {_BREAKER_S:g} s"
                )
        delay_s = _FIRST_DELAY_S
        for attempt in range(config.num_retries + 1):
            try:
                text = self._post(body)
            except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
                failure = JudgeError(f"{config.address}: {_error_text(error)}")
                status = error.code if isinstance(error, urllib.error.HTTPError) else None
                is_final = status is not None and status not in _RETRIED_STATUSES
                if is_final or attempt == config.num_retries:
                    break
                time.sleep(delay_s * random.uniform(0.75, 1.25))
                delay_s = min(2 * delay_s, _MAX_DELAY_S)
            else:
                with self._lock:
                    self._num_failures_in_a_row = 0
                return text
        with self._lock:
            self._num_failures_in_a_row += 1
            if self._num_failures_in_a_row >= _BREAKER_FAILURES:
                self._closed_until = time.monotonic() + _BREAKER_S
                self._num_failures_in_a_row = _BREAKER_FAILURES - 1  # one trial closes it again
        return failure

    def _post(self, body: Mapping[str, Any]) -> str:
        config, headers = self._config, {"Content-Type": "application/json"}
        if config.api_key_variable:
            headers["Authorization"] = f"Bearer {os.environ[config.api_key_variable]}"
        request = urllib.request.Request(
            f"{config.address.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=config.timeout_s) as reply:
            message = json.load(reply)["choices"][0]["message"]
        return str(message.get("content") or "")


def _error_text(error: Exception) -> str:
    """The error, with what the server says about it."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, urllib.error.HTTPError):
        with contextlib.suppress(OSError):
            text = f"status {error.code}: {error.read(500).decode(errors='replace')}"
    return text
