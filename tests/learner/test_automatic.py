"""`placement.choice = "auto"`: where the planner puts the roles of a run."""

import dataclasses

import jax
import pytest

from jaxrl_llm.config import RLConfig
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.learner import automatic, planned
from jaxrl_llm.learner import models as models_lib
from jaxrl_llm.learner.models import Models
from jaxrl_llm.planning import devices
from jaxrl_llm.planning.devices import DEVICES
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.trainer import rl

VALUES = {
    "algorithm": {"recipe": "ppo", "samples_per_prompt": 1},
    "data": {"max_prompt_tokens": 16},
    "rollout": {"max_response_tokens": 16, "num_slots": 8},
    "trainer": {"prompts_per_step": 16, "max_tokens_per_microbatch": 256, "num_steps": 1},
    "rewards": {"functions": {"answer": {"function": "arithmetic"}}},
    "evaluation": {"before": False, "after": False},
    "placement": {"choice": "auto"},
}


def config(**groups) -> RLConfig:
    return from_config_dict(VALUES | groups)


def models_of(config: RLConfig) -> Models:
    return models_lib.of_job(config, automatic.meshes(config))


def fastest_apart(monkeypatch) -> None:
    """Devices with fast links between four, hardly any beyond: pools of four are faster."""
    slow = dataclasses.replace(DEVICES["v5e"], domain=4, network_bandwidth=1e6)
    monkeypatch.setattr(devices, "present", lambda present: slow)


def test_where_nothing_is_known_of_speed_all_roles_share_all_devices():
    models = models_of(config())
    assert set(models.meshes.values()) == {models.mesh} and models.mesh.size == 8


def test_a_run_is_built_on_the_pools_that_are_fastest(monkeypatch):
    fastest_apart(monkeypatch)
    models = models_of(config())
    placed = automatic.here(config(), models.policy.shape, jax.devices())
    assert placed.placement.choice == "by_hand"
    assert models_lib.role_meshes(placed) == models.meshes
    assert models.meshes["policy"] == models.meshes["rollout"]
    assert len(set(models.meshes.values())) > 1
    sizes = [mesh.size for mesh in set(models.meshes.values())]
    assert sum(sizes) == 8
    assert len(planned.plan(config(), planned.here(jax.devices())).pools) == len(sizes)


def test_what_the_run_would_refuse_is_not_chosen(monkeypatch):
    """Rows as wide as a device may hold: pools must split them alike."""
    fastest_apart(monkeypatch)
    tight = config(trainer={**VALUES["trainer"], "max_tokens_per_microbatch": 32})
    models = models_of(tight)
    assert len({mesh_lib.row_shards(mesh) for mesh in models.meshes.values()}) == 1


def test_any_other_choice_is_left_alone():
    chosen = config(placement={"choice": "split"})
    assert automatic.here(chosen, models_of(chosen).policy.shape, jax.devices()) is chosen


@pytest.mark.slow
def test_a_run_with_automatic_placement_trains(monkeypatch, tmp_path):
    fastest_apart(monkeypatch)
    state = rl.train(config(), tmp_path)
    assert int(state.policy.num_updates) == 1
    assert 1 < len(state.policy.num_updates.sharding.device_set) < 8
    metrics = (tmp_path / "metrics.jsonl").read_text()
    assert "perf/planned_memory_gb" in metrics
