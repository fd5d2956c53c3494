"""Losses and gradients of TRL's GRPOTrainer on random arrays, made again here, to 1e-6.

The folder `TRL_GOLDENS_2` is made by `tests/goldens/make_trl.py`, for any seed.
"""

import dataclasses
import functools
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.aggregation import minibatch_denominators
from jaxrl_llm.algorithms.losses import near_policy, policy_objective
from jaxrl_llm.algorithms.selection import high_entropy_tokens
from jaxrl_llm.config import AlgorithmConfig
from jaxrl_llm.config.recipes import RECIPES
from jaxrl_llm.types import Minibatch

pytestmark = pytest.mark.skipif(
    "TRL_GOLDENS_2" not in os.environ,
    reason="TRL_GOLDENS_2 names no folder; make one with tests/goldens/make_trl.py",
)
NO_DUAL_CLIP = {"dual_clip": float("inf")}
VANILLA = AlgorithmConfig(loss_args=NO_DUAL_CLIP)
SEQ_MEAN = dataclasses.replace(VANILLA, aggregation="seq-mean-token-mean")
KL = dataclasses.replace(VANILLA, kl_in="loss", kl_coef=0.3)
CONFIGS = {
    "grpo": SEQ_MEAN,
    "luspo": AlgorithmConfig(**RECIPES["luspo"] | {"clip_low": 0.2, "clip_high": 0.2}),
    "vespo": AlgorithmConfig(**RECIPES["vespo"]),
    "vespo_corrected": AlgorithmConfig(**RECIPES["vespo"]),
    "vespo_other": AlgorithmConfig(
        policy_loss="vespo", loss_args={"k_pos": 1.5, "lambda_pos": 1.0, "k_neg": 2.0}
    ),
    "off_policy_mask": dataclasses.replace(VANILLA, off_policy_threshold=0.05),
    "off_policy_mask_gspo": AlgorithmConfig(
        policy_loss="gspo", aggregation="seq-mean-token-mean", off_policy_threshold=0.02
    ),
    "high_entropy": dataclasses.replace(VANILLA, entropy_share=0.2),
    "unbiased_kl": dataclasses.replace(KL, kl_unbiased=True),
    "plain_kl": KL,
}
NUMBERS = range(3)


@functools.cache
def goldens():
    return dict(np.load(pathlib.Path(os.environ["TRL_GOLDENS_2"]) / "functions.npz"))


def inputs(number):
    prefix = f"{number}/in/"
    return {k.removeprefix(prefix): v for k, v in goldens().items() if k.startswith(prefix)}


def minibatch(config, given, corrects):
    mask = jnp.asarray(given["mask"])
    advantages = jnp.where(mask, given["advantages"][:, None], 0.0)
    if config.entropy_share < 1:
        chosen = high_entropy_tokens(given["entropies"], mask, config.entropy_share)
        advantages = jnp.where(chosen, advantages, 0.0)
    old, rollout = given["old_log_probs"], given["rollout_log_probs"]
    weights = np.minimum(np.exp(old - rollout), np.float32(1.1)) if corrects else np.ones_like(old)
    return dataclasses.replace(
        Minibatch.zeros(*mask.shape),
        response_mask=mask,
        loss_mask=mask,
        advantages=advantages,
        old_log_probs=jnp.asarray(old),
        ref_log_probs=jnp.asarray(given["ref_log_probs"]),
        rollout_log_probs=jnp.asarray(rollout),
        correction_weights=jnp.where(mask, weights, 0.0),
    )


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("number", NUMBERS)
def test_losses_equal_trl(number, name):
    config, given = CONFIGS[name], inputs(number)
    batch = minibatch(config, given, corrects=name == "vespo_corrected")
    zeros, none = jnp.zeros(batch.loss_mask.shape), jnp.zeros(batch.loss_mask.shape, bool)
    counts = minibatch_denominators(batch.loss_mask)

    def objective(log_probs):
        return policy_objective(config, log_probs, zeros, batch, none, counts)[0]

    value, gradient = jax.value_and_grad(objective)(jnp.asarray(given["log_probs"]))
    assert np.abs(gradient).max() > 1e-3
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    close(value, goldens()[f"{number}/{name}/loss"])
    close(gradient, goldens()[f"{number}/{name}/gradient"])


@pytest.mark.parametrize("number", NUMBERS)
def test_the_off_policy_mask_equals_that_of_trl(number):
    given = inputs(number)
    batch = minibatch(VANILLA, given, corrects=False)
    config = AlgorithmConfig(off_policy_threshold=0.05)
    kept = near_policy(config, jnp.asarray(given["log_probs"]), batch).any(1)
    theirs = goldens()[f"{number}/off_policy_mask/kept"]
    np.testing.assert_array_equal(kept, theirs)
    assert 0 < theirs.sum() < len(theirs)


def test_every_number_is_compared():
    compared = {
        f"{number}/{name}/{what}"
        for number in NUMBERS
        for name in CONFIGS
        for what in ("loss", "gradient")
    }
    compared |= {f"{number}/off_policy_mask/kept" for number in NUMBERS}
    assert {key for key in goldens() if "/in/" not in key} == compared
