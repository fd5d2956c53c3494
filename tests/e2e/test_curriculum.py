"""What training is given next: curricula, streamed files and mixtures, in the loop."""

import json
import shutil

import numpy as np
import pytest
import recipe_settings

import jaxrl_llm
from jaxrl_llm.data.tasks import task_rows
from jaxrl_llm.trainer import rl


def write_sums(path, numbers):
    """Writes sums of two digits as prompts of RL."""
    rows = (
        {
            "data_source": "arithmetic",
            "prompt": f"{number // 10}+{number % 10}=",
            "reward_model": {"ground_truth": str(number // 10 + number % 10)},
        }
        for number in numbers
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("curriculum", marks=pytest.mark.nightly),
        pytest.param("mixture", marks=pytest.mark.slow),
        pytest.param("streamed", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_draws_the_same_prompts(name, train, tmp_path):
    files = write_sums(tmp_path / "a.jsonl", range(40)), write_sums(tmp_path / "b.jsonl", [77, 88])
    of_files = {
        "task": "files",
        "train_files": files,
        "train_weights": (1.0, 1.0),
        "last_train_weights": (9.0, 1.0),
        "last_train_weights_after": 30,
    }
    changes = {
        "curriculum": {"curriculum": {"choice": "success"}},
        "mixture": {"data": of_files, "curriculum": {"choice": "success"}},
        "streamed": {"data": {**of_files, "stream": True}},
    }[name]
    short = {"trainer": {"num_steps": 6}, "checkpoint": {"every": 3}}
    changes = recipe_settings.merged(changes, short)
    _, whole = train("grpo", changes)
    found = recipe_settings.metrics(whole)
    assert len(found) == 6
    if "curriculum" in changes:
        known = [found[step]["curriculum/answered"] for step in (1, 6)]
        assert 0 < known[0] < known[1] <= 1
    resumed = tmp_path / "resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "6")
    rl.train(recipe_settings.config("grpo", changes), resumed)
    assert recipe_settings.metrics(resumed) == found
    for step in (4, 5, 6):
        assert recipe_settings.dump(resumed, step) == recipe_settings.dump(whole, step)


@pytest.mark.slow
def test_rows_from_python_are_those_of_a_file(train, taught, tmp_path):
    path = tmp_path / "sums.jsonl"
    write_sums(path, range(30))
    short = {"trainer": {"num_steps": 2}}
    of_file = {"data": {"task": "files", "train_files": (str(path),)}}
    _, workdir = train("grpo", recipe_settings.merged(short, of_file), "of_file")
    shutil.copytree(taught, tmp_path / "of_python" / "warm_start")
    rows = (json.loads(line) for line in path.read_text().splitlines())
    config = recipe_settings.config("grpo", short)
    jaxrl_llm.train(config, tmp_path / "of_python", rows=rows)
    assert recipe_settings.metrics(tmp_path / "of_python") == recipe_settings.metrics(workdir)


@pytest.mark.nightly
def test_fewer_groups_teach_nothing_where_most_prompts_cannot_be_solved(train, tmp_path):
    """Four of five prompts have a wrong ground truth. What that is worth: docs/results.md."""
    rows = task_rows(recipe_settings.config("grpo").data, "train", 0)
    rows = [row | {"prompt": row["prompt"][0]["content"]} for row in rows]
    hopeless = [row | {"reward_model": {"ground_truth": "777"}} for row in rows] * 4
    path = tmp_path / "sums.jsonl"
    columns = ("data_source", "prompt", "reward_model")
    lines = [json.dumps({name: row[name] for name in columns}) for row in rows + hopeless]
    path.write_text("\n".join(lines))
    shares = {}
    for choice in ("success", ""):
        changes = {
            "curriculum": {"choice": choice},
            "data": {"task": "files", "train_files": (str(path),)},
            "trainer": {"num_steps": 80, "optimizer": {"learning_rate": 3e-4}},
        }
        _, workdir = train("grpo", changes, choice or "alike")
        found = list(recipe_settings.metrics(workdir).values())[40:]
        shares[choice] = np.mean([data["training/groups/uniform_share"] for data in found])
    # The 320 groups of 40 steps: a standard error of 0.03 each. Seen with three seeds: 0.49 to
    # 0.59 with it, 0.86 and 0.87 without.
    assert shares["success"] < shares[""] - 0.15, shares
