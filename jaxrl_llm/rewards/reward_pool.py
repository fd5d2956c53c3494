"""Calls reward functions in a pool of worker processes, on this host or on Ray workers.

The workers are fresh interpreters: `multiprocessing` would import the main module of the run, and
jax; a fork would share what users' modules open when they are imported.
"""

import collections
import contextlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from jaxrl_llm.config import RewardsConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.processes.child import ChildProcess
from jaxrl_llm.processes.messages import send, to_json_text
from jaxrl_llm.processes.ray_worker_pool import RayWorkerPool
from jaxrl_llm.processes.worker_pool import Answer, WorkerPool, WorkerPoolError
from jaxrl_llm.rewards import reward_worker
from jaxrl_llm.rewards.functions import ARGUMENTS
from jaxrl_llm.rewards.reward_worker import MAX_ANSWER_BYTES

logger = logging.getLogger(__name__)


POLL_INTERVAL_S = 0.5  # between two checks whether another thread has closed the pool


class RewardError(UserError, RuntimeError):
    """A response could not be scored; the message names it, the function and the cause."""


@dataclass(frozen=True)
class RewardCall:
    """A call of one reward function for one response."""

    function: str  # one of the pool's functions
    row: int  # of the response, for errors
    data_source: str
    solution_str: str
    ground_truth: Any  # if `is_check`, a list of them
    extra_info: Mapping[str, Any]
    location: str = ""  # row of the data file, `FILE, row N`; "": `row` names it
    is_check: bool = False  # run `truth_problems` of the function instead of scoring


@dataclass(frozen=True)
class CallOutcome:
    """The score of a call, or its failure."""

    score: float
    details: Mapping[str, Any] = field(default_factory=dict)  # keys returned beside the score
    failure: str = ""  # cause if the function gave no score, else ""


