"""From rewards to advantages: KL shaping, corrections, advantages. No model runs here."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algorithms import (
    advantages,
    corrections,
    kl,
    losses,
    masked,
    needs,
    safe_rlhf,
    shaping,
)
from jaxrl_llm.config import RLConfig, recipes
from jaxrl_llm.learner.predict import is_on_policy
from jaxrl_llm.learner.weights import LearnerState
from jaxrl_llm.metrics.clock import Clock
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.sharding import telling
from jaxrl_llm.types import Estimates, Predictions, Rewards, Rollouts


def estimator(config: RLConfig, mesh: Mesh):
    """Returns `(state, rollouts, rewards, predictions, clock) -> (estimates, state, metrics)`.

    The state has the KL coefficient and the multiplier of the next step.
    """
    replicated = mesh_lib.replicated(mesh)
    compiled = jax.jit(functools.partial(_estimate, config), out_shardings=replicated)

    def estimate(
        state: LearnerState,
        rollouts: Rollouts,
        rewards: Rewards,
        predictions: Predictions,
        clock: Clock,
    ) -> tuple[Estimates, LearnerState, dict[str, Float[Array, ""]]]:
        names = sorted(rewards.terms)
        shape = len(names), len(rewards.scores)
        kept = rewards.kept
        arrays = {
            # A row without response tokens is a member of no group, and has no loss.
            "response_mask": rollouts.response_mask & kept[:, None],
            "group_ids": rollouts.group_ids,
            "rollout_log_probs": rollouts.rollout_log_probs,
            "scores": rewards.scores,
            "costs": _costs_of_kept(rewards.costs, kept),
            "baselines": rewards.baselines,
            "term_rewards": np.reshape([rewards.terms[n] for n in names], shape),
            "term_weights": np.reshape([rewards.weights[n] for n in names], shape),
        }
        if rewards.turn_rewards is not None:
            arrays["turn_rewards"] = rewards.turn_rewards
        last = rollouts.last_rows
        if config.algorithm.mask_truncated:
            arrays["truncated"] = rollouts.truncated
        if (last != np.arange(len(last))).any():  # an episode has several rows
            arrays["last_rows"] = last
        with clock("adv"):
            estimates, kl_coef, log_multiplier, metrics = compiled(
                state.kl_coef, state.log_multiplier, predictions, arrays
            )
        state = dataclasses.replace(state, kl_coef=kl_coef, log_multiplier=log_multiplier)
        return estimates, state, metrics

    return estimate


def _costs_of_kept(
    costs: Float[np.ndarray, " B"], kept: Bool[np.ndarray, " B"]
) -> Float[np.ndarray, " B"]:
    """The costs, with the mean of the others in rows that are left out: the mean stays theirs."""
    if kept.all() or not kept.any():
        return costs
    return np.where(kept, costs, costs[kept].mean()).astype(costs.dtype)


def signal_check(config: RLConfig) -> Callable[[Mapping[str, float], Estimates], bool]:
    """Returns what tells, from metrics of rewards and estimates, if a step can teach anything.

    Not if all rows are left out, nor if all groups have equal scores, so that all advantages are
    zero, and nothing else in the losses has a gradient, nor if every response is masked as
    truncated: an update would only be momentum and weight decay.
    """
    algorithm = config.algorithm
    advantages_alone = losses.follows_advantages(algorithm) and not needs.of(algorithm).critic
    advantages_alone &= not config.distillation.teachers

    def has_signal(of_rewards: Mapping[str, float], estimates: Estimates) -> bool:
        if of_rewards.get("reward/left_out_share") == 1.0:
            return False
        if algorithm.mask_truncated and not telling.fetched(jnp.any(estimates.loss_mask)):
            return False
        uniform = of_rewards["training/groups/uniform_share"] == 1.0
        return not (advantages_alone and uniform) or bool(
            telling.fetched(jnp.any(estimates.advantages != 0))
        )

    return has_signal


def _estimate(config: RLConfig, kl_coef, log_multiplier, predictions: Predictions, arrays):
    algorithm = config.algorithm
    mask = arrays["response_mask"]
    old, reference = predictions.old_log_probs, predictions.ref_log_probs
    weights, loss_mask, metrics = corrections.correct(
        algorithm, old, arrays["rollout_log_probs"], mask
    )
    by_turn = arrays.get("turn_rewards", jnp.zeros_like(old))
    scores = arrays["scores"] - by_turn.sum(1)  # the rest comes at the end
    shaped, current_kl = shaping.kl_shaped(algorithm, kl_coef, scores, old, reference, mask)
    shaped += by_turn
    metrics["actor/entropy"] = masked.mean(predictions.entropies, mask)
    if is_on_policy(config):
        metrics = {}  # they need the policy's log-probs, which the update computes
    if algorithm.mask_truncated:
        truncated = arrays["truncated"]
        loss_mask &= ~truncated[:, None]
        metrics["training/masked_truncated_share"] = truncated.astype(jnp.float32).mean()
    if algorithm.kl_in == "reward":
        metrics["actor/reward_kl_penalty"] = current_kl
        metrics["actor/reward_kl_penalty_coeff"] = kl_coef
    available = {
        "rewards": shaped,
        "values": predictions.values,
        "response_mask": mask,  # what a rejected token earned still counts
        "old_log_probs": old,
        "sum_squared_probs": predictions.sum_squared_probs,
        "correction_weights": weights,
        "group_ids": arrays["group_ids"],
        "baselines": arrays["baselines"],
        "term_rewards": arrays["term_rewards"],
        "term_weights": arrays["term_weights"],
    }
    split = "last_rows" in arrays and algorithm.advantage in recipes.GROUP_ADVANTAGES
    if split:  # an episode counts once in its group
        is_last = arrays["last_rows"] == jnp.arange(len(scores))
        available["response_mask"] = mask & is_last[:, None]
    advantage, returns = advantages.estimate(algorithm, **available)
    if split:
        counts = jnp.maximum(available["response_mask"].sum(1), 1)
        of_rows = (advantage.sum(1) / counts)[arrays["last_rows"]]
        earlier = jnp.where(mask & ~is_last[:, None], of_rows[:, None], 0.0)
        advantage, returns = advantage + earlier, returns + earlier
    cost_returns = jnp.zeros_like(returns)
    before = log_multiplier
    if algorithm.safe:
        # The KL raises costs where it lowers rewards.
        costs, _ = shaping.kl_shaped(algorithm, -kl_coef, arrays["costs"], old, reference, mask)
        cost = metrics["safe/cost"] = arrays["costs"].mean()
        log_multiplier = safe_rlhf.next_log_multiplier(algorithm, log_multiplier, cost)
        metrics["safe/multiplier"] = jnp.exp(log_multiplier)
        values = predictions.values, predictions.cost_values
        advantage, returns, cost_returns = safe_rlhf.safe_advantages(
            algorithm, log_multiplier, shaped, costs, *values, mask
        )
    estimates = Estimates(
        shaped_rewards=shaped,
        advantages=jnp.where(loss_mask, advantage, 0.0),
        returns=jnp.where(loss_mask, returns, 0.0),
        cost_returns=jnp.where(loss_mask, cost_returns, 0.0),
        loss_mask=loss_mask,
        correction_weights=weights,
    )
    next_coef = kl.next_kl_coef(kl_coef, current_kl, mask.shape[0], algorithm)
    # They are part of the state: a NaN would stay for ever.
    next_coef = jnp.where(jnp.isnan(next_coef), kl_coef, next_coef)
    log_multiplier = jnp.where(jnp.isnan(log_multiplier), before, log_multiplier)
    return estimates, next_coef, log_multiplier, metrics
