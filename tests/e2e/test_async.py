"""Runs that sample ahead of their step: what the weights become, and that it can be repeated."""

import json

import jax
import numpy as np
import pytest
import recipe_settings
import runs

from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.trainer import rl

STEPS = 4
SMALL = {
    "model": {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "mlp_size": 32},
    "rollout": {"chunk_steps": 3},
    "algorithm": {"recipe": "grpo", "samples_per_prompt": 4},
    "trainer": {
        "num_steps": STEPS,
        "prompts_per_step": 4,
        "max_tokens_per_microbatch": 512,
        "minibatch_size": 8,
    },
    "checkpoint": {"every": 2, "keep": 2},
    "metrics": {"rollout_tokens": True},
}
ONE = {"mesh": {"data": 1, "fsdp": 1}}
# A device learns and another one samples.
APART = {
    "placement": {
        "choice": "by_hand",
        "pools": {"learn": {"devices": 1}, "sample": {"devices": 1}},
        "roles": {
            **dict.fromkeys(("policy", "critic", "reference", "reward"), "learn"),
            "rollout": "sample",
        },
    }
}


@pytest.fixture
def train(tmp_path):
    """Returns `train(name, settings, num_devices=1) -> (folder, weights)`."""

    def begin(name, *settings, num_devices=1):
        values = recipe_settings.merged(recipe_settings.SUMS, recipe_settings.UNTAUGHT)
        for more in (SMALL, *settings):
            values = recipe_settings.merged(values, more)
        with mesh_lib.use_devices(jax.devices()[:num_devices]):
            state = rl.train(from_config_dict(values), tmp_path / name)
        return tmp_path / name, jax.device_get(state.policy.params)

    return begin


def ahead(**trainer):
    return {"trainer": {"sampling": "async", **trainer}}


def assert_same(found, wanted):
    """Weights, numbers and dumps are the same, bit for bit."""
    for mine, other in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_array_equal(mine, other)
    numbers = [runs.metrics(folder) for folder, _ in (found, wanted)]
    for step in range(1, STEPS + 1):
        mine, other = (runs.repeatable(of[step]) for of in numbers)
        assert {k: v for k, v in mine.items() if k in other} == other
        dumps = [(folder / f"rollouts/{step}.jsonl").read_bytes() for folder, _ in (found, wanted)]
        assert dumps[0] == dumps[1]


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param({"recipe": "grpo"}, marks=pytest.mark.slow),
        pytest.param({"recipe": "dapo", "max_sampling_waves": 60}, marks=pytest.mark.slow),
        pytest.param({"recipe": "remax", "samples_per_prompt": 2}, marks=pytest.mark.nightly),
    ],
    ids=lambda chosen: chosen["recipe"],
)
def test_without_staleness_it_is_the_synchronous_run(train, algorithm):
    settings = ONE, {"algorithm": algorithm}
    wanted = train("now", *settings)
    found = train("ahead", *settings, ahead(max_staleness=0))
    assert_same(found, wanted)
    assert runs.metrics(found[0])[STEPS]["training/off_policy/staleness/max"] == 0


@pytest.mark.slow
def test_a_recorded_run_of_two_pools_is_replayed(train):
    """Which chunks ran beside which update depended on time; the replay asks no clock."""
    recorded = train("record", APART, ahead(schedule="record", max_staleness=2), num_devices=2)
    schedule = recorded[0] / "schedule.jsonl"
    replay = ahead(schedule="replay", max_staleness=2, schedule_file=str(schedule))
    replayed = train("replay", APART, replay, num_devices=2)
    assert_same(replayed, recorded)
    numbers = runs.metrics(recorded[0])
    assert max(of["training/off_policy/staleness/max"] for of in numbers.values() if of) in (1, 2)
    assert all(0 <= numbers[s]["perf/idle_share/rollout"] <= 1 for s in range(1, STEPS + 1))
    lines = [json.loads(line) for line in schedule.read_text().splitlines()]
    assert any("0" in line["answers"] for line in lines)  # it sampled while the other learned


@pytest.mark.slow
def test_how_samples_meet_new_weights(train):
    """By default samples span versions and are corrected; "drain" is one step ahead."""
    found, _ = train("recompute", ONE, ahead())
    numbers = runs.metrics(found)
    assert numbers[2]["training/off_policy/partial_ratio"] > 0
    assert numbers[2]["training/off_policy/spans/max"] == 2
    assert "rollout_corr/rollout_is_mean" in numbers[2]
    rows = [json.loads(line) for line in (found / "rollouts/2.jsonl").read_text().splitlines()]
    assert {0, 1} == {version for row in rows for version in row["versions"]}
    found, _ = train("drain", ONE, ahead(new_weights="drain"))
    numbers = runs.metrics(found)
    for step in range(2, STEPS + 1):
        assert numbers[step]["training/off_policy/partial_ratio"] == 0
        assert numbers[step]["training/off_policy/staleness/mean"] == 1
