"""Tasks of verifiers, from version 0.4 on (package `verifiers`): prompts, tools and rewards.

The policy takes the place of the harness. `python -m jaxrl_llm.agents.adapters.verifiers TASKSET`
prints the rows of a run. Tasks that need a container are refused.
"""

import contextlib
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mcp
import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from verifiers.v1.graph import MessageNode
from verifiers.v1.runtimes import SubprocessConfig, make_runtime
from verifiers.v1.state import state_cls
from verifiers.v1.trace import AgentInfo, TraceTask
from verifiers.v1.utils.loaders import taskset_config_type

from jaxrl_llm.agents.adapters.mcp import tools_of


class Played:
    """One task of a taskset, played by the policy."""

    def __init__(self, address: str):
        """`address` is the id of a taskset, and after a space its settings as JSON, if any."""
        self._taskset = _taskset(address)
        self._stack = contextlib.AsyncExitStack()
        self.tools: dict[str, Callable[..., Any]] = {}
        self._servers: list[vf.Toolset] = []

    async def connect(self) -> None:
        """Makes the tools; each task has the same ones."""
        own = type(self._taskset).toolsets(self._taskset.config)
        of_task = self._taskset.task_type()
        self._servers = [*own, *of_task.toolsets(self._taskset.config.task)]
        for server in self._servers:
            await server.setup()
            served = MCPServer(server.server_name or type(server).__name__)
            server.register(served)
            client = await self._stack.enter_async_context(mcp.Client(served))
            prefix = f"{server.server_name}_" if server.server_name else ""
            self.tools |= await tools_of(client, prefix)

    async def start(self, row: Mapping[str, Any]) -> None:
        """Prepares the task of a row by its number `idx`; its prompt stands in the row."""
        self._task = next(iter(self._taskset.include(idx=[f"{row['idx']}:{row['idx'] + 1}"])))
        if self._task.NEEDS_CONTAINER or self._task.data.image:
            raise ValueError(f"task {row['idx']} needs a container")
        task = self._task
        of_trace = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = AgentInfo(config=vf.AgentConfig())
        self._trace = vf.Trace(task=of_trace, state=state_cls(type(task))(), agent=agent)
        self._runtime = make_runtime(SubprocessConfig(), name=self._trace.id)
        await self._runtime.start()
        self._stack.push_async_callback(self._runtime.stop)
        await task.setup(self._trace, self._runtime)
        for server in self._servers:
            # In place of the address of a server of states: this process has it.
            server._pull_state = functools.partial(_settled, self._trace.state)
            await server.setup_task(task.data)

    async def reward(self, messages: Sequence[Mapping[str, Any]]) -> float:
        """Returns the sum of the task's weighted rewards for the dialogue after the prompt."""
        nodes = [*((m, False) for m in _prompt(self._task.data)), *map(_node, messages)]
        self._trace.nodes = [
            MessageNode(message=message, sampled=sampled, parent=i - 1 if i else None)
            for i, (message, sampled) in enumerate(nodes)
        ]
        await self._task.finalize(self._trace, self._runtime)
        await self._task.score(self._trace, self._runtime)
        return self._trace.reward

    async def close(self) -> None:
        await self._stack.aclose()


async def _settled(state: vf.State) -> vf.State:
    return state


def _node(message: Mapping[str, Any]) -> tuple[Any, bool]:
    """Returns a message of the dialogue as verifiers has it, and whether the policy said it."""
    role, content = message["role"], message["content"]
    if role == "user":
        return vf.UserMessage(content=content), False
    if role == "tool":
        given = {"name": message["name"], "tool_call_id": message["tool_call_id"]}
        return vf.ToolMessage(content=content, **given), False
    calls = [
        vf.ToolCall(
            id=call["id"],
            name=call["function"]["name"],
            arguments=json.dumps(call["function"]["arguments"]),
        )
        for call in message.get("tool_calls", ())
    ]
    return vf.AssistantMessage(content=content, tool_calls=calls or None), True


def _prompt(data: vf.TaskData) -> list[Any]:
    prompt = data.prompt or []
    said = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt)
    return [vf.SystemMessage(content=data.system_prompt)] * bool(data.system_prompt) + said


@functools.cache
def _taskset(address: str) -> vf.Taskset:
    name, _, settings = address.partition(" ")
    given = json.loads(settings) if settings else {}
    config = taskset_config_type(name).model_validate({**given, "id": name})
    return vf.load_taskset(config)


def make(address: str) -> Played:
    """Returns a task of a taskset, not yet chosen; raises what verifiers does for an unknown id."""
    return Played(address)


def rows(address: str, name: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of all tasks of a taskset, for the environment `name` of the config."""
    for task in _taskset(address):
        prompt = [message.model_dump(exclude_none=True) for message in _prompt(task.data)]
        yield {
            "data_source": address.partition(" ")[0],
            "prompt": prompt,
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"agent_name": name, "idx": task.data.idx},
        }


if __name__ == "__main__":  # TASKSET [ENVIRONMENT [MOST]]
    taskset, environment, most = [*sys.argv[1:], *("", "verifiers", "1000000")[len(sys.argv[1:]) :]]
    for row in itertools.islice(rows(taskset, environment), int(most)):
        print(json.dumps(row))
