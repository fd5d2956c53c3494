"""A worker process of tools and environments, in this process: what it answers to each request."""

import asyncio
import contextlib
import dataclasses
import math
import random
import threading
from multiprocessing import Pipe

import numpy as np
import pytest

from jaxrl_llm.agents import agent_worker
from jaxrl_llm.agents.environments import Step
from jaxrl_llm.processes.messages import receive, send

SETTINGS = {
    "tools": ("add",),
    "environments": {},
    "corpus": "",
    "max_result_characters": 8,
    "cut_results": "right",
    "limit_s": None,
    "memory_gib": math.inf,
}


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


@dataclasses.dataclass
class Point:
    x: int
    y: int


def distance(point: Point) -> int:
    """Measures.

    Args:
        point: From the origin.
    """
    return point.x + point.y


def fail(text: str) -> str:
    """Fails.

    Args:
        text: Why.
    """
    raise KeyError(text)


def leave() -> str:
    """Ends the process."""
    raise SystemExit(3)


async def draw() -> str:
    """Draws two random numbers, between which others may draw."""
    first = random.random()
    await asyncio.sleep(0)
    return f"{first:.4f} {random.random():.4f} {np.random.random():.4f}"


CANCELLED: list[str] = []  # calls of `wait_forever` that were ended


async def wait_forever() -> str:
    """Never answers."""
    try:
        await asyncio.Event().wait()
    finally:
        CANCELLED.append("wait_forever")
    return ""


def strange() -> object:
    """Returns a long text."""
    return "0123456789"


class Counter:
    """Counts the calls of its own methods; its instance is the tool of one episode."""

    def __init__(self, first: int = 0):
        self.number = first

    def count(self, by: int) -> int:
        """Counts.

        Args:
            by: How far.
        """
        self.number += by
        return self.number


TOOLS = {
    tool.__name__: tool
    for tool in (add, distance, fail, leave, draw, wait_forever, strange, Counter)
}


def started(*names, kwargs=None, seed=0, settings=SETTINGS):
    episode = agent_worker._EpisodeWorker(settings, TOOLS)
    start = episode.start("", names, kwargs or {}, {}, seed)
    assert asyncio.run(start) == {"messages": []}
    return episode


def call(episode, name, **arguments):
    return asyncio.run(episode.call(name, arguments))


def test_a_tool_is_called_by_name():
    assert call(started("add", "fail"), "add", a=2, b=3) == {"text": "5"}
    assert call(started("add"), "add", a=2) == {"text": "3"}


def test_arguments_are_converted_to_the_classes_of_the_tool():
    assert call(started("distance"), "distance", point={"x": 2, "y": 3}) == {"text": "5"}
    answer = call(started("distance"), "distance", point={"x": 2, "y": "far"})
    assert answer["problem"] == "arguments" and "distance: point.y: " in answer["text"]


@pytest.mark.parametrize(
    "arguments, text",
    [({}, "missing a required argument: 'a'"), ({"a": 1, "c": 2}, "unexpected keyword argument")],
    ids=["missing", "unknown"],
)  # fmt: skip
def test_wrong_arguments_are_problems_of_the_policy(arguments, text):
    answer = call(started("add"), "add", **arguments)
    assert answer["problem"] == "arguments" and answer["text"].startswith("add: ")
    assert text in answer["text"]


def test_long_results_are_cut():
    assert call(started("strange"), "strange") == {"text": "01234567...(cut)"}


def test_every_episode_has_tools_of_its_own():
    kwargs = {"Counter": {"create_kwargs": {"first": 10}}}
    one, other = started("Counter", kwargs=kwargs), started("Counter")
    assert call(one, "count", by=2) == {"text": "12"}
    assert call(one, "count", by=2) == {"text": "14"}
    assert call(other, "count", by=2) == {"text": "2"}


def test_arguments_of_the_row_are_neither_seen_nor_passed_by_the_policy():
    fixed = started("add", kwargs={"add": {"execute_kwargs": {"b": 100}}})
    assert call(fixed, "add", a=1) == {"text": "101"}
    assert call(fixed, "add", a=1, b=5)["problem"] == "arguments"


class Game:
    """An environment that remembers what it was asked, and answers what the test sets."""

    def __init__(self):
        self.row, self.closed, self.answer = None, False, Step(done=True)

    def start(self, row):
        self.row = row
        return "0123456789"

    def step(self, message):
        return self.answer

    def reward(self, messages):
        return 0.5 * len(messages)

    def close(self):
        self.closed = True


def in_game():
    game = Game()
    episode = agent_worker._EpisodeWorker(SETTINGS, TOOLS)
    episode._environment = agent_worker.Environment(game)
    return game, episode


