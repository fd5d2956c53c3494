"""Where the samples of a step come from: drawn when they are asked for, scored, and chosen."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms import needs, shaping
from jaxrl_llm.config import RLConfig
from jaxrl_llm.data.datasets import PromptIterator
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner import replicas
from jaxrl_llm.learner.sampler import Sampler
from jaxrl_llm.metrics.clock import Clock
from jaxrl_llm.rollout import episodes
from jaxrl_llm.rollout.engine import Statistics
from jaxrl_llm.types import PromptBatch, Rewards, Rollouts, Weights

Score = Callable[[Rollouts], Rewards]


class SamplingError(UserError, RuntimeError):
    """Dynamic sampling did not find enough groups to learn from."""


@dataclasses.dataclass(frozen=True)
class Samples:
    """The sequences of a step, what they are worth, and what the engine did for them."""

    rollouts: Rollouts
    rewards: Rewards
    engine: Statistics


class Source(Protocol):
    """Gives the samples of each step; its position is part of the checkpoint."""

    def take(self, weights: Weights, key: jax.Array, clock: Clock) -> Samples:
        """Returns the samples of the next step.

        Args:
          weights: The newest; samples may have been drawn by older ones.
          key: Of the step.
          clock: Times `gen` and `reward`.
        """
        ...

    def get_state(self) -> Mapping[str, Any]: ...
    def set_state(self, state: Mapping[str, Any], /) -> None: ...


class SampledNow:
    """Samples a step when it is asked for, by the weights that it is given.

    Where the algorithm asks for it: one greedy sample a prompt in the same wave, which becomes
    its baseline (ReMax, arXiv:2310.10505); groups whose rewards are all equal dropped and
    others sampled in their place, wave after wave (DAPO, arXiv:2503.14476, Sec. 3.2); a soft
    penalty on length (same, Eq. 13).
    """

    def __init__(self, config: RLConfig, sampler: Sampler, prompts: PromptIterator, score: Score):
        """
        Args:
          config: The run.
          sampler: Draws the samples.
          prompts: The training prompts.
          score: Says what samples are worth.
        """
        self._config = config
        self._sampler = sampler
        self._prompts = prompts
        self._score = score
        algorithm = config.algorithm
        self._has_baseline = needs.of(algorithm).greedy_baseline
        sampled = episodes.sampling_params(config.rollout, sampler.models.eos_tokens)
        self._samples = [sampled] * algorithm.samples_per_prompt
        if self._has_baseline:
            greedy = dataclasses.replace(sampled, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
            self._samples.append(greedy)

    def get_state(self) -> Mapping[str, Any]:
        """Returns the position in the prompts, as JSON can hold it."""
        return self._prompts.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state that `get_state` returned."""
        self._prompts.set_state(state)

    def take(self, weights: Weights, key: jax.Array, clock: Clock) -> Samples:
        """Returns the samples of the next step; see `Source.take`.

        Raises:
          SamplingError: If `max_sampling_waves` did not give enough groups.
        """
        algorithm, wanted = self._config.algorithm, self._config.trainer.prompts_per_step
        waves: list[Samples] = []
        found = seen = 0
        for wave in range(algorithm.max_sampling_waves if algorithm.dynamic_sampling else 1):
            prompts = self._prompts.batch(wanted - found)
            samples = self._wave(weights, prompts, jax.random.fold_in(key, wave), clock)
            waves.append(samples)
            seen += len(prompts.prompts)
            found += len(samples.rollouts.lengths) // algorithm.samples_per_prompt
            if found == wanted:
                break
        if found < wanted and algorithm.dynamic_sampling:
            raise SamplingError(
                f"config.algorithm.max_sampling_waves: {seen} prompts in"
                f" {algorithm.max_sampling_waves} waves gave {found} of the {wanted} groups whose"
                " rewards differ; the task is too easy or too hard for this policy, raise the"
                " number of waves or samples_per_prompt, or set dynamic_sampling=False"
            )
        samples = joined(waves)
        return dataclasses.replace(
            samples, rewards=_with_overlong_penalty(self._config, samples.rollouts, samples.rewards)
        )

    def _wave(
        self, weights: Weights, prompts: PromptBatch, key: jax.Array, clock: Clock
    ) -> Samples:
        """Returns what one call of the engine gives, without groups that are to be dropped."""
        engine, tokenizer = self._sampler.engine, self._sampler.models.tokenizer
        replicas.check_prompts(prompts, key)
        with clock("gen"):
            rollouts = episodes.rollout(engine, weights, tokenizer, prompts, self._samples, key)
        with clock("reward"):
            rewards = self._score(rollouts)
        replicas.check_sampled(rollouts, rewards)
        if self._has_baseline:
            rollouts, rewards = split_baseline(rollouts, rewards, len(self._samples))
        if self._config.algorithm.dynamic_sampling:
            uniform = np.asarray(
                shaping.uniform_groups(jnp.asarray(rewards.scores), jnp.asarray(rollouts.group_ids))
            )
            rewards = dataclasses.replace(rewards, num_dropped=int(uniform.sum()))
            rollouts, rewards = select(rollouts, rewards, np.flatnonzero(~uniform))
        return Samples(rollouts, rewards, engine.statistics)


