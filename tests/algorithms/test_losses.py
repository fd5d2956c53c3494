import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.aggregation import (
    AGGREGATIONS,
    Denominators,
    minibatch_denominators,
    policy_loss,
)
from jaxrl_llm.algorithms.losses import (
    POLICY_LOSS_INPUTS,
    bradley_terry,
    observation_loss,
    observation_mask,
    policy_objective,
    token_cross_entropy,
    value_loss,
)
from jaxrl_llm.algorithms.policy_losses import POLICY_LOSSES
from jaxrl_llm.config import AlgorithmConfig
from jaxrl_llm.types import Minibatch

MASK = jnp.array([[True, True, True, False], [True, False, False, False]])
# Constant over a sequence, as GMPO's advantages are.
ADVANTAGES = jnp.where(MASK, jnp.array([[2.0], [-1.0]]), 0.0)
LOG_PROBS = -jnp.array([[0.5, 1.0, 2.0, 9.0], [0.25, 9.0, 9.0, 9.0]])


def minibatch(old_log_probs=LOG_PROBS, advantages=ADVANTAGES, mask=MASK, **changes):
    ones = jnp.ones(mask.shape)
    fields = dict(
        loss_mask=mask,
        response_mask=mask,
        advantages=advantages,
        correction_weights=ones,
        old_log_probs=old_log_probs,
        ref_log_probs=old_log_probs,
        rollout_log_probs=old_log_probs,
    )
    return dataclasses.replace(Minibatch.zeros(*mask.shape), **(fields | changes))


def objective(config, log_probs, batch, selection=None, entropies=None):
    mask = batch.loss_mask
    selection = jnp.zeros(mask.shape, bool) if selection is None else selection
    entropies = jnp.zeros(mask.shape) if entropies is None else entropies
    denominators = minibatch_denominators(mask, loss_scale=10.0)
    return policy_objective(config, log_probs, entropies, batch, selection, denominators)


def gradient(config, log_probs, batch, **given):
    return jax.grad(lambda x: objective(config, x, batch, **given)[0])(log_probs)


def every_input(**rest):
    return jnp.zeros(()), dict.fromkeys(rest, 0.0)


def test_inputs_of_a_loss_are_those_that_it_is_offered():
    config = AlgorithmConfig(policy_loss=f"{__name__}:every_input")
    _, metrics = objective(config, LOG_PROBS, minibatch())
    offered = {name for name in metrics if not name.startswith("actor/")}
    assert offered == POLICY_LOSS_INPUTS - {"log_ratios"}


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [
        (name, aggregation)
        for name in POLICY_LOSSES
        for aggregation in AGGREGATIONS
        # A loss of whole sequences: its tokens share the gradient, by this mode's weights.
        if name != "geo_mean" or aggregation == "seq-mean-token-mean"
    ],
)
def test_at_ratio_one_the_gradient_is_that_of_reinforce(name, aggregation):
    config = AlgorithmConfig(policy_loss=name, aggregation=aggregation)
    reinforce = dataclasses.replace(config, policy_loss="reinforce")
    np.testing.assert_allclose(
        gradient(config, LOG_PROBS, minibatch()),
        gradient(reinforce, LOG_PROBS, minibatch()),
        rtol=1e-6,
        atol=1e-8,
    )


def one_token(policy_loss, old, now, advantage, **settings):
    """Returns the loss and gradient of one token whose probability went from old to now."""
    mask = jnp.ones((1, 1), bool)
    batch = minibatch(jnp.log(jnp.full((1, 1), old)), jnp.full((1, 1), advantage), mask)
    config = AlgorithmConfig(policy_loss=policy_loss, **settings)
    log_probs = jnp.log(jnp.full((1, 1), now))
    loss, _ = objective(config, log_probs, batch)
    return float(loss), float(gradient(config, log_probs, batch)[0, 0])


