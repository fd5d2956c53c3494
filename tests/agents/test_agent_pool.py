"""Processes of episodes: their tools, their limits, and what hostile ones cost."""

import asyncio
import dataclasses
import json
import pathlib
import re
import sys

import pytest
from transformers.utils import get_json_schema

from jaxrl_llm.agents.agent_pool import AgentError, AgentPool
from jaxrl_llm.config.agent import AgentConfig, EnvironmentConfig
from jaxrl_llm.processes import worker_pool
from jaxrl_llm.processes.supervisor import descendants

FILE = pathlib.Path(__file__).with_name("user_tools.py")
NAMES = "add", "count", "sleep", "later", "misbehave"
TOOLS = tuple(f"{FILE}:{name}" for name in (*NAMES, "mirror"))
ENVIRONMENTS = {
    name: EnvironmentConfig(environment=f"{FILE}:{name}") for name in ("Counter", "Guess")
}


def config(**settings):
    given = {"tools": (*TOOLS, "calculator", "python"), "environments": ENVIRONMENTS}
    return AgentConfig(**{**given, "default": "tool_agent", "timeout_s": 120.0, **settings})


def begin(environment="", names=(*TOOLS, "calculator", "python"), **row):
    request = {"do": "start", "environment": environment, "names": names, "kwargs": {}}
    return {**request, "row": row, "seed": 1}


BEGIN = begin()


def call(name, **arguments):
    return {"do": "call", "name": name, "arguments": arguments}


def asked(pool, episode, request, beginning=BEGIN):
    pool.ask(episode, beginning, request)
    while True:
        for number, answer in pool.collect(5.0):
            assert number == episode and answer.pop("seconds") >= 0
            return answer


@pytest.fixture(scope="module")
def pool():
    with AgentPool(config()) as pool:
        yield pool


def test_a_tool_gets_instances_of_its_classes(pool):
    """A policy writes mappings; the function's annotation says what they are."""
    (described,) = pool.describe()["tools"][f"{FILE}:mirror"]
    items = described["function"]["parameters"]["properties"]["points"]["items"]
    assert items["properties"]["y"] == {"type": "integer", "default": 0}
    assert items["required"] == ["x"]
    points = [{"x": 1}, {"x": 2, "y": 3}]
    assert asked(pool, 1, call("mirror", points=points)) == {"text": "(0, 1) (3, 2)"}
    answer = asked(pool, 1, call("mirror", points=[{"y": 1}]))
    assert answer == {"problem": "arguments", "text": "mirror: points.0.x: Field required"}


def test_a_tool_without_names_is_refused_before_the_run():
    with AgentPool(config(tools=(f"{FILE}:total",), environments={})) as pool:
        said = "total cannot be used: .*tool 'total': .numbers has no names .*; write an ordinary"
        with pytest.raises(AgentError, match=said):
            pool.describe()


def test_a_calculation_without_end_is_answered_at_once(pool):
    for expression, problem in {
        "round(5, -10**8)": "round: -100000000 digits; at most 1300 before or after the point",
        "9**9**9": "the power is too large",
        "-" * 1000 + "1": "the expression is nested too deeply",
        "2**2000 * 1.5": "the number is too large",
    }.items():
        answer = asked(pool, 1, call("calculator", expression=expression))
        assert answer == {"problem": "exception", "text": f"ValueError: {problem}"}


@pytest.mark.parametrize(
    ("contents", "problem"),
    [
        (
            b'{"text": "the and of"}\n',
            "none of its 1 passages contains a searchable word; words of",
        ),
        (b'{"text": "caf\xe9"}\n', "is not UTF-8: .*; convert it"),
        (b'{"text": "cat"}\n{"text":' + b"[" * 100_000, "line 2: no JSON object: brackets are"),
        (b'{"text": "cat"}\n["a"]\n', "line 2: no JSON object"),
        (None, "No such file"),
    ],
)
def test_a_corpus_that_cannot_be_searched_is_named_before_the_run(tmp_path, contents, problem):
    corpus = tmp_path / "corpus.jsonl"
    if contents is not None:
        corpus.write_bytes(contents)
    settings = config(tools=("search",), environments={}, corpus=str(corpus))
    said = "config.agent: search cannot be used: .*corpus.jsonl"
    with pytest.raises(AgentError, match=f"(?s){said}") as raised, AgentPool(settings):
        pass
    assert re.search(problem, str(raised.value))


