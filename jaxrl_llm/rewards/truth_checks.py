"""Checks of all ground truths by their reward functions, before a model is loaded.

A row whose ground truth no answer can equal teaches nothing, and the run would not notice.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm import console
from jaxrl_llm.config.algorithm import is_import_path
from jaxrl_llm.config.rollout_data import RewardFunctionConfig, RewardsConfig
from jaxrl_llm.data.datasets import Dataset
from jaxrl_llm.data.streaming import StreamedRows
from jaxrl_llm.data.streams import MixedRows, Rows, streamed_parts
from jaxrl_llm.rewards import functions as functions_lib
from jaxrl_llm.rewards.reward_pool import RewardCall, RewardError, RewardPool
from jaxrl_llm.types import Prompt

_NUM_LISTED = 10  # rows listed in a report
_NUM_IN_CALL = 200  # truths that a user's function checks per call

logger = logging.getLogger(__name__)

Terms = Mapping[str, RewardFunctionConfig]


class _Fault(NamedTuple):
    """A row with an unreadable ground truth."""

    prompt: Prompt
    term: str
    function: str
    problem: str

    def __str__(self) -> str:
        where = self.prompt.where or f"row {self.prompt.index}"
        return f"{where}: {self.function!r} ({self.term}): {self.problem}"


def without_unreadable_truths(
    splits: Mapping[str, tuple[Dataset, RewardsConfig]],
) -> dict[str, Dataset]:
    """The dataset of each split without rows whose ground truth its functions cannot read.

    Every function with a `check_truth` checks every row of its data source; users' functions run in
    a process of their own, with its limits. Of streamed rows the first are checked here, the others
    when they are drawn. With `rewards.unreadable_truths="refuse"` one such row raises a RewardError
    that lists those of all splits; with "leave_out" they are dropped and counted.
    """
    with _UserChecks() as user_checks:
        faults = {
            name: _faults(config, split.prompts, user_checks)
            for name, (split, config) in splits.items()
        }
    refused = [
        fault
        for name, (_, config) in splits.items()
        if config.unreadable_truths == "refuse"
        for fault in faults[name]
    ]
    if refused:
        raise RewardError(_report(refused, sum(len(split.prompts) for split, _ in splits.values())))
    return {
        name: _without_faulty_rows(name, split, config, faults[name])
        for name, (split, config) in splits.items()
    }


def _report(faults: Sequence[_Fault], num_rows: int) -> str:
    rows = len({(fault.prompt.where, fault.prompt.index) for fault in faults})
    listed = "\n".join(f"  {fault}" for fault in faults[:_NUM_LISTED])
    more = len(faults) - _NUM_LISTED
    return (
        f"{rows} of {num_rows} rows have a ground truth that no answer can equal:\n{listed}\n"
        + (f"  ... and {more} more\n" if more > 0 else "")
        + "Correct these rows, or set rewards.unreadable_truths='leave_out' to go on without them"
    )


class _UserChecks(contextlib.ExitStack):
    """The processes that run checks of users' functions, shared by all splits."""

    def __init__(self) -> None:
        super().__init__()
        self._pools: dict[tuple[str, ...], RewardPool] = {}

    def pool(self, functions: Sequence[str], config: RewardsConfig) -> RewardPool:
        """The one-process pool with these functions, with the limits of the first config."""
        names = tuple(sorted(set(functions)))
        if names not in self._pools:
            one_worker = dataclasses.replace(
                config, num_workers=1, ray_workers=min(1, config.ray_workers)
            )
            self._pools[names] = self.enter_context(RewardPool(names, one_worker))
        return self._pools[names]


def _faults(
    config: RewardsConfig, prompts: Sequence[Prompt], user_checks: _UserChecks
) -> list[_Fault]:
    """The rows that a function cannot read, in order, each once."""
    faults: dict[int, _Fault] = {}
    terms: Terms = {**config.functions, **config.cost_functions}
    user_functions = [term.function for term in terms.values() if is_import_path(term.function)]
    for name, term in terms.items() if prompts else ():
        if term.function in user_functions:
            pool = user_checks.pool(user_functions, config)
            _add_faults(faults, name, term, prompts, functools.partial(_problems_in_pool, pool))
        # `rewards.base.check_rewards` rejects others
        elif term.function in functions_lib.REWARD_FUNCTIONS:
            _add_faults(faults, name, term, prompts, _problems_in_process)
    return [faults[row] for row in sorted(faults)]


ProblemFinder = Callable[[str, Sequence[Prompt]], Iterable[tuple[int, str]]]


