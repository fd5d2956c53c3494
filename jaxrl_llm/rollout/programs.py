"""What the device runs during rollout once prompts are read: insert, move, release, generate.

Rollout parameters and the cache have one entry per layer instead of stacked layers: a decode step
that scans stacked arrays copies the whole cache every step.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.attention_layers import Attention
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.models.sights import Sights
from jaxrl_llm.models.transformer import ROUTE_DTYPE, Network, Params
from jaxrl_llm.rollout import cache as cache_lib
from jaxrl_llm.rollout import sampling
from jaxrl_llm.rollout.cache import NOWHERE, Cache, Recent
from jaxrl_llm.rollout.prefill import Prefix
from jaxrl_llm.rollout.requests import NUM_STOP_TOKENS
from jaxrl_llm.rollout.sampling import SamplerState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """All slots. A slot is active while `remaining` is positive."""

    cache: Cache  # of T positions
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
class Continuation:
    """Tokens that follow those that n slots hold."""

    tokens: Int[Array, "n W"]
    lengths: Int[Array, " n"]  # tokens of each that count, at least 1
    kept: Int[Array, " n"]  # tokens in the cache that go before them
    sights: Sights | None = None  # of those with images


def empty_state(
    network: Network, num_slots: int, blocks: Sequence[int], *, keeps_history: bool = False
) -> DecodeState:
    """Returns free slots; `blocks` are the sizes of the cache's, speculation needs the history."""
    zeros = jnp.zeros(num_slots, jnp.int32)
    ones = jnp.ones(num_slots, jnp.float32)
    keys = jnp.zeros((num_slots, 2), jnp.uint32)
    return DecodeState(
        cache=cache_lib.empty(network.shape, num_slots, blocks, network.cached_dtype),
        tokens=zeros,
        positions=zeros,
        offsets=zeros,
        remaining=zeros,
        stops=jnp.full((num_slots, NUM_STOP_TOKENS), -1, jnp.int32),
        history=jnp.zeros((num_slots, sum(blocks) if keeps_history else 0), jnp.int32),
        sampler=SamplerState(keys, ones, zeros, ones, jnp.zeros_like(ones)),
    )


def insert(
    state: DecodeState, prefix: Prefix, admission: Admission, *, filtered: bool, num_top: int
) -> tuple[DecodeState, Outputs]:
    """Copies prefixes into slots and samples the first token of each, a column of the outputs."""
    a = admission
    lengths, logits = prefix.lengths[a.prompts], prefix.logits[a.prompts]
    state, outputs = _enter(state, a, logits, lengths, filtered, num_top)
    width, starts = prefix.width, prefix.starts[a.prompts]

    def cut(rows, axis):
        # What follows a prompt is overwritten before it is read.
        return jax.vmap(lambda at: lax.dynamic_slice_in_dim(rows, at, width, axis))(starts)

    history = state.history
    if history.shape[1]:
        history = history.at[a.slots, :width].set(cut(prefix.tokens, 0), mode="drop")
        history = history.at[a.slots, lengths].set(outputs.tokens[0], mode="drop")
    keys, values = ([cut(rows, 1) for rows in layers] for layers in (prefix.keys, prefix.values))
    cache = cache_lib.fill(state.cache, a.slots, keys, values)
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
    window: int,
    filtered: bool,
    num_top: int,
    keeps_routes: bool = False,
) -> tuple[DecodeState, Outputs, Int[Array, "n W routes"]]:
    """Reads tokens that follow what slots hold, and samples the next of each.

    Args:
      admission: As of `insert`; `prompts` is not used.
      window: Static. No slot keeps more tokens.

    Returns:
      The state, the outputs as of `insert`, and the experts that the tokens visited, which chose
      for themselves; [n, W, 0] if routes are not kept.
    """
    (count, width), slots, sights = more.tokens.shape, len(state.tokens), more.sights
    padding = slots + jnp.arange(count)  # all different, as `join` wants them
    a = dataclasses.replace(
        admission, slots=jnp.where(admission.slots < slots, admission.slots, padding)
    )
    places = more.kept[:, None] + jnp.arange(width)
    positions = jnp.where(jnp.arange(width) < more.lengths[:, None], places, NOWHERE)
    recent = cache_lib.no_recent(network.shape, count, width, state.cache.keys[0][0].dtype)
    in_cache = jnp.arange(window) < more.kept[:, None]
    x, keys, values, routes = _forward(
        network,
        params,
        cache_lib.of_slots(state.cache, a.slots, window),
        recent,
        jnp.int32(0),
        more.tokens,
        network.rotary(places + a.offsets[:, None] if sights is None else sights.positions),
        _seen(network.shape, places, in_cache, positions),
        sights,
    )
    last = jnp.take_along_axis(x, (more.lengths - 1)[:, None, None], axis=1)
    logits = network.logits(params, network.norm(params, last))[:, 0]
    lengths = more.kept + more.lengths
    state, outputs = _enter(state, a, logits, lengths, filtered, num_top)
    history = state.history
    if history.shape[1]:
        at = jnp.where(positions == NOWHERE, history.shape[1], positions)
        history = history.at[a.slots[:, None], at].set(more.tokens, mode="drop")
        history = history.at[a.slots, lengths].set(outputs.tokens[0], mode="drop")
    end = sum(block.shape[3] for block in state.cache.keys[0])
    # Keys written before the old ones are read would copy the cache; what it adds to slots is 0.
    at = a.slots + (x[0, 0, 0] > jnp.inf)
    cache = cache_lib.join(state.cache, Recent(keys, values, positions), end, at)
    state = dataclasses.replace(state, cache=cache, history=history)
    return state, outputs, routes[..., : network.num_routes if keeps_routes else 0]