def test_schemas_are_those_of_transformers(pool):
    sys.path.insert(0, str(FILE.parent))
    try:
        import user_tools
    finally:
        sys.path.pop(0)
    described = pool.describe()
    for name in NAMES:
        assert described["tools"][f"{FILE}:{name}"] == [get_json_schema(getattr(user_tools, name))]
    assert [s["function"]["name"] for s in described["tools"]["python"]] == ["python"]
    want = [get_json_schema(user_tools.Counter().increase)]
    assert described["environments"] == {"Counter": want, "Guess": []}


def test_an_episode_keeps_its_state_and_sees_no_other_s(pool):
    for episode in (1, 2):
        for wanted in ("1", "2"):
            assert asked(pool, episode, call("count")) == {"text": wanted}
    assert asked(pool, 1, call("python", code="a = 4")) == {"text": ""}
    assert asked(pool, 1, call("python", code="a * 2")) == {"text": "8"}
    assert "NameError" in asked(pool, 2, call("python", code="a * 2"))["text"]
    assert asked(pool, 1, call("calculator", expression="(3 + 4) * 2^3 / 7")) == {"text": "8"}
    assert asked(pool, 1, call("later", text="x")) == {"text": "x"}
    pool.end(1)
    assert asked(pool, 1, call("count")) == {"text": "1"}
    wrong = asked(pool, 1, call("add", a=1, c=2))
    assert wrong == {"problem": "arguments", "text": "add: missing a required argument: 'b'"}


@pytest.mark.parametrize(
    ("how", "problem", "said"),
    [
        ("leave", "ended", "its process has ended; its state is lost"),
        ("exit", "exception", "SystemExit: 2"),
        ("binary", "exception", "returned bytes; a tool returns a text"),
        ("nan", "", "NaN"),
        ("print", "", "printed"),
        ("fork", "", "did it"),
        ("raise", "exception", "KeyError: 'raise'"),
    ],
)
def test_a_hostile_tool_costs_its_episode_a_text(pool, how, problem, said):
    episode = 10 + len(how)
    assert asked(pool, 3, call("count"))["text"].isdigit()
    answer = asked(pool, episode, call("misbehave", how=how))
    assert answer.get("problem", "") == problem and said in answer["text"]
    assert asked(pool, episode, call("add", a=1, b=2)) == {"text": "3"}
    assert asked(pool, 3, call("count"))["text"] > "0"


def test_hanging_call_is_killed_and_other_episodes_continue():
    with AgentPool(config(timeout_s=4.0, tools=TOOLS, environments={}, default="")) as pool:
        mine = begin(names=TOOLS)
        pool.ask(1, mine, call("misbehave", how="hang"))
        for episode in range(2, 10):
            pool.ask(episode, mine, call("sleep", seconds=0.5))
        found = {}
        while len(found) < 9:
            found.update(pool.collect(5.0))
        assert found[1]["problem"] == "timeout"
        assert {found[episode]["text"] for episode in range(2, 10)} == {"slept 0.5"}
        assert asked(pool, 1, call("count"), mine) == {"text": "1"}
        process = pool._child._process.pid
        assert len(descendants(process)) > 8
    assert not descendants(process)


def test_more_episodes_than_processes_take_turns():
    with AgentPool(config(num_processes=2, tools=TOOLS, environments={}, default="")) as pool:
        mine = begin(names=TOOLS)
        for episode in range(6):
            pool.ask(episode, mine, call("count"))
        found = {}
        while len(found) < 6:
            for episode, answer in pool.collect(5.0):
                found[episode] = answer["text"]
                pool.end(episode)
        assert found == dict.fromkeys(range(6), "1")