@pytest.mark.parametrize(
    ("name", "old", "now", "advantage", "loss", "slope"),
    [
        ("vanilla", 0.4, 0.44, 2.0, -2.2, -2.2),  # ratio 1.1 inside the clip
        ("vanilla", 0.4, 0.6, 2.0, -2.4, 0.0),  # ratio 1.5, held at 1.2
        ("vanilla", 0.4, 0.6, -2.0, 3.0, 3.0),  # wrong way: not clipped
        ("vanilla", 0.1, 0.5, -2.0, 6.0, 0.0),  # ratio 5, dual clip at 3
        ("vanilla", 0.4, 0.2, -2.0, 1.6, 0.0),  # ratio 0.5, held at 0.8
        ("gspo", 0.4, 0.6, 2.0, -2.4, 0.0),
        ("clip_cov", 0.1, 0.5, -2.0, 10.0, 10.0),  # no dual clip
        ("kl_cov", 0.4, 0.6, 2.0, -3.0, -3.0),  # no clip at all
        ("cispo", 0.4, 0.6, 2.0, -2.4 * np.log(0.6), -2.4),
        ("dppo_tv", 0.4, 0.5, 2.0, -2.5 * np.log(0.5), -2.5),  # moved by 0.1
        ("dppo_tv", 0.4, 0.7, 2.0, 0.0, 0.0),  # moved by 0.3
        ("dppo_tv", 0.01, 0.1, 2.0, -6.0 * np.log(0.1), -6.0),  # ratio 10, cap 3
        ("dppo_kl", 0.4, 0.9, 2.0, 0.0, 0.0),  # kl 0.4 log(4/9) + 0.6 log 6 = 0.75
        ("dppo_kl", 0.4, 0.9, -2.0, 6.0 * 0.75 * np.log(0.9), 4.5),  # on its way back
        ("geo_mean", 0.4, 0.6, 2.0, -2.0 * np.exp(0.2), 0.0),  # log-ratio 0.405, held at 0.2
        ("reinforce", 0.4, 0.6, 2.0, -2.0 * np.log(0.6), -2.0),
    ],
)
def test_one_token_by_hand(name, old, now, advantage, loss, slope):
    np.testing.assert_allclose(
        one_token(name, old, now, advantage), (loss, slope), rtol=1e-5, atol=1e-6
    )


def test_dual_clip_can_be_off():
    off = {"dual_clip": float("inf")}
    loss, slope = one_token("vanilla", 0.1, 0.5, -2.0, loss_args=off)
    np.testing.assert_allclose((loss, slope), (10.0, 10.0), rtol=1e-6)
    assert np.isfinite(one_token("vanilla", 0.1, 0.5, 0.0, loss_args=off)).all()


def test_sapo_fades_out_instead_of_clipping():
    for advantage in (2.0, -2.0):
        _, near = one_token("sapo", 0.4, 0.4, advantage)
        _, far = one_token("sapo", 0.01, 0.09, advantage)
        np.testing.assert_allclose(near, -advantage, rtol=1e-6)
        assert 0 < abs(far) < 0.02 * abs(near)


def test_aggregations_by_hand():
    x = jnp.array([[1.0, 2.0, 6.0, jnp.nan], [5.0, jnp.nan, jnp.nan, jnp.nan]])
    denominators = minibatch_denominators(MASK, loss_scale=10.0)
    by_hand = {
        "token-mean": 14 / 4,
        "token-sum": 14,
        "seq-mean-token-sum": 14 / 2,
        "seq-mean-token-mean": (3 + 5) / 2,
        "seq-mean-token-sum-norm": 14 / 2 / 10,
    }
    for name, expected in by_hand.items():
        np.testing.assert_allclose(AGGREGATIONS[name](x, MASK, denominators), expected, rtol=1e-6)


def test_the_norm_mode_needs_its_constant():
    with pytest.raises(ValueError, match=r"loss_scale: 0\.0 is not positive.*max_response_tokens"):
        AGGREGATIONS["seq-mean-token-sum-norm"](
            ADVANTAGES, MASK, Denominators(tokens=jnp.float32(1), sequences=jnp.float32(1))
        )


def test_rejected_rows_count_in_no_denominator():
    counts = minibatch_denominators(MASK.at[1].set(False))
    assert (counts.tokens, counts.sequences) == (3.0, 1.0)


def test_metrics_of_the_clip():
    old = LOG_PROBS - jnp.log(jnp.array([[1.5, 1.0, 0.5, 1.0], [4.0, 1.0, 1.0, 1.0]]))
    _, metrics = objective(AlgorithmConfig(), LOG_PROBS, minibatch(old))
    # Ratio 1.5 at A=2 is clipped; 4 at A=-1 is stopped by the dual clip; 0.5 at A=2 by nothing.
    np.testing.assert_allclose(metrics["actor/pg_clipfrac"], 1 / 4)
    np.testing.assert_allclose(metrics["actor/pg_clipfrac_lower"], 1 / 4)
    np.testing.assert_allclose(
        metrics["actor/ppo_kl"], -(np.log(1.5) + np.log(0.5) + np.log(4.0)) / 4, rtol=1e-5
    )


