"""Reward functions on Ray workers: each has a pool of processes, as a host has."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.config import RewardsConfig
from jaxrl_llm.processes.ray_workers import Handle, Workers
from jaxrl_llm.rewards.pool import CLOSED, PATIENCE_S, Call, Outcome, RewardError, RewardPool


class PoolOfWorker:
    """What a Ray worker holds: a pool."""

    def open(self, functions: Sequence[str], config: RewardsConfig) -> str:
        """Makes the pool; returns what is wrong."""
        self._problem = ""
        try:
            self._pool = RewardPool(functions, config)
        except RewardError as error:
            self._problem = str(error)
        return self._problem

    def attempt(self, calls: Sequence[Call]) -> tuple[list[Outcome], str]:
        """Returns what `RewardPool.attempt` returns, and what is wrong."""
        if self._problem:
            return [], self._problem
        try:
            return self._pool.attempt(calls), ""
        except RewardError as error:
            return [], str(error)


class RayRewardPool(RewardPool):
    """Calls reward functions on Ray workers, as `RewardPool` does in processes of this host."""

    def __init__(self, functions: Sequence[str], config: RewardsConfig):
        """Starts the workers; WorkersError if they cannot be used, or one of the functions."""
        super().__init__((), config)
        count, each = config.ray_workers if functions else 0, config.num_workers
        given = tuple(dict.fromkeys(functions)), config
        self._on_ray = Workers("config.rewards", PoolOfWorker, count, each, *given)

    def close(self) -> None:
        """Ends the workers."""
        super().close()
        self._on_ray.end()

    def attempt(self, calls: Sequence[Call], stop: bool = False) -> list[Outcome]:
        """Returns the outcome of each call; as `RewardPool.attempt`.

        Each worker gets two calls for each of its processes at a time, and more when it is done.
        The calls of a worker that dies are made once more, by another one.
        """
        ray, size = self._on_ray.ray, 2 * self._config.num_workers
        waiting = deque(range(i, min(i + size, len(calls))) for i in range(0, len(calls), size))
        running: dict[Any, tuple[Handle, range]] = {}
        outcomes: dict[int, Outcome] = {}
        repeated = set[range]()
        while waiting or running:
            if self._is_closed:
                raise RewardError(CLOSED)
            busy = [handle for handle, _ in running.values()]
            for handle in self._on_ray.handles:
                if waiting and handle not in busy:
                    part = waiting.popleft()
                    running[handle.attempt.remote([calls[i] for i in part])] = handle, part
            for answer in ray.wait(list(running), timeout=PATIENCE_S)[0]:
                handle, part = running.pop(answer)
                try:
                    found, problem = ray.get(answer)
                except ray.exceptions.RayActorError:
                    if self._is_closed:
                        raise RewardError(CLOSED) from None
                    self._on_ray.replace(handle)
                    if part not in repeated:
                        repeated.add(part)
                        waiting.appendleft(part)
                        continue
                    said = "two Ray workers ended before they answered"
                    found, problem = [self._failed(said)] * len(part), ""
                if problem:
                    raise RewardError(problem)
                outcomes |= zip(part, found, strict=True)
                for index in part:
                    if outcomes[index].failure and stop:
                        self._stop(calls[index], outcomes[index])
        return [outcomes[index] for index in range(len(calls))]


def pool_of(functions: Sequence[str], config: RewardsConfig) -> RewardPool:
    """Returns the pool of a run: on this host, or on Ray workers."""
    return (RayRewardPool if config.ray_workers else RewardPool)(functions, config)
