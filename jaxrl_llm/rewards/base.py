"""What a response is worth: the weighted sum of reward functions and reward models.

The functions run in processes (`pool.py`); the models are callables that the learner gives.
"""

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from jaxrl_llm.config.algorithm import is_import_path
from jaxrl_llm.config.samples import RewardFunctionConfig, RewardModelConfig, RewardsConfig
from jaxrl_llm.rewards import functions
from jaxrl_llm.rewards.early import EarlyCalls
from jaxrl_llm.rewards.on_ray import pool_of
from jaxrl_llm.rewards.pool import Call, RewardError
from jaxrl_llm.rewards.worker import LARGEST_SCORE
from jaxrl_llm.sharding import hosts
from jaxrl_llm.types import Prompt, Rewards, Rollouts

logger = logging.getLogger(__name__)

ENVIRONMENT = "environment"  # the term of what environments give

ModelScorer = Callable[[Rollouts], Float[np.ndarray, " B"]]
TermConfig = RewardFunctionConfig | RewardModelConfig


def check(
    config: RewardsConfig, prompts: Sequence[Prompt] = (), taught: Collection[str] = ()
) -> None:
    """Raises RewardError if a row has no reward, or a function cannot be found or always fails.

    Rows of the data sources in `taught` ("*": all) have a teacher and need no reward.

    A user's file is run in a process of its own, so that it can neither end nor hang this one. Its
    functions are called on a few rows of `prompts` until one call succeeds. With
    `on_failure="score"`, a function that always fails is a warning.
    """
    sources = [prompt.data_source for prompt in prompts]
    check_sources(config, sources, taught, [prompt.where for prompt in prompts])
    terms = {**config.functions, **config.cost_functions}
    users = {name: term for name, term in terms.items() if is_import_path(term.function)}
    if not users:
        try:
            for term in terms.values():
                if term.function not in functions.REWARD_FUNCTIONS:
                    functions.resolve(term.function)
        except ValueError as error:
            raise RewardError(str(error)) from error
        return
    one = dataclasses.replace(config, num_workers=1, ray_workers=min(1, config.ray_workers))
    with pool_of([term.function for term in terms.values()], one) as pool:
        for name, term in users.items():
            calls = [
                Call(term.function, p.index, p.data_source, text, p.ground_truth, p.extra_info)
                for p in [p for p in prompts if term.data_source in ("*", p.data_source)][:2]
                for text in (str(p.ground_truth), "", "The answer is 42.")
            ]
            outcomes = (pool.attempt([call])[0].failure for call in calls)
            failures = list(itertools.takewhile(bool, outcomes))
            if not failures or len(failures) < len(calls):
                continue
            said = f"config.rewards: {name!r} ({term.function}) failed in each of {len(calls)}"
            said += f" calls on rows of the training set: {failures[0]}"
            if config.on_failure == "stop":
                raise RewardError(f"{said}\nCorrect the function")
            logger.warning("%s", said)


def check_sources(
    config: RewardsConfig,
    sources: Sequence[str],
    taught: Collection[str] = (),
    wheres: Sequence[str] = (),
) -> None:
    """Raises RewardError if no reward applies to a row, given the data sources of all rows.

    `wheres` are their files and rows, as far as known. Those in `taught` need none, as in `check`.
    """
    terms: dict[str, TermConfig] = {**config.functions, **config.models}
    known = {name: term.data_source for name, term in terms.items()}
    scored = {*known.values(), *taught}
    if "*" in scored:
        return
    for row, source in enumerate(sources):
        if source not in scored:
            where = wheres[row] if wheres and wheres[row] else f"row {row}"
            raise RewardError(
                f"{where}: no reward applies to data source {source!r}; the terms of"
                f" config.rewards apply to {known}; add one for it, or one with data_source='*'"
            )


