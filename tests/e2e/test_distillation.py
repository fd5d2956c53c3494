"""On-policy distillation in the loop: resumed runs, and a student that learns without a reward."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import recipe_settings
import runs
import tiny

from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.models.architecture import architecture_from_config
from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.planning import resolve_sizes
from jaxrl_llm.trainer import rl

MIXED = {"trainer": {"minibatch_size": 32}}
# One update a step, and two; with rewards and adapters; with experts that follow routes.
CASES = {
    "reverse_kl": {"rewards": {"functions": {}}},
    "k3": {**MIXED, "lora": {"rank": 4}},
    "forward_kl": {
        **MIXED,
        "rewards": {"functions": {}},
        "model": {"family": "mixtral", "num_experts": 4, "experts_per_token": 2},
        "router": {"replay": "rollout"},
    },
}


def a_teacher(folder, config):
    """A folder of random weights, of another shape than the policy's."""
    model = dataclasses.replace(config.model, num_layers=2, hidden_size=32)
    network = Network(architecture_from_config(model, 104))
    checkpoint.save(folder, network, tiny.params(network), tokenizer=character_tokenizer())


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(loss, marks=pytest.mark.nightly if loss == "reverse_kl" else pytest.mark.slow)
        for loss in CASES
    ],
)
def test_a_resumed_run_repeats_it(loss, one_device, tmp_path):
    changes = {
        "warm_start": {"num_steps": 2},
        "checkpoint": {"every": 1},
        "distillation": {
            "teachers": {"sums": {"path": str(tmp_path / "teacher")}}, "loss": loss, "top_k": 8,
        },
    }  # fmt: skip
    changes = recipe_settings.merged(changes, CASES[loss])
    changes = recipe_settings.merged(changes, {"trainer": {"num_steps": 2}})
    config = recipe_settings.config("grpo", changes)
    a_teacher(tmp_path / "teacher", config)
    state = rl.train(config, tmp_path / "run")
    found = recipe_settings.metrics(tmp_path / "run")
    for step in (1, 2):
        assert found[step]["distillation/" + loss] > 0, found[step]
        assert not found[step]["training/updates_left_out"]
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "run", resumed)
    shutil.rmtree(resumed / "checkpoints" / "2")
    again = rl.train(config, resumed)
    assert recipe_settings.metrics(resumed) == found
    for ours, theirs in zip(*map(jax.tree.leaves, (state, again)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_plan_has_the_teacher(tmp_path):
    path = {"teachers": {"sums": {"path": str(tmp_path)}}, "loss": "forward_kl"}
    alone = recipe_settings.config("grpo")
    a_teacher(tmp_path, alone)
    taught = recipe_settings.config("grpo", {"distillation": path})
    place = resolve_sizes.topology_target("v5e:2x4", "", 1)
    plans = [
        resolve_sizes.make_plan(resolve_sizes.fit_mesh(config, place), place)
        for config in (alone, taught)
    ]
    assert "score_teacher" not in plans[0].programs
    # Of 2 layers of a width of 32, on 8 devices: it rests there while every program runs.
    assert plans[1].programs["score_teacher"].total > plans[0].programs["score"].weights
    for name, parts in plans[0].programs.items():
        assert plans[1].programs[name].weights > parts.weights, name


@pytest.mark.nightly
def test_a_student_learns_the_sums_without_a_reward(tmp_path, cache):
    """From three right answers in ten at most to 85 %; the teacher has nine in ten."""
    quiet = {"evaluation.every": 0, "metrics.tensorboard": False}

    def run(config, workdir, **settings):
        flags = [f"--config.{k}={v}" for k, v in {**quiet, **settings}.items()]
        path = f"--config={runs.ROOT}/configs/{config}.py"
        process = runs.start("train", [path, *flags, f"--workdir={workdir}"], cache)
        result = runs.finish(process, timeout_s=3000.0)
        assert result.returncode == 0, result.stderr[-4000:]
        return json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])["data"]

    run("sft_tiny", tmp_path / "sft", **{"evaluation.before": False})
    runs.launch("export", [f"--workdir={tmp_path}/sft", f"--out={tmp_path}/teacher"], cache)
    teacher = {"distillation.teachers.sums.path": str(tmp_path / "teacher")}
    after = run("distill_tiny", tmp_path / "student", **teacher)
    before = runs.metrics(tmp_path / "student")[0]
    name = "val-core/arithmetic/mean@4"
    assert before[name] <= 0.3 and after[name] >= 0.85, (before[name], after[name])
