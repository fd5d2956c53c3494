"""Rows whose ground truth no answer can equal: told by file and row before a run, or left out."""

import json
import sys

import commands
import pytest
import runs

from jaxrl_llm.rewards.reward_pool import RewardError
from jaxrl_llm.trainer import rl

TRUTHS = ["3", 4, " 5", None, 6.0, [7], "N/A", "8 "]
FILES = {"data.task": "files", "warm_start.num_steps": 0, "evaluation.before": False}
FILES |= {"evaluation.after": False, "evaluation.every": 0}


def rows_file(tmp_path, truths=TRUTHS):
    path = tmp_path / "rows.jsonl"
    with open(path, "w") as file:
        for number, truth in enumerate(truths):
            row = {"data_source": "sums", "prompt": f"1+{number}="}
            file.write(json.dumps({**row, "reward_model": {"ground_truth": truth}}) + "\n")
    return path


def settings(path, function="gsm8k", **more):
    functions = {"answer": {"function": function}}
    return {**FILES, "data.train_files": (str(path),), "rewards.functions": functions, **more}


@pytest.mark.parametrize("function", ["gsm8k", "math", "arithmetic"])
def test_the_dry_run_reports_every_row(tmp_path, capsys, function):
    path, workdir = rows_file(tmp_path), tmp_path / "run"
    config = runs.config("grpo_tiny", settings(path, function))
    with pytest.raises(RewardError) as raised:
        rl.check(config, workdir)
    said = str(raised.value)
    assert said.startswith("3 of 8 rows have a ground truth that no answer can equal:\n")
    for row in (4, 6, 7):
        assert f"  {path}, row {row}: '{function}' (answer): got " in said
    assert "rewards.unreadable_truths='leave_out'" in said and not workdir.exists()


@pytest.mark.parametrize("function", ["rewards.functions", "evaluation.functions"])
def test_math_without_its_extra_is_refused_before_a_model_is_loaded(
    tmp_path, capsys, monkeypatch, function
):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    changes = {**settings(rows_file(tmp_path, ["3"])), function: {"answer": {"function": "math"}}}
    workdir = tmp_path / "run"
    arguments = runs.flags("grpo_tiny", changes)
    text = commands.refused(capsys, "train", *arguments, f"--workdir={workdir}")
    assert "pip install 'jaxrl_llm[math]'" in text and not workdir.exists()


def test_the_command_ends_with_the_report(tmp_path, capsys):
    path = rows_file(tmp_path)
    arguments = runs.flags("grpo_tiny", settings(path))
    said = commands.refused(capsys, "train", *arguments, f"--workdir={tmp_path / 'run'}")
    assert f"{path}, row 4: 'gsm8k' (answer): got None" in said


def test_rows_that_are_left_out_are_counted(tmp_path, capsys):
    path = rows_file(tmp_path)
    changes = settings(path, **{"rewards.unreadable_truths": "leave_out"})
    arguments = runs.flags("grpo_tiny", changes)
    code, _, log = commands.call(
        capsys, "train", *arguments, f"--workdir={tmp_path / 'run'}", "--dry_run"
    )
    assert code == 0 and "train split: left out 3 of 8 rows" in log
    assert f"first: {path}, row 4" in log


@pytest.mark.slow
def test_a_streamed_row_is_told_by_file_and_row_when_it_is_drawn(tmp_path, one_device):
    """The first rows can be read; a later one stops the run, or is left out."""
    path = rows_file(tmp_path, ["3", "4", "5", "6", "7", None, "8", "9"])
    changes = settings(path, **{"data.stream": True, "trainer.num_steps": 2})
    with pytest.raises(RewardError, match=r"rows\.jsonl, row 6: 'gsm8k' \(answer\): got None"):
        rl.train(runs.config("grpo_tiny", changes), tmp_path / "refused")
    changes["rewards.unreadable_truths"] = "leave_out"
    rl.train(runs.config("grpo_tiny", changes), tmp_path / "run")
    dump = (tmp_path / "run" / "rollouts" / "1.jsonl").read_text().splitlines()
    assert all(json.loads(line)["gts"] is not None for line in dump)
