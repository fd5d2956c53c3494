"""Held-out evaluation: mean@k, pass@k and maj@k by data source, and supervised losses."""

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Float

from jaxrl_llm import console
from jaxrl_llm.config import RLConfig
from jaxrl_llm.data.datasets import Dataset
from jaxrl_llm.learner import objectives
from jaxrl_llm.learner.batches import Packer
from jaxrl_llm.learner.objectives import Objective, Row, SupervisedBatch
from jaxrl_llm.metrics.timers import Clock
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout import episodes
from jaxrl_llm.sampling import source
from jaxrl_llm.sampling.policy_sampler import PolicySampler
from jaxrl_llm.sampling.source import ScoreRollouts
from jaxrl_llm.types import Weights

_WAVE_SEQUENCES = 512  # sequences sampled at a time


class Evaluator:
    """Samples the held-out prompts and scores the answers.

    All samples derive from `key`, the same in every call, so that policies can be compared.
    """

    def __init__(
        self,
        config: RLConfig,
        sampler: PolicySampler,
        dataset: Dataset,
        score: ScoreRollouts,
        key: jax.Array,
    ):
        self._config = config
        self._sampler = sampler
        self._score = score
        size = max(1, _WAVE_SEQUENCES // config.evaluation.samples_per_prompt)
        self._waves = dataset.batches(size, config.evaluation.num_prompts)
        self._key = key
        self._sampling_params = dataclasses.replace(
            episodes.sampling_params(config.rollout, sampler.models.eos_tokens),
            temperature=config.evaluation.temperature,
            top_p=config.evaluation.top_p,
            top_k=0,
            min_p=0.0,
        )

    @property
    def filter_variants(self) -> set[bool]:
        """The `SamplingParams.is_filtered` values that it samples with; empty without prompts."""
        return {self._sampling_params.is_filtered} if self._waves else set()

    def __call__(self, weights: Weights, clock: Clock | None = None) -> dict[str, float]:
        """Metrics `val-core/SOURCE/NAME`, NAME as in `answer_metrics`, and lengths; times
        `testing`.
        """
        with (clock or Clock())("testing"):
            return self._evaluate(weights)

    def _evaluate(self, weights: Weights) -> dict[str, float]:
        config = self._config.evaluation
        n, sampling = config.samples_per_prompt, self._sampling_params
        scores: dict[str, list[np.ndarray]] = collections.defaultdict(list)
        answers: dict[str, list[tuple[str, ...]]] = collections.defaultdict(list)
        lengths: list[np.ndarray] = []
        metrics: dict[str, float] = {}
        num_failures = 0
        for wave, prompts in enumerate(console.track("evaluating", self._waves)):
            key = jax.random.fold_in(self._key, wave)
            rollouts, _ = self._sampler.rollout(weights, prompts, [sampling] * n, key)
            rewards = source.score_episodes(self._score, rollouts)
            rollouts, rewards = source.take_rows(rollouts, rewards, rollouts.episode_rows)
            num_failures += rewards.num_failures
            lengths.append(rollouts.response_mask.sum(1))
            for i, prompt in enumerate(prompts.prompts):
                rows = slice(i * n, (i + 1) * n)
                pairs = zip(rewards.details[rows], rollouts.responses[rows], strict=True)
                predictions = tuple(str(detail.get("pred", response)) for detail, response in pairs)
                scores[prompt.data_source].append(rewards.scores[rows])
                answers[prompt.data_source].append(predictions)
        if num_failures:
            metrics["val-aux/reward/num_failures"] = float(num_failures)
        metrics |= {"val-aux/response_length/mean": float(np.concatenate(lengths).mean())}
        for name in sorted(scores):
            for metric, value in answer_metrics(np.stack(scores[name]), answers[name]).items():
                metrics[f"val-core/{name}/{metric}"] = value
        return metrics


class HeldOutLoss:
    """The loss on held-out rows, with the metrics that training reports beside it.

    Evaluates `batch_size` rows at a time. `packer` must not be that of training, whose shapes
    depend on what it has packed before; `complete` comes from
    `objectives.reference_log_prob_adder`.
    """

    def __init__(
        self,
        objective: Objective,
        rows: Sequence[Row],
        batch_size: int,
        packer: Packer,
        complete: Callable[[SupervisedBatch, Clock], SupervisedBatch],
    ):
        self._objective, self._add_reference = objective, complete
        self._measure = objectives.make_metrics_program(objective)
        width, starts = objectives.packed_width(rows), range(0, len(rows), batch_size)
        self._batches = [
            objective.make_batch(rows[i : i + batch_size], packer, width) for i in starts
        ]

    def __call__(self, trained: Params, base: Params, clock: Clock) -> dict[str, float]:
        """Metrics `val/NAME` of the objective, the mean over all rows."""
        total: collections.Counter[str] = collections.Counter()
        total_weight = 0.0
        with clock("testing"):
            for batch in console.track("evaluating", self._batches):
                complete = self._add_reference(batch, Clock())
                with jax.set_mesh(self._objective.mesh):
                    metrics = jax.device_get(self._measure(trained, base, complete))
                batch_weight = self._objective.batch_weight(batch)
                total_weight += batch_weight
                total.update({name: batch_weight * float(value) for name, value in metrics.items()})
        return {f"val/{name}": value / total_weight for name, value in total.items()}


def answer_metrics(
    scores: Float[np.ndarray, "P k"], answers: list[tuple[str, ...]]
) -> Mapping[str, float]:
    """Metrics mean@k, pass@k and maj@k of one data source, from the k answers of each prompt.

    A sample passes if its score is at least 1. For j below k, pass@j is the unbiased estimate from
    all k samples (arXiv:2107.03374, Eq. 1). maj@k scores the most frequent answer of a prompt; of
    equally frequent ones, the one sampled first.
    """
    k = scores.shape[1]
    metrics = {f"mean@{k}": float(scores.mean())}
    num_passed = (scores >= 1.0).sum(1).tolist()
    for j in [2**i for i in range(k.bit_length())]:
        estimates = [1.0 - math.comb(k - c, j) / math.comb(k, j) for c in num_passed]
        metrics[f"pass@{j}"] = float(np.mean(estimates))
    if k > 1:
        metrics[f"pass@{k}"] = float(np.mean([c > 0 for c in num_passed]))
        majority = [
            prompt_answers.index(statistics.mode(prompt_answers)) for prompt_answers in answers
        ]
        metrics[f"maj@{k}"] = float(scores[np.arange(len(scores)), majority].mean())
    return metrics
