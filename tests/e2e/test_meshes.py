"""The shape of the mesh does not matter: same samples, same losses, same weights."""

import functools

import jax
import numpy as np
import pytest
import recipe_settings

from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.trainer import rl

STEPS = 3
MESHES = {
    "fsdp 8": {"fsdp": 8},
    "fsdp 4 x tensor 2": {"fsdp": 4, "tensor": 2},
    "data 2 x fsdp 2 x tensor 2": {"data": 2, "fsdp": 2, "tensor": 2},
    "sequence 2 x fsdp 4": {"sequence": 2, "fsdp": 4},
    "sequence 2 x fsdp 4, ring": {"sequence": 2, "fsdp": 4, "sequence_attention": "ring"},
    "tensor 8": {"tensor": 8},
}


def config(recipe, mesh, **changes):
    """Returns three steps of two updates by a model whose query heads divide by eight.

    Untaught, it babbles; the reward for length is one that babbling gets, so losses are real.
    """
    settings = {
        "model": {"num_heads": 8, "num_kv_heads": 2, "head_size": 8, "num_layers": 2},
        "rewards": {"functions": {"answer": {"function": "length"}}},
        "rollout": {"num_slots": 16},
        "warm_start": {"num_steps": 0},
        "algorithm": {"samples_per_prompt": 4, "kl_in": "loss" if recipe == "grpo" else "reward"},
        "trainer": {
            "num_steps": STEPS,
            "prompts_per_step": 8,
            "minibatch_size": 16,
            "max_tokens_per_microbatch": 256,
            "optimizer": {"warmup_steps": 0},
        },
        "mesh": mesh,
        **changes,
    }
    return recipe_settings.config(recipe, settings)


def run(recipe, mesh, workdir, devices, **changes):
    with pytest.MonkeyPatch.context() as patch:
        make = functools.partial(mesh_lib.make_mesh, devices=devices)
        patch.setattr(mesh_lib, "make_mesh", make)
        return rl.train(config(recipe, mesh, **changes), workdir)


def assert_same_run(state, workdir, wanted_state, wanted_dir):
    for step in range(1, STEPS + 1):
        said = [row["output"] for row in recipe_settings.dump(workdir, step)]
        wanted = [row["output"] for row in recipe_settings.dump(wanted_dir, step)]
        assert said == wanted, step
    found, wanted = recipe_settings.metrics(workdir), recipe_settings.metrics(wanted_dir)
    for step in range(1, STEPS + 1):
        losses = [name for name in wanted[step] if name.endswith("/loss")]
        assert losses and any(abs(wanted[step][name]) > 1e-3 for name in losses)
        for name in [*losses, "actor/entropy", "critic/score/mean"]:
            assert found[step][name] == pytest.approx(wanted[step][name], abs=1e-5), (step, name)
    # Adam divides by the gradient's size: a gradient of rounding errors moves a weight by up to
    # the learning rate. Hence the mean over each array, not its largest entry.
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(wanted_state), strict=True):
        assert np.mean(np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64))) < 1e-4


@pytest.fixture(scope="module", params=["grpo", "ppo"])
def on_one_device(request, tmp_path_factory):
    workdir = tmp_path_factory.mktemp(request.param) / "run"
    state = run(request.param, {}, workdir, jax.devices()[:1])
    return request.param, jax.device_get(state), workdir


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_any_mesh_takes_the_steps_of_one_device(name, on_one_device, tmp_path):
    recipe, state, workdir = on_one_device
    found = run(recipe, MESHES[name], tmp_path / "run", jax.devices())
    assert_same_run(found, tmp_path / "run", state, workdir)
