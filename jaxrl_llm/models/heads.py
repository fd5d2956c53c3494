"""What is computed from the last hidden states: log-probs of tokens, values, sequence scores.

Arrays are shifted only in `places.py`: hidden state t-1 predicts token t, and every result below
has index t about `tokens[:, t]`. The logits of a whole batch never exist, neither forward nor
backward.
"""

import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.attention import capped
from jaxrl_llm.models.places import Places
from jaxrl_llm.models.vocabulary import TokenRanges, is_inside
from jaxrl_llm.sharding.mesh import TRAIN, axis_sizes, constrain, partition_spec

_MIN_ROWS = 128  # rows of a gathered piece, one for each token it speaks of
# What is computed of the entropy: nothing, its value, or its value with a gradient. "likeliest":
# nothing, and in place of the sum of squares 1 where no token is likelier.
Entropy = Literal["none", "likeliest", "value", "gradient"]
LOWEST = -1e30  # below every logit, and not infinite: its difference to itself is 0
_LEAST = 1e-37  # of the mass of tokens that are not listed, relative to the likeliest token's


class Statistics(NamedTuple):
    """What the distributions say that tokens are drawn from; float32."""

    log_probs: Float[Array, "B T"]  # of the tokens themselves
    entropies: Float[Array, "B T"]
    sum_squared_probs: Float[Array, "B T"]
    # Log-probs of k listed tokens, then of all others together; [B, T, 0] where none are listed.
    listed: Float[Array, "B T k+1"] | Float[Array, "B T 0"]


