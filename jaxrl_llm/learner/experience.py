"""What a step learns from: sampled and scored sequences, predictions, advantages.

`collect` samples and scores, `predictor` asks the models, `estimate` turns rewards into
advantages, `assemble` and `minibatches` lay the result out for the update.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_llm.algorithms import advantages, corrections, kl, safe_rlhf, shaping
from jaxrl_llm.algorithms.masked import masked_mean
from jaxrl_llm.config import Config
from jaxrl_llm.data.datasets import PromptIterator
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner import batches
from jaxrl_llm.learner.batches import Microbatch, Plan
from jaxrl_llm.learner.roles import LearnerState, Roles
from jaxrl_llm.learner.update import token_statistics, token_values
from jaxrl_llm.models import heads
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout import agent
from jaxrl_llm.types import Estimates, Minibatch, Predictions, Rewards, Rollouts

ScoreFn = Callable[[Rollouts], Rewards]


class SamplingError(UserError, RuntimeError):
    """Dynamic sampling did not find enough groups to learn from."""


# Sample and score.


def collect(
    roles: Roles,
    rollout_params: Params,
    prompts: PromptIterator,
    score: ScoreFn,
    key: jax.Array,
) -> tuple[Rollouts, Rewards]:
    """Returns the sequences of a step and their rewards.

    Where the algorithm asks for it: one greedy sample a prompt in the same wave, which becomes
    its baseline (ReMax, arXiv:2310.10505); groups whose rewards are all equal dropped and
    others sampled in their place, wave after wave (DAPO, arXiv:2503.14476, Sec. 3.2); a soft
    penalty on length (same, Eq. 13).

    Raises:
      SamplingError: If `max_sampling_waves` did not give enough groups.
    """
    config = roles.config
    algorithm = config.algorithm
    sampled = agent.sampling_params(config.rollout, roles.eos_tokens)
    samples = [sampled] * algorithm.samples_per_prompt
    if algorithm.advantage == "remax":
        samples.append(dataclasses.replace(sampled, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0))

    wanted = config.trainer.prompts_per_step
    kept: list[tuple[Rollouts, Rewards]] = []
    found = seen = 0
    for wave in range(algorithm.max_sampling_waves if algorithm.dynamic_sampling else 1):
        taken = prompts.take(wanted - found)
        rollouts = agent.rollout(
            roles.engine,
            rollout_params,
            roles.tokenizer,
            taken,
            samples,
            jax.random.fold_in(key, wave),
        )
        rewards = score(rollouts)
        if algorithm.advantage == "remax":
            rollouts, rewards = _split_baseline(rollouts, rewards, len(samples))
        seen += len(taken.prompts)
        if algorithm.dynamic_sampling:
            uniform = np.asarray(shaping.uniform_groups(rewards.scores, rollouts.group_ids))
            rollouts, rewards = select(rollouts, rewards, np.flatnonzero(~uniform))
        kept.append((rollouts, rewards))
        found += len(rollouts.lengths) // algorithm.samples_per_prompt
        if found == wanted:
            break
    else:
        if found < wanted:
            raise SamplingError(
                f"config.algorithm.max_sampling_waves: {seen} prompts in"
                f" {algorithm.max_sampling_waves} waves gave {found} of the {wanted} groups whose"
                " rewards differ; the task is too easy or too hard for this policy, raise the"
                " number of waves or samples_per_prompt, or set dynamic_sampling=False"
            )
    rollouts, rewards = _concatenate(kept)
    return rollouts, _with_overlong_penalty(config, rollouts, rewards)


def select(rollouts: Rollouts, rewards: Rewards, rows: np.ndarray) -> tuple[Rollouts, Rewards]:
    """Returns some rows of both; the prompts stay."""
    pick = lambda mapping: {k: v[rows] for k, v in mapping.items()}  # noqa: E731
    return (
        dataclasses.replace(
            rollouts,
            tokens=rollouts.tokens[rows],
            response_mask=rollouts.response_mask[rows],
            rollout_log_probs=rollouts.rollout_log_probs[rows],
            lengths=rollouts.lengths[rows],
            group_ids=rollouts.group_ids[rows],
            stopped=rollouts.stopped[rows],
            responses=tuple(rollouts.responses[i] for i in rows),
        ),
        Rewards(
            scores=rewards.scores[rows],
            terms=pick(rewards.terms),
            weights=pick(rewards.weights),
            costs=rewards.costs[rows],
            baselines=rewards.baselines[rows],
            details=tuple(rewards.details[i] for i in rows),
            num_failures=rewards.num_failures,
        ),
    )


def _split_baseline(rollouts: Rollouts, rewards: Rewards, n: int) -> tuple[Rollouts, Rewards]:
    """Takes the greedy sample, the last of each group of `n`, out and makes it the baseline."""
    is_greedy = np.arange(len(rollouts.lengths)) % n == n - 1
    baselines = np.repeat(rewards.scores[is_greedy], n)
    rewards = dataclasses.replace(rewards, baselines=baselines)
    return select(rollouts, rewards, np.flatnonzero(~is_greedy))


def _concatenate(waves: list[tuple[Rollouts, Rewards]]) -> tuple[Rollouts, Rewards]:
    if len(waves) == 1:
        return waves[0]
    width = max(rollouts.tokens.shape[1] for rollouts, _ in waves)
    first_prompt = np.cumsum([0, *(len(rollouts.prompts) for rollouts, _ in waves)])

    def wide(name: str):
        arrays = [getattr(rollouts, name) for rollouts, _ in waves]
        return np.concatenate([np.pad(a, ((0, 0), (0, width - a.shape[1]))) for a in arrays])

    def joined(name: str, i: int):
        return np.concatenate([getattr(wave[i], name) for wave in waves])

    def merged(name: str):
        mappings = [getattr(rewards, name) for _, rewards in waves]
        return {k: np.concatenate([m[k] for m in mappings]) for k in mappings[0]}

    return (
        Rollouts(
            tokens=wide("tokens"),
            response_mask=wide("response_mask"),
            rollout_log_probs=wide("rollout_log_probs"),
            lengths=joined("lengths", 0),
            group_ids=np.concatenate(
                [r.group_ids + start for (r, _), start in zip(waves, first_prompt, strict=False)]
            ).astype(np.int32),
            stopped=joined("stopped", 0),
            prompts=tuple(p for rollouts, _ in waves for p in rollouts.prompts),
            responses=tuple(t for rollouts, _ in waves for t in rollouts.responses),
        ),
        Rewards(
            scores=joined("scores", 1),
            terms=merged("terms"),
            weights=merged("weights"),
            costs=joined("costs", 1),
            baselines=joined("baselines", 1),
            details=tuple(d for _, rewards in waves for d in rewards.details),
            num_failures=sum(rewards.num_failures for _, rewards in waves),
        ),
    )


def _with_overlong_penalty(config: Config, rollouts: Rollouts, rewards: Rewards) -> Rewards:
    if not config.algorithm.overlong_buffer_tokens:
        return rewards
    penalty = np.asarray(
        shaping.overlong_penalty(
            config.algorithm,
            config.rollout.max_response_tokens,
            rollouts.response_mask.sum(1),
        )
    )
    ones = np.ones_like(rewards.scores)
    return dataclasses.replace(
        rewards,
        scores=rewards.scores + penalty,
        terms={**rewards.terms, "overlong": penalty},
        weights={**rewards.weights, "overlong": ones},
    )


# What the models say.


def predictor(roles: Roles) -> Callable[[LearnerState, Rollouts], Predictions]:
    """Returns `predict(state, rollouts) -> Predictions`, each model asked in one pass."""
    config = roles.config
    algorithm = config.algorithm
    statistics = functools.partial(
        token_statistics,
        temperature=config.rollout.temperature or 1.0,
        chunk=config.model.vocab_chunk,
    )

    @functools.partial(jax.jit, static_argnames="with_entropy")
    def of_policy(params, tokens, lengths, plan: Plan, *, with_entropy: bool):
        num_sequences, width = tokens.shape

        def ask(microbatch: Microbatch):
            packed = statistics(roles.policy, params, tokens, microbatch, with_entropy=with_entropy)
            return tuple(microbatch.unpacked(p, lengths, width) for p in packed)

        return batches.collect(plan, ask, num_sequences, width)

    @jax.jit
    def of_critic(params, tokens, lengths, plan: Plan):
        num_sequences, width = tokens.shape

        def ask(microbatch: Microbatch):
            values = token_values(roles.value, params, tokens, microbatch)
            return microbatch.unpacked(values, lengths, width)

        return batches.collect(plan, ask, num_sequences, width)

    def predict(state: LearnerState, rollouts: Rollouts) -> Predictions:
        plan = _plan(roles, rollouts, np.arange(len(rollouts.lengths)))
        tokens, lengths = rollouts.tokens, rollouts.lengths
        mask = rollouts.response_mask
        inside = lambda values: jnp.where(mask, values, 0.0)  # noqa: E731
        zeros = jnp.zeros(tokens.shape, jnp.float32)
        with jax.set_mesh(roles.mesh):
            old, entropies, squares = of_policy(
                state.policy.params, tokens, lengths, plan, with_entropy=True
            )
            if algorithm.old_log_probs == "rollout":
                old = jnp.asarray(rollouts.rollout_log_probs)
            reference = old
            if roles.reference_params:
                reference, _, _ = of_policy(
                    roles.reference_params, tokens, lengths, plan, with_entropy=False
                )
            critics = [
                of_critic(role.params, tokens, lengths, plan) if role.params else zeros
                for role in (state.critic, state.cost_critic)
            ]
            return Predictions(
                old_log_probs=inside(old),
                ref_log_probs=inside(reference),
                entropies=inside(entropies),
                sum_squared_probs=inside(squares),
                values=inside(critics[0]),
                cost_values=inside(critics[1]),
            )

    return predict


def model_scorers(roles: Roles) -> dict[str, Callable[[Rollouts], np.ndarray]]:
    """Returns, by name, what each reward or cost model says of whole sequences, [B] each."""

    def scorer(name: str):
        network, params = roles.scorers[name].network, roles.scorers[name].params

        @jax.jit
        def of_sequences(tokens, lengths, plan: Plan):
            num_sequences, _ = tokens.shape

            def ask(microbatch: Microbatch):
                packed = microbatch.packed(tokens)
                hidden = network.hidden(
                    params, packed, microbatch.positions, microbatch.segment_ids
                )
                last = microbatch.starts + jnp.maximum(microbatch.take(lengths), 1) - 1
                at_end = hidden[microbatch.rows, last][:, None]
                zero = jnp.zeros_like(last)
                return heads.sequence_scores(at_end, network.head_weight(params), zero)[:, None]

            return batches.collect(plan, ask, num_sequences, 1)[:, 0]

        def score(rollouts: Rollouts) -> np.ndarray:
            plan = _plan(roles, rollouts, np.arange(len(rollouts.lengths)))
            with jax.set_mesh(roles.mesh):
                return np.asarray(of_sequences(rollouts.tokens, rollouts.lengths, plan))

        return score

    return {name: scorer(name) for name in roles.scorers}


# From rewards to advantages.


def estimate(
    config: Config,
    state: LearnerState,
    rollouts: Rollouts,
    rewards: Rewards,
    predictions: Predictions,
) -> tuple[Estimates, LearnerState, dict[str, Float[Array, ""]]]:
    """Returns advantages and targets, the state with its KL coefficient and multiplier moved on.

    No model runs here.
    """
    algorithm = config.algorithm
    names = sorted(rewards.terms)
    arrays = {
        "response_mask": rollouts.response_mask,
        "group_ids": rollouts.group_ids,
        "rollout_log_probs": rollouts.rollout_log_probs,
        "scores": rewards.scores.astype(np.float32),
        "costs": rewards.costs.astype(np.float32),
        "baselines": rewards.baselines.astype(np.float32),
        "term_rewards": np.stack([rewards.terms[n] for n in names]).astype(np.float32),
        "term_weights": np.stack([rewards.weights[n] for n in names]).astype(np.float32),
    }
    estimates, kl_coef, log_multiplier, metrics = _estimate(
        algorithm, state.kl_coef, state.log_multiplier, predictions, arrays
    )
    state = dataclasses.replace(state, kl_coef=kl_coef, log_multiplier=log_multiplier)
    return estimates, state, metrics


@functools.partial(jax.jit, static_argnums=0)
def _estimate(algorithm, kl_coef, log_multiplier, predictions: Predictions, arrays):
    mask = arrays["response_mask"]
    weights, loss_mask, metrics = corrections.correct(
        algorithm, predictions.old_log_probs, arrays["rollout_log_probs"], mask
    )
    log_probs_of_both = predictions.old_log_probs, predictions.ref_log_probs
    shaped, current_kl = shaping.kl_shaped(
        algorithm, kl_coef, arrays["scores"], *log_probs_of_both, mask
    )
    metrics["actor/entropy"] = masked_mean(predictions.entropies, mask)
    if algorithm.kl_in == "reward":
        metrics["actor/reward_kl_penalty"] = current_kl
        metrics["actor/reward_kl_penalty_coeff"] = kl_coef
    available = {
        "rewards": shaped,
        "values": predictions.values,
        "response_mask": loss_mask,
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
            loss_mask,
        )
    estimates = Estimates(shaped, advantage, returns, cost_returns, loss_mask, weights)
    next_coef = kl.next_kl_coef(kl_coef, current_kl, mask.shape[0], algorithm)
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
    """Yields plan and key of each update: every epoch, all sequences in a new order."""
    config = roles.config
    count = len(rollouts.lengths)
    for epoch in range(config.trainer.epochs):
        epoch_key = jax.random.fold_in(key, epoch)
        order = np.asarray(jax.random.permutation(epoch_key, count))
        for start in range(0, count, config.minibatch_size):
            chosen = np.sort(order[start : start + config.minibatch_size])
            yield _plan(roles, rollouts, chosen), jax.random.fold_in(epoch_key, start)


def _plan(roles: Roles, rollouts: Rollouts, chosen: np.ndarray) -> Plan:
    mesh = roles.mesh.shape
    return batches.plan(
        rollouts.lengths,
        chosen,
        width=rollouts.tokens.shape[1],
        max_tokens=roles.config.trainer.max_tokens_per_microbatch,
        num_shards=mesh["data"] * mesh["fsdp"],
    )
