"""What the backward pass keeps, computes again or leaves with the host does not change it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.models.remat import REMAT_POLICIES

B, T = 2, 24
TOKENS = np.random.default_rng(0).integers(0, 96, (B, T)).astype(np.int32)
SEGMENTS = np.repeat(np.array([[1] * 10 + [2] * 11 + [0] * 3]), B, 0)
POSITIONS = np.repeat(np.array([[*range(10), *range(11), 0, 0, 0]]), B, 0)


def loss(network, params):
    hidden = tiny.hidden_states(network)(params, TOKENS, POSITIONS, SEGMENTS)
    return jnp.sum(jnp.sin(hidden) * (SEGMENTS > 0)[..., None])


def compiled(remat):
    network = dataclasses.replace(tiny.NETWORK, remat=remat)
    gradient = jax.jit(jax.value_and_grad(functools.partial(loss, network)))
    return gradient.lower(tiny.params()).compile()


@functools.cache
def plain():
    return compiled("none")(tiny.params())


@pytest.mark.parametrize("remat", REMAT_POLICIES)
def test_gradients_do_not_depend_on_what_is_kept(remat):
    program = compiled(remat)
    value, gradient = program(tiny.params())
    assert value == plain()[0]
    for ours, theirs in zip(*map(jax.tree.leaves, (gradient, plain()[1])), strict=True):
        # The same sums; a fusion that sees more of them may round one product differently.
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6 * np.abs(theirs).max())


def kept(remat, num_layers):
    """Bytes of what the forward pass hands to the backward pass."""
    network = tiny.with_sizes(num_layers=num_layers)
    network = dataclasses.replace(network, remat=remat)
    residuals = jax.eval_shape(
        lambda params: jax.vjp(functools.partial(loss, network), params)[1],
        network.abstract_params(),
    )
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(residuals))


def test_each_policy_keeps_what_it_says():
    each = {remat: kept(remat, 3) - kept(remat, 2) for remat in ("none", *REMAT_POLICIES)}
    shape, tokens = tiny.SHAPE, 4 * B * T  # bytes of one float32 a token
    around = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_size
    biases = 4 * (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size  # no more needed
    assert each["attention"] == each["full"] + tokens * around - biases
    assert each["projections"] == each["attention"] + tokens * 2 * shape.mlp_size
    assert each["offload_full"] == each["full"]
    assert each["offload_attention"] == each["attention"]
    assert each["full"] < each["attention"] < each["projections"] <= each["dots"] < each["none"]


@pytest.mark.parametrize("remat, moved", [("offload_full", 1), ("offload_attention", 5)])
def test_offloaded_activations_go_to_host_memory(remat, moved):
    network = dataclasses.replace(tiny.NETWORK, remat=remat)
    gradient = jax.grad(functools.partial(loss, network))
    # The jaxpr, as a CPU has one memory and drops the moves when it lowers them.
    found = str(jax.make_jaxpr(gradient)(network.abstract_params()))
    assert found.count("devices=(MemorySpace.Host,)") == moved
