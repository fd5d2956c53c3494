"""Tools and environments on Ray workers: each has a pool of processes, as a host has."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.agents.pool import AgentError, Answer, Pool, lost
from jaxrl_llm.config.agent import AgentConfig
from jaxrl_llm.processes.ray_workers import Handle, Workers

_LOOK_S = 0.005  # between two looks at the processes
_MOST_EPISODES = 1 << 20


class PoolOfWorker:
    """What a Ray worker holds: a pool that any number of episodes ask at the same time."""

    def __init__(self) -> None:
        self._answers: dict[int, asyncio.Future[Answer]] = {}  # that episodes wait for
        self._task: asyncio.Task[None] | None = None
        self._is_open = asyncio.Event()  # Ray may begin calls in any order
        self._problem = ""

    def open(self, config: AgentConfig) -> str:
        """Makes the pool; returns what is wrong."""
        try:
            self._pool = Pool(config)
        except AgentError as error:
            self._problem = str(error)
        self._is_open.set()
        return self._problem

    async def describe(self) -> tuple[dict[str, Any], str]:
        """Returns what `Pool.describe` returns, and what is wrong."""
        try:
            return self._pool.describe(), ""
        except AgentError as error:
            return {}, str(error)

    async def ask(
        self, episode: int, begin: Mapping[str, Any], request: Mapping[str, Any]
    ) -> Answer:
        """Returns the answer to a request of an episode; as `Pool.ask`."""
        await self._is_open.wait()
        if self._problem:
            return lost("ended", self._problem, 0.0)
        answer = self._answers[episode] = asyncio.get_running_loop().create_future()
        self._pool.ask(episode, begin, request)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._collect())
        return await answer

    async def _collect(self) -> None:
        while self._answers:
            for episode, answer in self._pool.collect(0.0):
                self._answers.pop(episode).set_result(answer)
            await asyncio.sleep(_LOOK_S)

    async def end(self, episode: int) -> None:
        """Ends an episode."""
        if answer := self._answers.pop(episode, None):
            answer.cancel()
        if self._is_open.is_set() and not self._problem:
            self._pool.end(episode)


class RayPool(contextlib.AbstractContextManager["RayPool"]):
    """Asks the pools of Ray workers, as `Pool` asks the processes of this host.

    An episode stays with its worker, which is the one with the fewest when it begins.
    """

    def __init__(self, config: AgentConfig):
        """Starts the workers; WorkersError if they cannot be used, or the tools of the config."""
        self._homes: dict[int, Handle] = {}
        self._asked: dict[Any, tuple[int, float]] = {}  # by the answer to come: episode, when
        # One core: tools wait most of the time.
        given = "config.agent", PoolOfWorker, config.ray_workers, 1, config
        self._workers = Workers(*given, at_once=_MOST_EPISODES)
        self._ray = self._workers.ray

    def __exit__(self, *exception) -> None:
        self._workers.end()

    def describe(self) -> dict[str, Any]:
        """Returns what `Pool.describe` returns; raises as that does."""
        described, problem = self._ray.get(self._workers.handles[0].describe.remote())
        if problem:
            raise AgentError(problem)
        return described

    def ask(self, episode: int, begin: Mapping[str, Any], request: Mapping[str, Any]) -> None:
        """Sends a request of an episode; as `Pool.ask`."""
        if episode not in self._homes:
            homes = list(self._homes.values())
            self._homes[episode] = min(self._workers.handles, key=homes.count)
        answer = self._homes[episode].ask.remote(episode, dict(begin), dict(request))
        self._asked[answer] = episode, time.monotonic()

    def collect(self, patience_s: float) -> list[tuple[int, Answer]]:
        """Returns the answers that have come; waits so long for the first; as `Pool.collect`."""
        if not self._asked:
            return []
        self._ray.wait(list(self._asked), timeout=patience_s)
        ready, _ = self._ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0.0)
        found = []
        for answer in ready:
            episode, asked = self._asked.pop(answer)
            try:
                found.append((episode, self._ray.get(answer)))
            except self._ray.exceptions.RayActorError:
                self._workers.replace(self._homes.pop(episode))
                seconds = time.monotonic() - asked
                found.append((episode, lost("ended", "its Ray worker has ended", seconds)))
        return found

    def end(self, episode: int) -> None:
        """Ends an episode."""
        self._asked = {a: asked for a, asked in self._asked.items() if asked[0] != episode}
        if home := self._homes.pop(episode, None):
            home.end.remote(episode)


def pool_of(config: AgentConfig) -> Pool | RayPool:
    """Returns the pool of a run: on this host, or on Ray workers."""
    return RayPool(config) if config.ray_workers else Pool(config)
