"""Runs of networks with gated delta nets: trained and sampled by the same arithmetic."""

import json

import jax
import numpy as np
import pytest
import runs

from jaxrl_llm.trainer import rl

SETTINGS = {
    "model.num_layers": 4,
    "trainer.num_steps": 2,
    "trainer.minibatch_size": 8,
    "warm_start.num_steps": 0,
    "evaluation.before": False,
    "evaluation.after": False,
    "evaluation.every": 0,
}
OF_EXPERTS = {"model.num_experts": 4, "mesh.expert": 2, "mesh.tensor": 2, "mesh.fsdp": 2}
CASES = {
    "qwen3_5_text": {
        "model.num_heads": 4,
        "model.num_kv_heads": 2,
        "mesh.fsdp": 2,
        "mesh.tensor": 2,
        "mesh.sequence": 2,
    },
    "qwen3_5_moe_text": {**OF_EXPERTS, "router.replay": "rollout"},
    "qwen3_next": {**OF_EXPERTS, "lora.rank": 4, "lora.targets": ("q", "k", "v", "o")},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_a_run_with_states(family, tmp_path):
    settings = {"model.family": family, **SETTINGS, **CASES[family]}
    state = rl.train(runs.config("grpo_hybrid_tiny", settings), tmp_path)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(jax.device_get(state.policy.params)))
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    steps = [line["data"] for line in lines if "actor/loss" in line["data"]]
    assert len(steps) == 2
    for found in steps:
        assert found["training/rollout_probs_diff_max"] < 1e-4
        assert found["actor/skipped_updates"] == 0


@pytest.mark.nightly
def test_a_hybrid_learns_as_a_dense_network_does(tmp_path, cache):
    """`configs/grpo_tiny.py`, and the same with gated delta nets."""
    accuracy = {}
    for name in ("grpo_tiny", "grpo_hybrid_tiny"):
        flags = [f"--config={runs.ROOT / 'configs' / name}.py", f"--workdir={tmp_path / name}"]
        runs.launch("train", flags, cache)
        held_out = [
            step["val-core/arithmetic/mean@4"]
            for step in runs.metrics(tmp_path / name).values()
            if "val-core/arithmetic/mean@4" in step
        ]
        accuracy[name] = held_out[0], held_out[-1]
    assert accuracy["grpo_hybrid_tiny"][1] > accuracy["grpo_hybrid_tiny"][0] + 0.2, accuracy
    assert accuracy["grpo_hybrid_tiny"][1] > accuracy["grpo_tiny"][1] - 0.05, accuracy
