"""The samples of a step: drawn when they are asked for, scored, and chosen."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms import needs, shaping
from jaxrl_llm.config import RLConfig, recipes
from jaxrl_llm.data.prompt_stream import PromptIterator
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner.sampler import Sampler
from jaxrl_llm.metrics.clock import Clock
from jaxrl_llm.rollout import episodes
from jaxrl_llm.rollout.requests import Statistics
from jaxrl_llm.sharding import hosts
from jaxrl_llm.types import Rewards, Rollouts, Weights

# Of a step: the one of its samples, and the one of its updates.
StepKeys = tuple[jax.Array, jax.Array]
Score = Callable[[Rollouts], Rewards]
Begin = Callable[[Rollouts, int], None]  # rows, and the number of the first one when scored
Batch = TypeVar("Batch", Rollouts, Rewards)


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
        """Returns the samples of the next step, drawn by these weights or older ones.

        Times `gen` and `reward`.
        """
        ...

    def meanwhile(self, pending: Any) -> None:
        """Is called where the loop waits for `pending`, arrays that devices are at work on."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Returns what it knows of the prompts and the samples of the step."""
        ...

    def get_state(self) -> Mapping[str, Any]: ...
    def set_state(self, state: Mapping[str, Any], /) -> None: ...


def step_keys(seed: int, step: int) -> StepKeys:
    """Returns the random keys of step `step` (from 1)."""
    of_samples, of_updates = jax.random.split(jax.random.fold_in(jax.random.key(seed), step))
    return of_samples, of_updates