class Scorer(contextlib.AbstractContextManager["Scorer"]):
    """Scores rollouts; a context manager that ends its processes.

    `model_scorers` are for each of `models` and `cost_models`. RewardError: they are not, or a
    function cannot be found. Rows of the data sources in `taught` need no reward, as in `check`.
    With `environments`, what these give is a term.
    """

    def __init__(
        self,
        config: RewardsConfig,
        model_scorers: Mapping[str, ModelScorer],
        taught: Collection[str] = (),
        environments: bool = False,
    ):
        wanted = {*config.models, *config.cost_models}
        if wanted != set(model_scorers):
            given = f"scorers were given for {sorted(model_scorers)}; give one for each"
            raise RewardError(f"config.rewards names the models {sorted(wanted)}, {given}")
        self._config, self._taught, self._environments = config, taught, environments
        self._reward_terms: dict[str, TermConfig] = {**config.functions, **config.models}
        self._cost_terms: dict[str, TermConfig] = {**config.cost_functions, **config.cost_models}
        if shared := sorted(set(self._reward_terms) & set(self._cost_terms)):
            raise RewardError(f"config.rewards: {shared} name a reward and a cost; rename one")
        self._model_scorers = dict(model_scorers)
        terms = [*config.functions.values(), *config.cost_functions.values()]
        self._pool = pool_of([term.function for term in terms], config)
        self._early = EarlyCalls(self._pool)

    def __exit__(self, *exception) -> None:
        self._pool.close()
        self._early.close()

    def use(self, model_scorers: Mapping[str, ModelScorer]) -> None:
        """Scores with these models from now on: the same ones, on other devices."""
        self._model_scorers = dict(model_scorers)

    @property
    def begins_early(self) -> bool:
        """Whether `begin` is of use: there are functions, and one process.

        Several processes would have to begin the same calls.
        """
        has_functions = bool(self._config.functions or self._config.cost_functions)
        return has_functions and jax.process_count() == 1

    def begin(self, rollouts: Rollouts, first_row: int = 0) -> None:
        """Begins the calls for responses that `score` will be asked about, beside other work.

        `first_row` is the row of the first of them then.
        """
        if self.begins_early:
            self._early.begin([call for _, call in self._calls(rollouts, first_row)])

    def score(self, rollouts: Rollouts) -> Rewards:
        """Returns the score of each response; all functions share one pass over the workers.

        A term applies to the rows of its `data_source`, or to all with "*"; `scores` and `costs`
        are the sums of weight times term over those that apply. `baselines` are 0. `details` holds
        the keys that the row's functions returned beside the score; a key that two of them return
        is kept for the later one as `term/key`. What environments gave is the term "environment".
        With `on_failure="leave_out"` rows of which a call failed are `left_out`.
        RewardError if no reward applies to a row, a model gave no finite score for each row, or a
        function failed and `on_failure` is "stop".
        """
        terms = {**self._reward_terms, **self._cost_terms}
        sources = [rollouts.prompts[group].data_source for group in rollouts.group_ids]
        check_sources(self._config, sources, self._taught)
        applies = {
            name: np.array([term.data_source in ("*", source) for source in sources], bool)
            for name, term in terms.items()
        }
        details: list[dict[str, Any]] = [{} for _ in sources]
        values = {name: np.zeros(len(sources)) for name in terms}
        failures = [""] * len(sources)
        num_calls, num_failures = self._call_functions(rollouts, values, details, failures)
        left_out = None
        if self._config.on_failure == "leave_out":
            left_out = np.array([bool(failure) for failure in failures])
        for name, scorer in self._model_scorers.items():
            if applies[name].any():
                scores = _checked_scores(name, scorer(rollouts), len(sources))
                values[name] = np.where(applies[name], scores, 0.0)
        weights = {name: term.weight * applies[name] for name, term in terms.items()}
        names, by_turn = list(self._reward_terms), None
        if self._environments:
            names.append(ENVIRONMENT)
            judged = np.array([bool(log.environment) for log in rollouts.logs])
            weights[ENVIRONMENT] = self._config.environment_weight * judged
            given = [log.reward + sum(log.turn_rewards) for log in rollouts.logs]
            values[ENVIRONMENT] = np.array(given)
            by_turn = self._config.environment_weight * turn_rewards(rollouts)

        def weighted_sum(names: Collection[str]) -> Float[np.ndarray, " B"]:
            total = sum((weights[n] * values[n] for n in names), np.zeros(len(sources)))
            for row in np.flatnonzero(np.abs(total) > LARGEST_SCORE):
                raise RewardError(
                    f"row {row}: weight times score of {', '.join(names)} add up to"
                    f" {total[row]:g}, more than float32 holds; lower the weights in config.rewards"
                )
            return total.astype(np.float32)

        return Rewards(
            scores=weighted_sum(names),
            terms={name: values[name].astype(np.float32) for name in names},
            weights={name: weights[name].astype(np.float32) for name in names},
            costs=weighted_sum(self._cost_terms),
            baselines=np.zeros(len(sources), np.float32),
            details=tuple(details),
            num_failures=num_failures,
            num_calls=num_calls,
            turn_rewards=by_turn,
            failures=tuple(failures),
            left_out=left_out,
        )

    def _calls(self, rollouts: Rollouts, first_row: int = 0) -> list[tuple[str, Call]]:
        """Returns the calls of functions, each with the name of its term."""
        calls = []
        for name, term in {**self._config.functions, **self._config.cost_functions}.items():
            for row, group in enumerate(rollouts.group_ids.tolist()):
                prompt = rollouts.prompts[group]
                if term.data_source not in ("*", prompt.data_source):
                    continue
                info = dict(prompt.extra_info)
                if term.function == "math":  # what a row says itself goes before
                    info = {**vars(self._config.math), **info}
                if rollouts.logs:
                    log = rollouts.logs[row]
                    info |= {"messages": log.messages, "num_turns": log.num_turns}
                given = prompt.data_source, rollouts.responses[row], prompt.ground_truth
                where = getattr(prompt, "where", "")
                call = Call(term.function, first_row + row, *given, info, where)
                calls.append((name, call))
        return calls

    def _call_functions(
        self,
        rollouts: Rollouts,
        values: Mapping[str, Float[np.ndarray, " B"]],
        details: Sequence[dict[str, Any]],
        failures: list[str],
    ) -> tuple[int, int]:
        """Fills the functions' part of the last three; returns the calls and those that failed.

        Each host makes the calls of its own rows, and gets the outcomes of all.
        """
        calls = self._calls(rollouts)
        own_rows = hosts.own_part(len(rollouts.responses))
        own = {i: call for i, (_, call) in enumerate(calls) if call.row in own_rows}

        def run() -> list[tuple[int, float, Mapping[str, Any], str]]:
            outcomes = self._early.finish(list(own.values())) if own else []
            return [(i, o.score, o.details, o.failure) for i, o in zip(own, outcomes, strict=True)]

        num_failures = 0
        for i, score, found, failure in itertools.chain(*hosts.together(run)):
            name, call = calls[i]
            values[name][call.row] = score
            num_failures += bool(failure)
            failures[call.row] = failures[call.row] or (f"{name}: {failure}" if failure else "")
            of_row = details[call.row]
            for key, value in found.items():
                of_row[f"{name}/{key}" if key in of_row else key] = value
        return len(calls), num_failures


def turn_rewards(rollouts: Rollouts) -> Float[np.ndarray, "B T"]:
    """Returns what environments gave for each turn, on the last token that the policy chose in it.

    The turns of a row are the last ones of its episode.
    """
    mask = rollouts.response_mask
    found = np.zeros(mask.shape, np.float32)
    ends = mask & ~np.pad(mask[:, 1:], ((0, 0), (0, 1)))
    for row, log in enumerate(rollouts.logs):
        places = np.flatnonzero(ends[row])
        given = log.turn_rewards[log.num_turns - len(places) :]
        found[row, places[: len(given)]] = given
    return found


def _checked_scores(name: str, scores: np.ndarray, num_rows: int) -> Float[np.ndarray, " B"]:
    scores = np.asarray(scores, np.float32)
    if scores.shape != (num_rows,):
        found = f"model {name!r} returned scores of shape {scores.shape}"
        raise RewardError(f"{found}, one for each of the {num_rows} rows is needed")
    for row in np.flatnonzero(~np.isfinite(scores)):
        raise RewardError(f"model {name!r}, row {row}: returned {scores[row]}, not a finite number")
    return scores
