"""The pool that agents and rewards share, with workers that are threads of this process."""

import contextlib
import threading
import time
from multiprocessing import Pipe

import pytest

from jaxrl_llm.processes.messages import receive, send
from jaxrl_llm.processes.worker_pool import WorkerPool, WorkerPoolError

REPORTED: dict[str, object] = {}


class ThreadWorker:
    """A worker whose requests say what it does: `echo`, `hang`, `leave`, `forge`, `late`."""

    def __init__(self, report=None):
        self.connection, connection = Pipe()
        threading.Thread(target=self._serve, args=(connection, report), daemon=True).start()

    def _serve(self, connection, report):
        with contextlib.suppress(EOFError, OSError):
            if report is not None:
                send(connection, report)
            while True:
                request = receive(connection)
                match request["do"]:
                    case "leave":
                        connection.close()
                    case "forge":
                        connection.send_bytes(b"[1]")
                    case "late":  # a process of several sessions enforces their limit
                        problem = {"problem": "timeout", "text": "late", "seconds": 1.0}
                        send(connection, {**problem, "number": request["number"]})
                    case "echo" | "start":
                        send(connection, {"text": id(self), "number": request["number"]})

    def end(self, patience_s):
        self.connection.close()
        return "exit code 3"


def stateful_pool(**settings):
    return WorkerPool(ThreadWorker, 2, 0.3, **settings)


def stateless_pool(report=REPORTED):
    return WorkerPool(lambda: ThreadWorker(report), 2, 0.3, is_stateless=True)


def answers(pool, *requests):
    """The answers to requests of sessions 0, 1, ..."""
    start = {"do": "start"}
    for session, do in enumerate(requests):
        pool.ask(session, start, {"do": do})
    collected = {}
    while len(collected) < len(requests):
        collected.update(pool.collect(5.0))
    return [collected[session] for session in range(len(requests))]


@pytest.mark.parametrize(
    "do, problem, text",
    [
        ("hang", "timeout", "no answer within 0.3 s"),
        ("leave", "ended", "its process ended with exit code 3"),
        ("forge", "ended", "its process wrote to the pool"),
    ],
)
def test_a_lost_worker_costs_its_own_session(do, problem, text):
    with stateful_pool() as pool:
        lost, other = answers(pool, do, "echo")
        assert 0.0 <= lost.pop("seconds") < 5.0
        assert lost == {"problem": problem, "text": f"{text}; its state is lost"}
        assert answers(pool, "echo", "echo")[1] == other  # the same worker
    with stateless_pool() as pool:
        lost, _ = answers(pool, do, "echo")
        assert (lost["problem"], lost["text"]) == (problem, text)
        assert "problem" not in answers(pool, "echo")[0]


def test_sessions_wait_for_a_worker_and_keep_it():
    with stateful_pool() as pool:
        for session in range(3):
            pool.ask(session, {"do": "start"}, {"do": "echo"})
        collected = {}
        while len(collected) < 2:
            collected.update(pool.collect(5.0))
        assert set(collected) == {0, 1} and pool.collect(0.0) == []
        pool.end(0)  # ends its worker
        assert dict(pool.collect(5.0)).keys() == {2}


def test_a_late_session_leaves_a_shared_worker():
    with stateful_pool(sessions_per_worker=2) as pool:
        late, other = answers(pool, "late", "echo")
        assert late == {"problem": "timeout", "text": "late; its state is lost", "seconds": 1.0}
        again = answers(pool, "echo", "echo")
        assert again == [other, other] and len(pool._workers) == 1


def test_a_request_that_no_worker_has_read_is_marked():
    with stateless_pool() as pool:
        answers(pool, "echo", "echo")
        for worker in pool._workers:
            send(worker.process.connection, {"do": "leave"})
            assert worker.process.connection.poll(5.0)
        problems = [answer["problem"] for answer in answers(pool, "echo", "echo")]
        assert problems == ["unread", "unread"]
        assert not any("problem" in answer for answer in answers(pool, "echo", "echo"))


def test_a_worker_that_reports_an_error_stops_the_start():
    with pytest.raises(WorkerPoolError, match="no module x"):
        stateless_pool({"error": "no module x"})


def test_another_thread_may_close_the_pool():
    pool = WorkerPool(lambda: ThreadWorker(REPORTED), 1, 100.0, is_stateless=True)
    pool.ask(0, None, {"do": "hang"})
    threading.Timer(0.1, pool.close).start()
    start_time = time.monotonic()
    while not pool._is_closed:
        assert pool.collect(0.2) == []
    assert time.monotonic() - start_time < 10.0
    assert pool.collect(10.0) == []
