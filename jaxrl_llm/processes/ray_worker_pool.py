"""Worker pools on a Ray cluster, for work that needs more cores than one host has (extra `ray`)."""

import asyncio
import contextlib
import importlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrl_llm.errors import UserError, check_package
from jaxrl_llm.processes.child import START_TIMEOUT_S
from jaxrl_llm.processes.worker_pool import Answer, WorkerPool, WorkerPoolError, failure_answer

ActorHandle = Any  # handle of a Ray actor
_Request = tuple[int, Mapping[str, Any] | None, Mapping[str, Any]]  # arguments of `WorkerPool.ask`

# Between two polls of the processes: the first after an answer, and the longest.
_MIN_POLL_INTERVAL_S, _MAX_POLL_INTERVAL_S = 0.0002, 0.005
_MAX_CONCURRENCY = 1 << 20


class RayWorkersError(UserError, RuntimeError):
    """Ray workers cannot be used; the message says why."""


def connect_to_ray(where: str) -> Any:
    """The `ray` package, connected to the cluster of RAY_ADDRESS, or to a new local one."""
    check_package("ray", "ray", f"{where}.ray_workers")
    ray = importlib.import_module("ray")
    if not ray.is_initialized():
        with _preserved_sigterm_handler():
            ray.init(include_dashboard=False, logging_level="warning")
    return ray


@contextlib.contextmanager
def _preserved_sigterm_handler() -> Iterator[None]:
    """Preserves the run's SIGTERM handler, which Ray would replace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


class RayWorker:
    """The actor of a Ray worker: a worker pool that any number of sessions use concurrently."""

    def __init__(self) -> None:
        self._pending_answers: dict[int, asyncio.Future[Answer]] = {}  # by session
        self._collect_task: asyncio.Task[None] | None = None
        self._is_open = asyncio.Event()  # Ray may start calls in any order
        self._problem = ""

    def open(self, make_pool: Callable[..., Any], *args: Any) -> str:
        """Creates the pool; returns the problem, "" if there is none."""
        try:
            self._pool = make_pool(*args)
        except UserError as error:
            self._problem = str(error)
        self._is_open.set()
        return self._problem

    async def describe(self) -> tuple[Any, str]:
        """The result of the pool's `describe`, and the problem, "" if there is none."""
        try:
            return self._pool.describe(), ""
        except UserError as error:
            return None, str(error)

    async def ask(self, requests: Sequence[_Request]) -> list[Answer]:
        """The answers to requests of different sessions, as soon as all are there."""
        return await asyncio.gather(*(self._answer(*request) for request in requests))

    async def _answer(
        self, session: int, start_request: Mapping[str, Any] | None, request: Mapping[str, Any]
    ) -> Answer:
        await self._is_open.wait()
        if self._problem:
            return failure_answer("unusable", self._problem, 0.0)
        answer = self._pending_answers[session] = asyncio.get_running_loop().create_future()
        self._pool.ask(session, start_request, request)
        if self._collect_task is None or self._collect_task.done():
            self._collect_task = asyncio.create_task(self._collect())
        return await answer

    async def _collect(self) -> None:
        poll_interval_s = _MIN_POLL_INTERVAL_S
        while self._pending_answers:
            try:
                answers = self._pool.collect(0.0)
            except UserError as error:
                self._problem = str(error)
                failure = failure_answer("unusable", self._problem, 0.0)
                answers = [(session, failure) for session in self._pending_answers]
            for session, answer in answers:
                self._pending_answers.pop(session).set_result(answer)
            longer_s = min(2 * poll_interval_s, _MAX_POLL_INTERVAL_S)
            poll_interval_s = _MIN_POLL_INTERVAL_S if answers else longer_s
            await asyncio.sleep(poll_interval_s)

    async def end(self, session: int) -> None:
        """Ends a session."""
        if answer := self._pending_answers.pop(session, None):
            answer.cancel()
        if self._is_open.is_set() and not self._problem:
            self._pool.end(session)