def _add_faults(
    faults: dict[int, _Fault],
    name: str,
    term: RewardFunctionConfig,
    prompts: Sequence[Prompt],
    problems_of: ProblemFinder,
) -> None:
    rows = [i for i, p in enumerate(prompts) if term.data_source in ("*", p.data_source)]
    for index, problem in problems_of(term.function, [prompts[row] for row in rows]):
        fault = _Fault(prompts[rows[index]], name, term.function, problem)
        faults.setdefault(rows[index], fault)


def _problems_in_process(function: str, prompts: Sequence[Prompt]) -> Iterable[tuple[int, str]]:
    built_in = functions_lib.resolve(function)
    if functions_lib.truth_check(built_in) is None:
        return ()
    with console.show_progress(f"reading the ground truths for {function!r}"):
        return functions_lib.truth_problems(built_in, [p.ground_truth for p in prompts]).items()


def _problems_in_pool(
    pool: RewardPool, function: str, prompts: Sequence[Prompt]
) -> Iterator[tuple[int, str]]:
    def check(first: int, count: int) -> Mapping[str, Any]:
        chunk = prompts[first : first + count]
        truths = [prompt.ground_truth for prompt in chunk]
        call = RewardCall(function, first, "", "", truths, {}, is_check=True)
        (outcome,) = pool.attempt([call])
        if outcome.failure and count == 1:
            return {"problems": {"0": f"its check_truth failed: {outcome.failure}"}}
        if outcome.failure:  # one of them made the check fail: find it
            problems = [check(first + i, 1)["problems"] for i in range(len(chunk))]
            return {"problems": {str(i): p["0"] for i, p in enumerate(problems) if p}}
        return outcome.details

    if not prompts or not check(0, 0).get("has_check"):
        return
    for first in range(0, len(prompts), _NUM_IN_CALL):
        for index, problem in check(first, _NUM_IN_CALL)["problems"].items():
            yield first + int(index), problem


def _without_faulty_rows(
    name: str, split: Dataset, config: RewardsConfig, faults: Sequence[_Fault]
) -> Dataset:
    total, unreadable = len(split.prompts), {id(fault.prompt) for fault in faults}
    kept = tuple(prompt for prompt in split.prompts if id(prompt) not in unreadable)
    if faults and not kept and not streamed_parts(split.rows):
        raise RewardError(
            f"config.rewards.unreadable_truths: 'leave_out' leaves none of the {total} rows of"
            f" the {name} split; the first: {faults[0]}; correct the rows or the function"
        )
    if faults:
        message = (
            "%s split: left out %d of %d rows whose ground truth no answer can equal; first: %s"
        )
        logger.warning(message, name, total - len(kept), total, faults[0])
    rows = _readable_rows(split.rows, config, unreadable)
    return dataclasses.replace(split, prompts=kept or split.prompts, rows=rows)


def _readable_rows(
    rows: Rows[Prompt], config: RewardsConfig, unreadable: Collection[int]
) -> Rows[Prompt]:
    """Rows without the unreadable ones; streamed rows are checked when drawn."""
    if isinstance(rows, MixedRows):
        parts: Any = tuple(_readable_rows(part, config, unreadable) for part in rows.parts)
        if not all(len(part) for part in parts):
            raise RewardError(
                "config.rewards.unreadable_truths: 'leave_out' leaves nothing of one of"
                " data.train_files; leave it and its weight out"
            )
        return MixedRows(parts, rows.shares)
    if not isinstance(rows, StreamedRows):
        return [prompt for prompt in rows if id(prompt) not in unreadable]
    checks = _built_in_checks(config)

    def readable_prompt(prompt: Prompt) -> Prompt | None:
        for name, term, check in checks:
            if term.data_source not in ("*", prompt.data_source):
                continue
            try:
                check(prompt.ground_truth)
            except ValueError as error:
                fault = _Fault(prompt, name, term.function, str(error))
                if config.unreadable_truths == "refuse":
                    raise RewardError(_report([fault], 1)) from error
                logger.warning("left out: %s", fault)
                return None
        return prompt

    streamed: Any = rows.map(readable_prompt)
    streamed.rule = f"{rows.rule}, or have a ground truth that no answer can equal"
    return streamed


def _built_in_checks(
    config: RewardsConfig,
) -> list[tuple[str, RewardFunctionConfig, functions_lib.TruthCheck]]:
    terms: Terms = {**config.functions, **config.cost_functions}
    return [
        (name, term, check)
        for name, term in terms.items()
        if term.function in functions_lib.REWARD_FUNCTIONS
        and (check := functions_lib.truth_check(functions_lib.resolve(term.function)))
    ]
