"""Schedule-free AdamW takes optax's steps, with the average as the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.config import OptimizerConfig
from jaxrl_llm.learner import optimizer

CURVES = {"w": jnp.array([[3.0, 0.5], [1.0, 2.0]]), "bias": jnp.array([1.0, 4.0])}


def gradients(params):
    return jax.grad(lambda p: sum(jnp.sum(CURVES[k] * jnp.sin(p[k])) for k in p))(params)


def test_steps_are_those_of_optax():
    config = OptimizerConfig(
        name="schedule_free", learning_rate=0.1, weight_decay=0.2, max_grad_norm=np.inf, beta1=0.8
    )
    ours = optimizer.make_optimizer(config, 20)
    theirs = optax.contrib.schedule_free_adamw(0.1, b1=0.8, weight_decay=0.2)
    average = point = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "bias": jnp.array([3.0, -1.0])}
    state, their_state = ours.init(average), theirs.init(point)
    for _ in range(6):
        ours_point = optimizer.gradient_point(config, average, state)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), ours_point, point)
        updates, state = ours.update(gradients(ours_point), state, average)
        average = jax.tree.map(jnp.add, average, updates)
        updates, their_state = theirs.update(gradients(point), their_state, point)
        point = optax.apply_updates(point, updates)
        wanted = optax.contrib.schedule_free_eval_params(their_state, point)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), average, wanted)


def test_warmup_weighs_the_average():
    """By squares of rates 1 and 2: shares 1 and 4/5; each step of AdamW is of the rate's size."""
    config = OptimizerConfig(
        name="schedule_free", learning_rate=2.0, warmup_steps=1, weight_decay=0.0, eps=1e-18
    )
    make, params = optimizer.make_optimizer(config, 9), {"w": jnp.array([0.0])}
    state = make.init(params)
    wanted = [-1.0, -1.0 + 0.8 * -2.0]
    for want in wanted:
        updates, state = make.update({"w": jnp.array([0.5])}, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        np.testing.assert_allclose(params["w"], [want], rtol=1e-6)
    assert optimizer.gradient_point(OptimizerConfig(), params, state) is params
