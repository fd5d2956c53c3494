"""Top-k tokens and log-probs of a teacher, for distillation.

As in `heads.py`, logits are never materialized for a whole batch.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.models import heads
from jaxrl_llm.models.hf.vocabulary import TokenRanges
from jaxrl_llm.models.target_positions import TargetPositions
from jaxrl_llm.sharding.mesh import constrain


def top_k_log_probs(
    hidden: Float[Array, "B T D"],
    weight: Float[Array, "V D"],
    target_positions: TargetPositions,
    count: int,
    *,
    limit: int,
    temperature: float = 1.0,
    chunk: int = 512,
    cap: float = 0.0,
    suppressed: TokenRanges = (),
) -> tuple[Int[Array, "B T k"], Float[Array, "B T k"]]:
    """The `count` most likely tokens instead of each token at `target_positions`, and their
    log-probs.

    Sorted by descending log-prob, ties by token id. Both are zero for other tokens. Has no
    gradient.

    Args:
      limit: Only tokens below it are listed; at least `count`. Log-probs are of the whole
        vocabulary.
      temperature, chunk, cap, suppressed: See `token_statistics`.
    """
    states = jax.lax.stop_gradient(target_positions.gather_hidden(hidden))
    chunks = heads.VocabChunks.from_weight(weight.shape[0], states.shape[:2], chunk)
    rows = chunks.split(jax.lax.stop_gradient(weight).astype(hidden.dtype))
    shard_shape = (*states.shape[:2], chunks.sizes[0])

    def body(carry, chunk_and_ids):
        """Merges a chunk into each outer shard's top k, and into its sum of exp(logit)."""
        top, total, best, ids = carry
        index, chunk_tokens = chunk_and_ids
        logits = heads.chunk_logits(states, chunks.gather(rows, index), temperature, cap)
        logits = heads.mask_suppressed(logits, chunk_tokens, suppressed)
        highest = jnp.maximum(top, jnp.max(logits, (-2, -1)))
        exp_logits = jnp.exp(logits - highest[..., None, None])
        total = jnp.exp(top - highest) * total + jnp.sum(exp_logits, (-2, -1))
        allowed = jnp.where(chunk_tokens < limit, logits, -jnp.inf).reshape(*shard_shape, -1)
        allowed_ids = jnp.broadcast_to(chunk_tokens.reshape(chunks.sizes[0], -1), allowed.shape)
        candidates = [jnp.concatenate(pair, -1) for pair in ((best, allowed), (ids, allowed_ids))]
        best, ids = _top_k(count, *candidates)
        return (highest, total, best, ids), None

    start = (
        jnp.full(shard_shape, heads.SUPPRESSED_LOGIT),
        jnp.zeros(shard_shape),
        jnp.full((*shard_shape, count), -jnp.inf),
        jnp.zeros((*shard_shape, count), jnp.int32),
    )
    start = jax.tree.map(
        lambda x: constrain(x, "batch", "length", "vocab", *[None] * (x.ndim - 3)), start
    )
    (top, total, best, ids), _ = jax.lax.scan(body, start, chunks.scan_inputs())
    highest = jnp.max(top, -1)
    log_sum = jnp.log(jnp.sum(jnp.exp(top - highest[..., None]) * total, -1))
    flat_shape = (*states.shape[:2], -1)
    best, ids = _top_k(count, best.reshape(flat_shape), ids.reshape(flat_shape))
    log_probs = best - highest[..., None] - log_sum[..., None]
    valid = target_positions.valid[..., None]
    return target_positions.scatter(jnp.where(valid, ids, 0)), target_positions.scatter(
        jnp.where(valid, log_probs, 0.0)
    )


def _top_k(
    count: int, values: Float[Array, "*dims n"], ids: Int[Array, "*dims n"]
) -> tuple[Float[Array, "*dims k"], Int[Array, "*dims k"]]:
    """The largest values in descending order, and their ids."""
    best, index = jax.lax.top_k(values, count)
    return best, jnp.take_along_axis(ids, index, -1)
