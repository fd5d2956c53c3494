"""The gated delta rule (arXiv:2412.06464, Eq. 10): in chunks, and step by step.

A head keeps a float32 state S [K, V] of a sequence. With decay a_t = exp(log_decay_t) and writing
strength b_t, token t does

    u_t = b_t (v_t - a_t S_{t-1}^T k_t),  S_t = a_t S_{t-1} + k_t u_t^T,  o_t = S_t^T q_t.

The chunked form (Sec. 3.3 there; arXiv:2406.06484, Eq. 8 to 10) solves a triangular system for the
u_t of a chunk and scans over chunks, so that nearly all work is matmuls.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

CHUNK_TOKENS = 64
# Sums in the state run over whole sequences, and the triangular system amplifies rounding.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
_matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def gated_delta_rule(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T N V"],
    log_decay: Float[Array, "B T N"],
    beta: Float[Array, "B T N"],
    starts: Bool[Array, "B T"],
    initial_state: Float[Array, "B N K V"] | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N K V"]]:
    """Outputs of all tokens, and the state after the last one, float32.

    Query and key head i serve the value heads [i N / G, (i + 1) N / G).

    Args:
      log_decay: At most 0. Tokens with `log_decay`, `beta`, `q`, `k`, `v` zero (padding) leave the
        state unchanged.
      starts: Tokens before which the state is reset to zero: the first ones of packed segments.
      initial_state: Before the first token of each row; None: zero.
      chunk_tokens: Static; the result does not depend on it but for rounding.
    """
    rows, length, groups, key_size = q.shape
    heads, value_size = v.shape[2:]
    chunk_tokens = min(chunk_tokens, length)
    num_chunks = -(-length // chunk_tokens)

    def chunked(x: Array, *dims: int) -> Array:
        """[chunks, B, *dims of a token, tokens of a chunk] from [B, T, ...]."""
        x = x.astype(jnp.float32).reshape(rows, length, *dims)
        x = jnp.pad(x, ((0, 0), (0, num_chunks * chunk_tokens - length), *[(0, 0)] * len(dims)))
        x = x.reshape(rows, num_chunks, chunk_tokens, *dims)
        return jnp.moveaxis(jnp.moveaxis(x, 2, -1), 1, 0)

    by_head = groups, heads // groups
    state = jnp.zeros((rows, heads, key_size, value_size), jnp.float32)
    if initial_state is not None:
        state = initial_state.astype(jnp.float32)
    segments = jnp.cumsum(starts.astype(jnp.int32), axis=1)
    segments = jnp.pad(
        segments, ((0, 0), (0, num_chunks * chunk_tokens - length)), mode="edge"
    ).reshape(rows, num_chunks, chunk_tokens)
    work = _within_chunks(
        jnp.swapaxes(chunked(q, groups, key_size), -1, -2),
        jnp.swapaxes(chunked(k, groups, key_size), -1, -2),
        jnp.swapaxes(chunked(v, *by_head, value_size), -1, -2),
        chunked(log_decay, *by_head),
        chunked(beta, *by_head),
        jnp.swapaxes(segments, 0, 1),
    )
    state = state.reshape(rows, *by_head, key_size, value_size)
    state, outputs = lax.scan(_chunk_step, state, work)
    # [chunks, B, G, R, tokens, V] -> [B, T, N, V]
    outputs = outputs.transpose(1, 0, 4, 2, 3, 5).reshape(rows, -1, heads, value_size)
    return outputs[:, :length], state.reshape(rows, heads, key_size, value_size)


class _ChunkWork(NamedTuple):
    """Inputs of the scan over chunks; the dims in front are [chunks, B, G] or [chunks, B, G, R].

    Decays contain the resets: they are zero across the border of two segments.
    """

    q: Float[Array, "n B G chunk K"]
    k: Float[Array, "n B G chunk K"]
    scores: Float[Array, "n B G R chunk chunk"]  # of queries and keys of the chunk, decayed
    values: Float[Array, "n B G R chunk V"]  # the u_t if the state were zero when the chunk begins
    read_keys: Float[Array, "n B G R chunk K"]  # times the state: what it subtracts from the u_t
    from_begin: Float[Array, "n B G R chunk"]  # decay from the begin of the chunk to each token
    to_end: Float[Array, "n B G R chunk"]  # decay from each token to the end of the chunk
    whole: Float[Array, "n B G R"]  # decay over the chunk


def _within_chunks(
    q: Float[Array, "n B G chunk K"],
    k: Float[Array, "n B G chunk K"],
    v: Float[Array, "n B G R chunk V"],
    log_decay: Float[Array, "n B G R chunk"],
    beta: Float[Array, "n B G R chunk"],
    segments: Int[Array, "n B chunk"],
) -> _ChunkWork:
    """The part of the chunked form that needs no state: all chunks at once."""
    length = q.shape[3]
    token = jnp.arange(length)
    later = token[:, None] > token
    # Sums of the log decays between two tokens, not differences of sums from the chunk's begin:
    # these would lose the small decays of a segment behind a large one of the segment before it.
    between = jnp.cumsum(jnp.where(later, log_decay[..., None], 0.0), axis=-2)
    same_segment = segments[..., None] == segments[:, :, None, :]
    reaches = (same_segment & (later | jnp.eye(length, dtype=bool)))[:, :, None, None]
    decays = jnp.where(reaches, jnp.exp(between), 0.0)
    last = segments[..., -1]
    # The segment that the state belongs to when each chunk begins; the first token of the first
    # chunk counts a reset of its own.
    previous = jnp.concatenate([jnp.zeros_like(last[:1]), last[:-1]])

    def in_segment(which: Int[Array, "n B"]) -> Bool[Array, "n B 1 1 chunk"]:
        return (segments == which[..., None])[:, :, None, None]

    since_begin = jnp.cumsum(log_decay, axis=-1)
    from_begin = jnp.where(in_segment(previous), jnp.exp(since_begin), 0.0)
    to_end = jnp.where(in_segment(last), jnp.exp(between[..., -1, :]), 0.0)
    whole = jnp.where((last == previous)[..., None, None], jnp.exp(since_begin[..., -1]), 0.0)
    overlaps = _einsum("nbgck,nbgdk->nbgcd", k, k)[:, :, :, None]
    system = jnp.where(later, beta[..., None] * decays * overlaps, 0.0)
    read_keys = (beta * from_begin)[..., None] * k[:, :, :, None]
    solution = _matmul(
        unit_lower_inverse(system), jnp.concatenate([beta[..., None] * v, read_keys], axis=-1)
    )
    scores = _einsum("nbgck,nbgdk->nbgcd", q, k)[:, :, :, None] * decays
    return _ChunkWork(
        q=q,
        k=k,
        scores=scores,
        values=solution[..., : v.shape[-1]],
        read_keys=solution[..., v.shape[-1] :],
        from_begin=from_begin,
        to_end=to_end,
        whole=whole,
    )


@jax.custom_vjp
def unit_lower_inverse(
    strictly_lower: Float[Array, "*n size size"],
) -> Float[Array, "*n size size"]:
    """The inverse of the identity plus a strictly lower triangular matrix.

    Diagonal blocks are inverted pairwise, of 1, 2, 4, ... rows: matmuls alone. LAPACK's triangular
    solver would wait for threads of the pool in which the devices of a CPU wait for each other's
    collectives; and the series of powers of the matrix cancels where keys are alike.
    """
    size = strictly_lower.shape[-1]
    padding = (1 << (size - 1).bit_length()) - size
    padded = jnp.pad(
        strictly_lower, (*[(0, 0)] * (strictly_lower.ndim - 2), (0, padding), (0, padding))
    )
    leading, padded_size = padded.shape[:-2], size + padding
    inverse = jnp.ones((*leading, padded_size, 1, 1), padded.dtype)
    block = 1
    while block < padded_size:
        count = padded_size // (2 * block)
        by_block = padded.reshape(*leading, count, 2 * block, count, 2 * block)
        diagonal = jnp.moveaxis(jnp.diagonal(by_block, axis1=-4, axis2=-2), -1, -3)
        pairs = inverse.reshape(*leading, count, 2, block, block)
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        lower = -_matmul(second, _matmul(diagonal[..., block:, :block], first))
        upper = jnp.zeros_like(lower)
        inverse = jnp.concatenate(
            [
                jnp.concatenate([first, upper], axis=-1),
                jnp.concatenate([lower, second], axis=-1),
            ],
            axis=-2,
        )
        block *= 2
    return inverse[..., 0, :size, :size]


def _inverse_forward(strictly_lower):
    inverse = unit_lower_inverse(strictly_lower)
    return inverse, inverse


def _inverse_backward(inverse, bar):
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (jnp.tril(-_matmul(transposed, _matmul(bar, transposed)), -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def _chunk_step(
    state: Float[Array, "B G R K V"], chunk: _ChunkWork
) -> tuple[Float[Array, "B G R K V"], Float[Array, "B G R chunk V"]]:
    """The state after a chunk, and the outputs of its tokens."""
    updates = chunk.values - _einsum("bgrck,bgrkv->bgrcv", chunk.read_keys, state)
    read = _einsum("bgck,bgrkv->bgrcv", chunk.q, state) * chunk.from_begin[..., None]
    outputs = read + _einsum("bgrcd,bgrdv->bgrcv", chunk.scores, updates)
    written = _einsum("bgck,bgrcv->bgrkv", chunk.k, updates * chunk.to_end[..., None])
    return chunk.whole[..., None, None] * state + written, outputs


def gated_delta_step(
    q: Float[Array, "B G K"],
    k: Float[Array, "B G K"],
    v: Float[Array, "B N V"],
    log_decay: Float[Array, "B N"],
    beta: Float[Array, "B N"],
    state: Float[Array, "B N K V"],
) -> tuple[Float[Array, "B N V"], Float[Array, "B N K V"]]:
    """Output of one token for each row, and the state after it; as `gated_delta_rule`.

    The state is read and written once: decoding is bound by its bytes.
    """
    rows, _, key_size, value_size = state.shape
    groups = q.shape[1]
    by_group = state.reshape(rows, groups, -1, key_size, value_size)
    decayed = by_group * jnp.exp(log_decay).reshape(rows, groups, -1, 1, 1)
    values = v.astype(jnp.float32).reshape(rows, groups, -1, value_size)
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    errors = values - _einsum("bgk,bgrkv->bgrv", k, decayed)
    updates = beta.reshape(rows, groups, -1, 1) * errors
    new = decayed + k[:, :, None, :, None] * updates[..., None, :]
    outputs = _einsum("bgk,bgrkv->bgrv", q, new)
    return outputs.reshape(v.shape), new.reshape(state.shape)


def l2_normalized(x: Float[Array, "... K"], eps: float = 1e-6) -> Float[Array, "... K"]:
    """`x` divided by the root of its sum of squares plus `eps`, float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + eps)


def mask_padding(is_token: Bool[Array, "B T"], *arrays: Array) -> tuple[jax.Array, ...]:
    """The arrays [B, T, ...] with zeros where there is no token, whatever is there."""
    return tuple(
        jnp.where(is_token.reshape(*is_token.shape, *[1] * (a.ndim - 2)), a, 0) for a in arrays
    )
