"""Attention as a part of a layer: projections, rotation, and the kinds that families have."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.attention import PLAIN, Scoring
from jaxrl_llm.models.layers import Build, Linear, RMSNorm, unit
from jaxrl_llm.models.shape import Layer, RopeScaling, Shape
from jaxrl_llm.sharding.mesh import constrain

_LATENT_EPS = 1e-6  # of norms inside latent attention, whatever that of the others is


class Attention(NamedTuple):
    """What one layer attends to, and how."""

    q: Float[Array, "B T N H"]  # rotated by their positions, as the keys
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K value"] | None  # None: the first dims of the keys
    cached: tuple[Array, ...]  # what later tokens need of these: one head of keys, or k and v
    scoring: Scoring = PLAIN
    window: int = 0
    chunk: int = 0
    value_size: int = 0  # dims of the keys that are values, if `v` is None


# Returns mixed values [B, T, N, value] and whatever it keeps.
Attend = Callable[[Attention], tuple[Array, object]]
Rotary = dict[str, tuple[Array, ...]]  # by name in `Layer.rope`


def rotary_frequencies(size: int, theta: float, scaling: RopeScaling) -> Float[Array, " half"]:
    """Returns the angle per position of every pair (arXiv:2104.09864), float32."""
    frequencies = theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    if scaling.factor != 1.0:
        keep = _kept_frequencies(frequencies, theta, scaling)
        frequencies = frequencies * (keep + (1.0 - keep) / scaling.factor)
    return frequencies


def rotary_table(
    positions: Int[Array, "B T *parts"],
    size: int,
    theta: float,
    scaling: RopeScaling,
    sections: tuple[int, ...] = (),
) -> tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]]:
    """Returns cosine and sine of every position's rotation angles, float32.

    Of positions in parts, each turns its section of the pairs.
    """
    frequencies = rotary_frequencies(size, theta, scaling)
    numbers = positions.astype(jnp.float32)[..., None]
    if positions.ndim > 2:
        of_pair = np.repeat(np.arange(len(sections)), sections)
        numbers = jnp.take(numbers[..., 0], of_pair, axis=-1)
    angles = (numbers * frequencies)[..., None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if scaling.magnitude != 1.0:
        cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
    return cos, sin


def rotary_tables(shape: Shape, positions: Int[Array, "B T *parts"]) -> Rotary:
    """Returns what layers of each kind rotate queries and keys at these positions with."""
    latent, found = shape.latent, Rotary()
    kinds = {layer.rope for layer in shape.kinds}
    size = shape.rope_size or shape.head_size - (latent.plain_size if latent else 0)
    if "main" in kinds:
        how = shape.rope_theta, shape.rope_scaling, shape.rope_sections
        found["main"] = rotary_table(positions, size, *how)
    if "local" in kinds:
        found["local"] = rotary_table(positions, size, shape.local_rope_theta, RopeScaling())
    if "none" in kinds and shape.long_query_scale:
        # Queries far from the start look more sharply (arXiv:2501.19399).
        steps = jnp.floor((positions.astype(jnp.float32) + 1.0) / shape.long_query_from)
        factors = 1.0 + shape.long_query_scale * jnp.log1p(steps)
        found["none"] = (factors[..., None, None],)
    return found


def _kept_frequencies(
    frequencies: Float[Array, " half"], theta: float, scaling: RopeScaling
) -> Float[Array, " half"]:
    """Returns which share of each frequency is not divided by the factor, see `RopeScaling`."""
    if scaling.kind == "linear":
        return jnp.zeros_like(frequencies)
    original = scaling.original_max_positions
    if scaling.kind == "llama3":
        turns = original / (2 * jnp.pi / frequencies)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        return jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    half = frequencies.shape[0]

    def dim_that_turns(times: float) -> float:
        return half * math.log(original / (times * 2 * math.pi)) / math.log(theta)

    first, last = dim_that_turns(scaling.fast_turns), dim_that_turns(scaling.slow_turns)
    if scaling.whole_dims:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    ramp = (jnp.arange(half, dtype=jnp.float32) - first) / max(last - first, 0.001)
    return 1.0 - jnp.clip(ramp, 0.0, 1.0)


def rotate(x: Float[Array, "B T N H"], table, interleaved: bool = False):
    """Returns `x` with pairs of its first dims rotated by its position's angles.

    Pairs are (i, i + half) of the rotated dims, or neighbours if `interleaved`, which come out as
    (i, i + half): products of queries and keys are the same.
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


