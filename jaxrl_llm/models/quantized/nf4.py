"""NormalFloat in 4 bits with double quantization (arXiv:2305.14314, Sec. 3), as bitsandbytes.

A kernel [I, O] is cut into blocks of 64 inputs of one output. A weight is the nearest entry of
`TABLE` times the block's largest absolute value, its absmax. These absmax values, less their mean,
are quantized in turn: to 8 bits, in blocks of 256 with one float32 step each. Together that is
4.127 bits per weight.

bitsandbytes counts blocks along the rows of the transposed weight [O, I]; this module does too, so
both have the same codes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

BLOCK = 64  # weights with one absmax
ABSMAX_BLOCK = 256  # absmax values with one step

# The 16 values of NF4 (arXiv:2305.14314, Appendix E): quantiles of a normal distribution, scaled
# to [-1, 1].
TABLE = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)


@functools.cache
def absmax_table() -> np.ndarray:
    """The 256 values of absmax codes, "dynamic tree quantization" (arXiv:1511.04561).

    Of seven decades up to 1, each has twice as many values as the one below, both signs alike.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1.0, 2**decade + 1, dtype=np.float32)
        middles = (edges[:-1] + edges[1:]) / 2 * np.float32(10.0 ** (decade - 6))
        values += [*middles, *-middles]
    return np.sort(np.array(values, np.float32))


def num_absmax_blocks(in_size: int, out_size: int) -> int:
    """The number of blocks of absmax values of a kernel."""
    return -(-in_size * out_size // BLOCK // ABSMAX_BLOCK)


def quantize(kernel: Float[Array, "I O"]) -> dict[str, Array]:
    """Quantizes a kernel whose inputs are a multiple of 64.

    Returns:
      codes: uint8 [I / 2, O], two inputs a byte, the first in the high bits.
      absmax: uint8 [I / 64, O], codes of the largest absolute values.
      absmax_steps: float32 [blocks of absmax].
      absmax_mean: float32 [].
    """
    in_size, out_size = kernel.shape
    blocks = kernel.astype(jnp.float32).reshape(in_size // BLOCK, BLOCK, out_size)
    absmax = jnp.abs(blocks).max(1)
    scaled = blocks * jnp.where(absmax > 0, 1 / absmax, 0.0)[:, None]
    thresholds = (TABLE[1:] + TABLE[:-1]) / 2
    codes = sum((scaled > edge).astype(jnp.uint8) for edge in thresholds)
    pairs = codes.reshape(in_size // 2, 2, out_size)
    mean = absmax.mean()
    rows = jnp.ravel((absmax - mean).T)  # in the order of bitsandbytes
    padded = jnp.pad(rows, (0, -rows.size % ABSMAX_BLOCK)).reshape(-1, ABSMAX_BLOCK)
    steps = jnp.abs(padded).max(1)
    ratios = padded / jnp.where(steps > 0, steps, 1.0)[:, None]
    edges = (absmax_table()[1:] + absmax_table()[:-1]) / 2
    absmax_codes = jnp.searchsorted(jnp.asarray(edges), ratios).astype(jnp.uint8)
    absmax_codes = absmax_codes.ravel()[: rows.size].reshape(out_size, -1).T
    return {
        "codes": pairs[:, 0] << 4 | pairs[:, 1],
        "absmax": absmax_codes,
        "absmax_steps": steps,
        "absmax_mean": mean,
    }


def dequantize(
    codes: UInt8[Array, "pairs O"],
    absmax: UInt8[Array, "blocks O"],
    absmax_steps: Float[Array, " absmax_blocks"],
    absmax_mean: Float[Array, ""],
    dtype,
) -> Float[Array, "I O"]:
    """The kernel that `quantize` approximates: products in float32, then cast to `dtype`."""
    num_blocks, out_size = absmax.shape
    steps = jnp.repeat(absmax_steps, ABSMAX_BLOCK)[: absmax.size].reshape(out_size, num_blocks).T
    scales = jnp.asarray(absmax_table())[absmax.astype(jnp.int32)] * steps + absmax_mean
    nibbles = jnp.stack([codes >> 4, codes & 15], 1).reshape(num_blocks, BLOCK, out_size)
    values = _table_values(nibbles) * scales[:, None]
    return values.astype(dtype).reshape(num_blocks * BLOCK, out_size)


def _table_values(nibbles: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """The entries of `TABLE`, by one selection for each bit.

    A gather would be as correct, but no compiler fuses it with its neighbours, and on TPU it reads
    one element at a time.
    """
    values: list[Array] = [jnp.float32(value) for value in TABLE]
    for bit in range(4):
        is_set = (nibbles >> bit & 1) == 1
        values = [jax.lax.select_n(is_set, *_broadcast(pair, is_set)) for pair in _pairs(values)]
    return values[0]


def _pairs(values: list[Array]) -> list[tuple[Array, Array]]:
    return list(zip(values[::2], values[1::2], strict=True))


def _broadcast(pair: tuple[Array, Array], like: Array) -> tuple[Array, ...]:
    return tuple(jnp.broadcast_to(value, like.shape) for value in pair)