def test_answers_of_an_environment():
    game, episode = in_game()
    messages = [{"role": "user", "content": "0123456789"}]
    game.answer = Step(messages, reward=np.float32(0.25), done=np.bool_(False))
    answer = asyncio.run(episode.step({"role": "assistant", "content": "go"}))
    # Plain values that can be sent, texts cut as those of tools.
    assert answer == {
        "messages": [{"role": "user", "content": "01234567...(cut)"}],
        "done": False,
        "reward": 0.25,
    }
    assert type(answer["done"]) is bool and type(answer["reward"]) is float
    assert asyncio.run(episode.reward(messages * 3)) == {"reward": 1.5}
    asyncio.run(episode.end())
    assert game.closed


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "much"])
def test_rewards_that_are_no_numbers_are_problems(reward):
    game, episode = in_game()
    game.answer = dataclasses.replace(Step(done=True), reward=reward)
    coroutine = episode.step({"role": "assistant", "content": "go"})
    answer = asyncio.run(agent_worker._result_or_problem(coroutine, episode.rng_state))
    assert answer["problem"] == "exception" and "reward" in answer["text"]


def test_the_text_of_an_error_names_the_line_of_the_user():
    episode = started("fail")
    answer = asyncio.run(
        agent_worker._result_or_problem(episode.call("fail", {"text": "no key"}), episode.rng_state)
    )
    assert answer["problem"] == "exception"
    assert answer["text"].startswith("KeyError: 'no key' (line ")
    assert answer["text"].endswith("raise KeyError(text))")


def test_long_errors_are_cut():
    assert len(agent_worker._error_text(ValueError("x" * 10_000))) == 2000


def test_a_tool_cannot_end_the_process():
    episode = started("leave")
    coroutine = episode.call("leave", {})
    answer = asyncio.run(agent_worker._result_or_problem(coroutine, episode.rng_state))
    assert answer == {"problem": "exception", "text": answer["text"]}
    assert answer["text"].startswith("SystemExit: 3")


def drawn(*seeds):
    """What episodes of these seeds draw when they run beside each other."""

    async def draws():
        episodes = [agent_worker._EpisodeWorker(SETTINGS, TOOLS) for _ in seeds]
        for episode, seed in zip(episodes, seeds, strict=True):
            start = episode.start("", ("draw",), {}, {}, seed)
            await agent_worker._result_or_problem(start, episode.rng_state)
        return await asyncio.gather(
            *(agent_worker._result_or_problem(e.call("draw", {}), e.rng_state) for e in episodes)
        )

    settings = random.getstate(), np.random.get_state()
    try:
        return [answer["text"] for answer in asyncio.run(draws())]
    finally:
        random.setstate(settings[0])
        np.random.set_state(settings[1])


def test_randomness_belongs_to_the_episode():
    """The same seed draws the same numbers, whoever draws in between."""
    (alone,) = drawn(3)
    first, other, again = drawn(3, 4, 3)
    assert first == again == alone != other
    large = 2**32 + 3  # numpy's seeds have 32 bits
    assert drawn(large) == drawn(large)


@contextlib.contextmanager
def served():
    """A connection to a server of episodes that runs in a thread."""
    ours, theirs = Pipe()
    settings = {**SETTINGS, "max_result_characters": 100}
    server = agent_worker._WorkerServer(theirs, settings, TOOLS)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield ours
    finally:
        ours.close()
        thread.join(timeout=10)
        assert not thread.is_alive()


def request(connection, number, episode, do, **arguments):
    send(connection, {"number": number, "session": episode, "do": do, **arguments})


START = {"environment": "", "kwargs": {}, "row": {}, "seed": 0}


def test_requests_are_answered_by_number():
    with served() as connection:
        for episode in (5, 6):
            request(connection, episode, episode, "start", names=("Counter",), **START)
            assert receive(connection)["number"] == episode
        request(connection, 7, 5, "call", name="count", arguments={"by": 1})
        request(connection, 8, 6, "call", name="count", arguments={"by": 2})
        answers = {answer["number"]: answer for answer in (receive(connection) for _ in range(2))}
        assert {number: answer["text"] for number, answer in answers.items()} == {7: "1", 8: "2"}
        assert all(answer["seconds"] >= 0 for answer in answers.values())


def test_an_episode_that_waits_does_not_hold_up_others():
    CANCELLED.clear()
    with served() as connection:
        for episode, name in enumerate(("wait_forever", "add")):
            request(connection, episode, episode, "start", names=(name,), **START)
            receive(connection)
        request(connection, 2, 0, "call", name="wait_forever", arguments={})
        request(connection, 3, 1, "call", name="add", arguments={"a": 1})
        assert receive(connection)["number"] == 3
        # Ending the episode cancels its call, which is never answered.
        request(connection, 4, 0, "end")
        request(connection, 5, 1, "call", name="add", arguments={"a": 2})
        answer = receive(connection)
        assert (answer["number"], answer["text"]) == (5, "3")
        assert CANCELLED == ["wait_forever"]


def test_an_ended_episode_starts_afresh():
    with served() as connection:
        for _ in range(2):
            request(connection, 0, 0, "start", names=("Counter",), **START)
            receive(connection)
            request(connection, 1, 0, "call", name="count", arguments={"by": 1})
            assert receive(connection)["text"] == "1"
            request(connection, 2, 0, "end")


def test_an_error_is_an_answer():
    with served() as connection:
        request(connection, 0, 0, "start", names=("fail",), **START)
        receive(connection)
        request(connection, 1, 0, "call", name="fail", arguments={"text": "why"})
        answer = receive(connection)
        assert (answer["number"], answer["problem"]) == (1, "exception")
