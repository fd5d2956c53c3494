"""AdamW and its learning rate schedule, with optax; updates that are not finite are skipped."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from jaxrl_llm.config import OptimizerConfig
from jaxrl_llm.learner import router_replay
from jaxrl_llm.models import finite

Tree = Any


def learning_rate_schedule(config: OptimizerConfig, num_updates: int) -> optax.Schedule:
    """The learning rate as a function of the number of updates taken so far.

    Linear warm-up over `warmup_steps` updates to `learning_rate_schedule`; it starts one step above
    zero. Then constant, or a decay that reaches `min_lr_ratio * learning_rate_schedule` at
    `num_updates`.
    """
    peak, floor = config.learning_rate, config.learning_rate * config.min_lr_ratio
    decay_steps = max(1, num_updates - config.warmup_steps)
    after_warmup = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, floor, decay_steps),
        "cosine": optax.cosine_decay_schedule(peak, decay_steps, config.min_lr_ratio)
        if peak
        else optax.constant_schedule(0.0),
    }[config.schedule]
    warmup = optax.linear_schedule(
        peak / (config.warmup_steps + 1), peak, max(1, config.warmup_steps)
    )
    return optax.join_schedules([warmup, after_warmup], [config.warmup_steps])


def make_optimizer(
    config: OptimizerConfig, num_updates: int, tower_rate: float = 0.0
) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW (arXiv:1711.05101), for float32 gradients.

    The branch `vision` of the parameters is trained at `tower_rate` instead of
    `learning_rate_schedule`; the optimizer state does not depend on it.

    `moment_dtype` is the dtype of the first moment. The second is float32: the 8 bits of a bfloat16
    lose steps of 1 - beta2 = 0.001.
    """
    decay_mask = None if config.weight_decay_on == "all" else _decay_mask
    chain = optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.chain(
            _scale_by_adam(config),
            optax.add_decayed_weights(config.weight_decay, decay_mask),
            _scale_by_learning_rates(config, num_updates, tower_rate),
        ),
    )

    def init(params: Tree) -> Tree:
        # Moments take the dtype of these parameters.
        return chain.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))

    return optax.GradientTransformation(init, chain.update)


def _scale_by_learning_rates(
    config: OptimizerConfig, num_updates: int, tower_rate: float
) -> optax.GradientTransformation:
    """`optax.scale_by_learning_rate`, with a rate of its own for the branch `vision`."""
    tower_config = dataclasses.replace(config, learning_rate=tower_rate)
    rest, tower = (
        optax.scale_by_learning_rate(learning_rate_schedule(group, num_updates))
        for group in (config, tower_config)
    )

    def update(updates: Tree, state: optax.ScaleByScheduleState, params: Tree = None):
        scaled_updates, next_state = rest.update(updates, state, params)
        if "vision" in updates:
            tower_updates, _ = tower.update({"vision": updates["vision"]}, state)
            scaled_updates = {**scaled_updates, **tower_updates}
        return scaled_updates, next_state

    return optax.GradientTransformation(rest.init, update)


def _scale_by_adam(config: OptimizerConfig) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with a bias correction that keeps the digits of float32.

        m / (1 - beta1**n) / (sqrt(v / (1 - beta2**n)) + eps)     arXiv:1412.6980, Algorithm 1

    Deviation: optax subtracts `beta**n` from 1 in float32, where 1 - 0.999 has four digits fewer.
    """
    beta1, beta2 = config.beta1, config.beta2

    def bias_corrected(moment: Tree, beta: float, count: Array) -> Tree:
        logarithm = math.log(beta) if beta else -math.inf
        correction = -jnp.expm1(count.astype(jnp.float32) * logarithm)
        return jax.tree.map(lambda m: m / correction.astype(m.dtype), moment)

    def update(gradients: Tree, state: optax.ScaleByAdamState, params: Tree = None):
        del params
        first = optax.tree.update_moment(gradients, state.mu, beta1, 1)
        second = optax.tree.update_moment_per_elem_norm(gradients, state.nu, beta2, 2)
        count = optax.safe_increment(state.count)
        updates = jax.tree.map(
            lambda m, v: m / (jnp.sqrt(v) + config.eps),
            bias_corrected(first, beta1, count),
            bias_corrected(second, beta2, count),
        )
        first = optax.tree.cast(first, config.moment_dtype)
        return updates, optax.ScaleByAdamState(count, first, second)

    init = optax.scale_by_adam(mu_dtype=config.moment_dtype).init
    return optax.GradientTransformation(init, update)


def _decay_mask(params: Tree) -> Tree:
    """True for weights to decay: by name, as stacked biases and norm scales are matrices."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key not in ("bias", "scale"), params
    )


def may_overflow(config: OptimizerConfig, num_updates: int, tower_rate: float = 0.0) -> bool:
    """Whether updates by finite gradients could make weights that are not finite.

    Clipping bounds the moments by `max_grad_norm` and so an update by
    `learning_rate * max_grad_norm / eps`; decay by no more than the weight itself shrinks it. All
    updates together below 1e30 are less than the rounding error of the largest float32.
    """
    rate = max(config.learning_rate, tower_rate)
    max_update = 2.0 * rate * config.max_grad_norm / config.eps
    return (
        rate * config.weight_decay > 1.0
        or config.max_grad_norm > 1e15
        or num_updates * max_update > 1e30
    )


def apply_if_finite(
    transformation: optax.GradientTransformation,
    gradients: Tree,
    opt_state: Tree,
    params: Tree,
    allowed: Bool[Array, ""] | bool = True,
    *,
    check_results: bool = True,
) -> tuple[Tree, Tree, Float[Array, ""], Bool[Array, ""]]:
    """Applies one update, or skips it if it is not allowed or not all of its results are finite.

    Returns parameters, optimizer state, the global norm of `gradients` before clipping, and whether
    the update was skipped; then nothing changes, not even the count of the schedule.

    Finite gradients are not enough: Adam with `eps=0` divides 0 by 0. `check_results` checks all
    results, at the cost of the memory of a second copy; needed where they `may_overflow`.
    """
    norm = optax.tree.norm(gradients)
    updates, next_state = transformation.update(gradients, opt_state, params)
    updates = router_replay.with_frozen_biases(updates)
    # Added in the wider dtype, rounded once.
    next_params = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
    candidates = next_params, next_state
    is_taken = allowed & jnp.isfinite(norm)
    if check_results:
        is_taken &= finite.all_finite(candidates)
    results = jax.tree.map(
        lambda new, old: jnp.where(is_taken, new, old), candidates, (params, opt_state)
    )
    return *results, norm, ~is_taken


def module_norms(gradients: Tree, prefix: str) -> dict[str, Float[Array, ""]]:
    """Metrics `PREFIX/MODULE`: the norm of each module's gradient over all layers.

    Modules are embed, attention, mlp, norms, head, and `vision`, a trainable tower. Their squares
    add up to the square of the global norm.
    """
    modules = {k: [v] for k, v in gradients.items() if k != "layers"}
    for stack in gradients.get("layers", {}).values():
        for name, part in stack.items():
            modules.setdefault(name, []).append(part)
    return {f"{prefix}/{name}": optax.tree.norm(part) for name, part in sorted(modules.items())}