SHARED = tuple(f"{FILE}:{name}" for name in ("meet", "Notes", "stall", "misbehave"))


def shared(**settings):
    given = {"tools": SHARED, "environments": {}, "default": "", "episodes_per_process": 64}
    return AgentPool(config(**{"timeout_s": 0.5, **given, **settings}))


def answers(pool, requests):
    """Returns what comes back to requests of episodes that are all open at the same time."""
    for episode, request in requests.items():
        pool.ask(episode, {**begin(names=SHARED), "seed": episode}, request)
    found = {}
    while len(found) < len(requests):
        found.update(pool.collect(5.0))
    return {e: (a.get("problem", ""), a.get("text", "")) for e, a in sorted(found.items())}


def test_many_episodes_are_coroutines_of_one_process():
    with shared() as pool, shared(episodes_per_process=1, timeout_s=20.0) as alone:
        assert set(answers(pool, dict.fromkeys(range(64), call("meet", count=64)))) == set(
            range(64)
        )
        assert len(pool._workers) == 1
        numbers = answers(pool, dict.fromkeys(range(64), call("draw")))
        first = dict.fromkeys(range(3), call("draw"))
        assert answers(alone, first) == {e: numbers[e] for e in first}
        hanging = {
            e: call("stall", how=h) for e, h in enumerate(("wait", "loop", "sleep", "stubborn"))
        }
        others = dict.fromkeys(range(4, 64), call("draw"))
        found = answers(pool, {**hanging, **others})
        said = "no answer within 0.5 s; its state is lost"
        assert [found[e] for e in hanging] == [("timeout", said)] * 4
        for episode in others:  # they keep what they had
            assert found[episode][1].startswith(numbers[episode][1][:-1])
        again = answers(pool, dict.fromkeys(range(4), call("draw")))
        assert again == {e: numbers[e] for e in range(4)}
        assert len(pool._workers) == 1
        for episode in range(64):
            pool.end(episode)
        assert not pool._workers


@pytest.mark.parametrize(
    ("episodes_per_process", "content", "close", "end_problem"),
    [
        (1, "wait", "", None),
        (64, "wait", "", None),
        (64, "spin", "", None),
        (64, "wait", "raise", "exception"),
        (64, "wait", "hang", "timeout"),
    ],
)
def test_an_environment_releases_its_resources_after_a_timeout(
    tmp_path, episodes_per_process, content, close, end_problem
):
    environments = {"Lease": EnvironmentConfig(environment=f"{FILE}:Lease")}
    settings = config(tools=(), environments=environments, default="", timeout_s=0.5)
    leased = tmp_path / "leased"
    start = begin("Lease", (), file=str(leased), close=close)
    step = {"do": "step", "message": {"content": content}}
    shared_settings = dataclasses.replace(settings, episodes_per_process=episodes_per_process)
    with AgentPool(shared_settings) as pool:
        assert asked(pool, 1, start, start) == {"messages": []}
        assert leased.exists()
        answer = asked(pool, 1, step, start)
        assert answer["problem"] == "timeout" and answer.get("end_problem") == end_problem
    # In a process of its own it is closed after the answer, at the latest with the pool.
    assert leased.exists() == bool(close)


