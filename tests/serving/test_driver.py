"""The driver: every sample is told once, to its end or to the reason why not."""

import collections
import contextlib
import random
import threading
import time

import numpy as np
import pytest
from serving_engine import CountingEngine

from jaxrl_llm.rollout.engine.aot_programs import Program
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams
from jaxrl_llm.serving.driver import Driver, RequestRejected


@contextlib.contextmanager
def refused(reason, match=None):
    with pytest.raises(RequestRejected, match=match) as caught:
        yield
    assert caught.value.reason == reason


def request(max_tokens=3, samples=1, prompt_tokens=2, token=0):
    keys = np.zeros((samples, 2), np.uint32)
    return Request((token,) * prompt_tokens, keys, (SamplingParams(max_tokens),) * samples)


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self):
        self.tokens = collections.defaultdict(list)
        self.log_probs = []
        self.reasons = {}
        self.error = None
        self.changed = threading.Condition()

    def __call__(self, event):
        with self.changed:
            if isinstance(event, RequestRejected):
                assert self.error is None
                self.error = event
            else:
                index, progress = event
                assert index not in self.reasons  # nothing after the end
                self.tokens[index] += progress.tokens
                self.log_probs += progress.log_probs
                if progress.finish_reason:
                    self.reasons[index] = progress.finish_reason
            self.changed.notify_all()

    def wait(self, samples):
        with self.changed:
            assert self.changed.wait_for(lambda: self.error or len(self.reasons) == samples, 30)
        return self


@pytest.fixture
def make():
    drivers = []

    def make(engine, params=0.0, max_waiting=4, programs=()):
        driver = Driver(engine, params, max_waiting=max_waiting)
        with refused("not_serving", match="the server is starting"):
            driver.submit([request()], Heard())
        drivers.append(driver)
        driver.start(programs)
        return driver

    yield make
    for driver in drivers:
        driver.engine.may_step.set()
        driver.close()


def test_samples_of_several_requests_are_counted_through(make):
    engine = CountingEngine()
    driver, heard = make(engine), Heard()
    driver.submit([request(3, samples=2), request(1), request(5)], heard)
    heard.wait(4)
    assert heard.tokens == {0: [10, 11, 12], 1: [10, 11, 12], 2: [10], 3: [10, 11, 12, 13, 14]}
    assert set(heard.reasons.values()) == {"length"} and heard.error is None
    assert driver.num_unfinished == 0
    assert engine.threads and threading.get_ident() not in engine.threads


def test_a_full_queue_is_told_at_once_and_empties(make):
    engine = CountingEngine(num_slots=2)
    driver = make(engine, max_waiting=3)
    engine.may_step.clear()
    heard = [Heard() for _ in range(2)]
    driver.submit([request(samples=2)], heard[0])
    with refused("queue_full", match="2 samples are running or waiting and 4 more do not fit"):
        driver.submit([request(samples=4)], Heard())
    driver.submit([request(samples=3)], heard[1])
    with refused("queue_full"):
        driver.submit([request()], Heard())
    with refused("unfit", match="6 samples in one request; this server holds 1 to 5"):
        driver.submit([request(samples=6)], Heard())
    engine.may_step.set()
    for listener, count in zip(heard, (2, 3), strict=True):
        listener.wait(count)
    assert driver.drain(30)
    driver.submit([request(samples=5)], last := Heard())
    assert len(last.wait(5).reasons) == 5


def test_cancelling_frees_slots_and_queue(make):
    engine = CountingEngine(num_slots=2)
    driver = make(engine, max_waiting=2)
    running = driver.submit([request(10**9, samples=2)], Heard())
    waiting = driver.submit([request(10**9), request(10**9)], Heard())
    end = time.monotonic() + 300
    while engine.num_steps < 2:
        assert time.monotonic() < end
    for ticket in (waiting, running, running):
        driver.cancel(ticket)
    assert driver.drain(30)
    driver.submit([request(samples=4)], heard := Heard())
    assert len(heard.wait(4).reasons) == 4
    assert sorted(set(engine.aborted)) == [0, 1, 2]
    assert engine.num_active == 0
    driver.cancel(running)  # finished long ago: nothing
    assert driver.num_unfinished == 0


def test_weights_change_between_steps(make):
    engine = CountingEngine()
    driver, heard = make(engine, params=1.0), Heard()
    ticket = driver.submit([request(10**9)], heard)
    with heard.changed:
        assert heard.changed.wait_for(lambda: 1.0 in heard.log_probs, 30)
    driver.update_weights(2.0)
    with heard.changed:
        assert heard.changed.wait_for(lambda: 2.0 in heard.log_probs, 30)
    driver.cancel(ticket)
    assert sorted(heard.log_probs) == heard.log_probs


def test_stopping_finishes_what_was_accepted(make):
    engine = CountingEngine()
    driver, heard = make(engine), Heard()
    engine.may_step.clear()
    driver.submit([request(50, samples=6)], heard)
    driver.stop_accepting()
    assert driver.state == "stopping"
    with refused("not_serving", match="the server is stopping"):
        driver.submit([request()], Heard())
    assert not driver.drain(0.01)
    engine.may_step.set()
    assert driver.drain(30)
    driver.close()
    assert len(heard.reasons) == 6 and heard.error is None


