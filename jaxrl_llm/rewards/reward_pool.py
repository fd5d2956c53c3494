"""A process pool that calls reward functions under a hard time limit.

A call that hangs is ended by killing its process, which is replaced; other calls go on. The workers
are fresh interpreters: `multiprocessing` would import the main module of the run, and jax.
"""

import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, NoReturn

from jaxrl_llm.config import RewardsConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.processes.child import CLOSE_TIMEOUT_S, START_TIMEOUT_S, ChildProcess
from jaxrl_llm.processes.messages import send
from jaxrl_llm.rewards import reward_worker as process
from jaxrl_llm.rewards.functions import ARGUMENTS
from jaxrl_llm.rewards.reward_worker import MAX_ANSWER_BYTES

logger = logging.getLogger(__name__)


POLL_INTERVAL_S = 0.5  # between two checks whether another thread has closed the pool
POOL_CLOSED_TEXT = "the reward pool is closed"


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

        RewardError if one of them cannot be found or imported.
        """
        self._functions, self._config = tuple(dict.fromkeys(functions)), config
        self._workers: list[_Worker] = []
        self._is_closed = False
        try:
            for _ in range(config.num_workers if functions else 0):
                self._workers.append(_Worker(self._functions, config))
            for worker in self._workers:
                worker.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers for good; pending calls of other threads raise RewardError."""
        self._is_closed = True
        for worker in self._workers:
            worker.connection.close()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for worker in self._workers:
            worker.end(max(0.0, deadline - time.monotonic()))
        self._workers = []

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
        if not self._workers:
            raise RewardError(POOL_CLOSED_TEXT)
        outcomes: dict[int, CallOutcome] = {}
        waiting = deque(range(len(calls)))
        retried = set[int]()  # calls whose first process died before reading them
        try:
            while len(outcomes) < len(calls):
                if self._is_closed:
                    raise RewardError(POOL_CLOSED_TEXT)
                for worker in [worker for worker in self._workers if worker.idle]:
                    try:
                        if waiting:
                            worker.begin(waiting[0], calls[waiting[0]], self._config.timeout_s)
                            waiting.popleft()
                    except OSError:  # it died between calls; another worker gets the call
                        self._replace(worker)
                for worker in self._workers_with_news():
                    if not worker.ready:  # a replacement that has finished its imports
                        worker.wait_until_ready()
                        continue
                    index = worker.call
                    outcome = self._outcome(worker)
                    if outcome is None and index not in retried:
                        retried.add(index)
                        waiting.appendleft(index)
                        continue
                    outcomes[index] = outcome or self._failed("two processes died before it began")
                    if outcomes[index].failure and stop:
                        self._stop(calls[index], outcomes[index])
        except KeyboardInterrupt:  # the run ends: start no replacement processes
            self.close()
            raise
        finally:
            # After an early exit, an answer to an old call must not be read as one to a later call.
            for worker in [worker for worker in self._workers if worker.call >= 0]:
                self._replace(worker)
        return [outcomes[index] for index in range(len(calls))]

    def _stop(self, call: RewardCall, outcome: CallOutcome) -> NoReturn:
        raise RewardError(
            f"{_call_text(call)}: {outcome.failure}\n"
            "Correct the function, or set rewards.on_failure='score' to give such responses"
            f" {self._config.failure_score:g}, or 'leave_out' to learn without them"
        )

    def _workers_with_news(self) -> list["_Worker"]:
        """Waits for and returns workers that answered, died, or exceeded the time limit."""
        active = [worker for worker in self._workers if not worker.idle]
        timeout_s = max(0.0, min((w.deadline for w in active), default=0.0) - time.monotonic())
        # Wake up regularly: another thread may close the pool.
        readable = wait([worker.connection for worker in active], min(timeout_s, POLL_INTERVAL_S))
        now = time.monotonic()
        return [w for w in active if w.connection in readable or now >= w.deadline]

    def _failed(self, failure: str) -> CallOutcome:
        return CallOutcome(self._config.failure_score, failure=failure)

    def _outcome(self, worker: "_Worker") -> CallOutcome | None:
        """The outcome of a call, None if the worker died before reading it; replaces the worker."""
        if not worker.connection.poll():
            self._replace(worker)
            limit = f"rewards.timeout_s={self._config.timeout_s:g}"
            return self._failed(f"no answer within {limit} seconds")
        try:
            answer = worker.receive()
        except ConnectionResetError:  # a Unix socket that closed with unread bytes
            self._replace(worker)
            return None
        except (EOFError, OSError, ValueError, RecursionError):
            # The process is gone, or user code wrote to the socket.
            exit_text = worker.end(CLOSE_TIMEOUT_S)
            self._replace(worker)
            return self._failed(f"the process that called it ended with {exit_text}")
        if "error" in answer:
            return self._failed(answer["error"])
        return CallOutcome(answer["score"], answer["details"])

    def _replace(self, worker: "_Worker") -> None:
        worker.end(0.0)
        if self._is_closed:
            return
        replacement = self._workers[self._workers.index(worker)] = _Worker(
            self._functions, self._config
        )
        if self._is_closed:  # by another thread in the meantime
            replacement.end(0.0)


def _call_text(call: RewardCall) -> str:
    row_text = call.location or f"row {call.row}"
    return f"reward function {call.function!r}, {row_text}, data source {call.data_source!r}"


class _Worker(ChildProcess):
    """A worker process and its current call."""

    def __init__(self, functions: tuple[str, ...], config: RewardsConfig):
        super().__init__(process.__name__, config.environment)
        self._functions = functions
        self.ready = False
        self.call = -1  # index of the current call; -1: none
        self.deadline = time.monotonic() + START_TIMEOUT_S
        send(self.connection, (functions, config.memory_gib))

    @property
    def idle(self) -> bool:
        return self.ready and self.call < 0

    def begin(self, index: int, call: RewardCall, timeout_s: float) -> None:
        arguments = {name: getattr(call, name) for name in ARGUMENTS}
        if call.is_check:
            arguments = {"ground_truths": call.ground_truth}
        try:
            send(self.connection, (call.function, arguments))
        except (TypeError, RecursionError) as error:
            problem = "ground_truth or extra_info cannot be sent to a process"
            raise RewardError(f"{_call_text(call)}: {problem}: {error}") from error
        self.call = index
        self.deadline = time.monotonic() + timeout_s

    def receive(self) -> dict[str, Any]:
        answer = json.loads(self.connection.recv_bytes(MAX_ANSWER_BYTES))
        self.call = -1
        return answer

    def wait_until_ready(self) -> None:
        try:
            answer = {"error": f"no sign for {START_TIMEOUT_S:g} s"}
            if self.connection.poll(max(0.0, self.deadline - time.monotonic())):
                answer = self.receive()
        except (EOFError, OSError):
            answer = {"error": f"its process ended with {self.end(CLOSE_TIMEOUT_S)}"}
        if "error" in answer:
            names = ", ".join(self._functions)
            raise RewardError(f"cannot load the reward functions ({names}): {answer['error']}")
        self.ready = True
