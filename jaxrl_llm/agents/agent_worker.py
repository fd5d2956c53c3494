"""The worker process of an episode's tools and environment, and its fork server.

The pool starts `main` once on each host. It imports the run's tools and environments, then forks a
worker for each episode, or for several of them. A fork takes milliseconds and shares memory, and
workers cannot see each other's state. Each worker has its own supervisor.
"""

import asyncio
import contextlib
import inspect
import json
import math
import os
import random
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from jaxrl_llm.agents import builtin_tools, environments, message_content, tool_schema, tools
from jaxrl_llm.agents import harness as harness_lib
from jaxrl_llm.agents.environments import Environment, await_if_needed
from jaxrl_llm.agents.episode_isolation import (
    BlockedError,
    RngScopedAwaitable,
    RngState,
    StallWatchdog,
)
from jaxrl_llm.processes import supervisor
from jaxrl_llm.processes.messages import receive, send

_MAX_ERROR_CHARACTERS = 2000
_END_TIMEOUT_S = 1.0  # to close an environment; its supervisor kills a process after END_SOON_S

_RequestTask = asyncio.Task[dict[str, Any] | None]


def main(connection_fd: int) -> None:
    """Forks workers until the pool closes its socket; also returns in each finished worker."""
    connection = Connection(connection_fd)
    with contextlib.suppress(EOFError, ConnectionError):
        settings = receive(connection)
        try:
            tools_by_name = {name: tools.resolve_tool(name) for name in settings["tools"]}
            if settings["harness"]:
                harness_lib.check_harness(settings["harness"])
            for path, _ in settings["environments"].values():
                environments.environment_factory(path)
            if settings["corpus"]:
                builtin_tools.bm25_index(settings["corpus"])
        except BaseException as error:  # the import of a user's module may raise anything
            send(connection, {"error": _error_text(error)})
            return
        send(connection, {})
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody reaps the supervisors
        with socket.socket(fileno=os.dup(connection_fd)) as own_socket:
            while True:
                data, fds, _, _ = socket.recv_fds(own_socket, 1, 2)
                if not data:
                    with contextlib.suppress(ChildProcessError):
                        os.wait()  # for all workers, as none is reaped
                    return
                if os.fork():
                    for fd in fds:
                        os.close(fd)
                    continue
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                connection_to_pool, alive_fd = fds
                os.dup2(alive_fd, 0)
                os.close(alive_fd)
                connection.close()
                own_socket.close()
                supervisor.main(connection_to_pool)
                _WorkerServer(Connection(connection_to_pool), settings, tools_by_name).serve()
                return


