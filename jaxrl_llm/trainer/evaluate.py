"""Held-out evaluation: mean@k, pass@k and maj@k of each data source; losses of given answers."""

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
from jaxrl_llm.learner import objectives, source
from jaxrl_llm.learner.batches import Packer
from jaxrl_llm.learner.objectives import Batch, Objective, Row
from jaxrl_llm.learner.sampler import Sampler
from jaxrl_llm.learner.source import Score
from jaxrl_llm.metrics.clock import Clock
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout import episodes
from jaxrl_llm.types import Weights

_WAVE = 512  # sequences sampled at one time


class Evaluator:
    """Samples the held-out prompts and scores the answers.

    `key` is of all samples, the same in every call: two policies can be compared.
    """

    def __init__(
        self, config: RLConfig, sampler: Sampler, dataset: Dataset, score: Score, key: jax.Array
    ):
        self._config = config
        self._sampler = sampler
        self._score = score
        size = max(1, _WAVE // config.evaluation.samples_per_prompt)
        self._waves = dataset.batches(size, config.evaluation.num_prompts)
        self._key = key
        self._sampling = dataclasses.replace(
            episodes.sampling_params(config.rollout, sampler.models.eos_tokens),
            temperature=config.evaluation.temperature,
            top_p=config.evaluation.top_p,
            top_k=0,
            min_p=0.0,
        )

    @property
    def filters(self) -> set[bool]:
        """`SamplingParams.is_filtered` of its samples, if it takes any."""
        return {self._sampling.is_filtered} if self._waves else set()

    def __call__(self, weights: Weights, clock: Clock | None = None) -> dict[str, float]:
        """Returns `val-core/SOURCE/NAME`, NAME as in `summary`, and lengths; times `testing`."""
        with (clock or Clock())("testing"):
            return self._evaluate(weights)

    def _evaluate(self, weights: Weights) -> dict[str, float]:
        config = self._config.evaluation
        n, sampling = config.samples_per_prompt, self._sampling
        scores: dict[str, list[np.ndarray]] = collections.defaultdict(list)
        answers: dict[str, list[tuple[str, ...]]] = collections.defaultdict(list)
        lengths: list[np.ndarray] = []
        found: dict[str, float] = {}
        num_failures = 0
        for wave, prompts in enumerate(console.each("evaluating", self._waves)):
            key = jax.random.fold_in(self._key, wave)
            rollouts, _ = self._sampler.rollout(weights, prompts, [sampling] * n, key)
            rewards = source.scored(self._score, rollouts)
            ends = np.unique(rollouts.last_rows)  # a row for each episode
            rollouts, rewards = source.take_rows(rollouts, rewards, ends)
            num_failures += rewards.num_failures
            lengths.append(rollouts.response_mask.sum(1))
            for i, prompt in enumerate(prompts.prompts):
                rows = slice(i * n, (i + 1) * n)
                pairs = zip(rewards.details[rows], rollouts.responses[rows], strict=True)
                given = tuple(str(detail.get("pred", response)) for detail, response in pairs)
                scores[prompt.data_source].append(rewards.scores[rows])
                answers[prompt.data_source].append(given)
        if num_failures:
            found["val-aux/reward/num_failures"] = float(num_failures)
        found |= {"val-aux/response_length/mean": float(np.concatenate(lengths).mean())}
        for name in sorted(scores):
            for what, value in summary(np.stack(scores[name]), answers[name]).items():
                found[f"val-core/{name}/{what}"] = value
        return found


class HeldOut:
    """The loss on held-out rows, and what training reports with it.

    `batch_size` rows are looked at together. `packer` is not that of the training, whose shapes
    follow from what it has packed; `complete` is `objectives.completion`.
    """

    def __init__(
        self,
        objective: Objective,
        rows: Sequence[Row],
        batch_size: int,
        packer: Packer,
        complete: Callable[[Batch, Clock], Batch],
    ):
        self._objective, self._complete = objective, complete
        self._measure = objectives.measurement(objective)
        width, starts = objectives.width_of(rows), range(0, len(rows), batch_size)
        self._batches = [
            Batch.of(rows[i : i + batch_size], packer, width, objective.models) for i in starts
        ]

    def __call__(self, trained: Params, base: Params, clock: Clock) -> dict[str, float]:
        """Returns `val/NAME` for each metric of the objective, a mean over all rows."""
        total: collections.Counter[str] = collections.Counter()
        weight = 0.0
        with clock("testing"):
            for batch in console.each("evaluating", self._batches):
                complete = self._complete(batch, Clock())
                with jax.set_mesh(self._objective.mesh):
                    found = jax.device_get(self._measure(trained, base, complete))
                here = self._objective.weight(batch)
                weight += here
                total.update({name: here * float(value) for name, value in found.items()})
        return {f"val/{name}": value / weight for name, value in total.items()}


def summary(
    scores: Float[np.ndarray, "P k"], answers: list[tuple[str, ...]]
) -> Mapping[str, float]:
    """Returns mean@k, pass@k and maj@k of one data source, from the k answers of each prompt.

    A sample passes if its score is at least 1. For j below k, pass@j is the unbiased estimate from
    all k samples (arXiv:2107.03374, Eq. 1). maj@k scores the most frequent answer of a prompt; of
    equally frequent ones, the one sampled first.
    """
    k = scores.shape[1]
    found = {f"mean@{k}": float(scores.mean())}
    passed = (scores >= 1.0).sum(1).tolist()
    for j in [2**i for i in range(k.bit_length())]:
        chances = [1.0 - math.comb(k - c, j) / math.comb(k, j) for c in passed]
        found[f"pass@{j}"] = float(np.mean(chances))
    if k > 1:
        found[f"pass@{k}"] = float(np.mean([c > 0 for c in passed]))
        majority = [given.index(statistics.mode(given)) for given in answers]
        found[f"maj@{k}"] = float(scores[np.arange(len(scores)), majority].mean())
    return found