class RewardPool(contextlib.AbstractContextManager["RewardPool"]):
    """Calls reward functions in worker processes; a context manager that ends them."""

    def __init__(self, functions: Sequence[str], config: RewardsConfig):
        """Starts the workers, none without `functions` (names for `functions.resolve`).

        RewardError or RayWorkersError if one of them cannot be found or imported.
        """
        self._functions, self._config = tuple(dict.fromkeys(functions)), config
        self._sessions = itertools.count()
        self._pool: WorkerPool | RayWorkerPool | None = None
        if functions and config.ray_workers:
            self._pool = RayWorkerPool(
                "config.rewards",
                _local_pool,
                self._functions,
                config,
                count=config.ray_workers,
                cores=config.num_workers,
                sessions_per_worker=4 * config.num_workers,  # the next calls are there already
                is_stateless=True,
            )
        elif functions:
            self._pool = _local_pool(self._functions, config)

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers for good; pending calls of other threads raise RewardError."""
        pool, self._pool = self._pool, None
        if pool:
            pool.close()

    def run(self, calls: Sequence[RewardCall]) -> list[CallOutcome]:
        """The outcome of each call; RewardError at the first failure if failures stop the run."""
        outcomes = self.attempt(calls, stop=self.stops_on_failure)
        self.warn_of_failures(calls, outcomes)
        return outcomes

    def warn_of_failures(
        self, calls: Sequence[RewardCall], outcomes: Sequence[CallOutcome]
    ) -> None:
        """Logs a warning about failed calls."""
        if failed := [index for index, outcome in enumerate(outcomes) if outcome.failure]:
            first = f"{_call_text(calls[failed[0]])}: {outcomes[failed[0]].failure}"
            effect = f"score {self._config.failure_score:g}"
            if self._config.on_failure == "leave_out":
                effect = "their responses are left out"
            message = "%d of %d reward calls failed and %s; the first: %s"
            logger.warning(message, len(failed), len(calls), effect, first)

    @property
    def stops_on_failure(self) -> bool:
        """Whether a failed call stops the run."""
        return self._config.on_failure == "stop"

    def attempt(self, calls: Sequence[RewardCall], stop: bool = False) -> list[CallOutcome]:
        """The outcome of each call, without logging; RewardError at the first failure if `stop`."""
        pool = self._pool
        waiting = collections.deque(range(len(calls)))
        running: dict[int, int] = {}  # session -> index of its call
        retried: set[int] = set()  # calls whose first worker ended before it read them
        outcomes: dict[int, CallOutcome] = {}
        try:
            while pool is None or len(outcomes) < len(calls):
                if pool is None or self._pool is None:
                    raise RewardError("the reward pool is closed")
                while waiting and len(running) < pool.capacity:
                    index, session = waiting.popleft(), next(self._sessions)
                    pool.ask(session, None, _request(calls[index]))
                    running[session] = index
                # Wake up regularly: another thread may close the pool.
                for session, answer in pool.collect(POLL_INTERVAL_S):
                    index = running.pop(session)
                    if answer.get("problem") == "unread" and index not in retried:
                        retried.add(index)
                        waiting.appendleft(index)
                        continue
                    outcomes[index] = self._outcome(answer)
                    if outcomes[index].failure and stop:
                        self._stop(calls[index], outcomes[index])
        except KeyboardInterrupt:  # the run ends: start no replacement processes
            self.close()
            raise
        except WorkerPoolError as error:
            raise _load_error(self._functions, error) from error
        finally:
            for session in running:
                if self._pool:
                    self._pool.end(session)
        return [outcomes[index] for index in range(len(calls))]

    def _outcome(self, answer: Answer) -> CallOutcome:
        if "score" in answer:
            return CallOutcome(answer["score"], answer["details"])
        failure = str(answer.get("error", answer.get("text")))
        if answer.get("problem") == "timeout":
            failure = f"no answer within rewards.timeout_s={self._config.timeout_s:g} seconds"
        elif answer.get("problem") == "unread":
            failure = f"two workers ended before they read it; of the second, {failure}"
        return CallOutcome(self._config.failure_score, failure=failure)

    def _stop(self, call: RewardCall, outcome: CallOutcome) -> NoReturn:
        raise RewardError(
            f"{_call_text(call)}: {outcome.failure}\n"
            "Correct the function, or set rewards.on_failure='score' to give such responses"
            f" {self._config.failure_score:g}, or 'leave_out' to learn without them"
        )


def _call_text(call: RewardCall) -> str:
    row_text = call.location or f"row {call.row}"
    return f"reward function {call.function!r}, {row_text}, data source {call.data_source!r}"


def _request(call: RewardCall) -> dict[str, Any]:
    arguments = {name: getattr(call, name) for name in ARGUMENTS}
    if call.is_check:
        arguments = {"ground_truths": call.ground_truth}
    try:
        # A text in the message: the worker answers for one that it cannot decode, too.
        return {"call": to_json_text((call.function, arguments))}
    except (TypeError, RecursionError) as error:
        problem = "ground_truth or extra_info cannot be sent to a process"
        raise RewardError(f"{_call_text(call)}: {problem}: {error}") from error


def _local_pool(functions: Sequence[str], config: RewardsConfig) -> WorkerPool:
    """The workers of this host; RewardError if a function cannot be found or imported."""

    def start_process() -> ChildProcess:
        process = ChildProcess(reward_worker.__name__, config.environment)
        send(process.connection, (functions, config.memory_gib))
        return process

    try:
        return WorkerPool(
            start_process,
            config.num_workers,
            config.timeout_s,
            is_stateless=True,
            max_answer_bytes=MAX_ANSWER_BYTES,
        )
    except WorkerPoolError as error:
        raise _load_error(functions, error) from error


def _load_error(functions: Sequence[str], error: WorkerPoolError) -> RewardError:
    return RewardError(f"cannot load the reward functions ({', '.join(functions)}): {error}")
