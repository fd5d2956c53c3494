"""The heads: token log-probs and entropies, values, and sequence scores from last hidden states.

Arrays are shifted only in `target_positions.py`: hidden state t-1 predicts token t, and index t
of every result below is about `tokens[:, t]`. Logits are computed and reduced one chunk of the
vocabulary at a time; those of a whole batch are never materialized, neither forward nor backward.
"""

import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.attention import soft_capped
from jaxrl_llm.models.hf.vocabulary import TokenRanges, is_inside
from jaxrl_llm.models.target_positions import TargetPositions
from jaxrl_llm.sharding.mesh import TRAIN, axis_sizes, constrain, partition_spec

_MIN_ROWS = 128  # rows of the weight in a gathered chunk
# How entropies are computed: not at all, without a gradient, or with one. "likeliest": not at all,
# and the sum of squares is 1 where the token is an argmax, else 0.
EntropyMode = Literal["none", "likeliest", "value", "gradient"]
SUPPRESSED_LOGIT = -1e30  # the logit of a suppressed token; finite, as -inf - (-inf) is NaN
_MIN_REST = 1e-37  # floor of the unlisted tokens' mass, relative to the likeliest token's


class TokenStatistics(NamedTuple):
    """Statistics of the distribution each token was drawn from; float32."""

    log_probs: Float[Array, "B T"]  # of the tokens in the batch
    entropies: Float[Array, "B T"]
    sum_squared_probs: Float[Array, "B T"]
    # Log-probs of k listed tokens, then of all others together; [B, T, 0] if none are listed.
    listed_log_probs: Float[Array, "B T k+1"] | Float[Array, "B T 0"]


