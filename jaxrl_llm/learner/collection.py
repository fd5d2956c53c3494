"""The sequences of a step: sampled, scored, and chosen as the algorithm wants them."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms import shaping
from jaxrl_llm.config import Config
from jaxrl_llm.data.datasets import PromptIterator
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner import replicas
from jaxrl_llm.learner.roles import Roles
from jaxrl_llm.metrics.clock import Clock
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout import agent
from jaxrl_llm.types import Rewards, Rollouts

ScoreFn = Callable[[Rollouts], Rewards]


class SamplingError(UserError, RuntimeError):
    """Dynamic sampling did not find enough groups to learn from."""


def collect(
    roles: Roles,
    rollout_params: Params,
    prompts: PromptIterator,
    score: ScoreFn,
    key: jax.Array,
    clock: Clock,
) -> tuple[Rollouts, Rewards]:
    """Returns the sequences of a step and their rewards; times `gen` and `reward`.

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
        wave_key = jax.random.fold_in(key, wave)
        replicas.check_prompts(taken, wave_key)
        with clock("gen"):
            rollouts = agent.rollout(
                roles.engine, rollout_params, roles.tokenizer, taken, samples, wave_key
            )
        with clock("reward"):
            rewards = score(rollouts)
        replicas.check_sampled(rollouts, rewards)
        if algorithm.advantage == "remax":
            rollouts, rewards = _split_baseline(rollouts, rewards, len(samples))
        seen += len(taken.prompts)
        if algorithm.dynamic_sampling:
            uniform = np.asarray(
                shaping.uniform_groups(jnp.asarray(rewards.scores), jnp.asarray(rollouts.group_ids))
            )
            rewards = dataclasses.replace(rewards, num_dropped=int(uniform.sum()))
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
    """Returns some rows of both. Prompts left without a row go; groups are numbered anew."""
    prompts, group_ids = np.unique(rollouts.group_ids[rows], return_inverse=True)
    pick = lambda mapping: {k: v[rows] for k, v in mapping.items()}  # noqa: E731
    return (
        dataclasses.replace(
            rollouts,
            tokens=rollouts.tokens[rows],
            response_mask=rollouts.response_mask[rows],
            rollout_log_probs=rollouts.rollout_log_probs[rows],
            lengths=rollouts.lengths[rows],
            group_ids=group_ids.astype(np.int32),
            stopped=rollouts.stopped[rows],
            prompts=tuple(rollouts.prompts[i] for i in prompts),
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
            num_calls=rewards.num_calls,
            num_dropped=rewards.num_dropped,
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
            num_calls=sum(rewards.num_calls for _, rewards in waves),
            num_dropped=sum(rewards.num_dropped for _, rewards in waves),
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
