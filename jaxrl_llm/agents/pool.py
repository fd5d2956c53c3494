"""The pool's side of the processes in which tools and environments live.

Each episode has a process, or shares it with others (`AgentConfig.episodes_per_process`). Requests
are asked and answers collected later, so that the device decodes while tools run. What hangs is
ended with its process after the time limit; the episode's next request gets a new one. In a shared
process the coroutine alone is ended, and the process where that does not help.
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


@dataclasses.dataclass(eq=False)
class _Process:
    """A process, the episodes that live in it, and the requests that it works on."""

    connection: Connection
    alive: int  # file descriptor; closed: the process and what it has started end
    episodes: set[int] = dataclasses.field(default_factory=set)
    # Open requests by their numbers: the episode, and when.
    asked: dict[int, tuple[int, float]] = dataclasses.field(default_factory=dict)
    deadline: float = 0.0  # to say something, if anything was asked

    def close(self) -> None:
        self.connection.close()
        os.close(self.alive)


class Pool(contextlib.AbstractContextManager["Pool"]):
    """Asks the processes of episodes; a context manager that ends all of them."""

    def __init__(self, config: AgentConfig):
        """Imports the tools of the config; AgentError if that fails."""
        self._config = config
        self._is_shared = config.episodes_per_process > 1
        self._processes: list[_Process] = []
        self._homes: dict[int, _Process] = {}
        self._lost: set[int] = set()  # episodes whose process ended while they asked nothing
        self._known: list[tuple[int, Answer]] = []  # answers of no process
        self._begins: dict[int, Mapping[str, Any]] = {}  # how each episode begins
        # Requests of episodes without a process: those that wait for one.
        self._waiting: collections.deque[tuple[int, Mapping[str, Any]]] = collections.deque()
        self._next: dict[int, Mapping[str, Any]] = {}  # asked when the episode has begun
        self._num_asked = 0
        self._child = Child(worker.__name__, config.visible)
        fields = "tools", "corpus", "memory_gib", "max_result_characters", "cut_results"
        settings = {name: getattr(config, name) for name in fields}
        settings["limit_s"] = config.timeout_s if self._is_shared else None
        environments = config.environments.items()
        settings["environments"] = {n: (e.environment, e.address) for n, e in environments}
        send(self._child.connection, settings)
        try:
            self._check(self._answer_of(self._child.connection))
        except BaseException:
            self._child.end(0.0)
            raise

    def __exit__(self, *exception) -> None:
        for process in self._processes:
            process.close()
        self._child.end(0.0)

    def describe(self) -> dict[str, Any]:
        """Returns `{"tools": {name: schemas}, "environments": {name: schemas of its tools}}`.

        Each environment is made once. AgentError if a tool has no schema or that fails.
        """
        process = self._fork()
        send(process.connection, {"number": 0, "episode": 0, "do": "describe"})
        answer = self._answer_of(process.connection)
        process.close()
        self._check(answer)
        return {name: answer[name] for name in ("tools", "environments")}

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

        `begin` is the request "start" that a new process of this episode answers first; a request
        "start" is answered by that answer.
        """
        self._begins[episode] = begin
        if episode in self._lost:
            self._lost.remove(episode)
            self._known.append((episode, lost("ended", "its process has ended", 0.0)))
        elif episode in self._homes:
            self._send(episode, request)
        else:
            self._waiting.append((episode, request))
            self._fill()

    def collect(self, patience_s: float) -> list[tuple[int, Answer]]:
        """Returns the answers that have come; waits so long for the first.

        Each has the `seconds` that it took. One with `problem` ("exception", "arguments",
        "timeout", "ended") tells the reason as `text`.
        """
        found, self._known = self._known, []
        until = time.monotonic() + patience_s
        while not found:
            busy = {p.connection: p for p in self._processes if p.asked}
            if not busy:
                break
            first = min(process.deadline for process in busy.values())
            ready = wait(list(busy), max(0.0, min(until, first) - time.monotonic()))
            now = time.monotonic()
            for connection, process in busy.items():
                if connection in ready:
                    found += self._received(process)
                elif now >= process.deadline:
                    said = f"no answer within {self._config.timeout_s:g} s"
                    found += self._ended(process, "timeout", said)
            self._fill()
            if now >= until:
                break
        return found

    def end(self, episode: int) -> None:
        """Ends an episode, and with it a process that has no other one."""
        process = self._leave(episode)
        if process and not process.episodes:
            self._processes.remove(process)
            process.close()
        elif process:
            process.asked = {n: asked for n, asked in process.asked.items() if asked[0] != episode}
            with contextlib.suppress(OSError):
                send(process.connection, {"number": 0, "episode": episode, "do": "end"})
        self._next.pop(episode, None)
        self._lost.discard(episode)
        self._known = [known for known in self._known if known[0] != episode]
        self._waiting = collections.deque(w for w in self._waiting if w[0] != episode)
        self._fill()

    def _fill(self) -> None:
        most = self._config.episodes_per_process
        while self._waiting:
            room = (process for process in self._processes if len(process.episodes) < most)
            process = next(room, None)
            if process is None:
                if len(self._processes) >= self._config.num_processes:
                    return
                process = self._fork()
                self._processes.append(process)
            episode, request = self._waiting.popleft()
            process.episodes.add(episode)
            self._homes[episode] = process
            if not _begins(request):
                self._next[episode] = request
            self._send(episode, self._begins[episode])

    def _leave(self, episode: int) -> _Process | None:
        process = self._homes.pop(episode, None)
        if process:
            process.episodes.remove(episode)
        return process

    def _send(self, episode: int, request: Mapping[str, Any]) -> None:
        process, now = self._homes[episode], time.monotonic()
        if not (self._is_shared and process.asked):  # others' answers are a sign of life, too
            process.deadline = now + self._patience_s(_begins(request))
        self._num_asked += 1
        process.asked[self._num_asked] = episode, now
        with contextlib.suppress(OSError):  # it has ended; `collect` finds that out
            send(process.connection, {**request, "episode": episode, "number": self._num_asked})

    def _patience_s(self, begins: bool) -> float:
        # A shared process keeps the limit of each episode itself.
        return self._config.timeout_s + (_BEGIN_S if begins or self._is_shared else 0.0)

    def _received(self, process: _Process) -> list[tuple[int, Answer]]:
        """Returns the answers that a process has sent."""
        found = []
        try:
            while process.asked and process.connection.poll():
                answer = receive(process.connection)
                asked = process.asked.pop(answer.pop("number"), None)
                if asked is None:  # its episode was ended before
                    continue
                episode, _ = asked
                process.deadline = time.monotonic() + self._patience_s(False)
                following = self._next.pop(episode, None)
                if answer.get("problem") == "timeout":
                    self._leave(episode)
                    answer = lost("timeout", answer["text"], answer["seconds"])
                if following is not None and "problem" not in answer:
                    self._send(episode, following)
                else:
                    found.append((episode, answer))
        except (EOFError, OSError):
            return found + self._ended(process, "ended", "its process has ended")
        except (ValueError, KeyError, AttributeError, TypeError):  # it wrote to the socket itself
            return found + self._ended(process, "ended", "its process wrote to the pool")
        return found

    def _ended(self, process: _Process, problem: str, said: str) -> list[tuple[int, Answer]]:
        """Ends a process; returns what its episodes are told that wait for an answer."""
        self._processes.remove(process)
        process.close()
        now = time.monotonic()
        asked = process.asked.values()
        found = [(episode, lost(problem, said, now - when)) for episode, when in asked]
        for episode in process.episodes:
            del self._homes[episode]
            self._next.pop(episode, None)
        self._lost |= process.episodes - {episode for episode, _ in asked}
        return found

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


def _begins(request: Mapping[str, Any]) -> bool:
    return request["do"] == "start"


def lost(problem: str, said: str, seconds: float) -> Answer:
    """Returns what an episode hears whose state is gone."""
    return {"problem": problem, "text": f"{said}; its state is lost", "seconds": seconds}
