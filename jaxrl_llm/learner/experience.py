"""From scored sequences to what the update learns from.

`predictor` asks the models, `estimate` turns rewards into advantages, `assemble` and
`minibatches` lay the result out.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_llm.algorithms import advantages, corrections, kl, safe_rlhf, shaping
from jaxrl_llm.algorithms.masked import masked_mean
from jaxrl_llm.config import Config
from jaxrl_llm.data import packing
from jaxrl_llm.learner import batches
from jaxrl_llm.learner.batches import Microbatch, Plan
from jaxrl_llm.learner.roles import LearnerState, Roles
from jaxrl_llm.learner.update import is_on_policy, sequence_scores, token_statistics, token_values
from jaxrl_llm.metrics.clock import Clock
from jaxrl_llm.models import heads, lora
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.sharding import pools, resting
from jaxrl_llm.types import Estimates, Minibatch, Predictions, Rewards, Rollouts

# What the models say.


def scoring_programs(roles: Roles):
    """Returns what asks a policy and what asks a critic about all tokens of a step, both jitted.

    `of_policy(params, tokens, lengths, plan, *, entropy)` gives log-probs, entropies and
    sums of squared probabilities, `of_critic(params, tokens, lengths, plan)` values, [B, T] each.
    """
    config = roles.config
    statistics = functools.partial(
        token_statistics,
        temperature=config.rollout.temperature or 1.0,
        chunk=config.model.vocab_chunk,
    )

    @functools.partial(jax.jit, static_argnames="entropy")
    def of_policy(params, tokens, lengths, plan: Plan, *, entropy: heads.Entropy):
        num_sequences, width = tokens.shape

        def ask(microbatch: Microbatch):
            packed = statistics(roles.policy, params, tokens, microbatch, entropy=entropy)
            return tuple(microbatch.unpacked(p, lengths, width) for p in packed)

        return batches.collect(plan, ask, num_sequences, width)

    @jax.jit
    def of_critic(params, tokens, lengths, plan: Plan):
        num_sequences, width = tokens.shape

        def ask(microbatch: Microbatch):
            values = token_values(roles.value, params, tokens, microbatch)
            return microbatch.unpacked(values, lengths, width)

        return batches.collect(plan, ask, num_sequences, width)

    return of_policy, of_critic


def predictor(roles: Roles) -> Callable[[LearnerState, Rollouts, Clock], Predictions]:
    """Returns `predict(state, rollouts, clock) -> Predictions`, each model asked in one pass.

    The policy is not asked where the update itself will say (`update.is_on_policy`): the engine's
    log-probs then stand in its place, and nothing reads them. Models on different devices answer
    at the same time: all are asked before any answer is brought to the policy's devices. The
    clock times them apart: `old_log_prob`, `ref`, `values`.
    """
    algorithm = roles.config.algorithm
    on_policy = is_on_policy(roles.config)
    of_policy, of_critic = scoring_programs(roles)

    def predict(state: LearnerState, rollouts: Rollouts, clock: Clock) -> Predictions:
        plan = _whole_step(roles, rollouts)
        tokens, lengths = rollouts.tokens, rollouts.lengths
        mask = rollouts.response_mask
        zeros = jnp.zeros(tokens.shape, jnp.float32)
        policy = lora.joined(roles.base_params, state.policy.params)
        old, entropies, squares = jnp.asarray(rollouts.rollout_log_probs), zeros, zeros
        if not on_policy:
            with jax.set_mesh(roles.mesh), clock("old_log_prob") as watch:
                found, entropies, squares = watch(
                    of_policy(policy, tokens, lengths, plan, entropy="value")
                )
            old = found if algorithm.old_log_probs == "recompute" else old
        reference = old
        if roles.reference_params:
            with jax.set_mesh(roles.meshes["reference"]), clock("ref") as watch:
                frozen = resting.working(roles.reference_params)
                reference, _, _ = watch(of_policy(frozen, tokens, lengths, plan, entropy="none"))
        critics = [zeros, zeros]
        for i, role in enumerate((state.critic, state.cost_critic)):
            if role.params:
                with jax.set_mesh(roles.meshes["critic"]), clock("values") as watch:
                    critics[i] = watch(of_critic(role.params, tokens, lengths, plan))
        answers = Predictions(
            old_log_probs=old,
            ref_log_probs=reference,
            entropies=entropies,
            sum_squared_probs=squares,
            values=critics[0],
            cost_values=critics[1],
        )
        brought = pools.move(answers, mesh_lib.replicated(roles.mesh))
        with jax.set_mesh(roles.mesh):
            return jax.tree.map(lambda values: jnp.where(mask, values, 0.0), brought)

    return predict


def model_scorers(roles: Roles) -> dict[str, Callable[[Rollouts], np.ndarray]]:
    """Returns, by name, what each reward or cost model says of whole sequences, [B] each."""

    def scorer(name: str):
        network, params = roles.scorers[name].network, roles.scorers[name].params
        mesh = roles.meshes["reward"]

        @functools.partial(jax.jit, out_shardings=mesh_lib.replicated(mesh))
        def of_sequences(tokens, lengths, plan: Plan):
            num_sequences, _ = tokens.shape

            def ask(microbatch: Microbatch):
                return sequence_scores(network, params, tokens, lengths, microbatch)[:, None]

            return batches.collect(plan, ask, num_sequences, 1)[:, 0]

        def score(rollouts: Rollouts) -> np.ndarray:
            plan = _whole_step(roles, rollouts)
            with jax.set_mesh(mesh):
                return np.asarray(of_sequences(rollouts.tokens, rollouts.lengths, plan))

        return score

    return {name: scorer(name) for name in roles.scorers}


def _whole_step(roles: Roles, rollouts: Rollouts) -> Plan:
    return _plan(roles, rollouts, np.arange(len(rollouts.lengths)), _common(rollouts))


def _common(rollouts: Rollouts) -> packing.Beginnings:
    return packing.beginnings(
        rollouts.tokens, rollouts.lengths, rollouts.response_mask, rollouts.group_ids
    )


def _plan(
    roles: Roles, rollouts: Rollouts, chosen: Int[np.ndarray, " b"], common: packing.Beginnings
) -> Plan:
    # Choosing tokens of a row would gather over a dim that the sequence axis splits.
    split = roles.mesh.shape["sequence"] > 1
    return roles.layout.plan(
        rollouts.lengths,
        chosen,
        width=rollouts.tokens.shape[1],
        scored=batches.EVERY_TOKEN if split else rollouts.response_mask,
        common=common,
    )


# From rewards to advantages.


def estimator(roles: Roles):
    """Returns `estimate(state, rollouts, rewards, predictions)`, compiled once.

    It returns the estimates, the state with its KL coefficient and multiplier moved on, and
    metrics. No model runs there.
    """
    compiled = jax.jit(
        functools.partial(_estimate, roles.config), out_shardings=mesh_lib.replicated(roles.mesh)
    )

    def estimate(
        state: LearnerState, rollouts: Rollouts, rewards: Rewards, predictions: Predictions
    ) -> tuple[Estimates, LearnerState, dict[str, Float[Array, ""]]]:
        names = sorted(rewards.terms)
        arrays = {
            "response_mask": rollouts.response_mask,
            "group_ids": rollouts.group_ids,
            "rollout_log_probs": rollouts.rollout_log_probs,
            "scores": rewards.scores,
            "costs": rewards.costs,
            "baselines": rewards.baselines,
            "term_rewards": np.stack([rewards.terms[n] for n in names]),
            "term_weights": np.stack([rewards.weights[n] for n in names]),
        }
        estimates, kl_coef, log_multiplier, metrics = compiled(
            state.kl_coef, state.log_multiplier, predictions, arrays
        )
        state = dataclasses.replace(state, kl_coef=kl_coef, log_multiplier=log_multiplier)
        return estimates, state, metrics

    return estimate


def _estimate(config: Config, kl_coef, log_multiplier, predictions: Predictions, arrays):
    algorithm = config.algorithm
    mask = arrays["response_mask"]
    weights, loss_mask, metrics = corrections.correct(
        algorithm, predictions.old_log_probs, arrays["rollout_log_probs"], mask
    )
    log_probs_of_both = predictions.old_log_probs, predictions.ref_log_probs
    shaped, current_kl = shaping.kl_shaped(
        algorithm, kl_coef, arrays["scores"], *log_probs_of_both, mask
    )
    metrics["actor/entropy"] = masked_mean(predictions.entropies, mask)
    if is_on_policy(config):
        metrics = {}  # all of them about the policy's log-probs, which the update will find
    if algorithm.kl_in == "reward":
        metrics["actor/reward_kl_penalty"] = current_kl
        metrics["actor/reward_kl_penalty_coeff"] = kl_coef
    available = {
        "rewards": shaped,
        "values": predictions.values,
        "response_mask": mask,  # what a rejected token earned still counts
        "old_log_probs": predictions.old_log_probs,
        "sum_squared_probs": predictions.sum_squared_probs,
        "correction_weights": weights,
        "group_ids": arrays["group_ids"],
        "baselines": arrays["baselines"],
        "term_rewards": arrays["term_rewards"],
        "term_weights": arrays["term_weights"],
        "gamma": algorithm.gamma,
        "gae_lambda": algorithm.gae_lambda,
        "group_std": algorithm.group_std,
    }
    advantage, returns = advantages.estimate(algorithm, **available)
    cost_returns = jnp.zeros_like(returns)
    before = log_multiplier
    if algorithm.safe:
        costs = safe_rlhf.shaped_costs(
            algorithm, kl_coef, arrays["costs"], *log_probs_of_both, mask
        )
        metrics["safe/cost"] = arrays["costs"].mean()
        log_multiplier = safe_rlhf.next_log_multiplier(
            algorithm, log_multiplier, metrics["safe/cost"]
        )
        metrics["safe/multiplier"] = jnp.exp(log_multiplier)
        advantage, returns, cost_returns = safe_rlhf.safe_advantages(
            algorithm,
            log_multiplier,
            shaped,
            costs,
            predictions.values,
            predictions.cost_values,
            mask,
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
    # They are part of the state: once NaN they would stay it.
    next_coef = jnp.where(jnp.isnan(next_coef), kl_coef, next_coef)
    log_multiplier = jnp.where(jnp.isnan(log_multiplier), before, log_multiplier)
    return estimates, next_coef, log_multiplier, metrics


# For the update.


def assemble(rollouts: Rollouts, predictions: Predictions, estimates: Estimates) -> Minibatch:
    """Returns all sequences of the step, ready for the loss."""
    return Minibatch(
        tokens=jnp.asarray(rollouts.tokens),
        lengths=jnp.asarray(rollouts.lengths),
        response_mask=jnp.asarray(rollouts.response_mask),
        loss_mask=estimates.loss_mask,
        old_log_probs=predictions.old_log_probs,
        ref_log_probs=predictions.ref_log_probs,
        rollout_log_probs=jnp.asarray(rollouts.rollout_log_probs),
        advantages=estimates.advantages,
        returns=estimates.returns,
        values=predictions.values,
        cost_returns=estimates.cost_returns,
        cost_values=predictions.cost_values,
        correction_weights=estimates.correction_weights,
    )


def minibatches(
    roles: Roles, rollouts: Rollouts, key: jax.Array
) -> Iterator[tuple[Plan, jax.Array]]:
    """Returns plan and key of each update: every epoch, all sequences in a new order.

    The orders are drawn by this call, on a device: called before models are asked, none of the
    plans, each made when its update is due, waits for them.
    """
    config = roles.config
    count = len(rollouts.lengths)
    keys = [jax.random.fold_in(key, epoch) for epoch in range(config.trainer.epochs)]
    orders = [jax.random.permutation(key, count) for key in keys]

    def plans() -> Iterator[tuple[Plan, jax.Array]]:
        common = _common(rollouts)  # reads every token: once a step, not once an update
        for key, order in zip(keys, orders, strict=True):
            for start in range(0, count, config.minibatch_size):
                chosen = np.sort(np.asarray(order)[start : start + config.minibatch_size])
                yield _plan(roles, rollouts, chosen, common), jax.random.fold_in(key, start)

    return plans()
