"""A pool of processes that call reward functions under a real time limit.

A call that hangs is ended by killing its process, which a new one replaces; other calls go on. The
workers are fresh interpreters: `multiprocessing` would import the main module of the run, and jax.
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
from jaxrl_llm.processes.child import CLOSE_TIMEOUT_S, START_TIMEOUT_S, Child
from jaxrl_llm.processes.messages import send
from jaxrl_llm.rewards import worker as process
from jaxrl_llm.rewards.functions import ARGUMENTS
from jaxrl_llm.rewards.worker import MAX_ANSWER_BYTES

logger = logging.getLogger(__name__)


PATIENCE_S = 0.5  # between two looks whether another thread has closed the pool
CLOSED = "the reward pool is closed"


class RewardError(UserError, RuntimeError):
    """A response could not be scored; the text says which, by what, and why."""


@dataclass(frozen=True)
class Call:
    """One response to score by one function."""

    function: str  # one of the names that the pool was built with
    row: int  # names the response in errors
    data_source: str
    solution_str: str
    ground_truth: Any  # of a check, a list of them
    extra_info: Mapping[str, Any]
    where: str = ""  # of the row of a file, `FILE, row N`; "": `row` names it
    is_check: bool = False  # asks for `truth_problems` of the function, not for a score


@dataclass(frozen=True)
class Outcome:
    """The result of a call."""

    score: float
    details: Mapping[str, Any] = field(default_factory=dict)  # keys returned beside the score
    failure: str = ""  # why there is no score of the function's own; "": there is


class RewardPool(contextlib.AbstractContextManager["RewardPool"]):
    """Calls reward functions in worker processes; a context manager that ends them."""

    def __init__(self, functions: Sequence[str], config: RewardsConfig):
        """Starts workers, none without `functions`, names for `functions.resolve`.

        RewardError if a worker cannot find or import one of them.
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
        """Ends the workers; the pool cannot be used afterwards, and calls of other threads end."""
        self._is_closed = True
        for worker in self._workers:
            worker.connection.close()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for worker in self._workers:
            worker.end(max(0.0, deadline - time.monotonic()))
        self._workers = []

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """Returns the outcome of each call; raises RewardError if one fails and that stops runs."""
        outcomes = self.attempt(calls, stop=self.stops)
        self.report(calls, outcomes)
        return outcomes

    def report(self, calls: Sequence[Call], outcomes: Sequence[Outcome]) -> None:
        """Warns of calls that failed."""
        if failed := [index for index, outcome in enumerate(outcomes) if outcome.failure]:
            first = f"{_where(calls[failed[0]])}: {outcomes[failed[0]].failure}"
            effect = f"score {self._config.failure_score:g}"
            if self._config.on_failure == "leave_out":
                effect = "their responses are left out"
            said = "%d of %d reward calls failed and %s; the first: %s"
            logger.warning(said, len(failed), len(calls), effect, first)

    @property
    def stops(self) -> bool:
        """Whether a call that fails ends the run."""
        return self._config.on_failure == "stop"

    def attempt(self, calls: Sequence[Call], stop: bool = False) -> list[Outcome]:
        """Returns the outcome of each call; logs no failures, raises at the first if `stop`."""
        if not self._workers:
            raise RewardError(CLOSED)
        outcomes: dict[int, Outcome] = {}
        waiting = deque(range(len(calls)))
        repeated = set[int]()  # calls whose first process died before it read them
        try:
            while len(outcomes) < len(calls):
                if self._is_closed:
                    raise RewardError(CLOSED)
                for worker in [worker for worker in self._workers if worker.idle]:
                    try:
                        if waiting:
                            worker.begin(waiting[0], calls[waiting[0]], self._config.timeout_s)
                            waiting.popleft()
                    except OSError:  # it died between calls; the call goes to another one
                        self._replace(worker)
                for worker in self._workers_with_news():
                    if not worker.ready:  # a replacement that has finished its imports
                        worker.wait_until_ready()
                        continue
                    index = worker.call
                    outcome = self._outcome(worker)
                    if outcome is None and index not in repeated:
                        repeated.add(index)
                        waiting.appendleft(index)
                        continue
                    outcomes[index] = outcome or self._failed("two processes died before it began")
                    if outcomes[index].failure and stop:
                        self._stop(calls[index], outcomes[index])
        except KeyboardInterrupt:  # the run ends: start no process for calls that will not come
            self.close()
            raise
        finally:
            # If the loop ended early, an answer to an old call must not be read for a later one.
            for worker in [worker for worker in self._workers if worker.call >= 0]:
                self._replace(worker)
        return [outcomes[index] for index in range(len(calls))]

    def _stop(self, call: Call, outcome: Outcome) -> NoReturn:
        raise RewardError(
            f"{_where(call)}: {outcome.failure}\n"
            "Correct the function, or set rewards.on_failure='score' to give such responses"
            f" {self._config.failure_score:g}, or 'leave_out' to learn without them"
        )

    def _workers_with_news(self) -> list["_Worker"]:
        """Waits; returns workers that answered, died, or are over their time."""
        active = [worker for worker in self._workers if not worker.idle]
        patience = max(0.0, min((w.deadline for w in active), default=0.0) - time.monotonic())
        # Not for long: another thread may close the pool.
        readable = wait([worker.connection for worker in active], min(patience, PATIENCE_S))
        now = time.monotonic()
        return [w for w in active if w.connection in readable or now >= w.deadline]

    def _failed(self, failure: str) -> Outcome:
        return Outcome(self._config.failure_score, failure=failure)

    def _outcome(self, worker: "_Worker") -> Outcome | None:
        """Returns the outcome of a call, None if the worker died unread; replaces a lost worker."""
        if not worker.connection.poll():
            self._replace(worker)
            limit = f"rewards.timeout_s={self._config.timeout_s:g}"
            return self._failed(f"no answer within {limit} seconds")
        try:
            answer = worker.receive()
        except ConnectionResetError:  # a Unix socket says so if it closed with unread bytes
            self._replace(worker)
            return None
        except (EOFError, OSError, ValueError, RecursionError):
            # It is gone, or wrote to the socket itself.
            death = worker.end(CLOSE_TIMEOUT_S)
            self._replace(worker)
            return self._failed(f"the process that called it ended with {death}")
        if "error" in answer:
            return self._failed(answer["error"])
        return Outcome(answer["score"], answer["details"])

    def _replace(self, worker: "_Worker") -> None:
        worker.end(0.0)
        if self._is_closed:
            return
        other = self._workers[self._workers.index(worker)] = _Worker(self._functions, self._config)
        if self._is_closed:  # meanwhile, by another thread
            other.end(0.0)


def _where(call: Call) -> str:
    row = call.where or f"row {call.row}"
    return f"reward function {call.function!r}, {row}, data source {call.data_source!r}"


class _Worker(Child):
    """One process and the call that it works on."""

    def __init__(self, functions: tuple[str, ...], config: RewardsConfig):
        super().__init__(process.__name__, config.environment)
        self._functions = functions
        self.ready = False
        self.call = -1  # index of the call it is busy with; -1: none
        self.deadline = time.monotonic() + START_TIMEOUT_S
        send(self.connection, (functions, config.memory_gib))

    @property
    def idle(self) -> bool:
        return self.ready and self.call < 0

    def begin(self, index: int, call: Call, timeout_s: float) -> None:
        arguments = {name: getattr(call, name) for name in ARGUMENTS}
        if call.is_check:
            arguments = {"ground_truths": call.ground_truth}
        try:
            send(self.connection, (call.function, arguments))
        except (TypeError, RecursionError) as error:
            what = "ground_truth or extra_info cannot be sent to a process"
            raise RewardError(f"{_where(call)}: {what}: {error}") from error
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
