"""Attention modules: projections, rotary embeddings, grouped-query and latent attention."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.architecture import Architecture, KeyIndexer, LayerType, RopeScaling
from jaxrl_llm.models.attention import DEFAULT_SCORING, AttentionScoring, KeyIndex
from jaxrl_llm.models.layers import LayerNorm, Linear, ParamFactory, RMSNorm, rms_normalized
from jaxrl_llm.sharding.mesh import constrain

INDEXER = "indexer"  # the module whose parameters no gradient reaches
_LATENT_EPS = 1e-6  # of norms inside latent attention, independent of the model's `norm_eps`


class AttentionInputs(NamedTuple):
    """Arguments of `AttentionFunction`: queries, keys and values of one layer, and its mask and
    scoring.
    """

    q: Float[Array, "B T N H"]  # after rotary embeddings, as the keys
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K value"] | None  # None: the first dims of the keys
    cache_entries: tuple[Array, ...]  # what the KV cache stores: k and v, or one latent head
    scoring: AttentionScoring = DEFAULT_SCORING
    window: int = 0
    chunk: int = 0
    value_size: int = 0  # dims of the keys that are values, if `v` is None
    # Sparse attention: a query attends to its `top_keys` best keys only. The keys of the index are
    # also the last dims of `cache_entries[0]`, behind those that `q` is compared with.
    key_index: KeyIndex | None = None
    top_keys: int = 0


# Returns the attention output [B, T, N, value], and a result of its own such as the new KV cache.
AttentionFunction = Callable[[AttentionInputs], tuple[Array, object]]
Rotary = dict[str, tuple[Array, ...]]  # cos and sin by `LayerType.rope`


def rotary_frequencies(size: int, theta: float, scaling: RopeScaling) -> Float[Array, " half"]:
    """The angle per position of every pair (arXiv:2104.09864), float32."""
    frequencies = theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    if scaling.kind == "longrope":
        factors = scaling.long_factors if scaling.is_long else scaling.short_factors
        return frequencies / jnp.asarray(factors, jnp.float32)
    if scaling.factor != 1.0:
        unscaled = _unscaled_shares(frequencies, theta, scaling)
        frequencies = frequencies * (unscaled + (1.0 - unscaled) / scaling.factor)
    return frequencies


def rotary_table(
    positions: Int[Array, "B T *parts"],
    size: int,
    theta: float,
    scaling: RopeScaling,
    sections: tuple[int, ...] = (),
    interleaved: bool = False,
) -> tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]]:
    """Cosine and sine of every position's rotation angles, float32.

    With positions in parts (M-RoPE), each part rotates its section of the pairs; see
    `_part_of_pair` for `interleaved`.
    """
    frequencies = rotary_frequencies(size, theta, scaling)
    angle_positions = positions.astype(jnp.float32)[..., None]
    if positions.ndim > 2:
        part_of_pair = _part_of_pair(size // 2, sections, interleaved)
        angle_positions = jnp.take(angle_positions[..., 0], part_of_pair, axis=-1)
    angles = (angle_positions * frequencies)[..., None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if scaling.magnitude != 1.0:
        cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
    return cos, sin


def _part_of_pair(
    num_pairs: int, sections: tuple[int, ...], interleaved: bool
) -> Int[np.ndarray, " pairs"]:
    """The part of the position (time, row or column) that rotates each pair of a head.

    `interleaved` parts alternate, from the highest frequency on, as long as a spatial part has
    pairs left; time has the others (arXiv:2511.21631, Sec. 2).

    >>> _part_of_pair(8, (4, 2, 2), True).tolist()
    [0, 1, 2, 0, 1, 2, 0, 0]
    """
    if not interleaved:
        return np.repeat(np.arange(len(sections)), sections)
    part_of_pair = np.zeros(num_pairs, int)
    for part in (1, 2):
        part_of_pair[part : 3 * sections[part] : 3] = part
    return part_of_pair


def rotary_tables(shape: Architecture, positions: Int[Array, "B T *parts"]) -> Rotary:
    """The rotary tables at these positions for every `LayerType.rope` of the model."""
    latent, tables = shape.latent, Rotary()
    kinds = {layer.rope for layer in shape.layer_types}
    size = shape.rope_size or shape.head_size - (latent.plain_size if latent else 0)
    if "main" in kinds:
        tables["main"] = rotary_table(
            positions,
            size,
            theta=shape.rope_theta,
            scaling=shape.rope_scaling,
            sections=shape.rope_sections,
            interleaved=shape.rope_sections_interleaved,
        )
    if "local" in kinds:
        tables["local"] = rotary_table(positions, size, shape.local_rope_theta, RopeScaling())
    if "none" in kinds and shape.long_query_scale:
        # Attention temperature that grows with the position of the query (arXiv:2501.19399).
        steps = jnp.floor((positions.astype(jnp.float32) + 1.0) / shape.long_query_from)
        scales = 1.0 + shape.long_query_scale * jnp.log1p(steps)
        tables["none"] = (scales[..., None, None],)
    return tables


def _unscaled_shares(
    frequencies: Float[Array, " half"], theta: float, scaling: RopeScaling
) -> Float[Array, " half"]:
    """The share of each frequency that is not divided by the factor, see `RopeScaling`."""
    if scaling.kind == "linear":
        return jnp.zeros_like(frequencies)
    original = scaling.original_max_positions
    if scaling.kind == "llama3":
        turns = original / (2 * jnp.pi / frequencies)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        return jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    half = frequencies.shape[0]

    def pair_with_turns(times: float) -> float:
        return half * math.log(original / (times * 2 * math.pi)) / math.log(theta)

    first, last = pair_with_turns(scaling.fast_turns), pair_with_turns(scaling.slow_turns)
    if scaling.whole_dims:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    ramp = (jnp.arange(half, dtype=jnp.float32) - first) / max(last - first, 0.001)
    return 1.0 - jnp.clip(ramp, 0.0, 1.0)


def apply_rotary(x: Float[Array, "B T N H"], table, interleaved: bool = False):
    """Rotates pairs of the first dims of `x` by the angles of its position.

    Pairs are (i, i + half) of the rotated dims, or neighbours if `interleaved`, which come out as
    (i, i + half): query-key products are the same.
    """
    cos, sin = table
    size = 2 * cos.shape[-1]
    wide = x[..., :size].astype(jnp.float32)
    if interleaved:
        first, second = wide[..., ::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    if size < x.shape[-1]:
        rotated.append(x[..., size:].astype(jnp.float32))
    return jnp.concatenate(rotated, -1).astype(x.dtype)


class GroupedQueryAttention(nnx.Module):
    """Grouped-query attention (arXiv:2305.13245)."""

    def __init__(self, build: ParamFactory, shape: Architecture, layer: LayerType):
        d, h = shape.hidden_size, shape.head_size
        queries, keys = shape.num_heads * h, shape.num_kv_heads * h
        # Of each head its query and then, with `output_gate`, its gate, as in files.
        q_dims = ("embed", "gated_heads" if shape.output_gate else "heads")
        self.q = Linear(build, "q", d, queries * (1 + shape.output_gate), q_dims, shape.qkv_bias)
        self.k = Linear(build, "k", d, keys, ("embed", "kv_heads"), shape.qkv_bias)
        self.v = Linear(build, "v", d, keys, ("embed", "kv_heads"), shape.qkv_bias)
        self.o = Linear(build, "o", queries, d, ("heads", "embed"), shape.o_bias)
        if shape.qk_norm:
            self.q_norm = RMSNorm(build, h, shape)
            self.k_norm = RMSNorm(build, h, shape)
        elif shape.wide_qk_norm:
            self.q_norm = RMSNorm(build, queries, shape)
            self.k_norm = RMSNorm(build, keys, shape)
        if shape.sinks:
            self.sinks = build.normal((shape.num_heads,), ("norm",))
        self.shape, self.layer, self.projected = shape, layer, build.products.after_qkv_projection

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rotary: Rotary,
        attend: AttentionFunction,
        compressed: bool = False,
    ):
        shape, layer = self.shape, self.layer
        heads = (*x.shape[:-1], -1, shape.head_size)
        q, k, v = (self.projected(f(x)) for f in (self.q, self.k, self.v))
        if shape.output_gate:
            by_head = q.reshape(*x.shape[:-1], -1, 2 * shape.head_size)
            q, gate = by_head[..., : shape.head_size], by_head[..., shape.head_size :]
        if shape.wide_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (projection.reshape(heads) for projection in (q, k, v))
        if shape.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if layer.rope != "none":
            table, pairs = rotary[layer.rope], shape.rope_interleaved
            q, k = apply_rotary(q, table, pairs), apply_rotary(k, table, pairs)
            if shape.unit_qk:
                q, k = (
                    rms_normalized(a.astype(jnp.float32), shape.norm_eps).astype(a.dtype)
                    for a in (q, k)
                )
        elif shape.long_query_scale:
            q = (q * rotary["none"][0]).astype(q.dtype)
        q = constrain(q, "batch", "length", "heads", None)
        k = constrain(k, "batch", "length", "kv_heads", None)
        v = constrain(v, "batch", "length", "kv_heads", None)
        q, k, v = (checkpoint_name(x, name) for x, name in zip((q, k, v), "qkv", strict=True))
        sinks = self.sinks[...] if shape.sinks else None
        scoring = AttentionScoring(shape.query_scale, shape.score_cap, sinks)
        mixed, cache = attend(AttentionInputs(q, k, v, (k, v), scoring, layer.window, layer.chunk))
        mixed = checkpoint_name(mixed, "mixed")
        if shape.output_gate:
            mixed = mixed * jax.nn.sigmoid(gate)
        return self.o(mixed.reshape(*x.shape[:-1], -1)), cache


class Indexer(nnx.Module):
    """The lightning indexer of a sparse attention layer (arXiv:2512.02556, Sec. 2.1).

    Its choice of keys has no gradient, so that a loss on the model's output leaves its parameters
    as they are; they were trained to imitate the attention that they now select keys for.
    """

    def __init__(self, build: ParamFactory, shape: Architecture, indexer: KeyIndexer):
        assert shape.latent is not None
        d, heads, size = shape.hidden_size, indexer.num_heads, indexer.head_size
        self.q = Linear(build, INDEXER, shape.latent.q_rank, heads * size, ("rank", "whole"))
        self.k = Linear(build, INDEXER, d, size, ("whole", "rank"))
        self.k_norm = LayerNorm(build, size)
        self.weights = Linear(build, INDEXER, d, heads, ("whole", "rank"))
        self.indexer = indexer

    def __call__(
        self,
        x: Float[Array, "B T D"],
        q_latent: Float[Array, "B T rank"],
        table: tuple[Array, ...],
    ) -> KeyIndex:
        """The index queries and keys of tokens; the first dims of both are rotated."""
        heads, size = self.indexer.num_heads, self.indexer.head_size
        x, q_latent = jax.lax.stop_gradient((x, q_latent))
        pairs = self.indexer.rope_interleaved
        q = apply_rotary(self.q(q_latent).reshape(*x.shape[:-1], heads, size), table, pairs)
        k = apply_rotary(self.k_norm(self.k(x))[..., None, :], table, pairs)
        weights = self.weights(x.astype(jnp.float32)) * (heads * size) ** -0.5
        return jax.lax.stop_gradient(KeyIndex(q, k[..., 0, :], weights))


class LatentAttention(nnx.Module):
    """Multi-head latent attention, MLA (arXiv:2405.04434).

    The KV cache stores one latent vector per token and the rotated part of the key, which all heads
    share. `compressed` (for decoding): the up-projections are absorbed into queries and output, so
    that all heads attend to the latents directly (Sec. 2.1.2 there). It is the same function.
    """

    def __init__(self, build: ParamFactory, shape: Architecture, layer: LayerType):
        latent = shape.latent
        assert latent is not None
        d, heads, rank = shape.hidden_size, shape.num_heads, latent.kv_rank
        inner_shape = dataclasses.replace(shape, norm_eps=_LATENT_EPS)
        self.rotated = shape.head_size - latent.plain_size
        queries, keys_and_values = (
            heads * shape.head_size,
            heads * (latent.plain_size + latent.value_size),
        )
        if latent.q_rank:
            self.q_a = Linear(build, "q", d, latent.q_rank, ("whole", "rank"))
            self.q_norm = RMSNorm(build, latent.q_rank, inner_shape)
            self.q_b = Linear(build, "q", latent.q_rank, queries, ("rank", "heads"))
        else:
            self.q = Linear(build, "q", d, queries, ("embed", "heads"))
        self.kv_a = Linear(build, "k", d, rank + self.rotated, ("whole", "rank"))
        self.kv_norm = RMSNorm(build, rank, inner_shape)
        self.kv_b = Linear(build, "v", rank, keys_and_values, ("rank", "key_value_heads"))
        self.o = Linear(build, "o", heads * latent.value_size, d, ("value_heads", "embed"))
        if layer.top_keys:
            assert shape.indexer is not None
            self.indexer = Indexer(build, shape, shape.indexer)
        self.layer = layer
        self.shape, self.latent, self.projected = shape, latent, build.products.after_qkv_projection

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rotary: Rotary,
        attend: AttentionFunction,
        compressed: bool = False,
    ):
        shape, latent = self.shape, self.latent
        plain, rank = latent.plain_size, latent.kv_rank
        table, pairs = rotary["main"], shape.rope_interleaved
        q_latent = self.q_norm(self.q_a(x)) if latent.q_rank else None
        q = self.q(x) if q_latent is None else self.q_b(q_latent)
        q = self.projected(q).reshape(*x.shape[:-1], -1, shape.head_size)
        q_rotated = apply_rotary(q[..., plain:], table, pairs)
        kv_down = self.kv_a(x)
        kv_latent = self.kv_norm(kv_down[..., :rank])
        k_rotated = apply_rotary(kv_down[..., None, rank:], table, pairs)
        cached = jnp.concatenate([kv_latent[..., None, :], k_rotated], -1)
        scoring = AttentionScoring(shape.query_scale or shape.head_size**-0.5)
        sparse: dict[str, Any] = {}
        cache_entry = cached
        if self.layer.top_keys:
            assert q_latent is not None
            key_index = self.indexer(x, q_latent, table)
            sparse = {"key_index": key_index, "top_keys": self.layer.top_keys}
            cache_entry = jnp.concatenate([cached, key_index.k[..., None, :]], -1)
        if compressed:
            up = self.kv_b.weight(x.dtype).reshape(rank, -1, plain + latent.value_size)
            absorbed = jnp.einsum("btnd,rnd->btnr", q[..., :plain], up[..., :plain])
            q_latent = jnp.concatenate([absorbed, q_rotated], -1)
            mixed, cache = attend(
                AttentionInputs(
                    q_latent, cached, None, (cache_entry,), scoring, value_size=rank, **sparse
                )
            )
            mixed = jnp.einsum("btnr,rnd->btnd", mixed, up[..., plain:])
        else:
            up = self.kv_b(kv_latent).reshape(*x.shape[:-1], -1, plain + latent.value_size)
            rotated = jnp.broadcast_to(k_rotated, (*up.shape[:-1], self.rotated))
            q = jnp.concatenate([q[..., :plain], q_rotated], -1)
            k, v = jnp.concatenate([up[..., :plain], rotated], -1), up[..., plain:]
            q, k, v = (constrain(a, "batch", "length", "heads", None) for a in (q, k, v))
            q, k, v = (checkpoint_name(a, name) for a, name in zip((q, k, v), "qkv", strict=True))
            mixed, cache = attend(AttentionInputs(q, k, v, (cache_entry,), scoring, **sparse))
            mixed = checkpoint_name(mixed, "mixed")
        return self.o(mixed.reshape(*x.shape[:-1], -1)), cache
