"""What is read off the last hidden states: log-probs of tokens, values, sequence scores.

This is the only place where arrays are shifted: hidden state t-1 speaks about token t, and
every result below has index t about `tokens[:, t]`. The language-model head never holds
the logits of a whole batch, neither forward nor backward.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrl_llm.sharding.mesh import activation_spec, constrain


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How [B, T] positions are cut into chunks that every shard of the mesh works on alone.

    The tokens of each (row shard, length shard) are put in one line and cut into `num_chunks`
    pieces. Scanning over pieces then slices no dim that is split over devices.
    """

    rows: int  # B
    length: int  # T
    row_shards: int
    length_shards: int
    chunk: int  # tokens of one piece on one shard

    @classmethod
    def of(cls, rows: int, length: int, chunk: int) -> "_Layout":
        sizes = dict(jax.sharding.get_abstract_mesh().shape)
        shards = [1, 1]
        if sizes:
            for dim, axes in enumerate(activation_spec((rows, length), ("batch", "length"))):
                axes = (axes,) if isinstance(axes, str) else axes or ()
                shards[dim] = math.prod(sizes[axis] for axis in axes)
        local = rows * length // math.prod(shards)
        num_chunks = -(-local // chunk)
        return cls(rows, length, shards[0], shards[1], chunk=-(-local // num_chunks))

    @property
    def local(self) -> int:
        return self.rows * self.length // (self.row_shards * self.length_shards)

    def split(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "C R S N ..."]:
        """Returns `x` as [chunks, row shards, length shards, tokens, ...], the last padded by 0."""
        rest = x.shape[2:]
        free = (None,) * len(rest)
        r, s = self.row_shards, self.length_shards
        x = x.reshape(r, self.rows // r, s, self.length // s, *rest)
        x = jnp.swapaxes(x, 1, 2).reshape(r, s, self.local, *rest)
        x = jnp.pad(x, [(0, 0), (0, 0), (0, -self.local % self.chunk)] + [(0, 0)] * len(rest))
        x = jnp.moveaxis(x.reshape(r, s, -1, self.chunk, *rest), 2, 0)
        return constrain(x, None, "batch", "length", None, *free)

    def join(self, x: Shaped[Array, "C R S N ..."]) -> Shaped[Array, "B T ..."]:
        """Returns the inverse of `split`."""
        rest = x.shape[4:]
        r, s = self.row_shards, self.length_shards
        x = jnp.moveaxis(x, 0, 2).reshape(r, s, -1, *rest)[:, :, : self.local]
        x = x.reshape(r, s, self.rows // r, self.length // s, *rest)
        x = jnp.swapaxes(x, 1, 2).reshape(self.rows, self.length, *rest)
        return constrain(x, "batch", "length", *(None,) * len(rest))


def _logits(hidden: Float[Array, "R S N D"], weight: Float[Array, "V D"], temperature):
    """Returns float32 logits [R, S, N, V] of one chunk, split over the vocabulary."""
    logits = jnp.einsum("rsnd,vd->rsnv", hidden, weight, preferred_element_type=jnp.float32)
    return constrain(logits / temperature, "batch", "length", None, "vocab")


def _is_target(targets: Int[Array, "R S N"], logits: Float[Array, "R S N V"]):
    # A comparison, not a gather: it stays local where the vocabulary is split.
    return targets[..., None] == jax.lax.broadcasted_iota(jnp.int32, logits.shape, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _statistics(hidden, weight, targets, valid, temperature, chunk, with_entropy):
    """Returns log-prob of `targets[:, t]` under `hidden[:, t]`, entropy, and sum of p**2."""
    return _statistics_forward(hidden, weight, targets, valid, temperature, chunk, with_entropy)[0]


def _statistics_forward(hidden, weight, targets, valid, temperature, chunk, with_entropy):
    rows, length = targets.shape
    layout = _Layout.of(rows, length, chunk)
    shared = constrain(weight.astype(hidden.dtype), "vocab", None)

    def body(carry, piece):
        h, target, ok = piece
        logits = _logits(h, shared, temperature)
        # Top and log-sum stay apart: their sum would cost large logits their last digits.
        top = jnp.max(logits, -1)
        logits -= top[..., None]
        log_sum = jnp.log(jnp.sum(jnp.exp(logits), -1))
        chosen = jnp.sum(jnp.where(_is_target(target, logits), logits, 0.0), -1)
        log_probs = jnp.where(ok, chosen - log_sum, 0.0)
        if not with_entropy:
            zero = jnp.zeros_like(top)
            return carry, (log_probs, zero, zero, top, log_sum)
        log_p = logits - log_sum[..., None]
        probs = jnp.exp(log_p)
        entropies = jnp.where(ok, -jnp.sum(probs * log_p, -1), 0.0)
        squared = jnp.where(ok, jnp.sum(jnp.square(probs), -1), 0.0)
        return carry, (log_probs, entropies, squared, top, log_sum)

    pieces = tuple(layout.split(x) for x in (hidden, targets, valid))
    _, outputs = jax.lax.scan(body, None, pieces)
    log_probs, entropies, squared, top, log_sum = (layout.join(x) for x in outputs)
    residuals = (hidden, weight, targets, valid, temperature, top, log_sum, entropies)
    return (log_probs, entropies, squared), residuals


def _statistics_backward(chunk, with_entropy, residuals, cotangents):
    hidden, weight, targets, valid, temperature, top, log_sum, entropies = residuals
    log_prob_bar, entropy_bar, _ = (jnp.where(valid, bar, 0.0) for bar in cotangents)
    rows, length = targets.shape
    layout = _Layout.of(rows, length, chunk)
    shared = constrain(weight.astype(hidden.dtype), "vocab", None)

    def body(weight_bar, piece):
        h, target, ok, top, log_sum, log_prob_bar, entropies, entropy_bar = piece
        # Zero times what padding holds must be zero even where that is not a number.
        h = jnp.where(ok[..., None], h, 0)
        logits = _logits(h, shared, temperature)
        top, log_sum = (jnp.where(ok, x, 0.0)[..., None] for x in (top, log_sum))
        log_p = logits - top - log_sum
        probs = jnp.exp(log_p)
        # d log_prob / d logits = target - p;  d entropy / d logits = -p (log p + entropy)
        bar = log_prob_bar[..., None] * (_is_target(target, logits) - probs)
        if with_entropy:
            bar -= entropy_bar[..., None] * probs * (log_p + entropies[..., None])
        bar = constrain((bar / temperature).astype(h.dtype), "batch", "length", None, "vocab")
        hidden_bar = jnp.einsum(
            "rsnv,vd->rsnd", bar, shared, preferred_element_type=jnp.float32
        ).astype(h.dtype)
        # Each shard of the batch keeps its own sum: one reduction at the end, none per chunk.
        weight_bar += jnp.einsum("rsnv,rsnd->rsvd", bar, h, preferred_element_type=jnp.float32)
        return constrain(weight_bar, "batch", "length", "vocab", None), hidden_bar

    sums = jnp.zeros((layout.row_shards, layout.length_shards, *weight.shape), jnp.float32)
    sums = constrain(sums, "batch", "length", "vocab", None)
    pieces = (hidden, targets, valid, top, log_sum, log_prob_bar, entropies, entropy_bar)
    weight_bar, hidden_bar = jax.lax.scan(body, sums, tuple(layout.split(x) for x in pieces))
    return (
        layout.join(hidden_bar),
        weight_bar.sum((0, 1)).astype(weight.dtype),
        np.zeros(targets.shape, jax.dtypes.float0),
        np.zeros(valid.shape, jax.dtypes.float0),
        jnp.zeros_like(temperature),
    )


_statistics.defvjp(_statistics_forward, _statistics_backward)


def _continues(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Returns where token t+1 belongs to the same sequence as token t."""
    after = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)))
    return (segment_ids == after) & (segment_ids != 0)


def _after(x: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns what was found at position t-1, moved to position t."""
    return constrain(jnp.pad(x[:, :-1], ((0, 0), (1, 0))), "batch", "length")


def token_statistics(
    hidden: Float[Array, "B T D"],
    weight: Float[Array, "V D"],
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    chunk: int = 512,
    with_entropy: bool = True,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]]:
    """Returns log-prob, entropy and sum of squared probabilities of every token.

    `log_probs[:, t] = log softmax(hidden[:, t-1] @ weight.T / temperature)[tokens[:, t]]`;
    entropy and sum of squares are of the same distribution. The first token of each segment
    has no predecessor and gets 0, as does padding.

    Gradients flow to `hidden` and `weight` from log-probs and entropies. The backward pass
    computes the logits of each chunk again and sums the gradient of `weight` in float32;
    with low-precision `hidden` the products run in that dtype, accumulated in float32.
    Under a mesh, logits stay split over the vocabulary and over the batch.

    Args:
      hidden: Last hidden states, normalized.
      weight: Output projection; cast to the dtype of `hidden`.
      tokens: Packed rows; what padding holds is of no consequence.
      segment_ids: Which sequence of the row; 0 is padding.
      temperature: Divides the logits; above 0. Takes no gradient.
      chunk: Tokens whose logits exist at one time on each shard of the batch; at least 1.
      with_entropy: False leaves the two other results at 0 and saves their work.

    Returns:
      (log_probs, entropies in nats, sum over the vocabulary of p**2), float32; the last
      carries no gradient.
    """
    valid = _continues(segment_ids)
    targets = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    temperature = jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    found = _statistics(hidden, weight, targets, valid, temperature, chunk, with_entropy)
    log_probs, entropies, squared = (_after(x) for x in found)
    return log_probs, entropies, jax.lax.stop_gradient(squared)


def _scores(hidden: Float[Array, "B T D"], weight: Float[Array, "1 D"]) -> Float[Array, "B T"]:
    weight = weight[0].astype(hidden.dtype)
    return jnp.einsum("btd,d->bt", hidden, weight, preferred_element_type=jnp.float32)


def token_values(
    hidden: Float[Array, "B T D"], weight: Float[Array, "1 D"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Returns `hidden[:, t-1] @ weight`: the value just before token t was emitted, float32.

    The first token of each segment has no predecessor and gets 0, as does padding.
    """
    return _after(jnp.where(_continues(segment_ids), _scores(hidden, weight), 0.0))


def sequence_scores(
    hidden: Float[Array, "B T D"], weight: Float[Array, "1 D"], last_index: Int[Array, " B"]
) -> Float[Array, " B"]:
    """Returns `hidden[b, last_index[b]] @ weight`: one score a row, float32.

    Args:
      hidden: Last hidden states, normalized.
      weight: The scalar head.
      last_index: Position of each row's last token (of a one-label sequence classifier: the
        last that is not padding), in [0, T).
    """
    # Scores of all positions first: picking a number from each row is cheap on any mesh,
    # picking a hidden state is a gather over a dim that may be split.
    return jnp.take_along_axis(_scores(hidden, weight), last_index[:, None], axis=1)[:, 0]
