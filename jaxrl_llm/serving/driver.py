"""One thread that owns the engine: takes requests from any thread, steps, tells what came.

The engine itself knows no threads. Everything that reaches it goes through an inbox that is
emptied between two of its steps: requests, cancellations, other weights, the end.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from absl import logging

from jaxrl_llm.rollout.checks import RequestError
from jaxrl_llm.rollout.requests import Progress, Request
from jaxrl_llm.rollout.tally import Statistics
from jaxrl_llm.rollout.warm_up import Program

State = Literal["starting", "ready", "stopping", "failed"]
Params = Any


class SteppedEngine(Protocol):
    """What the driver needs of `rollout.engine.Engine`."""

    num_slots: int

    @property
    def num_active(self) -> int: ...

    @property
    def statistics(self) -> Statistics: ...

    def num_compilations(self) -> int: ...

    def submit(self, request: Request) -> int: ...

    def abort(self, number: int) -> Any: ...

    def step(self, params: Params) -> Sequence[Progress]: ...

    def compile(self, params: Params, program: Program) -> None: ...


class Refused(Exception):
    """A request that was not served, or not to its end."""


class QueueFull(Refused):
    """As many samples wait as may; try again later."""


class NotServing(Refused):
    """The driver has not started or is stopping, or stopped before the request was done."""


class Unfit(Refused):
    """The engine cannot serve such a request; trying again will not help."""


class RequestFailed(Refused):
    """Something went wrong on behalf of this request; others do not notice."""


class EngineFailed(Refused):
    """The engine broke; nothing is served any more."""


# (which sample, counted through the requests of a ticket; what came), or why nothing more comes.
Event = tuple[int, Progress] | Refused
Listener = Callable[[Event], None]


@dataclasses.dataclass(eq=False)
class Ticket:
    """Requests that were submitted together, and who listens."""

    requests: tuple[Request, ...]
    listener: Listener
    numbers: tuple[int, ...] = ()  # the engine's, once it has them
    num_unfinished: int = 0  # samples; 0 when nothing more will be told


def _at_once(call: Callable[[], None]) -> None:
    call()


class Driver:
    """Serves tickets with an engine, in a thread of its own."""

    def __init__(self, engine: SteppedEngine, params: Params, *, max_waiting: int):
        """
        Args:
          engine: Used by the driver's thread alone from `start` on.
          params: Weights of the first step.
          max_waiting: Samples that may wait beside those that fill the slots.
        """
        self.capacity = engine.num_slots + max_waiting
        self._engine = engine
        self._params = params
        self._owners: dict[int, tuple[Ticket, int]] = {}  # engine's number -> ticket, first index
        self._lock = threading.Condition()
        # Under the lock:
        self._state: State = "starting"
        self._inbox: dict[Ticket, None] = {}
        self._cancelled: list[Ticket] = []
        self._programs: collections.deque[Program] = collections.deque()
        self._num_unfinished = 0
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> State:
        return self._state

    @property
    def num_unfinished(self) -> int:
        """Samples accepted and not yet finished or given up."""
        return self._num_unfinished

    @property
    def num_active(self) -> int:
        """Samples that stand in a slot."""
        return self._engine.num_active

    @property
    def num_compilations(self) -> int:
        """Programs that the engine has compiled; while it compiles, everything waits."""
        return self._engine.num_compilations()

    @property
    def num_programs_left(self) -> int:
        """Programs of the warm-up that are still to be compiled."""
        return len(self._programs)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens that a sample got in a decode step; more than 1 with guesses that were right."""
        return self._engine.statistics.tokens_per_forward

    def start(
        self,
        programs: Sequence[Program] = (),
        call: Callable[[Callable[[], None]], object] = _at_once,
    ) -> None:
        """Begins to serve.

        Args:
          programs: Are compiled one by one while there is nothing else to do, the first ones first.
          call: Runs a function where listeners are to be called, once for all that a step told;
            by default in the driver's thread. An event loop's `call_soon_threadsafe` will do.
        """
        self._call = call
        self._programs.extend(programs)
        self._num_programs, self._num_compiled = len(programs), 0
        self._thread = threading.Thread(target=self._run, name="engine driver", daemon=True)
        self._state = "ready"
        self._thread.start()

    def submit(self, requests: Sequence[Request], listener: Listener) -> Ticket:
        """Queues requests, all of them or none; `listener` hears of every sample until its end.

        Raises:
          NotServing: If the driver is not ready.
          Unfit: If there are more samples than it could ever hold.
          QueueFull: If there are more than it can hold now.
        """
        count = sum(len(request.params) for request in requests)
        ticket = Ticket(tuple(requests), listener, num_unfinished=count)
        with self._lock:
            if self._state != "ready":
                raise NotServing(f"the server is {self._state}")
            if not 1 <= count <= self.capacity:
                raise Unfit(
                    f"{count} samples in one request; this server holds 1 to {self.capacity}"
                )
            if self._num_unfinished + count > self.capacity:
                raise QueueFull(
                    f"{self._num_unfinished} samples are running or waiting and {count} more do"
                    f" not fit in {self.capacity}; try again later"
                )
            self._num_unfinished += count
            self._inbox[ticket] = None
            self._lock.notify_all()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Gives a ticket up; its slots are free before the next step. Once finished: nothing."""
        with self._lock:
            if ticket in self._inbox:
                del self._inbox[ticket]
                self._finish(ticket, ticket.num_unfinished)
            elif ticket.num_unfinished:
                self._cancelled.append(ticket)
                self._lock.notify_all()

    def use(self, params: Params) -> None:
        """Takes other weights, of the same shapes and layout, from the next step on."""
        with self._lock:
            self._params = params

    def refuse(self) -> None:
        """Begins to stop: accepts nothing more, finishes what it has."""
        with self._lock:
            if self._state != "failed":
                self._state = "stopping"
            self._programs.clear()

    def drain(self, timeout_s: float) -> bool:
        """Waits until nothing is unfinished; returns whether it came to that in time."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._num_unfinished, timeout_s)

    def close(self) -> None:
        """Ends the thread after its step; tickets that are unfinished hear `NotServing`."""
        with self._lock:
            self.refuse()
            self._closing = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        end: Refused
        try:
            while self._turn():
                pass
            end = NotServing("the server stopped before this request was done")
        except Exception as error:  # whatever it is, clients must hear of it
            logging.exception("the engine failed")
            end = EngineFailed(f"the engine failed: {type(error).__name__}")
            with self._lock:
                self._state = "failed"
        self._end(end)

    def _turn(self) -> bool:
        """Empties the inbox and takes a step, or warms up; returns whether to go on."""
        with self._lock:
            self._lock.wait_for(
                lambda: (
                    self._inbox
                    or self._cancelled
                    or self._owners
                    or self._closing
                    or self._programs
                )
            )
            if self._closing:
                return False
            arrived, self._inbox = list(self._inbox), {}
            cancelled, self._cancelled = self._cancelled, []
            params = self._params
            is_idle = not (arrived or cancelled or self._owners)
            program = self._programs.popleft() if is_idle else None
        events: list[tuple[Ticket, Event]] = []
        for ticket in cancelled:
            self._abort(ticket)
        for ticket in arrived:
            try:
                self._submit(ticket)
            except Exception as error:
                events.append((ticket, self._failed(ticket, error)))
        if self._owners:
            events += self._events(self._engine.step(params))
        if program is not None:
            self._compile(params, program)
        if events:
            self._tell(events)
        return True

    def _compile(self, params: Params, program: Program) -> None:
        began = time.monotonic()
        self._engine.compile(params, program)
        self._num_compiled += 1
        logging.info(
            "compiled %d of %d: %s, %.1f s",
            self._num_compiled,
            self._num_programs,
            program.name,
            time.monotonic() - began,
        )

    def _submit(self, ticket: Ticket) -> None:
        first = 0
        for request in ticket.requests:
            number = self._engine.submit(request)
            ticket.numbers += (number,)
            self._owners[number] = (ticket, first)
            first += len(request.params)

    def _failed(self, ticket: Ticket, error: Exception) -> Refused:
        """Gives up a ticket on whose behalf something was raised; returns what it is told."""
        self._abort(ticket)
        if isinstance(error, RequestError):
            return Unfit(str(error))
        logging.error("a request failed", exc_info=error)
        return RequestFailed(f"the request failed: {type(error).__name__}")

    def _abort(self, ticket: Ticket) -> None:
        for number in ticket.numbers:
            if self._owners.pop(number, None):
                self._engine.abort(number)
        self._finish(ticket, ticket.num_unfinished)

    def _finish(self, ticket: Ticket, count: int) -> None:
        """Counts samples of a ticket as finished or given up."""
        with self._lock:
            self._num_unfinished -= count
            ticket.num_unfinished -= count
            self._lock.notify_all()

    def _events(self, progress: Sequence[Progress]) -> list[tuple[Ticket, Event]]:
        events: list[tuple[Ticket, Event]] = []
        for p in progress:
            if p.request not in self._owners:
                continue  # another sample of its ticket failed in this step
            ticket, first = self._owners[p.request]
            if p.error is not None:
                events.append((ticket, self._failed(ticket, p.error)))
                continue
            events.append((ticket, (first + p.sample, p)))
            if p.finish_reason:
                self._finish(ticket, 1)
            if not ticket.num_unfinished:
                for number in ticket.numbers:
                    self._owners.pop(number, None)
        return events

    def _tell(self, events: list[tuple[Ticket, Event]]) -> None:
        def tell():
            for ticket, event in events:
                try:
                    ticket.listener(event)
                except Exception:  # its own matter; the next event is another's
                    logging.exception("a listener failed; its request is given up")
                    self.cancel(ticket)

        self._call(tell)

    def _end(self, reason: Refused) -> None:
        with self._lock:
            left = [*{ticket: None for ticket, _ in self._owners.values()}, *self._inbox]
            self._inbox, self._cancelled = {}, []
            left = [ticket for ticket in left if ticket.num_unfinished]
            for ticket in left:
                self._finish(ticket, ticket.num_unfinished)
        self._owners.clear()
        if left:
            self._tell([(ticket, reason) for ticket in left])
