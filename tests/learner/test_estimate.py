"""From rewards to advantages, with the state that moves from step to step."""

import dataclasses
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.config import AlgorithmConfig, RLConfig, recipes
from jaxrl_llm.learner.estimate import estimator, signal_check
from jaxrl_llm.learner.weights import LearnerState
from jaxrl_llm.metrics.timers import Clock
from jaxrl_llm.types import EpisodeLog, Predictions, Rewards, Rollouts

# Two prompts, two samples each, three tokens; the prompt is the first.
MASK = np.array([[False, True, True]] * 4)
GROUPS = np.array([0, 0, 1, 1], np.int32)
SCORES = np.array([1.0, 0.0, 3.0, 1.0], np.float32)
LOG_PROBS = np.where(MASK, -1.0, 0.0).astype(np.float32)


def estimate(
    algorithm,
    *,
    rollout_log_probs=LOG_PROBS,
    ref_log_probs=LOG_PROBS,
    costs=0.0,
    stopped=MASK[:, -1],
    logs=(),
    entropies=0.0,
    scores=SCORES,
    roles=None,
    group_ids=GROUPS,
):
    state = LearnerState({}, {}, {}, jnp.float32(0.5), jnp.float32(0.0))
    rows = np.zeros(4, np.float32)
    rollouts = Rollouts(
        tokens=MASK.astype(np.int32),
        response_mask=MASK,
        rollout_log_probs=np.asarray(rollout_log_probs, np.float32),
        versions=MASK.astype(np.int32),
        lengths=np.full(4, 3, np.int32),
        group_ids=group_ids,
        stopped=np.asarray(stopped),
        prompts=(),
        responses=(),
        episode_logs=logs,
        roles=roles,
    )
    terms = {"answer": scores}
    rewards = Rewards(scores, terms, {"answer": rows + 1}, rows + costs, rows, ({},) * 4, 0)
    zeros = jnp.zeros(MASK.shape)
    of_policy = LOG_PROBS, jnp.asarray(ref_log_probs), zeros + entropies
    predictions = Predictions(*of_policy, zeros, zeros, zeros)
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


@pytest.mark.parametrize("aggregation", recipes.AGGREGATIONS)
def test_a_truncated_response_bears_no_loss_but_its_score_counts_in_the_group(aggregation):
    """Overlong filtering: no loss on row 2; the baseline of its group keeps its score."""
    algorithm = AlgorithmConfig(group_std=False, mask_truncated=True, aggregation=aggregation)
    estimates, _, metrics = estimate(algorithm, stopped=[True, True, False, True])
    kept = MASK & np.array([True, True, False, True])[:, None]
    np.testing.assert_array_equal(estimates.loss_mask, kept)
    # score - mean of the group: 1 - 0.5, 0 - 0.5, (3 - 2), 1 - 2.
    by_hand = np.where(kept, np.array([0.5, -0.5, 0.0, -1.0])[:, None], 0.0)
    np.testing.assert_allclose(estimates.advantages, by_hand)
    np.testing.assert_allclose(estimates.returns, by_hand)
    assert metrics["training/masked_truncated_share"] == 0.25
    off, _, metrics = estimate(
        dataclasses.replace(algorithm, mask_truncated=False), stopped=[True, True, False, True]
    )
    np.testing.assert_array_equal(off.loss_mask, MASK)
    assert "training/masked_truncated_share" not in metrics


def test_rows_of_a_truncated_episode_are_masked_together():
    """Rows 0 and 1 are one episode, whose last turn was cut; a step of such rows is no update."""
    first, *others = (EpisodeLog() for _ in range(3))
    logs = (first, first, *others)
    algorithm = AlgorithmConfig(group_std=False, mask_truncated=True)
    estimates, _, metrics = estimate(algorithm, stopped=[True, False, True, True], logs=logs)
    np.testing.assert_array_equal(estimates.loss_mask.any(1), [False, False, True, True])
    assert metrics["training/masked_truncated_share"] == 0.5
    has_signal = signal_check(RLConfig(algorithm=algorithm))
    of_rewards = {"training/groups/uniform_share": 0.0}
    # A dialogue whose next turn did not fit was cut, too, although its last turn was ended.
    cut = EpisodeLog(errors=Counter({"too_long": 1}))
    found, _, _ = estimate(algorithm, stopped=[True] * 4, logs=(first, others[0], cut, cut))
    np.testing.assert_array_equal(found.loss_mask.any(1), [True, True, False, False])
    assert has_signal(of_rewards, estimates)
    estimates, _, _ = estimate(algorithm, stopped=[False] * 4)
    assert not has_signal(of_rewards, estimates)


def test_the_critic_learns_nothing_from_a_truncated_response():
    algorithm = AlgorithmConfig(advantage="gae", mask_truncated=True)
    whole, _, _ = estimate(AlgorithmConfig(advantage="gae"))
    estimates, _, _ = estimate(algorithm, stopped=[True, True, True, False])
    kept = MASK & np.array([True, True, True, False])[:, None]
    for name in ("advantages", "returns"):  # both as without the mask, where they are kept
        wanted = np.where(kept, getattr(whole, name), 0.0)
        np.testing.assert_array_equal(getattr(estimates, name), wanted)


