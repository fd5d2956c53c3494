"""The nearest change that fits, and what is refused."""

import dataclasses
import json
import os
import pathlib
import resource
import subprocess
import sys
import time

import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.planning import accelerators, memory_plan, resolve_sizes
from jaxrl_llm.planning.accelerators import DEVICES
from jaxrl_llm.planning.published_shapes import SHAPES, published_shape

VALUES = {
    "algorithm": {"recipe": "ppo", "samples_per_prompt": 1},
    "model": {
        "compute_dtype": "bfloat16",
        "path": "models/Llama-3.1-8B-Instruct",
        "remat": "none",
    },
    "data": {"max_prompt_tokens": 512},
    "rollout": {"max_response_tokens": 512, "num_slots": 64},
    "trainer": {
        "prompts_per_step": 256,
        "minibatch_size": 128,
        "max_tokens_per_microbatch": 16_384,
    },
    "rewards": {"functions": {"answer": {"function": "arithmetic"}}},
}


def plan(device: str, count: int, **groups) -> memory_plan.MemoryPlan:
    values = {**VALUES, **{name: {**VALUES.get(name, {}), **g} for name, g in groups.items()}}
    config = from_config_dict(values)
    return resolve_sizes.make_plan(config, resolve_sizes.topology_target("", device, count))


def test_the_advice_fits_and_is_what_was_asked_where_that_fits():
    fitting = plan("h200", 16, model={"remat": "full"})
    assert fitting.fits
    assert memory_plan.nearest_fit(fitting).changes == {}
    short = plan("v5e", 16)
    assert not short.fits
    nearest = memory_plan.nearest_fit(short)
    assert nearest.plan.num_devices == 16
    config = memory_plan.with_changes(short.setting.config, nearest.changes)
    again = memory_plan.make_plan(config, short.setting.policy, (), DEVICES["v5e"], 16)
    assert again.fits and again.peak_bytes == nearest.plan.peak_bytes


def test_one_change_is_nearer_than_two():
    """Recomputation alone is enough here, so nothing else is touched."""
    short = plan("v5p", 8, model={"remat": "none"})
    assert not short.fits
    assert list(memory_plan.nearest_fit(short).changes) == ["model.remat"]


def test_an_absurd_request_gets_the_shortfall_and_a_plan():
    short = plan("v5e", 1, model={"path": "Llama-3.1-70B"})
    assert short.free_bytes < -1e12
    nearest = memory_plan.nearest_fit(short)
    assert nearest.plan.device.name == "v5e" and nearest.plan.fits
    assert nearest.plan.num_devices >= 64


def test_a_model_that_fits_no_devices_is_refused_at_once():
    """A hidden size of 10**9: no change of settings is planned."""
    short = plan("v5e", 16)
    settings = {
        roles: dataclasses.replace(
            setting, model=dataclasses.replace(setting.model, hidden_size=10**9)
        )
        for roles, setting in short.pools.items()
    }
    start = time.process_time()
    with pytest.raises(
        ConfigError, match=r"no number of v5e and no change .*; use a smaller model"
    ):
        memory_plan.nearest_fit(dataclasses.replace(short, pools=settings))
    assert time.process_time() - start < 1.0


def test_host_offload_is_part_of_the_search():
    """Where all else is as small as it gets, the reference leaves the device."""
    least = {
        "model": {"param_dtype": "bfloat16", "remat": "offload_full"},
        "rollout": {"num_slots": 8},
        "trainer": {
            "max_tokens_per_microbatch": 1024,
            "optimizer": {"moment_dtype": "bfloat16"},
        },
        "critic": {"optimizer": {"moment_dtype": "bfloat16"}},
        "mesh": {"fsdp": 4, "tensor": 4, "rollout": "train"},
    }
    whole = plan("v5e", 16, **least)
    moved = plan("v5e", 16, **{**least, "mesh": {**least["mesh"], "on_host": ("reference",)}})
    between = dataclasses.replace(DEVICES["v5e"], memory_bytes=int(moved.peak_bytes) + 1)
    found = memory_plan.nearest_fit(dataclasses.replace(whole, device=between))
    assert found.changes == {"mesh.on_host": ("reference",)}
    assert """--config.mesh.on_host="('reference',)\"""" in str(found)


def run_within(seconds: float, *command: str) -> subprocess.CompletedProcess:
    """Runs a program of `launch/`, imports and all, in so much processor time."""
    root = pathlib.Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < seconds, (spent, done.stderr)
    return done


@pytest.mark.slow  # tests/docs runs the command
def test_an_absurd_request_is_answered_at_once():
    """70B on one chip."""
    program = ["launch/plan.py", "--json", "--config=configs/ppo_70b.py"]
    program += ["--topology=v5e:1x1", "--config.mesh.fsdp=1", "--config.mesh.tensor=1"]
    found = json.loads(run_within(20.0, *program).stdout)
    assert not found["fits"] and found["room_bytes"] < -1e12
    assert found["advice"]["num_devices"] >= 64
    assert found["advice"]["peak_bytes"] <= found["device"]["memory_bytes"]


def test_a_run_that_cannot_fit_is_refused_at_once(tmp_path):
    """Before the libraries of a run are loaded."""
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": 128256,
    }
    shape |= {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
    shape |= {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 28672}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    program = ["launch/train.py", "--config=configs/grpo_70b.py", f"--config.model.path={tmp_path}"]
    program += ["--config.mesh.fsdp=-1", "--config.mesh.tensor=1", f"--workdir={tmp_path / 'run'}"]
    done = run_within(20.0, *program)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "GiB on each cpu device while" in done.stderr and "nearest run that fits" in done.stderr
    assert "loading the libraries" not in done.stderr and not (tmp_path / "run").exists()


def test_a_mesh_that_does_not_fill_the_devices_is_refused():
    with pytest.raises(ConfigError, match="does not fill the 8 devices"):
        plan("h100", 8, mesh={"fsdp": 3})


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: accelerators.device_by_name("h900"), "known: v4, v5e"),
        (lambda: accelerators.topology_devices("v5e-16"), "write it as 'v5e:4x4'"),
        (lambda: published_shape("Unheard-Of-9B"), "nor a known published model"),
    ],
)
def test_errors_name_the_remedy(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_topologies_are_counted_as_jax_counts():
    assert accelerators.topology_devices("v5p:2x2x4") == (DEVICES["v5p"], 16)
    assert accelerators.topology_devices("tpu7x:2x2x1") == (DEVICES["tpu7x"], 8)


def test_names_of_published_models():
    assert published_shape("Llama-3.1-8B-Instruct") == SHAPES["Llama-3.1-8B"]
    assert published_shape("qwen2.5-3b-instruct") == SHAPES["Qwen2.5-3B"]
