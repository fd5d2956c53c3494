"""The sampler against the definitions, written with a sort in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from distributions import FILTERS, assert_drawn_from, distribution

from jaxrl_llm.config.rollout_data import MIN_TEMPERATURE
from jaxrl_llm.rollout.engine import token_sampling
from jaxrl_llm.rollout.engine.token_sampling import SamplerState

DRAWS = 8_000


def state(rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, support_tokens=0, seed=0):
    keys = jax.random.key_data(jax.random.split(jax.random.key(seed), rows))
    column = lambda value, dtype: jnp.broadcast_to(jnp.asarray(value, dtype), (rows,))  # noqa: E731
    return SamplerState(
        keys=keys,
        temperature=column(temperature, jnp.float32),
        top_k=column(top_k, jnp.int32),
        top_p=column(top_p, jnp.float32),
        min_p=column(min_p, jnp.float32),
        support_tokens=column(support_tokens, jnp.int32),
    )


@functools.partial(jax.jit, static_argnames="filtered")
def draw(logits, positions, sampler, filtered):
    return token_sampling.sample(logits, positions, sampler, filtered=filtered)


def sample(logits, positions=0, filtered=True, **params):
    logits = jnp.asarray(logits, jnp.float32)
    positions = jnp.broadcast_to(jnp.asarray(positions, jnp.int32), logits.shape[:1])
    found = draw(logits, positions, state(logits.shape[0], **params), filtered)
    return tuple(np.asarray(x) for x in found)


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("size", [5, 300])
def test_frequencies_are_those_of_the_distribution(params, size):
    logits = 2.0 * np.random.default_rng(size).standard_normal(size).astype(np.float32)
    # Half of the rows by key, half by position: both must be independent draws.
    rows = np.broadcast_to(logits, (DRAWS // 2, size))
    by_key, _ = sample(rows, **params)
    one = jax.tree.map(lambda a: jnp.repeat(a[:1], DRAWS // 2, 0), state(2, seed=9, **params))
    by_position, _ = draw(jnp.asarray(rows), jnp.arange(DRAWS // 2), one, True)
    p = distribution(logits, **params)
    assert_drawn_from(by_key, p)
    assert_drawn_from(np.asarray(by_position), p)
    if set(params) <= {"temperature"}:
        # Without filters the two programs draw the same.
        np.testing.assert_array_equal(by_key, sample(rows, filtered=False, **params)[0])


def test_neighbouring_draws_are_independent():
    # One sample's successive positions, and successive samples at one position.
    logits = jnp.zeros((4096, 2))
    keys = state(4096)
    across, _ = draw(logits, jnp.zeros(4096, jnp.int32), keys, False)
    along, _ = draw(
        logits, jnp.arange(4096), jax.tree.map(lambda a: jnp.repeat(a[:1], 4096, 0), keys), False
    )
    for tokens in (across, along):
        tokens = np.asarray(tokens)
        pairs = np.bincount(2 * tokens[:-1] + tokens[1:], minlength=4)
        assert scipy.stats.chisquare(pairs).pvalue > 1e-4


def test_parameters_are_of_each_row():
    logits = np.broadcast_to(np.random.default_rng(1).standard_normal(40) * 2, (4 * 4000, 40))
    rows = [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"temperature": 2.0}]
    names = ("temperature", "top_k", "top_p", "min_p")
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    params = {n: np.repeat([{**defaults, **r}[n] for r in rows], 4000) for n in names}
    tokens, _ = sample(logits, **params)
    for row, drawn in zip(rows, tokens.reshape(4, 4000), strict=True):
        assert_drawn_from(drawn, distribution(logits[0], **row))


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
def test_log_prob_is_of_the_whole_vocabulary(temperature):
    logits = 5 * np.random.default_rng(2).standard_normal((200, 300))
    tokens, log_probs = sample(logits, temperature=temperature, top_k=5, top_p=0.8)
    want = scipy.special.log_softmax(logits / (temperature or 1.0), -1)
    want = np.take_along_axis(want, tokens[:, None], -1)[:, 0]
    # float32 of numbers up to about 30.
    np.testing.assert_allclose(log_probs, want, atol=1e-5)


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, 1e-3, 0.03])
def test_log_probs_are_right_down_to_the_smallest_temperature(temperature):
    """Against float64, where the logits are nearly even and where they are not."""
    random = np.random.default_rng(5)
    logits = (30 + 5 * random.standard_normal((400, 300))).astype(np.float32)
    # Rows in which several tokens may be drawn at so low a temperature.
    near = 60 + np.float32(temperature) * random.uniform(-3, 3, (200, 300))
    logits[:200] = np.where(random.random((200, 300)) < 0.05, near, logits[:200])
    want = scipy.special.log_softmax(logits.astype(np.float64) / np.float32(temperature), -1)
    for filters in ({"filtered": False}, {"top_p": 0.9}, {"top_k": 3, "min_p": 0.01}):
        tokens, log_probs = sample(logits, temperature=temperature, **filters)
        assert np.isfinite(log_probs).all()
        np.testing.assert_allclose(
            log_probs, np.take_along_axis(want, tokens[:, None], -1)[:, 0], atol=1e-5
        )
        assert (log_probs[:200] < -0.1).mean() > 0.2  # more than one token was possible
    likeliest, log_probs = token_sampling.top_log_probs(
        jnp.asarray(logits), state(400, temperature=temperature), 5
    )
    assert np.isfinite(log_probs).all()
    # float32 has 24 bits; the fifth may be as far as -3e5.
    np.testing.assert_allclose(
        log_probs, np.take_along_axis(want, np.asarray(likeliest), -1), rtol=3e-7, atol=1e-5
    )


def test_the_smallest_filters_leave_the_likeliest():
    logits = 2 * np.random.default_rng(6).standard_normal((50, 200))
    for filters in ({"top_p": 1e-30}, {"top_p": 1e-300}, {"top_k": 1}, {"min_p": 1 - 1e-12}):
        tokens, log_probs = sample(logits, **filters)
        np.testing.assert_array_equal(tokens, logits.astype(np.float32).argmax(-1))
        assert np.isfinite(log_probs).all()


def test_zero_temperature_takes_the_first_of_the_largest():
    logits = np.random.default_rng(3).integers(0, 4, (100, 77)).astype(np.float32)
    for filtered in (False, True):
        tokens, _ = sample(logits, temperature=0.0, filtered=filtered, top_p=0.9)
        np.testing.assert_array_equal(tokens, logits.argmax(-1))


def inverse_cdf(mass, uniforms):
    return np.asarray(
        jax.jit(token_sampling._inverse_cdf)(jnp.asarray(mass), jnp.asarray(uniforms))
    )


LARGEST = 1 - 2.0**-23  # the largest number that jax.random.uniform gives; 1 itself below


@pytest.mark.parametrize("size", [1, 3, 128, 129, 1000])
def test_only_tokens_with_mass_are_drawn(size):
    random = np.random.default_rng(size)
    rows = 512
    exponents = random.uniform(-40, 0, (rows, size))
    mass = np.where(random.random((rows, size)) < 0.1, np.exp(exponents), 0.0).astype(np.float32)
    mass[:, random.integers(size)] = 1.0
    mass[: rows // 4] = np.where(mass[: rows // 4] == 1.0, 1.0, 0.0)  # a single possible token
    for first in (0.0, 2.0**-23, 0.5, LARGEST, 1.0):
        for second in (0.0, LARGEST, 1.0):
            uniforms = np.broadcast_to(np.float32([first, second]), (rows, 2))
            tokens = inverse_cdf(mass, uniforms)
            assert ((tokens >= 0) & (tokens < size)).all()
            assert (np.take_along_axis(mass, tokens[:, None], 1) > 0).all()


def test_rare_tokens_are_told_apart():
    # 4096 tokens of 2**-26 each behind one of almost everything: fewer bits than one uniform has.
    rows, size = 4096, 128 + 4096
    mass = np.zeros((rows, size), np.float32)
    mass[:, 0], mass[:, 128:] = 1.0, 2.0**-26
    random = np.random.default_rng(0)
    uniforms = np.stack([np.full(rows, LARGEST), random.random(rows)], 1).astype(np.float32)
    tokens = inverse_cdf(mass, uniforms)
    assert (tokens >= 128).all()
    assert len(np.unique(tokens)) > 100  # nearly all of the 128 tokens of one block


def test_impossible_tokens_are_never_drawn():
    logits = np.full((2000, 200), -np.inf)
    logits[:, [3, 150, 199]] = [0.0, 1.0, -1.0]
    for filtered in (False, True):
        tokens, log_probs = sample(logits, filtered=filtered)
        assert set(tokens) == {3, 150, 199}
        assert np.isfinite(log_probs).all()
    assert_drawn_from(sample(logits)[0], distribution(logits[0]))


def test_not_a_number_gives_a_token_of_the_vocabulary():
    logits = np.zeros((3, 200))
    logits[0, 7] = np.nan
    logits[1] = -np.inf
    for filtered in (False, True):
        for temperature in (0.0, 1.0):
            tokens, log_probs = sample(
                logits, temperature=temperature, filtered=filtered, top_p=0.9, min_p=0.1
            )
            assert ((tokens >= 0) & (tokens < 200)).all()
            np.testing.assert_array_equal(np.isnan(log_probs), [True, True, False])


def test_neighbours_and_place_do_not_matter():
    logits = np.random.default_rng(4).standard_normal((9, 130)).astype(np.float32)
    positions = np.arange(9, dtype=np.int32) * 3
    sampler = state(9, top_k=20, top_p=0.9, seed=5)
    whole = [np.asarray(x) for x in draw(logits, positions, sampler, True)]
    order = np.random.default_rng(5).permutation(9)[:6]
    part = draw(logits[order], positions[order], jax.tree.map(lambda a: a[order], sampler), True)
    np.testing.assert_array_equal(part[0], whole[0][order])
    np.testing.assert_allclose(part[1], whole[1][order], rtol=1e-6)
