"""Environments: the counterpart of the policy in a dialogue, in a process of its own.

An environment is any object with some of these methods, all of which may be `async`:

    start(row)       the messages that follow the prompt, or a text of the user, or nothing
    step(message)    the answer to a turn of the policy that calls no tool: a `Step`, messages, a
                     text of the user, or nothing: the episode ends
    reward()         the reward of the whole episode, called at its end; an argument `messages`
                     receives the messages after the prompt
    close()          releases its resources

Its other public methods are tools. A class with `reset` in place of `start` follows TRL's
environments: `reset(**row)` may return a text, `get_reward()` or an attribute `reward` is the
reward, and there is no `step`.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxrl_llm.algorithms import lookup
from jaxrl_llm.config.agent import ADAPTERS as ADAPTER_NAMES

Message = Mapping[str, Any]

_PROTOCOL_METHODS = frozenset({"start", "reset", "step", "reward", "get_reward", "close"})


@dataclasses.dataclass(frozen=True)
class Step:
    """The answer of an environment to a turn of the policy."""

    messages: Sequence[Message] | str = ()  # a text: one user message
    done: bool = False
    reward: float = 0.0  # of this turn; added to those of the other turns and of the episode


class UserEnvironment(Protocol):
    """An environment as its author writes it. Each method is optional, and may be async."""

    def start(self, row: Mapping[str, Any], /) -> Any:
        """Returns the messages that follow the prompt of `row`, a text of the user, or None."""

    def step(self, message: Message, /) -> Any:
        """Returns the answer to a turn without tool calls: a `Step`, messages, a text, or None."""

    def reward(self) -> Any:
        """Returns the reward of the episode; it may take `messages`, those after the prompt."""

    def close(self) -> Any:
        """Frees its resources when the episode has ended."""


class Environment:
    """A user's environment object behind one set of methods; its results may be awaitable."""

    def __init__(self, inner: UserEnvironment | None):
        self.wrapped: Any = inner  # of any type that has some of the methods

    @property
    def tools(self) -> dict[str, Callable[..., Any]]:
        """The public methods that are the environment's tools, by name."""
        adapter_tools = getattr(self.wrapped, "tools", None)
        if isinstance(adapter_tools, Mapping):  # an adapter lists its own
            return dict(adapter_tools)
        methods = inspect.getmembers(self.wrapped, inspect.isroutine)
        return {
            name: method
            for name, method in methods
            if not name.startswith("_") and name not in _PROTOCOL_METHODS
        }

    async def start(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Starts an episode for a row; returns the messages that follow the prompt."""
        if start := getattr(self.wrapped, "start", None):
            return to_messages(await await_if_needed(start(row)))
        if reset := getattr(self.wrapped, "reset", None):
            return to_messages(await await_if_needed(reset(**row)))
        return []

    async def step(self, message: Message) -> Step:
        """Returns the environment's answer to a turn without tool calls."""
        if not hasattr(self.wrapped, "step"):
            return Step(done=True)
        result = await await_if_needed(self.wrapped.step(message))
        if isinstance(result, Step):
            return dataclasses.replace(result, messages=to_messages(result.messages))
        messages = to_messages(result)
        return Step(messages, done=not messages)

    async def reward(self, messages: Sequence[Message]) -> float:
        """The reward of the episode, 0 if the environment has none.

        `messages` are the messages after the prompt. TypeError or ValueError if the reward is not
        a finite number.
        """
        for name in ("reward", "get_reward"):
            value = getattr(self.wrapped, name, None)
            if callable(value):
                takes_messages = "messages" in inspect.signature(value).parameters
                value = value(messages=messages) if takes_messages else value()
            if value is not None:
                return finite_reward(await await_if_needed(value))
        return 0.0

    async def close(self) -> None:
        if close := getattr(self.wrapped, "close", None):
            await await_if_needed(close())


def make_environment(name: str, address: str) -> Environment:
    """Creates an environment from an adapter's name, or from a user's class or function.

    Errors of the lookup, the adapter's package and the user's code pass through.
    """
    factory = environment_factory(name)
    return Environment(factory(address) if name in ADAPTERS else factory())


def environment_factory(name: str) -> Callable[..., UserEnvironment]:
    """The factory of an adapter's or a user's environments; raises as `make_environment`."""
    return lookup.resolve(ADAPTERS.get(name, name), {}, "environment")


# Adapter name -> import path; the modules need optional dependencies (extras of this project).
ADAPTERS: Mapping[str, str] = {
    name: f"jaxrl_llm.agents.adapters.{name}:make" for name in ADAPTER_NAMES
}


async def await_if_needed(value: Any) -> Any:
    """Returns the value, awaited first if it is awaitable."""
    return await value if inspect.isawaitable(value) else value


def to_messages(value: Any) -> list[dict[str, Any]]:
    """The value as messages: a text is one user message, None none. TypeError for other values."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    rule = "an environment answers with a text, or a list of messages with role and content"
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise TypeError(f"returned {type(value).__name__} {value!r:.100}; {rule}")
    for message in value:
        fields = message if isinstance(message, Mapping) else {}
        role, content = fields.get("role"), fields.get("content")
        if not isinstance(role, str) or not isinstance(content, str | list):  # parts with images
            raise TypeError(f"returned a message {message!r:.100}; {rule}")
    return [dict(message) for message in value]


def finite_reward(value: Any) -> float:
    """The reward as a float; TypeError or ValueError if it is not a finite number."""
    if hasattr(value, "item"):  # a numpy scalar
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        raise TypeError(f"the reward is {type(value).__name__} {value!r:.100}; give a number")
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value!r}; give a finite number")
    return float(value)
