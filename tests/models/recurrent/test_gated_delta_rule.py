"""The gated delta rule: by hand, chunks against steps, packed rows, padding, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.recurrent.gated_delta_rule import (
    gated_delta_rule,
    gated_delta_step,
    l2_normalized,
    mask_padding,
    unit_lower_inverse,
)

B, T, G, N, K, V = 2, 150, 2, 4, 8, 6


def tokens_of(seed, length=T):
    """Returns q, k, v, log decay and beta as a layer makes them; some heads forget at once."""
    random = np.random.default_rng(seed)
    q, k = (random.standard_normal((B, length, G, K), np.float32) for _ in range(2))
    v = random.standard_normal((B, length, N, V), np.float32)
    rates = np.array([0.01, 0.3, 3.0, 30.0], np.float32)
    log_decay = -rates * random.random((B, length, N), np.float32)
    beta = random.random((B, length, N), np.float32)
    return l2_normalized(q), l2_normalized(k), jnp.asarray(v), jnp.asarray(log_decay), beta


def step_by_step(q, k, v, log_decay, beta, starts, state=None):
    """Returns outputs and last state of the recurrence itself, a token at a time."""
    if state is None:
        state = jnp.zeros((B, N, K, V))

    def step(state, token):
        *token, start = token
        state = jnp.where(start[:, None, None, None], 0.0, state)
        output, state = gated_delta_step(*token, state)
        return state, output

    by_token = [jnp.swapaxes(a, 0, 1) for a in (q, k, v, log_decay, beta, starts)]
    state, outputs = jax.lax.scan(step, state, by_token)
    return jnp.swapaxes(outputs, 0, 1), state


def starts_at(*columns, length=T):
    starts = np.zeros((B, length), bool)
    starts[:, list(columns)] = True
    return jnp.asarray(starts)


def test_two_tokens_by_hand():
    # One head, keys of two dims, values of one. b = 1/2, a = e^0 = 1 for the first token.
    # u_1 = 1/2 (3 - 0) = 1.5, S_1 = (1.5, 0), o_1 = q_1 S_1 = 1.5.
    # a = 1/2: S decays to (0.75, 0); k_2 = (1, 1): u_2 = 1/2 (2 - 0.75) = 0.625,
    # S_2 = (1.375, 0.625), o_2 = (1, 2) S_2 = 2.625.
    q = np.array([[[[1.0, 0.0]], [[1.0, 2.0]]]], np.float32)
    k = np.array([[[[1.0, 0.0]], [[1.0, 1.0]]]], np.float32)
    v = np.array([[[[3.0]], [[2.0]]]], np.float32)
    log_decay = np.log(np.array([[[1.0], [0.5]]], np.float32))
    beta = np.full((1, 2, 1), 0.5, np.float32)
    outputs, state = gated_delta_rule(q, k, v, log_decay, beta, jnp.zeros((1, 2), bool))
    np.testing.assert_allclose(outputs[0, :, 0, 0], [1.5, 2.625], rtol=1e-6)
    np.testing.assert_allclose(state[0, 0, :, 0], [1.375, 0.625], rtol=1e-6)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 256])
def test_chunks_are_the_steps(chunk_tokens):
    tokens, starts = tokens_of(0), starts_at(0, 40, 41, 100)
    wanted = step_by_step(*tokens, starts)
    found = jax.jit(gated_delta_rule, static_argnames="chunk_tokens")(
        *tokens, starts, chunk_tokens=chunk_tokens
    )
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_inverse_of_a_triangle(size):
    random = np.random.default_rng(size)
    # Equal keys: all entries near 1, whose powers would be as large as binomials.
    lower = np.tril(1.0 - 0.1 * random.random((3, size, size)), -1).astype(np.float32)
    wanted = np.linalg.inv(np.eye(size) + lower.astype(np.float64))
    np.testing.assert_allclose(unit_lower_inverse(lower), wanted, atol=2e-6)


def test_gradients_are_those_of_the_steps():
    tokens, starts = tokens_of(1), starts_at(0, 40, 41, 100)
    random = np.random.default_rng(2)
    state = jnp.asarray(random.standard_normal((B, N, K, V), np.float32))
    weights = random.standard_normal((B, T, N, V), np.float32)
    state_weights = random.standard_normal((B, N, K, V), np.float32)

    def loss(function, starts, tokens, state):
        outputs, last = function(*tokens, starts, state)
        return (outputs * weights).sum() + (last * state_weights).sum()

    for borders in (starts, starts_at()):
        ours, theirs = (
            jax.jit(jax.grad(functools.partial(loss, function, borders), argnums=(0, 1)))(
                tokens, state
            )
            for function in (gated_delta_rule, step_by_step)
        )
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, np.abs(b).max()))


def test_packed_segments_are_those_alone():
    """Whatever is before a segment, even a head that forgot everything, does not round it."""
    first, second = tokens_of(3, 90), tokens_of(4, 60)
    packed = [jnp.concatenate(pair, axis=1) for pair in zip(first, second, strict=True)]
    outputs, state = gated_delta_rule(*packed, starts_at(0, 90))
    for alone, found in ((first, outputs[:, :90]), (second, outputs[:, 90:])):
        length = alone[0].shape[1]
        wanted, last = gated_delta_rule(*alone, starts_at(0, length=length))
        np.testing.assert_allclose(found, wanted, atol=2e-6)
    np.testing.assert_allclose(state, last, atol=2e-6)


def test_a_state_is_handed_on():
    tokens = tokens_of(5)
    whole, last = gated_delta_rule(*tokens, starts_at())
    state, outputs = None, []
    for begin, end in ((0, 70), (70, 71), (71, T)):
        part = [a[:, begin:end] for a in tokens]
        found, state = gated_delta_rule(*part, starts_at(length=end - begin), state)
        outputs.append(found)
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), whole, atol=2e-6)
    np.testing.assert_allclose(state, last, atol=2e-6)


def test_padding_changes_nothing_even_if_it_is_nan():
    tokens, is_token = tokens_of(6), np.arange(T) < np.array([[90], [150]])

    def pass_over(tokens):
        masked = mask_padding(is_token, *tokens)
        outputs, state = gated_delta_rule(*masked, starts_at(0))
        return jnp.where(is_token[..., None, None], outputs, 0.0).sum() + state.sum(), state

    damaged = tuple(
        jnp.where(is_token.reshape(B, T, *[1] * (a.ndim - 2)), a, jnp.nan) for a in tokens
    )
    (gradient, state), (clean, wanted) = (
        jax.grad(pass_over, has_aux=True)(t) for t in (damaged, tokens)
    )
    np.testing.assert_array_equal(state, wanted)
    jax.tree.map(np.testing.assert_array_equal, gradient, clean)
    assert all(np.isfinite(a).all() for a in gradient)
    _, last = gated_delta_rule(*(a[:, :90] for a in tokens), starts_at(0, length=90))
    np.testing.assert_allclose(state[0], last[0], atol=2e-6)
