"""Terms, weights and costs of a scorer, by hand."""

import dataclasses

import numpy as np
import pytest

from jaxrl_llm.config.rollout_data import (
    MathConfig,
    RewardFunctionConfig,
    RewardModelConfig,
    RewardsConfig,
)
from jaxrl_llm.rewards.base import RolloutScorer
from jaxrl_llm.rewards.reward_pool import RewardError
from jaxrl_llm.types import Prompt, Rollouts

USER_FILE = """
def length(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str), "acc": ground_truth, "row": extra_info["row"]}

def broken(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0 / len(solution_str), "acc": "broken"}
"""


@pytest.fixture(scope="module")
def user_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "user.py"
    path.write_text(USER_FILE)
    return str(path)


def rollouts(sources, responses, samples_per_prompt=1):
    num_rows = len(responses)
    zeros = np.zeros((num_rows, 1))
    return Rollouts(
        tokens=zeros.astype(np.int32),
        response_mask=zeros.astype(bool),
        rollout_log_probs=zeros.astype(np.float32),
        versions=zeros.astype(np.int32),
        lengths=np.ones(num_rows, np.int32),
        group_ids=np.arange(num_rows) // samples_per_prompt,
        stopped=np.ones(num_rows, bool),
        prompts=tuple(
            Prompt((1,), "?", source, f"truth {i}", {"row": i}, i)
            for i, source in enumerate(sources)
        ),
        responses=tuple(responses),
    )


def test_weighted_terms_of_the_rows_they_apply_to(user_file):
    config = RewardsConfig(
        functions={
            "length": RewardFunctionConfig(
                function=f"{user_file}:length", weight=0.5, data_source="a"
            ),
            "inverse": RewardFunctionConfig(function=f"{user_file}:broken", weight=2.0),
        },
        models={"judge": RewardModelConfig(weight=-1.0, data_source="b")},
        cost_functions={"long": RewardFunctionConfig(function=f"{user_file}:length", weight=3.0)},
        cost_models={"harm": RewardModelConfig(data_source="a")},
        num_workers=1,
    )
    scorers = {
        "judge": lambda r: np.array([9.0, 9.0, 5.0, 6.0]),
        "harm": lambda r: np.full(4, 0.25),
    }
    batch = rollouts(["a", "b"], ["xx", "xxxx", "x", "xx"], samples_per_prompt=2)
    with RolloutScorer(config, scorers) as scorer:
        rewards = scorer.score(batch)
    # Row 0: 0.5 * 2 + 2 / 2; row 1: 0.5 * 4 + 2 / 4; row 2: 2 / 1 - 5; row 3: 2 / 2 - 6.
    np.testing.assert_array_equal(rewards.scores, np.float32([2.0, 2.5, -3.0, -5.0]))
    # 3 * length, and harm on the rows of "a".
    np.testing.assert_array_equal(rewards.costs, np.float32([6.25, 12.25, 3.0, 6.0]))
    assert list(rewards.terms) == list(rewards.weights) == ["length", "inverse", "judge"]
    np.testing.assert_array_equal(rewards.terms["length"], np.float32([2, 4, 0, 0]))
    np.testing.assert_array_equal(rewards.weights["length"], np.float32([0.5, 0.5, 0, 0]))
    np.testing.assert_array_equal(rewards.terms["judge"], np.float32([0, 0, 5, 6]))
    np.testing.assert_array_equal(rewards.weights["judge"], np.float32([0, 0, -1, -1]))
    np.testing.assert_array_equal(
        rewards.scores, sum(rewards.terms[n] * rewards.weights[n] for n in rewards.terms)
    )
    np.testing.assert_array_equal(rewards.baselines, np.zeros(4, np.float32))
    assert rewards.num_failures == 0
    # Ground truth and extra_info are those of the row's prompt; a key given twice keeps both.
    assert rewards.details[0]["acc"] == "truth 0" and rewards.details[0]["row"] == 0
    assert rewards.details[0]["inverse/acc"] == "broken"
    assert rewards.details[2] == {
        "acc": "broken", "long/acc": "truth 1", "row": 1,
    }  # fmt: skip