def test_entropy_and_kl_enter_the_objective():
    entropies = jnp.where(MASK, 3.0, jnp.nan)
    batch = minibatch(ref_log_probs=LOG_PROBS - 0.5)
    plain, _ = objective(AlgorithmConfig(), LOG_PROBS, batch, entropies=entropies)
    config = AlgorithmConfig(entropy_coef=0.1, kl_in="loss", kl_coef=0.2, kl_estimator="k2")
    total, metrics = objective(config, LOG_PROBS, batch, entropies=entropies)
    np.testing.assert_allclose(total, plain - 0.1 * 3.0 + 0.2 * 0.125, rtol=1e-6)
    np.testing.assert_allclose(metrics["actor/entropy"], 3.0)
    np.testing.assert_allclose(metrics["actor/kl_loss"], 0.125)
    np.testing.assert_allclose(metrics["actor/loss"], total)
    np.testing.assert_allclose(gradient(config, LOG_PROBS, batch)[~MASK], 0.0, atol=0)


def test_correction_weights_scale_the_loss_without_gradient():
    doubled = minibatch(correction_weights=2.0 * jnp.ones(MASK.shape))
    for name in POLICY_LOSSES:
        if name == "vespo":  # they are a part of its ratio
            continue
        config = AlgorithmConfig(policy_loss=name)
        np.testing.assert_allclose(
            gradient(config, LOG_PROBS, doubled),
            2.0 * gradient(config, LOG_PROBS, minibatch()),
            rtol=1e-5,
        )


def test_value_loss_by_hand():
    values = jnp.array([[1.0, 0.2, 3.0, 9.0], [-1.0, 9.0, 9.0, 9.0]])
    old, returns = jnp.zeros(MASK.shape), jnp.ones(MASK.shape)
    # clip(values, 0 ± 0.5) = .5 .2 .5 -.5; errors 0|.25, .64|.64, 4|.25, 4|2.25
    (loss, metrics), slope = jax.value_and_grad(
        lambda x: value_loss(
            AlgorithmConfig(value_clip=0.5), x, old, returns, MASK, minibatch_denominators(MASK)
        ),
        has_aux=True,
    )(values)
    np.testing.assert_allclose(loss, 0.5 * (0.25 + 0.64 + 4 + 4) / 4, rtol=1e-6)
    np.testing.assert_allclose(metrics["critic/vf_clipfrac"], 1 / 4)
    np.testing.assert_allclose(metrics["critic/vpred_mean"], 3.2 / 4, rtol=1e-6)
    np.testing.assert_allclose(slope, [[0, -0.2, 0.5, 0], [-0.5, 0, 0, 0]], rtol=1e-5)
    plain, _ = value_loss(
        AlgorithmConfig(value_clip=float("inf")),
        values,
        old,
        returns,
        MASK,
        minibatch_denominators(MASK),
    )
    np.testing.assert_allclose(plain, 0.5 * (0 + 0.64 + 4 + 4) / 4, rtol=1e-6)


def squared(log_probs, old_log_probs, loss_mask, config, denominators):
    distance = jnp.square(log_probs - old_log_probs)
    return policy_loss(config, distance, jnp.ones(loss_mask.shape), loss_mask, denominators)


def test_a_users_loss_is_called_by_name():
    config = AlgorithmConfig(policy_loss=f"{__name__}:squared")
    loss, metrics = objective(config, LOG_PROBS, minibatch(LOG_PROBS - 2.0))
    assert loss == metrics["actor/pg_loss"] == 4.0


def forgets_metrics(log_probs):
    return jnp.sum(log_probs)


def test_a_users_loss_must_return_metrics():
    config = AlgorithmConfig(policy_loss=f"{__name__}:forgets_metrics")
    with pytest.raises(TypeError, match=r"policy_loss='.*returns \(scalar loss, dict of metrics\)"):
        objective(config, LOG_PROBS, minibatch())


NAN = jnp.nan
PAIRS = jnp.array([True, True, False])


