"""A run that trains adapters alone: it learns, resumes, is small on disk, and is exported."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recipe_settings

from jaxrl_llm import saved_policy
from jaxrl_llm.learner import job_models, weights
from jaxrl_llm.models import lora
from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.sampling import policy_sampler
from jaxrl_llm.trainer import rl

CHANGES = {
    "lora": {"rank": 8, "alpha": 16.0},
    "trainer": {"optimizer": {"learning_rate": 4e-3}},
    "algorithm": {"kl_in": "loss"},
    "checkpoint": {"every": 30},
}
MEASURED = {"perf/tflops/update", "perf/padding_share", "perf/max_cpu_memory_used_gb"}


def bytes_of(tree):
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


@pytest.mark.slow
def test_only_adapters_are_trained_and_kept(train, tmp_path):
    state, whole = train("grpo", CHANGES)
    found = recipe_settings.metrics(whole)
    scores = [found[step]["critic/score/mean"] for step in range(1, 41)]
    # As for every recipe: see test_recipes.
    assert np.mean(scores[-5:]) > np.mean(scores[:3]) + 0.15, scores
    assert jax.tree.structure(state.policy.params) == jax.tree.structure(
        lora.adapter_params(state.policy.params)
    )
    # The first step's policy is the reference to the bit, and so are its log-probs.
    assert found[1]["actor/kl_loss"] == 0.0 < found[40]["actor/kl_loss"]

    # What was measured on the way: only adapters have a gradient.
    data = json.loads((whole / "metrics.jsonl").read_text().splitlines()[-1])["data"]
    assert data.keys() >= MEASURED
    norms = {name for name in data if name.startswith("actor/grad_norm/")}
    assert norms == {"actor/grad_norm/attention", "actor/grad_norm/mlp"}

    # Two moments beside the adapters, and nothing of the base.
    arrays = sum(p.stat().st_size for p in (whole / "checkpoints/40").rglob("*") if p.is_file())
    trained = bytes_of(state.policy.params)
    policy = saved_policy.policy_from_run(whole)
    sampler, models = policy.sampler, policy.models
    params, step = policy.read_params()
    base = bytes_of(sampler.base)
    assert 3 * trained < arrays < 3 * trained + base / 2  # what Orbax adds to any tree: 60 kB

    resumed = tmp_path / "resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "40")
    again = rl.train(recipe_settings.config("grpo", CHANGES), resumed)
    assert recipe_settings.metrics(resumed) == found
    jax.tree.map(np.testing.assert_array_equal, state, again)

    # What is read back is what was trained; merged it is what samples and what is exported.
    assert step == 40
    jax.tree.map(np.testing.assert_array_equal, params, state.policy.params)
    merged = saved_policy.load_run(whole).full_params(params)
    assert jax.tree.structure(merged) == jax.tree.structure(sampler.base)
    sampled = sampler.weights(params)["layers"][0]["attention"]["q"]["kernel"]
    if sampler.engine_args.network.matmuls.transposes(*sampled.shape):
        sampled = sampled.T
    np.testing.assert_array_equal(sampled, merged["layers"]["0"]["attention"]["q"]["kernel"][0])
    assert not np.array_equal(sampled, sampler.base["layers"]["0"]["attention"]["q"]["kernel"][0])
    checkpoint.save(tmp_path / "export", models.policy, merged, tokenizer=models.tokenizer)
    config = json.loads((tmp_path / "export/config.json").read_text())
    assert config["model_type"] == "qwen2"


def test_the_reference_is_the_base_itself(one_device):
    config = recipe_settings.config("grpo", CHANGES)
    models = job_models.make_models(config)
    policy = weights.initial_policy(config, models)
    frozen = weights.load_frozen(config, models, policy, {})
    shared = zip(*map(jax.tree.leaves, (frozen.reference, frozen.base_params)), strict=True)
    assert all(a is b for a, b in shared)
    state = weights.initial_state(config, models, policy)
    assert bytes_of(state.policy.opt_state) < 2.1 * bytes_of(state.policy.params)
    assert not any(a is b for a in jax.tree.leaves(state) for b in jax.tree.leaves(policy))


def test_new_weights_compile_nothing(one_device, compilations):
    config = recipe_settings.config("grpo", CHANGES)
    models = job_models.make_models(config)
    policy = weights.initial_policy(config, models)
    params = weights.initial_state(config, models, policy).policy.params
    sampler = policy_sampler.make_sampler(config, models, policy)
    first = sampler.weights(params)
    moved = jax.tree.map(lambda a: jnp.asarray(a) + 0.1, params)
    num_before = len(compilations)
    assert num_before
    sampler.weights(moved, old=first)
    assert compilations[num_before:] == []
