"""Every number of the golden file, made by running verl's own functions, made again here.

Another file of the same keys is read from the environment variable VERL_GOLDENS.
"""

import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.advantages import estimate
from jaxrl_llm.algorithms.aggregation import AGGREGATIONS, minibatch_denominators
from jaxrl_llm.algorithms.corrections import correct
from jaxrl_llm.algorithms.kl import estimated_kl, next_kl_coef
from jaxrl_llm.algorithms.losses import policy_objective, value_loss
from jaxrl_llm.algorithms.selection import select
from jaxrl_llm.config import AlgorithmConfig
from jaxrl_llm.types import Minibatch

DEFAULT = pathlib.Path(__file__).parents[1] / "goldens" / "verl_seed0.npz"
GOLDENS = dict(np.load(os.environ.get("VERL_GOLDENS", DEFAULT)))
SETTINGS = json.loads(str(GOLDENS["hyperparameters"]))
IN = {
    key.removeprefix("in/"): jnp.asarray(array)
    for key, array in GOLDENS.items()
    if key.startswith("in/")
}
MASK = IN["response_mask"] > 0
# float32 sums of about a hundred terms, in another order than torch's.
CLOSE = dict(rtol=1e-5, atol=1e-6)

# Deviation: verl leaves values outside the mask; ours are zero there, checked apart.
ZERO_OUTSIDE_HERE = {"gae", "remax", "optimal_token_baseline"}
# Deviation: these obey `aggregation`; verl's own choice for them is built in.
SEQUENCE_MEAN = {"gspo", "sapo", "geo_mean"}
REJECTIONS = {
    "token_k1": (0.7, 1.4),
    "token_k3": (0.0, 0.05),
    "seq_mean_k1": (0.8, 1.25),
    "seq_max_k2": (0.0, 0.1),
    "seq_mean_k3": (0.0, 0.03),
}


def names(section):
    """Returns the middle part of every key `section/NAME/i`, once."""
    return sorted({key.split("/")[1] for key in GOLDENS if key.startswith(f"{section}/")})


DUAL_CLIP = {"dual_clip": SETTINGS["clip_c"]}
LOSS_ARGS = {
    **dict.fromkeys(("vanilla", "dppo_tv", "dppo_kl"), DUAL_CLIP),
    "sapo": {"tau_pos": SETTINGS["tau_pos"], "tau_neg": SETTINGS["tau_neg"]},
    "dro": {"beta": SETTINGS["dro_beta"]},
    "kl_cov": {
        "share": SETTINGS.get("kl_cov_ratio", 0.1),
        "coef": SETTINGS.get("kl_cov_coef", 0.5),
    },
}


def settings(**changes):
    config = dict(
        gamma=SETTINGS["gamma"],
        gae_lambda=SETTINGS["lam"],
        clip_low=SETTINGS["clip_low"],
        clip_high=SETTINGS["clip_high"],
        value_clip=SETTINGS["cliprange_value"],
        correction_high=SETTINGS["is_threshold"],
    )
    return AlgorithmConfig(**(config | changes))


@pytest.mark.parametrize("name", names("adv"))
def test_advantages_equal_verl(name):
    estimator = name.removesuffix("_tool").removesuffix("_nostd")
    mask = IN["tool_mask"] > 0 if name.endswith("_tool") else MASK
    dense = estimator in ("gae", "reinforce_plus_plus")
    config = settings(advantage=estimator, group_std=not name.startswith("grpo_nostd"))
    ours = estimate(
        config,
        response_mask=mask,
        rewards=IN["dense_rewards" if dense else "rewards"],
        values=IN["values"],
        group_ids=IN["group_ids"],
        baselines=IN["baseline_rewards"],
        old_log_probs=IN["old_log_probs"],
        sum_squared_probs=IN["sum_pi_squared"],
        correction_weights=jnp.ones(mask.shape),
    )
    for index, array in enumerate(ours):
        theirs = GOLDENS[f"adv/{name}/{index}"]
        np.testing.assert_array_equal(np.where(mask, 0.0, array), 0.0)
        if estimator in ZERO_OUTSIDE_HERE:
            theirs = np.where(mask, theirs, 0.0)
        np.testing.assert_allclose(array, theirs, **CLOSE)


@pytest.mark.parametrize("mode", names("agg"))
def test_aggregations_equal_verl(mode):
    denominators = minibatch_denominators(MASK, float(SETTINGS["loss_scale_factor"]))
    ours = AGGREGATIONS[mode](IN["log_probs"], MASK, denominators)
    np.testing.assert_allclose(ours, GOLDENS[f"agg/{mode}/0"], **CLOSE)


