"""Tasks of verifiers, by the package itself where it is installed."""

import json
import subprocess
import sys

import pytest

from jaxrl_llm.agents.agent_pool import AgentPool
from jaxrl_llm.config.agent import AgentConfig, EnvironmentConfig

pytest.importorskip("verifiers.v1", reason="the extra [verifiers]")
pytestmark = pytest.mark.nightly

TASKSET = '''
import verifiers.v1 as vf
from verifiers.v1.configs.task import TaskConfig
from verifiers.v1.configs.taskset import TasksetConfig


class Seen(vf.State):
    calls: int = 0


class Data(vf.TaskData):
    answer: str


class Shelf(vf.Toolset[vf.ToolsetConfig, Seen]):
    async def setup_task(self, data):
        self.answer = data.answer

    @vf.tool
    def look(self, page: int) -> str:
        """Reads a page."""
        self.state.calls += 1
        if page > 100:
            raise ValueError("no such page")
        return f"page {page} says {self.answer}"


class Riddle(vf.Task[Data, Seen, TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Shelf(vf.ToolsetConfig())]

    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def looked(self, trace) -> float:
        assert [m.tool_calls[0].name for m in trace.assistant_messages[:-1]] == ["shelf_look"] * 2
        assert [m.content[:4] for m in trace.tool_messages] == ["page", "Erro"]
        return trace.state.calls / 4


class Riddles(vf.Taskset[Riddle, TasksetConfig]):
    def load(self):
        for number in range(5):
            data = Data(prompt=f"Riddle {number}", system_prompt="Short.", answer=str(number * 7))
            yield Riddle(data)


__all__ = ["Riddles"]
'''


def test_a_task_is_played_with_its_tools_and_rewards(tmp_path, monkeypatch):
    (tmp_path / "riddles.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    command = [sys.executable, "-m", "jaxrl_llm.agents.adapters.verifiers", "riddles", "riddle"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    row = json.loads(printed.splitlines()[3])
    assert row["prompt"] == [
        {"role": "system", "content": "Short."},
        {"role": "user", "content": "Riddle 3"},
    ]
    riddle = EnvironmentConfig(environment="verifiers", address="riddles")
    begin = {"do": "start", "environment": "riddle", "names": (), "kwargs": {}, "seed": 1}
    begin["row"] = row["extra_info"]

    def asked(pool, request):
        pool.ask(1, begin, request)
        while True:
            for _, answer in pool.collect(5.0):
                return answer

    with AgentPool(AgentConfig(environments={"riddle": riddle}, timeout_s=60.0)) as pool:
        (schema,) = pool.describe()["environments"]["riddle"]
        assert schema["function"]["name"] == "shelf_look"
        said = []
        for page, words in ((2, "page 2 says 21"), (200, "no such page")):
            arguments = {"page": page}
            answer = asked(pool, {"do": "call", "name": "shelf_look", "arguments": arguments})
            assert words in answer["text"]
            text = f"Error: {answer['text']}" if "problem" in answer else answer["text"]
            function = {"name": "shelf_look", "arguments": arguments}
            call = {"type": "function", "id": "000000000", "function": function}
            said.append({"role": "assistant", "content": "", "tool_calls": [call]})
            reply = {"role": "tool", "name": "shelf_look", "tool_call_id": "000000000"}
            said.append({**reply, "content": text})
        said.append({"role": "assistant", "content": "21"})
        assert asked(pool, {"do": "step", "message": said[-1]})["done"]
        assert asked(pool, {"do": "reward", "messages": said})["reward"] == 2.0 + 0.5
