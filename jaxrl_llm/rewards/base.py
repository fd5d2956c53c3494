"""Scores of responses: the weighted sum of reward functions and reward models.

The functions run in processes (`reward_pool.py`); the models are callables of the learner.
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
from jaxrl_llm.config.judges import JudgeConfig
from jaxrl_llm.config.rollout_data import RewardFunctionConfig, RewardModelConfig, RewardsConfig
from jaxrl_llm.rewards import functions
from jaxrl_llm.rewards.early_calls import EarlyCalls
from jaxrl_llm.rewards.judge import VOTE_STATISTICS, Judge
from jaxrl_llm.rewards.reward_pool import RewardCall, RewardError, RewardPool
from jaxrl_llm.rewards.reward_worker import LARGEST_SCORE
from jaxrl_llm.sharding import multihost
from jaxrl_llm.types import Prompt, Rewards, Rollouts

logger = logging.getLogger(__name__)

ENVIRONMENT_TERM = "environment"  # name of the term for rewards of environments

ModelScorer = Callable[[Rollouts], Float[np.ndarray, " B"]]
TermConfig = RewardFunctionConfig | RewardModelConfig | JudgeConfig


def check_rewards(
    config: RewardsConfig, prompts: Sequence[Prompt] = (), distilled_sources: Collection[str] = ()
) -> None:
    """Checks all rewards before a run; RewardError if a row has none or a function always fails.

    Rows of the data sources in `distilled_sources` ("*": all) are distilled and need no reward.

    A user's file runs in a process of its own, so that it can neither end nor hang this one. Its
    functions are called on a few rows of `prompts` until one call succeeds. With
    `on_failure="score"`, a function that always fails only logs a warning.
    """
    sources = [prompt.data_source for prompt in prompts]
    check_sources(config, sources, distilled_sources, [prompt.where for prompt in prompts])
    for name, judge_config in config.judges.items():
        with Judge(name, judge_config) as judge:
            for prompt in prompts[:1]:
                judge.check(prompt)
    terms = {**config.functions, **config.cost_functions}
    for term in terms.values():
        functions.check_installed(term.function)
    user_terms = {name: term for name, term in terms.items() if is_import_path(term.function)}
    if not user_terms:
        try:
            for term in terms.values():
                if term.function not in functions.REWARD_FUNCTIONS:
                    functions.resolve(term.function)
        except ValueError as error:
            raise RewardError(str(error)) from error
        return
    one_worker = dataclasses.replace(config, num_workers=1, ray_workers=min(1, config.ray_workers))
    with RewardPool([term.function for term in terms.values()], one_worker) as pool:
        for name, term in user_terms.items():
            calls = [
                RewardCall(
                    term.function, p.index, p.data_source, text, p.ground_truth, p.extra_info
                )
                for p in [p for p in prompts if term.data_source in ("*", p.data_source)][:2]
                for text in (str(p.ground_truth), "", "The answer is 42.")
            ]
            outcomes = (pool.attempt([call])[0].failure for call in calls)
            failures = list(itertools.takewhile(bool, outcomes))
            if not failures or len(failures) < len(calls):
                continue
            problem = f"config.rewards: {name!r} ({term.function}) failed in each of {len(calls)}"
            problem += f" calls on rows of the training set: {failures[0]}"
            if config.on_failure == "stop":
                raise RewardError(f"{problem}\nCorrect the function")
            logger.warning("%s", problem)


def check_sources(
    config: RewardsConfig,
    sources: Sequence[str],
    distilled_sources: Collection[str] = (),
    locations: Sequence[str] = (),
) -> None:
    """Raises RewardError if no reward applies to a row, given the data sources of all rows.

    `locations`: their files and rows, if known. Sources in `distilled_sources` need no reward, as
    in `check_rewards`.
    """
    covered = {name: term.data_source for name, term in config.reward_terms.items()}
    scored = {*covered.values(), *distilled_sources}
    if "*" in scored:
        return
    for row, source in enumerate(sources):
        if source not in scored:
            where = locations[row] if locations and locations[row] else f"row {row}"
            raise RewardError(
                f"{where}: no reward applies to data source {source!r}; the terms of"
                f" config.rewards apply to {covered}; add one for it, or one with data_source='*'"
            )


class RolloutScorer(contextlib.AbstractContextManager["RolloutScorer"]):
    """Scores rollouts; a context manager that ends its processes.

    `model_scorers` has a callable for each of `models` and `cost_models`; RewardError if it has
    not, or if a function cannot be found. Rows of the data sources in `distilled_sources` need no
    reward, as in `check_rewards`. With `environments`, their rewards are another term.
    """

    def __init__(
        self,
        config: RewardsConfig,
        model_scorers: Mapping[str, ModelScorer],
        distilled_sources: Collection[str] = (),
        environments: bool = False,
    ):
        model_names = {*config.models, *config.cost_models}
        if model_names != set(model_scorers):
            problem = f"scorers were given for {sorted(model_scorers)}; give one for each"
            raise RewardError(f"config.rewards names the models {sorted(model_names)}, {problem}")
        self._config, self._taught, self._environments = config, distilled_sources, environments
        self._reward_terms = config.reward_terms
        self._cost_terms: dict[str, TermConfig] = {**config.cost_functions, **config.cost_models}
        if shared := sorted(set(self._reward_terms) & set(self._cost_terms)):
            raise RewardError(f"config.rewards: {shared} name a reward and a cost; rename one")
        self._model_scorers = dict(model_scorers)
        terms = [*config.functions.values(), *config.cost_functions.values()]
        self._pool = RewardPool([term.function for term in terms], config)
        self._early = EarlyCalls(self._pool)
        self._judges = {name: Judge(name, judge) for name, judge in config.judges.items()}

    def __exit__(self, *exception) -> None:
        self._pool.close()
        self._early.close()
        for judge in self._judges.values():
            judge.__exit__(*exception)

    def set_model_scorers(self, model_scorers: Mapping[str, ModelScorer]) -> None:
        """Replaces the model scorers: the same models, moved to other devices."""
        self._model_scorers = dict(model_scorers)

    @property
    def can_start_early(self) -> bool:
        """Whether `submit` has an effect: there are functions, and a single JAX process.

        Several processes would have to begin the same calls.
        """
        has_functions = bool(self._config.functions or self._config.cost_functions)
        return has_functions and jax.process_count() == 1

    def start_early(self, rollouts: Rollouts, first_row: int = 0) -> None:
        """Starts the calls for responses that `score` will receive later, in the background.

        `first_row` is the row of the first of them in that later batch.
        """
        if self.can_start_early:
            self._early.submit([call for _, call in self._calls(rollouts, first_row)])

    def score(self, rollouts: Rollouts) -> Rewards:
        """The score of each response; all functions share one pass over the workers.

        A term applies to the rows of its `data_source`, or to all with "*"; `scores` and `costs`
        are the sums of weight times term over those that apply. `baselines` are 0. `details` holds
        the keys that the row's functions returned beside the score; of two equal keys the second
        is stored as `term/key`. The reward of environments is the term "environment". With
        `on_failure="leave_out"`, rows with a failed call are `excluded`.
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
        votes: dict[str, np.ndarray] = {}
        for name in self._judges:
            rows = np.flatnonzero(applies[name])
            lost, own_votes = self._ask_judge(name, rollouts, rows, values[name], failures)
            num_calls, num_failures = num_calls + len(rows), num_failures + lost
            votes |= own_votes
        left_out = None
        if self._config.on_failure == "leave_out":
            left_out = np.array([bool(failure) for failure in failures])
        for name, scorer in self._model_scorers.items():
            if applies[name].any():
                scores = _checked_scores(name, scorer(rollouts), len(sources))
                values[name] = np.where(applies[name], scores, 0.0)
        weights = {name: term.weight * applies[name] for name, term in terms.items()}
        names, weighted_turn_rewards = list(self._reward_terms), None
        if self._environments:
            names.append(ENVIRONMENT_TERM)
            has_environment = np.array([bool(log.environment) for log in rollouts.episode_logs])
            weights[ENVIRONMENT_TERM] = self._config.environment_weight * has_environment
            logs_and_roles = zip(rollouts.episode_logs, rollouts.role_ids.tolist(), strict=True)
            episode_rewards = [log.total_reward(role) for log, role in logs_and_roles]
            values[ENVIRONMENT_TERM] = np.array(episode_rewards)
            weighted_turn_rewards = self._config.environment_weight * turn_rewards(rollouts)

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
            turn_rewards=weighted_turn_rewards,
            failures=tuple(failures),
            excluded=left_out,
            votes=votes,
        )

    def _ask_judge(
        self,
        name: str,
        rollouts: Rollouts,
        rows: np.ndarray,
        values: Float[np.ndarray, " B"],
        failures: list[str],
    ) -> tuple[int, dict[str, Float[np.ndarray, " B"]]]:
        """Fills a judge's part of `values` and `failures` in place.

        Each host asks about the groups of its own share. Returns the number of rows without a vote,
        and `Rewards.votes`. RewardError for the first of these rows if failures stop the run.
        """
        own_groups = rollouts.comparison_ids[rows] % jax.process_count() == jax.process_index()
        own_rows = rows[own_groups].tolist()

        def ask() -> list[Any]:
            judged = self._judges[name].score(rollouts, own_rows)
            columns = {key: array.tolist() for key, array in judged.statistics.items()}
            return [own_rows, judged.scores.tolist(), list(judged.failures), columns]

        votes = {f"{name}/{key}": np.full(len(values), np.nan) for key in VOTE_STATISTICS}
        num_failures = 0
        for judged_rows, scores, reasons, columns in multihost.run_on_all_hosts(ask):
            values[judged_rows] = scores
            for key, column in columns.items():
                votes[f"{name}/{key}"][judged_rows] = column
            for row, score_row in enumerate(judged_rows):
                if not (reason := reasons[row]):
                    continue
                num_failures += 1
                values[score_row] = self._config.failure_score
                failures[score_row] = failures[score_row] or f"{name}: {reason}"
                if self._config.on_failure == "stop":
                    raise RewardError(
                        f"judge {name!r}, row {score_row}: {reason}\nCorrect the address or the"
                        " rubric, or set rewards.on_failure='score' to give such responses"
                        f" {self._config.failure_score:g}, or 'leave_out' to learn without them"
                    )
        return num_failures, votes

    def _calls(self, rollouts: Rollouts, first_row: int = 0) -> list[tuple[str, RewardCall]]:
        """The calls of reward functions, each with the name of its term."""
        calls = []
        for name, term in {**self._config.functions, **self._config.cost_functions}.items():
            for row, group in enumerate(rollouts.group_ids.tolist()):
                prompt = rollouts.prompts[group]
                if term.data_source not in ("*", prompt.data_source):
                    continue
                info = dict(prompt.extra_info)
                if term.function == "math":  # options of the row take precedence
                    info = {**vars(self._config.math), **info}
                if rollouts.episode_logs:
                    log = rollouts.episode_logs[row]
                    info |= {"messages": log.messages, "num_turns": log.num_turns}
                    if rollouts.roles is not None:
                        info["role"] = int(rollouts.roles[row])
                call = RewardCall(
                    function=term.function,
                    row=first_row + row,
                    data_source=prompt.data_source,
                    solution_str=rollouts.responses[row],
                    ground_truth=prompt.ground_truth,
                    extra_info=info,
                    location=getattr(prompt, "where", ""),
                )
                calls.append((name, call))
        return calls

    def _call_functions(
        self,
        rollouts: Rollouts,
        values: Mapping[str, Float[np.ndarray, " B"]],
        details: Sequence[dict[str, Any]],
        failures: list[str],
    ) -> tuple[int, int]:
        """Fills the functions' part of `values`, `details` and `failures` in place.

        Returns the number of calls and of failed calls. Each host runs the calls of its own rows
        and gathers the outcomes of all hosts.
        """
        calls = self._calls(rollouts)
        own_rows = multihost.local_rows(len(rollouts.responses))
        own_calls = {i: call for i, (_, call) in enumerate(calls) if call.row in own_rows}

        def run() -> list[tuple[int, float, Mapping[str, Any], str]]:
            outcomes = self._early.collect(list(own_calls.values())) if own_calls else []
            pairs = zip(own_calls, outcomes, strict=True)
            return [(i, o.score, o.details, o.failure) for i, o in pairs]

        num_failures = 0
        for i, score, returned_keys, failure in itertools.chain(*multihost.run_on_all_hosts(run)):
            name, call = calls[i]
            values[name][call.row] = score
            num_failures += bool(failure)
            failures[call.row] = failures[call.row] or (f"{name}: {failure}" if failure else "")
            row_details = details[call.row]
            for key, value in returned_keys.items():
                row_details[f"{name}/{key}" if key in row_details else key] = value
        return len(calls), num_failures


def turn_rewards(rollouts: Rollouts) -> Float[np.ndarray, "B T"]:
    """The environment's reward of each turn, placed on the last sampled token of the turn.

    A row holds the last turns of its episode.
    """
    mask = rollouts.response_mask
    rewards = np.zeros(mask.shape, np.float32)
    is_turn_end = mask & ~np.pad(mask[:, 1:], ((0, 0), (0, 1)))
    for row, log in enumerate(rollouts.episode_logs):
        end_positions = np.flatnonzero(is_turn_end[row])
        last_rewards = log.turn_rewards[log.num_turns - len(end_positions) :]
        rewards[row, end_positions[: len(last_rewards)]] = last_rewards
    return rewards


def _checked_scores(name: str, scores: np.ndarray, num_rows: int) -> Float[np.ndarray, " B"]:
    scores = np.asarray(scores, np.float32)
    if scores.shape != (num_rows,):
        problem = f"model {name!r} returned scores of shape {scores.shape}"
        raise RewardError(f"{problem}, one for each of the {num_rows} rows is needed")
    for row in np.flatnonzero(~np.isfinite(scores)):
        raise RewardError(f"model {name!r}, row {row}: returned {scores[row]}, not a finite number")
    return scores
