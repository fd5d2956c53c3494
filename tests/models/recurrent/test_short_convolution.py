"""Causal convolutions: by hand, in packed rows, and continued from a tail."""

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.recurrent.short_convolution import causal_convolution, convolution_tail

X = np.array([[[1.0], [2.0], [3.0], [4.0], [5.0]]], np.float32)
KERNEL = np.array([[100.0], [10.0], [1.0]], np.float32)


def starts_at(*columns):
    return jnp.asarray(np.isin(np.arange(5), columns)[None])


def test_by_hand():
    # 3 + 10 * 2 + 100 * 1 is the third.
    found = causal_convolution(X, KERNEL, starts_at(0))
    np.testing.assert_array_equal(found[0, :, 0], [1, 12, 123, 234, 345])


def test_segments_do_not_see_each_other():
    found = causal_convolution(X, KERNEL, starts_at(0, 2, 3))
    np.testing.assert_array_equal(found[0, :, 0], [1, 12, 3, 4, 45])


def test_tails_continue_a_row():
    random = np.random.default_rng(0)
    x = random.standard_normal((2, 9, 3, 2), np.float32)
    kernel = random.standard_normal((4, 3, 2), np.float32)
    nowhere = jnp.zeros((2, 9), bool)
    whole = causal_convolution(x, kernel, nowhere)
    tail = jnp.zeros((2, 3, 3, 2))
    outputs = []
    for begin, end in ((0, 1), (1, 3), (3, 9)):
        part = x[:, begin:end]
        outputs.append(causal_convolution(part, kernel, nowhere[:, begin:end], tail))
        # Padding behind the tokens is not part of the tail.
        padded = np.pad(part, ((0, 0), (0, 2), (0, 0), (0, 0)), constant_values=np.nan)
        tail = convolution_tail(padded, tail, jnp.full(2, end - begin))
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), whole, rtol=1e-6)
    np.testing.assert_array_equal(tail, x[:, -3:])
    np.testing.assert_array_equal(convolution_tail(x, tail, jnp.array([0, 2]))[0], tail[0])
