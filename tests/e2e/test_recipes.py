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


def mark(recipe, resumes):
    if resumes and recipe not in RESUMED:
        return pytest.mark.nightly
    return () if recipe == "grpo" else pytest.mark.slow


@pytest.mark.parametrize(
    "recipe, resumes",
    [
        pytest.param(
            recipe, resumes, marks=mark(recipe, resumes), id=recipe + ", resumed" * resumes
        )
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
    if not resumes:
        return

    resumed = tmp_path / "resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "40")
    again = rl.train(recipe_settings.config(recipe, changes), resumed)
    assert recipe_settings.metrics(resumed) == found
    for ours, theirs in zip(*map(jax.tree.leaves, (state, again)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
