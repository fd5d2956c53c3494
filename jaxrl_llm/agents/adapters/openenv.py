"""Environments that OpenEnv serves over HTTP: `POST /reset` and `POST /step`."""

import json
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

from jaxrl_llm.agents.environments import Step

_TIMEOUT_S = 60.0
_SHOWN = ("message", "text", "content", "prompt", "result", "stdout")  # of an observation, if there


class Remote:
    """One episode of a served environment; a turn of the policy is one action."""

    def __init__(self, address: str):
        """`address` may name the field of the action that the turn becomes: `?field=message`."""
        parts = urlsplit(address)
        self._field = parse_qs(parts.query).get("field", ["message"])[0]
        self._address = urlunsplit((*parts[:2], parts.path.rstrip("/"), "", ""))

    def start(self, row: Mapping[str, Any]) -> str:
        answer = self._post("reset", {})
        return _text(answer.get("observation"))

    def step(self, message: Mapping[str, Any]) -> Step:
        answer = self._post("step", {"action": {self._field: message["content"]}})
        return Step(
            _text(answer.get("observation")),
            bool(answer.get("done")),
            float(answer.get("reward") or 0.0),
        )

    def _post(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._address}/{what}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            return json.loads(reply.read())


def _text(observation: Any) -> str:
    if isinstance(observation, Mapping):
        shown = [observation[name] for name in _SHOWN if isinstance(observation.get(name), str)]
        return "\n".join(shown) if shown else json.dumps(observation, ensure_ascii=False)
    return "" if observation is None else str(observation)


def make(address: str) -> Remote:
    """Returns an episode of a served environment; ValueError for what is no address."""
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"{address!r} is no address of a server; it begins with http://")
    return Remote(address)
