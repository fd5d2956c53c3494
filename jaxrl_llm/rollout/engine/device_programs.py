"""Device programs of rollout after prefill: insert, extend, move, release; states of slots.

Rollout parameters and the cache have one entry per layer instead of stacked layers: a decode step
that scans stacked arrays copies the whole cache every step.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.attention_modules import AttentionInputs
from jaxrl_llm.models.image_inputs import ImageInputs
from jaxrl_llm.models.recurrent.gated_delta_net import GatedDeltaInputs, LayerState
from jaxrl_llm.models.transformer import ROUTE_DTYPE, Network, Params
from jaxrl_llm.rollout.engine import (
    decode_attention,
    kv_cache,
    layer_states,
    logit_adjustments,
    token_sampling,
)
from jaxrl_llm.rollout.engine.decode_attention import CacheReader
from jaxrl_llm.rollout.engine.kv_cache import (
    NO_POSITION,
    REPLICATED,
    Cache,
    CacheSharding,
    ContiguousView,
    PagedView,
    WriteBuffer,
)
from jaxrl_llm.rollout.engine.layer_states import LayerStates
from jaxrl_llm.rollout.engine.logit_adjustments import LogitAdjustments
from jaxrl_llm.rollout.engine.prefill import Prefix
from jaxrl_llm.rollout.engine.requests import NUM_STOP_TOKENS
from jaxrl_llm.rollout.engine.token_sampling import SamplerState, TokenMasks

NO_CACHE = Cache((), ())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """State of all decode slots. A slot is active while `remaining` is positive."""

    cache: Cache
    tokens: Int[Array, " S"]  # sampled last, not in the cache yet
    positions: Int[Array, " S"]  # of that token in its sequence
    # added for rotary positions: images use fewer positions than tokens
    rotary_offsets: Int[Array, " S"]
    remaining: Int[Array, " S"]  # tokens that may still be sampled
    stop_tokens: Int[Array, "S stops"]  # tokens that end the sample; -1 is none
    history: Int[Array, "S T"]  # all tokens by position, for speculation; T is 0 without
    sampler: SamplerState
    layer_states: LayerStates = ()  # after the tokens before the last one

    @property
    def small(self) -> "DecodeState":
        """The state of the slots without what layers keep of their sequences."""
        return dataclasses.replace(self, cache=NO_CACHE, layer_states=())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """Sampled tokens; shares no memory with the state, so it survives the next call's donation.

    "rounds" are steps times the most tokens per slot and step. `insert` has one round, and S counts
    its samples.
    """

    tokens: Int[Array, "rounds S"]  # -1: none, the slot was inactive or a draft rejected
    log_probs: Float[Array, "rounds S"]
    top_tokens: Int[Array, "rounds S k"]
    top_log_probs: Float[Array, "rounds S k"]
    support: Int[Array, "rounds S n"]  # tokens among which each was drawn; -1: padding
    # Experts chosen for the token before each; empty from `insert`.
    routes: Int[Array, "rounds S routes"]
    remaining: Int[Array, " S"]  # tokens that may still be sampled; 0: the sample ended


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InsertArgs:
    """Samples that enter slots. A slot number past the last one is padding."""

    prompt_indices: Int[Array, " n"]  # index in the prefix
    slots: Int[Array, " n"]
    max_new_tokens: Int[Array, " n"]  # tokens that may be sampled, at least 1
    stop_tokens: Int[Array, "n stops"]
    sampler: SamplerState
    rotary_offsets: Int[Array, " n"]  # of rotary positions, see `DecodeState`
    adjustments: LogitAdjustments | None = None  # None: logits are sampled from as they are
    masks: TokenMasks | None = None  # tokens that grammars allow; None: no sample has a grammar


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageWrites:
    """Prefix tokens to write to pages. A page id past the last one is padding."""

    page_ids: Int[Array, " n"]
    prompt_indices: Int[Array, " n"]  # index in the prefix
    offsets: Int[Array, " n"]  # of the page's first token in the prompt


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkedPrefill:
    """Tokens of n samples that follow those in their pages (chunked prefill)."""

    tokens: Int[Array, "n W"]
    lengths: Int[Array, " n"]  # of each without padding, at least 1
    cached_lengths: Int[Array, " n"]  # tokens in the cache before them
    table: Int[Array, "n pages"]
    history: Int[Array, "n T"]  # all tokens by position, for speculation; T is 0 without
    sights: ImageInputs | None = None  # image inputs; None: no images


def empty_state(
    network: Network,
    num_slots: int,
    num_pages: int,
    page_tokens: int,
    history_tokens: int = 0,
    *,
    transposed_values: bool = False,
    rings: tuple[int, ...] = (),
) -> DecodeState:
    """Free slots and an empty cache; speculation needs `history_tokens` of the longest sequence.

    `transposed_values` and `rings` as in `Cache`.
    """
    page_sizes = num_pages, page_tokens
    zeros = jnp.zeros(num_slots, jnp.int32)
    ones = jnp.ones(num_slots, jnp.float32)
    keys = jnp.zeros((num_slots, 2), jnp.uint32)
    return DecodeState(
        cache=kv_cache.empty_cache(
            network.shape,
            *page_sizes,
            network.cached_dtype,
            transposed_values=transposed_values,
            rings=rings,
            num_slots=num_slots,
        ),
        tokens=zeros,
        positions=zeros,
        rotary_offsets=zeros,
        remaining=zeros,
        stop_tokens=jnp.full((num_slots, NUM_STOP_TOKENS), -1, jnp.int32),
        history=jnp.zeros((num_slots, history_tokens), jnp.int32),
        sampler=SamplerState(keys, ones, zeros, ones, jnp.zeros_like(ones), zeros),
        layer_states=layer_states.empty_states(network, num_slots),
    )


def insert(
    state: DecodeState,
    prefix: Prefix,
    admission: InsertArgs,
    writes: PageWrites,
    *,
    split: CacheSharding = REPLICATED,
    filtered: bool,
    num_top: int,
    num_support: int = 0,
) -> tuple[DecodeState, Outputs]:
    """Writes prompts to pages and samples the first token of each sample, a column of outputs."""
    a = admission
    lengths, logits = prefix.lengths[a.prompt_indices], prefix.logits[a.prompt_indices]
    switches: Any = {"filtered": filtered, "num_top": num_top, "num_support": num_support}
    state, outputs = _enter(state, a, logits, lengths, **switches)
    history = state.history
    if history.shape[1]:
        # Tokens past the end of a prompt are overwritten before they are read.
        starts, width = prefix.starts[a.prompt_indices], prefix.width
        cut = lambda at: lax.dynamic_slice_in_dim(prefix.tokens, at, width)  # noqa: E731
        history = history.at[a.slots, :width].set(jax.vmap(cut)(starts), mode="drop")
        history = history.at[a.slots, lengths].set(outputs.tokens[0], mode="drop")
    starts = prefix.starts[writes.prompt_indices] + writes.offsets
    cache = kv_cache.write_prompt_pages(
        state.cache, split, writes.page_ids, starts, prefix.keys, prefix.values
    )
    prompt_starts = prefix.starts[a.prompt_indices]
    cache = kv_cache.write_prompt_rings(
        cache, split, a.slots, prompt_starts, lengths, prefix.keys, prefix.values
    )
    # A row of a prefix holds one prompt where layers have states.
    rows = prompt_starts // prefix.width
    states = layer_states.write_slots(
        state.layer_states, a.slots, jax.tree.map(lambda array: array[rows], prefix.states)
    )
    state = dataclasses.replace(state, cache=cache, history=history, layer_states=states)
    return state, outputs


def _enter(
    state: DecodeState,
    admission: InsertArgs,
    logits: Float[Array, "n V"],
    lengths: Int[Array, " n"],
    *,
    filtered: bool,
    num_top: int,
    num_support: int,
) -> tuple[DecodeState, Outputs]:
    """Samples the token after the first `lengths` of each sample, and initializes its slot."""
    if (adjustments := admission.adjustments) is not None:
        vocab_size = logits.shape[-1]
        counts = logit_adjustments.token_counts(adjustments, vocab_size)
        bias = logit_adjustments.dense_bias(adjustments, vocab_size)
        logits = logit_adjustments.adjusted_logits(
            logits[:, None], lengths[:, None], adjustments, bias, counts, adjustments.history[:, :0]
        )[:, 0]
    if admission.masks is not None:
        logits = token_sampling.mask_logits(logits, admission.masks)
    tokens, log_probs, support = token_sampling.sample_with_support(
        logits, lengths, admission.sampler, filtered=filtered, num_support=num_support
    )
    tops = token_sampling.top_log_probs(logits, admission.sampler, num_top)
    remaining = jnp.where(is_stop(tokens, admission.stop_tokens), 0, admission.max_new_tokens - 1)

    def write_slots(target, value):
        return target.at[admission.slots].set(value, mode="drop")

    state = dataclasses.replace(
        state,
        tokens=write_slots(state.tokens, tokens),
        positions=write_slots(state.positions, lengths),
        rotary_offsets=write_slots(state.rotary_offsets, admission.rotary_offsets),
        remaining=write_slots(state.remaining, remaining),
        stop_tokens=write_slots(state.stop_tokens, admission.stop_tokens),
        sampler=jax.tree.map(write_slots, state.sampler, admission.sampler),
    )
    no_routes = jnp.zeros((len(tokens), 0), ROUTE_DTYPE)
    columns = [a[None] for a in (tokens, log_probs, *tops, support, no_routes)]
    return state, Outputs(*[*columns, remaining + 0])


def extend(
    network: Network,
    params: Params,
    state: DecodeState,
    continuation: ChunkedPrefill,
    admission: InsertArgs,
    *,
    split: CacheSharding = REPLICATED,
    window: int,
    reader: CacheReader,
    filtered: bool,
    num_top: int,
    num_support: int = 0,
    keeps_routes: bool = False,
) -> tuple[DecodeState, Outputs, Int[Array, "n W routes"]]:
    """Chunked prefill: reads tokens that follow those in pages, and samples the next of each.

    Args:
      admission: As for `insert`; `prompt_indices` is not used.
      window: Static; at least the cached tokens of every sample.
      reader: Static, as for `generate`; but on accelerators this many queries read a copy.

    Returns:
      The state, outputs as from `insert`, and the experts that the router chose for the tokens;
      [n, W, 0] unless `keeps_routes`.
    """
    (count, width), sights = continuation.tokens.shape, continuation.sights
    slots = len(state.tokens)
    query_positions = continuation.cached_lengths[:, None] + jnp.arange(width)
    is_token = (jnp.arange(width) < continuation.lengths[:, None]) & (admission.slots < slots)[
        :, None
    ]
    positions = jnp.where(is_token, query_positions, NO_POSITION)
    states = layer_states.read_slots(
        state.layer_states, admission.slots, continuation.cached_lengths == 0
    )
    recent = kv_cache.empty_write_buffer(
        network.shape, count, width, state.cache.keys[0].dtype, states
    )
    table, rows = continuation.table, admission.slots
    cache_view: ContiguousView | PagedView = PagedView(state.cache, table, {}, reader, rows)
    if reader != "own":
        cache_view = kv_cache.gather_pages(
            state.cache, split, table, window, by_slot=False, slots=rows
        )
    visibility = decode_attention.make_visibility(
        network.shape,
        query_positions,
        continuation.cached_lengths,
        positions,
        cache_view,
    )
    offsets = admission.rotary_offsets[:, None]
    rotary = network.rotary(query_positions + offsets if sights is None else sights.positions)
    x, recent, routes, _ = forward_layers(
        network,
        params,
        cache_view,
        split,
        recent,
        jnp.int32(0),
        continuation.tokens,
        rotary,
        visibility,
        is_token,
        sights,
    )
    recent = dataclasses.replace(recent, positions=positions)
    last_hidden = jnp.take_along_axis(x, (continuation.lengths - 1)[:, None, None], axis=1)
    logits = network.logits(params, network.norm(params, last_hidden))[:, 0]
    lengths = continuation.cached_lengths + continuation.lengths
    switches: Any = {"filtered": filtered, "num_top": num_top, "num_support": num_support}
    state, outputs = _enter(state, admission, logits, lengths, **switches)
    history = state.history
    if history.shape[1]:
        history = history.at[admission.slots].set(continuation.history, mode="drop")
        history = history.at[admission.slots, lengths].set(outputs.tokens[0], mode="drop")
    # Writing the donated cache before all layers have read it would copy it. The page table and the
    # slots of rings get a fake dependency on the output (+ 0), so that the write comes last.
    zero = x[0, 0, 0] > jnp.inf
    cache = kv_cache.flush_buffer(
        state.cache, split, recent, table + zero, by_slot=False, slots=rows + zero
    )
    states = layer_states.write_slots(state.layer_states, admission.slots, recent.states)
    state = dataclasses.replace(state, cache=cache, history=history, layer_states=states)
    return state, outputs, routes[..., : network.num_routes if keeps_routes else 0]


def move(state: DecodeState, sources: Int[Array, " n"], targets: Int[Array, " n"]) -> DecodeState:
    """Moves samples to free slots with their states and rings, other pages unchanged; a target past
    the last slot is padding.
    """
    put = lambda a, value: a.at[targets].set(value, mode="drop")  # noqa: E731
    slots = state.remaining.shape[0]
    vacated = jnp.where(targets < slots, sources, slots)
    remaining = put(state.remaining.at[vacated].set(0, mode="drop"), state.remaining[sources])
    moved = dataclasses.replace(state, cache=NO_CACHE)
    moved = jax.tree.map(lambda a: put(a, a[sources]), moved)
    cache = kv_cache.move_rings(state.cache, sources, targets)
    return dataclasses.replace(moved, cache=cache, remaining=remaining)


def release(state: DecodeState, slots: Bool[Array, " S"]) -> DecodeState:
    """Deactivates slots, ending their samples."""
    return dataclasses.replace(state, remaining=jnp.where(slots, 0, state.remaining))


def is_stop(tokens: Int[Array, " S"], stops: Int[Array, "S stops"]) -> Bool[Array, " S"]:
    return (tokens[:, None] == stops).any(-1)


def forward_layers(
    network: Network,
    params: Params,
    cache_view: ContiguousView | PagedView,
    split: CacheSharding,
    recent: WriteBuffer,
    start: Int[Array, ""],
    inputs: Int[Array, "S Q"],
    rotary: Any,
    visibility: decode_attention.Visibility,
    is_token: Bool[Array, "S Q"],
    sights: ImageInputs | None = None,
) -> tuple[
    Float[Array, "S Q D"], WriteBuffer, Int[Array, "S Q routes"], tuple[GatedDeltaInputs, ...]
]:
    """Last hidden states, the buffer with keys, values and states of these tokens, routes, and what
    recurrent layers read, for `layer_states.advanced`.

    States do not change where `is_token` is false.
    """
    x = network.embed(params, inputs, sights)
    paged: list[tuple[Array, ...]] = []
    states: list[LayerState] = []
    recurrent_inputs: list[GatedDeltaInputs] = []
    chosen_experts = []
    for layer, kind in zip(params["layers"], network.shape.layer_types, strict=True):

        def attend(a: AttentionInputs | GatedDeltaInputs):
            if isinstance(a, GatedDeltaInputs):
                recurrent_inputs.append(a)
                return a.after_state(recent.states[len(states)], is_token)
            layer_recent = kv_cache.append_to_buffer(recent, len(paged), start, a.cache_entries)
            return decode_attention.cached_attention(
                network, cache_view, split, len(paged), a, layer_recent, visibility
            ), layer_recent

        x, kept, routed = network.block(
            layer, x, rotary, attend, kind, compressed=True, image_inputs=sights
        )
        (paged if kind.mixer == "attention" else states).append(kept)
        chosen_experts += [routed.chosen] if routed else []
    keys, *values = zip(*paged, strict=True)
    no_routes = jnp.zeros((*inputs.shape, 0), ROUTE_DTYPE)
    routes = network.flatten_routes(jnp.stack(chosen_experts)) if chosen_experts else no_routes
    return (
        x,
        WriteBuffer(keys, values[0] if values else (), recent.positions, tuple(states)),
        routes,
        tuple(recurrent_inputs),
    )