def test_failures_are_counted(user_file):
    config = RewardsConfig(
        functions={"inverse": RewardFunctionConfig(function=f"{user_file}:broken", weight=2.0)},
        num_workers=1,
        on_failure="score",
        failure_score=-3.0,
    )
    with RolloutScorer(config, {}) as scorer:
        rewards = scorer.score(rollouts(["a"] * 3, ["", "xx", ""]))
    assert rewards.num_failures == 2
    np.testing.assert_array_equal(rewards.scores, np.float32([-6.0, 1.0, -6.0]))
    np.testing.assert_array_equal(rewards.costs, np.zeros(3, np.float32))


def test_failures_may_be_left_out(user_file):
    config = RewardsConfig(
        functions={"inverse": RewardFunctionConfig(function=f"{user_file}:broken")},
        cost_functions={"long": RewardFunctionConfig(function=f"{user_file}:length")},
        num_workers=1,
        on_failure="leave_out",
    )
    with RolloutScorer(config, {}) as scorer:
        rewards = scorer.score(rollouts(["a"] * 3, ["", "xx", ""]))
    np.testing.assert_array_equal(rewards.excluded, [True, False, True])
    np.testing.assert_array_equal(rewards.valid_rows, [False, True, False])
    assert rewards.num_failures == 2 and rewards.failures[1] == ""
    assert rewards.failures[0].startswith("inverse: ZeroDivisionError: ")


def test_the_options_of_math_reach_it_and_a_row_s_own_go_before():
    config = RewardsConfig(
        functions={"answer": RewardFunctionConfig(function="math")},
        math=MathConfig(percent="number", units="compare"),
        num_workers=1,
    )
    batch = rollouts(["a"] * 3, [r"\boxed{28\%}"] * 3)
    prompts = tuple(
        dataclasses.replace(each, ground_truth=truth, extra_info=info)
        for each, truth, info in zip(
            batch.prompts, [28, "0.28", "0.28"], [{}, {}, {"percent": "either"}], strict=True
        )
    )
    with RolloutScorer(config, {}) as scorer:
        found = scorer.score(dataclasses.replace(batch, prompts=prompts))
    np.testing.assert_array_equal(found.scores, [1.0, 0.0, 1.0])


def test_a_failure_names_file_and_row(user_file):
    config = RewardsConfig(
        functions={"inverse": RewardFunctionConfig(function=f"{user_file}:broken")}, num_workers=1
    )
    batch = rollouts(["a"] * 2, ["x", ""])
    prompts = tuple(
        dataclasses.replace(p, where=f"rows.jsonl, row {7 + i}")
        for i, p in enumerate(batch.prompts)
    )
    with (
        RolloutScorer(config, {}) as scorer,
        pytest.raises(RewardError, match=r"broken', rows\.jsonl, row 8, data source 'a': Zero"),
    ):
        scorer.score(dataclasses.replace(batch, prompts=prompts))


def test_a_row_without_a_reward_is_named():
    config = RewardsConfig(
        functions={"sums": RewardFunctionConfig(function="arithmetic", data_source="arithmetic")},
        cost_functions={"all": RewardFunctionConfig(function="length")},
        num_workers=1,
    )
    with RolloutScorer(config, {}) as scorer:
        with pytest.raises(RewardError, match="row 1: no reward applies to data source 'poems'"):
            scorer.score(rollouts(["arithmetic", "poems"], ["#9", "#9"]))
        # The arithmetic of the row: the ground truth is "truth 0".
        assert scorer.score(rollouts(["arithmetic"], ["#truth 0"])).scores == [1.0]


