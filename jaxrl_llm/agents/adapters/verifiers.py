"""Tasks of the package `verifiers`, version 0.4 or later: prompts, tools and rewards.

The policy replaces the harness. `python -m jaxrl_llm.agents.adapters.verifiers TASKSET`
prints the rows of a run. Tasks that need a container are rejected.
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

from jaxrl_llm.agents.adapters.mcp import list_tools


class VerifiersEnv:
    """One task of a taskset, played by the policy."""

    def __init__(self, address: str):
        """`address` is the id of a taskset, and after a space its settings as JSON, if any."""
        self._taskset = _taskset(address)
        self._stack = contextlib.AsyncExitStack()
        self.tools: dict[str, Callable[..., Any]] = {}
        self._servers: list[vf.Toolset] = []

    async def connect(self) -> None:
        """Creates the tools, which are the same for all tasks."""
        toolsets = type(self._taskset).toolsets(self._taskset.config)
        task_type = self._taskset.task_type()
        self._servers = [*toolsets, *task_type.toolsets(self._taskset.config.task)]
        for server in self._servers:
            await server.setup()
            mcp_server = MCPServer(server.server_name or type(server).__name__)
            server.register(mcp_server)
            client = await self._stack.enter_async_context(mcp.Client(mcp_server))
            prefix = f"{server.server_name}_" if server.server_name else ""
            self.tools |= await list_tools(client, prefix)

    async def start(self, row: Mapping[str, Any]) -> None:
        """Sets up the task number `idx` of a row; the row holds its prompt."""
        self._task = next(iter(self._taskset.include(idx=[f"{row['idx']}:{row['idx'] + 1}"])))
        if self._task.NEEDS_CONTAINER or self._task.data.image:
            raise ValueError(f"task {row['idx']} needs a container")
        task = self._task
        trace_task = TraceTask(
            type=type(task).__name__, data=task.data, key=task.key, hash=task.hash
        )
        agent = AgentInfo(config=vf.AgentConfig())
        self._trace = vf.Trace(task=trace_task, state=state_cls(type(task))(), agent=agent)
        self._runtime = make_runtime(SubprocessConfig(), name=self._trace.id)
        await self._runtime.start()
        self._stack.push_async_callback(self._runtime.stop)
        await task.setup(self._trace, self._runtime)
        for server in self._servers:
            # Instead of asking a state server by address: the state is in this process.
            server._pull_state = functools.partial(_state, self._trace.state)
            await server.setup_task(task.data)

    async def reward(self, messages: Sequence[Mapping[str, Any]]) -> float:
        """The sum of the task's weighted rewards for the dialogue after the prompt."""
        nodes = [
            *((m, False) for m in _prompt_messages(self._task.data)),
            *map(_verifiers_message, messages),
        ]
        self._trace.nodes = [
            MessageNode(message=message, sampled=sampled, parent=i - 1 if i else None)
            for i, (message, sampled) in enumerate(nodes)
        ]
        await self._task.finalize(self._trace, self._runtime)
        await self._task.score(self._trace, self._runtime)
        return self._trace.reward

    async def close(self) -> None:
        await self._stack.aclose()


async def _state(state: vf.State) -> vf.State:
    return state


def _verifiers_message(message: Mapping[str, Any]) -> tuple[Any, bool]:
    """A message in verifiers' format, and whether the policy sampled it."""
    role, content = message["role"], message["content"]
    if role == "user":
        return vf.UserMessage(content=content), False
    if role == "tool":
        name, call = message["name"], message["tool_call_id"]
        return vf.ToolMessage(content=content, name=name, tool_call_id=call), False
    calls = [
        vf.ToolCall(
            id=call["id"],
            name=call["function"]["name"],
            arguments=json.dumps(call["function"]["arguments"]),
        )
        for call in message.get("tool_calls", ())
    ]
    return vf.AssistantMessage(content=content, tool_calls=calls or None), True


def _prompt_messages(data: vf.TaskData) -> list[Any]:
    prompt = data.prompt or []
    messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt)
    return [vf.SystemMessage(content=data.system_prompt)] * bool(data.system_prompt) + messages


@functools.cache
def _taskset(address: str) -> vf.Taskset:
    name, _, settings = address.partition(" ")
    overrides = json.loads(settings) if settings else {}
    config = taskset_config_type(name).model_validate({**overrides, "id": name})
    return vf.load_taskset(config)


def make(address: str) -> VerifiersEnv:
    """Creates the environment of a taskset; `start` selects the task. Unknown ids raise."""
    return VerifiersEnv(address)


def taskset_rows(address: str, name: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of all tasks of a taskset, for the environment `name` of the config."""
    for task in _taskset(address):
        prompt = [message.model_dump(exclude_none=True) for message in _prompt_messages(task.data)]
        yield {
            "data_source": address.partition(" ")[0],
            "prompt": prompt,
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"agent_name": name, "idx": task.data.idx},
        }


if __name__ == "__main__":  # TASKSET [ENVIRONMENT [MOST]]
    taskset, environment, most = [*sys.argv[1:], *("", "verifiers", "1000000")[len(sys.argv[1:]) :]]
    for row in itertools.islice(taskset_rows(taskset, environment), int(most)):
        print(json.dumps(row))