@pytest.mark.parametrize("episodes_per_process", [1, 64])
def test_the_end_of_a_pool_closes_the_environments(tmp_path, capfd, episodes_per_process):
    environments = {"Lease": EnvironmentConfig(environment=f"{FILE}:Lease")}
    settings = config(tools=(), environments=environments, default="")
    files = [tmp_path / name for name in ("first", "second")]
    settings = dataclasses.replace(settings, episodes_per_process=episodes_per_process)
    with AgentPool(settings) as pool:
        for episode, (file, close) in enumerate(zip(files, ("", "raise"), strict=True)):
            start = begin("Lease", (), file=str(file), close=close)
            asked(pool, episode, start, start)
    assert [file.exists() for file in files] == [False, True]
    assert "the lease cannot be given back" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_of_one", [call("stall", how="deaf"), call("misbehave", how="leave")]
)
def test_crash_of_a_shared_process_loses_only_its_episodes(monkeypatch, request_of_one):
    monkeypatch.setattr(worker_pool, "_START_ALLOWANCE_S", 1.0)
    with shared() as pool:
        numbers = answers(pool, dict.fromkeys(range(3), call("draw")))
        (problem, said), *_ = answers(pool, {0: request_of_one}).values()
        assert problem in ("timeout", "ended") and "its state is lost" in said
        lost = ("ended", "its process has ended; its state is lost")
        assert answers(pool, dict.fromkeys(range(1, 3), call("draw"))) == {1: lost, 2: lost}
        assert answers(pool, dict.fromkeys(range(3), call("draw"))) == numbers


def test_environments_of_both_kinds(pool):
    start = begin("Counter", (), start=5)
    text = {"messages": [{"role": "user", "content": "It is 5."}]}
    assert asked(pool, 20, start, start) == text
    assert asked(pool, 20, call("increase", by=3), start) == {"text": "8"}
    over = {"messages": [], "done": True, "reward": 0.0}
    assert asked(pool, 20, {"do": "step", "message": {"content": "x"}}, start) == over
    assert asked(pool, 20, {"do": "reward", "messages": []}, start) == {"reward": 8.0}
    guess = begin("Guess", (), number=7)

    def step(text):
        message = {"role": "assistant", "content": text}
        return asked(pool, 21, {"do": "step", "message": message}, guess)

    no = {"messages": [{"role": "user", "content": "No."}], "done": False, "reward": -0.25}
    assert step("6") == no
    assert "finite" in step("nan")["text"]
    assert step("7") == {"messages": [], "done": True, "reward": 1.0}
    assert asked(pool, 21, {"do": "reward", "messages": []}, guess) == {"reward": 0.0}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tools": ("nowhere:tool",)}, "cannot import module 'nowhere'"),
        ({"tools": (f"{FILE}:missing",)}, "missing"),
        ({"tools": (f"{FILE}:undocumented",)}, "a tool has a docstring"),
        (
            {"environments": {"x": EnvironmentConfig(environment="gymnasium", address="No-v0")}},
            "No",
        ),
    ],
)
def test_unusable_tools_and_environments_are_named(settings, said):
    none = {"tools": (), "environments": {}, "default": ""}
    with pytest.raises(AgentError, match=said), AgentPool(config(**{**none, **settings})) as pool:
        pool.describe()


def test_gymnasium_environments_play_an_episode():
    lake = EnvironmentConfig(environment="gymnasium", address="FrozenLake-v1")
    with AgentPool(config(tools=(), environments={"lake": lake}, default="")) as pool:
        start = begin("lake", ())
        assert asked(pool, 1, start, start)["messages"] == [{"role": "user", "content": "0"}]
        said = asked(pool, 1, {"do": "step", "message": {"content": "left"}}, start)
        assert said["messages"][0]["content"] == "Answer with an integer from 0 to 3."
        rewards = []
        for _ in range(100):
            said = asked(pool, 1, {"do": "step", "message": {"content": "go 2"}}, start)
            rewards.append(said["reward"])
            if said["done"]:
                break
        assert said["done"] and sum(rewards) in (0.0, 1.0)


ADDER = EnvironmentConfig(
    environment="mcp", address=f"{sys.executable} {FILE.with_name('mcp_server.py')}"
)


