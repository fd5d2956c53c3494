"""A pool of worker processes under a hard time limit, for tools, environments and rewards.

Requests belong to sessions: an episode, or a single call of a reward function. A session has one
open request at a time and stays on its worker; sessions wait while all workers are taken. A worker
that hangs or dies is killed and replaced, and only its own sessions notice.
"""

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from jaxrl_llm.errors import UserError
from jaxrl_llm.processes.child import CLOSE_TIMEOUT_S, START_TIMEOUT_S
from jaxrl_llm.processes.messages import MAX_BYTES, receive, send

Answer = dict[str, Any]

_START_ALLOWANCE_S = 10.0  # allowance for a new process to get a core
_STATE_LOST = "; its state is lost"


class WorkerPoolError(UserError, RuntimeError):
    """The workers cannot start; the message says why."""


class WorkerProcess(Protocol):
    """A process that answers requests on its connection."""

    connection: Connection

    def end(self, patience_s: float) -> str:
        """Ends the process after up to `patience_s`; returns how it ended, "" if unknown."""


@dataclasses.dataclass(eq=False)
class _Worker:
    """A worker process, its sessions, and its open requests."""

    process: WorkerProcess
    is_ready: bool  # it has reported that its imports are done
    deadline: float  # for the report, or for the next answer if requests are open
    sessions: set[int] = dataclasses.field(default_factory=set)
    # Request number -> (session, time of the request).
    open_requests: dict[int, tuple[int, float]] = dataclasses.field(default_factory=dict)
    is_unread: bool = False  # it ended before it read the last request


