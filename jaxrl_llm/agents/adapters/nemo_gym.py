"""Resources servers of NeMo Gym: their tools and their verification, over HTTP.

A harness (`agent.harness="jaxrl_llm.agents.adapters.nemo_gym:solve"`): the policy is asked by the
Responses API, in which the tasks are written. `python -m jaxrl_llm.agents.adapters.nemo_gym
ADDRESS TASKS.jsonl` prints the rows of a run. No package is needed; the servers run elsewhere.
"""

import http.cookiejar
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_TIMEOUT_S = 300.0  # of a request; the episode has `agent.harness_timeout_s`
_MAX_STEPS = 64
_OWN_COLUMNS = ("resources_server", "task")


class ResourcesServerError(Exception):
    """A resources server cannot be used; the message says which, and its answer."""


class ResourcesServer:
    """A session with a resources server: the cookies that it sets are the session."""

    def __init__(self, address: str):
        """ValueError if `address` is no http address."""
        if not address.startswith(("http://", "https://")):
            raise ValueError(f"{address!r} is no address of a server; it must begin with http://")
        self._address = address.rstrip("/")
        cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        self._opener = urllib.request.build_opener(cookies)

    def seed(self, task: Mapping[str, Any]) -> None:
        """Begins the session of a task; ResourcesServerError if the server refuses it."""
        self._checked("seed_session", task)

    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """The text that a tool answers; an error of the server is an answer too."""
        return self._post(tool, arguments)[1]

    def verify(self, task: Mapping[str, Any], response: Mapping[str, Any]) -> float:
        """The reward of a response; ResourcesServerError if the server gives no number."""
        answer = self._checked("verify", {**task, "response": response})
        reward = answer.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, (int, float)):
            raise ResourcesServerError(
                f"{self._address}/verify: no number as 'reward' in {answer!r:.300}"
            )
        return float(reward)

    def _checked(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        status, text = self._post(path, body)
        if status >= 400:
            raise ResourcesServerError(f"{self._address}/{path}: status {status}: {text:.500}")
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if answer is not None and not isinstance(answer, dict):
            raise ResourcesServerError(f"{self._address}/{path}: no JSON object: {text:.300}")
        return answer or {}

    def _post(self, path: str, body: Mapping[str, Any]) -> tuple[int, str]:
        try:
            return _post_json(f"{self._address}/{path}", body, self._opener)
        except OSError as error:
            message = f"{self._address}/{path}: {type(error).__name__}: {error}"
            raise ResourcesServerError(f"{message}; start the server, or correct it") from error


def solve(row: Mapping[str, Any], base_url: str) -> float:
    """Plays a task: the policy calls the server's tools until it answers with a text alone.

    The course is that of NeMo Gym's `simple_agent`: a session is seeded with the task, each call
    is a request to the tool's path, and the whole output is verified. An output that was cut ends
    the episode.

    Args:
      row: `resources_server`, its address, and `task`, a line of a NeMo Gym data set:
        `responses_create_params` and what else the server reads.

    Raises:
      ResourcesServerError: If the server fails.
      urllib.error.HTTPError: If the policy's server refuses a request, as beyond the tokens.
    """
    task = row["task"]
    server = ResourcesServer(row["resources_server"])
    server.seed(task)
    params = task["responses_create_params"]
    output: list[dict[str, Any]] = []
    for _ in range(_MAX_STEPS):
        body = {**params, "model": "policy", "input": [*input_items(params), *output]}
        _, text = _post_json(f"{base_url}/responses", body, raises=True)
        response = json.loads(text)
        output += response["output"]
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        if response.get("status") == "incomplete" or not calls:
            break
        output += [_call_output(server, call) for call in calls]
    return server.verify(task, {**response, "output": output})


def _call_output(server: ResourcesServer, call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(call["arguments"] or "{}")
        if not isinstance(arguments, dict):
            raise ValueError("no JSON object")
    except ValueError as error:
        answer = f"Error: the arguments of {call['name']} cannot be read: {error}"
    else:
        answer = server.call(call["name"], arguments)
    return {"type": "function_call_output", "call_id": call["call_id"], "output": answer}


def input_items(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The input of a task as items; a text is a message of the user."""
    items = params["input"]
    return [{"role": "user", "content": items}] if isinstance(items, str) else list(items)


def _post_json(
    url: str,
    body: Mapping[str, Any],
    opener: urllib.request.OpenerDirector | None = None,
    raises: bool = False,
) -> tuple[int, str]:
    """The (status, text) of a reply; errors are raised if `raises`."""
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers)
    opener = opener or urllib.request.build_opener()
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as reply:
            return reply.status, reply.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        if raises:
            raise
        return error.code, error.read().decode(errors="replace")


def task_rows(address: str, lines: Sequence[str], where: str = "") -> Iterator[dict[str, Any]]:
    """Yields the rows of tasks of a NeMo Gym data set; ValueError if a line is none."""
    ResourcesServer(address)
    for number, line in enumerate(lines, start=1):
        task = json.loads(line)
        params = task.get("responses_create_params") if isinstance(task, dict) else None
        if not isinstance(params, dict) or not params.get("input"):
            rule = "a task has responses_create_params with input"
            raise ValueError(f"{where} line {number}: {rule}, got {line:.100}")
        prompt = [
            {"role": item["role"], "content": _content_text(item.get("content"))}
            for item in input_items(params)
            if "role" in item
        ]
        agent = task.get("agent_ref") or {}
        yield {
            "data_source": str(agent.get("name") or "nemo_gym"),
            "prompt": prompt,
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"resources_server": address, "task": task},
        }


def _content_text(content: Any) -> str:
    """The text of a message's content, of which the row shows no more; the task has all."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or () if isinstance(part, Mapping))


if __name__ == "__main__":  # ADDRESS TASKS.jsonl
    address, path = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        for row in task_rows(address, [line for line in file if line.strip()], path):
            print(json.dumps(row))
