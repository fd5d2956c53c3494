import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.aggregation import minibatch_denominators
from jaxrl_llm.algorithms.supervised_losses import bradley_terry, dpo, token_cross_entropy

NAN = jnp.nan
PAIRS = jnp.array([True, True, False])


def test_cross_entropy_weighs_tokens_alike():
    mask = jnp.array([[True, True, True], [True, False, False]])
    log_probs = jnp.array([[-1.0, -2.0, -3.0], [-6.0, NAN, NAN]])
    counts = minibatch_denominators(mask)
    loss, slope = jax.value_and_grad(lambda x: token_cross_entropy(x, mask, counts)[0])(log_probs)
    np.testing.assert_allclose(loss, 3.0)
    np.testing.assert_array_equal(slope, jnp.where(mask, -0.25, 0.0))
    parts = [token_cross_entropy(log_probs[i : i + 1], mask[i : i + 1], counts)[0] for i in (0, 1)]
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


def test_dpo_is_bradley_terry_on_implied_rewards():
    draw = np.random.default_rng(0)
    chosen, rejected, ref_chosen, ref_rejected = jnp.asarray(draw.normal(size=(4, 3)))
    loss, metrics = dpo(chosen, rejected, ref_chosen, ref_rejected, PAIRS, 2.0, beta=0.3)
    expected, _ = bradley_terry(
        0.3 * (chosen - ref_chosen), 0.3 * (rejected - ref_rejected), PAIRS, 2.0
    )
    assert loss == expected
    assert set(metrics) == {"dpo/loss", "dpo/accuracy", "dpo/margin"}


def test_dpo_at_the_reference_is_log_two_and_safe_in_padding():
    scores = jnp.array([-5.0, -7.0, NAN])
    loss, slope = jax.value_and_grad(
        lambda x: dpo(x, scores, scores, scores, PAIRS, 2.0, beta=0.1)[0]
    )(scores)
    np.testing.assert_allclose(loss, np.log(2.0), rtol=1e-6)
    np.testing.assert_allclose(slope, [-0.025, -0.025, 0.0], rtol=1e-6)
