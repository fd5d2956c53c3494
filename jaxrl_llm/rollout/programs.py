"""What the device runs during rollout once prompts are read: insert, move, release, generate.

Rollout parameters and the cache have one entry per layer instead of stacked layers: a decode step
that scans stacked arrays copies the whole cache every step.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.attention_layers import Attention
from jaxrl_llm.models.sights import Sights
from jaxrl_llm.models.transformer import ROUTE_DTYPE, Network, Params
from jaxrl_llm.rollout import attending, sampling
from jaxrl_llm.rollout import cache as cache_lib
from jaxrl_llm.rollout.attending import Reader
from jaxrl_llm.rollout.cache import NOWHERE, WHOLE, Cache, Gathered, Paged, Recent, Split
from jaxrl_llm.rollout.prefill import Prefix
from jaxrl_llm.rollout.requests import NUM_STOP_TOKENS
from jaxrl_llm.rollout.sampling import SamplerState

NO_CACHE = Cache((), ())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """All slots. A slot is active while `remaining` is positive."""

    cache: Cache
    tokens: Int[Array, " S"]  # sampled last, not yet in the cache
    positions: Int[Array, " S"]  # where that token stands in its sequence
    offsets: Int[Array, " S"]  # of rotary positions from these: images take fewer than tokens
    remaining: Int[Array, " S"]  # tokens that may still be sampled
    stops: Int[Array, "S stops"]  # tokens that end the sample; -1 is none
    history: Int[Array, "S T"]  # all tokens by position, for speculation; T is 0 without
    sampler: SamplerState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """What was sampled; shares no memory with the state, so it outlives the next call.

    "rounds" are steps times the tokens that a step may give a slot. An `insert` has one round, S
    counts its samples.
    """

    tokens: Int[Array, "rounds S"]  # -1: none, the slot was not active or a guess was wrong
    log_probs: Float[Array, "rounds S"]
    top_tokens: Int[Array, "rounds S k"]
    top_log_probs: Float[Array, "rounds S k"]
    # Experts that the token before each visited; none are kept of an `insert`.
    routes: Int[Array, "rounds S routes"]
    remaining: Int[Array, " S"]  # tokens that may still be sampled; 0: the sample ended


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Admission:
    """Which samples enter which slots. A slot number past the last one is padding."""

    prompts: Int[Array, " n"]  # of the prefix
    slots: Int[Array, " n"]
    limits: Int[Array, " n"]  # tokens that may be sampled, at least 1
    stops: Int[Array, "n stops"]
    sampler: SamplerState
    offsets: Int[Array, " n"]  # of rotary positions, see `DecodeState`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Writes:
    """Which tokens of a prefix go to which pages. A page past the last one is padding."""

    pages: Int[Array, " n"]
    prompts: Int[Array, " n"]  # of the prefix
    offsets: Int[Array, " n"]  # of the page's first token in the prompt


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Continuation:
    """Tokens that follow those that pages hold, of n samples."""

    tokens: Int[Array, "n W"]
    lengths: Int[Array, " n"]  # tokens of each that count, at least 1
    kept: Int[Array, " n"]  # tokens in the cache that go before them
    table: Int[Array, "n pages"]
    history: Int[Array, "n T"]  # all tokens by position, for speculation; T is 0 without
    sights: Sights | None = None  # of those with images


def empty_state(
    network: Network,
    num_slots: int,
    num_pages: int,
    page_tokens: int,
    history_tokens: int = 0,
    *,
    turned: bool = False,
) -> DecodeState:
    """Returns free slots and pages; speculation needs a history of the longest sequence.

    `turned` as of `Cache`.
    """
    pages = num_pages, page_tokens
    zeros = jnp.zeros(num_slots, jnp.int32)
    ones = jnp.ones(num_slots, jnp.float32)
    keys = jnp.zeros((num_slots, 2), jnp.uint32)
    return DecodeState(
        cache=cache_lib.empty(network.shape, *pages, network.cached_dtype, turned=turned),
        tokens=zeros,
        positions=zeros,
        offsets=zeros,
        remaining=zeros,
        stops=jnp.full((num_slots, NUM_STOP_TOKENS), -1, jnp.int32),
        history=jnp.zeros((num_slots, history_tokens), jnp.int32),
        sampler=SamplerState(keys, ones, zeros, ones, jnp.zeros_like(ones)),
    )


def insert(
    state: DecodeState,
    prefix: Prefix,
    admission: Admission,
    writes: Writes,
    *,
    split: Split = WHOLE,
    filtered: bool,
    num_top: int,
) -> tuple[DecodeState, Outputs]:
    """Copies prompts into pages and samples the first token of each sample, a column of outputs."""
    a = admission
    lengths, logits = prefix.lengths[a.prompts], prefix.logits[a.prompts]
    state, outputs = _enter(state, a, logits, lengths, filtered, num_top)
    history = state.history
    if history.shape[1]:
        # What follows a prompt is overwritten before it is read.
        starts, width = prefix.starts[a.prompts], prefix.width
        cut = lambda at: lax.dynamic_slice_in_dim(prefix.tokens, at, width)  # noqa: E731
        history = history.at[a.slots, :width].set(jax.vmap(cut)(starts), mode="drop")
        history = history.at[a.slots, lengths].set(outputs.tokens[0], mode="drop")
    starts = prefix.starts[writes.prompts] + writes.offsets
    cache = cache_lib.fill(state.cache, split, writes.pages, starts, prefix.keys, prefix.values)
    return dataclasses.replace(state, cache=cache, history=history), outputs


def _enter(
    state: DecodeState, a: Admission, logits, lengths, filtered: bool, num_top: int
) -> tuple[DecodeState, Outputs]:
    """Samples what follows `lengths` tokens of samples, and sets their slots up to go on."""
    tokens, log_probs = sampling.sample(logits, lengths, a.sampler, filtered=filtered)
    tops = sampling.top_log_probs(logits, a.sampler, num_top)
    remaining = jnp.where(_is_stop(tokens, a.stops), 0, a.limits - 1)

    def put(target, value):
        return target.at[a.slots].set(value, mode="drop")

    state = dataclasses.replace(
        state,
        tokens=put(state.tokens, tokens),
        positions=put(state.positions, lengths),
        offsets=put(state.offsets, a.offsets),
        remaining=put(state.remaining, remaining),
        stops=put(state.stops, a.stops),
        sampler=jax.tree.map(put, state.sampler, a.sampler),
    )
    nothing = jnp.zeros((len(tokens), 0), ROUTE_DTYPE)
    round_of_one = [a[None] for a in (tokens, log_probs, *tops, nothing)]
    return state, Outputs(*[*round_of_one, remaining + 0])


def extend(
    network: Network,
    params: Params,
    state: DecodeState,
    more: Continuation,
    admission: Admission,
    *,
    split: Split = WHOLE,
    window: int,
    reader: Reader,
    filtered: bool,
    num_top: int,
    keeps_routes: bool = False,
) -> tuple[DecodeState, Outputs, Int[Array, "n W routes"]]:
    """Reads tokens that follow what pages hold, and samples the next of each.

    Args:
      admission: As of `insert`; `prompts` is not used.
      window: Static. No sample keeps more tokens.
      reader: Static, as of `generate`; but on accelerators so many queries read a copy.

    Returns:
      The state, the outputs as of `insert`, and the experts that the tokens visited, which chose
      for themselves; [n, W, 0] if routes are not kept.
    """
    (count, width), slots, sights = more.tokens.shape, len(state.tokens), more.sights
    places = more.kept[:, None] + jnp.arange(width)
    counted = (jnp.arange(width) < more.lengths[:, None]) & (admission.slots < slots)[:, None]
    positions = jnp.where(counted, places, NOWHERE)
    recent = cache_lib.no_recent(network.shape, count, width, state.cache.keys[0].dtype)
    gather = reader != "own"
    held: Gathered | Paged = Paged(state.cache, more.table, {}, reader)
    if gather:
        held = cache_lib.gathered(state.cache, split, more.table, window, by_slot=False)
    seen = attending.sight(network.shape, places, more.kept, positions, window if gather else 0)
    offsets = admission.offsets[:, None]
    rotary = network.rotary(places + offsets if sights is None else sights.positions)
    x, keys, values, routes = _forward(
        network, params, held, split, recent, jnp.int32(0), more.tokens, rotary, seen, sights
    )
    last = jnp.take_along_axis(x, (more.lengths - 1)[:, None, None], axis=1)
    logits = network.logits(params, network.norm(params, last))[:, 0]
    lengths = more.kept + more.lengths
    state, outputs = _enter(state, admission, logits, lengths, filtered, num_top)
    history = state.history
    if history.shape[1]:
        history = history.at[admission.slots].set(more.history, mode="drop")
        history = history.at[admission.slots, lengths].set(outputs.tokens[0], mode="drop")
    # Keys written before the old ones are read would copy the cache; what it adds to pages is 0.
    table = more.table + (x[0, 0, 0] > jnp.inf)
    recent = Recent(keys, values, positions)
    cache = cache_lib.join(state.cache, split, recent, table, by_slot=False)
    state = dataclasses.replace(state, cache=cache, history=history)
    return state, outputs, routes[..., : network.num_routes if keeps_routes else 0]


def move(state: DecodeState, sources: Int[Array, " n"], targets: Int[Array, " n"]) -> DecodeState:
    """Takes samples from slots to free slots; a target past the last is none. Pages stay."""
    put = lambda a, value: a.at[targets].set(value, mode="drop")  # noqa: E731
    slots = state.remaining.shape[0]
    left = jnp.where(targets < slots, sources, slots)
    remaining = put(state.remaining.at[left].set(0, mode="drop"), state.remaining[sources])
    small = dataclasses.replace(state, cache=NO_CACHE)
    small = jax.tree.map(lambda a: put(a, a[sources]), small)
    return dataclasses.replace(small, cache=state.cache, remaining=remaining)


def release(state: DecodeState, slots: Bool[Array, " S"]) -> DecodeState:
    """Ends the samples in these slots, whatever they might still do."""
    return dataclasses.replace(state, remaining=jnp.where(slots, 0, state.remaining))


def _is_stop(tokens: Int[Array, " S"], stops: Int[Array, "S stops"]) -> Bool[Array, " S"]:
    return (tokens[:, None] == stops).any(-1)


def generate(
    network: Network,
    params: Params,
    state: DecodeState,
    table: Int[Array, "S pages"],
    free_target: Int[Array, ""],
    *,
    split: Split = WHOLE,
    num_steps: int,
    num_slots: int,
    window: int,
    reader: Reader,
    filtered: bool,
    num_top: int,
    draft_tokens: int = 0,
    ngram_tokens: int = 0,
    keeps_routes: bool = False,
) -> tuple[DecodeState, Outputs]:
    """Decodes until `num_steps` are done or `free_target` slots are free, to be refilled soon.

    Args, all static but the table, which has the pages of all slots:
      split: How slots and pages are split over devices.
      num_slots: Slots from this one on are free and cost nothing.
      window: No slot has more tokens before the first step.
      reader: How the cache is read.
      num_top: Likeliest tokens to report.
      keeps_routes: Whether to report the experts that tokens visit.
    """
    width = 1 + draft_tokens
    table = table[:num_slots]
    small = dataclasses.replace(state, cache=NO_CACHE)
    live = jax.tree.map(lambda a: a[:num_slots], small)
    ends = live.positions  # of what the pages hold
    cached = network.shape, state.cache, split, table
    held = attending.held(*cached, jnp.where(live.remaining > 0, ends, 0), window, reader)
    size = num_steps * width
    recent = cache_lib.no_recent(network.shape, num_slots, size, state.cache.keys[0].dtype)
    first = live.positions[:, None]
    angles = network.rotary(first + live.offsets[:, None] + jnp.arange(size))
    num_routes = network.num_routes if keeps_routes else 0

    def step(carry):
        """Feeds every active slot its last token and samples the next.

        With speculation it feeds Q - 1 guesses after that token, samples after each of them, and
        keeps what follows right ones. Inactive slots compute too and change nothing. This step's
        tokens stand in `recent` from `start` on; `live` are the slots without their cache.
        """
        number, live, recent, kept = carry
        start = number * width
        active = live.remaining > 0
        fed = live.tokens[:, None]  # [S, Q]
        drafts = fed[:, :0]
        if draft_tokens:
            history = live.history[:, : window + size]
            drafts = sampling.guesses(history, live.positions, draft_tokens, ngram_tokens)
            fed = jnp.concatenate([fed, jnp.maximum(drafts, 0)], axis=1)
        places = live.positions[:, None] + jnp.arange(width)

        def placed(count: Int[Array, " S"]) -> Int[Array, "S recent"]:
            positions = jnp.where(jnp.arange(width) < count[:, None], places, NOWHERE)
            return lax.dynamic_update_slice_in_dim(recent.positions, positions, start, axis=1)

        positions = placed(jnp.where(active, width, 0))
        # Kernels skip what is not seen, and each layer of each step would compute it again.
        in_pages = jnp.where(active, ends, 0)
        copied = window if reader == "gather" else 0
        seen = attending.sight(network.shape, places, in_pages, positions, copied)
        steps = (places - first)[:, :, None, None]
        rotary = jax.tree.map(lambda table: jnp.take_along_axis(table, steps, axis=1), angles)
        x, keys, values, routes = _forward(
            network, params, held, split, recent, start, fed, rotary, seen
        )
        logits = network.logits(params, network.norm(params, x))
        routes = routes[..., :num_routes]
        following = places + 1
        flat = logits.reshape(num_slots * width, -1)
        sampler = jax.tree.map(lambda a: jnp.repeat(a, width, axis=0), live.sampler)
        sampled = (
            *sampling.sample(flat, following.reshape(-1), sampler, filtered=filtered),
            *sampling.top_log_probs(flat, sampler, num_top),
        )
        drawn, log_probs, *tops = (a.reshape(num_slots, width, *a.shape[1:]) for a in sampled)
        if draft_tokens:
            given = sampling.kept_draws(drawn, drafts, live.stops, live.remaining)
            count = given.sum(axis=1)
            last = jnp.take_along_axis(drawn, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
            end = live.history.shape[1]  # past it: dropped
            write_at = jnp.where(given, following, end + jnp.arange(width))
            history = live.history.at[jnp.arange(num_slots)[:, None], write_at].set(
                drawn, mode="drop", unique_indices=True
            )
            positions = placed(count)
        else:
            given, count, last, history = active[:, None], active, drawn[:, 0], live.history
        tokens = jnp.where(active, last, live.tokens)
        left = jnp.where(_is_stop(tokens, live.stops), 0, live.remaining - count)
        live = dataclasses.replace(
            live,
            tokens=tokens,
            positions=live.positions + count,
            remaining=jnp.where(active, left, 0),
            history=history,
        )
        found = (jnp.where(given, drawn, -1), jnp.where(given, log_probs, 0.0), *tops, routes)
        kept = tuple(
            array.at[number].set(jnp.swapaxes(row, 0, 1))
            for array, row in zip(kept, found, strict=True)
        )
        return number + 1, live, Recent(keys, values, positions), kept

    def unfinished(carry):
        number, live, *_ = carry
        return (number < num_steps) & ((live.remaining == 0).sum() < free_target)

    dims = (num_steps, width, num_slots)
    tokens, log_probs = jnp.full(dims, -1, jnp.int32), jnp.zeros(dims, jnp.float32)
    tops = (jnp.zeros((*dims, num_top), dtype) for dtype in (jnp.int32, jnp.float32))
    blank = (tokens, log_probs, *tops, jnp.zeros((*dims, num_routes), ROUTE_DTYPE))
    _, live, recent, kept = lax.while_loop(unfinished, step, (0, live, recent, blank))
    cache = cache_lib.join(state.cache, split, recent, table, by_slot=True)
    rounds = [a.reshape(size, *a.shape[2:]) for a in kept]
    small = jax.tree.map(lambda whole, part: whole.at[:num_slots].set(part), small, live)
    return dataclasses.replace(small, cache=cache), Outputs(*[*rounds, live.remaining + 0])


def _forward(network, params, held, split, recent, start, fed, rotary, seen, sights=None):
    """Returns the last hidden states [S, Q, D], recent keys and values, and routes."""
    x = network.embed(params, fed, sights)
    kept, visited = [], []
    for i, (layer, kind) in enumerate(zip(params["layers"], network.shape.kinds, strict=True)):

        def attend(a: Attention, i=i):
            added = cache_lib.add(recent, i, start, a.cached)
            return attending.attend(network, held, split, i, a, added, seen), added

        x, added, routed = network.block(layer, x, rotary, attend, kind, compressed=True)
        kept.append(added)
        visited += [routed.chosen] if routed else []
    keys, *values = zip(*kept, strict=True)
    nothing = jnp.zeros((*fed.shape, 0), ROUTE_DTYPE)
    routes = network.routes(jnp.stack(visited)) if visited else nothing
    return x, keys, values[0] if values else (), routes
