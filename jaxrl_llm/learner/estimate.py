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
    requirements,
    safe_rlhf,
    selection,
    shaping,
)
from jaxrl_llm.config import RLConfig, recipes
from jaxrl_llm.learner.predict import scores_policy
from jaxrl_llm.learner.weights import LearnerState
from jaxrl_llm.metrics.timers import Clock
from jaxrl_llm.sharding import kv_store_broadcast
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.types import Estimates, Predictions, Rewards, Rollouts


def estimator(config: RLConfig, mesh: Mesh):
    """The function `(state, rollouts, rewards, predictions, clock) -> (estimates, state, metrics)`.

    The new state has the KL coefficient and the cost multiplier of the next step.
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
        term_shape = len(names), len(rewards.scores)
        is_kept = rewards.valid_rows
        arrays = {
            # A row without response tokens is a member of no group, and has no loss.
            "response_mask": rollouts.response_mask & is_kept[:, None],
            "group_ids": rollouts.comparison_ids,  # a role is compared with itself
            "rollout_log_probs": rollouts.rollout_log_probs,
            "scores": rewards.scores,
            "costs": _costs_with_mean_fill(rewards.costs, is_kept),
            "baselines": rewards.baselines,
            "term_rewards": np.reshape([rewards.terms[n] for n in names], term_shape),
            "term_weights": np.reshape([rewards.weights[n] for n in names], term_shape),
        }
        if rewards.turn_rewards is not None:
            arrays["turn_rewards"] = rewards.turn_rewards
        last_rows = rollouts.last_rows
        if config.algorithm.mask_truncated:
            arrays["truncated"] = rollouts.truncated
        if (last_rows != np.arange(len(last_rows))).any():  # an episode has several rows
            arrays["last_rows"] = last_rows
        with clock("adv"):
            estimates, kl_coef, log_multiplier, metrics = compiled(
                state.kl_coef, state.log_multiplier, predictions, arrays
            )
        state = dataclasses.replace(state, kl_coef=kl_coef, log_multiplier=log_multiplier)
        return estimates, state, metrics

    return estimate


def _costs_with_mean_fill(
    costs: Float[np.ndarray, " B"], kept: Bool[np.ndarray, " B"]
) -> Float[np.ndarray, " B"]:
    """Costs with the mean of the kept rows filled in for the others, which leaves it unchanged."""
    if kept.all() or not kept.any():
        return costs
    return np.where(kept, costs, costs[kept].mean()).astype(costs.dtype)


def signal_check(config: RLConfig) -> Callable[[Mapping[str, float], Estimates], bool]:
    """A predicate on reward metrics and estimates: whether a step has any learning signal.

    False if all rows are left out; if all groups have equal scores, so that all advantages are
    zero, and nothing else in the losses has a gradient; or if every response is masked as
    truncated or of a uniform group. An update would only be momentum and weight decay.
    """
    algorithm = config.algorithm
    needs_advantages = (
        losses.follows_advantages(algorithm) and not requirements.requirements(algorithm).critic
    )
    needs_advantages &= not config.distillation.teachers

    def has_signal(reward_metrics: Mapping[str, float], estimates: Estimates) -> bool:
        if reward_metrics.get("reward/left_out_share") == 1.0:
            return False
        masks_rows = algorithm.mask_truncated or algorithm.mask_uniform_groups
        if masks_rows and not kv_store_broadcast.device_get(jnp.any(estimates.loss_mask)):
            return bool(algorithm.observation_coef)
        is_uniform = reward_metrics["training/groups/uniform_share"] == 1.0
        return not (needs_advantages and is_uniform) or bool(
            kv_store_broadcast.device_get(jnp.any(estimates.advantages != 0))
        )

    return has_signal


def _estimate(config: RLConfig, kl_coef, log_multiplier, predictions: Predictions, arrays):
    algorithm = config.algorithm
    mask = arrays["response_mask"]
    old, reference = predictions.old_log_probs, predictions.ref_log_probs
    weights, loss_mask, metrics = corrections.correct(
        algorithm, old, arrays["rollout_log_probs"], mask
    )
    turn_rewards = arrays.get("turn_rewards", jnp.zeros_like(old))
    scores = arrays["scores"] - turn_rewards.sum(1)  # the rest is earned at the last token
    shaped, current_kl = shaping.kl_shaped(algorithm, kl_coef, scores, old, reference, mask)
    shaped += turn_rewards
    metrics["actor/entropy"] = masked.mean(predictions.entropies, mask)
    if not scores_policy(config):
        metrics = {}  # need the policy's log-probs, which the update computes
    if algorithm.mask_truncated:
        truncated = arrays["truncated"]
        loss_mask &= ~truncated[:, None]
        metrics["training/masked_truncated_share"] = truncated.astype(jnp.float32).mean()
    if algorithm.kl_in == "reward":
        metrics["actor/reward_kl_penalty"] = current_kl
        metrics["actor/reward_kl_penalty_coeff"] = kl_coef
    inputs = {
        "rewards": shaped,
        "values": predictions.values,
        "response_mask": mask,  # what a rejected token earned still counts
        "old_log_probs": old,
        "ref_log_probs": reference,
        "sum_squared_probs": predictions.sum_squared_probs,
        "correction_weights": weights,
        "group_ids": arrays["group_ids"],
        "baselines": arrays["baselines"],
        "term_rewards": arrays["term_rewards"],
        "term_weights": arrays["term_weights"],
    }
    if algorithm.mask_uniform_groups:
        ends = arrays.get("last_rows", jnp.arange(len(scores))) == jnp.arange(len(scores))
        members = mask.any(1) & ends  # an episode counts once in its group
        uniform = shaping.uniform_groups(arrays["scores"], arrays["group_ids"], members)
        loss_mask &= ~uniform[:, None]
        metrics["training/masked_uniform_share"] = uniform.astype(jnp.float32).mean()
    is_split = "last_rows" in arrays and algorithm.advantage in recipes.GROUP_ADVANTAGES
    if is_split:  # an episode counts once in its group
        is_last = arrays["last_rows"] == jnp.arange(len(scores))
        inputs["response_mask"] = mask & is_last[:, None]
    advantage, returns = advantages.estimate(algorithm, **inputs)
    if is_split:
        counts = jnp.maximum(inputs["response_mask"].sum(1), 1)
        last_row_advantage = (advantage.sum(1) / counts)[arrays["last_rows"]]
        earlier_rows = jnp.where(mask & ~is_last[:, None], last_row_advantage[:, None], 0.0)
        advantage, returns = advantage + earlier_rows, returns + earlier_rows
    if algorithm.entropy_share < 1:
        chosen = selection.high_entropy_tokens(
            predictions.entropies, loss_mask, algorithm.entropy_share
        )
        advantage = jnp.where(chosen, advantage, 0.0)
    cost_returns = jnp.zeros_like(returns)
    old_log_multiplier = log_multiplier
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
    # Both are part of the state: a NaN would stay for ever.
    next_coef = jnp.where(jnp.isnan(next_coef), kl_coef, next_coef)
    log_multiplier = jnp.where(jnp.isnan(log_multiplier), old_log_multiplier, log_multiplier)
    return estimates, next_coef, log_multiplier, metrics
