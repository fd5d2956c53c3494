"""MoE routers in scoring and update: replay of recorded routes, router losses, load balancing.

A router that chooses other experts than the engine's did trains another network than the one that
sampled. So it can follow the engine's routes ("rollout", known as R3) or those of the first scoring
pass ("scoring", R2) instead of its own choice. Gradients reach routers through the weights of the
experts they follow.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algorithms.aggregation import minibatch_denominators
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.learner import RouterConfig, RouterLossConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.attention_modules import INDEXER
from jaxrl_llm.models.moe.router import RouterInputs, RouterOutputs
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.packing.packed_batch import Microbatch
from jaxrl_llm.types import Rollouts

Metrics = dict[str, Float[Array, ""]]

SELECTION_BIAS = "selection_bias"  # the name of a parameter that no gradient reaches


class RouteError(UserError, ValueError):
    """Samples without the routes of their tokens, in a run that must replay them."""


def _replay_mode(router: RouterLossConfig) -> str:
    return router.replay if isinstance(router, RouterConfig) else "off"


def check_router_config(router: RouterLossConfig, shape: Architecture) -> None:
    """Raises a ConfigError for settings that a model of this shape cannot follow."""
    experts = shape.experts
    if _replay_mode(router) != "off" and experts is None:
        raise ConfigError(
            f"config.router.replay: {_replay_mode(router)!r}, but the model has no experts; use"
            " 'off'"
        )
    for name in ("balance_coef", "z_coef"):
        if (value := getattr(router, name)) and experts is None:
            raise ConfigError(f"config.router.{name}: {value}, but the model has no experts; use 0")
    if router.bias_rate and (experts is None or not experts.selection_bias):
        has = "no experts" if experts is None else "no bias that selects experts"
        raise ConfigError(
            f"config.router.bias_rate: {router.bias_rate}, but the model has {has}; use 0, or"
            " balance_coef to balance experts by a loss"
        )


def check_routes(router: RouterConfig, rollouts: Rollouts) -> None:
    """Raises a RouteError if routes are missing and that is an error in this run."""
    if router.replay not in ("compare", "rollout") or router.missing_routes == "own":
        return
    if missing := rollouts.missing_routes:
        raise RouteError(
            f"config.router.replay: {router.replay!r}, but {missing} of {rollouts.lengths.sum()}"
            " tokens do not say which experts they visited; sample with an engine that keeps"
            " routes, or let the router choose for them: config.router.missing_routes='own'"
        )


def router_inputs(
    router: RouterLossConfig, microbatch: Microbatch, response_mask: Bool[Array, "B T"]
) -> RouterInputs:
    """The inputs of the routers in an update: recorded routes, and response tokens as counted."""
    is_counted = microbatch.to_rows(response_mask) != 0
    is_in_sequence = microbatch.segment_ids[..., None] == 1 + microbatch.sequences
    return RouterInputs(
        is_counted,
        replayed=microbatch.routes if microbatch.routes.shape[-1] else None,
        replays=_replay_mode(router) != "compare",
        sequences=is_in_sequence if router.balance_coef else None,
    )


def router_loss(
    router: RouterLossConfig, routed: RouterOutputs | None, mask: Bool[Array, "B T"]
) -> tuple[Float[Array, ""] | float, dict[str, Any]]:
    """A microbatch's share of the router losses, and the sums that `router_metrics` needs.

    `balance_coef` times the mean over sequences and layers of the balance loss
    (arXiv:2412.19437, Eq. 17 to 20, 1 where all experts are chosen alike), plus `z_coef` times the
    mean over tokens and layers of the squared log of the sum of exp(logits) (arXiv:2202.08906,
    Eq. 5). `mask` has the counted tokens of the whole minibatch.
    """
    if routed is None or routed.load is None:
        return 0.0, {}
    assert routed.z_loss is not None and routed.balance_loss is not None
    counts, layers = minibatch_denominators(mask), routed.load.shape[0]
    balance = routed.balance_loss.sum() / (counts.sequences * layers)
    squares = routed.z_loss.sum() / (counts.tokens * layers)
    sums = jax.lax.stop_gradient((routed._replace(chosen=jnp.zeros(())), balance, squares))
    return router.balance_coef * balance + router.z_coef * squares, {"routers": sums}


def router_metrics(router: RouterLossConfig, sums: tuple[RouterOutputs, Array, Array]) -> Metrics:
    """Router metrics of a minibatch, from the sums of `router_loss`.

    Loads are relative to the mean load of a layer: `router/load/E` is the load of expert E, mean of
    the layers; `router/max_vio` the largest minus 1 (arXiv:2408.15664, Eq. 4), mean of the layers;
    `router/idle_experts` the share of experts without a token. `router/equal_routes` is the share
    of tokens and layers where the router's own choice is the experts given.
    """
    routed, balance, squares = sums
    assert (
        routed.load is not None
        and routed.num_replayed is not None
        and routed.num_agreeing is not None
    )
    shares = routed.load / jnp.maximum(routed.load.mean(-1, keepdims=True), 1e-9)
    numbers = {
        "router/max_vio": (shares.max(-1) - 1.0).mean(),
        "router/max_vio/max": shares.max() - 1.0,
        "router/idle_experts": (shares == 0).mean(),
        "router/z_loss": squares,
        **{f"router/load/{e:03d}": share for e, share in enumerate(shares.mean(0))},
    }
    if router.balance_coef:
        numbers["router/balance_loss"] = balance
    if _replay_mode(router) != "off":
        numbers["router/equal_routes"] = routed.num_agreeing.sum() / jnp.maximum(
            routed.num_replayed.sum(), 1.0
        )
    return numbers


def with_balanced_biases(
    router: RouterLossConfig,
    shape: Architecture,
    params: Params,
    load: Float[Array, "layers E"],
    skipped: Bool[Array, ""],
) -> Params:
    """Parameters with the selection biases moved towards an even load.

    By `bias_rate`: up for experts with less than the mean load and down for those with more
    (arXiv:2408.15664, Algorithm 1).
    """
    if not router.bias_rate:
        return params
    direction = jnp.sign(load.mean(-1, keepdims=True) - load)
    step = jnp.where(skipped, 0.0, router.bias_rate * direction)
    layers = dict(params["layers"])
    for name, stack in shape.layer_stacks.items():
        if not stack.layer.experts:
            continue
        stack_step = step[np.array([shape.moe_layers.index(n) for n in stack.layer_indices])]

        def moved_bias(path: Any, value: Array, stack_step: Array = stack_step) -> Array:
            return value + stack_step.astype(value.dtype) if _is_selection_bias(path) else value

        layers[name] = jax.tree_util.tree_map_with_path(moved_bias, layers[name])
    return {**params, "layers": layers}


def with_frozen_biases(updates: Params) -> Params:
    """Optimizer updates with zeros for parameters without gradient: weight decay may not move them.

    These are selection biases, and the indexers of sparse attention.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, u: jnp.zeros_like(u) if _has_no_gradient(path) else u, updates
    )


def _has_no_gradient(path: Any) -> bool:
    return _is_selection_bias(path) or any(getattr(key, "key", "") == INDEXER for key in path)


def _is_selection_bias(path: Any) -> bool:
    return getattr(path[-1], "key", "") == SELECTION_BIAS
