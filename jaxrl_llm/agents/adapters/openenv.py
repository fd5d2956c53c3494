"""Client of OpenEnv environments over HTTP: `POST /reset` and `POST /step`."""

import json
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

from jaxrl_llm.agents.environments import Step

_TIMEOUT_S = 60.0
# Fields of an observation that are shown to the policy.
_TEXT_FIELDS = ("message", "text", "content", "prompt", "result", "stdout")


class OpenEnvClient:
    """One episode of a served environment; a turn of the policy is one action."""

    def __init__(self, address: str):
        """`address` may name the field of the action that holds the turn: `?field=message`."""
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

    def _post(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._address}/{endpoint}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return json.loads(response.read())


def _text(observation: Any) -> str:
    if isinstance(observation, Mapping):
        texts = [
            observation[name] for name in _TEXT_FIELDS if isinstance(observation.get(name), str)
        ]
        return "\n".join(texts) if texts else json.dumps(observation, ensure_ascii=False)
    return "" if observation is None else str(observation)


def make(address: str) -> OpenEnvClient:
    """Creates an episode of a served environment; ValueError if `address` is not a URL."""
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"{address!r} is not a server address; it must start with http://")
    return OpenEnvClient(address)