@pytest.mark.parametrize("advantage", recipes.ADVANTAGES)
@pytest.mark.parametrize("group_std", [True, False])
def test_excluded_row_does_not_affect_the_others(advantage, group_std):
    """Of six rows in two groups one is left out, whatever its score; five others never had it."""
    algorithm = AlgorithmConfig(advantage=advantage, group_std=group_std, samples_per_prompt=3)
    scores, groups = np.array([1.0, 0.0, 0.5, 3.0, 1.0, 2.5]), np.array([0, 0, 0, 1, 1, 1])
    rng = np.random.default_rng(0)
    values, old = rng.normal(size=(6, 3)), -rng.gamma(1.0, size=(6, 3))

    def of_rows(rows, wrong=0.0, left_out=None):
        mask = np.array([[False, True, True]] * len(rows))
        rows = np.asarray(rows)
        found = np.where(rows == 2, wrong, scores[rows]).astype(np.float32)
        zeros = np.zeros(len(rows), np.float32)
        rollouts = Rollouts(
            tokens=mask.astype(np.int32),
            response_mask=mask,
            rollout_log_probs=np.where(mask, old[rows], 0).astype(np.float32),
            versions=mask.astype(np.int32),
            lengths=np.full(len(rows), 3, np.int32),
            group_ids=groups[rows].astype(np.int32),
            stopped=mask[:, -1],
            prompts=(),
            responses=(),
        )
        terms, weights = {"answer": found}, {"answer": zeros + 1}
        details = ({},) * len(rows)
        rewards = Rewards(found, terms, weights, zeros, zeros, details, 0, excluded=left_out)
        known = (np.where(mask, each[rows], 0).astype(np.float32) for each in (values, old))
        value, log_probs = (jnp.asarray(each) for each in known)
        empty = jnp.zeros(mask.shape)
        predictions = Predictions(log_probs, log_probs, empty, empty + 0.5, value, empty)
        state = LearnerState({}, {}, {}, jnp.float32(0.5), jnp.float32(0.0))
        estimate_of = estimator(RLConfig(algorithm=algorithm), tiny.make_mesh())
        return estimate_of(state, rollouts, rewards, predictions, Clock())[0]

    without = of_rows([0, 1, 3, 4, 5])
    for wrong in (0.0, 1e4):
        found = of_rows(range(6), wrong, np.arange(6) == 2)
        assert not np.asarray(found.loss_mask)[2].any()
        for name in ("advantages", "returns", "shaped_rewards"):
            whole = np.asarray(getattr(found, name))
            np.testing.assert_array_equal(whole[2], 0.0)
            # Sums of more rows round otherwise.
            others = np.delete(whole, 2, axis=0)
            np.testing.assert_allclose(others, getattr(without, name), rtol=2e-6, atol=1e-6)


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


def test_uniform_groups_bear_no_loss_and_do_not_count():
    algorithm = AlgorithmConfig(group_std=False, mask_uniform_groups=True)
    found, _, metrics = estimate(algorithm)
    assert np.asarray(found.loss_mask).tolist() == MASK.tolist()
    assert metrics["training/masked_uniform_share"] == 0.0
    found, _, metrics = estimate(algorithm, scores=np.float32([1.0, 1.0, 3.0, 1.0]))
    assert metrics["training/masked_uniform_share"] == 0.5
    kept = np.array([[False], [False], [True], [True]])
    np.testing.assert_array_equal(found.loss_mask, MASK & kept)
    np.testing.assert_array_equal(found.advantages[2:, 1], [1.0, -1.0])
    found, _, _ = estimate(algorithm, scores=np.ones(4, np.float32))
    config = RLConfig(algorithm=algorithm)
    assert not signal_check(config)({"training/groups/uniform_share": 1.0}, found)
    observes = dataclasses.replace(algorithm, observation_coef=0.1)
    assert signal_check(RLConfig(algorithm=observes))({"training/groups/uniform_share": 1.0}, found)


def test_only_tokens_of_high_entropy_have_an_advantage():
    entropies = np.where(MASK, [[0.0, 1.0, 2.0]], 9.0).astype(np.float32)
    found, _, _ = estimate(AlgorithmConfig(entropy_share=0.5), entropies=entropies)
    plain, _, _ = estimate(AlgorithmConfig())
    np.testing.assert_array_equal(found.advantages[:, 2], plain.advantages[:, 2])
    np.testing.assert_array_equal(found.advantages[:, 1], 0.0)
    np.testing.assert_array_equal(found.loss_mask, plain.loss_mask)


def test_a_role_is_compared_with_itself():
    """Two episodes of one prompt with two roles each: each role has a mean of its own."""
    first, second = EpisodeLog(role_rewards=[1.0, 0.0]), EpisodeLog(role_rewards=[0.0, 5.0])
    algorithm = AlgorithmConfig(advantage="grpo", group_std=False, kl_in="none")
    prompts_of_rows = np.array([0, 1, 0, 1], np.int32)
    estimates, _, _ = estimate(
        algorithm,
        logs=(first, first, second, second),
        scores=np.array([1.0, 0.0, 0.0, 5.0], np.float32),
        roles=prompts_of_rows,
        group_ids=np.zeros(4, np.int32),
    )
    np.testing.assert_allclose(
        estimates.advantages[:, 1:], [[0.5, 0.5], [-2.5, -2.5], [-0.5, -0.5], [2.5, 2.5]]
    )
    # As if the roles were prompts of their own.
    apart, _, _ = estimate(
        algorithm, scores=np.array([1.0, 0.0, 0.0, 5.0], np.float32), group_ids=prompts_of_rows
    )
    np.testing.assert_array_equal(estimates.advantages, apart.advantages)
