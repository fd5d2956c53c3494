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
    network: Network, params: Params, tokens: Int[Array, "P T"], lengths: Int[Array, " P"]
) -> Prefix:
    """Reads right-padded prompts. Causality keeps padding out of what is kept."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    rotary = network.rotary(positions)

    def attend(q, k, v):
        return full_attention(q, k, v, segments), (k.swapaxes(1, 2), v.swapaxes(1, 2))

    x = network.embed(params, tokens)
    kept = []
    for layer in params["layers"]:
        x, key_values = network.block(layer, x, rotary, attend)
        kept.append(key_values)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
    logits = network.logits(params, network.norm(params, last))[:, 0]
    keys, values = zip(*kept, strict=True)
    return Prefix(keys, values, logits, lengths)


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
            mixed = _attention_of_one(q[:, 0], new_k[:, :, :window], new_v[:, :, :window], seen)
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
    window: int,
    filtered: bool,
    num_top: int,
) -> tuple[DecodeState, Outputs]:
    """Decodes until `num_steps` are done or `free_target` slots are free.

    The second lets the host refill slots soon without looking after every token.
    """
    slots = state.tokens.shape[0]
    step_of = functools.partial(
        decode_step, network, params, window=window, filtered=filtered, num_top=num_top
    )

    def unfinished(carry):
        step, state, _ = carry
        return (step < num_steps) & ((state.remaining == 0).sum() < free_target)

    def body(carry):
        step, state, kept = carry
        state, sampled = step_of(state)
        kept = tuple(array.at[step].set(row) for array, row in zip(kept, sampled, strict=True))
        return step + 1, state, kept

    blank = (
        jnp.full((num_steps, slots), -1, jnp.int32),
        jnp.zeros((num_steps, slots), jnp.float32),
        jnp.zeros((num_steps, slots, num_top), jnp.int32),
        jnp.zeros((num_steps, slots, num_top), jnp.float32),
    )
    _, state, kept = lax.while_loop(unfinished, body, (0, state, blank))
    return state, Outputs(*kept, state.remaining + 0)
