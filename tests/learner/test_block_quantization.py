"""Moments in 8 bits: their error, their zeros, and decay that no rounding holds up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import DictKey

from jaxrl_llm.config import OptimizerConfig
from jaxrl_llm.learner import block_quantization, optimizer

PATH = (DictKey("layers"), DictKey("0"), DictKey("up"), DictKey("kernel"))


@pytest.mark.parametrize(
    "path, shape, size",
    [
        (PATH, (2, 4, 4096), 64),
        (PATH, (2, 4, 32768), 256),
        (PATH, (2, 4, 896), 32),
        (PATH, (2, 4, 40), 0),  # no block divides it
        (PATH, (2, 4096), 0),  # a vector of each layer
        ((DictKey("embed"),), (100, 4096), 64),
        ((*PATH[:-1], DictKey("bias")), (2, 8, 4096), 0),
    ],
)
def test_sizes_of_blocks(path, shape, size):
    assert block_quantization.block_size(shape, path) == size


def test_errors_are_less_than_a_step_between_codes():
    rng = np.random.default_rng(0)
    signed = jnp.asarray(rng.normal(size=(4, 64)) * np.exp(rng.normal(size=(4, 64))), jnp.float32)
    kept = block_quantization.dequantize(block_quantization.quantize_signed(signed, 32))
    largest = np.abs(signed).reshape(4, 2, 32).max(-1, keepdims=True)
    roots = lambda x: np.sqrt(np.abs(x).reshape(4, 2, 32) / largest)  # noqa: E731
    assert np.abs(roots(np.asarray(kept)) - roots(np.asarray(signed))).max() <= 0.5001 / 127
    assert (np.sign(kept) == np.sign(signed))[np.abs(kept) > 0].all()

    positive = jnp.square(signed).at[0, :3].set(jnp.array([0.0, 1e-20, 1e-9]))
    bits = block_quantization.rounding_bits(PATH, jnp.int32(3), jnp.int32(0), positive.shape)
    codes = block_quantization.quantize_positive(positive, 32, bits)
    assert ((codes.codes == 0) == (positive == 0)).all()
    exact = 255 * (np.asarray(positive).reshape(4, 2, 32) / largest**2) ** 0.25
    assert np.abs(codes.codes.reshape(4, 2, 32) - exact)[exact > 1].max() < 1.001
    zero = block_quantization.quantize_signed(jnp.zeros((1, 32)), 32)
    np.testing.assert_array_equal(block_quantization.dequantize(zero), np.zeros((1, 32)))


def test_a_small_decay_is_kept_on_average():
    """Half of a block has no gradient: with rounding to the nearest code it would never decay."""
    path, moment = PATH, jnp.ones((64, 64))
    stored = block_quantization.quantize_positive(moment, 32, jnp.zeros((64, 64), jnp.uint32))

    def step(stored, count):
        value = block_quantization.dequantize(stored)
        value = 0.999 * value + 0.001 * (jnp.arange(64) % 2)
        bits = block_quantization.rounding_bits(path, count, jnp.arange(64), value.shape)
        return block_quantization.quantize_positive(value, 32, bits), None

    stored, _ = jax.lax.scan(step, stored, jnp.arange(500))
    kept = np.asarray(block_quantization.dequantize(stored))
    assert kept[:, 0::2].mean() == pytest.approx(0.999**500, rel=0.01)
    np.testing.assert_allclose(kept[:, 1::2], 1.0, rtol=1e-5)


def test_weights_follow_those_of_wide_moments():
    """Twenty updates of a matrix of noisy gradients: a step is off by a few percent of its size."""
    configs = [
        OptimizerConfig(learning_rate=1e-2, weight_decay=0.0, moment_dtype=dtype)
        for dtype in ("float32", "int8")
    ]
    params = {"embed": jnp.zeros((8, 64)), "norm": jnp.zeros((8,))}
    ends = []
    for config in configs:
        make = optimizer.make_optimizer(config, 20)
        state, weights, rng = make.init(params), params, np.random.default_rng(0)
        update = jax.jit(make.update)
        for _ in range(20):
            gradients = jax.tree.map(
                lambda p, rng=rng: jnp.asarray(1 + rng.normal(size=p.shape)), params
            )
            updates, state = update(gradients, state, weights)
            weights = jax.tree.map(jnp.add, weights, updates)
        ends.append(weights)
    wide, narrow = ends
    np.testing.assert_array_equal(wide["norm"], narrow["norm"])
    moved = np.abs(wide["embed"]).mean()
    assert 0 < np.abs(wide["embed"] - narrow["embed"]).mean() < 0.05 * moved
    bytes_held = sum(a.nbytes for a in jax.tree.leaves(state) if a.shape[:1] == (8,) and a.ndim > 1)
    assert bytes_held == 8 * 64 * optimizer.state_bytes(config, (DictKey("embed"),), (8, 64))
