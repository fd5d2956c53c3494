"""Process pool in which tools and environments run, on this host or on Ray workers.

Each episode has a process, or shares one with others (`AgentConfig.episodes_per_process`). Requests
are sent first and answers collected later, so that the device decodes while tools run. A call that
exceeds the time limit is killed with its process; the episode's next request gets a new process. In
a shared process only the coroutine is cancelled, and the process killed if that does not help.
"""

import contextlib
import multiprocessing
import os
import socket
from multiprocessing.connection import Connection
from typing import Any

from jaxrl_llm.agents import agent_worker
from jaxrl_llm.config.agent import AgentConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.processes import supervisor
from jaxrl_llm.processes.child import CLOSE_TIMEOUT_S, ChildProcess
from jaxrl_llm.processes.messages import send
from jaxrl_llm.processes.ray_worker_pool import RayWorkerPool
from jaxrl_llm.processes.worker_pool import Answer, WorkerPool, first_answer


class AgentError(UserError, RuntimeError):
    """A tool or an environment cannot be used; the message says which and why."""


class _ForkedProcess:
    """A worker process, forked from the one that has imported the tools."""

    def __init__(self, connection: Connection, alive_fd: int):
        """`alive_fd`: a file descriptor; closing it ends the process and its descendants."""
        self.connection, self._alive_fd = connection, alive_fd

    def end(self, patience_s: float = 0.0) -> str:
        """Asks the process to end, without waiting; its supervisor kills it after END_SOON_S."""
        self.connection.close()
        if self._alive_fd >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._alive_fd, supervisor.END_SOON)
            os.close(self._alive_fd)
            self._alive_fd = -1
        return ""


class AgentPool(WorkerPool):
    """The processes of this host."""

    def __init__(self, config: AgentConfig):
        """Imports the tools of the config; AgentError if that fails."""
        self._config, is_shared = config, config.episodes_per_process > 1
        self._child = ChildProcess(agent_worker.__name__, config.visible)
        limit_s = config.harness_timeout_s if config.harness else config.timeout_s
        super().__init__(
            self._fork,
            config.num_processes,
            limit_s,
            sessions_per_worker=config.episodes_per_process,
        )
        fields = ["tools", "corpus", "memory_gib", "max_result_characters", "cut_results"]
        fields += ["harness", "max_harness_processes", "roles"]
        settings = {name: getattr(config, name) for name in fields}
        settings["limit_s"] = limit_s if is_shared else None
        environments = config.environments.items()
        settings["environments"] = {n: (e.environment, e.address) for n, e in environments}
        send(self._child.connection, settings)
        try:
            self._raise_problem(first_answer(self._child))
        except BaseException:
            self._child.end(0.0)
            raise

    def close(self) -> None:
        """Ends the processes; their environments have END_SOON_S to close."""
        super().close()
        self._child.connection.close()
        self._child.end(supervisor.END_SOON_S + CLOSE_TIMEOUT_S)

    def describe(self) -> dict[str, Any]:
        """Returns `{"tools": {name: schemas}, "environments": {name: schemas of its tools}}`.

        Creates each environment once. AgentError if that fails, or a tool has no schema.
        """
        process = self._fork()
        send(process.connection, {"number": 0, "session": 0, "do": "describe"})
        answer = first_answer(process)
        process.end()
        self._raise_problem(answer)
        return {name: answer[name] for name in ("tools", "environments")}

    def _raise_problem(self, answer: Answer) -> None:
        if problem := answer.get("error", answer.get("text")):
            config = self._config
            names = config.harness or ", ".join((*config.tools, *config.environments))
            raise AgentError(f"config.agent: {names} cannot be used: {problem}")

    def _fork(self) -> _ForkedProcess:
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
        return _ForkedProcess(connection, alive_fd)


def make_agent_pool(config: AgentConfig) -> AgentPool | RayWorkerPool:
    """Creates the process pool of a run, on this host or on Ray workers."""
    if not config.ray_workers:
        return AgentPool(config)
    # One core per worker: tools wait most of the time.
    return RayWorkerPool("config.agent", AgentPool, config, count=config.ray_workers, cores=1)
