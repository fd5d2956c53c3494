"""Games of the package `textarena`: one player against the game, or all players by self-play.

The game speaks in user messages, which hold what a player has learned since its last turn. An
action is the text of a turn.
"""

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import textarena
from textarena.core import GAME_ID, ObservationType
from textarena.envs.registration import ENV_REGISTRY
from textarena.wrappers import ActionFormattingWrapper

from jaxrl_llm import errors
from jaxrl_llm.agents.environments import Step
from jaxrl_llm.agents.harness import ask_policy, role_address
from jaxrl_llm.algorithms import lookup

_MAX_PLAYERS = 15
# Of an opponent: an action for what it has seen in the game, the latest last.
Opponent = Callable[[str], str]


def game_names() -> list[str]:
    """The ids of all games of the installed package, without its variants of observations."""
    return sorted(name for name in ENV_REGISTRY if f"{name}-raw" in ENV_REGISTRY)


class Game:
    """A game that is under way."""

    def __init__(self, game: str, num_players: int = 0):
        """`game` is an id such as "Nim-v0"; `num_players` 0: as few as can play it.

        Raises:
          ValueError: If there is no such game, with the ids that are near.
          Exception: Whatever a game raises that lacks data or a package of its own.
        """
        spec = ENV_REGISTRY.get(game)
        if spec is None or f"{game}-raw" not in ENV_REGISTRY:
            hint = errors.name_hint(game, game_names(), "jaxrl_llm envs --names=textarena", 0.4)
            raise ValueError(f"textarena has no game {game!r}; {hint}")
        self._game = game
        self._env = textarena.make(f"{game}-raw")
        if ActionFormattingWrapper in (spec.default_wrappers or ()):
            self._env = ActionFormattingWrapper(self._env)
        self.num_players = num_players or self._least_players()
        self.is_done = False

    def _least_players(self) -> int:
        for count in range(1, _MAX_PLAYERS + 1):
            try:
                self._env.reset(num_players=count, seed=0)
            except (AssertionError, ValueError, KeyError, IndexError):
                continue
            return count
        raise ValueError(f"textarena's {self._game!r} starts with no number of players")

    def start(self, seed: int) -> None:
        """Starts the game; all that is random in it follows from the seed."""
        self._env.reset(num_players=self.num_players, seed=seed)
        self.is_done = False

    def observation(self) -> tuple[int, str]:
        """Whose turn it is, and what that player has learned since its last turn."""
        player, observed = self._env.get_observation()
        names, lines = self._env.state.role_mapping, []
        for sender, text, kind in observed:
            if sender == player and kind == ObservationType.PLAYER_ACTION:
                continue  # it is in the player's dialogue
            name = "GAME" if sender == GAME_ID else names.get(sender, f"Player {sender}")
            lines.append(f"[{name}] {text}")
        return player, "\n".join(lines)

    def act(self, action: str) -> None:
        """Takes the action of the player whose turn it is."""
        self.is_done, _ = self._env.step(action=action)

    def rewards(self) -> dict[int, float]:
        """The reward of each player; 0 where the game gives none."""
        rewards, _ = self._env.close()
        players = range(self.num_players)
        return {player: float((rewards or {}).get(player, 0.0)) for player in players}


class TextArenaEnv:
    """A game in which the policy is one player; the seed and its seat follow from the row."""

    def __init__(self, address: str):
        """`address` is an id, and after a space settings as JSON: `opponent`, `num_players`."""
        name, _, text = address.partition(" ")
        settings = json.loads(text) if text else {}
        if unknown := {*settings} - {"opponent", "num_players"}:
            raise ValueError(
                f"{address!r}: unknown {sorted(unknown)}; known: opponent, num_players"
            )
        self._game = Game(name, settings.get("num_players", 0))
        self._opponent: Opponent | None = None
        if path := settings.get("opponent"):
            self._opponent = lookup.resolve(path, {}, "opponent")
        elif self._game.num_players > 1:
            raise ValueError(
                f"{name!r} has {self._game.num_players} players; name an opponent in its address,"
                f""" as '{name} {{"opponent": "file.py:function"}}', or let the policy play all"""
                " (jaxrl_llm.agents.adapters.textarena.self_play, docs/worlds.md)"
            )

    def start(self, row: Mapping[str, Any]) -> str:
        self._game.start(random.getrandbits(31))
        self._seat = random.randrange(self._game.num_players)
        self._seen: dict[int, list[str]] = {}
        return self._until_own_turn()

    def step(self, message: Mapping[str, Any]) -> Step:
        self._game.act(message["content"])
        text = self._until_own_turn()
        if self._game.is_done:
            return Step(done=True, reward=self._game.rewards()[self._seat])
        return Step(text)

    def _until_own_turn(self) -> str:
        while not self._game.is_done:
            player, text = self._game.observation()
            if player == self._seat or self._opponent is None:
                return text
            self._seen.setdefault(player, []).append(text)
            self._game.act(self._opponent("\n".join(self._seen[player])))
        return ""


def make(address: str) -> TextArenaEnv:
    """Creates the environment of a game; raises as `Game`."""
    return TextArenaEnv(address)


def self_play(
    game: str, seed: int, base_url: str, num_players: int = 0, **fields: Any
) -> dict[str, Any]:
    """Plays a game in which the policy is every player; a harness returns the result.

    Each player is a role, `player_0`, `player_1` and so on, which `agent.roles` must name: it has a
    dialogue and a reward of its own.

    Args:
      seed: All that is random in the game follows from it.
      base_url: Of the session.
      fields: Further fields of the requests, such as `max_tokens`.

    Raises:
      ValueError: If there is no such game.
    """
    state = Game(game, num_players)
    state.start(seed)
    dialogues: dict[int, list[dict[str, Any]]] = {}
    while not state.is_done:
        player, text = state.observation()
        messages = dialogues.setdefault(player, [])
        messages.append({"role": "user", "content": text})
        reply = ask_policy(role_address(base_url, f"player_{player}"), messages, **fields)
        action = reply.get("content") or ""
        messages.append({"role": "assistant", "content": action})
        state.act(action)
    return {"reward": {f"player_{p}": reward for p, reward in state.rewards().items()}}