def select(rollouts: Rollouts, rewards: Rewards, rows: np.ndarray) -> tuple[Rollouts, Rewards]:
    """Returns some rows of both. Prompts left without a row go; groups are numbered anew."""
    prompts, group_ids = np.unique(rollouts.group_ids[rows], return_inverse=True)
    picked = dataclasses.replace(
        _picked(rollouts, rows),
        group_ids=group_ids.astype(np.int32),
        prompts=tuple(rollouts.prompts[i] for i in prompts),
        responses=tuple(rollouts.responses[i] for i in rows),
    )
    details = tuple(rewards.details[i] for i in rows)
    return picked, dataclasses.replace(_picked(rewards, rows), details=details)


def _picked(batch: Any, rows: np.ndarray) -> Any:
    """Returns a dataclass with some rows of its arrays, and of the arrays in its mappings."""

    def pick(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: array[rows] for name, array in value.items()}
        return value[rows] if isinstance(value, np.ndarray) else value

    return type(batch)(**{f.name: pick(getattr(batch, f.name)) for f in dataclasses.fields(batch)})


def split_baseline(rollouts: Rollouts, rewards: Rewards, n: int) -> tuple[Rollouts, Rewards]:
    """Takes the greedy sample, the last of each group of `n`, out and makes it the baseline."""
    is_greedy = np.arange(len(rollouts.lengths)) % n == n - 1
    baselines = np.repeat(rewards.scores[is_greedy], n)
    rewards = dataclasses.replace(rewards, baselines=baselines)
    return select(rollouts, rewards, np.flatnonzero(~is_greedy))


def joined(waves: list[Samples]) -> Samples:
    """Returns the samples of several waves as those of one."""
    if len(waves) == 1:
        return waves[0]
    width = max(wave.rollouts.tokens.shape[1] for wave in waves)
    first_prompt = np.cumsum([0, *(len(wave.rollouts.prompts) for wave in waves)])
    numbered = [
        dataclasses.replace(wave.rollouts, group_ids=wave.rollouts.group_ids + np.int32(start))
        for wave, start in zip(waves, first_prompt, strict=False)
    ]
    statistics = sum((wave.engine for wave in waves), Statistics())
    return Samples(
        _concatenated(numbered, width), _concatenated([w.rewards for w in waves], width), statistics
    )


def _concatenated(batches: list[Any], width: int) -> Any:
    """Returns dataclasses of one kind as one: rows after rows, counts added."""

    def join(values: list[Any]) -> Any:
        first = values[0]
        if isinstance(first, Mapping):
            return {name: join([value[name] for value in values]) for name in first}
        if isinstance(first, np.ndarray):
            if first.ndim == 2:  # right-padded tokens
                values = [np.pad(a, ((0, 0), (0, width - a.shape[1]))) for a in values]
            return np.concatenate(values)
        return sum(values, type(first)())

    fields = [f.name for f in dataclasses.fields(batches[0])]
    return type(batches[0])(**{f: join([getattr(b, f) for b in batches]) for f in fields})


def _with_overlong_penalty(config: RLConfig, rollouts: Rollouts, rewards: Rewards) -> Rewards:
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
