"""Schedule-free AdamW (arXiv:2405.15682): an average of the weights instead of a decay of the rate.

The parameters of a job are the average `x`, which is what is evaluated, sampled, saved and
exported. The state has the weights `z` that AdamW moves. Gradients are taken between them, at
`y = (1 - beta1) z + beta1 x`, so there is no first moment.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxrl_llm.config import OptimizerConfig
from jaxrl_llm.learner import router_replay
from jaxrl_llm.learner.adamw import bias_correction, log_beta

Tree = Any


class ScheduleFreeState(NamedTuple):
    """The state of schedule-free AdamW; `z` and `nu` have the structure of the parameters."""

    num_updates: Int[Array, ""]
    weight_sum: Float[Array, ""]  # of the squared rates that the average weighs by
    max_rate: Float[Array, ""]
    z: Tree
    nu: Tree  # second moments


def gradient_point(beta1: float, params: Tree, state: ScheduleFreeState) -> Tree:
    """The weights `y` at which the next gradient is taken, in the dtype of the parameters."""
    return jax.tree.map(
        lambda x, z: ((1 - beta1) * z + beta1 * x.astype(jnp.float32)).astype(x.dtype),
        params,
        state.z,
    )


def schedule_free_adamw(
    config: OptimizerConfig,
    decay: optax.GradientTransformation,
    scaled: Callable[[Tree, Array], Tree],
    rate: optax.Schedule,
) -> optax.GradientTransformation:
    """The transformation of gradients at `gradient_point`, for parameters that are `x`.

        z <- z - rate (g / (sqrt(v / (1 - beta2**n)) + eps) + weight_decay y)      Algorithm 1
        x <- (1 - c) x + c z,   c = max_rate**2 / sum of max_rate**2

    Args:
      decay: Adds weight decay, of `y`, to an update.
      scaled: (updates, count) -> updates times minus the learning rates of their parameters.
      rate: The learning rate by the count of updates, which the average weighs by.
    """

    def init(params: Tree) -> ScheduleFreeState:
        zero = jnp.zeros([], jnp.float32)
        zeros = jax.tree.map(jnp.zeros_like, params)
        z = jax.tree.map(jnp.copy, params)
        return ScheduleFreeState(jnp.zeros([], jnp.int32), zero, zero, z, zeros)

    def update(gradients: Tree, state: ScheduleFreeState, params: Tree):
        count = optax.safe_increment(state.num_updates)
        second = optax.tree.update_moment_per_elem_norm(gradients, state.nu, config.beta2, 2)
        correction = bias_correction(log_beta(config.beta2), count)
        steps = jax.tree.map(
            lambda g, v: g / (jnp.sqrt(v / correction) + config.eps), gradients, second
        )
        point = gradient_point(config.beta1, params, state)
        steps, _ = decay.update(steps, decay.init(params), point)
        steps = router_replay.with_frozen_biases(scaled(steps, state.num_updates))
        z = jax.tree.map(jnp.add, state.z, steps)
        max_rate = jnp.maximum(state.max_rate, rate(state.num_updates))
        weight_sum = state.weight_sum + max_rate**2
        share = jnp.where(weight_sum > 0, max_rate**2 / weight_sum, 0.0)
        updates = jax.tree.map(lambda z, x: share * (z - x.astype(jnp.float32)), z, params)
        return updates, ScheduleFreeState(count, weight_sum, max_rate, z, second)

    return optax.GradientTransformation(init, update)