def num_vocab_chunks(local_rows: int, gathered_over: int, num_tokens: int, chunk: int) -> int:
    """The number of chunks that the vocabulary is split into.

    The logits of one vocabulary chunk take at most the memory of `chunk` tokens' logits over the
    whole vocabulary; the number divides `local_rows`, a device's rows of the weight [V, D]. Each
    chunk has at least 128 rows, as smaller matmuls are inefficient. A chunk is gathered from
    `gathered_over` devices; a device computes logits of `num_tokens` tokens.
    """
    target = max(1, min(-(-num_tokens // chunk), local_rows * gathered_over // _MIN_ROWS))
    return next((n for n in range(target, local_rows + 1) if local_rows % n == 0), local_rows)


@dataclasses.dataclass(frozen=True)
class VocabChunks:
    """The output projection in chunks of the vocabulary, so that only one chunk's logits exist.

    The weight is sharded over `outer` (tensor) times `inner` (the FSDP axes) devices, and every
    chunk takes as many rows of each. So all-gathers of a chunk, and reduce-scatters of its
    gradient, run over the inner axes only; no device holds the whole weight or gradient.
    """

    outer: tuple[str, ...]  # axes that shard the computation
    inner: tuple[str, ...]  # axes that shard only the storage
    sizes: tuple[int, int]  # devices of both groups of axes
    num_chunks: int
    rows: int  # of one chunk on one device

    @classmethod
    def from_weight(cls, vocab: int, rows: tuple[int, ...], chunk: int) -> "VocabChunks":
        """The chunks of a weight of `vocab` rows, for `rows` of tokens [B, T]; see
        `num_vocab_chunks`.
        """
        mesh = axis_sizes()
        spec = partition_spec((vocab, 1), ("vocab", None), TRAIN, mesh, {})[0] if mesh else None
        axes = (spec,) if isinstance(spec, str) else spec or ()
        outer = tuple(axis for axis in axes if axis == "tensor")
        inner = tuple(axis for axis in axes if axis != "tensor")
        sizes = tuple(math.prod(mesh[axis] for axis in group) for group in (outer, inner))
        shards = math.prod(size for axis, size in mesh.items() if axis != "tensor")
        local = vocab // math.prod(sizes)
        count = num_vocab_chunks(local, sizes[1], -(-math.prod(rows) // shards), chunk)
        return cls(outer, inner, (sizes[0], sizes[1]), count, local // count)

    def split(self, weight: Float[Array, "V D"]) -> Float[Array, "outer inner rows D"]:
        """Reshapes the weight by the devices that hold its rows, without moving data."""
        weight = weight.reshape(*self.sizes, -1, weight.shape[1])
        return self._constrained(weight, self.outer, self.inner)

    def gather(
        self, weight: Float[Array, "outer inner rows D"], index: Int[Array, ""]
    ) -> Float[Array, "outer inner chunk D"]:
        """All-gathers one chunk over the inner axes; it stays sharded over the outer ones.

        The inner dim is kept: merging it into the rows would copy every row on a TPU where the
        rows of a device do not fill whole memory tiles.
        """
        chunk = jax.lax.dynamic_slice_in_dim(weight, index * self.rows, self.rows, 2)
        # Constrained twice: with the second alone, XLA gathers the whole weight and slices then.
        return self._constrained(self._constrained(chunk, self.outer, self.inner), self.outer)

    def scatter_gradient(
        self,
        weight: Float[Array, "outer inner rows D"],
        bar: Float[Array, "outer inner chunk D"],
        index: Int[Array, ""],
    ) -> Float[Array, "outer inner rows D"]:
        """Writes the gradient of one chunk, reduce-scattered, into the gradient of the weight."""
        bar = self._constrained(bar, self.outer, self.inner).astype(weight.dtype)
        weight = jax.lax.dynamic_update_slice_in_dim(weight, bar, index * self.rows, 2)
        return self._constrained(weight, self.outer, self.inner)

    def scan_inputs(
        self,
    ) -> tuple[Int[np.ndarray, " num_chunks"], Int[np.ndarray, "count outer inner r"]]:
        """The indices of the chunks, and the token ids in each: the inputs of a scan over them."""
        vocab = math.prod(self.sizes) * self.num_chunks * self.rows
        grid = np.arange(vocab, dtype=np.int32).reshape(*self.sizes, self.num_chunks, self.rows)
        return np.arange(self.num_chunks, dtype=np.int32), np.moveaxis(grid, 2, 0)

    def local_indices(
        self, tokens: Int[Array, "B T k"], index: Int[Array, ""]
    ) -> Int[Array, "B T outer k"]:
        """The indices of tokens among those of a chunk on each outer shard.

        A token of another chunk or shard, and a negative one, gets an index past the end.
        """
        inner = self.sizes[1]
        shard, row = tokens // self.rows, tokens % self.rows
        device, chunk = shard // self.num_chunks, shard % self.num_chunks
        local_index = (device % inner) * self.rows + row
        is_local = (chunk == index)[:, :, None] & (
            (device // inner)[:, :, None] == jnp.arange(self.sizes[0])[:, None]
        )
        return jnp.where(is_local, local_index[:, :, None], inner * self.rows)

    def _constrained(self, x: Array, *axes: tuple[str, ...] | None) -> Array:
        if not (self.outer or self.inner):
            return x
        return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


def chunk_logits(
    hidden: Float[Array, "B T D"], chunk: Float[Array, "outer inner chunk D"], temperature, cap
):
    """Float32 logits [B, T, outer, inner, chunk] of a chunk, sharded over the vocabulary."""
    logits = jnp.einsum("btd,oird->btoir", hidden, chunk, preferred_element_type=jnp.float32)
    logits = soft_capped(logits, cap) / temperature
    return constrain(logits, "batch", "length", "vocab", None, None)


def _flat_chunk(x: Float[Array, "B T outer inner chunk"]) -> Float[Array, "B T outer n"]:
    return x.reshape(*x.shape[:3], -1)


def _vmap_shards(function):
    """Maps a function of one shard's row [n] over arrays [B, T, outer, ...]."""
    return jax.vmap(jax.vmap(jax.vmap(function)))


# By index: comparing all logits with all listed tokens takes k times the memory of the logits.
_gather = _vmap_shards(lambda row, at: row.at[at].get(mode="fill", fill_value=0.0))
_zeroed_at = _vmap_shards(lambda row, at: row.at[at].set(0.0, mode="drop"))
_added_at = _vmap_shards(lambda row, at, values: row.at[at].add(values, mode="drop"))
_marked_at = _vmap_shards(lambda row, at: row.at[at].set(True, mode="drop"))


def _support_mask(
    logits: Float[Array, "B T outer inner chunk"],
    support: Int[Array, "B T k"],
    chunks: VocabChunks,
    index: Int[Array, ""],
) -> Bool[Array, "B T outer inner chunk"]:
    """Which logits of a chunk belong to a place's support; all, where none is listed."""
    everything = jnp.all(support < 0, -1)[..., None, None, None]
    listed = _marked_at(
        jnp.zeros(_flat_chunk(logits).shape, bool), chunks.local_indices(support, index)
    )
    return listed.reshape(logits.shape) | everything


def mask_suppressed(
    logits: Float[Array, "..."], tokens: Int[Array, "..."], suppressed: TokenRanges
):
    """The logits of `tokens`; suppressed ones are so low that their probability is 0."""
    if not suppressed:
        return logits
    return jnp.where(is_inside(tokens, suppressed), SUPPRESSED_LOGIT, logits)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9, 10))
def _statistics(
    hidden, weight, targets, valid, temperature, listed, support, chunk, entropy, cap, suppressed
):
    """`TokenStatistics` of `targets[:, t]` and `listed[:, t]` under `hidden[:, t]`."""
    return _statistics_forward(
        hidden,
        weight,
        targets,
        valid,
        temperature,
        listed,
        support,
        chunk=chunk,
        entropy=entropy,
        cap=cap,
        suppressed=suppressed,
    )[0]


def _statistics_forward(
    hidden, weight, targets, valid, temperature, listed, support, chunk, entropy, cap, suppressed
):
    chunks = VocabChunks.from_weight(weight.shape[0], targets.shape, chunk)
    # Each outer shard has its own sums [B, T, outer], merged at the end: no all-reduce in the loop.
    zeros = jnp.zeros((*targets.shape, chunks.sizes[0]), jnp.float32)
    zeros = constrain(zeros, "batch", "length", "vocab")
    listed_zeros = jnp.zeros((*listed.shape, chunks.sizes[0]), jnp.float32)
    listed_zeros = constrain(listed_zeros, "batch", "length", None, "vocab")

    rows = chunks.split(weight.astype(hidden.dtype))

    def body(carry, chunk_and_ids):
        """Merges a chunk into sums over the vocabulary, relative to the largest logit so far."""
        index, ids = chunk_and_ids
        logits = chunk_logits(hidden, chunks.gather(rows, index), temperature, cap)
        logits = mask_suppressed(logits, ids, suppressed)
        if support.shape[-1]:
            in_support = _support_mask(logits, support, chunks, index)
            logits = jnp.where(in_support, logits, SUPPRESSED_LOGIT)
        is_target = targets[..., None, None, None] == ids
        chosen = jnp.sum(jnp.where(is_target, logits, 0.0), (-2, -1))
        listed_logits, rest = listed_zeros, zeros
        if listed.shape[-1]:
            at = chunks.local_indices(listed, index)
            listed_logits = jnp.swapaxes(_gather(_flat_chunk(logits), at), -1, -2)
        top = jnp.max(logits, (-2, -1))
        logits -= top[..., None, None]
        exp_logits = jnp.exp(logits)
        total, weighted, squares = jnp.sum(exp_logits, (-2, -1)), zeros, zeros
        if listed.shape[-1]:
            rest = jnp.sum(_zeroed_at(_flat_chunk(exp_logits), at), -1)
        if entropy in ("value", "gradient"):
            weighted = jnp.sum(exp_logits * logits, (-2, -1))
            squares = jnp.sum(jnp.square(exp_logits), (-2, -1))
        chunk_sums = top, chosen, total, weighted, squares, listed_logits, rest
        return _merge_sums(*jax.tree.map(lambda *x: jnp.stack(x, -1), carry, chunk_sums)), None

    start = (
        jnp.full_like(zeros, SUPPRESSED_LOGIT),
        zeros,
        zeros,
        zeros,
        zeros,
        listed_zeros,
        zeros,
    )
    sums, _ = jax.lax.scan(body, start, chunks.scan_inputs())
    top, chosen, total, weighted, squares, listed_logits, rest = _merge_sums(*sums)
    # Top and log-sum are kept apart: their sum would lose the last digits of large logits.
    log_sum = jnp.log(total)
    log_rest = jnp.log(jnp.maximum(rest, _MIN_REST))
    log_probs = jnp.where(valid, chosen - top - log_sum, 0.0)
    entropies = squared = jnp.zeros_like(top)
    if entropy in ("value", "gradient"):
        entropies = jnp.where(valid, log_sum - weighted / total, 0.0)
        squared = jnp.where(valid, squares / jnp.square(total), 0.0)
    if entropy == "likeliest":
        squared = jnp.where(valid & (chosen >= top), 1.0, 0.0)
    if listed.shape[-1]:
        log_rest_prob = (log_rest - log_sum)[..., None]
        listed_logits = jnp.concatenate(
            [listed_logits - (top + log_sum)[..., None], log_rest_prob], -1
        )
        listed_logits = jnp.where(valid[..., None], listed_logits, 0.0)
    normalizers = top, log_sum, log_rest, entropies
    residuals = (hidden, weight, targets, valid, temperature, listed, support, normalizers)
    return TokenStatistics(log_probs, entropies, squared, listed_logits), residuals


def _merge_sums(top, chosen, total, weighted, squares, listed_logits, rest):
    """Merges running sums over parts of the vocabulary, stacked along the last dim.

    With x a logit less its part's `top`: `total` sums exp(x), `weighted` x exp(x), `squares`
    exp(2 x), `rest` exp(x) of tokens that are not listed; `chosen` and
    `listed_logits` sum logits.
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
        jnp.sum(listed_logits, -1),
        jnp.sum(shrink * rest, -1),
    )


def _statistics_backward(chunk, entropy, cap, suppressed, residuals, cotangents):
    hidden, weight, targets, valid, temperature, listed, support, normalizers = residuals
    log_prob_bar, entropy_bar = (
        jnp.where(valid, bar, 0.0)[..., None, None, None] for bar in cotangents[:2]
    )
    chunks = VocabChunks.from_weight(weight.shape[0], targets.shape, chunk)
    listed_bar = rest_bar = jnp.where(valid[..., None], cotangents.listed_log_probs, 0.0)
    if listed.shape[-1]:
        listed_bar, rest_bar = listed_bar[..., :-1], listed_bar[..., -1][..., None, None, None]
        shard_listed_bar = jnp.broadcast_to(
            listed_bar[:, :, None], (*targets.shape, chunks.sizes[0], listed.shape[-1])
        )
    # Padding may hold NaN, and zero times NaN is NaN; its gradient must be zero all the same.
    h = jnp.where(valid[..., None], hidden, 0)
    top, log_sum, log_rest, entropies = (
        jnp.where(valid, x, 0.0)[..., None, None, None] for x in normalizers
    )

    weight_rows = chunks.split(weight.astype(hidden.dtype))

    def body(bars, chunk_and_ids):
        hidden_bar, weight_bar = bars
        index, ids = chunk_and_ids
        rows = chunks.gather(weight_rows, index)
        logits = mask_suppressed(chunk_logits(h, rows, temperature, cap), ids, suppressed)
        if support.shape[-1]:
            in_support = _support_mask(logits, support, chunks, index)
            logits = jnp.where(in_support, logits, SUPPRESSED_LOGIT)
        log_p = logits - top - log_sum
        probs = jnp.exp(log_p)
        # d log_prob / d logits = target - p;  d entropy / d logits = -p (log p + entropy)
        bar = log_prob_bar * ((targets[..., None, None, None] == ids) - probs)
        if entropy == "gradient":
            bar -= entropy_bar * probs * (log_p + entropies)
        if listed.shape[-1]:
            # d log_rest / d logits = p / rest - p for an unlisted token, else -p
            at = chunks.local_indices(listed, index)
            rest_part = rest_bar * jnp.exp(jnp.minimum(logits - top - log_rest, 0.0))
            unlisted_part = _zeroed_at(_flat_chunk(rest_part), at).reshape(bar.shape)
            bar += unlisted_part - (listed_bar.sum(-1)[..., None, None, None] + rest_bar) * probs
            bar = _added_at(_flat_chunk(bar), at, shard_listed_bar).reshape(bar.shape)
        bar = bar / temperature
        if cap:
            bar *= 1.0 - jnp.square(logits * (temperature / cap))
        if suppressed:  # also where the line above is infinity times zero
            bar = jnp.where(is_inside(ids, suppressed), 0.0, bar)
        if support.shape[-1]:
            bar = jnp.where(in_support, bar, 0.0)
        bar = bar.astype(h.dtype)
        bar = constrain(bar, "batch", "length", "vocab", None, None)
        # Each outer shard keeps its own sum: one reduction at the end instead of one per chunk.
        hidden_bar += jnp.einsum("btoir,oird->obtd", bar, rows, preferred_element_type=jnp.float32)
        rows_bar = jnp.einsum("btoir,btd->oird", bar, h, preferred_element_type=jnp.float32)
        hidden_bar = constrain(hidden_bar, "vocab", "batch", "length", None)
        return (hidden_bar, chunks.scatter_gradient(weight_bar, rows_bar, index)), None

    zeros = jnp.zeros((chunks.sizes[0], *hidden.shape), jnp.float32)
    zeros = constrain(zeros, "vocab", "batch", "length", None)
    # In the weight's own order of rows: gradients stacked by the scan would need a copy.
    start = zeros, chunks.split(jnp.zeros_like(weight))
    (hidden_bar, weight_bar), _ = jax.lax.scan(body, start, chunks.scan_inputs())
    return (
        constrain(hidden_bar.sum(0), "batch", "length", None).astype(hidden.dtype),
        weight_bar.reshape(weight.shape),
        np.zeros(targets.shape, jax.dtypes.float0),
        np.zeros(valid.shape, jax.dtypes.float0),
        jnp.zeros_like(temperature),
        np.zeros(listed.shape, jax.dtypes.float0),
        np.zeros(support.shape, jax.dtypes.float0),
    )


_statistics.defvjp(_statistics_forward, _statistics_backward)


def token_statistics(
    hidden: Float[Array, "B T D"],
    weight: Float[Array, "V D"],
    tokens: Int[Array, "B T"],
    target_positions: TargetPositions,
    *,
    temperature: float | Float[Array, ""] = 1.0,
    chunk: int = 512,
    entropy: EntropyMode = "gradient",
    cap: float = 0.0,
    listed: Int[Array, "B T k"] | None = None,
    support: Int[Array, "B T s"] | None = None,
    suppressed: TokenRanges = (),
) -> TokenStatistics:
    """Log-probs, entropies and more of the tokens at `target_positions`, without materializing
    logits.

    `log_probs[:, t] = log softmax(hidden[:, t-1] @ weight.T / temperature)[tokens[:, t]]`;
    everything else is of the same distribution. The first token of each sequence has no
    predecessor and gets 0, as do padding and all tokens that are not at `target_positions`.

    Gradients flow to `hidden` and `weight` from log-probs, also of listed tokens, and entropies (in
    nats). The backward pass recomputes logits. Products run in the dtype of `hidden`,
    accumulated in float32.

    Args:
      temperature: Divides the logits; above 0. Has no gradient.
      chunk: Bounds memory: on each shard of the batch, logits take at most the memory of this many
        tokens' logits over the whole vocabulary; at least 1.
      entropy: "none" returns 0 for entropy and sum of squares; "value" gives them no gradient;
        "likeliest" returns 0, and as sum of squares 1 for each token that is an argmax, else 0.
      cap: Logits become `cap * tanh(logit / cap)` before the temperature; 0: they stay.
      listed: Other tokens whose log-probs are computed at each place; no token twice.
      support: Tokens that each token was sampled from, itself among them, padded with -1; others
        have probability 0 at its place, and their logits no gradient. Where only -1 stands, the
        support is the whole vocabulary.
      suppressed: Tokens of probability 0; all else is of the distribution over the others. Where
        one of them stands in `tokens` (an image in a prompt), results are zero.
    """
    if listed is None:
        listed = jnp.zeros((*tokens.shape, 0), jnp.int32)
    if support is None:
        support = jnp.zeros((*tokens.shape, 0), jnp.int32)
    temperature = jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    targets, valid = target_positions.gather(tokens), target_positions.valid
    if suppressed:
        valid &= ~is_inside(targets, suppressed)
    # By position: `custom_vjp` has its static arguments by number.
    statistics = _statistics(
        target_positions.gather_hidden(hidden),
        weight,
        targets,
        valid,
        temperature,
        target_positions.gather(listed),
        target_positions.gather(support),
        chunk,
        entropy,
        cap,
        suppressed,
    )
    statistics = TokenStatistics(*map(target_positions.scatter, statistics))
    return statistics._replace(
        sum_squared_probs=jax.lax.stop_gradient(statistics.sum_squared_probs)
    )


def _scores(hidden: Float[Array, "B T D"], weight: Float[Array, "1 D"]) -> Float[Array, "B T"]:
    weight = weight[0].astype(hidden.dtype)
    return jnp.einsum("btd,d->bt", hidden, weight, preferred_element_type=jnp.float32)


def token_values(
    hidden: Float[Array, "B T D"], weight: Float[Array, "1 D"], target_positions: TargetPositions
) -> Float[Array, "B T"]:
    """`hidden[:, t-1] @ weight`: the value just before token t was emitted, float32.

    It is 0 for tokens that are not at `target_positions`.
    """
    scores = target_positions.gather_hidden(_scores(hidden, weight)[..., None])[..., 0]
    return target_positions.scatter(jnp.where(target_positions.valid, scores, 0.0))


def sequence_scores(
    hidden: Float[Array, "B T D"], weight: Float[Array, "1 D"], last_index: Int[Array, " B"]
) -> Float[Array, " B"]:
    """`hidden[b, last_index[b]] @ weight`: one score for each row, float32."""
    # All positions are scored first: taking one hidden state would gather over a sharded dim.
    return jnp.take_along_axis(_scores(hidden, weight), last_index[:, None], axis=1)[:, 0]