class RayWorkerPool(contextlib.AbstractContextManager["RayWorkerPool"]):
    """The interface of `WorkerPool`, with a pool on each Ray worker.

    A session stays on its worker, the one with the fewest sessions when it started. A worker that
    dies is replaced.
    """

    def __init__(
        self,
        where: str,
        make_pool: Callable[..., WorkerPool],
        *args: Any,
        count: int,
        cores: int,
        sessions_per_worker: int = 1,
        is_stateless: bool = False,
    ):
        """Starts `count` actors of `cores` cores, each with the pool `make_pool(*args)`.

        `where` is the config group that requests them. RayWorkersError if the cluster has too few
        cores or a pool cannot be made.
        """
        self.ray = connect_to_ray(where)
        self.capacity = count * sessions_per_worker
        self._is_stateless = is_stateless
        self._open_args = make_pool, *args
        self._worker_of_session: dict[int, ActorHandle] = {}
        # Requests not sent yet; those of a stateless pool are sent together by `collect`.
        self._outbox: dict[ActorHandle, list[_Request]] = {}
        # Pending answers -> (their sessions, time of the requests).
        self._pending_answers: dict[Any, tuple[list[int], float]] = {}
        # SPREAD: not all on one machine.
        self._actor_class = self.ray.remote(RayWorker).options(
            num_cpus=cores, max_concurrency=_MAX_CONCURRENCY, scheduling_strategy="SPREAD"
        )
        self.handles: list[ActorHandle] = []
        problem = ""
        try:
            problems = [self._start_actor() for _ in range(count)]
            problem = next(filter(None, self.ray.get(problems, timeout=START_TIMEOUT_S)), "")
        except self.ray.exceptions.GetTimeoutError:
            total = self.ray.cluster_resources().get("CPU", 0)
            problem = (
                f"the Ray cluster did not start {count} workers of {cores} cores within"
                f" {START_TIMEOUT_S:g} s, it has {total:g} cores; use fewer, or a larger cluster"
            )
        except self.ray.exceptions.RayError as error:
            problem = f"a worker ended when it began: {error}"
        if problem:
            self.close()
            raise RayWorkersError(f"{where}.ray_workers: {problem}")

    def _start_actor(self) -> Any:
        handle = self._actor_class.remote()
        self.handles.append(handle)
        return handle.open.remote(*self._open_args)

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Kills all workers, and with them their child processes."""
        for handle in self.handles:
            self.ray.kill(handle)
        self.handles = []

    def describe(self) -> Any:
        """The result of the `describe` of one worker's pool; RayWorkersError if it raised."""
        result, problem = self.ray.get(self.handles[0].describe.remote())
        if problem:
            raise RayWorkersError(problem)
        return result

    def ask(
        self, session: int, start_request: Mapping[str, Any] | None, request: Mapping[str, Any]
    ) -> None:
        """Same as `WorkerPool.ask`."""
        if session not in self._worker_of_session:
            busy_workers = list(self._worker_of_session.values())
            self._worker_of_session[session] = min(self.handles, key=busy_workers.count)
        outbox = self._outbox.setdefault(self._worker_of_session[session], [])
        outbox.append((session, start_request, request))
        if not self._is_stateless:
            self._send_requests()

    def _send_requests(self) -> None:
        for handle, requests in self._outbox.items():
            sessions = [session for session, *_ in requests]
            self._pending_answers[handle.ask.remote(requests)] = sessions, time.monotonic()
        self._outbox = {}

    def collect(self, timeout_s: float) -> list[tuple[int, Answer]]:
        """Same as `WorkerPool.collect`."""
        self._send_requests()
        if not self._pending_answers:
            return []
        pending = list(self._pending_answers)
        self.ray.wait(pending, timeout=timeout_s)
        ready, _ = self.ray.wait(pending, num_returns=len(pending), timeout=0.0)
        answers: list[tuple[int, Answer]] = []
        for reference in ready:
            sessions, start_time = self._pending_answers.pop(reference)
            try:
                answers += zip(sessions, self.ray.get(reference), strict=True)
            except self.ray.exceptions.RayActorError:
                self._replace(self._worker_of_session[sessions[0]])
                problem = "unread" if self._is_stateless else "ended"
                seconds, text = time.monotonic() - start_time, "its Ray worker has ended"
                failure = failure_answer(problem, text, seconds, self._is_stateless)
                answers += [(session, dict(failure)) for session in sessions]
                for session in sessions:
                    del self._worker_of_session[session]
        for session, answer in answers:
            if self._is_stateless:
                self._worker_of_session.pop(session, None)
            if answer.get("problem") == "unusable":
                if self._is_stateless:
                    raise WorkerPoolError(answer["text"])
                answer["problem"] = "ended"
        return answers

    def _replace(self, handle: ActorHandle) -> None:
        """Replaces a worker that has died."""
        if handle in self.handles:
            self.handles.remove(handle)
            self._start_actor()

    def end(self, session: int) -> None:
        """Same as `WorkerPool.end`; in a stateless pool to be called for all open sessions."""
        self._outbox = {}
        self._pending_answers = {
            answers: sent
            for answers, sent in self._pending_answers.items()
            if session not in sent[0]
        }
        if worker := self._worker_of_session.pop(session, None):
            worker.end.remote(session)
