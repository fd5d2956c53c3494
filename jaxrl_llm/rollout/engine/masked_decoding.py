"""Decoding under grammars: a decode step in two programs, with the host's masks between them.

Which tokens a grammar allows follows from the token before, and is computed on the host. So the
step of a chunk is cut where the logits are ready: while the device computes the forward pass of a
step, the host reads the token before it, advances the grammars and fills the masks, which the
second program applies when it samples. Slots without a grammar decode along; their masks allow
every token.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.rollout.engine import decode_steps, logit_adjustments, token_sampling
from jaxrl_llm.rollout.engine.decode_attention import CacheReader
from jaxrl_llm.rollout.engine.decode_steps import ChunkInputs
from jaxrl_llm.rollout.engine.device_programs import NO_CACHE, DecodeState, Outputs
from jaxrl_llm.rollout.engine.kv_cache import Cache, CacheSharding, PagedView, WriteBuffer
from jaxrl_llm.rollout.engine.logit_adjustments import LogitAdjustments
from jaxrl_llm.rollout.engine.token_sampling import TokenMasks


def begin(
    network: Network,
    state: DecodeState,
    table: Int[Array, "S pages"],
    *,
    split: CacheSharding,
    num_steps: int,
    num_slots: int,
    window: int,
    reader: CacheReader,
) -> tuple[ChunkInputs, DecodeState, WriteBuffer]:
    """Starts a chunk, as `decode_steps.begin_chunk`; pages that are read in place are left out.

    A program that returned the cache would copy it.
    """
    chunk, live, recent = decode_steps.begin_chunk(
        network,
        state,
        table[:num_slots],
        split=split,
        num_tokens=num_steps,
        num_slots=num_slots,
        window=window,
        reader=reader,
    )
    if isinstance(chunk.cache_view, PagedView):
        view = dataclasses.replace(chunk.cache_view, cache=NO_CACHE)
        chunk = dataclasses.replace(chunk, cache_view=view)
    return chunk, live, recent


def forward(
    network: Network,
    params: Params,
    cache: Cache,
    chunk: ChunkInputs,
    live: DecodeState,
    recent: WriteBuffer,
    number: Int[Array, ""],
    *,
    split: CacheSharding,
    window: int,
    reader: CacheReader,
    keeps_routes: bool,
) -> tuple[WriteBuffer, Float[Array, "S V"], Int[Array, "S routes"]]:
    """Feeds every active slot its last token: the buffer with it, logits of the next, routes.

    Args, static from `split` on:
      cache: Of the state from which the chunk began.
      number: Of the step in its chunk, from 0.
    """
    view = chunk.cache_view
    if isinstance(view, PagedView):
        chunk = dataclasses.replace(chunk, cache_view=dataclasses.replace(view, cache=cache))
    logits, recent, routes, _ = decode_steps.forward_step(
        network,
        params,
        chunk,
        live,
        recent,
        number,
        live.tokens[:, None],
        split=split,
        window=window,
        reader=reader,
    )
    return recent, logits[:, 0], routes[:, 0, : network.num_routes if keeps_routes else 0]


def sample(
    live: DecodeState,
    logits: Float[Array, "S V"],
    routes: Int[Array, "S routes"],
    masks: TokenMasks,
    adjustments: LogitAdjustments | None = None,
    *,
    filtered: bool,
    num_top: int,
    num_support: int = 0,
) -> tuple[DecodeState, Outputs]:
    """Samples the next token of every active slot among those that its mask allows.

    Log-probs are those of the distribution that was sampled: over the allowed tokens, at the
    sampling temperature. Nothing is drafted; with speculation the history is kept up to date.

    Args, static from `filtered` on:
      adjustments: Of the logits, from the tokens so far; banned tokens are drawn only where the
        masks allow no other.
    """
    active, positions = live.remaining > 0, live.positions + 1
    if adjustments is not None:
        counts = logit_adjustments.token_counts(adjustments, logits.shape[-1])
        bias = logit_adjustments.dense_bias(adjustments, logits.shape[-1])
        no_drafts = adjustments.history[:, :0]
        logits = logit_adjustments.adjusted_logits(
            logits[:, None], positions[:, None], adjustments, bias, counts, no_drafts
        )[:, 0]
    logits = token_sampling.mask_logits(logits, masks)
    drawn, log_probs, support = token_sampling.sample_with_support(
        logits, positions, live.sampler, filtered=filtered, num_support=num_support
    )
    tops = token_sampling.top_log_probs(logits, live.sampler, num_top)
    history = live.history
    if history.shape[1]:
        history = decode_steps.write_history(live, drawn[:, None], active[:, None])
    live = decode_steps.advance_slots(live, drawn, active.astype(jnp.int32), history)
    tokens, log_probs = jnp.where(active, drawn, -1), jnp.where(active, log_probs, 0.0)
    columns = [a[None] for a in (tokens, log_probs, *tops, support, routes)]
    return live, Outputs(*[*columns, live.remaining + 0])


def end(
    state: DecodeState,
    live: DecodeState,
    recent: WriteBuffer,
    table: Int[Array, "S pages"],
    *,
    split: CacheSharding,
) -> DecodeState:
    """The state after a chunk: recent tokens are in their pages.

    A forward pass without a sample after it leaves a key at the position of a slot's last token,
    which the next chunk writes again.
    """
    num_slots = len(live.remaining)
    return decode_steps.end_chunk(state, live, recent, table[:num_slots], split=split)
