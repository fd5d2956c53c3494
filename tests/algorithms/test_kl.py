import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.kl import estimated_kl, next_kl_coef
from jaxrl_llm.config import AlgorithmConfig

LOG_PROBS = jnp.array([-0.5, -1.0, -3.0, -0.1])
REF_LOG_PROBS = jnp.array([-1.0, -0.2, -3.0, -2.0])


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3"])
def test_plus_keeps_the_value_and_takes_the_gradient_of_k2(name):
    def estimate(log_probs, plus=""):
        return estimated_kl(name + plus, log_probs, REF_LOG_PROBS)

    np.testing.assert_array_equal(estimate(LOG_PROBS, "+"), estimate(LOG_PROBS))
    gradient = jax.grad(lambda log_probs: jnp.sum(estimate(log_probs, "+")))(LOG_PROBS)
    np.testing.assert_allclose(gradient, LOG_PROBS - REF_LOG_PROBS, rtol=1e-6)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_the_mean_over_the_policy_is_the_kl(name):
    policy, reference = jnp.array([0.5, 0.3, 0.2]), jnp.array([0.2, 0.2, 0.6])
    exact = jnp.sum(policy * jnp.log(policy / reference))
    mean = jnp.sum(policy * estimated_kl(name, jnp.log(policy), jnp.log(reference)))
    np.testing.assert_allclose(mean, exact, rtol=1e-6)


@pytest.mark.parametrize("name", ["k1+", "k2", "k2+", "k3+"])
def test_the_mean_gradient_is_that_of_the_kl(name):
    reference = jnp.log(jnp.array([0.2, 0.2, 0.6]))
    logits = jnp.array([0.4, -0.3, 0.1])

    def estimated(logits):
        log_probs = jax.nn.log_softmax(logits)
        weights = jax.lax.stop_gradient(jnp.exp(log_probs))  # samples, not their gradient
        return jnp.sum(weights * estimated_kl(name, log_probs, reference))

    def exact(logits):
        log_probs = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(log_probs) * (log_probs - reference))

    np.testing.assert_allclose(jax.grad(estimated)(logits), jax.grad(exact)(logits), atol=1e-6)


def test_k3_is_bounded():
    far = estimated_kl("k3", jnp.array([-90.0, -1e4]), jnp.array([-0.1, 0.0]))
    np.testing.assert_array_equal(far, 10.0)


def test_kl_controllers_by_hand():
    adaptive = AlgorithmConfig(kl_controller="adaptive", kl_target=2.0, kl_horizon=100)
    # Relative errors: 0.1; -0.5 and 9, clipped to 0.2; 50 of 100 sequences.
    for current_kl, factor in ((2.2, 1.05), (1.0, 0.9), (20.0, 1.1)):
        np.testing.assert_allclose(next_kl_coef(0.5, current_kl, 50, adaptive), 0.5 * factor, 1e-6)
    assert next_kl_coef(0.5, 20.0, 50, AlgorithmConfig()) == 0.5