@pytest.mark.parametrize("name", names("pg"))
def test_policy_losses_equal_verl(name):
    loss, weights, advantages = name, jnp.ones(MASK.shape), IN["advantages"]
    if name.endswith("_seq"):
        loss, advantages = name.removesuffix("_seq"), IN["sequence_advantages"]
    if name.endswith("_is"):
        loss = name.removesuffix("_is")
        weights, _, _ = correct(
            settings(correction="token"), IN["old_log_probs"], IN["rollout_log_probs"], MASK
        )
    aggregation = "seq-mean-token-mean" if loss in SEQUENCE_MEAN else "token-mean"
    config = settings(policy_loss=loss, aggregation=aggregation, loss_args=LOSS_ARGS.get(loss, {}))
    zeros = jnp.zeros(MASK.shape)
    minibatch = Minibatch(
        tokens=jnp.zeros(MASK.shape, jnp.int32),
        lengths=jnp.sum(MASK, axis=-1),
        response_mask=MASK,
        loss_mask=MASK,
        old_log_probs=IN["old_log_probs"],
        ref_log_probs=IN["ref_log_probs"],
        rollout_log_probs=IN["rollout_log_probs"],
        advantages=advantages,
        correction_weights=weights,
        **{
            field: zeros
            for field in ("returns", "values", "cost_returns", "cost_values", "proximal_shares")
        },
    )
    selection = select(config, IN["log_probs"], minibatch, jax.random.key(0))
    denominators = minibatch_denominators(MASK)

    def objective(log_probs):
        value, _ = policy_objective(config, log_probs, zeros, minibatch, selection, denominators)
        return value

    value, gradient = jax.value_and_grad(objective)(IN["log_probs"])
    np.testing.assert_allclose(value, GOLDENS[f"pg/{name}/0"], **CLOSE)
    np.testing.assert_allclose(gradient, GOLDENS[f"pg/{name}/1"], **CLOSE)


@pytest.mark.parametrize("name", names("kl"))
def test_kl_estimators_equal_verl(name):
    def estimator(log_probs):
        return estimated_kl(name, log_probs, IN["ref_log_probs"])

    per_token = estimator(IN["log_probs"])
    np.testing.assert_allclose(per_token, GOLDENS[f"kl/{name}/0"], **CLOSE)
    gradient = jax.grad(lambda log_probs: jnp.sum(jnp.where(MASK, estimator(log_probs), 0.0)))(
        IN["log_probs"]
    )
    np.testing.assert_allclose(gradient, GOLDENS[f"kl/{name}/1"], **CLOSE)


@pytest.mark.parametrize("name", names("value"))
def test_value_loss_equals_verl(name):
    def loss(values):
        return value_loss(
            settings(),
            values,
            IN["values"],
            IN["dense_rewards"],
            MASK,
            minibatch_denominators(MASK),
        )

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(IN["predicted_values"])
    np.testing.assert_allclose(value, GOLDENS[f"value/{name}/0"], **CLOSE)
    np.testing.assert_allclose(metrics["critic/vf_clipfrac"], GOLDENS[f"value/{name}/1"], **CLOSE)
    np.testing.assert_allclose(gradient, GOLDENS[f"value/{name}/2"], **CLOSE)


@pytest.mark.parametrize("name", names("is"))
def test_correction_weights_equal_verl(name):
    config = settings(
        correction=name.removesuffix("_bn"), correction_normalize=name.endswith("_bn")
    )
    weights, loss_mask, _ = correct(config, IN["old_log_probs"], IN["rollout_log_probs"], MASK)
    np.testing.assert_allclose(weights, GOLDENS[f"is/{name}/0"], **CLOSE)
    np.testing.assert_array_equal(loss_mask, MASK)


@pytest.mark.parametrize("name", names("rs"))
def test_rejections_equal_verl(name):
    low, high = REJECTIONS[name]
    config = settings(rejections=(name,), rejection_lows=(low,), rejection_highs=(high,))
    _, loss_mask, _ = correct(config, IN["old_log_probs"], IN["rollout_log_probs"], MASK)
    np.testing.assert_array_equal(loss_mask, GOLDENS[f"rs/{name}/0"] > 0)


@pytest.mark.parametrize("name", names("kl_controller"))
def test_kl_controller_equals_verl(name):
    config = settings(kl_controller=name, kl_target=6.0, kl_horizon=10_000)
    coefficient, coefficients = 0.2, []
    for current_kl in (3.0, 9.0, 30.0, 0.1):
        coefficient = next_kl_coef(coefficient, current_kl, 256, config)
        coefficients.append(coefficient)
    np.testing.assert_allclose(coefficients, GOLDENS[f"kl_controller/{name}/0"], **CLOSE)


def test_every_key_is_compared():
    outputs = dict(adv=2, agg=1, pg=2, kl=2, value=3, rs=1, kl_controller=1) | {"is": 1}
    compared = {
        f"{section}/{name}/{index}"
        for section, count in outputs.items()
        for name in names(section)
        for index in range(count)
    }
    inputs = {f"in/{name}" for name in IN} | {"hyperparameters"}
    assert compared | inputs == set(GOLDENS)