def test_cross_entropy_weighs_tokens_alike():
    mask = jnp.array([[True, True, True], [True, False, False]])
    log_probs = jnp.array([[-1.0, -2.0, -3.0], [-6.0, NAN, NAN]])
    counts = minibatch_denominators(mask)
    right = jnp.array([[1.0, 0.0, 1.0], [1.0, NAN, NAN]])
    (loss, metrics), slope = jax.value_and_grad(
        lambda x: token_cross_entropy(x, right, mask, counts), has_aux=True
    )(log_probs)
    assert metrics["sft/token_accuracy"] == 0.75
    np.testing.assert_allclose(loss, 3.0)
    np.testing.assert_array_equal(slope, jnp.where(mask, -0.25, 0.0))
    rows = ((x[i : i + 1] for x in (log_probs, right, mask)) for i in (0, 1))
    parts = [token_cross_entropy(*row, counts)[0] for row in rows]
    np.testing.assert_allclose(sum(parts), loss)


def test_bradley_terry_by_hand():
    chosen, rejected = jnp.array([2.0, 0.0, NAN]), jnp.array([1.0, 1.0, NAN])
    (loss, metrics), slope = jax.value_and_grad(
        lambda x: bradley_terry(x, rejected, PAIRS, 2.0), has_aux=True
    )(chosen)
    np.testing.assert_allclose(loss, (np.log1p(np.exp(-1)) + np.log1p(np.e)) / 2, rtol=1e-6)
    assert metrics["reward_model/accuracy"] == 0.5
    # -sigmoid(-margin) / 2
    expected = [-1 / (1 + np.e) / 2, -1 / (1 + np.exp(-1)) / 2, 0]
    np.testing.assert_allclose(slope, expected, rtol=1e-5)


def test_vespo_weighs_by_the_ratio_of_the_sequence():
    """w = 2 0.5 1.5 = 1.5 with A = 2, so phi = 1.5**2 exp(3 (1 - 1.5)); 4 with A = -1."""
    old = LOG_PROBS - jnp.log(jnp.array([[2.0, 0.5, 1.5, 1.0], [4.0, 1.0, 1.0, 1.0]]))
    config = AlgorithmConfig(policy_loss="vespo")
    weights = np.array([[1.5**2 * np.exp(-1.5)], [4.0**3 * np.exp(2 * (1 - 4.0))]])
    expected = np.where(MASK, -weights * ADVANTAGES / 4, 0.0)
    np.testing.assert_allclose(gradient(config, LOG_PROBS, minibatch(old)), expected, rtol=1e-5)
    # The correction is a factor of w: the same as an older policy.
    corrected = minibatch(correction_weights=jnp.exp(LOG_PROBS - old))
    np.testing.assert_allclose(gradient(config, LOG_PROBS, corrected), expected, rtol=1e-5)
    far = gradient(config, LOG_PROBS, minibatch(LOG_PROBS - 50.0))
    assert np.isfinite(far).all()


def test_m2po_leaves_out_the_selection_only():
    old = LOG_PROBS - jnp.log(3.0)
    selection = MASK.at[0, 1:].set(False)
    config = AlgorithmConfig(policy_loss="m2po")
    found = gradient(config, LOG_PROBS, minibatch(old), selection=selection)
    np.testing.assert_allclose(
        found, jnp.where(MASK & ~selection, -3.0 * ADVANTAGES / 4, 0.0), rtol=1e-5
    )


def test_luspo_is_gspo_whose_sequences_weigh_by_their_length():
    sums = AlgorithmConfig(policy_loss="gspo", aggregation="seq-mean-token-sum")
    means = dataclasses.replace(sums, aggregation="seq-mean-token-mean")
    lengths = MASK.sum(1, keepdims=True)
    np.testing.assert_allclose(
        gradient(sums, LOG_PROBS, minibatch()),
        lengths * gradient(means, LOG_PROBS, minibatch()),
        rtol=1e-6,
    )


