"""Rollouts of a step: sampled on demand, scored, and filtered."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms import requirements, shaping
from jaxrl_llm.config import RLConfig, recipes
from jaxrl_llm.data.prompt_stream import PromptIterator
from jaxrl_llm.errors import UserError
from jaxrl_llm.metrics.timers import Clock
from jaxrl_llm.rollout import episodes
from jaxrl_llm.rollout.engine.requests import EngineStatistics
from jaxrl_llm.sampling.policy_sampler import PolicySampler
from jaxrl_llm.sharding import multihost
from jaxrl_llm.types import Rewards, Rollouts, Weights

# The random keys of a step: for its samples, and for its updates.
StepKeys = tuple[jax.Array, jax.Array]
ScoreRollouts = Callable[[Rollouts], Rewards]
# rows, and the index of the first one in the scored batch
BeginScoring = Callable[[Rollouts, int], None]
Batch = TypeVar("Batch", Rollouts, Rewards)


class SamplingError(UserError, RuntimeError):
    """Dynamic sampling did not get enough groups with differing rewards."""


@dataclasses.dataclass(frozen=True)
class ScoredRollouts:
    """The sequences of a step, their rewards, and the engine statistics of sampling them."""

    rollouts: Rollouts
    rewards: Rewards
    engine_statistics: EngineStatistics


class RolloutSource(Protocol):
    """Provides the rollouts of each step; its position is part of the checkpoint."""

    def next_batch(self, weights: Weights, key: jax.Array, clock: Clock) -> ScoredRollouts:
        """Scored rollouts for the next step, sampled by these weights or older ones.

        Times `gen` and `reward`.
        """
        ...

    def on_wait(self, pending: Any) -> None:
        """Hook called while the loop waits for `pending`, arrays that devices still compute."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the prompts and rollouts of the step."""
        ...

    def get_state(self) -> Mapping[str, Any]: ...
    def set_state(self, state: Mapping[str, Any], /) -> None: ...


def step_keys(seed: int, step: int) -> StepKeys:
    """The random keys of step `step` (from 1): for its samples, for its updates."""
    sample_key, update_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), step))
    return sample_key, update_key


