"""Routers of experts in scoring and update: which experts they follow, and what is learned of them.

A router that chooses other experts than the engine's did trains on another network than the one
that sampled. So the engine's routes can be followed instead of its own ("rollout", known as R3),
or those of the first scoring pass ("scoring", R2). Gradients reach routers through the weights of
the experts they follow.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algorithms.aggregation import minibatch_denominators
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.learner import RouterConfig, RouterLossConfig
from jaxrl_llm.data.packing import Microbatch
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.router import Routed, Routing
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.types import Rollouts

Metrics = dict[str, Float[Array, ""]]

SELECTION_BIAS = "selection_bias"  # the name of a parameter that no gradient reaches


class RouteError(UserError, ValueError):
    """Samples do not say which experts their tokens visited."""


def _replay(router: RouterLossConfig) -> str:
    return router.replay if isinstance(router, RouterConfig) else "off"


def check(router: RouterLossConfig, shape: Shape) -> None:
    """Raises a ConfigError for settings that a model of this shape cannot follow."""
    experts = shape.experts
    if _replay(router) != "off" and experts is None:
        raise ConfigError(
            f"config.router.replay: {_replay(router)!r}, but the model has no experts; use 'off'"
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


def told(
    router: RouterLossConfig, microbatch: Microbatch, response_mask: Bool[Array, "B T"]
) -> Routing:
    """Returns what routers are told in an update; tokens of responses are counted."""
    counted = microbatch.packed(response_mask) != 0
    of_sequence = microbatch.segment_ids[..., None] == 1 + microbatch.sequences
    return Routing(
        counted,
        given=microbatch.routes if microbatch.routes.shape[-1] else None,
        follows=_replay(router) != "compare",
        sequences=of_sequence if router.balance_coef else None,
    )


def penalty(
    router: RouterLossConfig, routed: Routed | None, mask: Bool[Array, "B T"]
) -> tuple[Float[Array, ""] | float, dict[str, Any]]:
    """Returns a microbatch's share of the routers' losses, and sums for `metrics`.

    `balance_coef` times the mean over sequences and layers of the balance loss
    (arXiv:2412.19437, Eq. 17 to 20, 1 where all experts are chosen alike), plus `z_coef` times the
    mean over tokens and layers of the squared log of the sum of exp(logits) (arXiv:2202.08906,
    Eq. 5). `mask` has the counted tokens of the whole minibatch.
    """
    if routed is None or routed.load is None:
        return 0.0, {}
    assert routed.squares is not None and routed.balance is not None
    counts, layers = minibatch_denominators(mask), routed.load.shape[0]
    balance = routed.balance.sum() / (counts.sequences * layers)
    squares = routed.squares.sum() / (counts.tokens * layers)
    sums = jax.lax.stop_gradient((routed._replace(chosen=jnp.zeros(())), balance, squares))
    return router.balance_coef * balance + router.z_coef * squares, {"routers": sums}


def metrics(router: RouterLossConfig, sums: tuple[Routed, Array, Array]) -> Metrics:
    """Returns the numbers of a minibatch from its `penalty` sums.

    Loads are relative to the mean load of a layer: `router/load/E` is that of expert E, mean of the
    layers; `router/max_vio` the largest minus 1 (arXiv:2408.15664, Eq. 4), mean of the layers;
    `router/idle_experts` the share of experts without a token. `router/equal_routes` is the share
    of tokens and layers of which the router's own choice is the experts given.
    """
    routed, balance, squares = sums
    assert routed.load is not None and routed.given is not None and routed.equal is not None
    shares = routed.load / jnp.maximum(routed.load.mean(-1, keepdims=True), 1e-9)
    found = {
        "router/max_vio": (shares.max(-1) - 1.0).mean(),
        "router/max_vio/max": shares.max() - 1.0,
        "router/idle_experts": (shares == 0).mean(),
        "router/z_loss": squares,
        **{f"router/load/{e:03d}": share for e, share in enumerate(shares.mean(0))},
    }
    if router.balance_coef:
        found["router/balance_loss"] = balance
    if _replay(router) != "off":
        found["router/equal_routes"] = routed.equal.sum() / jnp.maximum(routed.given.sum(), 1.0)
    return found


def rebalanced(
    router: RouterLossConfig,
    shape: Shape,
    params: Params,
    load: Float[Array, "layers E"],
    skipped: Bool[Array, ""],
) -> Params:
    """Returns parameters whose selection biases have moved towards an even load.

    By `bias_rate`, up for experts with less than the mean load and down for those with more
    (arXiv:2408.15664, Algorithm 1).
    """
    if not router.bias_rate:
        return params
    away = jnp.sign(load.mean(-1, keepdims=True) - load)
    step = jnp.where(skipped, 0.0, router.bias_rate * away)
    layers = dict(params["layers"])
    for name, stack in shape.stacks.items():
        if not stack.layer.experts:
            continue
        mine = step[np.array([shape.with_experts.index(n) for n in stack.numbers])]

        def moved(path: Any, value: Array, mine: Array = mine) -> Array:
            return value + mine.astype(value.dtype) if _is_selection_bias(path) else value

        layers[name] = jax.tree_util.tree_map_with_path(moved, layers[name])
    return {**params, "layers": layers}


def without_gradient(updates: Params) -> Params:
    """Returns an optimizer's updates, zero for selection biases: no decay may move them."""
    return jax.tree_util.tree_map_with_path(
        lambda path, u: jnp.zeros_like(u) if _is_selection_bias(path) else u, updates
    )


def _is_selection_bias(path: Any) -> bool:
    return getattr(path[-1], "key", "") == SELECTION_BIAS
