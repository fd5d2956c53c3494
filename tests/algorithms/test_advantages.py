import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import masked
from jaxrl_llm.algorithms.advantages import (
    ESTIMATORS,
    estimate,
    generalized_advantage_estimation,
    grpo,
    grpo_turns,
    reinforce_plus_plus,
    remax,
)
from jaxrl_llm.config import AlgorithmConfig

MASK = jnp.array([[False, True, True, False, True, False]])


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_gae_by_hand_skips_tool_tokens():
    # Tokens 1, 2, 4: V = 1, 2, 4; r = 0, 1, 10; gamma 0.5, lambda 0.5.
    # delta_4 = 10 - 4 = 6; delta_2 = 1 + 2 - 2 = 1; delta_1 = 0 + 1 - 1 = 0
    # A_4 = 6; A_2 = 1 + 0.25 * 6 = 2.5; A_1 = 0 + 0.25 * 2.5 = 0.625
    advantages, returns = generalized_advantage_estimation(
        rewards=jnp.array([[7.0, 0.0, 1.0, 7.0, 10.0, 7.0]]),
        values=jnp.array([[9.0, 1.0, 2.0, 9.0, 4.0, 9.0]]),
        response_mask=MASK,
        gamma=0.5,
        gae_lambda=0.5,
    )
    np.testing.assert_allclose(advantages, [[0, 0.625, 2.5, 0, 6, 0]])
    np.testing.assert_allclose(returns, [[0, 1.625, 4.5, 0, 10, 0]])


def test_gae_with_lambda_one_is_the_return_minus_the_value():
    rewards, values = random(3, 8), random(3, 8, seed=1)
    mask = random(3, 8, seed=2) > -0.5
    advantages, returns = generalized_advantage_estimation(
        rewards, values, mask, gamma=1.0, gae_lambda=1.0
    )
    to_go = masked.returns_to_go(rewards, mask)
    np.testing.assert_allclose(returns, to_go, atol=1e-5)
    np.testing.assert_allclose(advantages, jnp.where(mask, to_go - values, 0.0), atol=1e-5)


def test_gae_with_lambda_zero_is_the_temporal_difference():
    rewards, values, mask = random(2, 4), random(2, 4, seed=1), jnp.ones((2, 4), bool)
    advantages, _ = generalized_advantage_estimation(
        rewards, values, mask, gamma=0.9, gae_lambda=0.0
    )
    following = jnp.pad(values[:, 1:], ((0, 0), (0, 1)))
    np.testing.assert_allclose(advantages, rewards + 0.9 * following - values, atol=1e-6)


def test_reinforce_plus_plus_does_not_discount_over_tool_tokens():
    rewards = jnp.array([[0.0, 0.0, 0.0, 0.0, 8.0, 0.0]])
    _, returns = reinforce_plus_plus(rewards, MASK, gamma=0.5)
    np.testing.assert_allclose(returns, [[0, 2, 4, 0, 8, 0]])


def test_remax_with_its_own_score_as_baseline_is_zero():
    rewards = jnp.array([[0.0, 0.0, 0.0, 0.0, 8.0, 0.0]])
    advantages, _ = remax(rewards, MASK, jnp.array([8.0]))
    np.testing.assert_array_equal(advantages, 0.0)


GROUPS = jnp.array([3, 0, 3, 0, 3, 0])
SCORES = jnp.array([1.0, 5.0, 2.0, 5.0, 6.0, 5.0])


def of_group(name, scores, groups=GROUPS, **settings):
    """Returns the advantages [B] of responses of one token."""
    config, mask = AlgorithmConfig(advantage=name, **settings), jnp.ones((len(scores), 1), bool)
    given = {"term_rewards": scores[None], "term_weights": jnp.ones((1, len(scores)))}
    advantages, returns = estimate(
        config, rewards=scores[:, None], response_mask=mask, group_ids=groups, **given
    )
    np.testing.assert_array_equal(returns, advantages)
    return advantages.ravel()


def test_rloo_is_the_centered_score_scaled():
    rloo = of_group("rloo", SCORES)
    centered = of_group("grpo", SCORES, group_std=False)
    np.testing.assert_allclose(rloo, centered * 3 / 2, rtol=1e-6)
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2
    np.testing.assert_allclose(rloo[::2], [-3.0, -1.5, 4.5], rtol=1e-6)


def test_opo_of_equal_lengths_is_the_centered_score():
    centered = of_group("grpo", SCORES, group_std=False)
    np.testing.assert_allclose(of_group("opo", SCORES), centered, rtol=1e-6)


