"""Curricula: prompts chosen by what is known of them, from the scores of earlier answers."""

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

_PRIOR = 0.1  # of an answer: what is believed of a prompt with no answer, half a success


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of P prompts. Earlier answers count `CurriculumConfig.memory` times less."""

    answers: Float[np.ndarray, " P"]  # that were scored
    successes: Float[np.ndarray, " P"]
    scores: Float[np.ndarray, " P"]  # their sum
    last_batch: Float[np.ndarray, " P"]  # in which the prompt was drawn, from 1; 0: never

    @classmethod
    def nothing(cls, count: int) -> "Known":
        """Returns that no prompt was drawn yet."""
        return cls(*(np.zeros(count) for _ in dataclasses.fields(cls)))


def between(answers: np.ndarray, successes: np.ndarray, floor: float) -> Float[np.ndarray, " P"]:
    """Returns weights of prompts: 4 p (1 - p) at the success rate p, and at least `floor`.

    It is the variance of a success, 1 where half of the answers are right and 0 where all or none
    are: groups of equal scores teach nothing. A prompt without an answer counts as one of p = 0.5;
    a tenth of such an answer is added to each.

    >>> between(np.array([0.0, 8.0, 8.0]), np.array([0.0, 4.0, 0.0]), floor=0.05).round(2)
    array([1.  , 1.  , 0.05])
    """
    rates = (successes + _PRIOR / 2) / (answers + _PRIOR)
    return np.maximum(4 * rates * (1 - rates), floor)


CHOICES: Mapping[str, Callable[..., Float[np.ndarray, " P"]]] = {"success": between}


def check(config: CurriculumConfig, prompts: Sequence[Prompt]) -> None:
    """Raises a DataError if the function of a curriculum cannot be found or does not work."""
    if config.choice:
        Curriculum(prompts, config, 0).weights()


def metrics(curricula: Sequence["Curriculum"]) -> dict[str, float]:
    """Returns the share of the prompts that were answered, and what share of these is easy or hard.

    `solved`: nine of ten answers or more are successes; `unsolved`: one of ten or fewer.
    """
    answers = np.concatenate([each.known.answers for each in curricula])
    successes = np.concatenate([each.known.successes for each in curricula])
    answered = answers > 0
    rates = successes[answered] / answers[answered]
    num = max(1, len(rates))
    return {
        "curriculum/answered": float(answered.mean()),
        "curriculum/solved": float((rates >= 0.9).sum() / num),
        "curriculum/unsolved": float((rates <= 0.1).sum() / num),
    }


class Curriculum:
    """Prompts drawn by weights that a function of what is known of them gives.

    No prompt comes twice in a draw unless fewer have a weight above 0. The seed, what is known and
    the number of draws decide alone what comes.
    """

    def __init__(self, prompts: Sequence[Prompt], config: CurriculumConfig, seed: int):
        self._prompts = tuple(prompts)
        self._config = config
        self._seed = seed
        self.known = Known.nothing(len(prompts))
        self._num_draws = 0
        self._places = {id(prompt): place for place, prompt in enumerate(self._prompts)}
        try:
            self._function = lookup.resolve(config.choice, CHOICES, "choice of prompts")
        except Exception as error:  # whatever the user's file raises when it is imported
            raise DataError(f"config.curriculum.choice: {error}") from error

    def weights(self) -> Float[np.ndarray, " P"]:
        """Returns the weight of each prompt; a DataError if the function gives no weights."""
        where = f"config.curriculum.choice: {self._config.choice!r}"
        available = {
            **{name: array.copy() for name, array in vars(self.known).items()},
            "batch": self._num_draws + 1,
            "floor": self._config.floor,
            "prompts": self._prompts,
        }
        try:
            found = np.asarray(lookup.call_by_name(self._function, available, where), np.float64)
        except lookup.FunctionError:
            raise
        except Exception as error:  # whatever the user's function raises
            raise DataError(
                f"{where} raised {type(error).__name__}: {error}; correct it"
            ) from error
        count = len(self._prompts)
        rule = f"must return one finite weight of 0 or more for each of the {count} prompts"
        if found.shape != (count,):
            raise DataError(f"{where} {rule}, got an array of shape {found.shape}")
        if not (np.isfinite(found).all() and (found >= 0).all()):
            wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))[0]
            raise DataError(f"{where} {rule}, got {found[wrong]} for prompt {wrong}")
        if not found.any():
            raise DataError(f"{where} gave every prompt the weight 0; give one at least more")
        return found

    def take(self, count: int) -> tuple[Prompt, ...]:
        """Returns `count` prompts: of each, in turn, as if drawn by weight and not put back.

        By the largest of log weight + Gumbel noise (arXiv:1903.06059, Sec. 2.3).
        """
        if not count:
            return ()
        weights = self.weights()
        noise = np.random.default_rng((self._seed, self._num_draws)).gumbel(size=len(weights))
        with np.errstate(divide="ignore"):
            order = np.argsort(-(np.log(weights) + noise), kind="stable")
        order = np.resize(order[: np.count_nonzero(weights)], count)
        self._num_draws += 1
        self.known.last_batch[order] = self._num_draws
        return tuple(self._prompts[i] for i in order)

    def learn(self, prompts: Sequence[Prompt], scores: Sequence[np.ndarray]) -> None:
        """Takes the scores of the answers to each of these prompts, which `take` gave."""
        known, config = self.known, self._config
        for prompt, found in zip(prompts, scores, strict=True):
            # Nothing is known of a prompt whose answers all could not be scored.
            if len(found) and (place := self._places.get(id(prompt))) is not None:
                news = len(found), np.sum(found >= config.success_score), np.sum(found)
                sums = known.answers, known.successes, known.scores
                for array, value in zip(sums, news, strict=True):
                    array[place] = config.memory * array[place] + value

    def get_state(self) -> dict[str, Any]:
        """Returns the number of draws and what is known; JSON can hold it."""
        known = np.stack(list(vars(self.known).values())).astype("<f8").tobytes()
        content = base64.b64encode(zlib.compress(known)).decode()
        return {**self._identity, "num_draws": self._num_draws, "known": content}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state that `get_state` returned for the same prompts."""
        remedy = "restore the data and the config of the saved run"
        check_saved("curriculum", state, self._identity, remedy)
        known = np.frombuffer(zlib.decompress(base64.b64decode(state["known"])), "<f8")
        self.known = Known(*known.reshape(-1, len(self._prompts)).copy())
        self._num_draws = state["num_draws"]

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        return {"num_rows": len(self._prompts), "seed": self._seed, "choice": self._config.choice}
