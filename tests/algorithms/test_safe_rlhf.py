import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.advantages import estimate
from jaxrl_llm.algorithms.safe_rlhf import (
    combined_advantages,
    next_log_multiplier,
    safe_advantages,
)
from jaxrl_llm.algorithms.shaping import kl_shaped
from jaxrl_llm.config import AlgorithmConfig

DRAW = np.random.default_rng(0)
REWARDS, COSTS, VALUES, COST_VALUES = jnp.asarray(DRAW.normal(size=(4, 5, 7)), jnp.float32)
MASK = jnp.asarray(DRAW.uniform(size=(5, 7)) > 0.3)
CONFIG = AlgorithmConfig(advantage="gae", gae_lambda=0.9, gamma=0.99, safe=True)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_multiplier_zero_is_ppo_to_the_bit(wrap):
    zero = jnp.log(jnp.float32(0.0))
    safe = wrap(
        lambda log_multiplier, costs: safe_advantages(
            CONFIG, log_multiplier, REWARDS, costs, VALUES, COST_VALUES, MASK
        )
    )
    ppo = wrap(lambda rewards: estimate(CONFIG, response_mask=MASK, rewards=rewards, values=VALUES))
    advantages, returns, _ = safe(zero, COSTS)
    expected_advantages, expected_returns = ppo(REWARDS)
    np.testing.assert_array_equal(advantages, expected_advantages)
    np.testing.assert_array_equal(returns, expected_returns)


def test_multiplier_zero_never_moves():
    zero = jnp.log(jnp.float32(0.0))
    assert jnp.exp(next_log_multiplier(AlgorithmConfig(), zero, 1e6)) == 0.0


def test_a_huge_multiplier_only_minimizes_cost():
    advantages, _, _ = safe_advantages(
        CONFIG, jnp.log(1e7), REWARDS, COSTS, VALUES, COST_VALUES, MASK
    )
    expected, _ = estimate(CONFIG, response_mask=MASK, rewards=-COSTS, values=-COST_VALUES)
    np.testing.assert_allclose(advantages, expected, atol=1e-4)


def test_combination_by_hand():
    np.testing.assert_allclose(
        combined_advantages(jnp.array([[4.0]]), jnp.array([[1.0]]), 3.0), [[0.25]]
    )


def test_the_multiplier_follows_the_cost_and_stays_bounded():
    config = AlgorithmConfig(cost_limit=1.0, multiplier_lr=0.5, multiplier_max=8.0)
    start = jnp.log(2.0)
    assert next_log_multiplier(config, start, 1.0) == start
    # log 2 + 0.5 * 2 * (1.5 - 1)
    np.testing.assert_allclose(next_log_multiplier(config, start, 1.5), start + 0.5, rtol=1e-6)
    np.testing.assert_allclose(next_log_multiplier(config, start, 0.5), start - 0.5, rtol=1e-6)
    np.testing.assert_allclose(jnp.exp(next_log_multiplier(config, start, 1e9)), 8.0, rtol=1e-6)


@pytest.mark.parametrize("multiplier", [0.0, 0.5, 4.0])
def test_the_kl_has_the_same_weight_at_every_multiplier(multiplier):
    config = AlgorithmConfig(kl_in="reward", kl_estimator="k1")
    scores, costs = jnp.ones(5), 2.0 * jnp.ones(5)
    given = (VALUES, COST_VALUES, MASK)

    def combined(kl_coef):
        rewards, _ = kl_shaped(config, kl_coef, scores, *given)
        shaped_costs, _ = kl_shaped(config, -kl_coef, costs, *given)
        return combined_advantages(rewards, shaped_costs, multiplier)

    kl = jnp.where(MASK, VALUES - COST_VALUES, 0.0)
    np.testing.assert_allclose(combined(0.0) - combined(0.3), 0.3 * kl, atol=1e-6)
