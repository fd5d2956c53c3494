"""Reading prompts: several short ones to a row, long ones in pieces."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl_llm.config.samples import PIECE_TOKENS
from jaxrl_llm.models.attention import full_attention
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.sharding.mesh import constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompts:
    """P prompts in R rows of T tokens. Entries of P without a prompt name any token."""

    tokens: Int[Array, "R T"]
    positions: Int[Array, "R T"]  # of each token in its own prompt
    segment_ids: Int[Array, "R T"]  # which prompt of the row; 0 is padding
    starts: Int[Array, " P"]  # of each prompt in the rows end to end
    lengths: Int[Array, " P"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """P prompts that were read.

    "tokens" are those of all rows end to end. Where prompts share rows an empty row follows, so
    that a row's width can be cut out wherever a prompt begins.
    """

    keys: tuple[Float[Array, "K tokens H"], ...]  # one per layer
    values: tuple[Float[Array, "K tokens H"], ...]
    tokens: Int[Array, " tokens"]
    logits: Float[Array, "P V"]  # of the first response token
    starts: Int[Array, " P"]
    lengths: Int[Array, " P"]
    width: int = dataclasses.field(metadata={"static": True})  # of a row, which holds any prompt


def prefill(
    network: Network, params: Params, prompts: Prompts, *, piece_tokens: int = PIECE_TOKENS
) -> Prefix:
    """Reads prompts. No token attends to another prompt or to padding.

    Rows wider than `piece_tokens` (static) hold one prompt each and are read in pieces of that
    size, so that the activations of only one piece are in memory.
    """
    rows, width = prompts.tokens.shape
    shared = prompts.starts.shape[0] > rows
    if width <= piece_tokens:

        def attend(q, k, v):
            return full_attention(q, k, v, prompts.segment_ids), (k, v)

        x = network.embed(params, prompts.tokens)
        rotary = network.rotary(prompts.positions)
        caches = []
        for layer in params["layers"]:
            x, key_values = network.block(layer, x, rotary, attend)
            caches.append(key_values)
        last = x.reshape(rows * width, 1, -1)[prompts.starts + prompts.lengths - 1]
    else:
        assert not shared, "a row that is read in pieces holds one prompt"
        caches, last = _read_in_pieces(network, params, prompts, piece_tokens)
    logits = network.logits(params, network.norm(params, last))[:, 0]

    def end_to_end(kept: Float[Array, "R T K H"]) -> Float[Array, "K tokens H"]:
        kept = jnp.pad(kept[:, :width], ((0, int(shared)), (0, 0), (0, 0), (0, 0)))
        kept = kept.reshape(-1, *kept.shape[2:]).swapaxes(0, 1)
        return constrain(kept, "kv_heads", None, None)  # any slot may want any prompt

    keys, values = zip(*((end_to_end(k), end_to_end(v)) for k, v in caches), strict=True)
    tokens = jnp.pad(prompts.tokens, ((0, int(shared)), (0, 0))).reshape(-1)
    return Prefix(keys, values, tokens, logits, prompts.starts, prompts.lengths, width)


def _read_in_pieces(network, params, prompts, size):
    """Returns keys and values [P, T, K, H] of each layer, and the last hidden states [P, 1, D]."""
    rows, width = prompts.tokens.shape
    count = -(-width // size)
    tokens = jnp.pad(prompts.tokens, ((0, 0), (0, count * size - width)))
    shape, dtype = network.shape, network.compute_dtype
    blank = jnp.zeros((rows, count * size, shape.num_kv_heads, shape.head_size)).astype(dtype)
    last = jnp.zeros((rows, 1, shape.hidden_size), dtype)

    def read(i, carry):
        caches, last = carry
        start = i * size
        positions = jnp.broadcast_to(start + jnp.arange(size), (rows, size))
        seen = jnp.arange(count * size) <= positions[:, None, :, None]
        x = network.embed(params, lax.dynamic_slice_in_dim(tokens, start, size, 1))
        rotary = network.rotary(positions)
        kept = []
        for layer, cache in zip(params["layers"], caches, strict=True):

            def attend(q, k, v, cache=cache):
                keys, values = (
                    lax.dynamic_update_slice_in_dim(old, piece.astype(old.dtype), start, 1)
                    for old, piece in zip(cache, (k, v), strict=True)
                )
                return jax.nn.dot_product_attention(q, keys, values, mask=seen), (keys, values)

            x, cache = network.block(layer, x, rotary, attend)
            kept.append(cache)
        # Where the row ends in this piece; elsewhere any entry, not taken.
        place = jnp.clip(prompts.lengths - 1 - start, 0, size - 1)[:, None, None]
        ends = (prompts.lengths - 1) // size == i
        return kept, jnp.where(ends[:, None, None], jnp.take_along_axis(x, place, axis=1), last)

    caches = [(blank, blank) for _ in params["layers"]]
    return lax.fori_loop(0, count, read, (caches, last))
