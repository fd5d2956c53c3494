"""Curricula: prompts drawn by weights that depend on the scores of earlier responses."""

import base64
import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxrl_llm.algorithms import lookup
from jaxrl_llm.config import CurriculumConfig
from jaxrl_llm.data.errors import DataError, check_saved
from jaxrl_llm.types import Prompt

_SOLVED_RATE = 0.9  # of successes
_MASTERED_RATE = 0.5  # of a level, at which the next one begins
_RECENCY = 0.8  # what responses count in the rate of a level, from one draw to the next
_PRIOR = 0.1  # pseudo-count of responses, half of them successes, for prompts without data


@dataclasses.dataclass(frozen=True)
class PromptStatistics:
    """Running score statistics of P prompts; older responses decay by `CurriculumConfig.memory`."""

    answers: Float[np.ndarray, " P"]  # number of scored responses
    successes: Float[np.ndarray, " P"]
    scores: Float[np.ndarray, " P"]  # sum of the scores
    # number of the last draw with this prompt, from 1; 0: never
    last_batch: Float[np.ndarray, " P"]

    @classmethod
    def zeros(cls, count: int) -> "PromptStatistics":
        """Statistics before any prompt was drawn."""
        return cls(*(np.zeros(count) for _ in dataclasses.fields(cls)))


def success_variance_weights(
    answers: np.ndarray, successes: np.ndarray, floor: float
) -> Float[np.ndarray, " P"]:
    """Weights of prompts: 4 p (1 - p) at success rate p, and at least `floor`.

    This is the variance of a success, scaled to 1 where half of the responses are right and 0
    where all or none are: groups of equal scores teach nothing. A prompt without responses counts
    as p = 0.5; a tenth of such a response is added to every prompt as a prior.

    >>> answers, successes = np.array([0.0, 8.0, 8.0]), np.array([0.0, 4.0, 0.0])
    >>> success_variance_weights(answers, successes, floor=0.05).round(2)
    array([1.  , 1.  , 0.05])
    """
    rates = (successes + _PRIOR / 2) / (answers + _PRIOR)
    return np.maximum(4 * rates * (1 - rates), floor)


def unsolved_weights(answers: np.ndarray, successes: np.ndarray) -> Float[np.ndarray, " P"]:
    """Weights of prompts: 0 for those that nine of ten responses solve, 1 for all others.

    No-positive-resampling of ScaleRL (arXiv:2510.13786): a prompt that is solved is not drawn
    again. Where all are solved, all are drawn. The rate is that of `PromptStatistics`, of which
    `memory=1` keeps the whole history, as there.

    >>> unsolved_weights(np.array([0.0, 8.0, 8.0]), np.array([0.0, 8.0, 4.0]))
    array([1., 0., 1.])
    """
    solved = (answers > 0) & (successes >= _SOLVED_RATE * answers)
    return np.ones(len(answers)) if solved.all() else (~solved).astype(np.float64)


def level_weights(
    answers: np.ndarray,
    successes: np.ndarray,
    last_batch: np.ndarray,
    batch: int,
    prompts: Sequence[Prompt],
    floor: float,
) -> Float[np.ndarray, " P"]:
    """Weights of prompts: 1 for those of the current level, `floor` for easier ones, 0 for harder.

    The current level of a data source is its lowest `level` (in `extra_info`; 0 without) whose
    prompts are solved by less than half of their responses. The rate is over all prompts of the
    level, those of earlier draws fading by a fifth from each draw to the next, so that it is about
    the policy of today. So a level is left once it is mastered, and returned to if it is forgotten;
    the hardest one is kept when all are mastered. A level without responses is not mastered.

    >>> prompts = [Prompt((), "", "a", "", {"level": n}, n) for n in (0, 0, 1, 2)]
    >>> zero = np.zeros(4)
    >>> level_weights(zero, zero, zero, 1, prompts, floor=0.05)
    array([1., 1., 0., 0.])
    >>> answers, successes, last = np.array([[8.0, 0, 0, 0], [6.0, 0, 0, 0], [1.0, 0, 0, 0]])
    >>> level_weights(answers, successes, last, 2, prompts, floor=0.05)
    array([0.05, 0.05, 1.  , 0.  ])
    """
    levels = np.array([int(prompt.extra_info.get("level", 0)) for prompt in prompts])
    sources = np.array([prompt.data_source for prompt in prompts])
    recency = np.where(answers > 0, _RECENCY ** np.maximum(batch - 1 - last_batch, 0), 0.0)
    weights = np.zeros(len(prompts))
    for source in np.unique(sources):
        is_own = sources == source
        own_levels = np.unique(levels[is_own])
        for current in own_levels:
            rows = is_own & (levels == current)
            num_answers = np.sum(recency[rows] * answers[rows])
            num_successes = np.sum(recency[rows] * successes[rows])
            if not num_answers or num_successes < _MASTERED_RATE * num_answers:
                break
        weights[is_own & (levels < current)] = floor
        weights[is_own & (levels == current)] = 1.0
    return weights


CHOICES: Mapping[str, Callable[..., Float[np.ndarray, " P"]]] = {
    "success": success_variance_weights,
    "unsolved": unsolved_weights,
    "levels": level_weights,
}


