"""Muon's numbers are optax's, and no device of a mesh makes a whole matrix."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.config import OptimizerConfig
from jaxrl_llm.learner import layer_loop, muon, optimizer

PARAMS = {
    "embed": (6, 8),
    "layers": {
        "0": {
            "mlp": {"up": {"kernel": (3, 8, 12)}, "down": {"kernel": (3, 12, 8)}},
            "experts": {"up": {"kernel": (3, 2, 8, 4), "bias": (3, 2, 4)}},
            "norm": {"scale": (3, 8)},
        }
    },
}


def arrays(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    make = lambda shape: jnp.asarray(scale * rng.normal(size=shape), jnp.float32)  # noqa: E731
    return jax.tree.map(make, PARAMS, is_leaf=lambda node: isinstance(node, tuple))


def test_updates_are_those_of_optax():
    """Of stacks of layers and of experts; everything else is AdamW's."""
    config = OptimizerConfig(
        name="muon", learning_rate=0.1, weight_decay=0.3, max_grad_norm=np.inf, muon_beta=0.8
    )
    matrix = optax.contrib.MuonDimensionNumbers(-2, -1)
    dims = jax.tree_util.tree_map_with_path(
        lambda path, _: matrix if muon.is_muon_matrix(path) else None, arrays(0)
    )
    theirs = optax.contrib.muon(
        0.1,
        beta=0.8,
        weight_decay=0.3,
        adam_weight_decay=0.3,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=lambda params: dims,
    )
    # optax's AdamW beside Muon has Nesterov's momentum; ours is the AdamW of every other job.
    adam = optax.adamw(0.1, weight_decay=0.3)
    ours = optimizer.make_optimizer(config, 10)
    params = arrays(0)
    states = ours.init(params), theirs.init(params), adam.init(params)
    step = jax.jit(lambda g, s, p: tuple(
        o.update(g, each, p) for o, each in zip((ours, theirs, adam), s, strict=True)
    ))  # fmt: skip
    for seed in (1, 2, 3):
        results = step(arrays(seed), states, params)
        (updates, by_optax, by_adam), states = zip(*results, strict=True)
        wanted = jax.tree_util.tree_map_with_path(
            lambda path, m, a: m if muon.is_muon_matrix(path) else a, by_optax, by_adam
        )
        for got, want in zip(jax.tree.leaves(updates), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-6)
        params = optax.apply_updates(params, updates)


def test_singular_values_are_near_one():
    stack = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 6, 24)), jnp.float32)
    for matrices in (stack, stack.mT, 1e-6 * stack):
        values = np.linalg.svd(muon.orthogonal_factors(matrices), compute_uv=False)
        assert values.min() > 0.65 and values.max() < 1.2
    np.testing.assert_array_equal(muon.orthogonal_factors(0 * stack), 0 * stack)


SHAPES = re.compile(r"f32\[([\d,]+)\]")
# Axes of the mesh, and the sharding of a stack [4, 64, 256]: by its columns as an MLP's first
# matrix, or by its rows as the second, or by layers over stages.
SHARDED = [
    ({"fsdp": 8}, (None, None, "fsdp"), 8),
    ({"fsdp": 4, "tensor": 2}, (None, None, ("tensor", "fsdp")), 8),
    ({"fsdp": 8}, (None, "fsdp", None), 8),
    ({"stage": 2, "fsdp": 2, "tensor": 2}, ("stage", None, ("tensor", "fsdp")), 4),
]


@pytest.mark.parametrize("sizes, spec, shards", SHARDED, ids=str)
def test_shards_of_a_stack_are_those_of_one_device(sizes, spec, shards):
    stack = jnp.asarray(np.random.default_rng(1).normal(size=(4, 64, 256)), jnp.float32)
    loop = lambda stack: layer_loop.map_layers(lambda x, _: muon.orthogonal_factors(x), stack)  # noqa: E731
    wanted = jax.jit(muon.orthogonal_factors)(stack)
    mesh = tiny.make_mesh(**sizes)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    with jax.set_mesh(mesh):
        program = jax.jit(loop, out_shardings=sharding)
        compiled = program.lower(jax.device_put(stack, sharding)).compile()
        found = compiled(jax.device_put(stack, sharding))
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    # The largest arrays are the device's part of the stack and one layer's square.
    made = max(
        np.prod([int(n) for n in shape.split(",")]) for shape in SHAPES.findall(compiled.as_text())
    )
    assert made <= max(stack.size // 8, 64 * 64)
