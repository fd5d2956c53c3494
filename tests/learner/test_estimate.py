"""From rewards to advantages, with the state that moves from step to step."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.config import AlgorithmConfig, RLConfig
from jaxrl_llm.learner.estimate import estimator
from jaxrl_llm.learner.weights import LearnerState
from jaxrl_llm.metrics.clock import Clock
from jaxrl_llm.types import Predictions, Rewards, Rollouts

# Two prompts, two samples each, three tokens; the prompt is the first.
MASK = np.array([[False, True, True]] * 4)
SCORES = np.array([1.0, 0.0, 3.0, 1.0], np.float32)
LOG_PROBS = np.where(MASK, -1.0, 0.0).astype(np.float32)


def estimate(algorithm, *, rollout_log_probs=LOG_PROBS, ref_log_probs=LOG_PROBS, costs=0.0):
    state = LearnerState({}, {}, {}, jnp.float32(0.5), jnp.float32(0.0))
    group_ids, rows = np.array([0, 0, 1, 1], np.int32), np.zeros(4, np.float32)
    rollouts = Rollouts(
        tokens=MASK.astype(np.int32),
        response_mask=MASK,
        rollout_log_probs=np.asarray(rollout_log_probs, np.float32),
        versions=MASK.astype(np.int32),
        lengths=np.full(4, 3, np.int32),
        group_ids=group_ids,
        stopped=MASK[:, -1],
        prompts=(),
        responses=(),
    )
    terms = {"answer": SCORES}
    rewards = Rewards(SCORES, terms, {"answer": rows + 1}, rows + costs, rows, ({},) * 4, 0)
    zeros = jnp.zeros(MASK.shape)
    predictions = Predictions(LOG_PROBS, jnp.asarray(ref_log_probs), zeros, zeros, zeros, zeros)
    clock = Clock()
    of_run = estimator(RLConfig(algorithm=algorithm), tiny.make_mesh())
    found = of_run(state, rollouts, rewards, predictions, clock)
    assert set(clock.seconds()) == {"timing_s/adv", "timing_s/step"}
    return found


def test_a_rejected_token_has_no_loss_but_its_reward_counts():
    """The score stands on the last token; rejecting that token must not take the score away."""
    algorithm = AlgorithmConfig(
        group_std=False,
        rejections=("token_k1",),
        rejection_lows=(0.5,),
        rejection_highs=(2.0,),
    )
    everything, _, _ = estimate(algorithm)
    engine = LOG_PROBS.copy()
    engine[0, 2] = -5.0  # the engine says e**-5 where the policy says e**-1
    estimates, _, metrics = estimate(algorithm, rollout_log_probs=engine)
    kept = MASK.copy()
    kept[0, 2] = False
    np.testing.assert_array_equal(estimates.loss_mask, kept)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 8)
    # score - mean of the group: 1 - 0.5, 0 - 0.5, 3 - 2, 1 - 2.
    by_hand = np.where(kept, np.array([0.5, -0.5, 1.0, -1.0])[:, None], 0.0)
    np.testing.assert_allclose(estimates.advantages, by_hand)
    np.testing.assert_allclose(estimates.returns, by_hand)
    np.testing.assert_allclose(estimates.advantages, np.where(kept, everything.advantages, 0.0))


def test_the_kl_coefficient_follows_its_controller():
    algorithm = AlgorithmConfig(
        kl_in="reward", kl_estimator="k1", kl_controller="adaptive", kl_target=0.1, kl_horizon=100
    )
    estimates, state, metrics = estimate(algorithm, ref_log_probs=LOG_PROBS * 1.5)
    # KL 0.5 a token; the coefficient of this step is 0.5, so each token loses 0.25.
    np.testing.assert_allclose(estimates.shaped_rewards[:, 1], -0.25)
    np.testing.assert_allclose(estimates.shaped_rewards[:, 2], SCORES - 0.25)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
    assert metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(0.5)
    # 0.5 (1 + 0.2 * 4 sequences / 100)
    assert state.kl_coef == pytest.approx(0.504)


def test_the_multiplier_follows_the_cost():
    algorithm = AlgorithmConfig(advantage="gae", safe=True, cost_limit=1.0, multiplier_lr=0.1)
    _, state, metrics = estimate(algorithm, costs=3.0)
    assert state.log_multiplier == pytest.approx(0.2)
    assert metrics["safe/multiplier"] == pytest.approx(np.exp(0.2))
    _, state, _ = estimate(algorithm, costs=0.0)
    assert state.log_multiplier == pytest.approx(-0.1)
