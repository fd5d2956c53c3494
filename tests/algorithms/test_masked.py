import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms import masked

X = jnp.array([[1.0, jnp.nan, 3.0], [jnp.inf, 8.0, jnp.nan]])
MASK = jnp.array([[True, False, True], [False, True, False]])


def test_statistics_by_hand():
    # The entries kept are 1, 3 and 8.
    assert masked.sum(X, MASK) == 12.0
    assert masked.mean(X, MASK) == 4.0
    assert masked.variance(X, MASK) == 13.0  # (9 + 1 + 16) / 2
    assert masked.max(X, MASK) == 8.0
    assert masked.min(X, MASK) == 1.0
    np.testing.assert_array_equal(masked.mean(X, MASK, -1), [2.0, 8.0])
    expected = np.array([-3.0, -1.0, 4.0]) / np.sqrt(13.0)
    np.testing.assert_allclose(masked.whiten(X, MASK)[MASK], expected, rtol=1e-6)


def test_an_empty_mask_gives_zero():
    nothing = jnp.zeros_like(MASK)
    for statistic in (
        masked.sum,
        masked.mean,
        masked.variance,
        masked.max,
        masked.min,
    ):
        assert statistic(X, nothing) == 0.0
    np.testing.assert_array_equal(masked.whiten(X, nothing), 0.0)


def test_one_token_whitens_to_zero():
    one = jnp.zeros_like(MASK).at[0, 2].set(True)
    np.testing.assert_array_equal(masked.whiten(X, one), 0.0)


def test_no_gradient_flows_outside_the_mask():
    for statistic in (masked.sum, masked.mean, masked.variance):
        gradient = jax.grad(lambda x, f=statistic: f(x, MASK))(X)
        np.testing.assert_array_equal(gradient[~MASK], 0.0)
        assert np.isfinite(gradient).all()


def test_group_statistics_need_no_order():
    x = jnp.array([1.0, 10.0, 3.0, 20.0, 7.0])
    groups = jnp.array([4, 2, 4, 2, 0])
    everyone = jnp.ones(5, bool)
    np.testing.assert_allclose(masked.group_mean(x, groups, everyone), [2, 15, 2, 15, 7])
    np.testing.assert_allclose(
        masked.group_deviation(x, groups, everyone),
        [2**0.5, 50**0.5, 2**0.5, 50**0.5, 1],
        rtol=1e-6,
    )
    members = jnp.array([True, True, True, False, False])
    np.testing.assert_allclose(masked.group_mean(x, groups, members)[:4], [2, 10, 2, 10])
    np.testing.assert_allclose(masked.group_size(groups, members), [2, 1, 2, 1, 0])


def test_equal_numbers_have_exactly_no_deviation():
    x = jnp.full(7, 0.1)  # the float32 sum of seven of them is not seven times one
    deviation = x - masked.group_mean(x, jnp.zeros(7, int), jnp.ones(7, bool))
    np.testing.assert_array_equal(deviation, 0.0)