class _WorkerServer:
    """Serves one worker process: describes tools, or runs requests of episodes as coroutines."""

    def __init__(self, connection: Connection, settings: Mapping[str, Any], tools_by_name):
        self._connection, self._settings, self._tools_by_name = connection, settings, tools_by_name
        self._episodes: dict[int, _EpisodeWorker] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # strong references, the loop has weak ones
        self._request_tasks: dict[int, _RequestTask] = {}  # by episode number
        # None: the process has one episode, and the pool kills it at the time limit.
        self._limit_s: float | None = settings["limit_s"]
        self._watchdog: StallWatchdog | None = None
        if not math.isinf(gib := settings["memory_gib"]):
            num_bytes = int(gib * 2**30)
            resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))

    def serve(self) -> None:
        """Answers requests, `{"do": METHOD, ...}`, until the pool closes the connection."""
        self._loop = asyncio.new_event_loop()
        self._loop.add_reader(self._connection.fileno(), self._receive_request)
        self._loop.run_forever()
        for failure in self._loop.run_until_complete(self._end_all()):
            print(f"an environment does not close: {failure['text']}", file=sys.stderr)

    async def _end_all(self) -> list[dict[str, Any]]:
        # No request is answered any more.
        tasks, self._request_tasks = list(self._request_tasks.values()), {}
        for task in tasks:
            task.cancel()
        failures = await asyncio.gather(*map(_end_failure, self._episodes.values()))
        return [failure for failure in failures if failure]

    def _receive_request(self) -> None:
        try:
            request = receive(self._connection)
        except (EOFError, ConnectionError):
            self._loop.remove_reader(self._connection.fileno())
            self._loop.stop()
            return
        task = self._loop.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: dict[str, Any]) -> None:
        request_number, episode_number, method = (
            request.pop(name) for name in ("number", "session", "do")
        )
        if method == "end":
            if task := self._request_tasks.pop(episode_number, None):
                task.cancel()
            if episode := self._episodes.pop(episode_number, None):
                await _end_failure(episode)
            return
        if method == "start" and self._limit_s and not self._watchdog:
            self._watchdog = StallWatchdog(self._loop, self._limit_s)
        if method == "start" or episode_number not in self._episodes:
            self._episodes[episode_number] = _EpisodeWorker(self._settings, self._tools_by_name)
        start_time, episode = time.monotonic(), self._episodes[episode_number]
        coroutine = getattr(episode, method)(**request)
        task = self._request_tasks[episode_number] = self._loop.create_task(
            _result_or_problem(coroutine, episode.rng_state)
        )
        answer = await self._within_limit(task)
        if self._request_tasks.get(episode_number) is not task:  # the episode has been ended
            return
        del self._request_tasks[episode_number]
        if answer is None:
            task.cancel()
            del self._episodes[episode_number]
            answer = {"problem": "timeout", "text": f"no answer within {self._limit_s:g} s"}
            if failure := await _end_failure(episode):
                answer["end_problem"] = failure["problem"]
        answer |= {"number": request_number, "seconds": time.monotonic() - start_time}
        try:
            send(self._connection, answer)
        except OSError:  # the pool has closed
            pass
        except (TypeError, ValueError) as error:
            text = _error_text(error)
            send(self._connection, {**_problem(text), "number": request_number, "seconds": 0.0})

    async def _within_limit(self, task: _RequestTask) -> dict[str, Any] | None:
        """The result of a task, None if it exceeds the time limit."""
        if self._watchdog is None:
            return await task
        left_s = self._limit_s
        while True:
            held_s = self._watchdog.stalled_s
            done, _ = await asyncio.wait([task], timeout=left_s)
            if done:
                return task.result()
            left_s = self._watchdog.stalled_s - held_s  # time that other episodes blocked the loop
            if left_s <= 0.0:
                return None


async def _result_or_problem(coroutine: Coroutine[Any, Any, Any], rng_state: RngState) -> Any:
    """The result of a coroutine, or a problem if it raised; None if it blocked the event loop."""
    try:
        return await RngScopedAwaitable(coroutine, rng_state)
    except BlockedError:
        return None
    except BaseException as error:  # sys.exit() in a tool must not end its episode
        return _problem(_error_text(error))


async def _end_failure(episode: "_EpisodeWorker") -> dict[str, Any]:
    """Ends an episode within a time limit; returns the problem, {} if there is none."""
    coroutine = _result_or_problem(episode.end(), episode.rng_state)
    task = asyncio.get_running_loop().create_task(coroutine)
    done, _ = await asyncio.wait([task], timeout=_END_TIMEOUT_S)
    if not done:
        task.cancel()
    failure = task.result() if done else None
    if failure is None:
        return {"problem": "timeout", "text": f"not within {_END_TIMEOUT_S:g} s"}
    return failure


def _problem(text: str) -> dict[str, Any]:
    return {"problem": "exception", "text": text}


