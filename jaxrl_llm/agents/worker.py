"""The process in which an episode's tools and environment live, and the one that makes these.

The pool starts `main` once on each host. It imports what the run's tools and environments need, and
from then on makes a copy of itself (a fork) for each episode: that takes milliseconds, shares
memory, and no episode sees what another one did. Each copy has a supervisor of its own.
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
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from jaxrl_llm.agents import environments, ready, tools
from jaxrl_llm.agents.environments import Environment, settled
from jaxrl_llm.processes import supervisor
from jaxrl_llm.processes.messages import receive, send

_MAX_TRACE = 2000  # characters of a traceback


def main(connection_fd: int) -> None:
    """Serves a pool until that has gone; returns in the copies, too, when their work is done."""
    connection = Connection(connection_fd)
    with contextlib.suppress(EOFError, ConnectionError):
        settings = receive(connection)
        try:
            found = {name: tools.found(name) for name in settings["tools"]}
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
                _Episode(Connection(theirs), settings, found).serve()
                return


class _Episode:
    """What one process does: describes tools, or plays the other side of one episode."""

    def __init__(self, connection: Connection, settings: Mapping[str, Any], found):
        self._connection, self._settings, self._found = connection, settings, found
        self._environment = Environment(None)
        self._tools: dict[str, tools.Tool] = {}
        if not math.isinf(gib := settings["memory_gib"]):
            num_bytes = int(gib * 2**30)
            resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))

    def serve(self) -> None:
        """Answers requests, `{"do": a method, ...}`, until the pool closes the connection."""
        loop = asyncio.new_event_loop()  # one: an adapter may keep a connection in it
        methods: Mapping[str, Callable[..., Any]] = {
            "describe": self._describe,
            "start": self._start,
            "call": self._call,
            "step": self._step,
            "reward": self._reward,
        }
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                began = time.monotonic()
                try:
                    request = receive(self._connection)
                    began = time.monotonic()
                    answer = loop.run_until_complete(methods[request.pop("do")](**request))
                except EOFError:
                    raise
                except BaseException as error:  # sys.exit() in a tool must not end its episode
                    answer = {"problem": "exception", "text": _described(error)}
                answer["seconds"] = time.monotonic() - began
                try:
                    send(self._connection, answer)
                except (TypeError, ValueError) as error:
                    answer = {"problem": "exception", "text": _described(error), "seconds": 0.0}
                    send(self._connection, answer)
        with contextlib.suppress(Exception):
            loop.run_until_complete(self._environment.close())

    def _functions(self, names: Sequence[str], kwargs: Mapping[str, Any]) -> dict[str, tools.Tool]:
        made: dict[str, tools.Tool] = {}
        for name in names:
            known = (name, getattr(self._found[name], "__name__", ""))
            given = dict(next((kwargs[each] for each in known if kwargs.get(each)), {}))
            if name == "search":
                given["create_kwargs"] = {"corpus": self._settings["corpus"]}
            made |= tools.functions(self._found[name], given)
        return made

    async def _describe(self) -> dict[str, Any]:
        """Returns the schemas of each tool of the config and of each environment's tools."""
        alone, of_environments = {}, {}
        for name in self._settings["tools"]:
            functions = self._functions([name], {})
            alone[name] = [tools.schema(function) for function in functions.values()]
        for name, (path, address) in self._settings["environments"].items():
            environment = environments.made(path, address)
            await _prepared(environment)
            methods = environment.tools.values()
            of_environments[name] = [tools.schema(method) for method in methods]
            await environment.close()
        return {"tools": alone, "environments": of_environments}

    async def _start(
        self,
        environment: str,
        names: Sequence[str],
        kwargs: Mapping[str, Any],
        row: Mapping[str, Any],
        seed: int,
    ) -> dict[str, Any]:
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed % 2**32)
        self._tools = self._functions(names, kwargs)
        if environment:
            self._environment = environments.made(*self._settings["environments"][environment])
            await _prepared(self._environment)
            self._tools |= self._environment.tools
        return {"messages": self._told(await self._environment.start(row))}

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        tool = self._tools[name]
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            return {"problem": "arguments", "text": f"{name}: {error}"}
        except ValueError:  # a tool without a signature
            pass
        return {"text": self._shortened(tools.as_text(await settled(tool(**arguments))))}

    async def _step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        step = await self._environment.step(message)
        reward = environments.checked_reward(step.reward)
        return {"messages": self._told(step.messages), "done": bool(step.done), "reward": reward}

    async def _reward(self) -> dict[str, Any]:
        return {"reward": await self._environment.reward()}

    def _told(self, messages) -> list[dict[str, Any]]:
        """Returns messages as JSON holds them, their contents within the limit."""
        return [
            {**message, "content": self._shortened(tools.as_text(message["content"]))}
            for message in json.loads(json.dumps(messages))
        ]

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
