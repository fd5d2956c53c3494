"""Self-play: a short run, and a whole one whose policy beats the one that it began with."""

import contextlib
import json
import random
import runpy
import types

import pytest
import runs
import serving_model

FILE, GAMES = runs.ROOT / "configs" / "selfplay_tiny.py", 400
SMALL = {
    "trainer.num_steps": 2,
    "trainer.prompts_per_step": 2,
    "trainer.minibatch_size": 8,
    "algorithm.samples_per_prompt": 4,
    "evaluation.before": False,
    "evaluation.after": False,
    "evaluation.every": 0,
    "metrics.rollouts_every": 1,
    "metrics.rollout_tokens": True,
}


def launch(folder, cache, **settings):
    changes = [f"--config.{key}={value}" for key, value in settings.items()]
    runs.launch("train", [f"--workdir={folder}", f"--config={FILE}", *changes], cache)
    return runs.metrics(folder)


@pytest.mark.slow
def test_each_role_has_its_rows_and_its_group(tmp_path, cache):
    steps = launch(tmp_path / "run", cache, **SMALL)
    assert steps[2]["critic/score/mean"] == 0.0  # what one wins, the other loses
    assert steps[2]["agent/branches"] == 0 and steps[2].get("tool_errors/total", 0) == 0
    lines = (tmp_path / "run/rollouts/2.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 2 * 4 * 2  # prompts, samples, roles
    advantages = {}
    for row in rows:
        assert abs(row["score"]) == 1.0 and row["role"] in (0, 1)
        sampled = [a for a, mask in zip(row["advantages"], row["mask"], strict=True) if mask]
        advantages.setdefault((row["group"], row["role"]), []).append(sampled[0])
    for values in advantages.values():  # of a prompt and a role
        assert len(values) == 4 and sum(values) == pytest.approx(0.0, abs=1e-5)


@contextlib.contextmanager
def served(folder):
    """The OpenAI address of the policy of a run."""
    server = serving_model.Server(
        "launch/serve.py", f"--workdir={folder}", "--name=policy", "--port=0", "--num_slots=4"
    )
    try:
        url = server.address("serving on ")
        server.wait_ready(url)
        yield f"{url}/v1"
    finally:
        server.process.terminate()
        server.process.wait(60)


def share_of_wins(game, first_url, second_url):
    """The share of games that the first policy wins, each from both seats."""
    draw, wins = random.Random(0), 0
    for number in range(GAMES):
        sticks = draw.randint(game.MIN_STICKS, game.MAX_STICKS)
        players = [game.player(first_url), game.player(second_url)]
        seat = number % 2
        wins += game.winner(players if seat == 0 else players[::-1], sticks) == seat
    return wins / GAMES


@pytest.mark.nightly
def test_the_trained_policy_beats_its_first_version(tmp_path, cache):
    """In 90 of 100 games; minutes of training, twenty where the cores are shared."""
    # The weights that the run begins with: its first step at a learning rate of nearly 0.
    first = {"trainer.num_steps": 1, "trainer.optimizer.learning_rate": 1e-12}
    off = {"evaluation.before": False, "evaluation.after": False}
    launch(tmp_path / "first", cache, **first, **off, **{"evaluation.every": 0})
    steps = launch(tmp_path / "last", cache)
    key = "val-core/seeds/mean@1"
    evaluations = [row[key] for row in steps.values() if key in row]
    assert evaluations[0] < 0.65 and evaluations[-1] > 0.9  # against random moves
    game = types.SimpleNamespace(**runpy.run_path(str(FILE)))
    with served(tmp_path / "first") as first_url, served(tmp_path / "last") as last_url:
        assert share_of_wins(game, last_url, first_url) >= 0.9
        assert 0.4 < share_of_wins(game, first_url, first_url) < 0.6
