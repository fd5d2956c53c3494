"""Prefill: several short prompts packed into a row, long ones in chunks."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl_llm.config.rollout_data import PREFILL_CHUNK_TOKENS
from jaxrl_llm.models.attention import (
    chunked_segment_ids,
    full_attention,
    index_scores,
    masked_attention,
    top_visible_keys,
)
from jaxrl_llm.models.attention_modules import AttentionInputs
from jaxrl_llm.models.image_inputs import ImageInputs
from jaxrl_llm.models.moe.router import RouterInputs
from jaxrl_llm.models.packed_inputs import routes_by_layer
from jaxrl_llm.models.recurrent.gated_delta_net import GatedDeltaInputs, LayerState
from jaxrl_llm.models.recurrent.sequence_memory import paged_layers
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.rollout.engine import layer_states
from jaxrl_llm.rollout.engine.layer_states import LayerStates
from jaxrl_llm.rollout.engine.requests import PromptLogProbs
from jaxrl_llm.sharding.mesh import constrain

_LOGIT_ROWS = 256  # tokens whose logits over the vocabulary exist at the same time


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompts:
    """P prompts packed into R rows of T tokens. Unused entries of P point to any token."""

    tokens: Int[Array, "R T"]
    positions: Int[Array, "R T"]  # of each token within its prompt
    segment_ids: Int[Array, "R T"]  # prompt within the row; 0 is padding
    starts: Int[Array, " P"]  # of each prompt in the concatenated rows
    lengths: Int[Array, " P"]
    # Router replay, -1: the router's choice; [R, T, 0] where routes are not kept.
    routes: Int[Array, "R T routes"]
    sights: ImageInputs | None = None  # of rows with images


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """Memory of layers and first logits of P prefilled prompts.

    "tokens" are those of all rows, concatenated. Where prompts share rows an empty row follows, so
    that a slice of a row's width can be taken wherever a prompt begins.
    """

    keys: tuple[Float[Array, "K tokens H"], ...]  # one for each layer with pages
    values: tuple[Float[Array, "K tokens value"], ...]  # (): part of the keys (MLA)
    tokens: Int[Array, " tokens"]
    routes: Int[Array, "tokens routes"]  # visited experts; [tokens, 0] if not kept
    logits: Float[Array, "P V"]  # for the first response token
    starts: Int[Array, " P"]
    lengths: Int[Array, " P"]
    width: int = dataclasses.field(metadata={"static": True})  # of a row; any prompt fits into one
    prompt_log_probs: PromptLogProbs | None = None  # of all rows; None: not computed
    states: LayerStates = ()  # after the last token of each row, which then holds one prompt


def prefill(
    network: Network,
    params: Params,
    prompts: Prompts,
    *,
    piece_tokens: int = PREFILL_CHUNK_TOKENS,
    num_prompt_top: int | None = None,
) -> Prefix:
    """Prefills prompts. No token attends to another prompt or to padding.

    If layers have states, each row holds one prompt (`host_inputs.prompt_rows`).

    Static arguments:
      piece_tokens: Rows that are wider hold one prompt each and are processed in chunks of this
        size, so that only one chunk's activations are in memory.
      num_prompt_top: Number of most likely tokens reported for each prompt token, with its own
        log-prob; None: no log-probs.
    """
    rows, width = prompts.tokens.shape
    shared = prompts.starts.shape[0] > rows
    routes = prompts.routes
    kernel = _kernel(network)
    prompt_log_probs = None
    if num_prompt_top is not None:
        num_prompt_top = min(num_prompt_top, network.shape.vocab_size)
    if width <= piece_tokens:
        empty = layer_states.empty_states(network, rows)

        def attend(a: AttentionInputs | GatedDeltaInputs):
            if isinstance(a, GatedDeltaInputs):
                return a.after_state(empty[len(states)], prompts.segment_ids != 0)
            assert a.v is not None
            ids = chunked_segment_ids(a.chunk, prompts.segment_ids, prompts.positions)
            options: Any = {"window": a.window, "scoring": a.scoring}
            options |= {"index": a.key_index, "top_keys": a.top_keys}
            return full_attention(a.q, a.k, a.v, ids, kernel, **options), a.cache_entries

        sights = prompts.sights
        x = network.embed(params, prompts.tokens, sights)
        rotary = network.rotary(prompts.positions if sights is None else sights.positions)
        routing = _routing(network, routes)
        caches: list[Any] = []
        states: list[LayerState] = []
        visited = []
        for number, layer in enumerate(params["layers"]):
            kind = network.shape.layer_types[number]
            x, kept, routed = network.block(
                layer, x, rotary, attend, kind, routing=routing.get(number), image_inputs=sights
            )
            (caches if kind.mixer == "attention" else states).append(kept)
            visited += [routed.chosen] if routed and routes.shape[-1] else []
        if visited:
            routes = network.flatten_routes(jnp.stack(visited))
        last = x.reshape(rows * width, 1, -1)[prompts.starts + prompts.lengths - 1]
        if num_prompt_top is not None:
            following = jnp.roll(prompts.tokens, -1, axis=1)
            prompt_log_probs = _next_token_log_probs(network, params, x, following, num_prompt_top)
    else:
        assert not shared, "a row that is read in pieces holds one prompt"
        caches, states, last, routes, prompt_log_probs = _chunked_prefill(
            network, params, prompts, piece_tokens, num_prompt_top
        )
    logits = network.logits(params, network.norm(params, last))[:, 0]

    def concatenate_rows(entries: Float[Array, "R T K H"]) -> Float[Array, "K tokens H"]:
        entries = jnp.pad(entries[:, :width], ((0, int(shared)), (0, 0), (0, 0), (0, 0)))
        entries = entries.reshape(-1, *entries.shape[2:]).swapaxes(0, 1)
        # replicated: any slot may need any prompt
        return constrain(entries, "kv_heads", None, None)

    keys, *values = zip(*(map(concatenate_rows, entries) for entries in caches), strict=True)
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
        prompt_log_probs=prompt_log_probs and _at_own_tokens(prompt_log_probs, width),
        states=jax.tree.map(lambda a: constrain(a, *[None] * a.ndim), tuple(states)),
    )


def _next_token_log_probs(
    network: Network,
    params: Params,
    hidden: Float[Array, "R T D"],
    following: Int[Array, "R T"],
    num_top: int,
) -> PromptLogProbs:
    """Log-probs of the tokens that follow; [R, T, ...], a block of columns at a time."""
    rows, width = following.shape
    columns = max(1, _LOGIT_ROWS // rows)
    count = -(-width // columns)
    padding = count * columns - width

    def split(a: Array) -> Array:
        a = jnp.pad(a, ((0, 0), (0, padding), *[(0, 0)] * (a.ndim - 2)))
        return jnp.moveaxis(a.reshape(rows, count, columns, *a.shape[2:]), 1, 0)

    def join(a: Array) -> Array:
        return jnp.moveaxis(a, 0, 1).reshape(rows, count * columns, *a.shape[3:])[:, :width]

    def log_probs_of_block(block: tuple[Array, Array]) -> PromptLogProbs:
        hidden, targets = block
        logits = network.logits(params, network.norm(params, hidden))
        logits -= logits.max(-1, keepdims=True)
        log_total = jnp.log(jnp.exp(logits).sum(-1, keepdims=True))
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)
        ranks = 1 + (logits > chosen).sum(-1)
        top_logits, top_tokens = lax.top_k(logits, num_top)
        return PromptLogProbs(
            (chosen - log_total)[..., 0], ranks, top_tokens, top_logits - log_total
        )

    return jax.tree.map(join, lax.map(log_probs_of_block, (split(hidden), split(following))))


def _at_own_tokens(following: PromptLogProbs, width: int) -> PromptLogProbs:
    """From log-probs of the tokens that follow to those of each token; rows concatenated."""

    def shift(a: Array) -> Array:
        a = jnp.roll(a[:, :width], 1, axis=1)
        a = a.reshape(a.shape[0] * width, *a.shape[2:])
        return constrain(a, *[None] * a.ndim)

    return jax.tree.map(shift, following)


def _kernel(network: Network) -> Literal["xla", "cudnn"]:
    """Attention kernel of prefill; splash needs rows sharded as in training."""
    return "cudnn" if network.kernel == "cudnn" else "xla"


def _routing(network: Network, routes: Int[Array, "R T routes"]) -> dict[int, RouterInputs]:
    """Router inputs by layer number; empty if routes are not kept."""
    if not routes.shape[-1]:
        return {}
    by_layer, counted = routes_by_layer(network.shape, routes), jnp.ones(routes.shape[:2], bool)
    layers = zip(network.shape.moe_layers, by_layer, strict=True)
    return {number: RouterInputs(counted, layer_routes) for number, layer_routes in layers}


def _chunked_prefill(network, params, prompts, size, num_prompt_top):
    """Chunked prefill: cache [P, T, K, _] and state of each layer, last hidden states [P, 1, D],
    routes, and log-probs of the tokens that follow.
    """
    rows, width = prompts.tokens.shape
    count = -(-width // size)
    padding = count * size - width
    tokens = jnp.pad(prompts.tokens, ((0, 0), (0, padding)))
    sights = prompts.sights
    if sights is not None:
        sights = sights._replace(
            positions=jnp.pad(sights.positions, ((0, 0), (0, padding), (0, 0))),
            feature_index=jnp.pad(sights.feature_index, ((0, 0), (0, padding)), constant_values=-1),
        )
    all_routes = jnp.pad(prompts.routes, ((0, 0), (0, padding), (0, 0)), constant_values=-1)
    shape, dtype = network.shape, network.compute_dtype
    heads, *dims = shape.kv_cache_sizes
    kernel = _kernel(network)
    empty_cache = tuple(jnp.zeros((rows, count * size, heads, n), dtype) for n in dims if n)
    last = jnp.zeros((rows, 1, shape.hidden_size), dtype)
    following = jnp.roll(tokens, -1, axis=1)
    log_probs = None
    if num_prompt_top is not None:
        zeros = jnp.zeros(tokens.shape, jnp.float32)
        tops = jnp.zeros((*tokens.shape, num_prompt_top), jnp.float32)
        log_probs = PromptLogProbs(zeros, zeros.astype(jnp.int32), tops.astype(jnp.int32), tops)

    def process_chunk(i, carry):
        caches, states, last, routes, log_probs = carry
        start = i * size
        positions = jnp.broadcast_to(start + jnp.arange(size), (rows, size))
        # distance of each key from each query
        distances = positions[:, None, :, None] - jnp.arange(count * size)
        chunk_of = lambda a: lax.dynamic_slice_in_dim(a, start, size, 1)  # noqa: E731
        chunk_images = sights
        if chunk_images is not None:
            chunk_images = chunk_images._replace(
                positions=chunk_of(chunk_images.positions),
                feature_index=chunk_of(chunk_images.feature_index),
            )
        x = network.embed(params, chunk_of(tokens), chunk_images)
        rotary = network.rotary(positions if chunk_images is None else chunk_images.positions)
        routing = _routing(network, lax.dynamic_slice_in_dim(all_routes, start, size, 1))
        is_token = positions < prompts.lengths[:rows, None]
        new_caches: list[Any] = []
        new_states: list[LayerState] = []
        visited = []
        for number, layer in enumerate(params["layers"]):
            kind = shape.layer_types[number]

            def attend(a: AttentionInputs | GatedDeltaInputs):
                if isinstance(a, GatedDeltaInputs):
                    return a.after_state(states[len(new_states)], is_token)
                cache = caches[len(new_caches)]
                updated = tuple(
                    lax.dynamic_update_slice_in_dim(old, entry.astype(old.dtype), start, 1)
                    for old, entry in zip(cache, a.cache_entries, strict=True)
                )
                keys, values = (
                    updated if len(updated) == 2 else (*updated, updated[0][..., : a.value_size])
                )
                mask = distances >= 0
                if a.window:
                    mask &= distances < a.window
                if a.chunk:
                    mask &= distances <= (positions % a.chunk)[:, None, :, None]
                if a.key_index is not None:
                    size_of_index = a.key_index.k.shape[-1]
                    index_keys, keys = keys[:, :, 0, -size_of_index:], keys[..., :-size_of_index]
                    scores = index_scores(a.key_index.q, a.key_index.weights, index_keys)
                    mask = top_visible_keys(scores, mask[:, 0], a.top_keys)[:, None]
                return masked_attention(a.q, keys, values, mask, a.scoring, kernel), updated

            x, kept, routed = network.block(
                layer,
                x,
                rotary,
                attend,
                kind,
                compressed=True,
                routing=routing.get(number),
                image_inputs=chunk_images,
            )
            (new_caches if kind.mixer == "attention" else new_states).append(kept)
            visited += [routed.chosen] if routing and routed else []
        if visited:
            chunk_routes = network.flatten_routes(jnp.stack(visited))
            routes = lax.dynamic_update_slice_in_dim(routes, chunk_routes, start, 1)
        # The last token of rows that end in this chunk; unused entries for the others.
        last_index = jnp.clip(prompts.lengths - 1 - start, 0, size - 1)[:, None, None]
        ends = (prompts.lengths - 1) // size == i
        last = jnp.where(ends[:, None, None], jnp.take_along_axis(x, last_index, axis=1), last)
        if log_probs is not None:
            chunk_log_probs = _next_token_log_probs(
                network, params, x, chunk_of(following), num_prompt_top
            )
            log_probs = jax.tree.map(
                lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, start, 1),
                log_probs,
                chunk_log_probs,
            )
        return new_caches, tuple(new_states), last, routes, log_probs

    caches = [empty_cache for _ in paged_layers(shape)]
    carry = caches, layer_states.empty_states(network, rows), last, all_routes, log_probs
    caches, states, last, routes, log_probs = lax.fori_loop(0, count, process_chunk, carry)
    return caches, states, last, routes[:, :width], log_probs