def test_off_policy_sequences_of_negative_advantage_have_no_policy_loss():
    """The engine found both rows likelier, by 0.3 in the mean; only the second has A < 0."""
    rollout = LOG_PROBS + jnp.array([[0.5, 0.3, 0.1, 9.0], [0.3, 9.0, 9.0, 9.0]])
    batch = minibatch(rollout_log_probs=rollout, ref_log_probs=LOG_PROBS - 0.5)
    config = AlgorithmConfig(off_policy_threshold=0.25)
    plain = gradient(AlgorithmConfig(), LOG_PROBS, batch)
    found = gradient(config, LOG_PROBS, batch)
    np.testing.assert_array_equal(found[0], plain[0])
    np.testing.assert_array_equal(found[1], 0.0)
    _, metrics = objective(config, LOG_PROBS, batch)
    np.testing.assert_allclose(metrics["actor/off_policy_masked"], 1 / 4)
    for threshold in (0.31, float("inf")):
        kept = dataclasses.replace(config, off_policy_threshold=threshold)
        np.testing.assert_array_equal(gradient(kept, LOG_PROBS, batch), plain)
    # Its KL to the reference stays.
    with_kl = dataclasses.replace(config, kl_in="loss", kl_coef=0.4, kl_estimator="k2")
    np.testing.assert_allclose(gradient(with_kl, LOG_PROBS, batch)[1, 0], 0.4 * 0.5 / 4, rtol=1e-5)


def test_the_unbiased_kl_has_the_gradient_of_the_kl():
    """Over all tokens of a vocabulary, weighed by what the old policy draws."""
    draw = np.random.default_rng(0)
    logits, ref_logits, old_logits = (jnp.asarray(draw.normal(size=7), jnp.float32) for _ in "abc")
    reference, old = jax.nn.log_softmax(ref_logits), jax.nn.log_softmax(old_logits)

    def divergence(logits):
        log_probs = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(log_probs) * (log_probs - reference))

    def estimated(logits, unbiased):
        log_probs = jax.nn.log_softmax(logits)
        # A row of one token for each token of the vocabulary.
        mask = jnp.ones((7, 1), bool)
        batch = minibatch(old[:, None], jnp.zeros((7, 1)), mask, ref_log_probs=reference[:, None])
        config = AlgorithmConfig(kl_in="loss", kl_coef=1.0, kl_unbiased=unbiased)
        total = 0.0
        for row in range(7):
            one = jax.tree.map(lambda x, row=row: x[row : row + 1], batch)
            total += jnp.exp(old[row]) * objective(config, log_probs[row, None, None], one)[0]
        return total

    np.testing.assert_allclose(estimated(logits, True), divergence(logits), rtol=1e-5)
    found, wanted = jax.grad(estimated)(logits, True), jax.grad(divergence)(logits)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert np.abs(jax.grad(estimated)(logits, False) - wanted).max() > 0.01


def test_observations_are_what_tools_answered():
    mask = jnp.array([[False, True, False, False, True, False, False], [False] * 7])
    found = observation_mask(mask, jnp.array([6, 7]))
    np.testing.assert_array_equal(found[0], [False, False, True, True, False, True, False])
    assert not found[1].any()
    config = AlgorithmConfig(observation_coef=0.5)
    log_probs = jnp.full((2, 7), jnp.nan).at[0].set(-jnp.arange(7.0))
    counts = minibatch_denominators(found)
    (loss, metrics), slope = jax.value_and_grad(
        lambda x: observation_loss(config, x, found, counts), has_aux=True
    )(log_probs)
    np.testing.assert_allclose(metrics["actor/observation_loss"], (2 + 3 + 5) / 3, rtol=1e-6)
    np.testing.assert_allclose(loss, 0.5 * (2 + 3 + 5) / 3, rtol=1e-6)
    np.testing.assert_allclose(slope, jnp.where(found, -0.5 / 3, 0.0), rtol=1e-6)


def test_dft_weighs_tokens_by_their_probability():
    mask = jnp.array([[True, True, False]])
    log_probs, right = jnp.array([[-1.0, -2.0, NAN]]), jnp.array([[1.0, 0.0, NAN]])
    (loss, _), slope = jax.value_and_grad(
        lambda x: token_cross_entropy(x, right, mask, minibatch_denominators(mask), True),
        has_aux=True,
    )(log_probs)
    np.testing.assert_allclose(loss, (np.exp(-1.0) + 2 * np.exp(-2.0)) / 2, rtol=1e-6)
    np.testing.assert_allclose(slope, [[-np.exp(-1.0) / 2, -np.exp(-2.0) / 2, 0.0]], rtol=1e-6)
