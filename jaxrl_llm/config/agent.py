"""Agents: tools, environments, and the limits of an episode of several turns."""

import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from jaxrl_llm.config.validation import ConfigGroup, Count, File, Name, Problems, Range, Real

ADAPTERS = ("gymnasium", "mcp", "openenv", "verifiers")
BUILTIN_TOOLS = ("calculator", "python", "search")
# Values of a row's `agent_name` that mean: tools and no environment; one answer without either.
TOOLS_ALONE, SINGLE_TURN = "tool_agent", "single_turn_agent"
# Settings without effect on a harness, and those without effect on tools and environments.
_TOOL_FIELDS = [
    "default",
    "strict_tools",
    "max_turns",
    "max_calls",
    "max_result_characters",
    "cut_results",
]
_TOOL_FIELDS += ["timeout_s", "max_tool_s", "corpus"]
_HARNESS_FIELDS = ["harness_timeout_s", "max_requests", "max_harness_processes", "failure_reward"]
_FUNCTION_PATH = re.compile(r"[^\s:]+:[A-Za-z_]\w*")


class EnvironmentConfig(ConfigGroup):
    """One kind of environment; rows choose it by their column `agent_name` (docs/agents.md)."""

    # A class or function of yours that makes one; or gymnasium, mcp, openenv, verifiers.
    environment: Name = ""
    # For adapters: the id of an environment or a taskset, the command or the address of a server.
    address: Name = ""

    def rules(self) -> Problems:
        name = self.environment
        if not name:
            yield "environment", "required: 'package.module:Class', 'path/file.py:Class' or adapter"
        elif name not in ADAPTERS and ":" not in name:
            known = ", ".join(ADAPTERS)
            remedy = "or your own as 'package.module:Class' or 'path/file.py:Class'"
            yield "environment", f"unknown environment {name!r}; known: {known}; {remedy}"
        elif name in ADAPTERS and not self.address:
            yield "address", f"required by environment={name!r}"


