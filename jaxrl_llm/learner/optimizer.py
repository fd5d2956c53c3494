"""AdamW and its schedule, by optax; and the update that refuses numbers that are not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from jaxrl_llm.config import OptimizerConfig
from jaxrl_llm.models import finite

Tree = Any


def learning_rate(config: OptimizerConfig, num_updates: int) -> optax.Schedule:
    """Returns the learning rate as a function of the updates taken so far.

    Warm-up is linear over `warmup_steps` updates and ends at `learning_rate`; its first value is
    one step above zero, so that no update is wasted. Then constant, or a decay that reaches
    `min_lr_ratio * learning_rate` at `num_updates`.
    """
    peak, floor = config.learning_rate, config.learning_rate * config.min_lr_ratio
    decay_steps = max(1, num_updates - config.warmup_steps)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, floor, decay_steps),
        "cosine": optax.cosine_decay_schedule(peak, decay_steps, config.min_lr_ratio)
        if peak
        else optax.constant_schedule(0.0),
    }[config.schedule]
    warmup = optax.linear_schedule(
        peak / (config.warmup_steps + 1), peak, max(1, config.warmup_steps)
    )
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def make(config: OptimizerConfig, num_updates: int) -> optax.GradientTransformation:
    """Returns clipping by global norm, then AdamW (arXiv:1711.05101).

    Gradients come in float32. The second moment stays float32 whatever the parameters are and
    whatever `moment_dtype` says of the first: steps of 1 - beta2 = 0.001 are lost to the 8
    bits of a bfloat16.
    """
    chain = optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            learning_rate(config, num_updates),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mu_dtype=config.moment_dtype,
        ),
    )

    def init(params: Tree) -> Tree:
        # Moments take the dtype of what they are made for.
        return chain.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))

    return optax.GradientTransformation(init, chain.update)


def may_overflow(config: OptimizerConfig, num_updates: int) -> bool:
    """Returns whether updates by finite gradients could make weights that are not finite.

    With clipping the moments are bounded by `max_grad_norm`, so an update is at most
    `learning_rate * max_grad_norm / eps`, and decay by no more than the weight itself only shrinks
    it. Less than 1e30 in all updates together is lost in the rounding of the largest float32.
    """
    largest = 2.0 * config.learning_rate * config.max_grad_norm / config.eps
    return (
        config.learning_rate * config.weight_decay > 1.0
        or config.max_grad_norm > 1e15
        or num_updates * largest > 1e30
    )


def apply_if_finite(
    transformation: optax.GradientTransformation,
    gradients: Tree,
    opt_state: Tree,
    params: Tree,
    allowed: Bool[Array, ""] | bool = True,
    *,
    look: bool = True,
) -> tuple[Tree, Tree, Float[Array, ""], Bool[Array, ""]]:
    """Takes one update, or none if it is not allowed or anything it makes is not finite.

    What the optimizer made of the gradient decides, not the gradient alone: a finite one becomes
    0/0 in Adam with `eps=0`, or infinite by a learning rate that is.

    Args:
      transformation: The optimizer.
      gradients: Summed over all microbatches.
      opt_state: Of the optimizer.
      params: To be moved.
      allowed: Whether the update may be taken.
      look: Whether to look at all of the result; it costs the memory of a second one. Not
        needed where it cannot overflow (`may_overflow`).

    Returns:
      params and optimizer state, the global gradient norm before clipping, and whether the
      update was skipped. A skipped update changes nothing, the schedule's count included.
    """
    norm = optax.tree.norm(gradients)
    updates, next_state = transformation.update(gradients, opt_state, params)
    # Added in the wider dtype, rounded once.
    moved = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
    after = moved, next_state
    take = allowed & jnp.isfinite(norm)
    if look:
        take &= finite.all_finite(after)
    chosen = jax.tree.map(lambda new, old: jnp.where(take, new, old), after, (params, opt_state))
    return *chosen, norm, ~take


def module_norms(gradients: Tree, prefix: str) -> dict[str, Float[Array, ""]]:
    """Returns `PREFIX/MODULE`, the gradient's norm of each part of a network over all its layers.

    Modules are what a parameter tree has at its top, and below `layers`: embed, attention, mlp,
    norms, head. Their squares add up to that of the global norm.
    """
    modules = {k: v for k, v in gradients.items() if k != "layers"} | gradients.get("layers", {})
    return {f"{prefix}/{name}": optax.tree.norm(part) for name, part in sorted(modules.items())}
