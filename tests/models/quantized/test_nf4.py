"""NF4 with double quantization: by hand, beside bitsandbytes, and in bits per weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.quantized import nf4


def kernel(in_size=256, out_size=96):
    random = np.random.default_rng(0)
    sizes = random.uniform(0.2, 2.0, (1, out_size))
    return (random.standard_normal((in_size, out_size)) * sizes).astype(np.float32)


def test_a_block_by_hand():
    # One block: absmax 2, so that 2 is code 15, -2 code 0 and 0 code 7. 0.9 is 0.45 of 2, whose
    # nearest entry is 0.4407, code 12. Codes 15 and 0 are the byte 0xf0, 7 and 12 are 0x7c.
    column = np.zeros((64, 1), np.float32)
    column[:4, 0] = 2.0, -2.0, 0.0, 0.9
    stored = nf4.quantize(jnp.asarray(column))
    assert stored["codes"][:3, 0].tolist() == [0xF0, 0x7C, 0x77]
    # The mean of one absmax is the absmax: what is left of it, 0, is exact.
    assert float(stored["absmax_mean"]) == 2.0 and float(stored["absmax_steps"][0]) == 0.0
    weights = nf4.dequantize(**stored, dtype=jnp.float32)
    np.testing.assert_allclose(weights[:4, 0], [2.0, -2.0, 0.0, 2 * 0.44070983], rtol=1e-6)


def test_zeros_stay_zeros():
    stored = nf4.quantize(jnp.zeros((128, 3)))
    assert not nf4.dequantize(**stored, dtype=jnp.float32).any()


def test_the_error_is_within_half_a_gap_of_the_table():
    weights = kernel()
    stored = jax.jit(nf4.quantize)(weights)
    found = np.asarray(nf4.dequantize(**stored, dtype=jnp.float32))
    blocks = weights.reshape(4, 64, -1)
    absmax = np.abs(blocks).max(1, keepdims=True)
    scales = np.abs(found.reshape(blocks.shape)).max(1, keepdims=True)  # of the largest weight
    assert np.abs(scales / absmax - 1).max() < 0.1  # the absmax, rounded in turn
    error = np.abs(found.reshape(blocks.shape) - blocks * scales / absmax) / scales
    half_gap = np.diff(nf4.TABLE).max() / 2
    assert 0.8 * half_gap < error.max() < 1.001 * half_gap
    bits = 8 * sum(a.nbytes for a in stored.values()) / weights.size
    assert bits == pytest.approx(4 + 8 / 64 + 32 / 64 / 256, abs=0.002)


@pytest.mark.parity
def test_bitsandbytes_has_the_same_codes_and_weights():
    torch = pytest.importorskip("torch")
    functional = pytest.importorskip("bitsandbytes.functional")
    weights = kernel(448, 200)
    codes, state = functional.quantize_4bit(
        torch.tensor(weights.T.copy()), blocksize=64, quant_type="nf4", compress_statistics=True
    )
    stored = nf4.quantize(jnp.asarray(weights))
    np.testing.assert_array_equal(nf4.TABLE, state.code.numpy())
    np.testing.assert_allclose(nf4.absmax_table(), state.state2.code.numpy(), atol=6e-8)
    theirs = {
        "codes": codes.numpy().reshape(200, -1).T,
        "absmax": state.absmax.numpy().reshape(200, -1).T,
        "absmax_steps": state.state2.absmax.numpy(),
        "absmax_mean": np.float32(state.offset),
    }
    np.testing.assert_array_equal(stored["codes"], theirs["codes"])
    # The order of a sum decides about absmax values between two codes: the mean has another ulp.
    differing = (np.asarray(stored["absmax"]) != theirs["absmax"]).mean()
    assert differing < 0.005
    np.testing.assert_allclose(stored["absmax_steps"], theirs["absmax_steps"], rtol=1e-6)
    np.testing.assert_allclose(stored["absmax_mean"], theirs["absmax_mean"], rtol=1e-6)
    # Their arrays, dequantized by both.
    ours = nf4.dequantize(**{k: jnp.asarray(a) for k, a in theirs.items()}, dtype=jnp.float32)
    wanted = functional.dequantize_4bit(codes, state).numpy().T
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-6)
