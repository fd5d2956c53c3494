"""Backward passes written out: those of autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import layers


def gradients(function, *arguments):
    """Of a random linear function of the result."""
    bar = jax.random.normal(jax.random.key(7), function(*arguments).shape)
    total = lambda *a: jnp.sum(bar * function(*a))  # noqa: E731
    return jax.jit(jax.grad(total, argnums=(0, 1)))(*arguments)


def assert_same_gradients(ours, plain, *arguments):
    np.testing.assert_array_equal(ours(*arguments), plain(*arguments))
    pairs = zip(gradients(ours, *arguments), gradients(plain, *arguments), strict=True)
    for got, want in pairs:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("inputs", "outputs"), [(5, 7), (7, 5)])
def test_matmul_gradients_equal_those_of_jax(inputs, outputs):
    a, b = jax.random.split(jax.random.key(0))
    x, kernel = jax.random.normal(a, (2, 3, inputs)), jax.random.normal(b, (inputs, outputs))
    assert_same_gradients(layers.matmul, jnp.matmul, x, kernel)


def test_swiglu_gradients_equal_those_of_jax():
    a, b = jax.random.split(jax.random.key(1))
    gate, up = 4.0 * jax.random.normal(a, (2, 3, 5)), jax.random.normal(b, (2, 3, 5))
    plain = lambda gate, up: jax.nn.silu(gate) * up  # noqa: E731
    assert_same_gradients(layers.swiglu, plain, gate, up)
