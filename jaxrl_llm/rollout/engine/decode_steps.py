"""Decode steps: a chunk of them in one program, and the parts that masked decoding shares with it.

What the device has to know at each step is in `live`, the slots' state without the cache, and in a
buffer of the keys and values of the chunk, which are flushed to the pages at its end.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.recurrent.gated_delta_net import GatedDeltaInputs
from jaxrl_llm.models.transformer import ROUTE_DTYPE, Network, Params
from jaxrl_llm.rollout.engine import (
    decode_attention,
    kv_cache,
    layer_states,
    logit_adjustments,
    token_sampling,
)
from jaxrl_llm.rollout.engine.decode_attention import CacheReader
from jaxrl_llm.rollout.engine.device_programs import (
    DecodeState,
    Outputs,
    forward_layers,
    is_stop,
)
from jaxrl_llm.rollout.engine.kv_cache import (
    NO_POSITION,
    REPLICATED,
    CacheSharding,
    ContiguousView,
    PagedView,
    WriteBuffer,
)
from jaxrl_llm.rollout.engine.logit_adjustments import LogitAdjustments


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkInputs:
    """Inputs that all steps of a decode chunk share."""

    cache_view: ContiguousView | PagedView
    cached_ends: Int[Array, " S"]  # one past the last position in the pages
    angles: Any  # rotary embeddings of the positions that the chunk may reach


def generate(
    network: Network,
    params: Params,
    state: DecodeState,
    table: Int[Array, "S pages"],
    free_target: Int[Array, ""],
    adjustments: LogitAdjustments | None = None,
    *,
    split: CacheSharding = REPLICATED,
    num_steps: int,
    num_slots: int,
    window: int,
    reader: CacheReader,
    filtered: bool,
    num_top: int,
    num_support: int = 0,
    draft_tokens: int = 0,
    ngram_tokens: int = 0,
    keeps_routes: bool = False,
) -> tuple[DecodeState, Outputs]:
    """Decodes a chunk: until `num_steps` are done, or `free_target` slots are free for refill.

    Args, static except for the page table of all slots, `free_target` and `adjustments`:
      adjustments: Of the logits of `num_slots` slots; None: there are none.
      split: Sharding of slots and pages over devices.
      num_slots: Slots from this one on are free and not computed.
      window: At least the tokens of every slot before the first step.
      reader: How attention reads the cache.
      num_top: Number of most likely tokens to report.
      num_support: At least the `support_tokens` of every slot.
      keeps_routes: Whether to report the experts chosen for each token.
    """
    width, num_tokens = 1 + draft_tokens, num_steps * (1 + draft_tokens)
    table = table[:num_slots]
    chunk, live, recent = begin_chunk(
        network,
        state,
        table,
        split=split,
        num_tokens=num_tokens,
        num_slots=num_slots,
        window=window,
        reader=reader,
    )
    num_routes = network.num_routes if keeps_routes else 0
    counts, vocab_size = None, network.shape.vocab_size
    if adjustments is not None:
        counts = logit_adjustments.token_counts(adjustments, vocab_size)
        bias = logit_adjustments.dense_bias(adjustments, vocab_size)

    def step(carry):
        """Feeds every active slot its last token and samples the next.

        With speculation it feeds Q - 1 drafts after that token, samples after each of them, and
        accepts the samples after right drafts. Inactive slots are computed but change nothing. The
        step's tokens are at `start` in `recent`; `live` is the slots' state without the cache.
        """
        number, live, recent, counts, outputs = carry
        start = number * width
        active = live.remaining > 0
        inputs = live.tokens[:, None]  # [S, Q]
        drafts = inputs[:, :0]
        if draft_tokens:
            history = live.history[:, : window + num_tokens]
            drafts = token_sampling.prompt_lookup_drafts(
                history, live.positions, draft_tokens, ngram_tokens
            )
            inputs = jnp.concatenate([inputs, jnp.maximum(drafts, 0)], axis=1)
        logits, new_recent, routes, recurrent_inputs = forward_step(
            network,
            params,
            chunk,
            live,
            recent,
            start,
            inputs,
            split=split,
            window=window,
            reader=reader,
        )
        routes = routes[..., :num_routes]
        next_positions = live.positions[:, None] + jnp.arange(width) + 1
        if adjustments is not None:
            logits = logit_adjustments.adjusted_logits(
                logits, next_positions, adjustments, bias, counts, drafts
            )
        flat = logits.reshape(num_slots * width, -1)
        sampler = jax.tree.map(lambda a: jnp.repeat(a, width, axis=0), live.sampler)
        *sampled, support = token_sampling.sample_with_support(
            flat,
            next_positions.reshape(-1),
            sampler,
            filtered=filtered,
            num_support=num_support,
        )
        sampled += [*token_sampling.top_log_probs(flat, sampler, num_top), support]
        drawn, log_probs, *tops_and_support = (
            a.reshape(num_slots, width, *a.shape[1:]) for a in sampled
        )
        if draft_tokens:
            accepted = token_sampling.acceptance_mask(
                drawn, drafts, live.stop_tokens, live.remaining
            )
            count = accepted.sum(axis=1)
            last = jnp.take_along_axis(drawn, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
            history = write_history(live, drawn, accepted)
            positions = _step_positions(live, recent, start, width, count)
            states = layer_states.advanced(recent.states, recurrent_inputs, count)
            new_recent = dataclasses.replace(new_recent, positions=positions, states=states)
        else:
            accepted, count, last, history = active[:, None], active, drawn[:, 0], live.history
        if adjustments is not None:
            counts = logit_adjustments.counts_with(counts, drawn, accepted)
        live = advance_slots(live, last, count, history)
        step_outputs = (
            jnp.where(accepted, drawn, -1),
            jnp.where(accepted, log_probs, 0.0),
            *tops_and_support,
            routes,
        )
        outputs = tuple(
            array.at[number].set(jnp.swapaxes(row, 0, 1))
            for array, row in zip(outputs, step_outputs, strict=True)
        )
        return number + 1, live, new_recent, counts, outputs

    def unfinished(carry):
        number, live, *_ = carry
        return (number < num_steps) & ((live.remaining == 0).sum() < free_target)

    dims = (num_steps, width, num_slots)
    tokens, log_probs = jnp.full(dims, -1, jnp.int32), jnp.zeros(dims, jnp.float32)
    tops = (jnp.zeros((*dims, num_top), dtype) for dtype in (jnp.int32, jnp.float32))
    support, routes = (
        jnp.zeros((*dims, size), dtype)
        for size, dtype in ((num_support, jnp.int32), (num_routes, ROUTE_DTYPE))
    )
    empty_outputs = (tokens, log_probs, *tops, support, routes)
    _, live, recent, _, outputs = lax.while_loop(
        unfinished, step, (0, live, recent, counts, empty_outputs)
    )
    rounds = [a.reshape(num_tokens, *a.shape[2:]) for a in outputs]
    state = end_chunk(state, live, recent, table, split=split)
    return state, Outputs(*[*rounds, live.remaining + 0])


def begin_chunk(
    network: Network,
    state: DecodeState,
    table: Int[Array, "S pages"],
    *,
    split: CacheSharding,
    num_tokens: int,
    num_slots: int,
    window: int,
    reader: CacheReader,
) -> tuple[ChunkInputs, DecodeState, WriteBuffer]:
    """Starts a chunk in which each of the first `num_slots` slots gets up to `num_tokens` tokens.

    Returns what its steps read, the state of the slots without the cache, and an empty buffer.
    """
    live, states = jax.tree.map(lambda a: a[:num_slots], (state.small, state.layer_states))
    cached_ends = live.positions  # one past the last position in the pages
    cache_args = network.shape, state.cache, split, table
    cache_view = decode_attention.make_cache_view(
        *cache_args, jnp.where(live.remaining > 0, cached_ends, 0), window, reader
    )
    recent = kv_cache.empty_write_buffer(
        network.shape, num_slots, num_tokens, state.cache.keys[0].dtype, states
    )
    first_positions = live.positions[:, None]
    angles = network.rotary(first_positions + live.rotary_offsets[:, None] + jnp.arange(num_tokens))
    return ChunkInputs(cache_view, cached_ends, angles), live, recent


def forward_step(
    network: Network,
    params: Params,
    chunk: ChunkInputs,
    live: DecodeState,
    recent: WriteBuffer,
    start: Int[Array, ""],
    inputs: Int[Array, "S Q"],
    *,
    split: CacheSharding,
    window: int,
    reader: CacheReader,
) -> tuple[
    Float[Array, "S Q V"], WriteBuffer, Int[Array, "S Q routes"], tuple[GatedDeltaInputs, ...]
]:
    """Feeds every slot its tokens `inputs`; returns logits, the buffer with them, routes, and what
    recurrent layers read of them.

    Their keys and values are at `start` in the buffer, those of inactive slots without a position.
    States of active slots are after all inputs, drafts included; `layer_states.advanced` makes
    those after the accepted ones.
    """
    width = inputs.shape[1]
    active = live.remaining > 0
    query_positions = live.positions[:, None] + jnp.arange(width)
    positions = _step_positions(live, recent, start, width, jnp.where(active, width, 0))
    # Inactive slots see no page, so kernels skip theirs. Computed here once for all layers.
    active_ends = jnp.where(active, chunk.cached_ends, 0)
    visibility = decode_attention.make_visibility(
        network.shape, query_positions, active_ends, positions, chunk.cache_view
    )
    steps = (query_positions - chunk.cached_ends[:, None])[:, :, None, None]
    rotary = jax.tree.map(lambda table: jnp.take_along_axis(table, steps, axis=1), chunk.angles)
    is_token = jnp.broadcast_to(active[:, None], inputs.shape)
    x, recent, routes, recurrent_inputs = forward_layers(
        network,
        params,
        chunk.cache_view,
        split,
        recent,
        start,
        inputs,
        rotary,
        visibility,
        is_token,
    )
    logits = network.logits(params, network.norm(params, x))
    return logits, dataclasses.replace(recent, positions=positions), routes, recurrent_inputs


def _step_positions(
    live: DecodeState, recent: WriteBuffer, start, width: int, count: Int[Array, " S"]
) -> Int[Array, "S recent"]:
    """Positions of the buffer's tokens, with the first `count` of this step's `width`."""
    query_positions = live.positions[:, None] + jnp.arange(width)
    positions = jnp.where(jnp.arange(width) < count[:, None], query_positions, NO_POSITION)
    return lax.dynamic_update_slice_in_dim(recent.positions, positions, start, axis=1)


def write_history(
    live: DecodeState, drawn: Int[Array, "S Q"], accepted: Bool[Array, "S Q"]
) -> Int[Array, "S T"]:
    """The tokens by position of each slot, with those that a step has accepted."""
    num_slots, width = drawn.shape
    next_positions = live.positions[:, None] + jnp.arange(width) + 1
    end = live.history.shape[1]  # past it: dropped
    write_at = jnp.where(accepted, next_positions, end + jnp.arange(width))
    return live.history.at[jnp.arange(num_slots)[:, None], write_at].set(
        drawn, mode="drop", unique_indices=True
    )


def advance_slots(
    live: DecodeState,
    last: Int[Array, " S"],
    count: Int[Array, " S"] | Bool[Array, " S"],
    history: Int[Array, "S T"],
) -> DecodeState:
    """Slots after a step that gave each active one `count` tokens, the last of them `last`."""
    active = live.remaining > 0
    tokens = jnp.where(active, last, live.tokens)
    remaining = jnp.where(is_stop(tokens, live.stop_tokens), 0, live.remaining - count)
    return dataclasses.replace(
        live,
        tokens=tokens,
        positions=live.positions + count,
        remaining=jnp.where(active, remaining, 0),
        history=history,
    )


def end_chunk(
    state: DecodeState,
    live: DecodeState,
    recent: WriteBuffer,
    table: Int[Array, "S pages"],
    *,
    split: CacheSharding,
) -> DecodeState:
    """The state after a chunk: recent tokens are in their pages, states are those after them."""
    num_slots = len(live.remaining)
    cache = kv_cache.flush_buffer(state.cache, split, recent, table, by_slot=True)
    small, states = jax.tree.map(
        lambda whole, part: whole.at[:num_slots].set(part),
        (state.small, state.layer_states),
        (live, recent.states),
    )
    return dataclasses.replace(small, cache=cache, layer_states=states)