class _EpisodeWorker:
    """The tools and environment of one episode."""

    def __init__(self, settings: Mapping[str, Any], tools_by_name: Mapping[str, Any]):
        self._settings, self._tools_by_name = settings, tools_by_name
        self._environment = Environment(None)
        self._tools: dict[str, tools.Tool] = {}
        self.rng_state = RngState()

    def _tool_functions(
        self, names: Sequence[str], kwargs: Mapping[str, Any]
    ) -> dict[str, tools.Tool]:
        functions: dict[str, tools.Tool] = {}
        for name in names:
            aliases = (name, getattr(self._tools_by_name[name], "__name__", ""))
            tool_kwargs = dict(next((kwargs[alias] for alias in aliases if kwargs.get(alias)), {}))
            if name == "search":
                tool_kwargs["create_kwargs"] = {"corpus": self._settings["corpus"]}
            functions |= tools.tool_functions(self._tools_by_name[name], tool_kwargs)
        return functions

    async def describe(self) -> dict[str, Any]:
        """The schemas of each tool of the config and of each environment's tools."""
        tool_schemas, environment_schemas = {}, {}
        for name in self._settings["tools"]:
            functions = self._tool_functions([name], {})
            tool_schemas[name] = [tool_schema.schema(function) for function in functions.values()]
        for name, (path, address) in self._settings["environments"].items():
            environment = environments.make_environment(path, address)
            await _connect(environment)
            methods = environment.tools.values()
            environment_schemas[name] = [tool_schema.schema(method) for method in methods]
            await environment.close()
        return {"tools": tool_schemas, "environments": environment_schemas}

    async def start(
        self,
        environment: str,
        names: Sequence[str],
        kwargs: Mapping[str, Any],
        row: Mapping[str, Any],
        seed: int,
    ) -> dict[str, Any]:
        """Creates tools and environment; returns the environment's first messages."""
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed % 2**32)
        self._tools = self._tool_functions(names, kwargs)
        if environment:
            self._environment = environments.make_environment(
                *self._settings["environments"][environment]
            )
            await _connect(self._environment)
            self._tools |= self._environment.tools
        return {"messages": self._json_messages(await self._environment.start(row))}

    async def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Calls a tool; returns its result as message content."""
        tool = self._tools[name]
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            return {"problem": "arguments", "text": f"{name}: {error}"}
        except ValueError:  # a callable without a signature
            pass
        try:
            arguments = tool_schema.convert_arguments(tool, arguments)
        except ValueError as error:
            return {"problem": "arguments", "text": f"{name}: {error}"}
        return {
            "text": message_content.message_content(
                await await_if_needed(tool(**arguments)), self._truncated
            )
        }

    async def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the environment's answer to a turn."""
        step = await self._environment.step(message)
        reward = environments.finite_reward(step.reward)
        return {
            "messages": self._json_messages(step.messages),
            "done": bool(step.done),
            "reward": reward,
        }

    async def reward(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The reward of the whole episode."""
        return {"reward": await self._environment.reward(messages)}

    async def solve(self, row: Mapping[str, Any], base_url: str) -> dict[str, Any]:
        """Runs the harness on a row; returns its reward, None if it gives none."""
        settings = self._settings
        reward = await harness_lib.run_harness(
            settings["harness"],
            row,
            base_url,
            settings["max_harness_processes"],
            sets_variables=settings["limit_s"] is None,
            roles=settings["roles"],
        )
        return {"reward": reward}

    async def end(self) -> dict[str, Any]:
        """Closes the environment."""
        await self._environment.close()
        return {}

    def _json_messages(self, messages) -> list[dict[str, Any]]:
        """The messages as plain JSON values, their contents truncated to the limit."""
        json_messages = [
            {
                **message,
                "content": message_content.message_content(message["content"], self._truncated),
            }
            for message in messages
        ]
        return json.loads(json.dumps(json_messages))

    def _truncated(self, text: str) -> str:
        settings = self._settings
        return tools.truncate_text(text, settings["max_result_characters"], settings["cut_results"])


async def _connect(environment: Environment) -> None:
    """Connects an adapter, which then lists its tools."""
    if connect := getattr(environment.wrapped, "connect", None):
        await await_if_needed(connect())


def _error_text(error: BaseException) -> str:
    """The error for the model and the log, with the line of user code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    user = [f for f in frames if "/jaxrl_llm/" not in f.filename and "asyncio" not in f.filename]
    where = f" (line {user[-1].lineno}, {user[-1].line})" if user and user[-1].line else ""
    return f"{type(error).__name__}: {error}{where}"[:_MAX_ERROR_CHARACTERS]