def test_closing_tells_those_that_are_left(make):
    driver, heard = make(CountingEngine(num_slots=1)), Heard()
    driver.submit([request(10**9)], heard)
    driver.submit([request(10**9)], queued := Heard())
    driver.close()
    assert heard.error.reason == queued.error.reason == "not_serving"
    assert driver.num_unfinished == 0


def test_a_broken_engine_is_told_to_all(make):
    engine = CountingEngine()
    driver = make(engine)
    engine.may_step.clear()
    heard = [Heard() for _ in range(3)]
    for listener in heard:
        driver.submit([request(samples=2)], listener)
    engine.breaks = True
    engine.may_step.set()
    for listener in heard:
        assert listener.wait(2).error.reason == "engine_failed"
    assert driver.state == "failed"
    with refused("not_serving", match="the server is failed"):
        driver.submit([request()], Heard())


def test_refused_request_leaves_no_state(make):
    engine = CountingEngine(too_long=5)
    driver, heard = make(engine), Heard()
    driver.submit([request(), request(prompt_tokens=6)], heard)
    assert heard.wait(2).error.reason == "unfit" and "prompt of 6 tokens" in str(heard.error)
    assert driver.drain(30) and engine.num_active == 0
    driver.submit([request()], after := Heard())
    assert after.wait(1).tokens == {0: [10, 11, 12]}


@pytest.mark.parametrize("place", ["submit", "step"])
def test_error_of_one_request_ends_only_that_one(make, place):
    engine = CountingEngine(num_slots=8, cursed=7, fails_in=place)
    driver = make(engine, max_waiting=8)
    engine.may_step.clear()
    before, bad, after = Heard(), Heard(), Heard()
    driver.submit([request(4)], before)
    driver.submit([request(9), request(9, samples=2, token=7)], bad)
    driver.submit([request(4)], after)
    engine.may_step.set()
    for heard in (before, after):
        assert heard.wait(1).tokens == {0: [10, 11, 12, 13]} and heard.error is None
    assert bad.wait(3).error.reason == "request_failed" and "KeyError" in str(bad.error)
    assert driver.drain(30) and engine.num_active == 0 and driver.state == "ready"


def test_raising_listener_ends_only_its_request(make):
    engine = CountingEngine()
    driver, heard = make(engine), Heard()
    engine.may_step.clear()

    def deaf(event):
        raise KeyError("a defect")

    driver.submit([request(10**9)], deaf)
    driver.submit([request(5)], heard)
    engine.may_step.set()
    assert heard.wait(1).tokens == {0: [10, 11, 12, 13, 14]}
    assert driver.drain(30) and engine.num_active == 0 and driver.state == "ready"


def test_programs_are_compiled_while_idle(make, caplog):
    engine, may_compile, compiled = CountingEngine(), threading.Event(), []

    def program(i):
        def call(calls, params, state):
            assert may_compile.wait(30)
            compiled.append((i, engine.num_steps))

        return Program(f"program {i}", call)

    with caplog.at_level("INFO", "absl"):
        driver, heard = make(engine, programs=[program(i) for i in range(3)]), Heard()
        assert driver.state == "ready"
        driver.submit([request(5)], heard)  # while the first is compiled
        may_compile.set()
        heard.wait(1)
        end = time.monotonic() + 300
        while len(compiled) < 3:
            assert time.monotonic() < end
    # The request went before the second.
    assert compiled == [(0, 0), (1, 5), (2, 5)] and not driver.pending_programs
    assert "compiled 2 of 3: program 1, 0.0 s" in caplog.text


def test_a_driver_that_stops_compiles_no_more(make):
    reached, may_compile = threading.Event(), threading.Event()

    def call(calls, params, state):
        reached.set()
        assert may_compile.wait(30)

    driver = make(CountingEngine(), programs=[Program("program", call)] * 50)
    assert reached.wait(30)
    driver.stop_accepting()
    assert not driver.pending_programs
    may_compile.set()
    driver.close()


def test_nothing_is_lost_or_told_twice_among_many_threads(make):
    engine = CountingEngine(num_slots=3)
    driver = make(engine, max_waiting=12)
    outcomes = collections.Counter()

    def client(seed):
        choose = random.Random(seed)
        for _ in range(30):
            lengths = [choose.randint(1, 6) for _ in range(choose.randint(1, 3))]
            heard = Heard()
            try:
                ticket = driver.submit([request(length) for length in lengths], heard)
            except RequestRejected as error:
                assert error.reason == "queue_full"
                outcomes["full"] += 1
                continue
            if choose.random() < 0.3:
                driver.cancel(ticket)
                outcomes["cancelled"] += 1
                continue
            heard.wait(len(lengths))
            assert [len(heard.tokens[i]) for i in range(len(lengths))] == lengths
            outcomes["done"] += 1

    failures = []
    threads = [
        threading.Thread(target=lambda s=seed: _catch(client, s, failures)) for seed in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert sum(outcomes.values()) == 240 and outcomes["done"] > 20
    assert driver.drain(30) and engine.num_active == 0


def _catch(function, argument, failures):
    try:
        function(argument)
    except BaseException as error:
        failures.append(error)
