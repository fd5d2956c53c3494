"""A run of a network with experts: whose routes are followed, and what is reported of routers."""

import json

import jax
import numpy as np
import processes
import pytest
import runs

from jaxrl_llm.trainer import rl

EXPERTS = {
    "model.family": "qwen3_moe",
    "model.num_layers": 2,
    "model.num_experts": 4,
    "mesh.expert": 2,
    "mesh.tensor": 2,
    "mesh.fsdp": 2,
    "router.balance_coef": 0.1,
    "router.z_coef": 0.001,
    "trainer.num_steps": 2,
    "trainer.minibatch_size": 8,
    "warm_start.num_steps": 0,
    "evaluation.before": False,
    "evaluation.after": False,
    "evaluation.every": 0,
}


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["compare", "rollout", "scoring"])
def test_routes_of_a_run(replay, tmp_path):
    config = runs.config("grpo_tiny", {**EXPERTS, "router.replay": replay})
    state = rl.train(config, tmp_path)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(jax.device_get(state.policy.params)))
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    steps = [line["data"] for line in lines if "actor/loss" in line["data"]]
    assert len(steps) == 2
    for found in steps:
        # The second update of a step moves some routes.
        assert 0.9 < found["router/equal_routes"] <= 1.0
        loads = [found[f"router/load/{e:03d}"] for e in range(4)]
        np.testing.assert_allclose(np.mean(loads), 1.0, rtol=1e-5)
        assert 0 <= found["router/max_vio"] <= found["router/max_vio/max"] <= 1.0
        assert 0.9 < found["router/balance_loss"] < 2.0
        assert found["training/rollout_probs_diff_max"] < 1e-4
        assert found["actor/skipped_updates"] == 0
        assert found.get("router/missing_routes", 0.0) == 0.0


@pytest.mark.multihost
def test_two_processes_send_tokens_to_the_experts_of_one(tmp_path, cache):
    """Losses, samples and routes are those of one process with the same eight devices."""
    found = {}
    for count in (1, 2):
        folder = tmp_path / str(count)
        settings = {**EXPERTS, "router.replay": "scoring", "mesh.expert": 4, "mesh.fsdp": 1}
        arguments = ["launch/train.py", *runs.flags("grpo_tiny", settings), f"--workdir={folder}"]
        processes.run(arguments, count, 8 // count, cache)
        dumps = [(folder / f"rollouts/{step}.jsonl").read_text() for step in (1, 2)]
        numbers = {step: runs.repeatable(data) for step, data in runs.metrics(folder).items()}
        found[count] = dumps, numbers
    assert found[1][0] == found[2][0]
    for step, wanted in found[1][1].items():
        assert found[2][1][step].keys() == wanted.keys() and "router/equal_routes" in wanted
        for name, value in wanted.items():
            if not name.startswith("global_seqlen/"):
                assert found[2][1][step][name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


@pytest.mark.nightly
def test_experts_learn_as_a_dense_network_does(tmp_path, cache):
    """`configs/grpo_tiny.py`, and the same with four experts of half the MLP's size."""
    accuracy = {}
    of_experts = {
        "model.family": "qwen3_moe",
        "model.num_experts": 4,
        "model.experts_per_token": 2,
        "model.mlp_size": 192,
        "router.replay": "rollout",
        "router.balance_coef": 0.01,
    }
    for name, settings in (("dense", {}), ("experts", of_experts)):
        flags = [f"--config={runs.ROOT / 'configs/grpo_tiny.py'}"]
        flags += [f"--config.{key}={value}" for key, value in settings.items()]
        runs.launch("train", [*flags, f"--workdir={tmp_path / name}"], cache)
        found = runs.metrics(tmp_path / name)
        name_of = "val-core/arithmetic/mean@4"
        held_out = [step[name_of] for step in found.values() if name_of in step]
        accuracy[name] = held_out[0], held_out[-1]
    assert accuracy["experts"][1] > accuracy["experts"][0] + 0.2, accuracy
    assert accuracy["experts"][1] > accuracy["dense"][1] - 0.05, accuracy
