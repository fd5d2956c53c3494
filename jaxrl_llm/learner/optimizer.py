"""The optimizers of jobs and their learning rates; updates that are not finite are skipped.

Each parameter has moments of its own kind, so a state has the structure of the parameters with
what a parameter needs in place of each: two moments, a momentum only (Muon), moments in 8 bits.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from jaxrl_llm.config import ConfigError, OptimizerConfig
from jaxrl_llm.config.optimizer import unmatched_rates
from jaxrl_llm.learner import (
    block_quantization,
    layer_loop,
    muon,
    router_replay,
    schedule_free,
)
from jaxrl_llm.learner.adamw import bias_correction, log_beta
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
    """Clipping by global norm, then the optimizer of the config, for float32 gradients.

    AdamW is arXiv:1711.05101, Muon `muon.muon_direction`, schedule-free AdamW `schedule_free.py`.
    Weight decay is decoupled. The branch `vision` of the parameters is trained at `tower_rate`
    instead of `learning_rate_schedule`; the optimizer state does not depend on it.

    `moment_dtype` "bfloat16" is the dtype of the first moment. The second is float32: the 8 bits of
    a bfloat16 lose steps of 1 - beta2 = 0.001.
    """
    decay = optax.add_decayed_weights(
        config.weight_decay, None if config.weight_decay_on == "all" else _decay_mask
    )
    scaled = functools.partial(_times_learning_rates, config, num_updates, tower_rate)
    if config.name == "schedule_free":
        rate = learning_rate_schedule(config, num_updates)
        last = schedule_free.schedule_free_adamw(config, decay, scaled, rate)
    else:
        last = optax.chain(_scale_by_moments(config), decay, _scale_by_learning_rates(scaled))
    chain = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), last)

    def init(params: Tree) -> Tree:
        # Moments take the dtype of these parameters.
        return chain.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))

    return optax.GradientTransformation(init, chain.update)


def gradient_point(config: OptimizerConfig, params: Tree, opt_state: Tree) -> Tree:
    """The weights at which an update's gradient is to be taken: the parameters, or near them."""
    if config.name != "schedule_free":
        return params
    return schedule_free.gradient_point(config.beta1, params, opt_state[1])


def _times_learning_rates(
    config: OptimizerConfig, num_updates: int, tower_rate: float, updates: Tree, count: Array
) -> Tree:
    """Updates times minus the learning rate that each parameter has in update `count`, from 0."""
    tower_config = dataclasses.replace(config, learning_rate=tower_rate)
    rate, tower = (
        -learning_rate_schedule(group, num_updates)(count) for group in (config, tower_config)
    )
    factors = config.rate_factors

    def scaled_update(path: tuple[Any, ...], update: Array) -> Array:
        name = parameter_name(path)
        factor = next((f for pattern, f in factors if pattern.search(name)), 1.0)
        own_rate = tower if path[0].key == "vision" else rate
        return jnp.asarray(own_rate * factor, update.dtype) * update

    return jax.tree_util.tree_map_with_path(scaled_update, updates)


def parameter_name(path: tuple[Any, ...]) -> str:
    """The path of a parameter as `optimizer.rates` reads it, "layers/0/mlp/up/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def check_rates(config: OptimizerConfig, params: Tree, where: str) -> None:
    """Raises ConfigError if an entry of `optimizer.rates` is for none of the parameters.

    `where` is the optimizer's place in the config; `params` may be abstract.
    """
    names = [parameter_name(path) for path, _ in jax.tree.leaves_with_path(params)]
    for text in unmatched_rates(config, names):
        raise ConfigError(
            f"config.{where}.rates: {text!r} is found in the path of no parameter that is trained;"
            f" paths are, for example, {names[0]!r} and {names[-1]!r}"
        )


def _scale_by_learning_rates(scaled: Callable[[Tree, Array], Tree]) -> optax.GradientTransformation:
    """`optax.scale_by_learning_rate`, with rates by parameter."""

    def update(updates: Tree, state: optax.ScaleByScheduleState, params: Tree = None):
        del params
        next_count = optax.safe_increment(state.count)
        return scaled(updates, state.count), optax.ScaleByScheduleState(next_count)

    init = optax.scale_by_schedule(lambda count: count).init
    return optax.GradientTransformation(init, update)


class _LeafUpdate(NamedTuple):
    """A gradient, or an update, of one parameter with its moments."""

    update: Any
    first: Any
    second: Any


def _scale_by_moments(config: OptimizerConfig) -> optax.GradientTransformation:
    """Updates in the size of AdamW's, and moments of each parameter's kind.

        m / (1 - beta1**n) / (sqrt(v / (1 - beta2**n)) + eps)     arXiv:1412.6980, Algorithm 1

    The bias correction keeps the digits of float32. Deviation: optax subtracts `beta**n` from 1 in
    float32, where 1 - 0.999 has four digits fewer.
    """
    beta1, beta2 = config.beta1, config.beta2

    def init(params: Tree) -> optax.ScaleByAdamState:
        first, second = (
            jax.tree_util.tree_map_with_path(functools.partial(zeros, config), params)
            for zeros in (_first_moment, _second_moment)
        )
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), first, second)

    def muon_update(path, count: Array, inputs: _LeafUpdate, layers: Array) -> _LeafUpdate:
        gradient, first, second = inputs
        beta, logarithm = config.muon_beta, log_beta(config.muon_beta)
        first = optax.tree.update_moment(gradient, _float_moment(first), beta, 1)
        corrections = (
            bias_correction(logarithm, count),
            bias_correction(logarithm, count + 1),
        )
        update = muon.muon_direction(gradient, first, beta, corrections)
        return _LeafUpdate(update, _stored_first(config, path, first), second)

    def adam_update(path, count: Array, inputs: _LeafUpdate, layers: Array) -> _LeafUpdate:
        gradient, first, second = inputs
        first = optax.tree.update_moment(gradient, _float_moment(first), beta1, 1)
        second = optax.tree.update_moment_per_elem_norm(gradient, _float_moment(second), beta2, 2)
        corrected = first / bias_correction(log_beta(beta1), count).astype(first.dtype)
        root = jnp.sqrt(second / bias_correction(log_beta(beta2), count))
        update = corrected / (root + config.eps)
        first = _stored_first(config, path, first)
        return _LeafUpdate(update, first, _stored_second(config, path, second, count, layers))

    def update(gradients: Tree, state: optax.ScaleByAdamState, params: Tree = None):
        del params
        count = optax.safe_increment(state.count)

        def leaf_update(path, gradient: Array, first: Any, second: Any) -> _LeafUpdate:
            has_muon, inputs = _has_muon(config, path), _LeafUpdate(gradient, first, second)
            scale = functools.partial(muon_update if has_muon else adam_update, path, count)
            loops = has_muon or _block_size(config, path, gradient.shape)
            if loops and layer_loop.is_stacked(path):
                return layer_loop.map_layers(scale, inputs)
            return scale(inputs, jnp.int32(0))

        results = jax.tree_util.tree_map_with_path(leaf_update, gradients, state.mu, state.nu)
        updates, first, second = (
            jax.tree.map(lambda r, n=name: getattr(r, n), results, is_leaf=_is_leaf_update)
            for name in _LeafUpdate._fields
        )
        return updates, optax.ScaleByAdamState(count, first, second)

    return optax.GradientTransformation(init, update)


def _is_leaf_update(node: Any) -> bool:
    return isinstance(node, _LeafUpdate)


def _has_muon(config: OptimizerConfig, path: tuple[Any, ...]) -> bool:
    return config.name == "muon" and muon.is_muon_matrix(path)


def _block_size(config: OptimizerConfig, path: tuple[Any, ...], shape: tuple[int, ...]) -> int:
    """Numbers of a block of 8-bit moments; 0: the parameter's moments are wider."""
    return block_quantization.block_size(shape, path) if config.moment_dtype == "int8" else 0


