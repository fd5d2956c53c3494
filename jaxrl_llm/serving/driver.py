"""The thread that owns the engine: accepts requests from any thread, steps, reports progress.

Requests, cancellations, weight updates and shutdown take effect between two steps.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from absl import logging

from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout.engine.aot_programs import Program
from jaxrl_llm.rollout.engine.grammars import GrammarError
from jaxrl_llm.rollout.engine.requests import Progress, Request, RequestError
from jaxrl_llm.rollout.engine_api import ServingEngine

RejectReason = Literal["queue_full", "not_serving", "unfit", "request_failed", "engine_failed"]


class RequestRejected(Exception):
    """Requests that the driver rejected, or accepted and could not finish."""

    def __init__(self, reason: RejectReason, message: str):
        super().__init__(message)
        self.reason = reason


# (sample index over all requests of a ticket, its progress), or why no more progress will come.
SampleEvent = tuple[int, Progress] | RequestRejected


@dataclasses.dataclass(eq=False)
class Ticket:
    """Requests that were submitted together, with the callback for their events."""

    requests: tuple[Request, ...]
    listener: Callable[[SampleEvent], None]
    num_unfinished: int  # samples; at 0 no more events come
    request_ids: tuple[int, ...] = ()  # request ids of the engine, once submitted to it


class RequestDriver(Protocol):
    """Where the HTTP application sends requests."""

    @property
    def state(self) -> Literal["starting", "ready", "stopping", "failed"]: ...

    def submit(
        self, requests: Sequence[Request], listener: Callable[[SampleEvent], None]
    ) -> Ticket:
        """Queues requests; `listener` gets the events of every sample. Raises `RequestRejected`."""
        ...

    def cancel(self, ticket: Ticket) -> None:
        """Cancels a ticket. No-op if it has finished."""
        ...


class Driver:
    """Runs an engine in a thread of its own and serves tickets with it."""

    def __init__(self, engine: ServingEngine, params: Params, *, max_waiting: int):
        """Does not start the thread; `max_waiting` samples may queue beyond those in slots."""
        self.engine = engine  # used by the driver thread alone; others may read its counters
        self.capacity = engine.num_slots + max_waiting  # samples running or waiting at once
        # Request id of the engine -> its ticket, index of its first sample in the ticket.
        self._tickets: dict[int, tuple[Ticket, int]] = {}
        self._lock = threading.Condition()
        # Written under the lock:
        self.state: Literal["starting", "ready", "stopping", "failed"] = "starting"
        self.num_unfinished = 0  # samples accepted, neither finished nor cancelled
        self.pending_programs: collections.deque[Program] = collections.deque()  # not yet compiled
        self._params = params
        self._inbox: dict[Ticket, None] = {}
        self._cancelled: list[Ticket] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="engine driver", daemon=True)

    def start(
        self,
        programs: Sequence[Program] = (),
        call_soon: Callable[[Callable[[], None]], object] = lambda tell: tell(),
    ) -> None:
        """Starts the thread; `pending_programs` are compiled one by one while the engine is idle.

        `call_soon` schedules a function where listeners shall run, as `loop.call_soon_threadsafe`
        does.
        """
        self._call_soon = call_soon
        self.pending_programs.extend(programs)
        self._num_programs = len(programs)
        self.state = "ready"
        self._thread.start()

    def submit(
        self, requests: Sequence[Request], listener: Callable[[SampleEvent], None]
    ) -> Ticket:
        """Queues requests; `listener` gets the events of every sample. Raises `RequestRejected`."""
        count = sum(len(request.params) for request in requests)
        ticket = Ticket(tuple(requests), listener, count)
        with self._lock:
            if self.state != "ready":
                raise RequestRejected("not_serving", f"the server is {self.state}")
            if not 1 <= count <= self.capacity:
                accepted = f"this server holds 1 to {self.capacity}"
                raise RequestRejected("unfit", f"{count} samples in one request; {accepted}")
            if self.num_unfinished + count > self.capacity:
                load = f"{self.num_unfinished} samples are running or waiting and {count} more"
                raise RequestRejected(
                    "queue_full", f"{load} do not fit in {self.capacity}; try again later"
                )
            self.num_unfinished += count
            self._inbox[ticket] = None
            self._lock.notify_all()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancels a ticket: its slots are free before the next step. No-op if it has finished."""
        with self._lock:
            if ticket in self._inbox:
                del self._inbox[ticket]
                self._mark_finished(ticket, ticket.num_unfinished)
            elif ticket.num_unfinished:
                self._cancelled.append(ticket)
                self._lock.notify_all()

    def update_weights(self, params: Params) -> None:
        """Switches to new weights, of the same shapes and sharding, from the next step on."""
        with self._lock:
            self._params = params

    def stop_accepting(self) -> None:
        """Stops accepting requests; those accepted are finished."""
        with self._lock:
            if self.state != "failed":
                self.state = "stopping"
            self.pending_programs.clear()

    def drain(self, timeout_s: float) -> bool:
        """Waits until all samples are finished; false if that takes longer than `timeout_s`."""
        with self._lock:
            return self._lock.wait_for(lambda: not self.num_unfinished, timeout_s)

    def close(self) -> None:
        """Ends the thread after its current step; unfinished tickets get a "not_serving"."""
        with self._lock:
            self.stop_accepting()
            self._is_closed = True
            self._lock.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._step_or_compile():
                pass
            rejection = RequestRejected(
                "not_serving", "the server stopped before this request was done"
            )
        except Exception as error:  # whatever it is, clients must be notified
            logging.exception("the engine failed")
            rejection = RequestRejected(
                "engine_failed", f"the engine failed: {type(error).__name__}"
            )
            with self._lock:
                self.state = "failed"
        with self._lock:
            tickets = (ticket for ticket, _ in self._tickets.values())
            unfinished = [t for t in dict.fromkeys((*tickets, *self._inbox)) if t.num_unfinished]
            self._inbox, self._cancelled, self._tickets = {}, [], {}
            for ticket in unfinished:
                self._mark_finished(ticket, ticket.num_unfinished)
        self._notify([(ticket, rejection) for ticket in unfinished])

    def _step_or_compile(self) -> bool:
        """Empties the inbox and takes a step, or compiles when idle; false once closed."""
        with self._lock:
            while not any(
                (
                    self._inbox,
                    self._cancelled,
                    self._tickets,
                    self._is_closed,
                    self.pending_programs,
                )
            ):
                self._lock.wait()
            if self._is_closed:
                return False
            arrived, self._inbox = list(self._inbox), {}
            cancelled, self._cancelled = self._cancelled, []
            params = self._params
            is_idle = not (arrived or cancelled or self._tickets)
            program = self.pending_programs.popleft() if is_idle else None
            number, total = self._num_programs - len(self.pending_programs), self._num_programs
        for ticket in cancelled:
            self._abort(ticket)
        failed: list[tuple[Ticket, SampleEvent]] = []
        for ticket in arrived:
            try:
                first_sample = 0
                for request in ticket.requests:
                    ticket.request_ids += (self.engine.submit(request),)
                    self._tickets[ticket.request_ids[-1]] = (ticket, first_sample)
                    first_sample += len(request.params)
            except Exception as error:
                failed.append((ticket, self._fail_ticket(ticket, error)))
        self._notify(failed)  # before the step, which may take long
        if self._tickets:
            self._notify(self._events(self.engine.step(params)))
        if program is not None:
            start_s = time.monotonic()
            self.engine.compile(params, program)
            took_s = time.monotonic() - start_s
            logging.info("compiled %d of %d: %s, %.1f s", number, total, program.name, took_s)
        return True

    def _fail_ticket(self, ticket: Ticket, error: Exception) -> RequestRejected:
        """Aborts a ticket whose request raised an error; returns the event for its listener."""
        self._abort(ticket)
        if isinstance(error, RequestError | GrammarError):
            return RequestRejected("unfit", str(error))
        logging.error("a request failed", exc_info=error)
        return RequestRejected("request_failed", f"the request failed: {type(error).__name__}")

    def _abort(self, ticket: Ticket) -> None:
        for number in ticket.request_ids:
            if self._tickets.pop(number, None):
                self.engine.abort(number)
        self._mark_finished(ticket, ticket.num_unfinished)

    def _mark_finished(self, ticket: Ticket, count: int) -> None:
        with self._lock:
            self.num_unfinished -= count
            ticket.num_unfinished -= count
            self._lock.notify_all()

    def _events(self, progress: Sequence[Progress]) -> list[tuple[Ticket, SampleEvent]]:
        events: list[tuple[Ticket, SampleEvent]] = []
        for update in progress:
            if update.request not in self._tickets:
                continue  # another sample of its ticket failed in this step
            ticket, first_sample = self._tickets[update.request]
            if update.error is not None:
                events.append((ticket, self._fail_ticket(ticket, update.error)))
                continue
            events.append((ticket, (first_sample + update.sample, update)))
            if update.finish_reason:
                self._mark_finished(ticket, 1)
            if not ticket.num_unfinished:
                for number in ticket.request_ids:
                    self._tickets.pop(number, None)
        return events

    def _notify(self, events: list[tuple[Ticket, SampleEvent]]) -> None:
        def call_listeners():
            for ticket, event in events:
                try:
                    ticket.listener(event)
                except Exception:  # a listener's error must not end the others
                    logging.exception("a listener failed; its request is given up")
                    self.cancel(ticket)

        if events:
            self._call_soon(call_listeners)
