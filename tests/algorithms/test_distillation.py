"""Divergences from a teacher: the bucket of forward KL, and what a token earns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.distillation import forward_kl, reverse_kl_rewards

V = 12


def distributions():
    teacher, policy = jax.random.normal(jax.random.key(0), (2, 5, V)) * 2.0
    return jax.nn.log_softmax(teacher), jax.nn.log_softmax(policy)


def bucketed(policy, tokens):
    """Log-probs of the policy's tokens, and of all others together."""
    listed = jnp.take_along_axis(policy, tokens, -1)
    rest = jnp.maximum(1.0 - jnp.exp(listed).sum(-1, keepdims=True), 1e-30)
    return jnp.concatenate([listed, jnp.log(rest)], -1)


@pytest.mark.parametrize("count", [1, 3, V - 1, V])
def test_the_bucket_is_between_nothing_and_the_exact_kl(count):
    teacher, policy = distributions()
    exact = jnp.sum(jnp.exp(teacher) * (teacher - policy), -1)
    best, tokens = jax.lax.top_k(teacher, count)
    found = forward_kl(best, bucketed(policy, tokens))
    assert (found >= 0).all() and (found <= exact + 1e-5).all()
    if count == V:
        np.testing.assert_allclose(found, exact, atol=2e-5)
    own = forward_kl(best, bucketed(teacher, tokens))
    np.testing.assert_allclose(own, 0.0, atol=2e-5)


def test_divergences_by_hand():
    # p = (1/2, 1/4) and 1/4 for the rest; q = (1/4, 1/2) and 1/4: 1/2 log 2 - 1/4 log 2.
    teacher = jnp.log(jnp.array([0.5, 0.25]))
    policy = jnp.log(jnp.array([0.25, 0.5, 0.25]))
    np.testing.assert_allclose(forward_kl(teacher, policy), 0.25 * np.log(2), rtol=1e-6)
    ours, theirs = jnp.array([-1.0, -1.0, -90.0]), jnp.array([-1.5, -60.0, -1.0])
    np.testing.assert_allclose(reverse_kl_rewards(theirs, ours), [-0.5, -20.0, 20.0])