class SyncSource:
    """Samples each step on demand, with the weights passed in.

    If the algorithm asks for it: one greedy sample of each prompt in the same wave, whose score is
    the baseline (ReMax, arXiv:2310.10505); more waves to replace groups whose rewards are all equal
    (DAPO, arXiv:2503.14476, Sec. 3.2); a soft length penalty (same, Eq. 13).
    """

    def __init__(
        self,
        config: RLConfig,
        sampler: PolicySampler,
        prompts: PromptIterator,
        score: ScoreRollouts,
        begin_scoring: BeginScoring | None = None,
    ):
        """`begin_scoring` starts to score the samples of a prompt before `score` is called."""
        self._begin_scoring = begin_scoring
        self._config = config
        self._sampler = sampler
        self._prompts = prompts
        self._score = score
        algorithm = config.algorithm
        self._has_baseline = requirements.requirements(algorithm).greedy_baseline
        sampling_params = episodes.sampling_params(config.rollout, sampler.models.eos_tokens)
        greedy_params = dataclasses.replace(
            sampling_params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, support_tokens=0
        )
        self._sampling_params = [sampling_params] * algorithm.samples_per_prompt + [
            greedy_params
        ] * self._has_baseline

    def on_wait(self, pending: Any) -> None:
        """Does nothing: no sample begins before its step."""

    def metrics(self) -> Mapping[str, float]:
        """Metrics `curriculum/NAME`; empty without a curriculum."""
        return self._prompts.metrics()

    def get_state(self) -> Mapping[str, Any]:
        """The position in the prompts."""
        return self._prompts.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that `get_state` returned."""
        self._prompts.set_state(state)

    def next_batch(self, weights: Weights, key: jax.Array, clock: Clock) -> ScoredRollouts:
        """Scored rollouts for the next step; see `RolloutSource.next_batch`.

        Raises:
          SamplingError: If `max_sampling_waves` did not give enough groups.
        """
        algorithm, num_wanted = self._config.algorithm, self._config.trainer.prompts_per_step
        waves: list[ScoredRollouts] = []
        num_kept = num_sampled = 0
        for wave in range(algorithm.max_sampling_waves if algorithm.dynamic_sampling else 1):
            rollouts, engine_stats = self._sample_wave(
                weights, num_wanted - num_kept, wave, key, clock
            )
            samples = self._score_wave(rollouts, engine_stats, clock)
            waves.append(samples)
            num_sampled += len(rollouts.prompts)
            num_kept += len(samples.rollouts.prompts)
            if num_kept == num_wanted:
                break
        if num_kept < num_wanted and algorithm.dynamic_sampling:
            raise SamplingError(
                f"config.algorithm.max_sampling_waves: {num_sampled} prompts in"
                f" {algorithm.max_sampling_waves} waves gave {num_kept} of the {num_wanted} groups"
                " whose rewards differ; the task is too easy or too hard for this policy, raise the"
                " number of waves or samples_per_prompt, or set dynamic_sampling=False"
            )
        samples = concatenate_waves(waves)
        rewards = _with_overlong_penalty(self._config, samples.rollouts, samples.rewards)
        return dataclasses.replace(samples, rewards=rewards)

    def _sample_wave(
        self, weights: Weights, num_prompts: int, wave: int, key: jax.Array, clock: Clock
    ) -> tuple[Rollouts, EngineStatistics]:
        """Samples the responses of a wave of `num_prompts` prompts, with engine statistics."""
        sampler, prompts = self._sampler, self._prompts.next_batch(num_prompts)
        key = jax.random.fold_in(key, wave)
        if jax.process_count() > 1:
            data = jax.device_get(jax.random.key_data(key))
            multihost.assert_equal(
                "sampling", {"the prompts": prompts.prompts, "the random key": data}
            )
        with clock("gen"):
            return sampler.rollout(
                weights, prompts, self._sampling_params, key, self._begin_scoring
            )

    def _score_wave(
        self, rollouts: Rollouts, engine_stats: EngineStatistics, clock: Clock
    ) -> ScoredRollouts:
        """Scores a wave and drops the groups that dynamic sampling rejects."""
        with clock("reward"):
            rewards = score_episodes(self._score, rollouts)
        if jax.process_count() > 1:
            names = (
                *("tokens", "response_mask", "rollout_log_probs", "responses"),
                *("routed_experts", "support"),
            )
            sampled = {f"the {name}": getattr(rollouts, name) for name in names}
            multihost.assert_equal("sampled", {**sampled, "the rewards": rewards})
        if self._has_baseline:
            rollouts, rewards = split_baseline(rollouts, rewards)
        rewards = without_lone_rows(self._config, rollouts, rewards)
        groups, is_kept = range(len(rollouts.prompts)), rewards.valid_rows
        scores = [rewards.scores[(rollouts.group_ids == group) & is_kept] for group in groups]
        self._prompts.learn(rollouts.prompts, scores)
        if self._config.algorithm.dynamic_sampling:
            uniform = np.asarray(
                shaping.uniform_groups(
                    jnp.asarray(_compared_scores(self._config, rewards)),
                    jnp.asarray(rollouts.comparison_ids),
                    jnp.asarray(is_kept),
                )
            )
            # With roles: the groups of all of them.
            uniform = ~np.isin(rollouts.group_ids, rollouts.group_ids[~uniform])
            is_lost = ~np.isin(rollouts.group_ids, rollouts.group_ids[is_kept])  # no scored row
            uniform = uniform | is_lost
            rewards = dataclasses.replace(rewards, num_dropped=int(uniform.sum()))
            rollouts, rewards = take_rows(rollouts, rewards, np.flatnonzero(~uniform))
        return ScoredRollouts(rollouts, rewards, engine_stats)


def _compared_scores(config: RLConfig, rewards: Rewards) -> np.ndarray:
    """The values of each row that dynamic sampling compares: a named term where it applies."""
    if not (name := config.algorithm.dynamic_sampling_term):
        return rewards.scores
    return np.where(rewards.weights[name] != 0, rewards.terms[name], rewards.scores)


def score_episodes(score: ScoreRollouts, rollouts: Rollouts) -> Rewards:
    """The rewards of each row; an episode in several rows is scored once, by its last row."""
    last = rollouts.last_rows
    ends = np.unique(last)
    if len(ends) == len(last):
        return score(rollouts)
    # every prompt has such a row
    last_rows = _select_rows(rollouts, ends, prompts=rollouts.prompts)
    rewards = _select_rows(score(last_rows), np.searchsorted(ends, last))
    if rewards.turn_rewards is not None:  # they are placed in the last row of the episode
        rewards.turn_rewards[last != np.arange(len(last))] = 0.0
    return rewards


def take_rows(rollouts: Rollouts, rewards: Rewards, rows: np.ndarray) -> tuple[Rollouts, Rewards]:
    """Selects rows of both. Prompts without a row are dropped; groups are renumbered."""
    prompts, group_ids = np.unique(rollouts.group_ids[rows], return_inverse=True)
    kept_prompts = tuple(rollouts.prompts[i] for i in prompts)
    new_ids = group_ids.astype(np.int32)
    return _select_rows(rollouts, rows, prompts=kept_prompts, group_ids=new_ids), _select_rows(
        rewards, rows
    )


def _select_rows(batch: Batch, rows: np.ndarray, **replaced: Any) -> Batch:
    """Selects rows of every field but `others`, whose values replace the fields."""

    def select(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: select(array) for name, array in value.items()}
        if isinstance(value, tuple):
            return tuple(value[i] for i in rows) if value else value
        return value[rows] if isinstance(value, np.ndarray) else value

    fields = {name: select(value) for name, value in vars(batch).items() if name not in replaced}
    return type(batch)(**fields, **replaced)


def split_baseline(rollouts: Rollouts, rewards: Rewards) -> tuple[Rollouts, Rewards]:
    """Removes the greedy sample, the last of each group; its score becomes the baseline."""
    ends = np.searchsorted(rollouts.group_ids, rollouts.group_ids, side="right") - 1
    is_greedy = rollouts.last_rows == ends
    rewards = dataclasses.replace(rewards, baselines=rewards.scores[ends])
    if rewards.excluded is not None:  # without the baseline there is no advantage
        rewards = dataclasses.replace(rewards, excluded=rewards.excluded | rewards.excluded[ends])
    return take_rows(rollouts, rewards, np.flatnonzero(~is_greedy))


def without_lone_rows(config: RLConfig, rollouts: Rollouts, rewards: Rewards) -> Rewards:
    """Leaves out rows that are alone in their group because all others failed.

    The group advantage of such a row would be its bare score, without a baseline.
    """
    algorithm = config.algorithm
    compares = algorithm.advantage in recipes.GROUP_ADVANTAGES
    if rewards.excluded is None or not compares:
        return rewards
    ends = np.arange(len(rewards.scores)) == rollouts.last_rows  # an episode counts once
    groups = rollouts.comparison_ids
    sizes = np.bincount(groups[rewards.valid_rows & ends], minlength=groups.max() + 1)
    is_alone = sizes[groups] < 2
    return dataclasses.replace(rewards, excluded=rewards.excluded | is_alone)


def concatenate_waves(waves: Sequence[ScoredRollouts]) -> ScoredRollouts:
    """Concatenates the rollouts of several waves into one batch."""
    if len(waves) == 1:
        return waves[0]
    width = max(wave.rollouts.tokens.shape[1] for wave in waves)

    def join(values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, Mapping):
            return {name: join([value[name] for value in values]) for name in first}
        if isinstance(first, np.ndarray):
            if first.ndim >= 2:  # right-padded tokens
                padding = [((0, 0), (0, width - a.shape[1]), (0, 0))[: first.ndim] for a in values]
                values = [np.pad(a, pad) for a, pad in zip(values, padding, strict=True)]
            return np.concatenate(values)
        if first is None:
            return None
        return sum(values, type(first)())  # tuples one after the other, counts added

    def concatenate(batches: Sequence[Any]) -> Any:
        columns = {name: [vars(batch)[name] for batch in batches] for name in vars(batches[0])}
        return type(batches[0])(**{name: join(values) for name, values in columns.items()})

    first_group = np.cumsum([0, *(len(wave.rollouts.prompts) for wave in waves)])
    numbered = [
        dataclasses.replace(wave.rollouts, group_ids=wave.rollouts.group_ids + np.int32(start))
        for wave, start in zip(waves, first_group, strict=False)
    ]
    return ScoredRollouts(
        concatenate(numbered),
        concatenate([wave.rewards for wave in waves]),
        sum((wave.engine_statistics for wave in waves), EngineStatistics()),
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
