"""Process pool in which tools and environments run.

Each episode has a process, or shares one with others (`AgentConfig.episodes_per_process`). Requests
are sent first and answers collected later, so that the device decodes while tools run. A call that
exceeds the time limit is killed with its process; the episode's next request gets a new process. In
a shared process only the coroutine is cancelled, and the process killed if that does not help.
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

from jaxrl_llm.agents import agent_worker
from jaxrl_llm.config.agent import AgentConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.processes.child import CLOSE_TIMEOUT_S, START_TIMEOUT_S, ChildProcess
from jaxrl_llm.processes.messages import receive, send

Answer = dict[str, Any]

_START_ALLOWANCE_S = 10.0  # allowance for a new process to get a core


class AgentError(UserError, RuntimeError):
    """A tool or an environment cannot be used; the message says which and why."""


@dataclasses.dataclass(eq=False)
class _WorkerProcess:
    """A worker process, its episodes, and its open requests."""

    connection: Connection
    alive_fd: int  # file descriptor; closing it ends the process and its descendants
    episodes: set[int] = dataclasses.field(default_factory=set)
    # Request number -> (episode, time of the request).
    open_requests: dict[int, tuple[int, float]] = dataclasses.field(default_factory=dict)
    deadline: float = 0.0  # for the next answer, if requests are open

    def close(self) -> None:
        self.connection.close()
        os.close(self.alive_fd)


class AgentPool(contextlib.AbstractContextManager["AgentPool"]):
    """Sends requests of episodes to their processes; a context manager that ends all of them."""

    def __init__(self, config: AgentConfig):
        """Imports the tools of the config; AgentError if that fails."""
        self._config = config
        self._is_shared = config.episodes_per_process > 1
        self._processes: list[_WorkerProcess] = []
        self._process_of_episode: dict[int, _WorkerProcess] = {}
        self._lost_episodes: set[int] = set()  # episodes whose process ended between two requests
        self._local_answers: list[tuple[int, Answer]] = []  # answers without a process
        self._start_requests: dict[int, Mapping[str, Any]] = {}  # by episode
        # Requests of the episodes that wait for a process.
        self._waiting: collections.deque[tuple[int, Mapping[str, Any]]] = collections.deque()
        self._queued_requests: dict[
            int, Mapping[str, Any]
        ] = {}  # sent once the episode has started
        self._num_requests = 0
        self._child = ChildProcess(agent_worker.__name__, config.visible)
        fields = "tools", "corpus", "memory_gib", "max_result_characters", "cut_results"
        settings = {name: getattr(config, name) for name in fields}
        settings["limit_s"] = config.timeout_s if self._is_shared else None
        environments = config.environments.items()
        settings["environments"] = {n: (e.environment, e.address) for n, e in environments}
        send(self._child.connection, settings)
        try:
            self._raise_problem(self._first_answer(self._child.connection))
        except BaseException:
            self._child.end(0.0)
            raise

    def __exit__(self, *exception) -> None:
        for process in self._processes:
            process.close()
        self._child.end(0.0)

    def describe(self) -> dict[str, Any]:
        """Returns `{"tools": {name: schemas}, "environments": {name: schemas of its tools}}`.

        Creates each environment once. AgentError if that fails, or a tool has no schema.
        """
        process = self._fork()
        send(process.connection, {"number": 0, "episode": 0, "do": "describe"})
        answer = self._first_answer(process.connection)
        process.close()
        self._raise_problem(answer)
        return {name: answer[name] for name in ("tools", "environments")}

    def _first_answer(self, connection: Connection) -> Answer:
        if not connection.poll(START_TIMEOUT_S):
            return {"error": f"no sign for {START_TIMEOUT_S:g} s"}
        try:
            return receive(connection)
        except (EOFError, OSError):
            return {"error": "the process that imports them has ended"}

    def _raise_problem(self, answer: Answer) -> None:
        if problem := answer.get("error", answer.get("text")):
            names = ", ".join((*self._config.tools, *self._config.environments))
            raise AgentError(f"config.agent: {names} cannot be used: {problem}")

    def ask(
        self, episode: int, start_request: Mapping[str, Any], request: Mapping[str, Any]
    ) -> None:
        """Sends a request of an episode without open requests; `collect` returns the answer.

        `start_request` is the request "start" that a new process of this episode answers first; it
        also answers a `request` that is "start" itself.
        """
        self._start_requests[episode] = start_request
        if episode in self._lost_episodes:
            self._lost_episodes.remove(episode)
            self._local_answers.append(
                (episode, lost_state_answer("ended", "its process has ended", 0.0))
            )
        elif episode in self._process_of_episode:
            self._send(episode, request)
        else:
            self._waiting.append((episode, request))
            self._assign_processes()

    def collect(self, timeout_s: float) -> list[tuple[int, Answer]]:
        """The available (episode, answer) pairs; waits up to `timeout_s` for the first.

        Each answer has the `seconds` that it took. One with a `problem` ("exception", "arguments",
        "timeout", "ended") has the reason as `text`.
        """
        answers, self._local_answers = self._local_answers, []
        end_time = time.monotonic() + timeout_s
        while not answers:
            busy = {p.connection: p for p in self._processes if p.open_requests}
            if not busy:
                break
            first_deadline = min(process.deadline for process in busy.values())
            ready = wait(list(busy), max(0.0, min(end_time, first_deadline) - time.monotonic()))
            now = time.monotonic()
            for connection, process in busy.items():
                if connection in ready:
                    answers += self._receive_answers(process)
                elif now >= process.deadline:
                    text = f"no answer within {self._config.timeout_s:g} s"
                    answers += self._end_process(process, "timeout", text)
            self._assign_processes()
            if now >= end_time:
                break
        return answers

    def end(self, episode: int) -> None:
        """Ends an episode, and its process if no other episode shares it."""
        process = self._detach(episode)
        if process and not process.episodes:
            self._processes.remove(process)
            process.close()
        elif process:
            process.open_requests = {
                number: request
                for number, request in process.open_requests.items()
                if request[0] != episode
            }
            with contextlib.suppress(OSError):
                send(process.connection, {"number": 0, "episode": episode, "do": "end"})
        self._queued_requests.pop(episode, None)
        self._lost_episodes.discard(episode)
        self._local_answers = [answer for answer in self._local_answers if answer[0] != episode]
        self._waiting = collections.deque(
            waiting for waiting in self._waiting if waiting[0] != episode
        )
        self._assign_processes()

    def _assign_processes(self) -> None:
        max_episodes = self._config.episodes_per_process
        while self._waiting:
            free_processes = (
                process for process in self._processes if len(process.episodes) < max_episodes
            )
            process = next(free_processes, None)
            if process is None:
                if len(self._processes) >= self._config.num_processes:
                    return
                process = self._fork()
                self._processes.append(process)
            episode, request = self._waiting.popleft()
            process.episodes.add(episode)
            self._process_of_episode[episode] = process
            if not _is_start(request):
                self._queued_requests[episode] = request
            self._send(episode, self._start_requests[episode])

    def _detach(self, episode: int) -> _WorkerProcess | None:
        process = self._process_of_episode.pop(episode, None)
        if process:
            process.episodes.remove(episode)
        return process

    def _send(self, episode: int, request: Mapping[str, Any]) -> None:
        process, now = self._process_of_episode[episode], time.monotonic()
        # with others open, their answers move it
        if not (self._is_shared and process.open_requests):
            process.deadline = now + self._answer_timeout_s(_is_start(request))
        self._num_requests += 1
        process.open_requests[self._num_requests] = episode, now
        with contextlib.suppress(OSError):  # the process has ended; `collect` notices
            send(process.connection, {**request, "episode": episode, "number": self._num_requests})

    def _answer_timeout_s(self, is_start: bool) -> float:
        # A shared process enforces the time limit of each episode itself.
        return self._config.timeout_s + (_START_ALLOWANCE_S if is_start or self._is_shared else 0.0)

    def _receive_answers(self, process: _WorkerProcess) -> list[tuple[int, Answer]]:
        """The answers that a process has sent."""
        answers = []
        try:
            while process.open_requests and process.connection.poll():
                answer = receive(process.connection)
                request = process.open_requests.pop(answer.pop("number"), None)
                if request is None:  # its episode has been ended
                    continue
                episode, _ = request
                process.deadline = time.monotonic() + self._answer_timeout_s(False)
                queued_request = self._queued_requests.pop(episode, None)
                if answer.get("problem") == "timeout":
                    self._detach(episode)
                    answer = lost_state_answer("timeout", answer["text"], answer["seconds"])
                if queued_request is not None and "problem" not in answer:
                    self._send(episode, queued_request)
                else:
                    answers.append((episode, answer))
        except (EOFError, OSError):
            return answers + self._end_process(process, "ended", "its process has ended")
        except (ValueError, KeyError, AttributeError, TypeError):  # user code wrote to the socket
            return answers + self._end_process(process, "ended", "its process wrote to the pool")
        return answers

    def _end_process(
        self, process: _WorkerProcess, problem: str, text: str
    ) -> list[tuple[int, Answer]]:
        """Ends a process; returns the answers for its episodes with open requests."""
        self._processes.remove(process)
        process.close()
        now = time.monotonic()
        requests = process.open_requests.values()
        answers = [
            (episode, lost_state_answer(problem, text, now - start_time))
            for episode, start_time in requests
        ]
        for episode in process.episodes:
            del self._process_of_episode[episode]
            self._queued_requests.pop(episode, None)
        self._lost_episodes |= process.episodes - {episode for episode, _ in requests}
        return answers

    def _fork(self) -> _WorkerProcess:
        connection, worker_connection = multiprocessing.Pipe()
        worker_alive_fd, alive_fd = os.pipe()
        try:
            with socket.socket(fileno=os.dup(self._child.connection.fileno())) as own_socket:
                socket.send_fds(own_socket, [b"+"], [worker_connection.fileno(), worker_alive_fd])
        except OSError as error:
            raise AgentError(
                f"config.agent: the process of tools and environments ended"
                f" with {self._child.end(CLOSE_TIMEOUT_S)}"
            ) from error
        finally:
            worker_connection.close()
            os.close(worker_alive_fd)
        return _WorkerProcess(connection, alive_fd)


def _is_start(request: Mapping[str, Any]) -> bool:
    return request["do"] == "start"


def lost_state_answer(problem: str, text: str, seconds: float) -> Answer:
    """The answer for an episode whose process, and so its state, is gone."""
    return {"problem": problem, "text": f"{text}; its state is lost", "seconds": seconds}
