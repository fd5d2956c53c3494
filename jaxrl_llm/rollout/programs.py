"""What the device runs during rollout: prefill, insert, generate.

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

from jaxrl_llm.models.attention import full_attention
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.rollout import sampling
from jaxrl_llm.rollout.sampling import SamplerState
from jaxrl_llm.sharding.mesh import constrain

PIECE_TOKENS = 2048  # of one prompt, read at one time


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """Prompts that were read: their keys and values, and what follows them."""

    keys: tuple[Float[Array, "P K T H"], ...]  # one per layer
    values: tuple[Float[Array, "P K T H"], ...]
    logits: Float[Array, "P V"]  # of the first response token
    lengths: Int[Array, " P"]


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
    sampler: SamplerState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """What was sampled; shares no memory with the state, so it outlives the next call.

    N steps (one for `insert`), S slots (for `insert`: admitted samples), k likeliest tokens.
    """

    tokens: Int[Array, "N S"]  # -1: the slot was not active
    log_probs: Float[Array, "N S"]
    top_tokens: Int[Array, "N S k"]
    top_log_probs: Float[Array, "N S k"]
    remaining: Int[Array, " S"]  # tokens that may still be sampled; 0: the sample ended


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Admission:
    """Which samples enter which slots. A slot number past the last one is padding."""

    rows: Int[Array, " n"]  # of the prefix
    slots: Int[Array, " n"]
    limits: Int[Array, " n"]  # tokens that may be sampled, at least 1
    stops: Int[Array, "n M"]
    sampler: SamplerState


def empty_state(
    network: Network, num_slots: int, max_tokens: int, num_stops: int, dtype
) -> DecodeState:
    """Returns a state in which every slot is free."""
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
        sampler=SamplerState(
            keys=jnp.zeros((num_slots, 2), jnp.uint32),
            temperature=ones,
            top_k=zeros,
            top_p=ones,
            min_p=jnp.zeros_like(ones),
        ),
    )


def prefill(
    network: Network,
    params: Params,
    tokens: Int[Array, "P T"],
    lengths: Int[Array, " P"],
    *,
    piece_tokens: int = PIECE_TOKENS,
) -> Prefix:
    """Reads right-padded prompts. Causality keeps padding out of what is kept.

    Args:
      piece_tokens: Longer rows are read so many tokens at a time, each piece attending to
        those before it, so that activations are of one piece; static.
    """
    width = tokens.shape[1]
    if width <= piece_tokens:
        positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)
        segments = (positions < lengths[:, None]).astype(jnp.int32)

        def attend(q, k, v):
            return full_attention(q, k, v, segments), (k, v)

        x = network.embed(params, tokens)
        rotary = network.rotary(positions)
        caches = []
        for layer in params["layers"]:
            x, key_values = network.block(layer, x, rotary, attend)
            caches.append(key_values)
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
    else:
        caches, last = _read_in_pieces(network, params, tokens, lengths, piece_tokens)
    logits = network.logits(params, network.norm(params, last))[:, 0]
    keys, values = zip(*caches, strict=True)
    rows_first = lambda kept: tuple(a[:, :width].swapaxes(1, 2) for a in kept)  # noqa: E731
    return Prefix(rows_first(keys), rows_first(values), logits, lengths)


def _read_in_pieces(network, params, tokens, lengths, size):
    """Returns keys and values [P, T, K, H] of each layer, and the last hidden states [P, 1, D]."""
    rows, width = tokens.shape
    count = -(-width // size)
    tokens = jnp.pad(tokens, ((0, 0), (0, count * size - width)))
    shape = network.shape
    blank = jnp.zeros((rows, count * size, shape.num_kv_heads, shape.head_size))
    blank = blank.astype(network.compute_dtype)
    last = jnp.zeros((rows, 1, shape.hidden_size), network.compute_dtype)

    def read(i, carry):
        caches, last = carry
        start = i * size
        positions = jnp.broadcast_to(start + jnp.arange(size), (rows, size))
        seen = jnp.arange(count * size) <= positions[:, None, :, None]

        def attend_to(cache_k, cache_v):
            def attend(q, k, v):
                kept = tuple(
                    lax.dynamic_update_slice_in_dim(cache, piece.astype(cache.dtype), start, 1)
                    for cache, piece in ((cache_k, k), (cache_v, v))
                )
                return jax.nn.dot_product_attention(q, kept[0], kept[1], mask=seen), kept

            return attend

        x = network.embed(params, lax.dynamic_slice_in_dim(tokens, start, size, 1))
        rotary = network.rotary(positions)
        kept = []
        for layer, cache in zip(params["layers"], caches, strict=True):
            x, cache = network.block(layer, x, rotary, attend_to(*cache))
            kept.append(cache)
        # Where the row ends in this piece; elsewhere any entry, not taken.
        place = jnp.clip(lengths - 1 - start, 0, size - 1)[:, None, None]
        ends = (lengths - 1) // size == i
        return kept, jnp.where(ends[:, None, None], jnp.take_along_axis(x, place, axis=1), last)

    caches = [(blank, blank) for _ in params["layers"]]
    return lax.fori_loop(0, count, read, (caches, last))


def insert(
    state: DecodeState,
    prefix: Prefix,
    admission: Admission,
    *,
    filtered: bool,
    num_top: int,
) -> tuple[DecodeState, Outputs]:
    """Copies prefixes into slots and samples the first token of each.

    Samples of one prompt name the same prefix row: it was read once.

    Returns:
      The state; and one step's outputs, a column for each admitted sample.
    """
    a = admission
    lengths, logits = prefix.lengths[a.rows], prefix.logits[a.rows]
    tokens, log_probs = sampling.sample(logits, lengths, a.sampler, filtered=filtered)
    top_tokens, top_log_probs = sampling.top_log_probs(logits, a.sampler, num_top)
    remaining = jnp.where(_is_stop(tokens, a.stops), 0, a.limits - 1)
    width = prefix.keys[0].shape[2]

    def put(target, value):
        return target.at[a.slots].set(value, mode="drop")

    def copy(caches, prefixes):
        return tuple(
            cache.at[a.slots, :, :width].set(kept[a.rows].astype(cache.dtype), mode="drop")
            for cache, kept in zip(caches, prefixes, strict=True)
        )

    state = DecodeState(
        keys=copy(state.keys, prefix.keys),
        values=copy(state.values, prefix.values),
        tokens=put(state.tokens, tokens),
        positions=put(state.positions, lengths),
        remaining=put(state.remaining, remaining),
        stops=put(state.stops, a.stops),
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
) -> tuple[DecodeState, tuple[Array, ...]]:
    """Feeds every active slot its last token and samples the next.

    Inactive slots compute along but write nothing and keep their place.

    Args:
      state: Its caches may have more slots than the rest of it: those behind are left alone.
      window: Cache positions that attention reads; static, past every active position.
      filtered: See `sampling.sample`.
      num_top: Likeliest tokens to report; static.

    Returns:
      The state; tokens (-1: the slot was not active), log-probs, likeliest tokens and theirs.
    """
    active = state.remaining > 0
    slots, capacity = state.tokens.shape[0], state.keys[0].shape[2]
    write_at = jnp.where(active, state.positions, capacity)  # past the end: dropped
    seen = jnp.arange(window) <= state.positions[:, None]  # [S, W]
    heads = jnp.arange(network.shape.num_kv_heads)
    # All three indices are given: a slice between them makes XLA relayout the whole cache.
    index = (jnp.arange(slots)[:, None], heads[None], write_at[:, None])

    def attend_to(cache_k, cache_v):
        def attend(q, k, v):
            new_k = cache_k.at[index].set(
                k[:, 0].astype(cache_k.dtype), mode="drop", unique_indices=True
            )
            new_v = cache_v.at[index].set(
                v[:, 0].astype(cache_v.dtype), mode="drop", unique_indices=True
            )
            read_k, read_v = new_k[:slots, :, :window], new_v[:slots, :, :window]
            mixed = _attention_of_one(q[:, 0], read_k, read_v, seen)
            return mixed[:, None], (new_k, new_v)

        return attend

    x = network.embed(params, state.tokens[:, None])
    rotary = network.rotary(state.positions[:, None])
    kept = []
    for layer, k, v in zip(params["layers"], state.keys, state.values, strict=True):
        x, caches = network.block(layer, x, rotary, attend_to(k, v))
        kept.append(caches)
    logits = network.logits(params, network.norm(params, x))[:, 0]

    following = state.positions + 1
    drawn, log_probs = sampling.sample(logits, following, state.sampler, filtered=filtered)
    tops = sampling.top_log_probs(logits, state.sampler, num_top)
    tokens = jnp.where(active, drawn, state.tokens)
    left = jnp.where(_is_stop(tokens, state.stops), 0, state.remaining - 1)
    keys, values = zip(*kept, strict=True)
    state = dataclasses.replace(
        state,
        keys=keys,
        values=values,
        tokens=tokens,
        positions=jnp.where(active, following, state.positions),
        remaining=jnp.where(active, left, 0),
    )
    return state, (jnp.where(active, drawn, -1), jnp.where(active, log_probs, 0.0), *tops)


def _attention_of_one(
    q: Float[Array, "S N H"],
    k: Float[Array, "S K W H"],
    v: Float[Array, "S K W H"],
    seen: Bool[Array, "S W"],
) -> Float[Array, "S N H"]:
    """Returns attention of one query a slot, with the same roundings as `full_attention`."""
    slots, heads, size = q.shape
    grouped = q.reshape(slots, k.shape[1], -1, size)
    scores = jnp.einsum("skgh,skwh->skgw", grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None, None], scores / jnp.sqrt(size).astype(jnp.float32), -1e30)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    mixed = jnp.einsum("skgw,skwh->skgh", probabilities, v)
    return mixed.reshape(slots, heads, size).astype(q.dtype)


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
) -> tuple[DecodeState, Outputs]:
    """Decodes until `num_steps` are done or `free_target` slots are free.

    The second lets the host refill slots soon without looking after every token.

    Args:
      num_steps, num_slots, window: Static. Slots from `num_slots` on are free and cost nothing.
      gather: Whether the part of the cache in use is copied out before the steps and back after
        them; static. On a CPU a step that reads part of a larger array copies that part each
        time; on accelerators it does not, and the second copy would cost memory.
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
        decode_step, network, params, window=window, filtered=filtered, num_top=num_top
    )

    def unfinished(carry):
        step, live, _ = carry
        return (step < num_steps) & ((live.remaining == 0).sum() < free_target)

    def body(carry):
        step, live, kept = carry
        live, sampled = step_of(live)
        kept = tuple(array.at[step].set(row) for array, row in zip(kept, sampled, strict=True))
        return step + 1, live, kept

    blank = (
        jnp.full((num_steps, num_slots), -1, jnp.int32),
        jnp.zeros((num_steps, num_slots), jnp.float32),
        jnp.zeros((num_steps, num_slots, num_top), jnp.int32),
        jnp.zeros((num_steps, num_slots, num_top), jnp.float32),
    )
    _, live, kept = lax.while_loop(unfinished, body, (0, live, blank))
    keys, values = jax.tree.map(
        lambda cache, part: cache.at[:used_slots, :, :used_window].set(part),
        caches,
        (live.keys, live.values),
    )
    front = dataclasses.replace(live, keys=(), values=())
    small = jax.tree.map(lambda whole, part: whole.at[:num_slots].set(part), small, front)
    return dataclasses.replace(small, keys=keys, values=values), Outputs(*kept, live.remaining + 0)
