"""The pool's side of the processes in which tools and environments live: one for each episode.

Requests are asked and answers collected later, so that the device decodes while tools run. What
hangs is ended with its process after the time limit; the episode's next request gets a new one.
"""

import collections
import contextlib
import dataclasses
import multiprocessing
import os
import socket
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from jaxrl_llm.agents import worker
from jaxrl_llm.config.agent import AgentConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.processes.child import CLOSE_TIMEOUT_S, START_TIMEOUT_S, Child
from jaxrl_llm.processes.messages import receive, send

Answer = dict[str, Any]

_BEGIN_S = 10.0  # that a new process may wait for a core


class AgentError(UserError, RuntimeError):
    """Tools or environments cannot be used; the text says which and why."""


@dataclasses.dataclass
class _Process:
    """A process of one episode and the request that it works on."""

    connection: Connection
    alive: int  # file descriptor; closed: the process and what it has started end
    began: float = 0.0  # its request
    deadline: float = 0.0  # of that; 0: none

    def close(self) -> None:
        self.connection.close()
        os.close(self.alive)


class Pool(contextlib.AbstractContextManager["Pool"]):
    """Asks the processes of episodes; a context manager that ends all of them."""

    def __init__(self, config: AgentConfig):
        """Imports the tools of the config; AgentError if that fails."""
        self._config = config
        self._processes: dict[int, _Process] = {}
        self._begins: dict[int, Mapping[str, Any]] = {}  # how each episode's process begins
        # Requests of episodes without a process: those that wait for one.
        self._waiting: collections.deque[tuple[int, Mapping[str, Any]]] = collections.deque()
        self._next: dict[int, Mapping[str, Any]] = {}  # asked when the process has begun
        self._child = Child(worker.__name__, config.visible)
        fields = "tools", "corpus", "memory_gib", "max_result_characters", "cut_results"
        settings = {name: getattr(config, name) for name in fields}
        environments = config.environments.items()
        settings["environments"] = {n: (e.environment, e.address) for n, e in environments}
        send(self._child.connection, settings)
        try:
            self._check(self._answer_of(self._child.connection))
        except BaseException:
            self._child.end(0.0)
            raise

    def __exit__(self, *exception) -> None:
        for process in self._processes.values():
            process.close()
        self._child.end(0.0)

    def describe(self) -> dict[str, Any]:
        """Returns `{"tools": {name: schemas}, "environments": {name: schemas of its tools}}`.

        Each environment is made once. AgentError if a tool has no schema or that fails.
        """
        process = self._fork()
        send(process.connection, {"do": "describe"})
        answer = self._answer_of(process.connection)
        process.close()
        self._check(answer)
        return answer

    def _answer_of(self, connection: Connection) -> Answer:
        if not connection.poll(START_TIMEOUT_S):
            return {"error": f"no sign for {START_TIMEOUT_S:g} s"}
        try:
            return receive(connection)
        except (EOFError, OSError):
            return {"error": "the process that imports them has ended"}

    def _check(self, answer: Answer) -> None:
        if problem := answer.get("error", answer.get("text")):
            names = ", ".join((*self._config.tools, *self._config.environments))
            raise AgentError(f"config.agent: {names} cannot be used: {problem}")

    def ask(self, episode: int, begin: Mapping[str, Any], request: Mapping[str, Any]) -> None:
        """Sends a request of an episode, that has none open; its answer comes by `collect`.

        `begin` is the request that a new process of this episode answers first; the request that
        equals it is answered by that answer.
        """
        self._begins[episode] = begin
        if episode in self._processes:
            self._send(episode, request)
        else:
            self._waiting.append((episode, request))
            self._fill()

    def collect(self, patience_s: float) -> list[tuple[int, Answer]]:
        """Returns the answers that have come; waits so long for the first.

        Each has the `seconds` that it took. One with `problem` ("exception", "arguments",
        "timeout", "ended") tells the reason as `text`.
        """
        found: list[tuple[int, Answer]] = []
        until = time.monotonic() + patience_s
        while self._processes and not found:
            busy = {p.connection: e for e, p in self._processes.items() if p.deadline}
            if not busy:
                break
            now = time.monotonic()
            first = min(self._processes[e].deadline for e in busy.values())
            ready = wait(list(busy), max(0.0, min(until, first) - now))
            now = time.monotonic()
            for connection, episode in busy.items():
                if connection in ready:
                    answer = self._received(episode)
                elif now >= self._processes[episode].deadline:
                    said = f"no answer within {self._config.timeout_s:g} s"
                    answer = self._lost(episode, "timeout", said)
                else:
                    continue
                following = self._next.pop(episode, None)
                if following is not None and "problem" not in answer:
                    self._send(episode, following)
                else:
                    found.append((episode, answer))
            self._fill()
            if now >= until:
                break
        return found

    def end(self, episode: int) -> None:
        """Ends the process of an episode."""
        if process := self._processes.pop(episode, None):
            process.close()
        self._next.pop(episode, None)
        self._waiting = collections.deque(w for w in self._waiting if w[0] != episode)
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._processes) < self._config.num_processes:
            episode, request = self._waiting.popleft()
            begin = self._begins[episode]
            self._processes[episode] = self._fork()
            if request is not begin:
                self._next[episode] = request
            self._send(episode, begin)

    def _send(self, episode: int, request: Mapping[str, Any]) -> None:
        process = self._processes[episode]
        extra = _BEGIN_S if request is self._begins[episode] else 0.0
        process.began = time.monotonic()
        process.deadline = process.began + self._config.timeout_s + extra
        with contextlib.suppress(OSError):  # it has ended; `collect` finds that out
            send(process.connection, request)

    def _received(self, episode: int) -> Answer:
        process = self._processes[episode]
        try:
            answer = receive(process.connection)
        except (EOFError, OSError, ValueError):  # it is gone, or wrote to the socket itself
            return self._lost(episode, "ended", "its process has ended")
        process.deadline = 0.0
        if not isinstance(answer, dict):
            return self._lost(episode, "ended", "its process wrote to the pool")
        return answer

    def _lost(self, episode: int, problem: str, said: str) -> Answer:
        process = self._processes.pop(episode)
        process.close()
        seconds = time.monotonic() - process.began
        return {"problem": problem, "text": f"{said}; its state is lost", "seconds": seconds}

    def _fork(self) -> _Process:
        ours, theirs = multiprocessing.Pipe()
        read, alive = os.pipe()
        try:
            with socket.socket(fileno=os.dup(self._child.connection.fileno())) as own:
                socket.send_fds(own, [b"+"], [theirs.fileno(), read])
        except OSError as error:
            raise AgentError(
                f"config.agent: the process of tools and environments ended"
                f" with {self._child.end(CLOSE_TIMEOUT_S)}"
            ) from error
        finally:
            theirs.close()
            os.close(read)
        return _Process(ours, alive)
