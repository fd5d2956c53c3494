"""Rows and reward outputs of any kind: used, or refused with a message; never NaN in weights."""

import json
import logging
import math
import pathlib

import jax
import numpy as np
import pyarrow
import pytest
import recipe_settings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.datasets import load_dataset
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards import reward_worker
from jaxrl_llm.rewards.base import RolloutScorer
from jaxrl_llm.trainer import rl

TOKENIZER = character_tokenizer()
LENIENT = settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)

texts = st.text(max_size=20) | st.sampled_from(
    ["\ud800", "<eos>", "{{ x }}", "../../etc/passwd", "\0", "a" * 4000, "\u202e", "  "]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries({}, optional={"role": texts | values, "content": texts | values}),
    max_size=3,
)
rows = st.fixed_dictionaries(
    {},
    optional={
        "data_source": st.sampled_from(["sums", "", "../x"]) | values,
        "prompt": texts | messages | values,
        "reward_model": st.fixed_dictionaries({"ground_truth": values}) | values,
        "extra_info": st.dictionaries(texts, values, max_size=3) | values,
    },
)


def load(path: pathlib.Path, chat_template: bool) -> None:
    config = DataConfig(
        task="files",
        train_files=(str(path),),
        max_prompt_tokens=64,
        chat_template=chat_template,
    )
    try:
        dataset = load_dataset(config, TOKENIZER, "train", 0)
    except DataError as error:
        assert str(path) in str(error) or "config.data" in str(error) or "split" in str(error)
        return
    for prompt in dataset.prompts:
        assert 0 < len(prompt.tokens) <= 64 and prompt.data_source
        assert all(0 <= token < len(TOKENIZER) for token in prompt.tokens)


@LENIENT
@given(found=st.lists(rows, min_size=1, max_size=4), chat_template=st.booleans())
def test_hostile_json_rows_load_or_raise_data_errors(tmp_path_factory, found, chat_template):
    path = tmp_path_factory.getbasetemp() / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    load(path, chat_template)


@LENIENT
@given(data=st.binary(max_size=200))
def test_bytes_that_are_no_rows(tmp_path_factory, data):
    for suffix in ("jsonl", "parquet"):
        path = tmp_path_factory.getbasetemp() / f"bytes.{suffix}"
        path.write_bytes(data)
        load(path, True)


@LENIENT
@given(found=st.lists(rows, min_size=1, max_size=4))
def test_hostile_parquet_rows_load_or_raise_data_errors(tmp_path_factory, found):
    path = tmp_path_factory.getbasetemp() / "rows.parquet"
    try:
        parquet.write_table(pyarrow.Table.from_pylist(found), path)
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError, KeyError):
        return  # no file of such rows can be made
    load(path, True)


@LENIENT
@given(
    result=values
    | st.builds(dict, score=values)
    | st.builds(np.float32, st.floats(width=32))
    | st.builds(lambda x: {"score": x, "why": "text"}, st.floats() | st.integers())
)
def test_reward_results_are_finite_or_refused(result):
    try:
        found = reward_worker.checked_result(result)
    except (TypeError, ValueError) as error:
        assert "a reward function returns a finite number" in str(error)
        return
    assert math.isfinite(found["score"]) and math.isfinite(np.float32(found["score"]))


def test_a_weighted_sum_that_no_float_holds_is_refused():
    values = recipe_settings.config("grpo").rewards
    scorer = RolloutScorer(values, {})
    try:
        term = next(iter(values.functions))
        scorer._reward_terms = {term: type(values.functions[term])(function="length", weight=1e38)}
        from jaxrl_llm.rewards.reward_pool import CallOutcome

        scorer._early.collect = lambda calls: [CallOutcome(1e30) for _ in calls]
        rollouts = type(
            "Rollouts",
            (),
            {
                "responses": ("x",),
                "group_ids": np.array([0]),
                "episode_logs": (),
                "prompts": [
                    type("Prompt", (), {"data_source": "s", "ground_truth": "", "extra_info": {}})
                ],
            },
        )()
        with pytest.raises(UserError, match=r"row 0: weight times score of .* add up to 1e\+68"):
            scorer.score(rollouts)
    finally:
        scorer.__exit__()


OFTEN = ("grpo", "safe_rlhf")  # without a critic, and with two
EXTREME = """
def score(data_source, solution_str, ground_truth, extra_info):
    scores = (3.4e38, -3.4e38, 1e-45, 0.0, 1e30, -1e20, float("nan"), float("inf"), None, "x")
    return scores[hash(solution_str) % len(scores)]
"""


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, marks=pytest.mark.slow if recipe in OFTEN else pytest.mark.nightly)
        for recipe in ("grpo", "ppo", "rloo", "safe_rlhf", "reinforce_pp")
    ],
)
def test_scores_of_any_size_leave_the_weights_finite(tmp_path, recipe, caplog):
    (tmp_path / "extreme.py").write_text(EXTREME)
    changes = {
        "rewards": {
            "functions": {"answer": {"function": f"{tmp_path}/extreme.py:score"}},
            "on_failure": "score",
            "failure_score": -3e38,
        },
        "warm_start": {"num_steps": 0},
        "trainer": {"num_steps": 4},
    }
    with caplog.at_level(logging.WARNING):
        state = rl.train(recipe_settings.config(recipe, changes), tmp_path / "run")
    for leaf in jax.tree.leaves(state):
        assert np.isfinite(np.asarray(leaf, np.float32)).all()
    assert "alert reward_failures in step 1" in caplog.text
