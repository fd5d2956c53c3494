"""What the device runs during rollout once prompts are read: insert, move, release, generate.

Pure functions of (network, rollout parameters, decode state). Rollout parameters hold one
dict per layer instead of stacked layers, and the cache one array per layer: a decode step
that scans stacked arrays copies the whole cache every step.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.rollout import sampling, speculation
from jaxrl_llm.rollout.prefill import Prefix
from jaxrl_llm.rollout.sampling import SamplerState
from jaxrl_llm.sharding.mesh import constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """All slots. A slot is active while `remaining` is positive."""

    keys: tuple[Float[Array, "S K T H"], ...]  # one per layer
    values: tuple[Float[Array, "S K T H"], ...]
    tokens: Int[Array, " S"]  # sampled last, not yet in the cache
    positions: Int[Array, " S"]  # where that token stands in its sequence
    remaining: Int[Array, " S"]  # tokens that may still be sampled
    stops: Int[Array, "S M"]  # tokens that end the sample; -1 is none
    history: Int[Array, "S T"]  # all tokens by position, for speculation; T is 0 without
    sampler: SamplerState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """What was sampled; shares no memory with the state, so it outlives the next call.

    N places: steps (one for `insert`) times the tokens that a step may give a slot. S slots (for
    `insert`: admitted samples), k likeliest tokens.
    """

    tokens: Int[Array, "N S"]  # -1: none, the slot was not active or a guess was wrong
    log_probs: Float[Array, "N S"]
    top_tokens: Int[Array, "N S k"]
    top_log_probs: Float[Array, "N S k"]
    remaining: Int[Array, " S"]  # tokens that may still be sampled; 0: the sample ended


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Admission:
    """Which samples enter which slots. A slot number past the last one is padding."""

    prompts: Int[Array, " n"]  # of the prefix
    slots: Int[Array, " n"]
    limits: Int[Array, " n"]  # tokens that may be sampled, at least 1
    stops: Int[Array, "n M"]
    sampler: SamplerState


def empty_state(
    network: Network,
    num_slots: int,
    max_tokens: int,
    num_stops: int,
    dtype,
    *,
    keeps_history: bool = False,
) -> DecodeState:
    """Returns a state in which every slot is free; speculation needs one that keeps history."""
    shape = network.shape
    cache = (num_slots, shape.num_kv_heads, max_tokens, shape.head_size)
    blank = lambda: tuple(  # noqa: E731
        constrain(jnp.zeros(cache, dtype), "batch", "kv_heads", None, None)
        for _ in range(shape.num_layers)
    )
    zeros = jnp.zeros(num_slots, jnp.int32)
    ones = jnp.ones(num_slots, jnp.float32)
    return DecodeState(
        keys=blank(),
        values=blank(),
        tokens=zeros,
        positions=zeros,
        remaining=zeros,
        stops=jnp.full((num_slots, num_stops), -1, jnp.int32),
        history=jnp.zeros((num_slots, max_tokens if keeps_history else 0), jnp.int32),
        sampler=SamplerState(
            keys=jnp.zeros((num_slots, 2), jnp.uint32),
            temperature=ones,
            top_k=zeros,
            top_p=ones,
            min_p=jnp.zeros_like(ones),
        ),
    )


def insert(
    state: DecodeState,
    prefix: Prefix,
    admission: Admission,
    *,
    filtered: bool,
    num_top: int,
) -> tuple[DecodeState, Outputs]:
    """Copies prefixes into slots and samples the first token of each.

    Samples of one prompt name the same prompt of the prefix: it was read once.

    Returns:
      The state; and one step's outputs, a column for each admitted sample.
    """
    a = admission
    lengths, logits = prefix.lengths[a.prompts], prefix.logits[a.prompts]
    tokens, log_probs = sampling.sample(logits, lengths, a.sampler, filtered=filtered)
    top_tokens, top_log_probs = sampling.top_log_probs(logits, a.sampler, num_top)
    remaining = jnp.where(_is_stop(tokens, a.stops), 0, a.limits - 1)
    width, starts = prefix.width, prefix.starts[a.prompts]

    def cut(rows, axis):
        # What follows a prompt is of no consequence: it is written over before it is seen.
        return jax.vmap(lambda at: lax.dynamic_slice_in_dim(rows, at, width, axis))(starts)

    def put(target, value):
        return target.at[a.slots].set(value, mode="drop")

    def copy(caches, prefixes):
        return tuple(
            cache.at[a.slots, :, :width].set(cut(kept, 1).astype(cache.dtype), mode="drop")
            for cache, kept in zip(caches, prefixes, strict=True)
        )

    history = state.history
    if history.shape[1]:
        history = history.at[a.slots, :width].set(cut(prefix.tokens, 0), mode="drop")
        history = history.at[a.slots, lengths].set(tokens, mode="drop")
    state = DecodeState(
        keys=copy(state.keys, prefix.keys),
        values=copy(state.values, prefix.values),
        tokens=put(state.tokens, tokens),
        positions=put(state.positions, lengths),
        remaining=put(state.remaining, remaining),
        stops=put(state.stops, a.stops),
        history=history,
        sampler=jax.tree.map(put, state.sampler, a.sampler),
    )
    outputs = Outputs(
        tokens[None], log_probs[None], top_tokens[None], top_log_probs[None], remaining + 0
    )
    return state, outputs


def move(state: DecodeState, sources: Int[Array, " n"], targets: Int[Array, " n"]) -> DecodeState:
    """Copies samples from slots to slots and frees the sources; a target past the last is none."""
    state = jax.tree.map(lambda a: a.at[targets].set(a[sources], mode="drop"), state)
    slots = state.remaining.shape[0]
    left = jnp.where(targets < slots, sources, slots)
    return dataclasses.replace(state, remaining=state.remaining.at[left].set(0, mode="drop"))


def release(state: DecodeState, slots: Bool[Array, " S"]) -> DecodeState:
    """Ends the samples in these slots, whatever they might still do."""
    return dataclasses.replace(state, remaining=jnp.where(slots, 0, state.remaining))


def _is_stop(tokens: Int[Array, " S"], stops: Int[Array, "S M"]) -> Bool[Array, " S"]:
    return (tokens[:, None] == stops).any(-1)


def decode_step(
    network: Network,
    params: Params,
    state: DecodeState,
    *,
    window: int,
    filtered: bool,
    num_top: int,
    draft_tokens: int = 0,
    ngram_tokens: int = 0,
) -> tuple[DecodeState, tuple[Array, ...]]:
    """Feeds every active slot its last token and samples the next.

    With speculation it feeds guesses behind that token, samples after each of them, and keeps what
    follows right ones. The cache then holds wrong guesses past the last token kept: they are
    written over before any query sees them. Inactive slots compute along but write nothing and
    keep their place.

    Args:
      state: Its caches may have more slots than the rest of it: those behind are left alone.
      window: Cache positions that attention reads; static, past every position fed that counts.
      filtered: See `sampling.sample`.
      num_top: Likeliest tokens to report; static.
      draft_tokens, ngram_tokens: See `speculation.propose`; static. 0: no speculation.

    Returns:
      The state; tokens (-1: none), log-probs [Q, S], likeliest tokens and theirs [Q, S, k]; Q is 1
      and the guesses.
    """
    active = state.remaining > 0
    fed = state.tokens[:, None]  # [S, Q]
    drafts = fed[:, :0]
    if draft_tokens:
        drafts = speculation.propose(
            state.history[:, :window],
            state.positions,
            draft_tokens=draft_tokens,
            ngram_tokens=ngram_tokens,
        )
        fed = jnp.concatenate([fed, jnp.maximum(drafts, 0)], axis=1)
    slots, width = fed.shape
    places = state.positions[:, None] + jnp.arange(width)
    logits, keys, values = _forward(network, params, state, fed, places, active, window)

    following = places + 1
    flat = logits.reshape(slots * width, -1)
    sampler = jax.tree.map(lambda a: jnp.repeat(a, width, axis=0), state.sampler)
    sampled = (
        *sampling.sample(flat, following.reshape(-1), sampler, filtered=filtered),
        *sampling.top_log_probs(flat, sampler, num_top),
    )
    drawn, log_probs, *tops = (a.reshape(slots, width, *a.shape[1:]) for a in sampled)
    if draft_tokens:
        given = speculation.kept(drawn, drafts, state.stops, state.remaining)
        count = given.sum(axis=1)
        last = jnp.take_along_axis(drawn, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        end = state.history.shape[1]  # past it: dropped
        write_at = jnp.where(given, following, end + jnp.arange(width))
        history = state.history.at[jnp.arange(slots)[:, None], write_at].set(
            drawn, mode="drop", unique_indices=True
        )
    else:
        given, count, last, history = active[:, None], active, drawn[:, 0], state.history
    tokens = jnp.where(active, last, state.tokens)
    left = jnp.where(_is_stop(tokens, state.stops), 0, state.remaining - count)
    state = dataclasses.replace(
        state,
        keys=keys,
        values=values,
        tokens=tokens,
        positions=state.positions + count,
        remaining=jnp.where(active, left, 0),
        history=history,
    )
    found = (jnp.where(given, drawn, -1), jnp.where(given, log_probs, 0.0), *tops)
    return state, tuple(jnp.swapaxes(a, 0, 1) for a in found)


def _forward(network, params, state, fed, places, active, window):
    """Returns logits [S, Q, V] after each token fed, and the caches with those tokens in them."""
    slots, width = fed.shape
    capacity = state.keys[0].shape[2]
    write_at = jnp.where(active[:, None], places, capacity + jnp.arange(width))  # past: dropped
    seen = jnp.arange(window) <= places[:, :, None]  # [S, Q, W]
    heads = jnp.arange(network.shape.num_kv_heads)
    # All three indices are given: a slice between them makes XLA relayout the whole cache.
    owners = jnp.repeat(jnp.arange(slots), width)
    index = (owners[:, None], heads[None], write_at.reshape(-1)[:, None])

    def attend_to(cache_k, cache_v):
        def attend(q, k, v):
            new_k, new_v = (
                cache.at[index].set(
                    a.reshape(-1, *a.shape[2:]).astype(cache.dtype),
                    mode="drop",
                    unique_indices=True,
                )
                for cache, a in ((cache_k, k), (cache_v, v))
            )
            read_k, read_v = new_k[:slots, :, :window], new_v[:slots, :, :window]
            return _attention_of_few(q, read_k, read_v, seen), (new_k, new_v)

        return attend

    x = network.embed(params, fed)
    rotary = network.rotary(places)
    kept = []
    for layer, k, v in zip(params["layers"], state.keys, state.values, strict=True):
        x, caches = network.block(layer, x, rotary, attend_to(k, v))
        kept.append(caches)
    keys, values = zip(*kept, strict=True)
    return network.logits(params, network.norm(params, x)), keys, values


def _attention_of_few(
    q: Float[Array, "S Q N H"],
    k: Float[Array, "S K W H"],
    v: Float[Array, "S K W H"],
    seen: Bool[Array, "S Q W"],
) -> Float[Array, "S Q N H"]:
    """Returns attention of a few queries a slot, with the same roundings as `full_attention`."""
    slots, width, num_heads, size = q.shape
    heads = k.shape[1]
    # The queries of all heads that share keys, and of all places, are the rows of one product.
    grouped = q.reshape(slots, width, heads, -1, size).swapaxes(1, 2)
    rows = grouped.reshape(slots, heads, -1, size)
    scores = jnp.einsum("skrh,skwh->skrw", rows, k, preferred_element_type=jnp.float32)
    may_see = jnp.repeat(seen, num_heads // heads, axis=1)[:, None]
    scores = jnp.where(may_see, scores / jnp.sqrt(size).astype(jnp.float32), -1e30)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    mixed = jnp.einsum("skrw,skwh->skrh", probabilities, v)
    mixed = mixed.reshape(grouped.shape).swapaxes(1, 2)
    return mixed.reshape(q.shape).astype(q.dtype)


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
) -> tuple[DecodeState, Outputs]:
    """Decodes until `num_steps` are done or `free_target` slots are free.

    The second lets the host refill slots soon without looking after every token.

    Args:
      num_steps, num_slots, window: Static. Slots from `num_slots` on are free and cost nothing.
      gather: Whether the part of the cache in use is copied out before the steps and back after
        them; static. On a CPU a step that reads part of a larger array copies that part each
        time; on accelerators it does not, and the second copy would cost memory.
      draft_tokens, ngram_tokens: See `decode_step`.
    """
    used_slots, used_window = (num_slots, window) if gather else state.keys[0].shape[::2]

    def used(cache):
        return cache[:used_slots, :, :used_window]

    caches = (state.keys, state.values)
    keys, values = jax.tree.map(used, caches)
    small = dataclasses.replace(state, keys=(), values=())
    front = jax.tree.map(lambda a: a[:num_slots], small)
    live = dataclasses.replace(front, keys=keys, values=values)
    step_of = functools.partial(
        decode_step,
        network,
        params,
        window=window,
        filtered=filtered,
        num_top=num_top,
        draft_tokens=draft_tokens,
        ngram_tokens=ngram_tokens,
    )

    def unfinished(carry):
        step, live, _ = carry
        return (step < num_steps) & ((live.remaining == 0).sum() < free_target)

    def body(carry):
        step, live, kept = carry
        live, sampled = step_of(live)
        kept = tuple(array.at[step].set(row) for array, row in zip(kept, sampled, strict=True))
        return step + 1, live, kept

    places = (num_steps, 1 + draft_tokens, num_slots)
    blank = (
        jnp.full(places, -1, jnp.int32),
        jnp.zeros(places, jnp.float32),
        jnp.zeros((*places, num_top), jnp.int32),
        jnp.zeros((*places, num_top), jnp.float32),
    )
    _, live, kept = lax.while_loop(unfinished, body, (0, live, blank))
    keys, values = jax.tree.map(
        lambda cache, part: cache.at[:used_slots, :, :used_window].set(part),
        caches,
        (live.keys, live.values),
    )
    size = num_steps * (1 + draft_tokens)
    tokens, log_probs, *tops = (a.reshape(size, *a.shape[2:]) for a in kept)
    front = dataclasses.replace(live, keys=(), values=())
    small = jax.tree.map(lambda whole, part: whole.at[:num_slots].set(part), small, front)
    outputs = Outputs(tokens, log_probs, tops[0], tops[1], live.remaining + 0)
    return dataclasses.replace(small, keys=keys, values=values), outputs