def test_gpg_scales_by_the_share_of_rows_with_a_score():
    advantages = of_group("gpg", jnp.array([1.0, 0.0, 0.0, 0.0]), jnp.zeros(4, int))
    np.testing.assert_allclose(advantages, [3.0, -1.0, -1.0, -1.0])  # alpha = 4


def test_passk_rewards_the_lead_of_the_best():
    advantages = of_group("grpo_passk", SCORES, group_std=False)
    np.testing.assert_allclose(advantages, [0, 0, 0, 0, 4, 0])


def test_gdpo_of_one_term_is_grpo_whitened():
    scores = random(6)
    alone, grpo = of_group("gdpo", scores), of_group("grpo", scores)
    np.testing.assert_allclose(alone, (grpo - grpo.mean()) / grpo.std(ddof=1), rtol=1e-5)
    unscaled = of_group("gdpo", scores * jnp.where(GROUPS == 0, 100.0, 1.0), group_std=False)
    assert not np.allclose(unscaled, alone, atol=0.1)


GROUP_ESTIMATORS = pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "opo", "gpg"])


@GROUP_ESTIMATORS
def test_equal_scores_have_no_advantage(name):
    np.testing.assert_array_equal(of_group(name, jnp.full(6, 0.1)), 0.0)


@GROUP_ESTIMATORS
def test_a_group_of_one_keeps_its_score(name):
    advantages = of_group(name, jnp.array([2.0, 3.0]), jnp.array([1, 0]))
    np.testing.assert_allclose(advantages, [2.0, 3.0], rtol=2e-6)


def token_baseline(name, mask, rewards, groups=None, old=None):
    return ESTIMATORS[name](
        rewards,
        mask,
        jnp.zeros(mask.shape[0], int) if groups is None else groups,
        jnp.full(mask.shape, jnp.log(0.5)) if old is None else old,
        jnp.full(mask.shape, 0.5),
        jnp.ones(mask.shape),
    )


def test_token_baselines_agree_without_tool_tokens():
    mask = jnp.arange(7) < jnp.array([[7], [5], [6], [3]])
    mask = jnp.pad(mask, ((0, 0), (2, 0)))
    arguments = (mask, random(4, 9), jnp.array([1, 1, 0, 1]), -jnp.abs(random(4, 9, seed=1)))
    plain, _ = token_baseline("optimal_token_baseline", *arguments)
    tool, _ = token_baseline("tir_optimal_token_baseline", *arguments)
    np.testing.assert_allclose(plain, tool, atol=1e-6)


def test_tool_tokens_do_not_shift_the_tool_baseline():
    mask = jnp.array([[True, False, True, True], [True, True, True, False]])
    closed = jnp.array([[True, True, True, False], [True, True, True, False]])
    rewards = jnp.array([[1.0, 9.0, 2.0, 3.0], [4.0, 5.0, 6.0, 9.0]])
    moved = jnp.array([[1.0, 2.0, 3.0, 9.0], [4.0, 5.0, 6.0, 9.0]])
    advantages, _ = token_baseline("tir_optimal_token_baseline", mask, rewards)
    expected, _ = token_baseline("optimal_token_baseline", closed, moved)
    np.testing.assert_allclose(advantages[mask], expected[closed], atol=1e-6)


def test_the_tail_of_the_longest_response_has_no_baseline():
    mask = jnp.array([[True, True, True], [True, False, False]])
    rewards = jnp.array([[0.0, 0.0, 3.0], [1.0, 0.0, 0.0]])
    # First token: returns 3 and 1 with equal weights, baseline 2. Tail: baseline 0.
    advantages, _ = token_baseline("optimal_token_baseline", mask, rewards)
    np.testing.assert_allclose(advantages, [[1, 3, 3], [-1, 0, 0]], atol=1e-6)


def test_the_token_baseline_weighs_by_gradient_norms():
    mask = jnp.ones((2, 1), bool)
    # 1 - 2 p + 0.5 is 0.5 and 1.3 for p = 0.5 and 0.1.
    old = jnp.log(jnp.array([[0.5], [0.1]]))
    advantages, _ = token_baseline(
        "optimal_token_baseline", mask, jnp.array([[1.0], [0.0]]), old=old
    )
    np.testing.assert_allclose(advantages.ravel(), [1 - 0.5 / 1.8, -0.5 / 1.8], rtol=1e-5)


def centered_by_hand(rewards, group_ids, scale=2.0):
    del group_ids
    return rewards * scale, rewards


def test_a_users_estimator_is_called_and_masked():
    config = AlgorithmConfig(advantage=f"{__name__}:centered_by_hand")
    advantages, returns = estimate(
        config, response_mask=MASK, rewards=random(1, 6), group_ids=jnp.array([0])
    )
    np.testing.assert_array_equal(advantages, 2.0 * returns)
    np.testing.assert_array_equal(returns[~MASK], 0.0)


