"""One thread that owns the engine: takes requests from any thread, steps, reports what came.

Requests, cancellations, new weights and the order to stop reach the engine between two steps.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from absl import logging

from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.jitted import Program
from jaxrl_llm.rollout.requests import Progress, Request, RequestError

Reason = Literal["queue_full", "not_serving", "unfit", "request_failed", "engine_failed"]


class Refused(Exception):
    """Requests that the driver did not serve, or not to their end."""

    def __init__(self, reason: Reason, message: str):
        super().__init__(message)
        self.reason = reason


# (which sample, counted through the requests of a ticket; what came), or why nothing more comes.
Event = tuple[int, Progress] | Refused


@dataclasses.dataclass(eq=False)
class Ticket:
    """Requests that were submitted together, and who listens."""

    requests: tuple[Request, ...]
    listener: Callable[[Event], None]
    num_unfinished: int  # samples; 0: no more events will come
    numbers: tuple[int, ...] = ()  # the engine's, once it has them


class Driver:
    """Serves tickets with an engine, in a thread of its own."""

    def __init__(self, engine: Engine, params: Params, *, max_waiting: int):
        """Starts nothing; `max_waiting` samples may wait beside those that fill the slots."""
        self.engine = engine  # used by this thread alone; others may read its counts
        self.capacity = engine.num_slots + max_waiting  # samples that run or wait at one time
        self._owners: dict[int, tuple[Ticket, int]] = {}  # engine's number -> ticket, first index
        self._lock = threading.Condition()
        # Written under the lock:
        self.state: Literal["starting", "ready", "stopping", "failed"] = "starting"
        self.num_unfinished = 0  # samples accepted and not yet finished or given up
        self.programs: collections.deque[Program] = collections.deque()  # not yet compiled
        self._params = params
        self._inbox: dict[Ticket, None] = {}
        self._dropped: list[Ticket] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine driver", daemon=True)

    def start(
        self,
        programs: Sequence[Program] = (),
        call: Callable[[Callable[[], None]], object] = lambda tell: tell(),
    ) -> None:
        """Begins to serve; `programs` are compiled one by one while there is nothing else to do.

        `call` runs a function where listeners are called, such as `loop.call_soon_threadsafe`.
        """
        self._call = call
        self.programs.extend(programs)
        self._num_programs = len(programs)
        self.state = "ready"
        self._thread.start()

    def submit(self, requests: Sequence[Request], listener: Callable[[Event], None]) -> Ticket:
        """Queues requests, or raises `Refused`; `listener` hears of every sample until its end."""
        count = sum(len(request.params) for request in requests)
        ticket = Ticket(tuple(requests), listener, count)
        with self._lock:
            if self.state != "ready":
                raise Refused("not_serving", f"the server is {self.state}")
            if not 1 <= count <= self.capacity:
                held = f"this server holds 1 to {self.capacity}"
                raise Refused("unfit", f"{count} samples in one request; {held}")
            if self.num_unfinished + count > self.capacity:
                busy = f"{self.num_unfinished} samples are running or waiting and {count} more"
                raise Refused(
                    "queue_full", f"{busy} do not fit in {self.capacity}; try again later"
                )
            self.num_unfinished += count
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
                self._dropped.append(ticket)
                self._lock.notify_all()

    def use(self, params: Params) -> None:
        """Takes other weights, of the same shapes and layout, from the next step on."""
        with self._lock:
            self._params = params

    def refuse(self) -> None:
        """Begins to stop: accepts nothing more, finishes what it has."""
        with self._lock:
            if self.state != "failed":
                self.state = "stopping"
            self.programs.clear()

    def drain(self, timeout_s: float) -> bool:
        """Waits until nothing is unfinished; returns whether it came to that in time."""
        with self._lock:
            return self._lock.wait_for(lambda: not self.num_unfinished, timeout_s)

    def close(self) -> None:
        """Ends the thread after its step; unfinished tickets hear that it is "not_serving"."""
        with self._lock:
            self.refuse()
            self._closed = True
            self._lock.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            end = Refused("not_serving", "the server stopped before this request was done")
        except Exception as error:  # whatever it is, clients must hear of it
            logging.exception("the engine failed")
            end = Refused("engine_failed", f"the engine failed: {type(error).__name__}")
            with self._lock:
                self.state = "failed"
        with self._lock:
            owners = (ticket for ticket, _ in self._owners.values())
            left = [t for t in dict.fromkeys((*owners, *self._inbox)) if t.num_unfinished]
            self._inbox, self._dropped, self._owners = {}, [], {}
            for ticket in left:
                self._finish(ticket, ticket.num_unfinished)
        self._tell([(ticket, end) for ticket in left])

    def _turn(self) -> bool:
        """Empties the inbox and takes a step, or compiles; returns whether to go on."""
        with self._lock:
            while not any((self._inbox, self._dropped, self._owners, self._closed, self.programs)):
                self._lock.wait()
            if self._closed:
                return False
            arrived, self._inbox = list(self._inbox), {}
            cancelled, self._dropped = self._dropped, []
            params = self._params
            is_idle = not (arrived or cancelled or self._owners)
            program = self.programs.popleft() if is_idle else None
            number, total = self._num_programs - len(self.programs), self._num_programs
        for ticket in cancelled:
            self._abort(ticket)
        failed: list[tuple[Ticket, Event]] = []
        for ticket in arrived:
            try:
                first = 0
                for request in ticket.requests:
                    ticket.numbers += (self.engine.submit(request),)
                    self._owners[ticket.numbers[-1]] = (ticket, first)
                    first += len(request.params)
            except Exception as error:
                failed.append((ticket, self._failed(ticket, error)))
        self._tell(failed)  # at once: the step may take long
        if self._owners:
            self._tell(self._events(self.engine.step(params)))
        if program is not None:
            began = time.monotonic()
            self.engine.compile(params, program)
            took_s = time.monotonic() - began
            logging.info("compiled %d of %d: %s, %.1f s", number, total, program.name, took_s)
        return True

    def _failed(self, ticket: Ticket, error: Exception) -> Refused:
        """Gives up a ticket whose request raised an error; returns what its listener hears."""
        self._abort(ticket)
        if isinstance(error, RequestError):
            return Refused("unfit", str(error))
        logging.error("a request failed", exc_info=error)
        return Refused("request_failed", f"the request failed: {type(error).__name__}")

    def _abort(self, ticket: Ticket) -> None:
        for number in ticket.numbers:
            if self._owners.pop(number, None):
                self.engine.abort(number)
        self._finish(ticket, ticket.num_unfinished)

    def _finish(self, ticket: Ticket, count: int) -> None:
        with self._lock:
            self.num_unfinished -= count
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
                except Exception:  # a listener's error must not end the others
                    logging.exception("a listener failed; its request is given up")
                    self.cancel(ticket)

        if events:
            self._call(tell)
