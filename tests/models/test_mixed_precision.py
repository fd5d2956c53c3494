"""Weights cast within a layer: the same numbers, and a gradient in the dtype of the arithmetic."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.models import lora, mixed_precision

B, T = 2, 24
TOKENS = np.random.default_rng(0).integers(0, 96, (B, T)).astype(np.int32)
ONES, POSITIONS = np.ones((B, T), np.int32), np.broadcast_to(np.arange(T), (B, T))
NARROW = dataclasses.replace(tiny.NETWORK, compute_dtype="bfloat16", remat="full")


def loss(params):
    hidden = tiny.hidden_states(NARROW)(params, TOKENS, POSITIONS, ONES)
    return jnp.sum(jnp.sin(hidden.astype(jnp.float32)))


def test_the_gradient_by_variables_is_the_gradient():
    params = tiny.params()
    variables = mixed_precision.grad_proxies(params, "bfloat16")
    # The arithmetic asks no variable what it holds.
    variables = jax.tree.map(
        lambda w, v: v if w.dtype == v.dtype else v + jnp.nan, params, variables
    )
    value, ours = jax.jit(
        jax.value_and_grad(
            lambda found, params: loss(mixed_precision.attach_grad_proxies(params, found))
        )
    )(variables, params)
    expected, plain = jax.jit(jax.value_and_grad(loss))(params)
    assert value == expected
    narrow = 0
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        narrow += got.dtype == jnp.bfloat16
        # A gradient of a cast holds what its narrow dtype can: rounded, it is the same to the bit.
        np.testing.assert_array_equal(got, want.astype(got.dtype))
    assert narrow == 7  # the projections of a layer


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("held", ["float32", "bfloat16"])
def test_only_fewer_bits_need_variables(held, compute):
    params = jax.tree.map(lambda a: jnp.asarray(a, held), tiny.params())
    found = mixed_precision.grad_proxies(params, compute)
    changed = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, v), w in zip(
            jax.tree.leaves_with_path(found), jax.tree.leaves(params), strict=True
        )
        if v is not w
    }
    if (held, compute) == ("float32", "bfloat16"):
        assert all(name.startswith("layers/") and name.endswith("kernel") for name in changed)
        assert len(changed) == 7
    else:
        assert not changed
        assert mixed_precision.attach_grad_proxies(params, found) == params


def test_adapters_on_a_frozen_base():
    adapters = LoraConfig(rank=2, alpha=4.0, targets=("q",))
    network = dataclasses.replace(NARROW, lora=adapters, remat="none")
    factors = jax.eval_shape(network.init_adapters, jax.random.key(0))

    def of(found, base, factors):
        whole = lora.combine_params(base, mixed_precision.attach_grad_proxies(factors, found))
        return jnp.sum(
            tiny.hidden_states(network)(whole, TOKENS, POSITIONS, ONES).astype(jnp.float32)
        )

    variables = jax.eval_shape(lambda a: mixed_precision.grad_proxies(a, "bfloat16"), factors)
    gradient = jax.eval_shape(jax.grad(of), variables, tiny.params(), factors)
    assert {a.dtype for a in jax.tree.leaves(gradient)} == {jnp.dtype("bfloat16")}
    assert jax.tree.map(jnp.shape, gradient) == jax.tree.map(jnp.shape, factors)