class SampledNow:
    """Samples a step when it is asked for, with the weights that it is given.

    As the algorithm asks: one greedy sample of each prompt in the same wave, whose score is the
    baseline (ReMax, arXiv:2310.10505); more waves instead of groups whose rewards are all equal
    (DAPO, arXiv:2503.14476, Sec. 3.2); a soft penalty on length (same, Eq. 13).
    """

    def __init__(
        self,
        config: RLConfig,
        sampler: Sampler,
        prompts: PromptIterator,
        score: Score,
        begin: Begin | None = None,
    ):
        """`begin` is told of the samples of a prompt before `score` is asked about them."""
        self._begin_score = begin
        self._config = config
        self._sampler = sampler
        self._prompts = prompts
        self._score = score
        algorithm = config.algorithm
        self._has_baseline = needs.of(algorithm).greedy_baseline
        sampled = episodes.sampling_params(config.rollout, sampler.models.eos_tokens)
        greedy = dataclasses.replace(sampled, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
        self._samples = [sampled] * algorithm.samples_per_prompt + [greedy] * self._has_baseline

    def meanwhile(self, pending: Any) -> None:
        """Does nothing: no sample begins before its step."""

    def metrics(self) -> Mapping[str, float]:
        """Returns `curriculum/NAME`; nothing without a curriculum."""
        return self._prompts.metrics()

    def get_state(self) -> Mapping[str, Any]:
        """Returns the position in the prompts."""
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
            rollouts, done = self._drawn(weights, wanted - found, wave, key, clock)
            samples = self._judged(rollouts, done, clock)
            waves.append(samples)
            seen += len(rollouts.prompts)
            found += len(samples.rollouts.prompts)
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
        rewards = _with_overlong_penalty(self._config, samples.rollouts, samples.rewards)
        return dataclasses.replace(samples, rewards=rewards)

    def _drawn(
        self, weights: Weights, num_prompts: int, wave: int, key: jax.Array, clock: Clock
    ) -> tuple[Rollouts, Statistics]:
        """Returns the samples of so many prompts, and what the engine did for them."""
        sampler, prompts = self._sampler, self._prompts.batch(num_prompts)
        key = jax.random.fold_in(key, wave)
        if jax.process_count() > 1:
            data = jax.device_get(jax.random.key_data(key))
            hosts.agree("sampling", {"the prompts": prompts.prompts, "the random key": data})
        with clock("gen"):
            of = weights, prompts, self._samples, key
            return sampler.rollout(*of, self._begin_score)

    def _judged(self, rollouts: Rollouts, done: Statistics, clock: Clock) -> Samples:
        """Returns the samples of a wave with their rewards, without groups that are dropped."""
        with clock("reward"):
            rewards = scored(self._score, rollouts)
        if jax.process_count() > 1:
            names = ("tokens", "response_mask", "rollout_log_probs", "responses", "routes")
            sampled = {f"the {name}": getattr(rollouts, name) for name in names}
            hosts.agree("sampled", {**sampled, "the rewards": rewards})
        if self._has_baseline:
            rollouts, rewards = split_baseline(rollouts, rewards)
        rewards = without_lone_rows(self._config, rollouts, rewards)
        groups, kept = range(len(rollouts.prompts)), rewards.kept
        scores = [rewards.scores[(rollouts.group_ids == group) & kept] for group in groups]
        self._prompts.learn(rollouts.prompts, scores)
        if self._config.algorithm.dynamic_sampling:
            given = rewards.scores, rollouts.group_ids, kept
            uniform = np.asarray(shaping.uniform_groups(*map(jnp.asarray, given)))
            is_lost = ~np.isin(rollouts.group_ids, rollouts.group_ids[kept])  # nothing of a group
            uniform = uniform | is_lost
            rewards = dataclasses.replace(rewards, num_dropped=int(uniform.sum()))
            rollouts, rewards = take_rows(rollouts, rewards, np.flatnonzero(~uniform))
        return Samples(rollouts, rewards, done)


def scored(score: Score, rollouts: Rollouts) -> Rewards:
    """Returns what each row is worth; an episode in several rows is scored once, by its last."""
    last = rollouts.last_rows
    ends = np.unique(last)
    if len(ends) == len(last):
        return score(rollouts)
    kept = _taken(rollouts, ends, prompts=rollouts.prompts)  # every prompt has such a row
    rewards = _taken(score(kept), np.searchsorted(ends, last))
    if rewards.turn_rewards is not None:  # they have their places in the last row
        rewards.turn_rewards[last != np.arange(len(last))] = 0.0
    return rewards


def take_rows(rollouts: Rollouts, rewards: Rewards, rows: np.ndarray) -> tuple[Rollouts, Rewards]:
    """Returns some rows of both. Prompts left without a row go; groups are numbered anew."""

    prompts, group_ids = np.unique(rollouts.group_ids[rows], return_inverse=True)
    kept = tuple(rollouts.prompts[i] for i in prompts)
    numbered = group_ids.astype(np.int32)
    return _taken(rollouts, rows, prompts=kept, group_ids=numbered), _taken(rewards, rows)


def _taken(batch: Batch, rows: np.ndarray, **others: Any) -> Batch:
    """Returns some rows of every field but `others`, which are given."""

    def take(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: take(array) for name, array in value.items()}
        if isinstance(value, tuple):
            return tuple(value[i] for i in rows) if value else value
        return value[rows] if isinstance(value, np.ndarray) else value

    fields = {name: take(value) for name, value in vars(batch).items() if name not in others}
    return type(batch)(**fields, **others)


def split_baseline(rollouts: Rollouts, rewards: Rewards) -> tuple[Rollouts, Rewards]:
    """Takes the greedy sample, the last of each group, out and makes it the baseline."""
    ends = np.searchsorted(rollouts.group_ids, rollouts.group_ids, side="right") - 1
    is_greedy = rollouts.last_rows == ends
    rewards = dataclasses.replace(rewards, baselines=rewards.scores[ends])
    if rewards.left_out is not None:  # without the baseline there is no advantage
        rewards = dataclasses.replace(rewards, left_out=rewards.left_out | rewards.left_out[ends])
    return take_rows(rollouts, rewards, np.flatnonzero(~is_greedy))


def without_lone_rows(config: RLConfig, rollouts: Rollouts, rewards: Rewards) -> Rewards:
    """Leaves out a row that has nothing to be compared with, as all others of its group failed.

    Its group advantage would be its score, without a baseline.
    """
    algorithm = config.algorithm
    compares = algorithm.advantage in recipes.GROUP_ADVANTAGES
    if rewards.left_out is None or not compares:
        return rewards
    ends = np.arange(len(rewards.scores)) == rollouts.last_rows  # an episode counts once
    members = rollouts.group_ids[rewards.kept & ends]
    sizes = np.bincount(members, minlength=len(rollouts.prompts))
    alone = sizes[rollouts.group_ids] < 2
    return dataclasses.replace(rewards, left_out=rewards.left_out | alone)


def joined(waves: Sequence[Samples]) -> Samples:
    """Returns the samples of several waves as those of one."""
    if len(waves) == 1:
        return waves[0]
    width = max(wave.rollouts.tokens.shape[1] for wave in waves)

    def join(values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, Mapping):
            return {name: join([value[name] for value in values]) for name in first}
        if isinstance(first, np.ndarray):
            if first.ndim >= 2:  # right-padded tokens
                after = [((0, 0), (0, width - a.shape[1]), (0, 0))[: first.ndim] for a in values]
                values = [np.pad(a, pad) for a, pad in zip(values, after, strict=True)]
            return np.concatenate(values)
        if first is None:
            return None
        return sum(values, type(first)())  # tuples one after the other, counts added

    def concatenated(batches: Sequence[Any]) -> Any:
        columns = {name: [vars(batch)[name] for batch in batches] for name in vars(batches[0])}
        return type(batches[0])(**{name: join(values) for name, values in columns.items()})

    first_group = np.cumsum([0, *(len(wave.rollouts.prompts) for wave in waves)])
    numbered = [
        dataclasses.replace(wave.rollouts, group_ids=wave.rollouts.group_ids + np.int32(start))
        for wave, start in zip(waves, first_group, strict=False)
    ]
    return Samples(
        concatenated(numbered),
        concatenated([wave.rewards for wave in waves]),
        sum((wave.engine for wave in waves), Statistics()),
    )


def _with_overlong_penalty(config: RLConfig, rollouts: Rollouts, rewards: Rewards) -> Rewards:
    if not config.algorithm.overlong_buffer_tokens:
        return rewards
    longest, lengths = config.rollout.max_response_tokens, rollouts.response_mask.sum(1)
    penalty = np.asarray(shaping.overlong_penalty(config.algorithm, longest, lengths))
    return dataclasses.replace(
        rewards,
        scores=rewards.scores + penalty,
        terms={**rewards.terms, "overlong": penalty},
        weights={**rewards.weights, "overlong": np.ones_like(rewards.scores)},
    )
