"""Calls of reward functions that start while other responses are still being sampled."""

import collections
import concurrent.futures
from collections.abc import Sequence

from jaxrl_llm.processes import messages
from jaxrl_llm.rewards.reward_pool import CallOutcome, RewardCall, RewardPool

CallBatch = concurrent.futures.Future[list[CallOutcome]]


class EarlyCalls:
    """Runs batches of calls on a pool, one after the other in a background thread."""

    def __init__(self, pool: RewardPool):
        self._pool = pool
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "rewards")
        # Call key -> (batch, index in the batch) of submitted calls that `collect` has not taken.
        self._submitted: dict[str, collections.deque[tuple[CallBatch, int]]] = (
            collections.defaultdict(collections.deque)
        )

    def submit(self, calls: Sequence[RewardCall]) -> None:
        """Submits calls whose outcomes `collect` will return."""
        if not calls:
            return
        batch = self._submit(calls)
        for index, call in enumerate(calls):
            self._submitted[_call_key(call)].append((batch, index))

    def _submit(self, calls: Sequence[RewardCall]) -> CallBatch:
        return self._thread.submit(self._pool.attempt, list(calls), self._pool.stops_on_failure)

    def collect(self, calls: Sequence[RewardCall]) -> list[CallOutcome]:
        """The outcome of each call, submitted before or not; raises as `RewardPool.run`."""
        outcomes_by_index: dict[int, CallOutcome] = {}
        for index, call in enumerate(calls):
            if batches := self._submitted.get(_call_key(call)):
                batch, batch_index = batches.popleft()
                outcomes_by_index[index] = batch.result()[batch_index]
                if not batches:
                    del self._submitted[_call_key(call)]
        remaining = [index for index in range(len(calls)) if index not in outcomes_by_index]
        if remaining:  # in the same thread: a pool is not thread-safe
            outcomes = self._submit([calls[index] for index in remaining]).result()
            outcomes_by_index |= dict(zip(remaining, outcomes, strict=True))
        ordered_outcomes = [outcomes_by_index[index] for index in range(len(calls))]
        self._pool.warn_of_failures(calls, ordered_outcomes)
        return ordered_outcomes

    def close(self) -> None:
        """Cancels submitted calls; to be called after the pool is closed."""
        self._thread.shutdown(cancel_futures=True)


def _call_key(call: RewardCall) -> str:
    """A key of all inputs that determine the outcome of a call."""
    inputs = call.data_source, call.solution_str, call.ground_truth, call.extra_info
    try:
        return messages.to_json_text((call.function, *inputs))
    except TypeError:  # the pool raises an error that names the value
        return f"{call.function} row {call.row}"
