"""The task "reasoning_gym", by the package itself where it is installed."""

import json
import random

import pytest

from jaxrl_llm.config import DataConfig
from jaxrl_llm.config.rollout_data import ReasoningGymConfig, RewardFunctionConfig, RewardsConfig
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tasks import task_rows

pytest.importorskip("reasoning_gym", reason="the extra [reasoning_gym]")
pytestmark = pytest.mark.slow  # the package takes seconds to be imported

from jaxrl_llm.data import reasoning_gym_task  # noqa: E402
from jaxrl_llm.rewards.reasoning_gym import score_answer  # noqa: E402
from jaxrl_llm.rewards.reward_pool import RewardCall, RewardPool  # noqa: E402

# They draw from sets, have tuples in their problems, or tolerate other answers than their own.
GENERATORS = ("ransom_note", "polynomial_multiplication", "rearc", "leg_counting")
# Their problems have no answer that is stored: any that solves them counts.
WITHOUT_ANSWERS = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


def made_rows(split="train", seed=0, count=24, num_eval=8, **settings):
    settings = {"generators": GENERATORS, **settings}
    config = DataConfig(
        task="reasoning_gym",
        arithmetic_train_prompts=count,
        arithmetic_eval_prompts=num_eval,
        reasoning_gym=ReasoningGymConfig(**settings),
    )
    return task_rows(config, split, seed)


def score(row, response, **more):
    info = {**row["extra_info"], **more}
    return score_answer(row["data_source"], response, "", info)["score"]


def test_rows_are_the_same_in_each_process_and_scored_by_their_generator():
    rows = made_rows()
    assert rows == made_rows()  # made by a process with other hashes of its own
    assert rows != made_rows(seed=1)
    assert [row["data_source"].partition("/")[2] for row in rows[:5]] == [
        *GENERATORS, GENERATORS[0]
    ]  # fmt: skip
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]
    for row in rows:
        answer = row["reward_model"]["ground_truth"]
        assert score(row, f"I think <answer>\n{answer}\n</answer>") == 1.0
        assert score(row, f"<answer>{answer}</answer> or <answer>-77</answer>") < 0.5
        assert score(row, answer) < 0.5  # without the marks that the prompt asks for
        turns = [{"role": "assistant", "content": f"<answer>{answer}</answer>"}]
        assert score(row, "", messages=turns) == 1.0
    held_out = {row["extra_info"]["question"] for row in made_rows("eval")}
    assert len(held_out) == 8
    assert not held_out & {row["extra_info"]["question"] for row in rows}


def test_settings_and_system_prompts():
    rows = made_rows(
        generators=('chain_sum {"min_terms": 5, "max_terms": 5}',), system_prompt="none", num_eval=1
    )
    for row in rows:
        assert len(row["prompt"]) == 1 and row["extra_info"]["question"].count(" ") > 8
        assert score(row, f" {row['extra_info']['answer']}\n") == 1.0


def test_levels_are_those_of_the_curriculum():
    rows = made_rows(generators=("chain_sum",), levels=3, count=60, num_eval=1)
    by_level = {level: [] for level in range(3)}
    for row in rows:
        by_level[row["extra_info"]["level"]].append(len(row["extra_info"]["question"]))
    assert [len(lengths) for lengths in by_level.values()] == [20, 20, 20]
    means = [sum(lengths) / 20 for lengths in by_level.values()]
    assert means[0] < means[1] < means[2]


@pytest.mark.parametrize(
    ("generator", "settings", "problem"),
    [
        ("leg_countin", {}, "no generator is called 'leg_countin'; did you mean leg_counting"),
        ("composite", {}, "name its parts as generators"),
        ('chain_sum {"terms": 3}', {}, "'chain_sum' refuses its settings .*'terms'"),
        ('chain_sum {"min_terms": 9}', {}, "max_terms must be >= min_terms"),
        ("acre", {"levels": 1}, "'acre' has no curriculum; set data.reasoning_gym.levels=0"),
    ],
)
def test_settings_that_are_refused(generator, settings, problem):
    with pytest.raises(DataError, match=f"config.data.reasoning_gym: .*{problem}"):
        made_rows(generators=(generator,), **settings)


def test_too_few_problems_are_named():
    with pytest.raises(DataError, match=r"makes hardly any problem .* lower data.arithmetic_eval"):
        made_rows(
            generators=('chain_sum {"min_terms": 2, "max_terms": 2, "min_digits": 1, '
                        '"max_digits": 1}',),
            num_eval=5000, count=50,
        )  # fmt: skip


def test_a_reward_pool_scores_and_foreign_rows_are_refused():
    (row,) = made_rows(count=1, num_eval=1, generators=("leg_counting",))
    term = RewardFunctionConfig(function="reasoning_gym")
    config = RewardsConfig(functions={"r": term}, num_workers=1, timeout_s=60.0)
    answer = row["extra_info"]["answer"]  # a worked one, with its marks
    with RewardPool(["reasoning_gym"], config) as pool:
        calls = [
            RewardCall("reasoning_gym", 0, row["data_source"], answer, "", info)
            for info in (row["extra_info"], {"question": "?"})
        ]
        right, foreign = pool.attempt(calls)
    assert right.score == 1.0 and right.details["pred"] == row["reward_model"]["ground_truth"]
    assert "extra_info lacks entry, generator, level, settings" in foreign.failure


@pytest.mark.nightly
def test_all_generators_make_problems_that_their_answers_solve():
    names = {name for name in reasoning_gym_task.generator_names() if name != "composite"}
    rows = made_rows(generators=("all",), count=2 * len(names), num_eval=0)
    assert {row["extra_info"]["generator"] for row in rows} == names and len(names) > 100
    for row in rows:
        json.dumps(row)
        answer = row["reward_model"]["ground_truth"]
        expected = 0.5 if row["extra_info"]["generator"] in WITHOUT_ANSWERS else 1.0
        value = score(row, f"<answer>{answer}</answer>")
        assert value == 1.0 if expected == 1.0 else 0.0 <= value <= expected
        assert 0.0 <= score(row, f"<answer>{random.Random(0).random()}</answer>") <= 1.0