class AgentConfig(ConfigGroup):
    """Multi-turn episodes: tools and environments, and their limits."""

    # calculator, python, search; or typed functions of yours with docstrings, by import or file.
    tools: tuple[Name, ...] = ()
    environments: Mapping[str, EnvironmentConfig] = dataclasses.field(default_factory=dict)
    # The environment of rows without the column `agent_name`. Empty: the only one, if there is one.
    default: Name = ""
    # How the model writes calls; "auto": as its chat template does.
    call_format: Literal[
        "auto", "hermes", "qwen3_coder", "glm4", "llama3", "mistral", "harmony", "deepseek"
    ] = "auto"
    # Each sampled call names an offered tool and is valid by its schema. Needs
    # rollout.support_tokens in training, and the extra [serve].
    strict_tools: bool = False
    max_turns: Annotated[int, Range("[1, 1024]")] = 8  # of the policy in an episode
    max_turn_tokens: Annotated[int, Range("[0, 1000000000]", "0: those of the response")] = 0
    max_calls: Annotated[int, Range("[1, 64]")] = 4  # in a turn; the others are not made
    max_result_characters: Count = 2048  # of what a tool answers; more are cut out at that side
    cut_results: Literal["left", "middle", "right"] = "middle"
    timeout_s: Annotated[float, Range("[0.01, 1000000]")] = 10.0  # of one call or step
    # Of an episode, all calls and steps together.
    max_tool_s: Annotated[float, Range("(0, inf]", "inf: no limit")] = float("inf")
    # At the same time; episodes without one wait.
    num_processes: Annotated[int, Range("[1, 65536]")] = 256
    # More than 1: episodes run as coroutines beside each other in a process; for `async` code that
    # waits most of the time.
    episodes_per_process: Annotated[int, Range("[1, 65536]")] = 1
    # Workers of a Ray cluster in place of this host; the processes above are those of each.
    ray_workers: Annotated[int, Range("[0, 65536]", "0: this host")] = 0
    # Address space of a process.
    memory_gib: Annotated[float, Range("[0.5, 1000000] or inf", "inf: no limit")] = 16.0
    visible: tuple[Name, ...] = ()  # environment variables that tools and environments may see
    corpus: File = ""  # JSON lines with `text` (and `title`), for the tool "search"
    # A black-box agent in place of tools and environments (docs/harness.md): a function of a row
    # and `base_url`, 'package.module:function' or 'path/file.py:function', or a command line.
    harness: Name = ""
    harness_timeout_s: Annotated[float, Range("[0.01, 1000000]")] = 600.0  # of an episode
    max_requests: Annotated[int, Range("[1, 1000000]")] = 64  # of a harness in an episode
    # Processes of a harness that is a command, itself and its descendants, at the same time.
    max_harness_processes: Annotated[int, Range("[1, 65536]")] = 64
    failure_reward: Real = 0.0  # of an episode whose harness failed

    @property
    def is_used(self) -> bool:
        """Whether the run has tools, environments or a harness."""
        return bool(self.tools or self.environments or self.harness)

    @property
    def gives_rewards(self) -> bool:
        """Whether environments or a harness may give rewards."""
        return bool(self.environments or self.harness)

    @property
    def is_command(self) -> bool:
        """Whether `harness` is a command line, not a function."""
        return bool(self.harness) and not _FUNCTION_PATH.fullmatch(self.harness)

    def warnings(self) -> Iterator[str]:
        """Settings of the other kind of agent."""
        reason = "a harness has its own tools" if self.harness else "there is no agent.harness"
        idle = _TOOL_FIELDS if self.harness else _HARNESS_FIELDS
        for name in idle:
            if getattr(self, name) != getattr(AgentConfig(), name):
                yield f"config.agent.{name}: no effect, {reason}"

    def environment_for(self, agent_name: str) -> str:
        """Name of the environment of a row, by its `agent_name`; "": tools alone."""
        only = next(iter(self.environments)) if len(self.environments) == 1 else ""
        name = agent_name or self.default or only
        return "" if name in (TOOLS_ALONE, SINGLE_TURN) else name

    def rules(self) -> Problems:
        for i, tool in enumerate(self.tools):
            if tool not in BUILTIN_TOOLS and ":" not in tool:
                known = ", ".join(BUILTIN_TOOLS)
                remedy = "or your own as 'package.module:function' or 'path/file.py:function'"
                yield f"tools[{i}]", f"unknown tool {tool!r}; known: {known}; {remedy}"
        if self.strict_tools and not self.is_used:
            yield "strict_tools", "there are no tools; add agent.tools or agent.environments"
        if len(set(self.tools)) < len(self.tools):
            yield "tools", f"each one once, got {self.tools}"
        if self.default and self.default not in (TOOLS_ALONE, *self.environments):
            known = ", ".join((TOOLS_ALONE, *self.environments))
            yield "default", f"no environment is named {self.default!r}; known: {known}"
        for name in {TOOLS_ALONE, SINGLE_TURN} & set(self.environments):
            yield "environments", f"{name!r} has a meaning of its own; rename it"
        if len(self.environments) > 1 and not self.default:
            yield (
                "default",
                f"name that of rows without `agent_name`: {', '.join(self.environments)}",
            )
        yield from self._harness_rules()
        if "search" in self.tools and not self.corpus:
            yield "corpus", "required by the tool 'search': a file of JSON lines with `text`"
        if self.corpus and "search" not in self.tools:
            yield "corpus", "nothing searches it; add 'search' to agent.tools"

    def _harness_rules(self) -> Problems:
        if not self.harness:
            return
        if self.strict_tools:
            yield "strict_tools", "a harness says for each request which of its tools are strict"
        if self.tools or self.environments:
            message = f"{self.harness!r} is an agent with tools of its own"
            yield "harness", f"{message}; leave agent.tools and agent.environments empty"
        if self.ray_workers:
            yield "ray_workers", "a harness reaches the run on its host alone; set it to 0"
        if self.is_command:
            try:
                shlex.split(self.harness)
            except ValueError as error:
                yield "harness", f"{self.harness!r} is no command line: {error}"
            if self.episodes_per_process > 1:
                yield "episodes_per_process", "a command has a process of its own; set it to 1"
