"""A reward function that raises, hangs or returns no number: the run stops, or counts it."""

import json
import re

import commands
import pytest
import runs

from jaxrl_llm.rewards.reward_pool import RewardError
from jaxrl_llm.trainer import rl

FUNCTIONS = '''
import time

def raises(data_source, solution_str, ground_truth, extra_info):
    raise ValueError("no idea")

def hangs(data_source, solution_str, ground_truth, extra_info):
    time.sleep(3600)

def nan(data_source, solution_str, ground_truth, extra_info):
    return float("nan")

def later(data_source, solution_str, ground_truth, extra_info):
    """Fails on samples, not on the ground truth."""
    if solution_str != ground_truth:
        raise ValueError("no idea")
    return 1.0

def hangs_later(data_source, solution_str, ground_truth, extra_info):
    if solution_str != ground_truth:
        time.sleep(3600)
    return 1.0

def nan_later(data_source, solution_str, ground_truth, extra_info):
    return 1.0 if solution_str == ground_truth else float("nan")

def some(data_source, solution_str, ground_truth, extra_info):
    """Every kind of failure on rows of their own, and a score on the others."""
    if ground_truth.endswith("1"):
        raise ValueError("no idea")
    if ground_truth.endswith("2"):
        return float("nan")
    return 1.0

def some_answers(data_source, solution_str, ground_truth, extra_info):
    """Fails on rows of its own and on some answers to the others."""
    if ground_truth[-1] in "12" or len(solution_str) % 4 == 1:
        raise ValueError("no idea")
    return float(len(solution_str) % 3)
'''
HANGS = "no answer within rewards.timeout_s=0.5"


def settings(tmp_path, function, **rewards) -> dict:
    file = tmp_path / "rewards.py"
    file.write_text(FUNCTIONS)
    return {
        "rewards.functions": {"answer": {"function": f"{file}:{function}"}},
        "warm_start.num_steps": 0,
        **{f"rewards.{name}": value for name, value in rewards.items()},
    }


@pytest.mark.parametrize(
    "function, message, sampling",
    [
        ("later", "ValueError: no idea", "sync"),
        pytest.param("hangs_later", HANGS, "sync", marks=pytest.mark.slow),
        # While samples of later steps are in flight.
        pytest.param("hangs_later", HANGS, "async", marks=pytest.mark.slow),
        pytest.param(
            "nan_later", "returned nan; a reward function returns", "sync", marks=pytest.mark.slow
        ),
    ],
)
def test_the_run_stops_with_function_and_row(
    tmp_path, capsys, one_device, function, message, sampling
):
    workdir = tmp_path / "run"
    limits = {"timeout_s": 0.5} if function == "hangs_later" else {}
    changes = settings(tmp_path, function, **limits) | {"trainer.sampling": sampling}
    arguments = runs.flags("grpo_tiny", changes)
    code, _, log = commands.call(capsys, "train", *arguments, f"--workdir={workdir}")
    assert code == 1
    # Two workers: whichever row fails first is named.
    where = rf"rewards\.py:{function}', row \d+, data source 'arithmetic'"
    assert re.search(where, log)
    assert message in log
    assert "set rewards.on_failure='score' to give such responses 0" in log
    # The only trace is that of the user's own function.
    assert "jaxrl_llm/trainer" not in log
    assert runs.metrics(workdir) == {}


@pytest.mark.parametrize(
    "function, message", [("raises", "ValueError: no idea"), ("nan", "returned nan")]
)
def test_a_function_that_always_fails_is_found_before_anything_is_sampled(
    tmp_path, function, message
):
    config = runs.config("grpo_tiny", settings(tmp_path, function))
    with pytest.raises(RewardError, match=rf"rewards\.py:{function}\) failed in each of") as raised:
        rl.train(config, tmp_path / "run")
    assert message in str(raised.value) and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_failures_are_left_out_and_marked(tmp_path, one_device):
    """Groups of which every call fails teach nothing; the others as if these were not there."""
    workdir = tmp_path / "run"
    changes = settings(tmp_path, "some_answers", on_failure="leave_out")
    changes |= {"trainer.num_steps": 2, "metrics.rollout_tokens": True}
    rl.train(runs.config("grpo_tiny", changes), workdir)
    found = runs.metrics(workdir)
    for step in (1, 2):
        dump = (workdir / "rollouts" / f"{step}.jsonl").read_text().splitlines()
        rows = [json.loads(row) for row in dump]
        failed = [row["gts"][-1] in "12" or len(row["output"]) % 4 == 1 for row in rows]
        assert [row.get("failure", "") != "" for row in rows] == failed
        assert all("ValueError: no idea" in row["failure"] for row in rows if "failure" in row)
        out = [row.get("left_out", False) for row in rows]
        assert all(lost or not fail for lost, fail in zip(out, failed, strict=True))
        assert found[step]["reward/left_out_share"] == pytest.approx(sum(out) / len(out))
        kept = [row["score"] for row, lost in zip(rows, out, strict=True) if not lost]
        assert found[step]["critic/score/mean"] == pytest.approx(sum(kept) / len(kept))
        for row, lost in zip(rows, out, strict=True):
            assert not lost or not any(row["advantages"])
        for group in {row["group"] for row in rows}:
            advantages = [
                max(row["advantages"], key=abs, default=0.0)
                for row in rows
                if row["group"] == group and not row.get("left_out")
            ]
            assert len(advantages) != 1
            assert sum(advantages) == pytest.approx(0.0, abs=1e-4)


@pytest.mark.slow
def test_failures_are_scored_and_counted(tmp_path, one_device):
    workdir = tmp_path / "run"
    changes = settings(tmp_path, "some", on_failure="score", failure_score=-1.0)
    changes["trainer.num_steps"] = 3
    rl.train(runs.config("grpo_tiny", changes), workdir)
    found = runs.metrics(workdir)
    for step in (1, 2, 3):
        dump = (workdir / "rollouts" / f"{step}.jsonl").read_text().splitlines()
        rows = [json.loads(row) for row in dump]
        failed = [row["gts"][-1] in "12" for row in rows]
        assert [row["score"] for row in rows] == [-1.0 if bad else 1.0 for bad in failed]
        assert found[step]["reward/num_failures"] == sum(failed)
    assert any(found[step]["reward/num_failures"] > 0 for step in (1, 2, 3))
