"""Reward functions on Ray workers; each worker has a process pool, like a host."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.config import RewardsConfig
from jaxrl_llm.processes.ray_workers import ActorHandle, RayWorkers
from jaxrl_llm.rewards.reward_pool import (
    POLL_INTERVAL_S,
    POOL_CLOSED_TEXT,
    CallOutcome,
    RewardCall,
    RewardError,
    RewardPool,
)


class RayRewardWorker:
    """The actor of a Ray worker: a reward pool."""

    def open(self, functions: Sequence[str], config: RewardsConfig) -> str:
        """Creates the pool; returns the problem, "" if there is none."""
        self._problem = ""
        try:
            self._pool = RewardPool(functions, config)
        except RewardError as error:
            self._problem = str(error)
        return self._problem

    def attempt(self, calls: Sequence[RewardCall]) -> tuple[list[CallOutcome], str]:
        """The result of `RewardPool.attempt`, and the problem, "" if there is none."""
        if self._problem:
            return [], self._problem
        try:
            return self._pool.attempt(calls), ""
        except RewardError as error:
            return [], str(error)


class RayRewardPool(RewardPool):
    """The interface of `RewardPool`, with the processes on Ray workers."""

    def __init__(self, functions: Sequence[str], config: RewardsConfig):
        """Starts the workers; WorkersError if they, or one of the functions, cannot be used."""
        super().__init__((), config)
        self._ray_workers = RayWorkers(
            "config.rewards",
            RayRewardWorker,
            config.ray_workers if functions else 0,
            config.num_workers,
            tuple(dict.fromkeys(functions)),
            config,
        )

    def close(self) -> None:
        """Ends the workers."""
        super().close()
        self._ray_workers.end()

    def attempt(self, calls: Sequence[RewardCall], stop: bool = False) -> list[CallOutcome]:
        """Same as `RewardPool.attempt`.

        Each worker gets chunks of two calls for each of its processes, one chunk at a time. The
        chunk of a worker that dies is retried once, on another worker.
        """
        ray, chunk_size = self._ray_workers.ray, 2 * self._config.num_workers
        waiting = deque(
            range(i, min(i + chunk_size, len(calls))) for i in range(0, len(calls), chunk_size)
        )
        running: dict[Any, tuple[ActorHandle, range]] = {}
        outcomes: dict[int, CallOutcome] = {}
        retried = set[range]()
        while waiting or running:
            if self._is_closed:
                raise RewardError(POOL_CLOSED_TEXT)
            busy_workers = [handle for handle, _ in running.values()]
            for handle in self._ray_workers.handles:
                if waiting and handle not in busy_workers:
                    chunk = waiting.popleft()
                    running[handle.attempt.remote([calls[i] for i in chunk])] = handle, chunk
            for answer in ray.wait(list(running), timeout=POLL_INTERVAL_S)[0]:
                handle, chunk = running.pop(answer)
                try:
                    chunk_outcomes, problem = ray.get(answer)
                except ray.exceptions.RayActorError:
                    if self._is_closed:
                        raise RewardError(POOL_CLOSED_TEXT) from None
                    self._ray_workers.replace(handle)
                    if chunk not in retried:
                        retried.add(chunk)
                        waiting.appendleft(chunk)
                        continue
                    failure = "two Ray workers ended before they answered"
                    chunk_outcomes, problem = [self._failed(failure)] * len(chunk), ""
                if problem:
                    raise RewardError(problem)
                outcomes |= zip(chunk, chunk_outcomes, strict=True)
                for index in chunk:
                    if outcomes[index].failure and stop:
                        self._stop(calls[index], outcomes[index])
        return [outcomes[index] for index in range(len(calls))]


def make_reward_pool(functions: Sequence[str], config: RewardsConfig) -> RewardPool:
    """Creates the reward pool of a run, on this host or on Ray workers."""
    return (RayRewardPool if config.ray_workers else RewardPool)(functions, config)
