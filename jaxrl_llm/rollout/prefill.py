"""Reading prompts: several short ones to a row, long ones in pieces."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl_llm.config.samples import PIECE_TOKENS
from jaxrl_llm.models.attention import by_chunk, full_attention, masked_attention
from jaxrl_llm.models.attention_layers import Attention
from jaxrl_llm.models.reading import routes_by_layer
from jaxrl_llm.models.router import Routing
from jaxrl_llm.models.sights import Sights
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
    # Experts to visit, -1: the router's choice; [R, T, 0] where routes are not kept.
    routes: Int[Array, "R T routes"]
    sights: Sights | None = None  # of rows with images


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """P prompts that were read.

    "tokens" are those of all rows end to end. Where prompts share rows an empty row follows, so
    that a row's width can be cut out wherever a prompt begins.
    """

    keys: tuple[Float[Array, "K tokens H"], ...]  # one per layer
    values: tuple[Float[Array, "K tokens value"], ...]  # (): they are dims of the keys
    tokens: Int[Array, " tokens"]
    routes: Int[Array, "tokens routes"]  # experts that were visited; [tokens, 0] if not kept
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
    routes = prompts.routes
    kernel = _kernel(network)
    if width <= piece_tokens:

        def attend(a: Attention):
            assert a.v is not None
            ids = by_chunk(a.chunk, prompts.segment_ids, prompts.positions)
            how: Any = {"window": a.window, "scoring": a.scoring}
            return full_attention(a.q, a.k, a.v, ids, kernel, **how), a.cached

        sights = prompts.sights
        x = network.embed(params, prompts.tokens, sights)
        rotary = network.rotary(prompts.positions if sights is None else sights.positions)
        routing = _routing(network, routes)
        caches, visited = [], []
        for number, layer in enumerate(params["layers"]):
            kind = network.shape.kinds[number]
            x, kept, routed = network.block(
                layer, x, rotary, attend, kind, routing=routing.get(number)
            )
            caches.append(kept)
            visited += [routed.chosen] if routed and routes.shape[-1] else []
        if visited:
            routes = network.routes(jnp.stack(visited))
        last = x.reshape(rows * width, 1, -1)[prompts.starts + prompts.lengths - 1]
    else:
        assert not shared, "a row that is read in pieces holds one prompt"
        caches, last, routes = _read_in_pieces(network, params, prompts, piece_tokens)
    logits = network.logits(params, network.norm(params, last))[:, 0]

    def end_to_end(kept: Float[Array, "R T K H"]) -> Float[Array, "K tokens H"]:
        kept = jnp.pad(kept[:, :width], ((0, int(shared)), (0, 0), (0, 0), (0, 0)))
        kept = kept.reshape(-1, *kept.shape[2:]).swapaxes(0, 1)
        return constrain(kept, "kv_heads", None, None)  # any slot may want any prompt

    keys, *values = zip(*(map(end_to_end, kept) for kept in caches), strict=True)
    tokens = jnp.pad(prompts.tokens, ((0, int(shared)), (0, 0))).reshape(-1)
    routes = jnp.pad(routes, ((0, int(shared)), (0, 0), (0, 0)))
    return Prefix(
        keys=keys,
        values=values[0] if values else (),
        tokens=tokens,
        routes=constrain(routes.reshape(tokens.size, routes.shape[-1]), None, None),
        logits=logits,
        starts=prompts.starts,
        lengths=prompts.lengths,
        width=width,
    )


def _kernel(network: Network) -> Literal["xla", "cudnn"]:
    """Returns the kernel of attention; splash wants rows that are split as training's are."""
    return "cudnn" if network.kernel == "cudnn" else "xla"


def _routing(network: Network, routes: Int[Array, "R T routes"]) -> dict[int, Routing]:
    """Returns what routers are told, by number of the layer; nothing if routes are not kept."""
    if not routes.shape[-1]:
        return {}
    by_layer, counted = routes_by_layer(network.shape, routes), jnp.ones(routes.shape[:2], bool)
    layers = zip(network.shape.with_experts, by_layer, strict=True)
    return {number: Routing(counted, given) for number, given in layers}


def _read_in_pieces(network, params, prompts, size):
    """Returns what is cached [P, T, K, _] of each layer, last hidden states [P, 1, D], routes."""
    rows, width = prompts.tokens.shape
    count = -(-width // size)
    more = count * size - width
    tokens = jnp.pad(prompts.tokens, ((0, 0), (0, more)))
    sights = prompts.sights
    if sights is not None:
        sights = sights._replace(
            positions=jnp.pad(sights.positions, ((0, 0), (0, more), (0, 0))),
            at=jnp.pad(sights.at, ((0, 0), (0, more)), constant_values=-1),
        )
    given = jnp.pad(prompts.routes, ((0, 0), (0, more), (0, 0)), constant_values=-1)
    shape, dtype = network.shape, network.compute_dtype
    heads, *dims = shape.cached
    kernel = _kernel(network)
    blank = tuple(jnp.zeros((rows, count * size, heads, n), dtype) for n in dims if n)
    last = jnp.zeros((rows, 1, shape.hidden_size), dtype)

    def read(i, carry):
        caches, last, routes = carry
        start = i * size
        positions = jnp.broadcast_to(start + jnp.arange(size), (rows, size))
        before = positions[:, None, :, None] - jnp.arange(count * size)  # of a query, each key
        piece = lambda a: lax.dynamic_slice_in_dim(a, start, size, 1)  # noqa: E731
        here = sights
        if here is not None:
            here = here._replace(positions=piece(here.positions), at=piece(here.at))
        x = network.embed(params, piece(tokens), here)
        rotary = network.rotary(positions if here is None else here.positions)
        routing = _routing(network, lax.dynamic_slice_in_dim(given, start, size, 1))
        kept, visited = [], []
        for number, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
            kind = shape.kinds[number]

            def attend(a: Attention, cache=cache):
                held = tuple(
                    lax.dynamic_update_slice_in_dim(old, piece.astype(old.dtype), start, 1)
                    for old, piece in zip(cache, a.cached, strict=True)
                )
                keys, values = held if len(held) == 2 else (*held, held[0][..., : a.value_size])
                seen = before >= 0
                if a.window:
                    seen &= before < a.window
                if a.chunk:
                    seen &= before <= (positions % a.chunk)[:, None, :, None]
                return masked_attention(a.q, keys, values, seen, a.scoring, kernel), held

            x, cache, routed = network.block(
                layer, x, rotary, attend, kind, compressed=True, routing=routing.get(number)
            )
            kept.append(cache)
            visited += [routed.chosen] if routing and routed else []
        if visited:
            found = network.routes(jnp.stack(visited))
            routes = lax.dynamic_update_slice_in_dim(routes, found, start, 1)
        # Where the row ends in this piece; elsewhere any entry, not taken.
        place = jnp.clip(prompts.lengths - 1 - start, 0, size - 1)[:, None, None]
        ends = (prompts.lengths - 1) // size == i
        last = jnp.where(ends[:, None, None], jnp.take_along_axis(x, place, axis=1), last)
        return kept, last, routes

    caches = [blank for _ in params["layers"]]
    caches, last, routes = lax.fori_loop(0, count, read, (caches, last, given))
    return caches, last, routes[:, :width]
