"""What is read off the last hidden states: log-probs of tokens, values, sequence scores.

This is the only place where arrays are shifted: hidden state t-1 speaks about token t, and
every result below has index t about `tokens[:, t]`. The language-model head never holds
the logits of a whole batch, neither forward nor backward.
"""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.sharding.mesh import TRAIN, constrain, partition_spec

_THINNEST = 128  # rows of a gathered piece, one for each token it speaks of
# What is computed of the entropy: nothing, its value, or its value with a gradient.
Entropy = Literal["none", "value", "gradient"]


def num_pieces(local_rows: int, gathered_over: int, num_tokens: int, chunk: int) -> int:
    """Returns as many pieces as bring the logits of a piece down to `chunk` tokens' worth.

    Their number divides a device's rows of the vocabulary; it is the next that does. None is
    thinner than a product with it is worth.

    Args:
      local_rows: Of the weight [V, D], on one device.
      gathered_over: Devices that a piece is gathered from.
      num_tokens: That a device computes logits of.
      chunk: Tokens whose logits over the whole vocabulary may exist at one time.
    """
    wanted = max(1, min(-(-num_tokens // chunk), local_rows * gathered_over // _THINNEST))
    return next((n for n in range(wanted, local_rows + 1) if local_rows % n == 0), local_rows)


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """How the output projection is cut along the vocabulary, so that logits exist piece by piece.

    The weight is split over `outer` (tensor) times `inner` (the other axes that hold parameters)
    devices; every piece has the same number of rows of each of them. So a piece is gathered over
    the inner axes alone, its gradient is summed and scattered over them in one go, and no device
    ever holds the whole weight or its whole gradient.
    """

    outer: tuple[str, ...]  # axes that split the arithmetic
    inner: tuple[str, ...]  # axes that split the weight for memory alone
    sizes: tuple[int, int]  # devices of both
    count: int
    rows: int  # of one piece on one device

    @classmethod
    def of(cls, vocab: int, rows: tuple[int, ...], chunk: int) -> "_Pieces":
        """Returns the pieces of a weight with so many rows, see `num_pieces`."""
        mesh = dict(jax.sharding.get_abstract_mesh().shape)
        spec = partition_spec((vocab, 1), ("vocab", None), TRAIN, mesh, {})[0] if mesh else None
        axes = (spec,) if isinstance(spec, str) else spec or ()
        outer = tuple(axis for axis in axes if axis == "tensor")
        inner = tuple(axis for axis in axes if axis != "tensor")
        sizes = tuple(math.prod(mesh[axis] for axis in group) for group in (outer, inner))
        shards = math.prod(size for axis, size in mesh.items() if axis != "tensor")
        local = vocab // math.prod(sizes)
        count = num_pieces(local, sizes[1], -(-math.prod(rows) // shards), chunk)
        return cls(outer, inner, (sizes[0], sizes[1]), count, local // count)

    def split(self, weight: Float[Array, "V D"]) -> Float[Array, "O I R D"]:
        """Returns the weight by the devices that hold it, R rows each. No array moves."""
        weight = weight.reshape(*self.sizes, -1, weight.shape[1])
        return self._placed(weight, self.outer, self.inner)

    def join(self, weight: Float[Array, "O I R D"]) -> Float[Array, "V D"]:
        return weight.reshape(-1, weight.shape[-1])

    def piece(
        self, weight: Float[Array, "O I R D"], number: Int[Array, ""]
    ) -> Float[Array, "O I r D"]:
        """Returns a piece, in the parts that devices keep."""
        piece = jax.lax.dynamic_slice_in_dim(weight, number * self.rows, self.rows, 2)
        # Told so, or the whole weight would be gathered to take the piece from.
        return self._placed(piece, self.outer, self.inner)

    def put(
        self,
        weight: Float[Array, "O I R D"],
        piece: Float[Array, "O I r D"],
        number: Int[Array, ""],
    ) -> Float[Array, "O I R D"]:
        """Returns the weight with one piece replaced."""
        weight = jax.lax.dynamic_update_slice_in_dim(weight, piece, number * self.rows, 2)
        return self._placed(weight, self.outer, self.inner)

    def numbered(self) -> tuple[Int[np.ndarray, " C"], Int[np.ndarray, "C O I r"]]:
        """Returns the pieces' numbers, and which tokens each speaks of."""
        vocab = math.prod(self.sizes) * self.count * self.rows
        grid = np.arange(vocab, dtype=np.int32).reshape(*self.sizes, self.count, self.rows)
        return np.arange(self.count, dtype=np.int32), np.moveaxis(grid, 2, 0)

    def gathered(self, piece: Float[Array, "O I r D"]) -> Float[Array, "O I r D"]:
        """Returns one piece on every device, split over the outer axes alone.

        The parts of devices stay apart: where their rows fill no whole tiles of a TPU's memory,
        putting them side by side moves every row, in a kernel that is slow to compile as well.
        """
        return self._placed(piece, self.outer)

    def scattered(self, bar: Float[Array, "O I r D"]) -> Float[Array, "O I r D"]:
        """Returns a piece's gradient, summed over the batch, in the parts that devices keep."""
        return self._placed(bar, self.outer, self.inner)

    def _placed(self, x: Array, *axes: tuple[str, ...] | None) -> Array:
        if not (self.outer or self.inner):
            return x
        return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


def _logits(hidden: Float[Array, "B T D"], piece: Float[Array, "O I r D"], temperature):
    """Returns float32 logits [B, T, O, I, r] of one piece, split over the vocabulary."""
    logits = jnp.einsum("btd,oird->btoir", hidden, piece, preferred_element_type=jnp.float32)
    return constrain(logits / temperature, "batch", "length", "vocab", None, None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _statistics(hidden, weight, targets, valid, temperature, chunk, entropy):
    """Returns log-prob of `targets[:, t]` under `hidden[:, t]`, entropy, and sum of p**2."""
    return _statistics_forward(hidden, weight, targets, valid, temperature, chunk, entropy)[0]


def _statistics_forward(hidden, weight, targets, valid, temperature, chunk, entropy):
    pieces = _Pieces.of(weight.shape[0], targets.shape, chunk)
    # Sums of each outer shard [B, T, O], put together at the end: no reduction inside the loop.
    zeros = jnp.zeros((*targets.shape, pieces.sizes[0]), jnp.float32)
    zeros = constrain(zeros, "batch", "length", "vocab")

    rows = pieces.split(weight.astype(hidden.dtype))

    def body(carry, numbered):
        """Adds a piece to sums over the vocabulary, relative to the largest logit so far."""
        number, tokens = numbered
        logits = _logits(hidden, pieces.gathered(pieces.piece(rows, number)), temperature)
        is_target = targets[..., None, None, None] == tokens
        chosen = jnp.sum(jnp.where(is_target, logits, 0.0), (-2, -1))
        top = jnp.max(logits, (-2, -1))
        logits -= top[..., None, None]
        masses = jnp.exp(logits)
        total, weighted, squares = jnp.sum(masses, (-2, -1)), zeros, zeros
        if entropy != "none":
            weighted = jnp.sum(masses * logits, (-2, -1))
            squares = jnp.sum(jnp.square(masses), (-2, -1))
        both = jax.tree.map(
            lambda *x: jnp.stack(x, -1), carry, (top, chosen, total, weighted, squares)
        )
        return _merged(*both), None

    lowest = jnp.full_like(zeros, -1e30)  # not infinite: its difference to itself is 0
    start = (lowest, zeros, zeros, zeros, zeros)
    sums, _ = jax.lax.scan(body, start, pieces.numbered())
    top, chosen, total, weighted, squares = _merged(*sums)
    # Top and log-sum stay apart: their sum would cost large logits their last digits.
    log_sum = jnp.log(total)
    log_probs = jnp.where(valid, chosen - top - log_sum, 0.0)
    entropies = squared = jnp.zeros_like(top)
    if entropy != "none":
        entropies = jnp.where(valid, log_sum - weighted / total, 0.0)
        squared = jnp.where(valid, squares / jnp.square(total), 0.0)
    residuals = (hidden, weight, targets, valid, temperature, top, log_sum, entropies)
    return (log_probs, entropies, squared), residuals


def _merged(top, chosen, total, weighted, squares):
    """Returns sums over parts of the vocabulary as sums over their union, the last dim.

    With x a logit less its part's `top`: `total` sums exp(x), `weighted` x exp(x), `squares`
    exp(2 x).
    """
    highest = jnp.max(top, -1)
    lowered = top - highest[..., None]
    shrink = jnp.exp(lowered)
    return (
        highest,
        jnp.sum(chosen, -1),
        jnp.sum(shrink * total, -1),
        jnp.sum(shrink * (weighted + lowered * total), -1),
        jnp.sum(jnp.square(shrink) * squares, -1),
    )


def _statistics_backward(chunk, entropy, residuals, cotangents):
    hidden, weight, targets, valid, temperature, top, log_sum, entropies = residuals
    log_prob_bar, entropy_bar, _ = (
        jnp.where(valid, bar, 0.0)[..., None, None, None] for bar in cotangents
    )
    pieces = _Pieces.of(weight.shape[0], targets.shape, chunk)
    # Zero times what padding holds must be zero even where that is not a number.
    h = jnp.where(valid[..., None], hidden, 0)
    top, log_sum = (jnp.where(valid, x, 0.0)[..., None, None, None] for x in (top, log_sum))
    entropies = entropies[..., None, None, None]

    weight_rows = pieces.split(weight.astype(hidden.dtype))

    def body(bars, numbered):
        hidden_bar, weight_bar = bars
        number, tokens = numbered
        rows = pieces.gathered(pieces.piece(weight_rows, number))
        log_p = _logits(h, rows, temperature) - top - log_sum
        probs = jnp.exp(log_p)
        # d log_prob / d logits = target - p;  d entropy / d logits = -p (log p + entropy)
        bar = log_prob_bar * ((targets[..., None, None, None] == tokens) - probs)
        if entropy == "gradient":
            bar -= entropy_bar * probs * (log_p + entropies)
        bar = (bar / temperature).astype(h.dtype)
        bar = constrain(bar, "batch", "length", "vocab", None, None)
        # Each outer shard keeps its own sum: one reduction at the end, none per piece.
        hidden_bar += jnp.einsum("btoir,oird->obtd", bar, rows, preferred_element_type=jnp.float32)
        rows_bar = jnp.einsum("btoir,btd->oird", bar, h, preferred_element_type=jnp.float32)
        rows_bar = pieces.scattered(rows_bar).astype(weight.dtype)
        hidden_bar = constrain(hidden_bar, "vocab", "batch", "length", None)
        return (hidden_bar, pieces.put(weight_bar, rows_bar, number)), None

    zeros = jnp.zeros((pieces.sizes[0], *hidden.shape), jnp.float32)
    zeros = constrain(zeros, "vocab", "batch", "length", None)
    # In the weight's own order of rows: pieces stacked would be put together by a copy.
    start = zeros, pieces.split(jnp.zeros_like(weight))
    (hidden_bar, weight_bar), _ = jax.lax.scan(body, start, pieces.numbered())
    return (
        constrain(hidden_bar.sum(0), "batch", "length", None).astype(hidden.dtype),
        pieces.join(weight_bar),
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
    entropy: Entropy = "gradient",
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
      entropy: "none" leaves the two other results at 0 and saves their work; "value" gives
        them without a gradient.

    Returns:
      (log_probs, entropies in nats, sum over the vocabulary of p**2), float32; the last
      carries no gradient.
    """
    valid = _continues(segment_ids)
    targets = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    temperature = jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    found = _statistics(hidden, weight, targets, valid, temperature, chunk, entropy)
    log_probs, entropies, squared = (_after(x) for x in found)
    return log_probs, entropies, jax.lax.stop_gradient(squared)


def chosen_statistics(
    hidden: Float[Array, "B T D"],
    weight: Float[Array, "V D"],
    tokens: Int[Array, "B T"],
    places: Int[Array, "B K"],
    before: Int[Array, "B K"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    chunk: int = 512,
    entropy: Entropy = "gradient",
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]]:
    """Returns what `token_statistics` does at some positions of every row, zero elsewhere.

    Prompts and padding need no head; where responses are a half of the tokens, this is half of
    its work.

    Args:
      hidden, weight, tokens, temperature, chunk, entropy: As in `token_statistics`.
      places: Positions of the tokens asked about, each at most once in a row and none the
        first of its sequence; T where there is none.
      before: Where the token that each of them follows stands, in the same row.
    """
    length = tokens.shape[1]
    valid = places < length
    inside = jnp.minimum(places, length - 1)
    follows = jnp.take_along_axis(hidden, before[..., None], axis=1)
    targets = jnp.take_along_axis(tokens, inside, axis=1)
    temperature = jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    found = _statistics(follows, weight, targets, valid, temperature, chunk, entropy)
    rows = jnp.arange(tokens.shape[0])[:, None]
    log_probs, entropies, squared = (
        constrain(jnp.zeros(tokens.shape).at[rows, places].set(x, mode="drop"), "batch", "length")
        for x in found
    )
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


def chosen_values(
    hidden: Float[Array, "B T D"],
    weight: Float[Array, "1 D"],
    places: Int[Array, "B K"],
    before: Int[Array, "B K"],
) -> Float[Array, "B T"]:
    """Returns what `token_values` does at some positions of every row, zero elsewhere.

    Args:
      hidden, weight: As in `token_values`.
      places, before: As in `chosen_statistics`.
    """
    found = jnp.take_along_axis(_scores(hidden, weight), before, axis=1)
    rows = jnp.arange(hidden.shape[0])[:, None]
    values = jnp.zeros(hidden.shape[:2]).at[rows, places].set(found, mode="drop")
    return constrain(values, "batch", "length")


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
