"""Games of textarena, by the package itself where it is installed."""

import random

import pytest

from jaxrl_llm.agents.agent_pool import AgentError, AgentPool
from jaxrl_llm.config.agent import AgentConfig, EnvironmentConfig

pytest.importorskip("textarena", reason="the extra [textarena]")
pytestmark = pytest.mark.slow  # the package takes seconds to be imported

from jaxrl_llm.agents.adapters import textarena  # noqa: E402


def test_nim_tells_each_player_what_is_new():
    game = textarena.Game("Nim-v0")
    assert game.num_players == 2
    game.start(seed=3)
    player, text = game.observation()
    assert player == 0 and "Welcome to Nim, Player 0" in text and "pile 2: 5" in text
    game.act("[2 5]")
    player, text = game.observation()
    assert player == 1 and "Player 0 removes 5 from pile 2" in text and "pile 2: 0" in text
    game.act("nonsense")  # a wrong move is answered, and asked for again
    player, text = game.observation()
    assert player == 1 and "invalid move" in text and "nonsense" not in text
    game.act("0 3")  # brackets are added, as the package does it
    player, text = game.observation()
    assert player == 0 and text.count("removes") == 2 and "[Player 1] [0 3]" in text
    assert "[Player 0]" not in text  # what it said itself is in its dialogue
    game.act("[1 4]")
    assert game.is_done and game.rewards() == {0: 1.0, 1: -1.0}


def test_single_player_games_are_environments():
    env = textarena.make("GuessTheNumber-v0")
    random.seed(1)
    first = env.start({})
    assert "1 and 20" in first or "20" in first
    for guess in range(1, 21):
        step = env.step({"content": f"[{guess}]"})
        if step.done:
            break
        assert step.messages
    assert step.done and 0.0 <= step.reward <= 1.0
    random.seed(1)
    assert env.start({}) == first


OPPONENT = """
def first_pile(seen):
    import re
    piles = re.findall(r"pile (\\d): (\\d+)", seen)[-3:]
    return next(f"[{pile} 1]" for pile, count in piles if int(count))
"""


def test_an_opponent_of_the_user_plays_the_other_seat(tmp_path):
    (tmp_path / "opponent.py").write_text(OPPONENT)
    env = textarena.make(f'Nim-v0 {{"opponent": "{tmp_path}/opponent.py:first_pile"}}')
    seats = set()
    for seed in range(6):
        random.seed(seed)
        text, moves, step = env.start({}), 0, None
        seats.add(env._seat)
        while not (step and step.done):
            piles = [int(line[-1]) for line in text.splitlines() if line.startswith("  pile")][-3:]
            pile = max(range(3), key=lambda i: piles[i])
            step = env.step({"content": f"[{pile} {piles[pile]}]"})
            text, moves = step.messages, moves + 1
        assert step.reward in (-1.0, 1.0) and 1 <= moves <= 3
    assert seats == {0, 1}


def test_games_that_there_are_not_and_seats_that_nobody_takes():
    with pytest.raises(ValueError, match=r"no game 'TicTacTo-v0'; did you mean TicTacToe-v0"):
        textarena.make("TicTacTo-v0")
    with pytest.raises(ValueError, match="2 players; name an opponent"):
        textarena.make("TicTacToe-v0")
    with pytest.raises(ValueError, match=r"unknown \['foe'\]; known: opponent, num_players"):
        textarena.make('Nim-v0 {"foe": 1}')


def test_games_run_in_the_processes_of_a_run():
    environment = EnvironmentConfig(environment="textarena", address="GuessTheNumber-v0")
    with AgentPool(AgentConfig(environments={"game": environment})) as pool:
        assert pool.describe() == {"tools": {}, "environments": {"game": []}}
    unknown = EnvironmentConfig(environment="textarena", address="Guess-v9")
    with (
        AgentPool(AgentConfig(environments={"game": unknown})) as pool,
        pytest.raises(AgentError, match="game cannot be used: ValueError: textarena has no game"),
    ):
        pool.describe()
