"""What the models are asked, on a mesh: the same as one pass over each sequence."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from jaxrl_llm.config import (
    AlgorithmConfig,
    DataConfig,
    MeshConfig,
    ModelConfig,
    RLConfig,
    RLTrainerConfig,
    RolloutConfig,
)
from jaxrl_llm.learner import job_models, predict
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.metrics.timers import Clock
from jaxrl_llm.types import Rollouts

B, T = 12, 32
CONFIG = RLConfig(
    model=ModelConfig(
        hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_size=8, mlp_size=48
    ),
    algorithm=AlgorithmConfig(advantage="gae", kl_in="reward"),
    trainer=RLTrainerConfig(max_tokens_per_microbatch=300, minibatch_size=4, epochs=2),
    mesh=MeshConfig(fsdp=2, tensor=2, data=2),
    data=DataConfig(max_prompt_tokens=8),
    rollout=RolloutConfig(max_response_tokens=T - 8),
)


@pytest.fixture(scope="module")
def run():
    models = job_models.make_models(CONFIG)
    policy, reference = (
        tiny.sharded(tiny.params(models.policy, seed=seed), models.mesh, models.policy)
        for seed in (0, 1)
    )
    state = weights_lib.initial_state(CONFIG, models, policy)
    head = np.random.default_rng(0).standard_normal((1, 32)).astype(np.float32)
    critic = state.critic.params | {
        "score": jax.device_put(head, state.critic.params["score"].sharding)
    }
    state = dataclasses.replace(state, critic=dataclasses.replace(state.critic, params=critic))
    scorers = {"judge": weights_lib.RewardModel(models.value, critic)}
    return models, weights_lib.FrozenModels(reference=reference, scorers=scorers), state


@pytest.fixture(scope="module")
def rollouts():
    random = np.random.default_rng(1)
    lengths = random.integers(6, T + 1, B).astype(np.int32)
    columns = np.arange(T)
    inside = columns < lengths[:, None]
    mask = inside & (columns >= random.integers(1, 6, B)[:, None])
    groups = np.repeat(np.arange(B // 2), 2).astype(np.int32)
    # Samples of a prompt begin alike.
    drawn = random.integers(0, 104, (B, T))
    drawn[1::2, :5] = drawn[::2, :5]
    tokens = np.where(inside, drawn, 0).astype(np.int32)
    log_probs = np.where(mask, -random.random((B, T)), 0.0).astype(np.float32)
    versions = mask.astype(np.int32)
    return Rollouts(tokens, mask, log_probs, versions, lengths, groups, mask[:, -1], (), ())


def test_predictions_are_of_one_pass(run, rollouts):
    models, frozen, state = run
    clock = Clock()
    predictions, same = predict.predictor(CONFIG, models, frozen)(state, rollouts, clock)
    assert same is rollouts
    timed = {f"timing_s/{phase}" for phase in ("old_log_prob", "ref", "values", "step")}
    assert set(clock.seconds()) == timed
    mask, ones = rollouts.response_mask, np.ones(B, np.float32)

    def assert_is(found, want):
        np.testing.assert_allclose(found, np.where(mask, want, 0.0), atol=2e-5)

    for field, seed in (("old_log_probs", 0), ("ref_log_probs", 1)):
        weights = tiny.params(models.policy, seed=seed)
        want = tiny.teacher_forced(rollouts.tokens, ones, models.policy, weights)
        assert_is(getattr(predictions, field), want)

    hidden = hidden_of(models.policy, tiny.params(models.policy), rollouts.tokens)
    log_p = jax.nn.log_softmax(models.policy.logits(tiny.params(models.policy), hidden))
    after = lambda x: np.pad(np.asarray(x)[:, :-1], ((0, 0), (1, 0)))  # noqa: E731
    assert_is(predictions.entropies, after(-(np.exp(log_p) * log_p).sum(-1)))
    assert_is(predictions.sum_squared_probs, after(np.exp(2 * log_p).sum(-1)))
    # The critic has the policy's body under a head of its own.
    values = np.asarray(hidden) @ np.asarray(state.critic.params["score"])[0]
    assert_is(predictions.values, after(values))
    assert not np.asarray(predictions.cost_values).any()

    # A scorer reads the last token of the whole sequence.
    judged = predict.model_scorers(models, frozen)["judge"](rollouts)
    np.testing.assert_allclose(judged, values[np.arange(B), rollouts.lengths - 1], atol=2e-5)


def hidden_of(network, params, tokens):
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), tokens.shape)
    return jax.jit(tiny.hidden_states(network))(params, tokens, positions, np.ones_like(tokens))
