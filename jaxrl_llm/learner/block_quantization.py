"""Moments of an optimizer in 8 bits, with one scale for each block of a row (arXiv:2110.02861).

Deviation: codes are powers of a fraction of the block's largest number instead of a table, so that
no device looks anything up; the second moment has no code for zero but zero's own
(arXiv:2309.01507, Sec. 4.2), and is rounded at random: its decay of 1 - beta2 = 0.001 is less than
the step between two codes.
"""

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxrl_llm.learner import layer_loop

_SMALLEST_BLOCK, _LARGEST_BLOCK = 32, 256
# Blocks of a row if there can be as many: a row may be sharded over so many devices.
_NUM_BLOCKS = 64


class QuantizedMoment(NamedTuple):
    """A moment of shape [..., N]: a code for each number, a scale for each block of a row."""

    codes: Int[Array, "... N"]  # int8, or uint8 of a moment that is never negative
    scales: Float[Array, "... blocks"]


def block_size(shape: tuple[int, ...], path: tuple[Any, ...]) -> int:
    """Numbers of a block; 0: a vector, or a row that no block divides, whose moments are float32.

    It depends on nothing but the parameter, so that a state is read on any mesh.
    """
    if (
        len(shape) - layer_loop.is_stacked(path) < 2
        or path[-1].key == "bias"
        or shape[-1] % _SMALLEST_BLOCK
    ):
        return 0
    size = _SMALLEST_BLOCK
    while size < _LARGEST_BLOCK and shape[-1] % (2 * size * _NUM_BLOCKS) == 0:
        size *= 2
    return size


def zeros(shape: tuple[int, ...], size: int, is_signed: bool) -> QuantizedMoment:
    """A moment of zeros in blocks of `size`."""
    codes = jnp.zeros(shape, jnp.int8 if is_signed else jnp.uint8)
    return QuantizedMoment(codes, jnp.zeros((*shape[:-1], shape[-1] // size), jnp.float32))


def quantize_signed(moment: Float[Array, "... N"], size: int) -> QuantizedMoment:
    """`code = round(127 sqrt(|m| / largest))` with the sign of m.

    >>> quantize_signed(jnp.array([[1.0, -0.25] * 16]), 32).codes[0, :2].tolist()
    [127, -64]
    """
    blocks, scales = _scaled_blocks(moment, size)
    codes = jnp.sign(blocks) * jnp.round(127.0 * jnp.sqrt(jnp.abs(blocks)))
    return QuantizedMoment(codes.astype(jnp.int8).reshape(moment.shape), scales)


def quantize_positive(
    moment: Float[Array, "... N"], size: int, bits: UInt32[Array, "... N"]
) -> QuantizedMoment:
    """`code = 255 (v / largest)**(1/4)`, rounded up or down by `bits`, but never to 0.

    >>> even = jnp.full((1, 32), 2**31, jnp.uint32)
    >>> quantize_positive(jnp.array([[1.0, 1e-12] * 16]), 32, even).codes[0, :2].tolist()
    [255, 1]
    """
    blocks, scales = _scaled_blocks(moment, size)
    chance = (bits >> 8).astype(jnp.float32) * 2.0**-24
    exact = 255.0 * jnp.sqrt(jnp.sqrt(blocks)).reshape(moment.shape)
    codes = jnp.clip(jnp.floor(exact + chance), 1.0, 255.0)
    codes = jnp.where(moment > 0, codes, 0.0)
    return QuantizedMoment(codes.astype(jnp.uint8), scales)


def dequantize(moment: QuantizedMoment) -> Float[Array, "... N"]:
    """The float32 numbers that the codes stand for."""
    blocks = moment.codes.reshape(*moment.scales.shape, -1).astype(jnp.float32)
    if moment.codes.dtype == jnp.int8:
        fractions = jnp.sign(blocks) * jnp.square(blocks / 127.0)
    else:
        fractions = jnp.square(jnp.square(blocks / 255.0))
    return (fractions * moment.scales[..., None]).reshape(moment.codes.shape)


def _scaled_blocks(
    moment: Float[Array, "... N"], size: int
) -> tuple[Float[Array, "... blocks size"], Float[Array, "... blocks"]]:
    """The numbers relative to the largest of their block, and those largest sizes."""
    blocks = moment.reshape(*moment.shape[:-1], -1, size)
    scales = jnp.max(jnp.abs(blocks), axis=-1)
    return blocks / jnp.where(scales > 0, scales, 1.0)[..., None], scales


def rounding_bits(
    path: tuple[Any, ...], count: Int[Array, ""], layers: Int[Array, "*S"], shape: tuple[int, ...]
) -> UInt32[Array, "..."]:
    """Random bits for one parameter in one update, the same on every mesh and in every run.

    Args:
      layers: Numbers of the layers, for a shape [S, ...]; one number for a whole array.
    """
    seed = zlib.crc32(jax.tree_util.keystr(path).encode())
    key = jax.random.fold_in(jax.random.key(seed), count)
    own_shape = shape if layers.ndim == 0 else shape[1:]
    bits = lambda layer: jax.random.bits(jax.random.fold_in(key, layer), own_shape, jnp.uint32)  # noqa: E731
    return bits(layers) if layers.ndim == 0 else jax.vmap(bits)(layers)
