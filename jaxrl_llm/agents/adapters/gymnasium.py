"""Gymnasium environments whose observations are shown as text (package `gymnasium`)."""

import random
import re
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from jaxrl_llm.agents.environments import Step


class Game:
    """A Gymnasium environment; a turn of the policy is one action.

    An action is the turn's text where the action space is `Text`; of `Discrete` it is the last
    integer in the text. What is no action is answered with the rule, and the game goes on. The
    seed follows from the row.
    """

    def __init__(self, address: str):
        self._game = gymnasium.make(address)

    def start(self, row: Mapping[str, Any]) -> str:
        observation, _ = self._game.reset(seed=random.getrandbits(31))
        return _text(observation)

    def step(self, message: Mapping[str, Any]) -> Step:
        space, said = self._game.action_space, message["content"]
        action: Any = said
        if isinstance(space, gymnasium.spaces.Discrete):
            first, last = int(space.start), int(space.start + space.n - 1)
            numbers = re.findall(r"-?\d+", said)
            if not numbers or not first <= int(numbers[-1]) <= last:
                return Step(f"Answer with an integer from {first} to {last}.")
            action = int(numbers[-1])
        observation, reward, terminated, truncated, _ = self._game.step(action)
        return Step(_text(observation), bool(terminated or truncated), float(reward))

    def close(self) -> None:
        self._game.close()


def _text(observation: Any) -> str:
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {_text(each)}" for name, each in observation.items())
    if isinstance(observation, np.ndarray):
        return np.array2string(observation, separator=", ", threshold=4096)
    return str(observation)


def make(address: str) -> Game:
    """Returns the environment of an id such as `FrozenLake-v1`; actions are texts or integers.

    ValueError for an environment with another space of actions.
    """
    game = Game(address)
    space = game._game.action_space
    if not isinstance(space, gymnasium.spaces.Discrete | gymnasium.spaces.Text):
        game.close()
        raise ValueError(f"{address}: its actions are {space}; only Discrete and Text can be said")
    return game
