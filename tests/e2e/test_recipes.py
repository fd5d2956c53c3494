"""Every recipe learns in the loop, and goes on after an interruption as if there was none."""

import shutil

import jax
import numpy as np
import pytest
import recipe_settings

from jaxrl_llm.config.recipes import RECIPES
from jaxrl_llm.trainer import rl

# Each has a state of its own: the policy's alone, a critic, the prompts used, costs and multiplier.
RESUMED = ("grpo", "ppo", "dapo", "safe_rlhf")
# Those with the most states; the others differ in functions that have tests of their own.
OFTEN = ("dapo", "safe_rlhf")


def mark(recipe):
    return pytest.mark.slow if recipe in OFTEN else pytest.mark.nightly


def check_resumed(config, state, whole, resumed):
    """Without its last checkpoint the run ends as it did."""
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / str(config.trainer.num_steps))
    again = rl.train(config, resumed)
    assert recipe_settings.metrics(resumed) == recipe_settings.metrics(whole)
    for ours, theirs in zip(*map(jax.tree.leaves, (state, again)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_run_from_nothing_learns_and_a_resumed_one_repeats_it(babble, tmp_path):
    fast = {"optimizer": {"learning_rate": 1e-2, "warmup_steps": 0}}
    short = {"trainer": {"num_steps": 20, **fast}, "checkpoint": {"every": 16}}
    changes = recipe_settings.merged(recipe_settings.UNTAUGHT, short)
    state, whole = babble("grpo", changes)
    found = recipe_settings.metrics(whole)
    scores = [found[step]["critic/score/mean"] for step in range(1, 21)]
    # From one answer in seven to most; a mean of 192 has a standard error of 0.036 at most.
    assert np.mean(scores[-3:]) > np.mean(scores[:3]) + 0.2, scores
    check_resumed(recipe_settings.config("grpo", changes), state, whole, tmp_path / "resumed")


@pytest.mark.parametrize(
    "recipe, resumes",
    [
        pytest.param(recipe, resumes, marks=mark(recipe), id=recipe + ", resumed" * resumes)
        for recipe in RECIPES
        for resumes in ((True,) if recipe in RESUMED else (False, True))
    ],
)
def test_the_reward_rises_and_a_resumed_run_repeats_it(recipe, resumes, train, tmp_path):
    changes = {"checkpoint": {"every": 30}}
    state, whole = train(recipe, changes)
    found = recipe_settings.metrics(whole)
    scores = [found[step]["critic/score/mean"] for step in range(1, 41)]
    assert len(found) == 40
    # Prompts differ more than steps do: so the first pass over all 48 of them, six steps, and the
    # last whole one. A mean of 384 answers has a standard error of 0.025 at most: 0.15 is more than
    # four of the difference's.
    assert np.mean(scores[30:36]) > np.mean(scores[:6]) + 0.15, scores
    if resumes:
        config = recipe_settings.config(recipe, changes)
        check_resumed(config, state, whole, tmp_path / "resumed")