@pytest.mark.slow
def test_mcp_server_tools_are_called():
    """Results of every kind are whole, or named by a text."""
    settings = config(tools=(), environments={"adder": ADDER}, default="", timeout_s=60)
    with AgentPool(settings) as pool:
        schema = pool.describe()["environments"]["adder"][0]
        assert schema["function"]["name"] == "plus"
        assert set(schema["function"]["parameters"]["properties"]) == {"a", "b"}

        def answer(name, **arguments):
            return asked(pool, 1, call(name, **arguments), begin("adder", ()))

        assert answer("plus", a=3, b=4) == {"text": "7"}
        assert answer("plus", a=101, b=4)["problem"] == "exception"
        assert answer("plus", a=1, b=1) == {"text": "2"}
        uri, alt = "data:image/png;base64,iVBORw0KGgo=", "(image, image/png, 8 bytes)"
        image = {"type": "image", "image": uri, "alt": alt}
        assert answer("draw") == {"text": [{"type": "text", "text": "a dot"}, image]}
        assert answer("embedded_image") == {"text": [image]}
        assert answer("files")["text"].split("\n") == [
            "(audio, audio/wav, 3 bytes)",
            "(link: log, file:///log; text/plain, 9 bytes)",
            "(link: log, file:///log)",
            "all of it",
            "(file file:///b, of unknown type, 3 bytes)",
        ]
        # Structured content is told once.
        assert json.loads(answer("point")["text"]) == {"x": 1, "name": "é"}
        assert answer("points", count=0) == {"text": '{"result": []}'}
        assert json.loads(answer("points", count=1)["text"]) == {"x": 0, "name": "a"}
        assert answer("points", count=2)["text"].count("name") == 2
        assert answer("words") == {"text": "1\nb"}
        assert answer("lines") == {"text": 'a\nb\nc\n{"result": [["a", "b"], ["c"]]}'}
        assert answer("summary") == {"text": 'Found 2.\n{"ids": [4, 7]}'}
        assert answer("nothing") == {"text": ""}
        failed = {"problem": "exception", "text": f"RuntimeError: no file x\n{alt}"}
        assert answer("fail", kind="image") == failed
        silent = "RuntimeError: the tool failed without an error message from its server"
        assert answer("fail", kind="") == {"problem": "exception", "text": silent}
        for name in ("end", "nothing"):
            said = answer(name)
            closed = "RuntimeError: the tool's MCP server: Connection closed"
            assert said == {"problem": "exception", "text": closed}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "problem"),
    [
        (f"{sys.executable} -c pass", "does not answer: MCPError: Connection closed; start it"),
        ("no_such_server --now", "does not answer: FileNotFoundError: "),
        ("http://127.0.0.1:9/mcp", "does not answer: ConnectError: "),
        ("http://", "does not answer: UnsupportedProtocol: "),
        (
            "server 'a",
            "is neither an address nor a command: No closing quotation; give http://... or a",
        ),
        (" ", "is neither an address nor a command: it has no word; give http://... or a command"),
    ],
)
def test_an_absent_mcp_server_is_named(address, problem):
    """Before the run: when the tools of all environments are asked for."""
    absent = EnvironmentConfig(environment="mcp", address=address)
    settings = config(tools=(), environments={"absent": absent}, default="", timeout_s=60)
    with pytest.raises(AgentError) as raised, AgentPool(settings) as pool:
        pool.describe()
    said = str(raised.value)
    assert "config.agent: absent cannot be used: " in said and "ExceptionGroup" not in said
    assert f"the MCP server {address!r} {problem}" in said


@pytest.mark.slow
def test_a_silent_mcp_server_is_named(monkeypatch):
    adapter = pytest.importorskip("jaxrl_llm.agents.adapters.mcp")
    monkeypatch.setattr(adapter, "_CONNECT_TIMEOUT_S", 0.5)
    address = f"{sys.executable} -c 'import time; time.sleep(100)'"
    with pytest.raises(ConnectionError) as raised:
        asyncio.run(adapter.make(address).connect())
    said = f"the MCP server {address!r} does not answer: TimeoutError: nothing within 0.5 s; start"
    assert said in str(raised.value)
