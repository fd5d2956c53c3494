"""Schedules by hand, AdamW by hand, and the update that is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import ConfigError, OptimizerConfig
from jaxrl_llm.learner import optimizer

BASE = OptimizerConfig(learning_rate=8.0, warmup_steps=3, min_lr_ratio=0.25)
# Warm-up in quarters: 2, 4, 6, then 8. Eight updates of decay, from update 3 to update 11.
SCHEDULES = {
    "constant": [2, 4, 6, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8],
    "linear": [2, 4, 6, 8, 7.25, 6.5, 5.75, 5, 4.25, 3.5, 2.75, 2, 2],
    "cosine": [2, 4, 6] + [5 + 3 * np.cos(np.pi * i / 8) for i in range(9)] + [2],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_by_hand(name):
    schedule = optimizer.learning_rate_schedule(dataclasses.replace(BASE, schedule=name), 11)
    np.testing.assert_allclose([schedule(i) for i in range(13)], SCHEDULES[name], rtol=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_at_their_edges(name):
    config = OptimizerConfig(learning_rate=0.5, schedule=name)
    assert optimizer.learning_rate_schedule(config, 4)(0) == 0.5  # no warm-up
    still = dataclasses.replace(config, learning_rate=0.0, warmup_steps=2)
    assert all(optimizer.learning_rate_schedule(still, 4)(i) == 0.0 for i in range(5))
    # A run that ends within its warm-up never decays.
    short = optimizer.learning_rate_schedule(dataclasses.replace(config, warmup_steps=9), 3)
    np.testing.assert_allclose([short(i) for i in range(3)], [0.05, 0.1, 0.15], rtol=1e-6)


def test_first_update_by_hand():
    # Norm 5 clipped to 1: gradient (0.6, 0.8). Adam's first step is sign(g) of size one;
    # decay takes 0.1 of the weight; both times the learning rate 0.5.
    config = OptimizerConfig(
        learning_rate=0.5, weight_decay=0.1, max_grad_norm=1.0, eps=1e-30, moment_dtype="bfloat16"
    )
    make = optimizer.make_optimizer(config, 10)
    params = {"w": jnp.array([1.0, -2.0])}
    params, state, norm, skipped = optimizer.apply_if_finite(
        make, {"w": jnp.array([3.0, 4.0])}, make.init(params), params
    )
    np.testing.assert_allclose(params["w"], [1 - 0.5 - 0.05, -2 - 0.5 + 0.1], rtol=1e-6)
    assert norm == 5.0
    assert not skipped
    adam = state[1][0]
    assert adam.mu["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(adam.mu["w"].astype(float), [0.06, 0.08], rtol=4e-3)
    np.testing.assert_allclose(adam.nu["w"], [0.36e-3, 0.64e-3], rtol=1e-4)


@pytest.mark.parametrize("beta1, beta2", [(0.9, 0.999), (0.0, 0.0), (0.5, 0.999999)])
def test_updates_are_those_of_float64(beta1, beta2):
    """The correction of the bias has all digits, in the first update and in a late one."""
    config = OptimizerConfig(
        learning_rate=1.0, weight_decay=0.0, beta1=beta1, beta2=beta2, max_grad_norm=1e9
    )
    make, gradients = (
        optimizer.make_optimizer(config, 10),
        np.random.default_rng(0).normal(size=(9, 4)),
    )
    params = {"w": jnp.zeros(4)}
    state, first, second = make.init(params), np.zeros(4), np.zeros(4)
    for n, gradient in enumerate(gradients.astype(np.float32), start=1):
        moved, state = make.update({"w": jnp.asarray(gradient)}, state, params)
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient.astype(float) ** 2
        root = np.sqrt(second / (1 - beta2**n)) + config.eps
        np.testing.assert_allclose(-moved["w"], first / (1 - beta1**n) / root, rtol=2e-6)


def test_no_clipping_at_infinity():
    config = OptimizerConfig(max_grad_norm=float("inf"))
    make = optimizer.make_optimizer(config, 1)
    gradients = {"w": jnp.array([3e10, 4e10])}
    _, state, norm, _ = optimizer.apply_if_finite(make, gradients, make.init(gradients), gradients)
    np.testing.assert_allclose(state[1][0].mu["w"], [3e9, 4e9], rtol=1e-6)
    assert norm == 5e10


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    make = optimizer.make_optimizer(OptimizerConfig(learning_rate=0.1), 10)
    params = {"a": jnp.ones(3), "b": jnp.ones((2, 2), jnp.bfloat16)}
    apply = jax.jit(lambda *args: optimizer.apply_if_finite(make, *args))
    good = jax.tree.map(jnp.ones_like, params)
    params, state, _, skipped = apply(good, make.init(params), params)
    assert not skipped
    broken = good | {"a": jnp.array([1.0, bad, bad])}
    kept, kept_state, norm, skipped = apply(broken, state, params)
    assert skipped
    assert not np.isfinite(norm)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), (kept, kept_state), (params, state))
    assert jax.tree.all(same)
    # The count too: the update after it is the second, with the second's bias correction.
    after, _, _, _ = apply(good, kept_state, kept)
    want, _, _, _ = apply(good, state, params)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), after, want))


@pytest.mark.parametrize(
    "settings",
    [{"eps": 0.0}, {"learning_rate": np.inf}, {"weight_decay": np.inf}, {"learning_rate": 1e38}],
    ids=lambda settings: str(settings),
)
def test_update_is_skipped_if_the_result_is_not_finite(settings):
    """0/0 where there is no gradient, infinite steps, and a sum that bfloat16 does not hold."""
    config = OptimizerConfig(**{"learning_rate": 0.1, **settings})
    make = optimizer.make_optimizer(config, 10)
    params = {"a": jnp.array([1.0, -2.0]), "b": jnp.full((2, 2), -3.3e38, jnp.bfloat16)}
    gradient = {"a": jnp.array([1.0, 0.0]), "b": jnp.full((2, 2), 2.0)}
    state = make.init(params)
    apply = jax.jit(lambda *args: optimizer.apply_if_finite(make, *args))
    kept, kept_state, norm, skipped = apply(gradient, state, params)
    assert skipped and np.isfinite(norm)
    jax.tree.map(np.testing.assert_array_equal, (kept, kept_state), (params, state))


def test_norms_of_modules_make_the_whole():
    layers = {"mlp": {"up": jnp.full((2, 3), 2.0)}, "attention": {"q": jnp.full((2, 2), 0.5)}}
    gradients = {"embed": jnp.array([3.0, 4.0]), "layers": {"0": layers}}
    found = optimizer.module_norms(gradients, "actor/grad_norm")
    assert {k: float(v) for k, v in found.items()} == {
        "actor/grad_norm/embed": 5.0,
        "actor/grad_norm/attention": 1.0,
        "actor/grad_norm/mlp": pytest.approx(24**0.5),
    }
    assert sum(v**2 for v in found.values()) == pytest.approx(25 + 1 + 24)
    assert optimizer.module_norms({}, "critic/grad_norm") == {}


def test_moments_and_sums_are_wide_whatever_the_parameters_are():
    config = OptimizerConfig(learning_rate=2.0**-10, weight_decay=0.0, max_grad_norm=1e9)
    make = optimizer.make_optimizer(config, 1)
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    state = make.init(params)
    assert {a.dtype for a in jax.tree.leaves(state) if a.ndim} == {jnp.dtype("float32")}
    gradient = {"w": jnp.full(4, 3.0, jnp.float32)}
    after, moved, _, _ = optimizer.apply_if_finite(make, gradient, state, params)
    assert after["w"].dtype == jnp.bfloat16
    assert jax.tree.map(lambda a: a.dtype, moved) == jax.tree.map(lambda a: a.dtype, state)
    # 1 - 2**-10 is between two bfloat16 numbers, nearer to 1.
    np.testing.assert_array_equal(after["w"], jnp.ones(4, jnp.bfloat16))


def test_an_update_that_is_not_allowed_changes_nothing():
    make = optimizer.make_optimizer(OptimizerConfig(learning_rate=0.1), 10)
    params = {"a": jnp.ones(3)}
    state = make.init(params)
    apply = jax.jit(lambda allowed: optimizer.apply_if_finite(make, params, state, params, allowed))
    kept, kept_state, norm, skipped = apply(False)
    assert skipped and np.isfinite(norm)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), (kept, kept_state), (params, state))
    assert jax.tree.all(same)
    moved, _, _, skipped = apply(True)
    assert not skipped and (moved["a"] != params["a"]).all()


def test_rates_by_parameter():
    """The first pattern found in a path counts; decay is at the parameter's rate too."""
    config = OptimizerConfig(
        learning_rate=0.5, weight_decay=0.1, eps=1e-30, rates=("mlp/up=0.5", "layers=0", "head=2")
    )
    up, down = {"kernel": jnp.full((1, 1, 1), 2.0)}, {"kernel": jnp.full((1, 1, 1), 2.0)}
    mlp = {"up": up, "down": down}
    params = {"layers": {"0": {"mlp": mlp}}, "head": jnp.array([2.0]), "norm": jnp.array([2.0])}
    make = optimizer.make_optimizer(config, 10)
    updates, _ = make.update(jax.tree.map(jnp.ones_like, params), make.init(params), params)
    names = {optimizer.parameter_name(path): u for path, u in jax.tree.leaves_with_path(updates)}
    # Adam's first step is 1, decay 0.2, the rate 0.5.
    wanted = {"layers/0/mlp/up/kernel": -0.3, "layers/0/mlp/down/kernel": 0.0, "head": -1.2}
    for name, want in {**wanted, "norm": -0.6}.items():
        np.testing.assert_allclose(names[name].ravel(), [want], rtol=1e-6)
    optimizer.check_rates(config, params, "trainer.optimizer")
    wrong = dataclasses.replace(config, rates=("head=2", "gate=2"))
    with pytest.raises(ConfigError, match=r"config\.critic\.optimizer\.rates: 'gate=2' is found"):
        optimizer.check_rates(wrong, params, "critic.optimizer")
