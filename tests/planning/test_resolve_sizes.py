"""What a run leaves to the planner: where its roles live, microbatches, recomputation."""

import dataclasses

import jax
import pytest

from jaxrl_llm.config import RLConfig, workdir
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.learner import job_models
from jaxrl_llm.learner.job_models import Models
from jaxrl_llm.planning import accelerators, resolve_sizes
from jaxrl_llm.planning.accelerators import DEVICES
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.trainer import rl

VALUES = {
    "algorithm": {"recipe": "ppo", "samples_per_prompt": 1},
    "model": {"remat": "none"},
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
    return job_models.make_models(config, resolve_sizes.resolved_meshes(config))


def fastest_apart(monkeypatch) -> None:
    """Devices with fast links between four, hardly any beyond: pools of four are faster."""
    slow = dataclasses.replace(DEVICES["v5e"], domain=4, network_bandwidth=1e6)
    monkeypatch.setattr(accelerators, "local_device", lambda present: slow)


def test_where_nothing_is_known_of_speed_all_roles_share_all_devices():
    models = models_of(config())
    assert set(models.meshes.values()) == {models.mesh} and models.mesh.size == 8


@pytest.mark.slow
def test_a_run_is_built_on_the_pools_that_are_fastest(monkeypatch):
    fastest_apart(monkeypatch)
    models = models_of(config())
    placed = resolve_sizes.choose_sizes(config(), models.policy.shape, jax.devices())
    assert placed.placement.choice == "by_hand"
    assert job_models.role_meshes(placed) == models.meshes
    assert models.meshes["policy"] == models.meshes["rollout"]
    assert len(set(models.meshes.values())) > 1
    sizes = [mesh.size for mesh in set(models.meshes.values())]
    assert sum(sizes) == 8
    assert len(
        resolve_sizes.make_plan(config(), resolve_sizes.local_target(jax.devices())).pools
    ) == len(sizes)


def test_refused_sizes_are_not_chosen(monkeypatch):
    """Rows as wide as a device may hold: pools must split them alike."""
    fastest_apart(monkeypatch)
    tight = config(trainer={**VALUES["trainer"], "max_tokens_per_microbatch": 32})
    models = models_of(tight)
    assert len({mesh_lib.num_row_shards(mesh) for mesh in models.meshes.values()}) == 1


def test_explicit_choices_are_kept():
    chosen = config(placement={"choice": "split"})
    assert (
        resolve_sizes.choose_sizes(chosen, models_of(chosen).policy.shape, jax.devices()) is chosen
    )


def real(**trainer) -> RLConfig:
    """A model of 135M parameters and rows as those of GSM8K."""
    return from_config_dict(
        {
            "algorithm": {"recipe": "grpo", "samples_per_prompt": 4},
            "model": {"path": "SmolLM2-135M"},
            "data": {"max_prompt_tokens": 256},
            "rollout": {"max_response_tokens": 96},
            "trainer": {"prompts_per_step": 4, **trainer},
            "rewards": {"functions": {"answer": {"function": "arithmetic"}}},
        }
    )


def chosen(config: RLConfig, place: resolve_sizes.HardwareTarget) -> tuple[str, int]:
    found = resolve_sizes.make_plan(config, place).setting.config
    return found.model.remat, found.trainer.max_tokens_per_microbatch


def test_sizes_follow_from_the_plan_and_the_device():
    one = resolve_sizes.local_target(jax.devices()[:1])
    assert chosen(real(), one) == ("dots", 512)
    # What is said wins, and the rest follows.
    assert chosen(real(max_tokens_per_microbatch=1024), one)[1] == 1024
    # With memory for all of it, nothing is computed again; with less, more is.
    assert chosen(real(), resolve_sizes.topology_target("", "h100", 1)) == ("none", 16_384)
    small = dataclasses.replace(DEVICES["v5e"], memory_bytes=4 << 30)
    found = resolve_sizes.make_plan(real(), resolve_sizes.HardwareTarget(small, 1, ()))
    assert found.setting.config.model.remat != "none" and found.fits


def test_a_resumed_run_has_the_sizes_that_it_began_with(tmp_path):
    def small(**trainer) -> RLConfig:
        return config(model={}, trainer={"prompts_per_step": 16, "num_steps": 1, **trainer})

    begun = small(max_tokens_per_microbatch=777)
    begun = dataclasses.replace(begun, model=dataclasses.replace(begun.model, remat="attention"))
    workdir.claim_workdir(begun, tmp_path)
    again = resolve_sizes.resolve(small(), tmp_path)
    assert (again.model.remat, again.trainer.max_tokens_per_microbatch) == ("attention", 777)
    said = resolve_sizes.resolve(small(max_tokens_per_microbatch=512), tmp_path)
    assert (said.model.remat, said.trainer.max_tokens_per_microbatch) == ("attention", 512)
    other = resolve_sizes.resolve(small(), tmp_path / "other")
    assert (other.model.remat, other.trainer.max_tokens_per_microbatch) != ("attention", 777)
    assert other.model.remat != "auto" and other.trainer.max_tokens_per_microbatch > 0


@pytest.mark.slow
def test_a_run_with_automatic_placement_trains(monkeypatch, tmp_path):
    fastest_apart(monkeypatch)
    state = rl.train(config(), tmp_path)
    assert int(state.policy.num_updates) == 1
    assert 1 < len(state.policy.num_updates.sharding.device_set) < 8
    metrics = (tmp_path / "metrics.jsonl").read_text()
    assert "perf/planned_memory_gb" in metrics
