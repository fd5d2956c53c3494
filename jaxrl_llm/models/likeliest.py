"""The likeliest tokens of each distribution that a network predicts, as a teacher lists them.

Like `heads.py`, without the logits of a whole batch.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.models import heads
from jaxrl_llm.models.places import Places
from jaxrl_llm.models.vocabulary import TokenRanges
from jaxrl_llm.sharding.mesh import constrain


def likeliest_tokens(
    hidden: Float[Array, "B T D"],
    weight: Float[Array, "V D"],
    places: Places,
    count: int,
    *,
    limit: int,
    temperature: float = 1.0,
    chunk: int = 512,
    cap: float = 0.0,
    suppressed: TokenRanges = (),
) -> tuple[Int[Array, "B T k"], Float[Array, "B T k"]]:
    """Returns the `count` likeliest tokens in place of each token at `places`, and log-probs.

    They descend; of equals, the first in the vocabulary comes first. Elsewhere both are zero. Has
    no gradient.

    Args:
      limit: Only tokens below it are listed; at least `count`. Log-probs are of the whole
        vocabulary.
      temperature, chunk, cap, suppressed: As of `token_statistics`.
    """
    states = jax.lax.stop_gradient(places.states(hidden))
    pieces = heads.Pieces.of(weight.shape[0], states.shape[:2], chunk)
    rows = pieces.split(jax.lax.stop_gradient(weight).astype(hidden.dtype))
    of_shards = (*states.shape[:2], pieces.sizes[0])

    def body(carry, numbered):
        """Adds a piece to each outer shard's likeliest tokens, and to its sum over exp(logit)."""
        top, total, best, ids = carry
        number, tokens = numbered
        logits = heads.logits_of(states, pieces.piece(rows, number), temperature, cap)
        logits = heads.masked(logits, tokens, suppressed)
        highest = jnp.maximum(top, jnp.max(logits, (-2, -1)))
        masses = jnp.exp(logits - highest[..., None, None])
        total = jnp.exp(top - highest) * total + jnp.sum(masses, (-2, -1))
        known = jnp.where(tokens < limit, logits, -jnp.inf).reshape(*of_shards, -1)
        own = jnp.broadcast_to(tokens.reshape(pieces.sizes[0], -1), known.shape)
        both = [jnp.concatenate(pair, -1) for pair in ((best, known), (ids, own))]
        best, ids = _first(count, *both)
        return (highest, total, best, ids), None

    start = (
        jnp.full(of_shards, heads.LOWEST),
        jnp.zeros(of_shards),
        jnp.full((*of_shards, count), -jnp.inf),
        jnp.zeros((*of_shards, count), jnp.int32),
    )
    start = jax.tree.map(
        lambda x: constrain(x, "batch", "length", "vocab", *[None] * (x.ndim - 3)), start
    )
    (top, total, best, ids), _ = jax.lax.scan(body, start, pieces.numbered())
    highest = jnp.max(top, -1)
    log_sum = jnp.log(jnp.sum(jnp.exp(top - highest[..., None]) * total, -1))
    flat = (*states.shape[:2], -1)
    best, ids = _first(count, best.reshape(flat), ids.reshape(flat))
    log_probs = best - highest[..., None] - log_sum[..., None]
    inside = places.valid[..., None]
    return places.put(jnp.where(inside, ids, 0)), places.put(jnp.where(inside, log_probs, 0.0))


def _first(
    count: int, values: Float[Array, "*dims n"], ids: Int[Array, "*dims n"]
) -> tuple[Float[Array, "*dims k"], Int[Array, "*dims k"]]:
    """Returns the largest values, which descend, and their ids."""
    best, at = jax.lax.top_k(values, count)
    return best, jnp.take_along_axis(ids, at, -1)
