import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.corrections import correct
from jaxrl_llm.config import AlgorithmConfig
from jaxrl_llm.config.recipes import REJECTIONS

MASK = jnp.array([[True, True, False], [True, False, False], [False, False, False]])
OLD = jnp.log(jnp.array([[0.4, 0.4, 0.4], [0.1, 0.5, 0.5], [0.5, 0.5, 0.5]]))
RATIOS = jnp.array([[4.0, 0.5, 9.0], [0.25, 9.0, 9.0], [9.0, 9.0, 9.0]])
ROLLOUT = OLD - jnp.log(RATIOS)


def correction(**settings):
    return correct(AlgorithmConfig(**settings), OLD, ROLLOUT, MASK)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (dict(), [[1, 1, 0], [1, 0, 0], [0, 0, 0]]),
        (dict(correction="token"), [[2, 0.5, 0], [0.25, 0, 0], [0, 0, 0]]),
        (dict(correction="sequence", correction_high=9.0), [[2, 2, 0], [0.25, 0, 0], [0, 0, 0]]),
        (
            dict(correction="token", correction_mode="mask", correction_low=0.3),
            [[0, 0.5, 0], [0, 0, 0], [0, 0, 0]],
        ),
        (  # the mean over tokens is 2.75 / 3
            dict(correction="token", correction_normalize=True),
            np.array([[2, 0.5, 0], [0.25, 0, 0], [0, 0, 0]]) * 3 / 2.75,
        ),
        (  # the mean over the two sequences is 2.25 / 2
            dict(correction="sequence", correction_normalize=True),
            np.array([[2, 2, 0], [0.25, 0, 0], [0, 0, 0]]) * 2 / 2.25,
        ),
    ],
)
def test_weights_by_hand(settings, expected):
    weights, loss_mask, _ = correction(**settings)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    np.testing.assert_array_equal(loss_mask, MASK)


def test_equal_policies_need_no_correction():
    config = AlgorithmConfig(
        correction="token",
        rejections=REJECTIONS,
        rejection_lows=(0.999,) * len(REJECTIONS),
        rejection_highs=(1.001,) * len(REJECTIONS),
    )
    weights, loss_mask, metrics = correct(config, OLD, OLD, MASK)
    np.testing.assert_array_equal(weights, MASK * 1.0)
    np.testing.assert_array_equal(loss_mask, MASK)
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_abs_diff"):
        assert metrics[f"rollout_corr/{name}"] == 0.0
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 1.0
    assert metrics["training/rollout_probs_diff_max"] == 0.0


@pytest.mark.parametrize(
    ("option", "low", "high", "kept"),
    [
        # k1 is -log(ratio): -1.386, 0.693 | 1.386
        ("token_k1", 0.0, 2.1, [[1, 1, 0], [0, 0, 0], [0, 0, 0]]),
        ("token_k1", 0.5, 8.0, [[0, 1, 0], [1, 0, 0], [0, 0, 0]]),
        ("token_k2", 0.0, 0.5, [[0, 1, 0], [0, 0, 0], [0, 0, 0]]),  # 0.96, 0.24 | 0.96
        ("token_k3", 0.0, 0.7, [[0, 1, 0], [1, 0, 0], [0, 0, 0]]),  # 1.61, 0.19 | 0.64
        ("seq_sum_k1", 0.45, 2.0, [[1, 1, 0], [0, 0, 0], [0, 0, 0]]),  # -0.693 | 1.386
        ("seq_sum_k2", 0.0, 1.0, [[0, 0, 0], [1, 0, 0], [0, 0, 0]]),  # 1.20 | 0.96
        ("seq_mean_k2", 0.0, 0.7, [[1, 1, 0], [0, 0, 0], [0, 0, 0]]),  # 0.60 | 0.96
        ("seq_mean_k3", 0.0, 0.7, [[0, 0, 0], [1, 0, 0], [0, 0, 0]]),  # 0.90 | 0.64
        ("seq_max_k3", 0.0, 0.7, [[0, 0, 0], [1, 0, 0], [0, 0, 0]]),  # 1.61 | 0.64
    ],
)
def test_rejections_by_hand(option, low, high, kept):
    weights, loss_mask, metrics = correction(
        rejections=(option,), rejection_lows=(low,), rejection_highs=(high,)
    )
    np.testing.assert_array_equal(loss_mask, np.array(kept, bool))
    np.testing.assert_array_equal(weights, MASK * 1.0)
    share = 1 - np.sum(kept) / 3
    np.testing.assert_allclose(metrics[f"rollout_corr/rollout_rs_{option}_masked_fraction"], share)
    np.testing.assert_allclose(metrics["rollout_corr/rollout_rs_masked_fraction"], share)