def _first_moment(config: OptimizerConfig, path: tuple[Any, ...], param: Array) -> Any:
    if size := _block_size(config, path, param.shape):
        return block_quantization.zeros(param.shape, size, is_signed=True)
    return jnp.zeros(param.shape, _first_dtype(config))


def _second_moment(config: OptimizerConfig, path: tuple[Any, ...], param: Array) -> Any:
    if _has_muon(config, path):
        return optax.MaskedNode()
    if size := _block_size(config, path, param.shape):
        return block_quantization.zeros(param.shape, size, is_signed=False)
    return jnp.zeros(param.shape, jnp.float32)


def _first_dtype(config: OptimizerConfig) -> str:
    """Of first moments that are not in blocks."""
    return "float32" if config.moment_dtype == "int8" else config.moment_dtype


def _float_moment(moment: Any) -> Array:
    if isinstance(moment, block_quantization.QuantizedMoment):
        return block_quantization.dequantize(moment)
    return moment


def _stored_first(config: OptimizerConfig, path: tuple[Any, ...], moment: Array) -> Any:
    if size := _block_size(config, path, moment.shape):
        return block_quantization.quantize_signed(moment, size)
    return moment.astype(_first_dtype(config))


def _stored_second(
    config: OptimizerConfig, path: tuple[Any, ...], moment: Array, count: Array, layers: Array
) -> Any:
    if size := _block_size(config, path, moment.shape):
        bits = block_quantization.rounding_bits(path, count, layers, moment.shape)
        return block_quantization.quantize_positive(moment, size, bits)
    return moment


def state_bytes(config: OptimizerConfig, path: tuple[Any, ...], shape: tuple[int, ...]) -> float:
    """Bytes of the optimizer state for each number of a parameter of this whole shape."""
    if size := _block_size(config, path, shape):
        first = second = 1.0 + 4.0 / size
    else:
        first, second = float(jnp.dtype(_first_dtype(config)).itemsize), 4.0
    return first if _has_muon(config, path) else first + second


def loop_bytes(config: OptimizerConfig, path: tuple[Any, ...], shape: tuple[int, ...]) -> float:
    """Bytes for each number of a parameter that its layer loop writes before they are used.

    That is the update, and a momentum that is not in 8 bits, whose old one is still there.
    """
    has_muon, size = _has_muon(config, path), _block_size(config, path, shape)
    if not (has_muon or size) or not layer_loop.is_stacked(path):
        return 0.0
    return 4.0 + (0.0 if size else jnp.dtype(_first_dtype(config)).itemsize)


def is_moment(node: Any) -> bool:
    """Whether a node of an optimizer state is all that one parameter has of a moment."""
    return isinstance(node, (block_quantization.QuantizedMoment, optax.MaskedNode))


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
    factors = [factor for _, factor in config.rate_factors]
    rate = max(config.learning_rate, tower_rate) * max([1.0, *factors])
    # Muon's updates are as large as its matrices are wide.
    max_update = 2.0 * rate * max(config.max_grad_norm / config.eps, 1e6)
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
