"""The process in which an episode's tools and environment live, and the one that makes these.

The pool starts `main` once on each host. It imports what the run's tools and environments need, and
from then on makes a copy of itself (a fork) for each episode, or for a number of them: that takes
milliseconds, shares memory, and no copy sees what another one did. Each has its own supervisor.
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

from jaxrl_llm.agents import contents, environments, ready, tool_schema, tools
from jaxrl_llm.agents.coroutines import BlockedError, Own, Randomness, Watch
from jaxrl_llm.agents.environments import Environment, settled
from jaxrl_llm.processes import supervisor
from jaxrl_llm.processes.messages import receive, send

_MAX_TRACE = 2000  # characters of a traceback

_Work = asyncio.Task[dict[str, Any] | None]


def main(connection_fd: int) -> None:
    """Serves a pool until that has gone; returns in the copies, too, when their work is done."""
    connection = Connection(connection_fd)
    with contextlib.suppress(EOFError, ConnectionError):
        settings = receive(connection)
        try:
            found = {name: tools.found(name) for name in settings["tools"]}
            for path, _ in settings["environments"].values():
                environments.found(path)
            if settings["corpus"]:
                ready.index(settings["corpus"])
        except BaseException as error:  # whatever a user's module does when it is imported
            send(connection, {"error": _described(error)})
            return
        send(connection, {})
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the supervisors
        with socket.socket(fileno=os.dup(connection_fd)) as own:
            while True:
                data, fds, _, _ = socket.recv_fds(own, 1, 2)
                if not data:
                    return
                if os.fork():
                    for fd in fds:
                        os.close(fd)
                    continue
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                theirs, alive = fds
                os.dup2(alive, 0)
                os.close(alive)
                connection.close()
                own.close()
                supervisor.main(theirs)
                _Process(Connection(theirs), settings, found).serve()
                return


class _Process:
    """What one copy does: describes tools, or plays the other side of episodes, as coroutines."""

    def __init__(self, connection: Connection, settings: Mapping[str, Any], found):
        self._connection, self._settings, self._found = connection, settings, found
        self._episodes: dict[int, _Episode] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself does not keep them
        self._works: dict[int, _Work] = {}  # of episodes, by their number
        # A process of one episode is ended by the pool when its time is up.
        self._limit_s: float | None = settings["limit_s"]
        self._watch: Watch | None = None
        if not math.isinf(gib := settings["memory_gib"]):
            num_bytes = int(gib * 2**30)
            resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))

    def serve(self) -> None:
        """Answers requests, `{"do": a method, ...}`, until the pool closes the connection."""
        self._loop = asyncio.new_event_loop()
        self._loop.add_reader(self._connection.fileno(), self._read)
        self._loop.run_forever()
        for episode in self._episodes.values():
            with contextlib.suppress(Exception):
                self._loop.run_until_complete(episode.end())

    def _read(self) -> None:
        try:
            request = receive(self._connection)
        except (EOFError, ConnectionError):
            self._loop.stop()
            return
        task = self._loop.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: dict[str, Any]) -> None:
        asked, number, what = (request.pop(name) for name in ("number", "episode", "do"))
        if what == "end":
            if work := self._works.pop(number, None):
                work.cancel()
            if episode := self._episodes.pop(number, None):
                await _caught(episode.end(), episode.randomness)
            return
        if what == "start" and self._limit_s and not self._watch:
            self._watch = Watch(self._loop, self._limit_s)
        if what == "start" or number not in self._episodes:
            self._episodes[number] = _Episode(self._settings, self._found)
        began, episode = time.monotonic(), self._episodes[number]
        coroutine = getattr(episode, what)(**request)
        work = self._works[number] = self._loop.create_task(_caught(coroutine, episode.randomness))
        answer = await self._within_limit(work)
        if self._works.get(number) is not work:  # it has been ended meanwhile
            return
        del self._works[number]
        if answer is None:
            work.cancel()
            del self._episodes[number]
            answer = {"problem": "timeout", "text": f"no answer within {self._limit_s:g} s"}
        answer |= {"number": asked, "seconds": time.monotonic() - began}
        try:
            send(self._connection, answer)
        except (TypeError, ValueError) as error:
            text = _described(error)
            send(self._connection, {**_problem(text), "number": asked, "seconds": 0.0})

    async def _within_limit(self, work: _Work) -> dict[str, Any] | None:
        """Returns the outcome of work, None if it takes too long."""
        if self._watch is None:
            return await work
        left = self._limit_s
        while True:
            held_s = self._watch.held_s
            done, _ = await asyncio.wait([work], timeout=left)
            if done:
                return work.result()
            left = self._watch.held_s - held_s  # others have used that time
            if left <= 0.0:
                return None


async def _caught(coroutine: Coroutine[Any, Any, Any], randomness: Randomness) -> Any:
    """Returns what a coroutine returns, or what is wrong with it; None: it held up the loop."""
    try:
        return await Own(coroutine, randomness)
    except BlockedError:
        return None
    except BaseException as error:  # sys.exit() in a tool must not end its episode
        return _problem(_described(error))


def _problem(text: str) -> dict[str, Any]:
    return {"problem": "exception", "text": text}


class _Episode:
    """The other side of one episode."""

    def __init__(self, settings: Mapping[str, Any], found: Mapping[str, Any]):
        self._settings, self._found = settings, found
        self._environment = Environment(None)
        self._tools: dict[str, tools.Tool] = {}
        self.randomness = Randomness()

    def _functions(self, names: Sequence[str], kwargs: Mapping[str, Any]) -> dict[str, tools.Tool]:
        made: dict[str, tools.Tool] = {}
        for name in names:
            known = (name, getattr(self._found[name], "__name__", ""))
            given = dict(next((kwargs[each] for each in known if kwargs.get(each)), {}))
            if name == "search":
                given["create_kwargs"] = {"corpus": self._settings["corpus"]}
            made |= tools.functions(self._found[name], given)
        return made

    async def describe(self) -> dict[str, Any]:
        """Returns the schemas of each tool of the config and of each environment's tools."""
        alone, of_environments = {}, {}
        for name in self._settings["tools"]:
            functions = self._functions([name], {})
            alone[name] = [tool_schema.schema(function) for function in functions.values()]
        for name, (path, address) in self._settings["environments"].items():
            environment = environments.made(path, address)
            await _prepared(environment)
            methods = environment.tools.values()
            of_environments[name] = [tool_schema.schema(method) for method in methods]
            await environment.close()
        return {"tools": alone, "environments": of_environments}

    async def start(
        self,
        environment: str,
        names: Sequence[str],
        kwargs: Mapping[str, Any],
        row: Mapping[str, Any],
        seed: int,
    ) -> dict[str, Any]:
        """Returns what the environment begins with."""
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed % 2**32)
        self._tools = self._functions(names, kwargs)
        if environment:
            self._environment = environments.made(*self._settings["environments"][environment])
            await _prepared(self._environment)
            self._tools |= self._environment.tools
        return {"messages": self._told(await self._environment.start(row))}

    async def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what a tool answers."""
        tool = self._tools[name]
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            return {"problem": "arguments", "text": f"{name}: {error}"}
        except ValueError:  # a tool without a signature
            pass
        try:
            arguments = tool_schema.converted(tool, arguments)
        except ValueError as error:
            return {"problem": "arguments", "text": f"{name}: {error}"}
        return {"text": contents.content(await settled(tool(**arguments)), self._shortened)}

    async def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the environment's answer to a turn."""
        step = await self._environment.step(message)
        reward = environments.checked_reward(step.reward)
        return {"messages": self._told(step.messages), "done": bool(step.done), "reward": reward}

    async def reward(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns what the whole episode is worth."""
        return {"reward": await self._environment.reward(messages)}

    async def end(self) -> None:
        """Gives back what the environment holds."""
        await self._environment.close()

    def _told(self, messages) -> list[dict[str, Any]]:
        """Returns messages as JSON holds them, their contents within the limit."""
        told = [
            {**message, "content": contents.content(message["content"], self._shortened)}
            for message in messages
        ]
        return json.loads(json.dumps(told))

    def _shortened(self, text: str) -> str:
        settings = self._settings
        return tools.shortened(text, settings["max_result_characters"], settings["cut_results"])


async def _prepared(environment: Environment) -> None:
    """Lets an adapter connect, which then knows its tools."""
    if connect := getattr(environment.inner, "connect", None):
        await settled(connect())


def _described(error: BaseException) -> str:
    """Returns what went wrong, as the model and the log are told."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/jaxrl_llm/" not in f.filename and "asyncio" not in f.filename]
    where = f" (line {own[-1].lineno}, {own[-1].line})" if own and own[-1].line else ""
    return f"{type(error).__name__}: {error}{where}"[:_MAX_TRACE]
