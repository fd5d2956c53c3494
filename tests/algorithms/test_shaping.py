import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.shaping import (
    kl_shaped,
    outcome_rewards,
    overlong_penalty,
    uniform_groups,
)
from jaxrl_llm.config import AlgorithmConfig

MASK = jnp.array([[False, True, False, True, False], [False] * 5])


def test_the_score_sits_on_the_last_token_of_the_policy():
    rewards = outcome_rewards(jnp.array([3.0, 4.0]), MASK)
    np.testing.assert_array_equal(rewards, [[0, 0, 0, 3, 0], [0] * 5])


def test_kl_is_taken_from_the_reward():
    old = jnp.full((2, 5), jnp.nan).at[0, 1].set(-1.0).at[0, 3].set(-2.0)
    ref = jnp.full((2, 5), jnp.nan).at[0, 1].set(-1.5).at[0, 3].set(-2.25)
    config = AlgorithmConfig(kl_in="reward", kl_estimator="k1")
    rewards, current_kl = kl_shaped(config, 0.1, jnp.array([3.0, 4.0]), old, ref, MASK)
    np.testing.assert_allclose(rewards, [[0, -0.05, 0, 2.975, 0], [0] * 5], rtol=1e-6)
    np.testing.assert_allclose(current_kl, 0.375)  # the padding row is no sequence
    unshaped, measured = kl_shaped(
        AlgorithmConfig(kl_in="loss", kl_estimator="k1"), 0.1, jnp.array([3.0, 4.0]), old, ref, MASK
    )
    np.testing.assert_array_equal(unshaped, outcome_rewards(jnp.array([3.0, 4.0]), MASK))
    assert measured == current_kl


def test_overlong_penalty_is_bounded_on_both_sides():
    config = AlgorithmConfig(overlong_buffer_tokens=10, overlong_penalty=2.0)
    penalty = overlong_penalty(config, 100, np.array([1, 90, 95, 100, 1000]))
    np.testing.assert_allclose(penalty, [0, 0, -1, -2, -2])
    off = overlong_penalty(AlgorithmConfig(), 100, np.array([1000]))
    np.testing.assert_array_equal(off, [0.0])


def test_uniform_groups():
    uniform = uniform_groups(np.array([0.1, 1.0, 0.1, 2.0, 0.1, 7.0]), np.array([0, 1, 0, 1, 0, 5]))
    np.testing.assert_array_equal(uniform, [True, False, True, False, True, False])