def test_models_alone_need_no_processes():
    config = RewardsConfig(models={"judge": RewardModelConfig(data_source="a")})
    seen = []
    with RolloutScorer(
        config, {"judge": lambda r: seen.append(r) or np.array([0.5, 7.0])}
    ) as scorer:
        batch = rollouts(["a", "a"], ["x", "y"])
        np.testing.assert_array_equal(scorer.score(batch).scores, np.float32([0.5, 7.0]))
    assert seen == [batch]


@pytest.mark.parametrize(
    "scores, message",
    [
        (np.zeros(3), r"model 'judge' returned scores of shape \(3,\)"),
        (np.array([0.0, np.nan]), "model 'judge', row 1: returned nan"),
        (np.array([np.inf, 0.0]), "model 'judge', row 0: returned inf"),
    ],
)
def test_a_model_must_score_every_row(scores, message):
    config = RewardsConfig(models={"judge": RewardModelConfig()})
    with (
        RolloutScorer(config, {"judge": lambda r: scores}) as scorer,
        pytest.raises(RewardError, match=message),
    ):
        scorer.score(rollouts(["a", "a"], ["x", "y"]))


def test_the_models_given_must_be_those_of_the_config():
    with pytest.raises(RewardError, match=r"names the models \['judge'\].*given for \[\]"):
        RolloutScorer(RewardsConfig(models={"judge": RewardModelConfig()}), {})


def test_an_unknown_function_is_an_error_of_the_start():
    config = RewardsConfig(functions={"f": RewardFunctionConfig(function="absent")}, num_workers=1)
    with pytest.raises(RewardError, match="unknown reward function 'absent'"):
        RolloutScorer(config, {})


def part(whole, rows):
    """Some rows, each of a prompt of its own, alone."""
    prompts = tuple(whole.prompts[row] for row in rows)
    made = rollouts(["a"] * len(rows), [whole.responses[row] for row in rows])
    return dataclasses.replace(made, prompts=prompts)


def test_calls_that_began_early_are_not_made_again(tmp_path):
    """Scores are the same; equal answers have a call each; rows in errors are those of `score`."""
    (tmp_path / "own.py").write_text(
        "import os, pathlib\n"
        "LOG = pathlib.Path(__file__).with_name('calls')\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    with LOG.open('a') as file:\n"
        "        file.write(solution_str + '\\n')\n"
        "    return float(solution_str)\n"
    )
    config = RewardsConfig(
        functions={"own": RewardFunctionConfig(function=f"{tmp_path / 'own.py'}:score")},
        num_workers=1,
    )
    whole = rollouts(["a"] * 4, ["1", "1", "2", "3"])
    with RolloutScorer(config, {}) as scorer:
        scorer.start_early(part(whole, [0, 1]))
        scorer.start_early(part(whole, [3]), 3)
        found = scorer.score(whole)
        assert (tmp_path / "calls").read_text().split() == ["1", "1", "3", "2"]
        np.testing.assert_array_equal(found.scores, [1, 1, 2, 3])
        assert found.num_calls == 4
        np.testing.assert_array_equal(scorer.score(whole).scores, found.scores)
        assert len((tmp_path / "calls").read_text().split()) == 8
        wrong = rollouts(["a"] * 2, ["1", "x"])
        scorer.start_early(part(wrong, [1]), 1)
        with pytest.raises(RewardError, match=r"row 1, .*could not convert string to float: 'x'"):
            scorer.score(wrong)


def test_a_hanging_early_call_does_not_delay_the_end(tmp_path):
    (tmp_path / "own.py").write_text(
        "import time\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    time.sleep(3600)\n"
    )
    config = RewardsConfig(
        functions={"own": RewardFunctionConfig(function=f"{tmp_path / 'own.py'}:score")},
        num_workers=1,
        timeout_s=3600.0,
    )
    with RolloutScorer(config, {}) as scorer:
        scorer.start_early(rollouts(["a"], ["1"]))