def move(state: DecodeState, sources: Int[Array, " n"], targets: Int[Array, " n"]) -> DecodeState:
    """Copies samples from slots to slots and frees the sources; a target past the last is none.

    A source may be the target of another: samples then change places.
    """
    put = lambda a, value: a.at[targets].set(value, mode="drop")  # noqa: E731
    slots = state.remaining.shape[0]
    left = jnp.where(targets < slots, sources, slots)
    remaining = put(state.remaining.at[left].set(0, mode="drop"), state.remaining[sources])
    state = jax.tree.map(lambda a: put(a, a[sources]), state)
    return dataclasses.replace(state, remaining=remaining)


def release(state: DecodeState, slots: Bool[Array, " S"]) -> DecodeState:
    """Ends the samples in these slots, whatever they might still do."""
    return dataclasses.replace(state, remaining=jnp.where(slots, 0, state.remaining))


def _is_stop(tokens: Int[Array, " S"], stops: Int[Array, "S stops"]) -> Bool[Array, " S"]:
    return (tokens[:, None] == stops).any(-1)


def generate(
    network: Network,
    params: Params,
    state: DecodeState,
    free_target: Int[Array, ""],
    *,
    num_steps: int,
    num_slots: int,
    window: int,
    gather: bool,
    filtered: bool,
    num_top: int,
    draft_tokens: int = 0,
    ngram_tokens: int = 0,
    keeps_routes: bool = False,
) -> tuple[DecodeState, Outputs]:
    """Decodes until `num_steps` are done or `free_target` slots are free, to be refilled soon.

    Args, all static:
      num_slots: Slots from this one on are free and cost nothing.
      window: No slot has more tokens before the first step.
      gather: Whether the part of the cache that is read is copied out before the steps. On a CPU
        each matmul with part of an array copies that part; accelerators do not.
      num_top: Likeliest tokens to report.
      keeps_routes: Whether to report the experts that tokens visit.
    """
    width = 1 + draft_tokens
    read = functools.partial(cache_lib.front, state.cache, num_slots, window)
    gathered = read() if gather else None
    small = dataclasses.replace(state, cache=Cache((), ()))
    live = jax.tree.map(lambda a: a[:num_slots], small)
    # After a slot's tokens the cache holds those of earlier samples.
    in_cache = jnp.arange(window) < live.positions[:, None]
    size = num_steps * width
    recent = cache_lib.no_recent(network.shape, num_slots, size, state.cache.keys[0][0].dtype)
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
        cache = read() if gathered is None else gathered
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
        in_sight = in_cache & active[:, None]  # kernels may skip what is not seen
        # Each layer of each step would compute them again.
        seen = _seen(network.shape, places, in_sight, positions)
        steps = (places - first)[:, :, None, None]
        rotary = jax.tree.map(lambda table: jnp.take_along_axis(table, steps, axis=1), angles)
        x, keys, values, routes = _forward(network, params, cache, recent, start, fed, rotary, seen)
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
    cache = cache_lib.join(state.cache, recent, window + size)
    rounds = [a.reshape(size, *a.shape[2:]) for a in kept]
    small = jax.tree.map(lambda whole, part: whole.at[:num_slots].set(part), small, live)
    return dataclasses.replace(small, cache=cache), Outputs(*[*rounds, live.remaining + 0])


def _seen(shape: Shape, places, in_cache, positions):
    """Returns by (window, chunk) of a layer what queries at `places` see [S, Q, cache + recent].

    Args: `in_cache` [S, cache]: which positions there count; `positions` [S, recent].
    """
    old = jnp.broadcast_to(in_cache[:, None], (*places.shape, in_cache.shape[1]))
    of_keys = jnp.arange(in_cache.shape[1]), positions[:, None]
    before = [places[:, :, None] - at for at in of_keys]  # [S, Q, keys]

    def near(window: int, chunk: int, before: Int[Array, "S Q keys"]) -> Bool[Array, "S Q keys"]:
        sees = before >= 0
        if window:
            sees &= before < window
        if chunk:
            sees &= before <= (places % chunk)[:, :, None]
        return sees

    return {
        kind: jnp.concatenate([old & near(*kind, before[0]), near(*kind, before[1])], axis=-1)
        for kind in dict.fromkeys((layer.window, layer.chunk) for layer in shape.kinds)
    }


def _forward(network, params, cache, recent, start, fed, rotary, seen, sights=None):
    """Returns the last hidden states [S, Q, D], recent keys and values, and routes."""
    x = network.embed(params, fed, sights)
    kept, visited = [], []
    for i, (layer, kind) in enumerate(zip(params["layers"], network.shape.kinds, strict=True)):

        def attend(a: Attention, i=i):
            added = cache_lib.add(recent, i, start, a.cached)
            keys, values = (*cache.keys[i], added[0]), ()
            if len(added) == 2:
                values = (*cache.values[i], added[1])
            visible = seen[a.window, a.chunk]
            if network.decode_kernel:
                return network.decode_kernel(a.q, keys, values, visible), added
            given = a.q, keys, values, visible, a.scoring, a.value_size
            return cache_lib.attention(*given), added

        x, added, routed = network.block(layer, x, rotary, attend, kind, compressed=True)
        kept.append(added)
        visited += [routed.chosen] if routed else []
    keys, *values = zip(*kept, strict=True)
    nothing = jnp.zeros((*fed.shape, 0), ROUTE_DTYPE)
    routes = network.routes(jnp.stack(visited)) if visited else nothing
    return x, keys, values[0] if values else (), routes
