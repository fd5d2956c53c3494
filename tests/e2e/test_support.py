"""Runs that sample from a truncated distribution and train on it: `rollout.support_tokens`."""

import json

import numpy as np
import processes
import pytest
import runs

from jaxrl_llm.trainer import rl

SETTINGS = {
    "rollout.top_p": 0.3,
    "rollout.support_tokens": 64,
    "algorithm.entropy_coef": 0.1,  # a gradient, whatever the rewards of a policy that is new
    "trainer.num_steps": 2,
    "metrics.rollouts_every": 1,
    "metrics.rollout_tokens": True,
    "warm_start.num_steps": 0,
    "evaluation.before": False,
    "evaluation.after": False,
    "evaluation.every": 0,
}


def steps_of(workdir):
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [line["data"] for line in lines if "actor/loss" in line["data"]]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["sync", "async"])
def test_policy_and_engine_agree_on_truncated_distributions(sampling, tmp_path):
    settings = {**SETTINGS, "trainer.sampling": sampling}
    if sampling == "async":  # else the policy has moved since
        settings["trainer.max_staleness"] = 0
    rl.train(runs.config("grpo_tiny", settings), tmp_path / "kept")
    kept = steps_of(tmp_path / "kept")
    assert len(kept) == 2
    for step in kept:
        assert step["training/rollout_probs_diff_max"] < 1e-5
        assert step["actor/skipped_updates"] == 0 and step["actor/grad_norm"] > 1e-3
    rows = [json.loads(line) for line in (tmp_path / "kept/rollouts/2.jsonl").open()]
    sizes = {len(ids) for row in rows for ids in row["support"]}
    assert 1 <= min(sizes) < max(sizes) <= 40
    assert all(
        t in ids for row in rows for t, ids in zip(row["tokens"], row["support"], strict=True)
    )
    if sampling == "async":
        return
    # Learning again from the dumps is the same update, bit for bit.
    dumps = (str(tmp_path / "kept/rollouts"),)
    rl.train(runs.config("grpo_tiny", settings), tmp_path / "again", replay=dumps)
    for before, after in zip(kept, steps_of(tmp_path / "again"), strict=True):
        assert after["actor/loss"] == before["actor/loss"]
        assert after["actor/grad_norm"] == before["actor/grad_norm"]
    # Without supports, the whole vocabulary is another distribution.
    rl.train(runs.config("grpo_tiny", {**settings, "rollout.support_tokens": 0}), tmp_path / "off")
    whole = steps_of(tmp_path / "off")
    assert np.abs(whole[0]["actor/grad_norm"] - kept[0]["actor/grad_norm"]) > 1e-4


@pytest.mark.multihost
def test_two_processes_keep_the_supports_of_one(tmp_path, cache):
    steps, rows = {}, {}
    for count in (1, 2):
        folder = tmp_path / str(count)
        arguments = ["launch/train.py", *runs.flags("grpo_tiny", SETTINGS), f"--workdir={folder}"]
        processes.run(arguments, count, 8 // count, cache)
        rows[count] = [json.loads(line) for line in (folder / "rollouts/1.jsonl").open()]
        steps[count] = steps_of(folder)
    for one, two in zip(rows[1], rows[2], strict=True):
        assert one["support"] == two["support"] and one["tokens"] == two["tokens"]
    for one, two in zip(steps[1], steps[2], strict=True):
        assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-4)
        assert two["training/rollout_probs_diff_max"] < 1e-5
