"""Gymnasium environments whose observations are shown as text (package `gymnasium`)."""

import random
import re
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from jaxrl_llm.agents.environments import Step


class GymEnv:
    """A Gymnasium environment; a turn of the policy is one action.

    The action is the text of the turn for a `TextField` action space, and the last integer in it
    for `Discrete`. Any other text is answered with the rule, and the episode goes on. The seed
    follows from the row.
    """

    def __init__(self, address: str):
        self._env = gymnasium.make(address)

    def start(self, row: Mapping[str, Any]) -> str:
        observation, _ = self._env.reset(seed=random.getrandbits(31))
        return _text(observation)

    def step(self, message: Mapping[str, Any]) -> Step:
        space, text = self._env.action_space, message["content"]
        action: Any = text
        if isinstance(space, gymnasium.spaces.Discrete):
            first, last = int(space.start), int(space.start + space.n - 1)
            integers = re.findall(r"-?\d+", text)
            if not integers or not first <= int(integers[-1]) <= last:
                return Step(f"Answer with an integer from {first} to {last}.")
            action = int(integers[-1])
        observation, reward, terminated, truncated, _ = self._env.step(action)
        return Step(_text(observation), bool(terminated or truncated), float(reward))

    def close(self) -> None:
        self._env.close()


def _text(observation: Any) -> str:
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {_text(value)}" for name, value in observation.items())
    if isinstance(observation, np.ndarray):
        return np.array2string(observation, separator=", ", threshold=4096)
    return str(observation)


def make(address: str) -> GymEnv:
    """Creates the environment of an id such as `FrozenLake-v1`.

    ValueError if its action space is neither Discrete nor Text.
    """
    env = GymEnv(address)
    space = env._env.action_space
    if not isinstance(space, gymnasium.spaces.Discrete | gymnasium.spaces.Text):
        env.close()
        raise ValueError(f"{address}: its actions are {space}; only Discrete and Text can be said")
    return env
