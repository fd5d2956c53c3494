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
    RolloutConfig,
    TrainerConfig,
)
from jaxrl_llm.config.recipes import RECIPES
from jaxrl_llm.learner import experience, update
from jaxrl_llm.learner import roles as roles_lib
from jaxrl_llm.metrics.clock import Clock
from jaxrl_llm.sharding import pools
from jaxrl_llm.types import Prompt, Rewards, Rollouts

B, T = 16, 32


def config(choice: str, **sizes: int) -> RLConfig:
    return RLConfig(
        model=ModelConfig(num_layers=2, **sizes),
        algorithm=AlgorithmConfig(**{**RECIPES["ppo"], "recipe": "ppo"}),
        data=DataConfig(max_prompt_tokens=8),
        rollout=RolloutConfig(max_response_tokens=T - 8),
        trainer=TrainerConfig(prompts_per_step=B, minibatch_size=B // 2),
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
    roles = roles_lib.build(config(choice))
    policy = roles_lib.initial_policy(roles)
    roles = roles_lib.with_frozen_models(roles, policy, {})
    state = roles_lib.initial_state(roles, policy)
    predict, estimate = experience.predictor(roles), experience.estimator(roles)
    learn = update.updater(roles, state)
    rollouts = rollouts_of()
    predictions = predict(state, rollouts, Clock())
    estimates, state, _ = estimate(state, rollouts, rewards_of(), predictions)
    batch = learn.spread(experience.assemble(rollouts, predictions, estimates))
    found = []
    for plan, key in experience.minibatches(roles, rollouts, jax.random.key(3)):
        state, metrics = learn(state, batch, plan, key)
        found.append(jax.device_get(metrics))
    sampled = roles.rollout_layout(state.policy.params)
    sampled = roles.rollout_layout(state.policy.params, old=sampled)
    return roles, jax.device_get(predictions), found, jax.device_get((state, sampled))


@pytest.fixture(scope="module")
def colocated():
    return two_updates("colocate")


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["split", "hybrid", "standalone"])
def test_roles_apart_give_the_numbers_of_roles_together(choice, colocated):
    _, predictions, metrics, (state, sampled) = colocated
    roles, other_predictions, other_metrics, (other_state, other_sampled) = two_updates(choice)
    assert roles.meshes["policy"] != roles.meshes["critic"]
    assert len(pools.devices(roles.meshes.values())) == 8
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
