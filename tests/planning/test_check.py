"""A run asks the plan before it begins."""

import dataclasses

import jax
import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.metrics import statistics
from jaxrl_llm.planning import accelerators, resolve_sizes

VALUES = {
    "algorithm": {"recipe": "ppo", "samples_per_prompt": 1},
    "data": {"max_prompt_tokens": 16},
    "rollout": {"max_response_tokens": 16, "num_slots": 8},
    "rewards": {"functions": {"answer": {"function": "arithmetic"}}},
}


def test_a_small_run_passes_and_says_what_it_plans():
    peak = resolve_sizes.check_memory(from_config_dict(VALUES), jax.devices())
    metrics = statistics.memory_metrics(jax.local_devices(), peak)
    # What a process holds beside its arrays is planned too.
    assert (
        metrics["perf/planned_memory_gb"]
        > accelerators.local_device(jax.devices()).process_bytes / 2**30
    )
    assert "perf/measured_to_planned_memory" not in metrics  # CPU devices do not tell


@pytest.mark.slow  # in test_fit.py a run is refused by the command
def test_run_that_cannot_fit_is_refused_with_advice():
    large = {**VALUES, "model": {"path": "Llama-3.1-70B"}}
    with pytest.raises(ConfigError, match=r"while 'reshard' runs.*nearest run that fits") as error:
        resolve_sizes.check_memory(from_config_dict(large), jax.devices())
    assert "--config." in str(error.value)


def test_a_topology_overrides_a_mesh_that_cannot_fill_it(caplog):
    config = from_config_dict({**VALUES, "mesh": {"data": 3, "fsdp": 2, "tensor": 4}})
    place = resolve_sizes.topology_target("v5e:2x3", "", 0)
    filled = resolve_sizes.fit_mesh(config, place)
    assert (filled.mesh.data, filled.mesh.fsdp, filled.mesh.tensor) == (1, -1, 2)
    assert "does not fill the 6 devices" in caplog.text
    assert "planned with fsdp -1 x tensor 2 instead" in caplog.text
    assert resolve_sizes.make_plan(filled, place).num_devices == 6
    assert resolve_sizes.fit_mesh(filled, place) is filled


def test_measured_against_planned(monkeypatch):
    class Device:
        process_index = 0

        def memory_stats(self):
            return {"peak_bytes_in_use": 3 * 2**30}

    metrics = statistics.memory_metrics([Device()], 4.0 * 2**30)
    assert metrics["perf/planned_memory_gb"] == 4.0
    assert metrics["perf/measured_to_planned_memory"] == 0.75


def test_unknown_devices_are_not_checked(monkeypatch):
    monkeypatch.setattr(accelerators, "local_device", lambda present: None)
    large = {**VALUES, "model": {"path": "Llama-3.1-70B"}}
    assert resolve_sizes.check_memory(from_config_dict(large), jax.devices()) == 0.0


def test_each_cpu_device_has_its_share():
    eight = accelerators.local_device(jax.devices())
    one = accelerators.local_device(jax.devices()[:1])
    assert one.memory_bytes == pytest.approx(8 * eight.memory_bytes, rel=1e-6)
    assert one.process_bytes == 8 * eight.process_bytes > 2**30  # of Python and its libraries
    assert dataclasses.replace(one, memory_bytes=0).name == "cpu"
