"""The shape of the mesh does not matter: same samples, same losses, same weights."""

import functools
import math
import shutil

import jax
import numpy as np
import pytest
import recipe_settings

from jaxrl_llm.checkpoint import saver
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.trainer import rl, supervised

STEPS = 3
# What babbling gets, now more, now less.
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return sum(character in "0123456789" for character in solution_str) / 8
"""
MESHES = {
    "fsdp 8": {"fsdp": 8},
    "fsdp 4 x tensor 2": {"fsdp": 4, "tensor": 2},
    "data 2 x fsdp 2 x tensor 2": {"data": 2, "fsdp": 2, "tensor": 2},
    "sequence 2 x fsdp 4": {"sequence": 2, "fsdp": 4},
    "sequence 2 x fsdp 4, ring": {"sequence": 2, "fsdp": 4, "sequence_attention": "ring"},
    "tensor 8": {"tensor": 8},
    "stage 2 x fsdp 2 x tensor 2": {"stage": 2, "fsdp": 2, "tensor": 2},
    "stage 2 x data 2 x sequence 2": {"stage": 2, "data": 2, "fsdp": 1, "sequence": 2},
    "sampling over all axes": {"data": 2, "fsdp": 2, "tensor": 2, "rollout": "all_tensor"},
    "sampling as in training": {"fsdp": 4, "tensor": 2, "rollout": "train"},
    "sampling on each device": {"fsdp": 4, "tensor": 2, "rollout": "replicas"},
}


# Adam divides by the gradient's size: with the usual eps a gradient that is zero but for rounding
# moves a weight as far as any other, and where it goes the mesh decides.
OPTIMIZER = {"learning_rate": 3e-3, "eps": 1e-3, "warmup_steps": 0}


MODEL = {"num_heads": 8, "num_kv_heads": 2, "head_size": 8, "num_layers": 2}


def config(recipe, mesh, reward, **changes):
    """Returns three steps of two updates by an untaught model whose query heads divide by 8."""
    settings = {
        "model": MODEL,
        "rewards": {"functions": {"answer": {"function": f"{reward}:score"}}},
        "rollout": {"num_slots": 16},
        "warm_start": {"num_steps": 0},
        "critic": {"optimizer": OPTIMIZER},
        "algorithm": {"samples_per_prompt": 4, "kl_in": "loss" if recipe == "grpo" else "reward"},
        "trainer": {
            "num_steps": STEPS,
            "prompts_per_step": 8,
            "minibatch_size": 16,
            "max_tokens_per_microbatch": 256,
            "optimizer": OPTIMIZER,
        },
        "mesh": mesh,
    }
    return recipe_settings.config(recipe, recipe_settings.merged(settings, changes))


def run(recipe, mesh, workdir, devices, **changes):
    reward = workdir.with_suffix(".py")
    reward.write_text(REWARD)
    with mesh_lib.use_devices(devices):
        return rl.train(config(recipe, mesh, reward, **changes), workdir)


def assert_same_steps(workdir, wanted_dir):
    for step in range(1, STEPS + 1):
        said = [row["output"] for row in recipe_settings.dump(workdir, step)]
        wanted = [row["output"] for row in recipe_settings.dump(wanted_dir, step)]
        assert said == wanted, step
    found, wanted = recipe_settings.metrics(workdir), recipe_settings.metrics(wanted_dir)
    for step in range(1, STEPS + 1):
        losses = [name for name in wanted[step] if name.endswith("/loss")]
        assert losses and wanted[step]["actor/grad_norm"] > 1e-2
        for name in [*losses, "actor/grad_norm", "actor/entropy", "critic/score/mean"]:
            assert found[step][name] == pytest.approx(wanted[step][name], abs=1e-5), (step, name)


def assert_same_run(state, workdir, wanted_state, wanted_dir):
    assert_same_steps(workdir, wanted_dir)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(wanted_state), strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
    @functools.cache
    def made(recipe):
        workdir = tmp_path_factory.mktemp(recipe) / "run"
        return jax.device_get(run(recipe, {}, workdir, jax.devices()[:1])), workdir

    return made


# All axes of training, and sampling laid out otherwise. PPO's loop has all that GRPO's has but its
# advantages and its loss: the first two see groups.
IN_GRPO = ("data 2 x fsdp 2 x tensor 2", "sequence 2 x fsdp 4, ring")
IN_PPO = (*IN_GRPO, "tensor 8", "sampling over all axes", "sampling on each device")


@pytest.mark.parametrize(
    "recipe, name",
    [
        pytest.param(
            recipe,
            name,
            marks=pytest.mark.slow if name in every_change else pytest.mark.nightly,
        )
        for recipe, every_change in (("grpo", IN_GRPO), ("ppo", IN_PPO))
        for name in MESHES
    ],
)
def test_any_mesh_takes_the_steps_of_one_device(recipe, name, on_one_device, tmp_path):
    state, workdir = on_one_device(recipe)
    found = run(recipe, MESHES[name], tmp_path / "run", jax.devices())
    assert_same_run(found, tmp_path / "run", state, workdir)


# Muon orthogonalizes matrices of which no device has all; 8 bits round what meshes add up.
OPTIMIZERS = {"muon": {"name": "muon"}, "8-bit muon": {"name": "muon", "moment_dtype": "int8"}}
MUON_MESHES = (
    "data 2 x fsdp 2 x tensor 2",
    "sequence 2 x fsdp 4, ring",
    "fsdp 8",
    "tensor 8",
    "stage 2 x fsdp 2 x tensor 2",
)


@pytest.mark.parametrize(
    "optimizer, name",
    [
        pytest.param("muon", MUON_MESHES[0], marks=pytest.mark.slow),
        *(pytest.param("muon", name, marks=pytest.mark.nightly) for name in MUON_MESHES[1:]),
        pytest.param("8-bit muon", MUON_MESHES[0], marks=pytest.mark.nightly),
    ],
)
def test_muon_takes_the_steps_of_one_device(optimizer, name, tmp_path):
    changes = {"trainer": {"optimizer": OPTIMIZERS[optimizer]}}
    run("grpo", {}, tmp_path / "one", jax.devices()[:1], **changes)
    run("grpo", MESHES[name], tmp_path / "run", jax.devices(), **changes)
    assert_same_steps(tmp_path / "run", tmp_path / "one")


@pytest.mark.slow
def test_host_offload_changes_no_bit(tmp_path):
    mesh, resting = {"fsdp": 8}, {"fsdp": 8, "on_host": ["optimizer", "reference"]}
    wanted = run("ppo", mesh, tmp_path / "device", jax.devices())
    found = run("ppo", resting, tmp_path / "host", jax.devices())
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(got, want)
    moments = [a for a in jax.tree.leaves(found.policy.opt_state) if a.ndim]
    assert {a.sharding.memory_kind for a in moments} == {"pinned_host"}
    assert {a.sharding.memory_kind for a in jax.tree.leaves(found.policy.params)} == {"device"}


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(tmp_path):
    """Two steps on eight devices, the third on four, split otherwise, with moments on the host."""
    saved = {"checkpoint": {"every": 1}}
    wanted = run("ppo", {"fsdp": 8}, tmp_path / "whole", jax.devices(), **saved)
    workdir = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver.Saver, "should_save", lambda self, step, *_: step <= 2)
        run("ppo", {"fsdp": 8}, workdir, jax.devices(), **saved)
    mesh = {"fsdp": 2, "tensor": 2, "on_host": ["optimizer"]}
    found = run("ppo", mesh, workdir, jax.devices()[:4], **saved)
    assert_same_run(found, workdir, wanted, tmp_path / "whole")


DEEP = {**MODEL, "num_layers": 4}
EXPERTS = {**DEEP, "family": "qwen3_moe", "num_experts": 4, "experts_per_token": 2, "mlp_size": 32}
ON_STAGES = {
    "ppo": ("ppo", {"model": DEEP}, [{"stage": 4, "fsdp": 2}, {"stage": 2, "stage_rounds": 2}]),
    "adapters": (
        "grpo",
        {"model": DEEP, "lora": {"rank": 4, "alpha": 8.0}},
        [{"stage": 2, "fsdp": 2, "tensor": 2}, {"stage": 4, "fsdp": 2}],
    ),
    "experts": (
        "grpo",
        {"model": EXPERTS},
        [{"stage": 2, "fsdp": 2, "expert": 2}, {"stage": 4, "fsdp": 1, "expert": 2}],
    ),
    "low precision": (
        "grpo",
        {"model": DEEP, "rollout": {"num_slots": 16, "quantization": "int8"}},
        [{"stage": 2, "fsdp": 2, "tensor": 2}],
    ),
    # A function and a model judge, which all meshes read as one device taught it. A layer is left.
    "scored by a model": (
        "ppo",
        {
            "model": {**DEEP, "num_layers": 5},
            "preference": {"num_steps": 3, "batch_size": 16, "optimizer": OPTIMIZER},
            "rewards": {"models": {"judge": {}}, "functions": {"sum": {"function": "arithmetic"}}},
        },
        [{"stage": 4, "fsdp": 2}],
    ),
    "images": (
        "grpo",
        {
            "model": {**DEEP, "family": "qwen2_5_vl"},
            "data": {"task": "shapes", "max_prompt_tokens": 40, "chat_template": True},
        },
        [{"stage": 2, "fsdp": 2, "tensor": 2}],
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ON_STAGES)
def test_stages_take_the_steps_of_one_device(name, tmp_path):
    recipe, changes, meshes = ON_STAGES[name]
    run(recipe, {}, tmp_path / "one", jax.devices()[:1], **changes)
    wanted = recipe_settings.metrics(tmp_path / "one")
    for number, mesh in enumerate(meshes):
        count = math.prod(n for axis, n in mesh.items() if axis != "stage_rounds")
        workdir = tmp_path / str(number)
        if (tmp_path / "one/reward_models").exists():
            shutil.copytree(tmp_path / "one/reward_models", workdir / "reward_models")
        run(recipe, mesh, workdir, jax.devices()[:count], **changes)
        assert_same_steps(workdir, tmp_path / "one")
        found = recipe_settings.metrics(workdir)
        for step, each in wanted.items():
            for loss in (key for key in each if key.endswith("/loss")):
                assert found[step][loss] == pytest.approx(each[loss], abs=1e-6), (mesh, step, loss)


@pytest.mark.nightly
@pytest.mark.parametrize("job", ["sft", "reward_model", "dpo"])
def test_jobs_on_stages_take_the_steps_of_one_device(job, tmp_path):
    found, devices = [], jax.devices()
    for number, mesh in enumerate(({}, {"stage": 2, "fsdp": 2, "stage_rounds": 2})):
        settings = {
            "job": job,
            "model": {**recipe_settings.SUMS["model"], **DEEP, "num_layers": 5},
            "data": recipe_settings.SUMS["data"],
            "trainer": {
                "num_steps": STEPS,
                "batch_size": 16,
                "max_sequence_tokens": 32,
                "max_tokens_per_microbatch": 128,
                "optimizer": OPTIMIZER,
            },
            "mesh": mesh,
            "metrics": recipe_settings.SUMS["metrics"],
        }
        with mesh_lib.use_devices(devices[: 4 if mesh else 1]):
            supervised.train(from_config_dict(settings), tmp_path / str(number))
        found.append(recipe_settings.metrics(tmp_path / str(number)))
    for step in range(1, STEPS + 1):
        wanted = {k: v for k, v in found[0][step].items() if k.endswith(("/loss", "/grad_norm"))}
        assert {f"{job}/loss", f"{job}/grad_norm"} <= wanted.keys() and min(wanted.values()) > 1e-2
        for name, value in wanted.items():  # above 1 a float32's last bits are larger
            close = pytest.approx(value, rel=1e-6, abs=1e-6)
            assert found[1][step][name] == close, (step, name)


@pytest.mark.nightly
def test_a_run_goes_on_with_other_stages(tmp_path):
    """Two steps on two stages, the third on four of them in another order, then on none."""
    saved = {"checkpoint": {"every": 1}, "model": {**MODEL, "num_layers": 4}}
    wanted = run("ppo", {}, tmp_path / "whole", jax.devices()[:1], **saved)
    workdir = tmp_path / "run"
    meshes = {"stage": 2, "fsdp": 2, "stage_rounds": 2}, {"stage": 4, "fsdp": 1}, {}
    for step, mesh in enumerate(meshes, start=1):
        count = mesh.get("stage", 1) * mesh.get("fsdp", 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saver.Saver, "should_save", lambda self, now, *_, last=step: now <= last)
            found = run("ppo", mesh, workdir, jax.devices()[:count], **saved)
    assert_same_run(found, workdir, wanted, tmp_path / "whole")