def check_curriculum(config: CurriculumConfig, prompts: Sequence[Prompt]) -> None:
    """Raises a DataError if the function of a curriculum cannot be found or does not work."""
    if config.choice:
        Curriculum(prompts, config, 0).weights()


def metrics(curricula: Sequence["Curriculum"]) -> dict[str, float]:
    """Metrics: share of prompts with responses, and of those, shares that are easy or hard.

    `solved`: nine of ten answers or more are successes; `unsolved`: one of ten or fewer.
    """
    answers = np.concatenate([each.statistics.answers for each in curricula])
    successes = np.concatenate([each.statistics.successes for each in curricula])
    answered = answers > 0
    rates = successes[answered] / answers[answered]
    num = max(1, len(rates))
    return {
        "curriculum/answered": float(answered.mean()),
        "curriculum/solved": float((rates >= _SOLVED_RATE).sum() / num),
        "curriculum/unsolved": float((rates <= 0.1).sum() / num),
    }


class Curriculum:
    """Draws prompts by weights that a function computes from their score statistics.

    A draw is without replacement unless fewer prompts have a weight above 0. It depends only on the
    seed, the statistics and the number of draws so far.
    """

    def __init__(self, prompts: Sequence[Prompt], config: CurriculumConfig, seed: int):
        self._prompts = tuple(prompts)
        self._config = config
        self._seed = seed
        self.statistics = PromptStatistics.zeros(len(prompts))
        self._num_draws = 0
        self._places = {id(prompt): place for place, prompt in enumerate(self._prompts)}
        try:
            self._function = lookup.resolve(config.choice, CHOICES, "choice of prompts")
        except Exception as error:  # whatever the user's file raises when it is imported
            raise DataError(f"config.curriculum.choice: {error}") from error

    def weights(self) -> Float[np.ndarray, " P"]:
        """One weight per prompt from the weight function; raises DataError if they are invalid."""
        where = f"config.curriculum.choice: {self._config.choice!r}"
        available = {
            **{name: array.copy() for name, array in vars(self.statistics).items()},
            "batch": self._num_draws + 1,
            "floor": self._config.floor,
            "prompts": self._prompts,
        }
        try:
            weights = np.asarray(lookup.call_by_name(self._function, available, where), np.float64)
        except lookup.FunctionError:
            raise
        except Exception as error:  # whatever the user's function raises
            raise DataError(
                f"{where} raised {type(error).__name__}: {error}; correct it"
            ) from error
        count = len(self._prompts)
        rule = f"must return one finite weight of 0 or more for each of the {count} prompts"
        if weights.shape != (count,):
            raise DataError(f"{where} {rule}, got an array of shape {weights.shape}")
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))[0]
            raise DataError(f"{where} {rule}, got {weights[bad]} for prompt {bad}")
        if not weights.any():
            raise DataError(f"{where} gave every prompt the weight 0; give one at least more")
        return weights

    def take(self, count: int) -> tuple[Prompt, ...]:
        """Draws `count` prompts by weight without replacement.

        Gumbel top-k: the largest of log weight + Gumbel noise (arXiv:1903.06059, Sec. 2.3).
        """
        if not count:
            return ()
        weights = self.weights()
        noise = np.random.default_rng((self._seed, self._num_draws)).gumbel(size=len(weights))
        with np.errstate(divide="ignore"):
            order = np.argsort(-(np.log(weights) + noise), kind="stable")
        order = np.resize(order[: np.count_nonzero(weights)], count)
        self._num_draws += 1
        self.statistics.last_batch[order] = self._num_draws
        return tuple(self._prompts[i] for i in order)

    def learn(self, prompts: Sequence[Prompt], scores: Sequence[np.ndarray]) -> None:
        """Adds the scores of the responses to prompts that `take` returned."""
        statistics, config = self.statistics, self._config
        for prompt, prompt_scores in zip(prompts, scores, strict=True):
            # A prompt none of whose responses could be scored adds nothing.
            if len(prompt_scores) and (place := self._places.get(id(prompt))) is not None:
                increments = (
                    len(prompt_scores),
                    np.sum(prompt_scores >= config.success_score),
                    np.sum(prompt_scores),
                )
                sums = statistics.answers, statistics.successes, statistics.scores
                for array, value in zip(sums, increments, strict=True):
                    array[place] = config.memory * array[place] + value

    def get_state(self) -> dict[str, Any]:
        """The number of draws and the statistics, as JSON-compatible state."""
        packed = np.stack(list(vars(self.statistics).values())).astype("<f8").tobytes()
        content = base64.b64encode(zlib.compress(packed)).decode()
        return {**self._identity, "num_draws": self._num_draws, "known": content}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `get_state` returned for the same prompts."""
        remedy = "restore the data and the config of the saved run"
        check_saved("curriculum", state, self._identity, remedy)
        values = np.frombuffer(zlib.decompress(base64.b64decode(state["known"])), "<f8")
        self.statistics = PromptStatistics(*values.reshape(-1, len(self._prompts)).copy())
        self._num_draws = state["num_draws"]

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        return {"num_rows": len(self._prompts), "seed": self._seed, "choice": self._config.choice}
