"""Calls of reward functions that begin while other responses are still sampled."""

import collections
import concurrent.futures
from collections.abc import Sequence

from jaxrl_llm.processes import messages
from jaxrl_llm.rewards.pool import Call, Outcome, RewardPool

Lot = concurrent.futures.Future[list[Outcome]]


class EarlyCalls:
    """Asks a pool in a thread of its own, one lot of calls after the other."""

    def __init__(self, pool: RewardPool):
        self._pool = pool
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "rewards")
        # What was asked and is not yet wanted: by the call, its lot and its place there.
        self._begun: dict[str, collections.deque[tuple[Lot, int]]] = collections.defaultdict(
            collections.deque
        )

    def begin(self, calls: Sequence[Call]) -> None:
        """Asks for outcomes that `finish` will want."""
        if not calls:
            return
        lot = self._asked(calls)
        for place, call in enumerate(calls):
            self._begun[_name(call)].append((lot, place))

    def _asked(self, calls: Sequence[Call]) -> Lot:
        return self._thread.submit(self._pool.attempt, list(calls), self._pool.stops)

    def finish(self, calls: Sequence[Call]) -> list[Outcome]:
        """Returns the outcome of each call, begun or not; raises as `RewardPool.run`."""
        found: dict[int, Outcome] = {}
        for index, call in enumerate(calls):
            if lots := self._begun.get(_name(call)):
                lot, place = lots.popleft()
                found[index] = lot.result()[place]
                if not lots:
                    del self._begun[_name(call)]
        left = [index for index in range(len(calls)) if index not in found]
        if left:  # by the same thread, as a pool has one user
            outcomes = self._asked([calls[index] for index in left]).result()
            found |= dict(zip(left, outcomes, strict=True))
        in_order = [found[index] for index in range(len(calls))]
        self._pool.report(calls, in_order)
        return in_order

    def close(self) -> None:
        """Forgets what was begun; to be called when the pool is closed."""
        self._thread.shutdown(cancel_futures=True)


def _name(call: Call) -> str:
    """Returns what decides the outcome of a call."""
    given = call.data_source, call.solution_str, call.ground_truth, call.extra_info
    try:
        return messages.as_text((call.function, *given))
    except TypeError:  # the pool says what cannot be sent
        return f"{call.function} row {call.row}"
