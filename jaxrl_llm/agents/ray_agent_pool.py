"""Tools and environments on Ray workers; each worker has a process pool, like a host."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.agents.agent_pool import AgentError, AgentPool, Answer, lost_state_answer
from jaxrl_llm.config.agent import AgentConfig
from jaxrl_llm.processes.ray_workers import ActorHandle, RayWorkers

_POLL_INTERVAL_S = 0.005  # between two polls of the processes
_MAX_EPISODES = 1 << 20


class RayAgentWorker:
    """The actor of a Ray worker: a process pool that any number of episodes ask concurrently."""

    def __init__(self) -> None:
        self._pending_answers: dict[int, asyncio.Future[Answer]] = {}  # awaited, by episode
        self._collect_task: asyncio.Task[None] | None = None
        self._is_open = asyncio.Event()  # Ray may start calls in any order
        self._problem = ""

    def open(self, config: AgentConfig) -> str:
        """Creates the pool; returns the problem, "" if there is none."""
        try:
            self._pool = AgentPool(config)
        except AgentError as error:
            self._problem = str(error)
        self._is_open.set()
        return self._problem

    async def describe(self) -> tuple[dict[str, Any], str]:
        """The result of `AgentPool.describe`, and the problem, "" if there is none."""
        try:
            return self._pool.describe(), ""
        except AgentError as error:
            return {}, str(error)

    async def ask(
        self, episode: int, start_request: Mapping[str, Any], request: Mapping[str, Any]
    ) -> Answer:
        """The answer to a request of an episode; arguments as `AgentPool.ask`."""
        await self._is_open.wait()
        if self._problem:
            return lost_state_answer("ended", self._problem, 0.0)
        answer = self._pending_answers[episode] = asyncio.get_running_loop().create_future()
        self._pool.ask(episode, start_request, request)
        if self._collect_task is None or self._collect_task.done():
            self._collect_task = asyncio.create_task(self._collect())
        return await answer

    async def _collect(self) -> None:
        while self._pending_answers:
            for episode, answer in self._pool.collect(0.0):
                self._pending_answers.pop(episode).set_result(answer)
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def end(self, episode: int) -> None:
        """Ends an episode."""
        if answer := self._pending_answers.pop(episode, None):
            answer.cancel()
        if self._is_open.is_set() and not self._problem:
            self._pool.end(episode)


class RayAgentPool(contextlib.AbstractContextManager["RayAgentPool"]):
    """The interface of `AgentPool`, with the processes on Ray workers.

    An episode stays on its worker, the one with the fewest episodes when it started.
    """

    def __init__(self, config: AgentConfig):
        """Starts the workers; WorkersError if they, or the tools of the config, cannot be used."""
        self._worker_of_episode: dict[int, ActorHandle] = {}
        # Pending answer -> (episode, time of the request).
        self._pending_answers: dict[Any, tuple[int, float]] = {}
        # One core per worker: tools wait most of the time.
        self._workers = RayWorkers(
            "config.agent",
            RayAgentWorker,
            config.ray_workers,
            1,
            config,
            max_concurrency=_MAX_EPISODES,
        )
        self._ray = self._workers.ray

    def __exit__(self, *exception) -> None:
        self._workers.end()

    def describe(self) -> dict[str, Any]:
        """Same as `AgentPool.describe`."""
        described, problem = self._ray.get(self._workers.handles[0].describe.remote())
        if problem:
            raise AgentError(problem)
        return described

    def ask(
        self, episode: int, start_request: Mapping[str, Any], request: Mapping[str, Any]
    ) -> None:
        """Same as `AgentPool.ask`."""
        if episode not in self._worker_of_episode:
            busy_workers = list(self._worker_of_episode.values())
            self._worker_of_episode[episode] = min(self._workers.handles, key=busy_workers.count)
        answer = self._worker_of_episode[episode].ask.remote(
            episode, dict(start_request), dict(request)
        )
        self._pending_answers[answer] = episode, time.monotonic()

    def collect(self, timeout_s: float) -> list[tuple[int, Answer]]:
        """Same as `AgentPool.collect`."""
        if not self._pending_answers:
            return []
        self._ray.wait(list(self._pending_answers), timeout=timeout_s)
        ready, _ = self._ray.wait(
            list(self._pending_answers), num_returns=len(self._pending_answers), timeout=0.0
        )
        answers = []
        for answer in ready:
            episode, start_time = self._pending_answers.pop(answer)
            try:
                answers.append((episode, self._ray.get(answer)))
            except self._ray.exceptions.RayActorError:
                self._workers.replace(self._worker_of_episode.pop(episode))
                seconds = time.monotonic() - start_time
                answers.append(
                    (episode, lost_state_answer("ended", "its Ray worker has ended", seconds))
                )
        return answers

    def end(self, episode: int) -> None:
        """Ends an episode."""
        self._pending_answers = {
            answer: sent for answer, sent in self._pending_answers.items() if sent[0] != episode
        }
        if worker := self._worker_of_episode.pop(episode, None):
            worker.end.remote(episode)


def make_agent_pool(config: AgentConfig) -> AgentPool | RayAgentPool:
    """Creates the process pool of a run, on this host or on Ray workers."""
    return RayAgentPool(config) if config.ray_workers else AgentPool(config)
