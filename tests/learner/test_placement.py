"""Roles on pools of their own give the numbers of a colocated run."""

import jax
import numpy as np
import pytest

from jaxrl_llm.config import (
    AlgorithmConfig,
    DataConfig,
    MeshConfig,
    ModelConfig,
    PlacementConfig,
    RLConfig,
    RLTrainerConfig,
    RolloutConfig,
)
from jaxrl_llm.config.recipes import RECIPES
from jaxrl_llm.learner import batches, estimate, job_models, predict, update, weights
from jaxrl_llm.metrics.timers import Clock
from jaxrl_llm.planning import resolve_sizes
from jaxrl_llm.sampling import policy_sampler
from jaxrl_llm.sharding import device_pools
from jaxrl_llm.types import Prompt, Rewards, Rollouts, Weights

B, T = 16, 32


def config(choice: str, **sizes: int) -> RLConfig:
    return RLConfig(
        model=ModelConfig(num_layers=2, **sizes),
        algorithm=AlgorithmConfig(**{**RECIPES["ppo"], "recipe": "ppo"}),
        data=DataConfig(max_prompt_tokens=8),
        rollout=RolloutConfig(max_response_tokens=T - 8),
        trainer=RLTrainerConfig(prompts_per_step=B, minibatch_size=B // 2),
        mesh=MeshConfig(fsdp=-1),
        placement=PlacementConfig(choice=choice),
    )


def rollouts_of(width: int = T, count: int = B) -> Rollouts:
    random = np.random.default_rng(0)
    lengths = random.integers(width // 2, width + 1, count).astype(np.int32)
    inside = np.arange(width) < lengths[:, None]
    mask = inside & (np.arange(width) >= 8)
    prompt = Prompt((1,) * 8, "", "x", "", {}, 0)
    return Rollouts(
        tokens=np.where(inside, random.integers(1, 90, (count, width)), 0).astype(np.int32),
        response_mask=mask,
        rollout_log_probs=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=mask.astype(np.int32),
        lengths=lengths,
        group_ids=np.arange(count, dtype=np.int32),
        stopped=np.ones(count, bool),
        prompts=(prompt,) * count,
        responses=("",) * count,
    )


def rewards_of(count: int = B) -> Rewards:
    scores = np.random.default_rng(1).normal(size=count).astype(np.float32)
    ones, zeros = np.ones(count, np.float32), np.zeros(count, np.float32)
    return Rewards(scores, {"r": scores}, {"r": ones}, zeros, zeros, ({},) * count, 0)


def two_updates(choice: str):
    """Returns predictions, metrics and the state after two minibatches of one step."""
    run = config(choice)
    models = job_models.make_models(run, resolve_sizes.resolved_meshes(run))
    policy = weights.initial_policy(run, models)
    frozen = weights.load_frozen(run, models, policy, {})
    state = weights.initial_state(run, models, policy)
    predictions_of = predict.predictor(run, models, frozen)
    estimates_of = estimate.estimator(run, models.mesh)
    learn = update.make_updater(run, models, frozen.base_params, state)
    rollouts, clock = rollouts_of(), Clock()
    predictions, _ = predictions_of(state, rollouts, clock)
    estimates, state, _ = estimates_of(state, rollouts, rewards_of(), predictions, clock)
    batch = learn.replicate_batch(batches.assemble(rollouts, predictions, estimates))
    found = []
    order = batches.update_order(run, len(rollouts.lengths), jax.random.key(3))
    for packed, key in batches.minibatches(models.packer, rollouts, order):
        state, metrics = learn.update(state, batch, packed, key)
        found.append(jax.device_get(metrics))
    sampling = policy_sampler.make_sampler(run, models, frozen.base_params)
    sampled = sampling.weights(state.policy.params)
    sampling.release(Weights(sampled, 0))
    assert all(
        leaf.is_deleted() == sampling.pauses_in_training for leaf in jax.tree.leaves(sampled)
    )
    assert sampling.pauses_in_training == (choice != "standalone")
    sampled = sampling.weights(state.policy.params, old=sampled)
    return models, jax.device_get(predictions), found, jax.device_get((state, sampled))


@pytest.fixture(scope="module")
def colocated():
    return two_updates("colocate")


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["split", "hybrid", "standalone"])
def test_roles_apart_give_the_numbers_of_roles_together(choice, colocated):
    _, predictions, metrics, (state, sampled) = colocated
    models, other_predictions, other_metrics, (other_state, other_sampled) = two_updates(choice)
    assert models.meshes["policy"] != models.meshes["critic"]
    assert len(device_pools.all_devices(models.meshes.values())) == 8
    # Sums over four devices and over eight come in another order; float32.
    for mine, other in zip(metrics, other_metrics, strict=True):
        assert mine.keys() == other.keys() and "critic/vf_loss" in mine
        for name, value in mine.items():
            if name.startswith("perf/"):  # of the packing, which depends on the shards
                continue
            np.testing.assert_allclose(other[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    for mine, other in ((predictions, other_predictions), (sampled, other_sampled)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5), mine, other
        )
    # Adam divides by the size of a gradient: where it is all rounding, so is the step.
    rate = 1e-5
    for learner in ("policy", "critic"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-5, atol=4 * rate),
            getattr(state, learner).params,
            getattr(other_state, learner).params,
        )