def returns_one_array(rewards):
    return rewards[0]


def test_errors_name_the_setting():
    with pytest.raises(TypeError, match=r"advantage='gae'.*'values'.*available: config, gae_lam"):
        estimate(AlgorithmConfig(advantage="gae"), response_mask=MASK, rewards=random(1, 6))
    with pytest.raises(ValueError, match="unknown advantage estimator 'grppo'; known: gae, grpo"):
        estimate(AlgorithmConfig(advantage="grppo"), response_mask=MASK, rewards=random(1, 6))
    with pytest.raises(TypeError, match=r"returns \(advantages, returns\), both of .*\(1, 6\)"):
        estimate(
            AlgorithmConfig(advantage=f"{__name__}:returns_one_array"),
            response_mask=MASK,
            rewards=random(1, 6),
        )


def test_turns_are_compared_with_the_same_turns_of_the_group():
    """By hand: two episodes of two turns, one of one turn, and another prompt's."""
    mask = np.array([[1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 0, 0], [0, 1, 0, 1]], bool)
    rewards = np.array([[1, 9, 0, 2], [0, 4, 0, 6], [0, 1, 0, 0], [0, 5, 0, 7]], np.float32)
    rewards = np.where(mask, rewards, 0)
    groups = np.array([0, 0, 0, 1], np.int32)
    found = grpo_turns(rewards, mask, groups, group_std=False)
    # Rewards to go of first turns: 3, 10, 1; of second turns: 2, 6; the last group has one row.
    first, second = np.array([3, 10, 1]) - 14 / 3, np.array([2, 6]) - 4
    want = [
        [first[0], 0, second[0], second[0]],
        [first[1], first[1], 0, second[1]],
        [first[2], first[2], 0, 0],
        [0, 12, 0, 7],
    ]
    np.testing.assert_allclose(found, want, rtol=1e-6)
    scaled = grpo_turns(rewards, mask, groups)
    np.testing.assert_allclose(scaled[0, 2], -2 / (8**0.5 + 1e-6), rtol=1e-6)
    # Episodes of one turn: GRPO.
    one = np.array([[0, 1, 1, 0], [0, 0, 1, 1]], bool)
    given, pair = np.where(one, rewards[:2], 0), groups[:2]
    whole = grpo(given.sum(1), pair, np.ones(2, bool))
    turns = grpo_turns(given, one, pair)
    np.testing.assert_allclose(turns, np.where(one, whole[:, None], 0), rtol=1e-6)


OFFSETS = np.float32([1e7, 1e7, 1e7, 1e7 + 1])
CENTERED = np.array([-0.25, -0.25, -0.25, 0.75])


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
    "name, expected",
    [
        # The deviation with Bessel's correction is 1/2.
        ("grpo", CENTERED / (0.5 + 1e-6)),
        ("grpo_turns", CENTERED / (0.5 + 1e-6)),
        ("grpo_passk", [0, 0, 0, 1 / (0.5 + 1e-6)]),
        ("gdpo", CENTERED / 0.5),
        ("rloo", CENTERED * 4 / 3),
        ("opo", CENTERED),
        ("gpg", CENTERED),
        ("reinforce_plus_plus_baseline", CENTERED / 0.5),
        ("reinforce_plus_plus", CENTERED / 0.5),
        ("gae", CENTERED / 0.5),
        ("optimal_token_baseline", CENTERED),
        ("tir_optimal_token_baseline", CENTERED),
    ],
)
def test_small_differences_at_a_large_offset_survive(name, expected, jitted):
    """Each number is a float32; only a mean of them is none."""
    ones = jnp.ones((4, 1))

    def advantages(scores):
        found, _ = estimate(
            AlgorithmConfig(advantage=name),
            rewards=scores[:, None],
            response_mask=jnp.ones((4, 1), bool),
            group_ids=jnp.zeros(4, jnp.int32),
            values=jnp.zeros((4, 1)),
            term_rewards=scores[None],
            term_weights=jnp.ones((1, 4)),
            old_log_probs=jnp.log(0.5) * ones,
            sum_squared_probs=0.5 * ones,
            correction_weights=ones,
        )
        return found.ravel()

    found = (jax.jit(advantages) if jitted else advantages)(jnp.asarray(OFFSETS))
    # The whitened ones are over 4 tokens: sqrt(1e-8 + 1/4) is 0.5 to 2e-8.
    np.testing.assert_allclose(found, expected, rtol=1e-5)
