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
def test_product(inputs, outputs):
    a, b = jax.random.split(jax.random.key(0))
    x, kernel = jax.random.normal(a, (2, 3, inputs)), jax.random.normal(b, (inputs, outputs))
    assert_same_gradients(layers.product, jnp.matmul, x, kernel)


def test_weight_first():
    a, b = jax.random.split(jax.random.key(2))
    x, kernel = jax.random.normal(a, (2, 3, 5)), jax.random.normal(b, (7, 5))
    got = jax.jit(layers.weight_first)(x, kernel)
    np.testing.assert_allclose(got, x @ kernel.T, rtol=1e-6, atol=1e-6)
    half = (x.astype("bfloat16"), kernel.astype("bfloat16"))
    assert layers.weight_first(*half).dtype == "bfloat16"
    wide = layers.weight_first(*half, dtype=jnp.float32)
    np.testing.assert_allclose(wide, half[0].astype(float) @ half[1].astype(float).T, rtol=1e-5)


def test_gated():
    a, b = jax.random.split(jax.random.key(1))
    gate, up = 4.0 * jax.random.normal(a, (2, 3, 5)), jax.random.normal(b, (2, 3, 5))
    plain = lambda gate, up: jax.nn.silu(gate) * up  # noqa: E731
    assert_same_gradients(layers.gated, plain, gate, up)