def num_pieces(local_rows: int, gathered_over: int, num_tokens: int, chunk: int) -> int:
    """Returns how many pieces the vocabulary is cut into.

    A piece's logits take the memory of `chunk` tokens' logits over the whole vocabulary, or a
    little less: the number divides `local_rows`, a device's rows of the weight [V, D]. Each piece
    has at least 128 rows; smaller matmuls are inefficient. A piece is gathered from
    `gathered_over` devices; a device computes logits of `num_tokens` tokens.
    """
    wanted = max(1, min(-(-num_tokens // chunk), local_rows * gathered_over // _MIN_ROWS))
    return next((n for n in range(wanted, local_rows + 1) if local_rows % n == 0), local_rows)


@dataclasses.dataclass(frozen=True)
class Pieces:
    """How the output projection is cut along the vocabulary, so that logits exist piece by piece.

    The weight is split over `outer` (tensor) times `inner` (the other parameter axes) devices;
    every piece has the same number of rows of each. So a piece is gathered, and its gradient
    reduced and scattered, over the inner axes alone; no device holds the whole weight or gradient.
    """

    outer: tuple[str, ...]  # axes that split the arithmetic
    inner: tuple[str, ...]  # axes that split the weight for memory alone
    sizes: tuple[int, int]  # devices of both
    count: int
    rows: int  # of one piece on one device

    @classmethod
    def of(cls, vocab: int, rows: tuple[int, ...], chunk: int) -> "Pieces":
        """Returns the pieces of a weight with so many rows, see `num_pieces`."""
        mesh = axis_sizes()
        spec = partition_spec((vocab, 1), ("vocab", None), TRAIN, mesh, {})[0] if mesh else None
        axes = (spec,) if isinstance(spec, str) else spec or ()
        outer = tuple(axis for axis in axes if axis == "tensor")
        inner = tuple(axis for axis in axes if axis != "tensor")
        sizes = tuple(math.prod(mesh[axis] for axis in group) for group in (outer, inner))
        shards = math.prod(size for axis, size in mesh.items() if axis != "tensor")
        local = vocab // math.prod(sizes)
        count = num_pieces(local, sizes[1], -(-math.prod(rows) // shards), chunk)
        return cls(outer, inner, (sizes[0], sizes[1]), count, local // count)

    def split(self, weight: Float[Array, "V D"]) -> Float[Array, "outer inner rows D"]:
        """Returns the weight by the devices that hold it, without moving data."""
        weight = weight.reshape(*self.sizes, -1, weight.shape[1])
        return self._constrained(weight, self.outer, self.inner)

    def piece(
        self, weight: Float[Array, "outer inner rows D"], number: Int[Array, ""]
    ) -> Float[Array, "outer inner piece D"]:
        """Returns one piece on every device, split over the outer axes alone.

        The parts of devices stay apart: putting them side by side moves every row where they fill
        no whole tiles of a TPU's memory.
        """
        piece = jax.lax.dynamic_slice_in_dim(weight, number * self.rows, self.rows, 2)
        # Constrained first, or the whole weight would be gathered to take the piece from.
        return self._constrained(self._constrained(piece, self.outer, self.inner), self.outer)

    def put(
        self,
        weight: Float[Array, "outer inner rows D"],
        bar: Float[Array, "outer inner piece D"],
        number: Int[Array, ""],
    ) -> Float[Array, "outer inner rows D"]:
        """Returns the gradient with that of one piece, summed over the batch, in its place."""
        bar = self._constrained(bar, self.outer, self.inner).astype(weight.dtype)
        weight = jax.lax.dynamic_update_slice_in_dim(weight, bar, number * self.rows, 2)
        return self._constrained(weight, self.outer, self.inner)

    def numbered(self) -> tuple[Int[np.ndarray, " count"], Int[np.ndarray, "count outer inner r"]]:
        """Returns the pieces' numbers, and the tokens of the vocabulary in each."""
        vocab = math.prod(self.sizes) * self.count * self.rows
        grid = np.arange(vocab, dtype=np.int32).reshape(*self.sizes, self.count, self.rows)
        return np.arange(self.count, dtype=np.int32), np.moveaxis(grid, 2, 0)

    def places(
        self, tokens: Int[Array, "B T k"], number: Int[Array, ""]
    ) -> Int[Array, "B T outer k"]:
        """Returns where tokens stand among those of a piece on each outer shard.

        A token of another piece or shard, or of none, stands past the end.
        """
        inner = self.sizes[1]
        part, row = tokens // self.rows, tokens % self.rows
        device, piece = part // self.count, part % self.count
        found = (device % inner) * self.rows + row
        here = (piece == number)[:, :, None] & (
            (device // inner)[:, :, None] == jnp.arange(self.sizes[0])[:, None]
        )
        return jnp.where(here, found[:, :, None], inner * self.rows)

    def _constrained(self, x: Array, *axes: tuple[str, ...] | None) -> Array:
        if not (self.outer or self.inner):
            return x
        return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


def logits_of(
    hidden: Float[Array, "B T D"], piece: Float[Array, "outer inner piece D"], temperature, cap
):
    """Returns float32 logits [B, T, outer, inner, piece], split over the vocabulary."""
    logits = jnp.einsum("btd,oird->btoir", hidden, piece, preferred_element_type=jnp.float32)
    logits = capped(logits, cap) / temperature
    return constrain(logits, "batch", "length", "vocab", None, None)


def _by_shard(x: Float[Array, "B T outer inner piece"]) -> Float[Array, "B T outer n"]:
    return x.reshape(*x.shape[:3], -1)


def _of_shards(function):
    """Returns a function of one shard's row as one of [B, T, outer, ...] arrays."""
    return jax.vmap(jax.vmap(jax.vmap(function)))


# Not by comparing all logits with all listed tokens: that would take k times their memory.
_taken = _of_shards(lambda row, at: row.at[at].get(mode="fill", fill_value=0.0))
_cleared = _of_shards(lambda row, at: row.at[at].set(0.0, mode="drop"))
_added = _of_shards(lambda row, at, values: row.at[at].add(values, mode="drop"))


def masked(logits: Float[Array, "..."], tokens: Int[Array, "..."], suppressed: TokenRanges):
    """The logits of `tokens`, those of suppressed ones so low that their probability is 0."""
    if not suppressed:
        return logits
    return jnp.where(is_inside(tokens, suppressed), LOWEST, logits)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8, 9))
def _statistics(
    hidden, weight, targets, valid, temperature, listed, chunk, entropy, cap, suppressed
):
    """Returns `Statistics` of `targets[:, t]` and `listed[:, t]` under `hidden[:, t]`."""
    given = hidden, weight, targets, valid, temperature, listed
    return _statistics_forward(*given, chunk, entropy, cap, suppressed)[0]


def _statistics_forward(
    hidden, weight, targets, valid, temperature, listed, chunk, entropy, cap, suppressed
):
    pieces = Pieces.of(weight.shape[0], targets.shape, chunk)
    # Sums of each outer shard [B, T, outer], merged at the end: no reduction inside the loop.
    zeros = jnp.zeros((*targets.shape, pieces.sizes[0]), jnp.float32)
    zeros = constrain(zeros, "batch", "length", "vocab")
    of_listed = jnp.zeros((*listed.shape, pieces.sizes[0]), jnp.float32)
    of_listed = constrain(of_listed, "batch", "length", None, "vocab")

    rows = pieces.split(weight.astype(hidden.dtype))

    def body(carry, numbered):
        """Adds a piece to sums over the vocabulary, relative to the largest logit so far."""
        number, tokens = numbered
        logits = logits_of(hidden, pieces.piece(rows, number), temperature, cap)
        logits = masked(logits, tokens, suppressed)
        is_target = targets[..., None, None, None] == tokens
        chosen = jnp.sum(jnp.where(is_target, logits, 0.0), (-2, -1))
        found, rest = of_listed, zeros
        if listed.shape[-1]:
            places = pieces.places(listed, number)
            found = jnp.swapaxes(_taken(_by_shard(logits), places), -1, -2)
        top = jnp.max(logits, (-2, -1))
        logits -= top[..., None, None]
        masses = jnp.exp(logits)
        total, weighted, squares = jnp.sum(masses, (-2, -1)), zeros, zeros
        if listed.shape[-1]:
            rest = jnp.sum(_cleared(_by_shard(masses), places), -1)
        if entropy in ("value", "gradient"):
            weighted = jnp.sum(masses * logits, (-2, -1))
            squares = jnp.sum(jnp.square(masses), (-2, -1))
        part = top, chosen, total, weighted, squares, found, rest
        return _merged(*jax.tree.map(lambda *x: jnp.stack(x, -1), carry, part)), None

    start = (jnp.full_like(zeros, LOWEST), zeros, zeros, zeros, zeros, of_listed, zeros)
    sums, _ = jax.lax.scan(body, start, pieces.numbered())
    top, chosen, total, weighted, squares, found, rest = _merged(*sums)
    # Top and log-sum stay apart: their sum would lose the last digits of large logits.
    log_sum = jnp.log(total)
    log_rest = jnp.log(jnp.maximum(rest, _LEAST))
    log_probs = jnp.where(valid, chosen - top - log_sum, 0.0)
    entropies = squared = jnp.zeros_like(top)
    if entropy in ("value", "gradient"):
        entropies = jnp.where(valid, log_sum - weighted / total, 0.0)
        squared = jnp.where(valid, squares / jnp.square(total), 0.0)
    if entropy == "likeliest":
        squared = jnp.where(valid & (chosen >= top), 1.0, 0.0)
    if listed.shape[-1]:
        others = (log_rest - log_sum)[..., None]
        found = jnp.concatenate([found - (top + log_sum)[..., None], others], -1)
        found = jnp.where(valid[..., None], found, 0.0)
    known = top, log_sum, log_rest, entropies
    residuals = (hidden, weight, targets, valid, temperature, listed, known)
    return Statistics(log_probs, entropies, squared, found), residuals


def _merged(top, chosen, total, weighted, squares, found, rest):
    """Returns sums over parts of the vocabulary as sums over their union, the last dim.

    With x a logit less its part's `top`: `total` sums exp(x), `weighted` x exp(x), `squares`
    exp(2 x), `rest` exp(x) of tokens that are not listed; `chosen` and `found` sum logits.
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
        jnp.sum(found, -1),
        jnp.sum(shrink * rest, -1),
    )


def _statistics_backward(chunk, entropy, cap, suppressed, residuals, cotangents):
    hidden, weight, targets, valid, temperature, listed, known = residuals
    log_prob_bar, entropy_bar = (
        jnp.where(valid, bar, 0.0)[..., None, None, None] for bar in cotangents[:2]
    )
    pieces = Pieces.of(weight.shape[0], targets.shape, chunk)
    listed_bar = rest_bar = jnp.where(valid[..., None], cotangents.listed, 0.0)
    if listed.shape[-1]:
        listed_bar, rest_bar = listed_bar[..., :-1], listed_bar[..., -1][..., None, None, None]
        of_listed = jnp.broadcast_to(
            listed_bar[:, :, None], (*targets.shape, pieces.sizes[0], listed.shape[-1])
        )
    # Zero times what padding holds must be zero even where that is not a number.
    h = jnp.where(valid[..., None], hidden, 0)
    top, log_sum, log_rest, entropies = (
        jnp.where(valid, x, 0.0)[..., None, None, None] for x in known
    )

    weight_rows = pieces.split(weight.astype(hidden.dtype))

    def body(bars, numbered):
        hidden_bar, weight_bar = bars
        number, tokens = numbered
        rows = pieces.piece(weight_rows, number)
        logits = masked(logits_of(h, rows, temperature, cap), tokens, suppressed)
        log_p = logits - top - log_sum
        probs = jnp.exp(log_p)
        # d log_prob / d logits = target - p;  d entropy / d logits = -p (log p + entropy)
        bar = log_prob_bar * ((targets[..., None, None, None] == tokens) - probs)
        if entropy == "gradient":
            bar -= entropy_bar * probs * (log_p + entropies)
        if listed.shape[-1]:
            # d log_rest / d logits = p / rest - p of a token that is not listed, else -p
            places = pieces.places(listed, number)
            of_rest = rest_bar * jnp.exp(jnp.minimum(logits - top - log_rest, 0.0))
            of_others = _cleared(_by_shard(of_rest), places).reshape(bar.shape)
            bar += of_others - (listed_bar.sum(-1)[..., None, None, None] + rest_bar) * probs
            bar = _added(_by_shard(bar), places, of_listed).reshape(bar.shape)
        bar = bar / temperature
        if cap:
            bar *= 1.0 - jnp.square(logits * (temperature / cap))
        if suppressed:  # also where the line above is infinity times zero
            bar = jnp.where(is_inside(tokens, suppressed), 0.0, bar)
        bar = bar.astype(h.dtype)
        bar = constrain(bar, "batch", "length", "vocab", None, None)
        # Each outer shard keeps its own sum: one reduction at the end, none per piece.
        hidden_bar += jnp.einsum("btoir,oird->obtd", bar, rows, preferred_element_type=jnp.float32)
        rows_bar = jnp.einsum("btoir,btd->oird", bar, h, preferred_element_type=jnp.float32)
        hidden_bar = constrain(hidden_bar, "vocab", "batch", "length", None)
        return (hidden_bar, pieces.put(weight_bar, rows_bar, number)), None

    zeros = jnp.zeros((pieces.sizes[0], *hidden.shape), jnp.float32)
    zeros = constrain(zeros, "vocab", "batch", "length", None)
    # In the weight's own order of rows: stacked pieces would need a copy.
    start = zeros, pieces.split(jnp.zeros_like(weight))
    (hidden_bar, weight_bar), _ = jax.lax.scan(body, start, pieces.numbered())
    return (
        constrain(hidden_bar.sum(0), "batch", "length", None).astype(hidden.dtype),
        weight_bar.reshape(weight.shape),
        np.zeros(targets.shape, jax.dtypes.float0),
        np.zeros(valid.shape, jax.dtypes.float0),
        jnp.zeros_like(temperature),
        np.zeros(listed.shape, jax.dtypes.float0),
    )


_statistics.defvjp(_statistics_forward, _statistics_backward)


def token_statistics(
    hidden: Float[Array, "B T D"],
    weight: Float[Array, "V D"],
    tokens: Int[Array, "B T"],
    places: Places,
    *,
    temperature: float | Float[Array, ""] = 1.0,
    chunk: int = 512,
    entropy: Entropy = "gradient",
    cap: float = 0.0,
    listed: Int[Array, "B T k"] | None = None,
    suppressed: TokenRanges = (),
) -> Statistics:
    """Returns what the distributions say that tokens at `places` are drawn from; elsewhere zero.

    `log_probs[:, t] = log softmax(hidden[:, t-1] @ weight.T / temperature)[tokens[:, t]]`;
    everything else is of the same distribution. The first token of each sequence has no
    predecessor and gets 0, as does padding.

    Gradients flow to `hidden` and `weight` from log-probs, also of listed tokens, and entropies (in
    nats). The backward pass computes logits again. Products run in the dtype of `hidden`,
    accumulated in float32.

    Args:
      temperature: Divides the logits; above 0. Has no gradient.
      chunk: Tokens whose logits exist at one time on each shard of the batch; at least 1.
      entropy: "none" returns 0 for entropy and sum of squares; "value" gives them no gradient;
        "likeliest" returns 0, and 1 for each token than which none is likelier.
      cap: Logits become `cap * tanh(logit / cap)` before the temperature; 0: they stay.
      listed: Other tokens whose log-probs are wanted in place of each token; no token twice.
      suppressed: Tokens of probability 0; all else is of the distribution over the others. Where
        one of them stands in `tokens` (an image in a prompt), results are zero.
    """
    if listed is None:
        listed = jnp.zeros((*tokens.shape, 0), jnp.int32)
    temperature = jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    targets, valid = places.taken(tokens), places.valid
    if suppressed:
        valid &= ~is_inside(targets, suppressed)
    asked = places.states(hidden), weight, targets, valid, temperature
    found = _statistics(*asked, places.taken(listed), chunk, entropy, cap, suppressed)
    found = Statistics(*map(places.put, found))
    return found._replace(sum_squared_probs=jax.lax.stop_gradient(found.sum_squared_probs))


def _scores(hidden: Float[Array, "B T D"], weight: Float[Array, "1 D"]) -> Float[Array, "B T"]:
    weight = weight[0].astype(hidden.dtype)
    return jnp.einsum("btd,d->bt", hidden, weight, preferred_element_type=jnp.float32)


def token_values(
    hidden: Float[Array, "B T D"], weight: Float[Array, "1 D"], places: Places
) -> Float[Array, "B T"]:
    """Returns `hidden[:, t-1] @ weight`: the value just before token t was emitted, float32.

    Elsewhere than at `places` it is 0.
    """
    scores = places.states(_scores(hidden, weight)[..., None])[..., 0]
    return places.put(jnp.where(places.valid, scores, 0.0))


def sequence_scores(
    hidden: Float[Array, "B T D"], weight: Float[Array, "1 D"], last_index: Int[Array, " B"]
) -> Float[Array, " B"]:
    """Returns `hidden[b, last_index[b]] @ weight`: one score a row, float32."""
    # All positions are scored first: a hidden state is a gather over a dim that may be split.
    return jnp.take_along_axis(_scores(hidden, weight), last_index[:, None], axis=1)[:, 0]