class GroupedAttention(nnx.Module):
    """Attention in which several query heads share keys and values (arXiv:2305.13245)."""

    def __init__(self, build: Build, shape: Shape, layer: Layer):
        d, h = shape.hidden_size, shape.head_size
        queries, keys = shape.num_heads * h, shape.num_kv_heads * h
        self.q = Linear(build, "q", d, queries, ("embed", "heads"), shape.qkv_bias)
        self.k = Linear(build, "k", d, keys, ("embed", "kv_heads"), shape.qkv_bias)
        self.v = Linear(build, "v", d, keys, ("embed", "kv_heads"), shape.qkv_bias)
        self.o = Linear(build, "o", queries, d, ("heads", "embed"), shape.o_bias)
        if shape.qk_norm:
            self.q_norm = RMSNorm(build, h, shape)
            self.k_norm = RMSNorm(build, h, shape)
        if shape.sinks:
            self.sinks = build.normal((shape.num_heads,), ("norm",))
        self.shape, self.layer, self.projected = shape, layer, build.products.projected

    def __call__(
        self, x: Float[Array, "B T D"], rotary: Rotary, attend: Attend, compressed: bool = False
    ):
        shape, layer = self.shape, self.layer
        heads = (*x.shape[:-1], -1, shape.head_size)
        q, k, v = (self.projected(f(x)).reshape(heads) for f in (self.q, self.k, self.v))
        if shape.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if layer.rope != "none":
            table, pairs = rotary[layer.rope], shape.rope_interleaved
            q, k = rotate(q, table, pairs), rotate(k, table, pairs)
            if shape.unit_qk:
                q, k = (unit(a.astype(jnp.float32), shape.norm_eps).astype(a.dtype) for a in (q, k))
        elif shape.long_query_scale:
            q = (q * rotary["none"][0]).astype(q.dtype)
        q = constrain(q, "batch", "length", "heads", None)
        k = constrain(k, "batch", "length", "kv_heads", None)
        v = constrain(v, "batch", "length", "kv_heads", None)
        q, k, v = (checkpoint_name(x, name) for x, name in zip((q, k, v), "qkv", strict=True))
        sinks = self.sinks[...] if shape.sinks else None
        scoring = Scoring(shape.query_scale, shape.score_cap, sinks)
        mixed, kept = attend(Attention(q, k, v, (k, v), scoring, layer.window, layer.chunk))
        mixed = checkpoint_name(mixed, "mixed")
        return self.o(mixed.reshape(*x.shape[:-1], -1)), kept


class LatentAttention(nnx.Module):
    """Attention whose keys and values come from one short vector a token (arXiv:2405.04434).

    That vector and the rotated part of the key, which all heads share, are what decoding keeps.
    `compressed`: queries are taken to that vector's space, in which all heads share one key, and
    what they mix is taken back (Sec. 2.1.2 there). It is the same function.
    """

    def __init__(self, build: Build, shape: Shape):
        latent = shape.latent
        assert latent is not None
        d, heads, rank = shape.hidden_size, shape.num_heads, latent.kv_rank
        as_inside = dataclasses.replace(shape, norm_eps=_LATENT_EPS)
        self.rotated = shape.head_size - latent.plain_size
        queries, both = heads * shape.head_size, heads * (latent.plain_size + latent.value_size)
        if latent.q_rank:
            self.q_a = Linear(build, "q", d, latent.q_rank, ("whole", "rank"))
            self.q_norm = RMSNorm(build, latent.q_rank, as_inside)
            self.q_b = Linear(build, "q", latent.q_rank, queries, ("rank", "heads"))
        else:
            self.q = Linear(build, "q", d, queries, ("embed", "heads"))
        self.kv_a = Linear(build, "k", d, rank + self.rotated, ("whole", "rank"))
        self.kv_norm = RMSNorm(build, rank, as_inside)
        self.kv_b = Linear(build, "v", rank, both, ("rank", "key_value_heads"))
        self.o = Linear(build, "o", heads * latent.value_size, d, ("value_heads", "embed"))
        self.shape, self.latent, self.projected = shape, latent, build.products.projected

    def __call__(
        self, x: Float[Array, "B T D"], rotary: Rotary, attend: Attend, compressed: bool = False
    ):
        shape, latent = self.shape, self.latent
        plain, rank = latent.plain_size, latent.kv_rank
        table, pairs = rotary["main"], shape.rope_interleaved
        q = self.q_b(self.q_norm(self.q_a(x))) if latent.q_rank else self.q(x)
        q = self.projected(q).reshape(*x.shape[:-1], -1, shape.head_size)
        turned = rotate(q[..., plain:], table, pairs)
        down = self.kv_a(x)
        short = self.kv_norm(down[..., :rank])
        shared = rotate(down[..., None, rank:], table, pairs)
        kept = jnp.concatenate([short[..., None, :], shared], -1)
        scoring = Scoring(shape.query_scale or shape.head_size**-0.5)
        if compressed:
            up = self.kv_b.weight(x.dtype).reshape(rank, -1, plain + latent.value_size)
            inner = jnp.einsum("btnd,rnd->btnr", q[..., :plain], up[..., :plain])
            asked = jnp.concatenate([inner, turned], -1)
            mixed, found = attend(Attention(asked, kept, None, (kept,), scoring, value_size=rank))
            mixed = jnp.einsum("btnr,rnd->btnd", mixed, up[..., plain:])
        else:
            up = self.kv_b(short).reshape(*x.shape[:-1], -1, plain + latent.value_size)
            rotated = jnp.broadcast_to(shared, (*up.shape[:-1], self.rotated))
            q = jnp.concatenate([q[..., :plain], turned], -1)
            k, v = jnp.concatenate([up[..., :plain], rotated], -1), up[..., plain:]
            q, k, v = (constrain(a, "batch", "length", "heads", None) for a in (q, k, v))
            q, k, v = (checkpoint_name(a, name) for a, name in zip((q, k, v), "qkv", strict=True))
            mixed, found = attend(Attention(q, k, v, (kept,), scoring))
            mixed = checkpoint_name(mixed, "mixed")
        return self.o(mixed.reshape(*x.shape[:-1], -1)), found
