"""GDPO and clip_cov against verl's functions, run by torch on the inputs beside their numbers.

verl draws clip_cov's tokens at random, so its numbers were made with a share of 1: all candidates.
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.advantages import estimate
from jaxrl_llm.algorithms.aggregation import minibatch_denominators
from jaxrl_llm.algorithms.losses import policy_objective
from jaxrl_llm.algorithms.selection import select
from jaxrl_llm.config import AlgorithmConfig
from jaxrl_llm.types import Minibatch

GOLDENS = dict(np.load(pathlib.Path(__file__).parents[1] / "goldens" / "verl_gdpo_clip_cov.npz"))
SETTINGS = json.loads(str(GOLDENS["hyperparameters"]))
IN = {k.removeprefix("in/"): jnp.asarray(v) for k, v in GOLDENS.items() if k.startswith("in/")}
MASK = IN["response_mask"] > 0
# float32 sums of about a hundred terms, in another order than torch's.
CLOSE = dict(rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name, mask", [("gdpo", "response_mask"), ("gdpo_tool", "tool_mask")])
def test_gdpo_equals_verl(name, mask):
    mask = IN[mask] > 0
    advantages, returns = estimate(
        AlgorithmConfig(advantage="gdpo"),
        response_mask=mask,
        rewards=jnp.zeros(mask.shape),
        values=jnp.zeros(mask.shape),
        group_ids=IN["group_ids"],
        term_rewards=IN["term_rewards"],
        term_weights=jnp.tile(IN["term_weights"][:, None], (1, len(mask))),
    )
    np.testing.assert_allclose(advantages, GOLDENS[f"adv/{name}/0"], **CLOSE)
    np.testing.assert_array_equal(advantages, returns)


def clip_cov(name, share):
    """Returns the config, the minibatch and the tokens that were drawn."""
    config = AlgorithmConfig(
        policy_loss="clip_cov",
        aggregation="token-mean",
        clip_low=SETTINGS["clip_low"],
        clip_high=SETTINGS["clip_high"],
        loss_args={
            "low": SETTINGS["clip_cov_lb"],
            "high": SETTINGS["clip_cov_ub"],
            "share": share,
        },
    )
    minibatch = dataclasses.replace(
        Minibatch.zeros(*MASK.shape),
        response_mask=MASK,
        loss_mask=MASK,
        old_log_probs=IN["old_log_probs"],
        advantages=IN[name],
        correction_weights=IN["correction_weights"]
        if name == "clip_cov_is"
        else jnp.ones(MASK.shape),
    )
    return config, minibatch, select(config, IN["log_probs"], minibatch, jax.random.key(0))


@pytest.mark.parametrize("name", ["clip_cov", "clip_cov_is", "clip_cov_seq"])
def test_clip_cov_equals_verl(name):
    config, minibatch, chosen = clip_cov(name, share=SETTINGS["clip_cov_ratio"])
    np.testing.assert_array_equal(chosen, GOLDENS[f"candidates/{name}"])

    def objective(log_probs):
        given = jnp.zeros(MASK.shape), minibatch, chosen, minibatch_denominators(MASK)
        return policy_objective(config, log_probs, *given)[0]

    value, gradient = jax.value_and_grad(objective)(IN["log_probs"])
    np.testing.assert_allclose(value, GOLDENS[f"pg/{name}/0"], **CLOSE)
    np.testing.assert_allclose(gradient, GOLDENS[f"pg/{name}/1"], **CLOSE)


def test_fewer_are_drawn_of_the_same_candidates():
    _, _, chosen = clip_cov("clip_cov", share=0.1)
    assert not (chosen & ~GOLDENS["candidates/clip_cov"]).any()
    assert chosen.sum() == int(0.1 * MASK.sum())  # 8 of 15, as verl counts them