class WorkerPool(contextlib.AbstractContextManager["WorkerPool"]):
    """Sends requests of sessions to worker processes; a context manager that ends them.

    Workers with state are started when a session needs one and end with their last session; a
    request names its method as `do`. A stateless pool starts all workers at once, each of which
    first reports `{}` or its `error`; a session is one request, and its worker then serves another.
    """

    def __init__(
        self,
        start_process: Callable[[], WorkerProcess],
        num_workers: int,
        timeout_s: float,
        *,
        sessions_per_worker: int = 1,
        is_stateless: bool = False,
        max_answer_bytes: int = MAX_BYTES,
    ):
        """WorkerPoolError if a worker of a stateless pool reports an error.

        `timeout_s` is for an answer. A worker of several sessions enforces it for each of them, and
        is killed 10 s later.
        """
        self._start_process, self._num_workers = start_process, num_workers
        self._timeout_s, self._sessions_per_worker = timeout_s, sessions_per_worker
        self._is_stateless, self._max_answer_bytes = is_stateless, max_answer_bytes
        self.capacity = num_workers * sessions_per_worker  # sessions served at the same time
        self._is_closed = False
        self._workers: list[_Worker] = []
        self._worker_of_session: dict[int, _Worker] = {}
        self._lost_sessions: set[int] = set()  # their worker ended between two requests
        self._local_answers: list[tuple[int, Answer]] = []  # answers without a worker
        self._start_requests: dict[int, Mapping[str, Any]] = {}  # by session
        # Requests of the sessions that wait for a worker.
        self._waiting: collections.deque[tuple[int, Mapping[str, Any]]] = collections.deque()
        self._queued_requests: dict[int, Mapping[str, Any]] = {}  # sent after the start request
        self._num_requests = 0
        try:
            for _ in range(num_workers if is_stateless else 0):
                self._start_worker()
            for worker in self._workers:
                self._finish_start(worker)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers for good; `collect` in another thread returns nothing from then on."""
        self._is_closed = True
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.process.connection.close()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for worker in workers:
            worker.process.end(max(0.0, deadline - time.monotonic()))

    def ask(
        self, session: int, start_request: Mapping[str, Any] | None, request: Mapping[str, Any]
    ) -> None:
        """Sends a request of a session without open requests; `collect` returns the answer.

        `start_request` is the request "start" that each new worker of the session answers first; it
        also answers a `request` that is "start" itself. None in a stateless pool.
        """
        if start_request is not None:
            self._start_requests[session] = start_request
        if session in self._lost_sessions:
            self._lost_sessions.remove(session)
            self._local_answers.append((session, failure_answer("ended", _end_text(""), 0.0)))
        elif session in self._worker_of_session:
            self._send(session, request)
        else:
            self._waiting.append((session, request))
            self._assign_workers()

    def collect(self, timeout_s: float) -> list[tuple[int, Answer]]:
        """The available (session, answer) pairs; waits up to `timeout_s` for the first.

        A worker that hung or died costs its sessions an answer with a `problem` ("timeout", "ended"
        or, if a stateless pool may be asked again, "unread"), the reason as `text`, and `seconds`.
        WorkerPoolError if a replacement in a stateless pool cannot start.
        """
        answers, self._local_answers = self._local_answers, []
        end_time = time.monotonic() + timeout_s
        while not answers and not self._is_closed:
            workers = [w for w in self._workers if w.open_requests or not w.is_ready]
            if not workers:
                break
            first_deadline = min(end_time, *(worker.deadline for worker in workers))
            connections = [worker.process.connection for worker in workers]
            try:
                ready = wait(connections, max(0.0, first_deadline - time.monotonic()))
            except (OSError, ValueError):
                if not self._is_closed:  # by another thread
                    raise
                break
            now = time.monotonic()
            for worker in workers:
                has_message = worker.process.connection in ready
                if not has_message and now < worker.deadline:
                    continue
                if not worker.is_ready:
                    self._finish_start(worker)
                elif has_message:
                    answers += self._receive_answers(worker)
                else:
                    text = f"no answer within {self._timeout_s:g} s"
                    answers += self._end_worker(worker, "timeout", text)
            self._assign_workers()
            if now >= end_time:
                break
        return answers

    def end(self, session: int) -> None:
        """Ends a session, and its worker if no other session shares it."""
        worker = self._detach(session)
        if worker and not worker.sessions:
            self._end_worker(worker, "", "its session has ended")
        elif worker:
            requests = worker.open_requests.items()
            worker.open_requests = {n: request for n, request in requests if request[0] != session}
            with contextlib.suppress(OSError):
                send(worker.process.connection, {"number": 0, "session": session, "do": "end"})
        self._queued_requests.pop(session, None)
        self._lost_sessions.discard(session)
        self._local_answers = [answer for answer in self._local_answers if answer[0] != session]
        self._waiting = collections.deque(w for w in self._waiting if w[0] != session)
        self._assign_workers()

    def _start_worker(self) -> _Worker:
        process = self._start_process()
        deadline = time.monotonic() + START_TIMEOUT_S
        worker = _Worker(process, is_ready=not self._is_stateless, deadline=deadline)
        self._workers.append(worker)
        if self._is_closed:  # by another thread in the meantime
            process.end(0.0)
        return worker

    def _finish_start(self, worker: _Worker) -> None:
        answer = first_answer(worker.process, worker.deadline - time.monotonic())
        if "error" in answer and not self._is_closed:
            raise WorkerPoolError(answer["error"])
        worker.is_ready = True

    def _assign_workers(self) -> None:
        while self._waiting:
            free_workers = (
                worker
                for worker in self._workers
                if worker.is_ready and len(worker.sessions) < self._sessions_per_worker
            )
            worker = next(free_workers, None)
            if worker is None:
                if self._is_stateless or len(self._workers) >= self._num_workers:
                    return
                worker = self._start_worker()
            session, request = self._waiting.popleft()
            worker.sessions.add(session)
            self._worker_of_session[session] = worker
            if not self._is_stateless and not _is_start(request):
                self._queued_requests[session] = request
                request = self._start_requests[session]
            self._send(session, request)

    def _detach(self, session: int) -> _Worker | None:
        worker = self._worker_of_session.pop(session, None)
        if worker:
            worker.sessions.remove(session)
        return worker

    def _send(self, session: int, request: Mapping[str, Any]) -> None:
        worker, now = self._worker_of_session[session], time.monotonic()
        # With others open, their answers move it.
        if self._sessions_per_worker == 1 or not worker.open_requests:
            worker.deadline = now + self._answer_timeout_s(_is_start(request))
        self._num_requests += 1
        worker.open_requests[self._num_requests] = session, now
        request = {**request, "session": session, "number": self._num_requests}
        try:
            send(worker.process.connection, request)
        except OSError:  # the process has ended; `collect` notices
            worker.is_unread = True

    def _answer_timeout_s(self, is_start: bool) -> float:
        has_allowance = is_start or self._sessions_per_worker > 1
        return self._timeout_s + (_START_ALLOWANCE_S if has_allowance else 0.0)

    def _receive_answers(self, worker: _Worker) -> list[tuple[int, Answer]]:
        """The answers that a worker has sent, or those of its end."""
        answers: list[tuple[int, Answer]] = []
        connection = worker.process.connection
        try:
            while worker.open_requests and connection.poll():
                answer = receive(connection, self._max_answer_bytes)
                request = worker.open_requests.pop(answer.pop("number"), None)
                if request is None:  # its session has been ended
                    continue
                session, _ = request
                worker.deadline = time.monotonic() + self._answer_timeout_s(False)
                queued_request = self._queued_requests.pop(session, None)
                if self._is_stateless:
                    self._detach(session)
                elif answer.get("problem") == "timeout":
                    self._detach(session)
                    answer["text"] += _STATE_LOST
                if queued_request is not None and "problem" not in answer:
                    self._send(session, queued_request)
                else:
                    answers.append((session, answer))
        except (EOFError, OSError) as error:
            # A Unix socket that closed with unread bytes is reset.
            worker.is_unread |= isinstance(error, ConnectionResetError)
            return answers + self._end_worker(worker, "ended", "")
        except (ValueError, KeyError, AttributeError, TypeError):  # user code wrote to the socket
            return answers + self._end_worker(worker, "ended", "its process wrote to the pool")
        return answers

    def _end_worker(self, worker: _Worker, problem: str, text: str) -> list[tuple[int, Answer]]:
        """Ends a worker; returns the answers for its open requests."""
        end_text = worker.process.end(CLOSE_TIMEOUT_S if problem == "ended" else 0.0)
        if self._is_closed:
            return []
        self._workers.remove(worker)
        if self._is_stateless and worker.is_unread:
            problem = "unread"
        make_answer = functools.partial(
            failure_answer, problem, text or _end_text(end_text), is_stateless=self._is_stateless
        )
        requests, now = worker.open_requests.values(), time.monotonic()
        answers = [(session, make_answer(now - start_time)) for session, start_time in requests]
        for session in worker.sessions:
            del self._worker_of_session[session]
            self._queued_requests.pop(session, None)
        self._lost_sessions |= worker.sessions - {session for session, _ in requests}
        if self._is_stateless:
            self._start_worker()
        return answers


def first_answer(process: WorkerProcess, timeout_s: float = START_TIMEOUT_S) -> Answer:
    """The first message of a process; if none comes, a dict with the reason as `error`."""
    try:
        if process.connection.poll(max(0.0, timeout_s)):
            return receive(process.connection)
        return {"error": f"no sign for {START_TIMEOUT_S:g} s"}
    except (EOFError, OSError):
        return {"error": _end_text(process.end(CLOSE_TIMEOUT_S))}


def failure_answer(problem: str, text: str, seconds: float, is_stateless: bool = False) -> Answer:
    """The answer for a session whose worker, and so its state if it had any, is gone."""
    text += "" if is_stateless else _STATE_LOST
    return {"problem": problem, "text": text, "seconds": seconds}


def _end_text(exit_text: str) -> str:
    return f"its process ended with {exit_text}" if exit_text else "its process has ended"


def _is_start(request: Mapping[str, Any]) -> bool:
    return request.get("do") == "start"
