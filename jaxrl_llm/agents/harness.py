"""Runs a black-box agent for one row: a function, or a program in any language.

Called in the worker process of the episode. The agent gets the row and the address of its own
session on the run's HTTP server, and may ask it for samples by any of the server's protocols. It
returns a reward, or nothing, and reward functions judge what was sampled.
"""

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.agents.environments import await_if_needed, finite_reward
from jaxrl_llm.algorithms import lookup
from jaxrl_llm.processes import supervisor

API_KEY = "session"  # clients ask for one; the address is what identifies a session
ROW_VARIABLE = "JAXRL_LLM_ROW"
_MAX_VARIABLE_BYTES = 1 << 16  # Linux allows 128 KiB
_MAX_OUTPUT_BYTES = 1 << 16  # of each stream: the end is kept
_MAX_ERROR_CHARACTERS = 1000
_COUNT_INTERVAL_S = 0.25  # between two counts of processes
_FUNCTION_PATH = re.compile(r"[^\s:]+:[A-Za-z_]\w*")


class HarnessError(Exception):
    """A harness failed: it exited with an error, or returned no reward that can be read."""


def check_harness(harness: str) -> None:
    """Imports a function, or looks for the program of a command; raises if there is none."""
    if _FUNCTION_PATH.fullmatch(harness):
        lookup.resolve(harness, {}, "harness")
    elif shutil.which(program := shlex.split(harness)[0]) is None:
        raise FileNotFoundError(
            f"the program {program!r} is not found; name one of this host, or a function as"
            " 'path/file.py:function'"
        )


async def run_harness(
    harness: str,
    row: Mapping[str, Any],
    base_url: str,
    max_processes: int,
    sets_variables: bool,
    roles: Sequence[str] = (),
) -> float | dict[str, float] | None:
    """The reward that a harness gives for a row, None if it leaves that to reward functions.

    With `roles` it is one number for all of them, or a number for each by name.

    Args:
      harness: A function by import path or file, or a command line.
      base_url: The OpenAI API of the session, `http://HOST:PORT/session/ID/v1`.
      max_processes: Of a command, with its descendants.
      sets_variables: Whether a function finds the address in `os.environ` too; not in a process
        with other episodes.
      roles: Those of the run, `agent.roles`.

    Raises:
      HarnessError: If a command fails.
      TypeError, ValueError: If the reward is not a finite number.
      Exception: Whatever a function raises.
    """
    variables = session_variables(base_url)
    if not _FUNCTION_PATH.fullmatch(harness):
        return await _run_command(harness, row, variables, max_processes, roles)
    if sets_variables:
        os.environ.update(variables)
    function = lookup.resolve(harness, {}, "harness")
    return _reward(await await_if_needed(function(row, base_url)), roles)


def role_address(base_url: str, role: str) -> str:
    """The address at which one role of a session asks the policy.

    >>> role_address("http://127.0.0.1:80/session/0f/v1", "solver")
    'http://127.0.0.1:80/session/0f/role/solver/v1'
    """
    return f"{base_url.removesuffix('/v1')}/role/{role}/v1"


def ask_policy(
    base_url: str, messages: Sequence[Mapping[str, Any]], **fields: Any
) -> dict[str, Any]:
    """The policy's reply to a dialogue, as a message; an `urllib.error.HTTPError` if it is refused.

    Args:
      base_url: Of a session or of one role in it.
      fields: Further fields of the request, such as `max_tokens`.
    """
    body = {"model": "policy", "messages": messages, **fields}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{base_url}/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request) as reply:
        message: dict[str, Any] = json.load(reply)["choices"][0]["message"]
    return message


def session_variables(base_url: str) -> dict[str, str]:
    """The environment variables from which clients take the address of a session and its key."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": API_KEY,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),  # its clients add /v1/messages
        "ANTHROPIC_API_KEY": API_KEY,
    }


async def _run_command(
    command: str,
    row: Mapping[str, Any],
    variables: Mapping[str, str],
    max_processes: int,
    roles: Sequence[str],
) -> float | dict[str, float] | None:
    text = json.dumps(row, ensure_ascii=False, default=str)
    is_short = len(text.encode()) <= _MAX_VARIABLE_BYTES
    row_variable = {ROW_VARIABLE: text} if is_short else {}
    # The run's module path is not that of another interpreter.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory(prefix="harness-") as folder:
        own_variables = {"HOME": folder, "TMPDIR": folder, "BASE_URL": variables["OPENAI_BASE_URL"]}
        process = await asyncio.create_subprocess_exec(
            *shlex.split(command),
            env={**inherited, **own_variables, **variables, **row_variable},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin and process.stdout and process.stderr
        counter = asyncio.create_task(_limit_processes(process, max_processes))
        try:
            output, errors, _ = await asyncio.gather(
                _end_of(process.stdout), _end_of(process.stderr), _write(process.stdin, text)
            )
            code = await process.wait()
        finally:
            counter.cancel()
            _kill_all(process)
        num_processes = counter.result() if counter.done() and not counter.cancelled() else 0
    if num_processes:
        raise HarnessError(f"{num_processes} processes, above agent.max_harness_processes")
    if code:
        ending = errors.strip() or output.strip()
        message = f"{supervisor.exit_description(code)}: {ending[-_MAX_ERROR_CHARACTERS:]}"
        raise HarnessError(message)
    return _reward(_last_json(output), roles)


async def _write(stdin: asyncio.StreamWriter, text: str) -> None:
    with contextlib.suppress(ConnectionError):  # a program need not read it
        stdin.write(text.encode())
        await stdin.drain()
    stdin.close()


async def _end_of(stream: asyncio.StreamReader) -> str:
    """The last bytes of a stream as text."""
    kept = b""
    while block := await stream.read(1 << 16):
        kept = (kept + block)[-_MAX_OUTPUT_BYTES:]
    return kept.decode(errors="replace")


async def _limit_processes(process: asyncio.subprocess.Process, limit: int) -> int:
    """Kills a command with more than `limit` processes; returns their number."""
    while True:
        await asyncio.sleep(_COUNT_INTERVAL_S)
        if (count := 1 + len(supervisor.descendants(process.pid))) > limit:
            _kill_all(process)
            return count


def _kill_all(process: asyncio.subprocess.Process) -> None:
    """Kills a command and its descendants, those too that have left its group."""
    for pid in (process.pid, *supervisor.descendants(process.pid)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_json(output: str) -> Any:
    """The value of the last line, if that is a JSON object; else None."""
    lines = output.rstrip().rsplit("\n", 1)
    try:
        value = json.loads(lines[-1])
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _reward(value: Any, roles: Sequence[str]) -> float | dict[str, float] | None:
    """The reward in a harness's result: a number, `{"reward": number}`, or nothing.

    With roles the number may be a mapping of all roles to numbers.
    """
    if isinstance(value, Mapping):
        value = value.get("reward")
    if not isinstance(value, Mapping):
        return None if value is None else finite_reward(value)
    if set(value) != set(roles):
        rule = f"one number, or one for each of agent.roles {tuple(roles)}" if roles else "a number"
        raise ValueError(f"the reward names {sorted(map(str, value))}; give {rule}")
    return {role: finite_reward(value[role]) for role in roles}
