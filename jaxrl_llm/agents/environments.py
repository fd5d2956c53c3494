"""Environments: what stands on the other side of a dialogue, in a process of its own.

An environment is any object with some of these methods, all of which may be `async`:

    start(row)       the messages that follow the prompt, or a text of the user, or nothing
    step(message)    the answer to a turn of the policy that calls no tool: a `Step`, messages, a
                     text of the user, or nothing: the episode ends
    reward()         what the whole episode is worth, asked at its end; with an argument `messages`
                     it gets those after the prompt
    close()          gives back what it holds

Its other public methods are tools. A class with `reset` in place of `start` is meant as TRL's
environments are: `reset(**row)` may return a text, `get_reward()` or an attribute `reward` is the
reward, and there is no `step`.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.algorithms import lookup
from jaxrl_llm.config.agent import ADAPTERS as NAMES

Message = Mapping[str, Any]

_OWN = frozenset({"start", "reset", "step", "reward", "get_reward", "close"})


@dataclasses.dataclass(frozen=True)
class Step:
    """The answer of an environment to a turn of the policy."""

    messages: Sequence[Message] | str = ()  # a text is one message of the user
    done: bool = False
    reward: float = 0.0  # for this turn; those of all turns and of the episode are added


class Environment:
    """An object of a user, seen through one set of methods; results may be awaitable."""

    def __init__(self, inner: Any):
        self.inner = inner

    @property
    def tools(self) -> dict[str, Callable[..., Any]]:
        """The public methods that are the environment's tools, by name."""
        found = getattr(self.inner, "tools", None)
        if isinstance(found, Mapping):  # of an adapter
            return dict(found)
        methods = inspect.getmembers(self.inner, inspect.isroutine)
        return {n: f for n, f in methods if not n.startswith("_") and n not in _OWN}

    async def start(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the messages that follow the prompt."""
        if start := getattr(self.inner, "start", None):
            return as_messages(await settled(start(row)))
        if reset := getattr(self.inner, "reset", None):
            return as_messages(await settled(reset(**row)))
        return []

    async def step(self, message: Message) -> Step:
        """Returns the answer to a turn without calls."""
        if not hasattr(self.inner, "step"):
            return Step(done=True)
        found = await settled(self.inner.step(message))
        if isinstance(found, Step):
            return dataclasses.replace(found, messages=as_messages(found.messages))
        messages = as_messages(found)
        return Step(messages, done=not messages)

    async def reward(self, messages: Sequence[Message]) -> float:
        """Returns the reward of the episode, whose messages follow the prompt; 0 without one.

        TypeError or ValueError if it is no finite number.
        """
        for name in ("reward", "get_reward"):
            found = getattr(self.inner, name, None)
            if callable(found):
                asks = "messages" in inspect.signature(found).parameters
                found = found(messages=messages) if asks else found()
            if found is not None:
                return checked_reward(await settled(found))
        return 0.0

    async def close(self) -> None:
        if close := getattr(self.inner, "close", None):
            await settled(close())


def made(name: str, address: str) -> Environment:
    """Returns a new environment of an adapter's name, or of a user's class or function.

    Raises what the lookup, the adapter's package or the user's code raises.
    """
    made = found(name)
    return Environment(made(address) if name in ADAPTERS else made())


def found(name: str) -> Callable[..., Any]:
    """Returns what makes an adapter's or a user's environments; raises as `made`."""
    return lookup.resolve(ADAPTERS.get(name, name), {}, "environment")


# Their modules import packages of their own (extras of this project).
ADAPTERS: Mapping[str, str] = {name: f"jaxrl_llm.agents.adapters.{name}:make" for name in NAMES}


async def settled(value: Any) -> Any:
    """Returns a value, awaited if it is to be."""
    return await value if inspect.isawaitable(value) else value


def as_messages(value: Any) -> list[dict[str, Any]]:
    """Returns messages; of a text one of the user, of nothing none. TypeError for other values."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    rule = "an environment answers with a text, or a list of messages with role and content"
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise TypeError(f"returned {type(value).__name__} {value!r:.100}; {rule}")
    for message in value:
        given = message if isinstance(message, Mapping) else {}
        role, content = given.get("role"), given.get("content")
        if not isinstance(role, str) or not isinstance(content, str | list):  # parts with images
            raise TypeError(f"returned a message {message!r:.100}; {rule}")
    return [dict(message) for message in value]


def checked_reward(value: Any) -> float:
    """Returns a reward as a float; TypeError or ValueError if it is no finite number."""
    if hasattr(value, "item"):  # a number of numpy
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        raise TypeError(f"the reward is {type(value).__name__} {value!r:.100}; give a number")
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value!r}; give a finite number")
    return float(value)
