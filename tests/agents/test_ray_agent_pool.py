"""Tools, environments and reward functions on the workers of a Ray cluster of this machine."""

import dataclasses
import os
import signal

import pytest

from jaxrl_llm.agents.agent_pool import AgentPool, make_agent_pool
from jaxrl_llm.config import RewardsConfig
from jaxrl_llm.config.agent import AgentConfig
from jaxrl_llm.processes import ray_worker_pool
from jaxrl_llm.rewards.functions import ARGUMENTS
from jaxrl_llm.rewards.reward_pool import RewardCall, RewardError, RewardPool

ray = pytest.importorskip("ray", reason="the extra [ray]")
pytestmark = pytest.mark.nightly  # starting Ray takes seconds

TOOLS = '''
import os, time

_SEEN = []


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Another.
    """
    return a + b


def remember(text: str) -> list[str]:
    """Remembers.

    Args:
        text: What.
    """
    _SEEN.append(text)
    return _SEEN


def misbehave(how: str) -> object:
    """Does what no tool should.

    Args:
        how: What exactly.
    """
    if how == "hang":
        while True:
            pass
    if how == "leave":
        os._exit(3)
    if how == "worker":
        return os.getppid()
    return how * 100_000
'''

REWARDS = """
import os, time


def judge(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang":
        time.sleep(1000)
    if solution_str == "leave":
        os._exit(3)
    if solution_str == "memory":
        bytearray(1 << 34)
    return {"score": len(solution_str), "truth": ground_truth, **extra_info}
"""


@pytest.fixture(scope="module")
def cluster():
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(num_cpus=4, include_dashboard=False, logging_level="error")
    signal.signal(signal.SIGTERM, handler)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    path = tmp_path_factory.mktemp("ray") / "tools.py"
    path.write_text(TOOLS)
    names = tuple(f"{path}:{name}" for name in ("add", "remember", "misbehave"))
    return AgentConfig(tools=names, timeout_s=3.0, ray_workers=2, memory_gib=4.0)


def called(name, **arguments):
    return {"do": "call", "name": name, "arguments": arguments}


def asked(pool, config, requests):
    for episode, request in requests.items():
        begin = {"do": "start", "environment": "", "names": config.tools, "kwargs": {}}
        pool.ask(episode, {**begin, "row": {}, "seed": episode}, request)
    found = {}
    while len(found) < len(requests):
        found.update(pool.collect(5.0))
    return {e: {n: v for n, v in found[e].items() if n != "seconds"} for e in sorted(found)}


def test_tools_answer_as_on_this_host(cluster, tools):
    kinds = ("hang", "leave", "x", "raise")
    requests = {e: called("misbehave", how=how) for e, how in enumerate(kinds)}
    requests |= {e: called("add", a=e, b=1) for e in range(4, 40)}
    again = {e: called("remember", text=str(e)) for e in range(8)}
    with AgentPool(tools) as here, make_agent_pool(tools) as there:
        assert there.describe() == here.describe()
        found = [
            [asked(pool, tools, each) for each in (requests, again, again)]
            for pool in (here, there)
        ]
        assert found[0] == found[1]
        first, _, third = found[1]
        assert [first[e].get("problem", "") for e in range(4)] == ["timeout", "ended", "", ""]
        assert "(cut)" in first[2]["text"] and first[39] == {"text": "40"}
        assert third[5] == {"text": '["5", "5"]'}  # its process is its own, and stays


def test_a_worker_that_dies_costs_its_episodes_their_state(cluster, tools):
    with make_agent_pool(tools) as pool:
        both = {e: called("remember", text="a") for e in range(2)}
        assert asked(pool, tools, both) == {key: {"text": '["a"]'} for key in range(2)}
        ray.kill(pool._worker_of_session[0])
        said = {"problem": "ended", "text": "its Ray worker has ended; its state is lost"}
        assert asked(pool, tools, both) == {0: said, 1: {"text": '["a", "a"]'}}
        assert asked(pool, tools, {0: both[0]}) == {0: {"text": '["a"]'}}


def test_rewards_are_those_of_this_host(cluster, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    name = f"{tmp_path}/rewards.py:judge"
    settings = {"timeout_s": 3.0, "on_failure": "score", "failure_score": -7.0, "memory_gib": 4.0}
    config = RewardsConfig(**settings, ray_workers=2)
    said = ["hang", "leave", "memory", *("x" * n for n in range(20))]
    calls = [RewardCall(name, i, "here", text, [1, 2], {"index": i}) for i, text in enumerate(said)]
    assert set(ARGUMENTS) < set(RewardCall.__annotations__)
    local_config = dataclasses.replace(config, ray_workers=0)
    with RewardPool([name], local_config) as here, RewardPool([name], config) as there:
        wanted, found = here.run(calls), there.run(calls)
        pids = [
            ray.get(h.__ray_call__.remote(lambda actor: os.getpid())) for h in there._pool.handles
        ]
        os.kill(pids[0], signal.SIGKILL)
        again = there.run(calls[3:])
        with pytest.raises(RewardError, match="row 0, data source 'here': no answer within"):
            there.attempt(calls[:1], stop=True)
    assert [o.failure.splitlines()[0] for o in found[:3]] == [
        o.failure.splitlines()[0] for o in wanted[:3]
    ]
    assert found[3:] == wanted[3:] == again
    with pytest.raises(RewardError, match="closed"):
        there.attempt(calls)


def test_unusable_tools_are_named(cluster, monkeypatch):
    wrong = AgentConfig(tools=("nowhere:tool",), ray_workers=1)
    with pytest.raises(ray_worker_pool.RayWorkersError, match="cannot import module 'nowhere'"):
        make_agent_pool(wrong)
    monkeypatch.setattr(ray_worker_pool, "START_TIMEOUT_S", 1.0)
    many = AgentConfig(tools=("calculator",), ray_workers=5)
    with pytest.raises(ray_worker_pool.RayWorkersError, match="it has 4 cores; use fewer"):
        make_agent_pool(many)
