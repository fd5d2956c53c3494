"""The state of a run is born in parts, and restores in other parts, bit for bit."""

import re

import jax
import numpy as np
import optax
import pytest
import tiny

from jaxrl_llm.checkpoint.saver import Saver
from jaxrl_llm.config import CheckpointConfig, ConfigError
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.learner import job_models, weights
from jaxrl_llm.planning.run_setting import RunSetting

VALUES = {
    "model": {"num_layers": 2, "num_heads": 8, "num_kv_heads": 2, "head_size": 8},
    "algorithm": {"recipe": "ppo"},
    "rewards": {"functions": {"answer": {"function": "arithmetic"}}},
}


def built(mesh, devices, **changes):
    config = from_config_dict({**VALUES, **changes, "mesh": mesh})
    return config, job_models.make_models(config, job_models.shared_mesh(config, devices))


def begun(mesh, devices, on_host=(), **changes):
    config, models = built({**mesh, "on_host": list(on_host)}, devices, **changes)
    return weights.initial_state(config, models, weights.initial_policy(config, models))


def test_a_mesh_that_cannot_hold_the_run_is_refused_before_any_work():
    with pytest.raises(ConfigError, match=r"config\.mesh\.sequence: 8 query heads do not divide"):
        built({"sequence": 3}, jax.devices()[:3])
    built({"sequence": 3, "sequence_attention": "ring"}, jax.devices()[:3])
    # The budget is of a device; how many share a row is known with the mesh.
    budget = {"trainer": {"max_tokens_per_microbatch": 256}}
    built({"sequence": -1, "fsdp": 1}, jax.devices()[:2], **budget)
    with pytest.raises(ConfigError, match=r"256 x 1 sequence shards cannot hold one row of 512"):
        built({"sequence": -1, "fsdp": 1}, jax.devices()[:1], **budget)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "count", "on_host"),
    [({"fsdp": 2, "tensor": 2}, 4, ()), ({}, 1, ()), ({"sequence": 2}, 8, ("optimizer",))],
    ids=str,
)
def test_a_state_restores_on_another_mesh(mesh, count, on_host, tmp_path):
    state = begun({"fsdp": 8}, jax.devices())
    # Moments that are not all zero: no two numbers of the state are the same.
    numbers = iter(range(1, 1000))
    state = jax.tree.map(lambda a: a + next(numbers) if a.dtype == "float32" else a, state)
    state = jax.device_put(state, jax.tree.map(lambda a: a.sharding, state))
    saver = Saver(tmp_path, CheckpointConfig())
    saver.save(1, state, {})
    other = begun(mesh, jax.devices()[:count], on_host)
    restored, _, _ = saver.restore(weights.abstract_arrays(other))
    saver.close()
    for got, want, like in zip(
        *(jax.tree.leaves(tree) for tree in (restored, state, other)), strict=True
    ):
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
        assert got.sharding.is_equivalent_to(like.sharding, got.ndim)
        assert got.sharding.memory_kind == like.sharding.memory_kind


# Heads of which a row is two blocks of 8-bit moments, on meshes that split rows in more parts.
WIDE = {"model": {**VALUES["model"], "hidden_size": 64}}
OPTIMIZERS = {
    "int8": {"moment_dtype": "int8"},
    "muon": {"name": "muon", "moment_dtype": "bfloat16"},
    "8-bit muon": {"name": "muon", "moment_dtype": "int8"},
    "schedule-free critic": {"name": "schedule_free"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_the_bytes_of_its_plan_and_restores(name, tmp_path):
    changes = {**WIDE, "critic": {"optimizer": OPTIMIZERS[name]}}
    if "critic" not in name:
        changes["trainer"] = {"optimizer": OPTIMIZERS[name]}
    mesh, other_mesh = {"fsdp": 4, "tensor": 2}, {"fsdp": 2, "on_host": []}
    state = begun(mesh, jax.devices(), **changes)
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda a: jax.device_put(rng.integers(1, 99, a.shape).astype(a.dtype), a.sharding), state
    )
    config, models = built(mesh, jax.devices(), **changes)
    setting = RunSetting(config, models.policy.shape, (), dict(models.mesh.shape), "cpu")
    for role, head in (("policy", "lm"), ("critic", "scalar")):
        moments = [a for a in jax.tree.leaves(getattr(state, role).opt_state) if a.ndim]
        held = sum(a.addressable_shards[0].data.nbytes for a in moments)
        # Scales of rows that are split in more parts than they have blocks are whole everywhere.
        assert setting.optimizer_bytes(head) == pytest.approx(
            held, rel=0.05 * ("int8" in str(changes))
        )
    saver = Saver(tmp_path, CheckpointConfig())
    saver.save(1, state, {})
    other = begun(other_mesh, jax.devices()[:2], **changes)
    restored, _, _ = saver.restore(weights.abstract_arrays(other))
    saver.close()
    for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


ARRAY = re.compile(r"\b[a-z]+\d+\[([\d,]+)\]")


def test_no_device_ever_holds_a_whole_array():
    """Neither the weights' birth nor that of the moments makes an array as large as one weight."""
    mesh = tiny.make_mesh(fsdp=8)
    network = tiny.with_sizes(hidden_size=64, num_kv_heads=4, mlp_size=256, vocab_size=512)
    shardings = job_models.train_shardings(network, mesh)
    init = jax.jit(network.init, out_shardings=shardings).lower(jax.random.key(0))
    params = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        network.abstract_params(),
        shardings,
    )
    adam = optax.adamw(1e-3)
    places = jax.tree.map(lambda a: a.sharding, weights.abstract_opt_state(adam, params, mesh))
    moments = jax.jit(adam.init, out_shardings=places).lower(params)
    largest = max(np.prod(a.shape) for a in jax.tree.leaves(params))
    for program in (init, moments):
        shapes = ARRAY.findall(program.compile().as_text())
        made = max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)
        assert made <= largest / 8
