"""Divergences from a teacher: the bucket of forward KL, and what a token earns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.distillation import forward_kl, jensen_shannon, reverse_kl_rewards

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


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jensen_shannon_is_that_of_its_definition(beta):
    """Values and gradients over all tokens; with fewer listed it is less, but never negative."""
    teacher, policy = distributions()

    def exact(policy):
        p, q = jnp.exp(teacher), jnp.exp(policy)
        m = beta * p + (1 - beta) * q
        kl = lambda a, b: jnp.sum(a * jnp.log(a / b), -1)  # noqa: E731
        return beta * kl(p, m) + (1 - beta) * kl(q, m)

    tokens = jax.lax.top_k(teacher, V)[1]
    listed = jnp.take_along_axis(teacher, tokens, -1)
    ours = lambda policy: jensen_shannon(listed, bucketed(policy, tokens), beta)  # noqa: E731
    np.testing.assert_allclose(ours(policy), exact(policy), atol=2e-5)
    logits = jax.random.normal(jax.random.key(1), policy.shape)
    gradients = [
        jax.grad(lambda x, f=f: f(jax.nn.log_softmax(x)).sum())(logits) for f in (ours, exact)
    ]
    np.testing.assert_allclose(*gradients, atol=2e-5)
    few = jensen_shannon(listed[:, :3], bucketed(policy, tokens[:, :3]), beta)
    assert (few >= 0).all() and (few <= exact(policy) + 1e-6).all()


# `GKDTrainer.generalized_jsd_loss` of TRL 1.16 on `distributions()`, with reduction="sum".
OF_TRL = {0.1: 0.4528127610683441, 0.5: 1.1454271078109741, 0.9: 0.4780406355857849}


@pytest.mark.parametrize("beta", OF_TRL)
def test_jensen_shannon_is_that_of_trl(beta):
    teacher, policy = distributions()
    best, tokens = jax.lax.top_k(teacher, V)
    found = jensen_shannon(best, bucketed(policy, tokens), beta).sum()
    assert float(found) == pytest.approx(OF_TRL[beta], rel=1e-5)