def test_rejections_are_anded():
    _, loss_mask, metrics = correction(
        rejections=("token_k2", "seq_mean_k2"),
        rejection_lows=(0.0, 0.0),
        rejection_highs=(9.0, 0.7),
    )
    np.testing.assert_array_equal(loss_mask, [[1, 1, 0], [0, 0, 0], [0, 0, 0]])
    np.testing.assert_allclose(metrics["rollout_corr/rollout_rs_seq_masked_fraction"], 0.5)


def test_metrics_by_hand():
    _, _, metrics = correction(correction="token", correction_high=2.0)
    logs = np.log([4.0, 0.5, 0.25])
    difference = np.array([0.4 - 0.1, 0.8 - 0.4, 0.4 - 0.1])
    lowered = np.array([2.0, 0.5, 0.25])
    by_hand = {
        "rollout_corr/kl": -logs.mean(),
        "rollout_corr/k3_kl": (np.exp(logs) - logs - 1).mean(),
        "rollout_corr/chi2_token": (np.array([16, 0.25, 0.0625]).mean()) - 1,
        "rollout_corr/chi2_seq": (4.0 + 0.0625) / 2 - 1,
        "rollout_corr/training_ppl": (1 / 0.4 + 1 / 0.1) / 2,
        "rollout_corr/rollout_ppl": ((0.1 * 0.8) ** -0.5 + 1 / 0.4) / 2,
        "rollout_corr/log_ppl_diff": (np.log(0.5) / 2 - np.log(0.25)) / 2,
        "rollout_corr/log_ppl_diff_max": -np.log(0.25),
        "rollout_corr/rollout_is_mean": lowered.mean(),
        "rollout_corr/rollout_is_max": 2.0,
        "rollout_corr/rollout_is_min": 0.25,
        "rollout_corr/rollout_is_std": lowered.std(),
        "rollout_corr/rollout_is_eff_sample_size": lowered.mean() ** 2 / (lowered**2).mean(),
        "rollout_corr/rollout_is_ratio_fraction_high": 1 / 3,
        "rollout_corr/rollout_is_ratio_fraction_low": 1 / 3,
        "rollout_corr/rollout_is_seq_mean": (1.25 + 0.25) / 2,
        "rollout_corr/rollout_is_seq_max_deviation": 0.75,
        "rollout_corr/rollout_is_seq_fraction_high": 0.5,
        "training/rollout_probs_diff_mean": difference.mean(),
        "training/rollout_probs_diff_max": 0.4,
        "training/rollout_probs_diff_std": difference.std(ddof=1),
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_actor_probs_pearson_corr": np.corrcoef([0.4, 0.4, 0.1], [0.1, 0.8, 0.4])[
            0, 1
        ],
    }
    for name, expected in by_hand.items():
        np.testing.assert_allclose(metrics[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_nothing_has_a_gradient():
    def total(old):
        weights, _, metrics = correct(AlgorithmConfig(correction="token"), old, ROLLOUT, MASK)
        return jnp.sum(weights) + sum(metrics.values())

    np.testing.assert_array_equal(jax.grad(total)(OLD), 0.0)


def test_far_policies_stay_finite():
    settings = dict(correction="sequence", correction_normalize=True)
    weights, _, metrics = correct(
        AlgorithmConfig(**settings), OLD, OLD.at[0].set(-1e4).at[1].set(0.0), MASK
    )
    assert np.isfinite(weights).all()
    assert all(np.isfinite(value) for value in metrics.values())
