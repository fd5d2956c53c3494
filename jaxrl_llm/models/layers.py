"""The pieces of a decoder block as Flax modules, which exist only during a trace.

Every parameter has the logical names of its dims in the metadata `logical_axes` (see
`sharding/mesh.py`). Activations that a backward pass may keep are named (see
`transformer.REMAT_POLICIES`).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.models.attention import PLAIN as PLAIN_SCORING
from jaxrl_llm.models.attention import Scoring
from jaxrl_llm.models.shape import Layer, RopeScaling, Shape
from jaxrl_llm.sharding.mesh import constrain


class Attention(NamedTuple):
    """What one layer attends to, and how."""

    q: Float[Array, "B T N H"]  # rotated by their positions, as the keys
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K value"] | None  # None: the first dims of the keys
    cached: tuple[Array, ...]  # what later tokens need of these: one head of keys, or k and v
    scoring: Scoring = PLAIN_SCORING
    window: int = 0
    chunk: int = 0
    value_size: int = 0  # dims of the keys that are values, if `v` is None


# Returns mixed values [B, T, N, value] and whatever it keeps.
Attend = Callable[[Attention], tuple[Array, object]]
Rotary = dict[str, tuple[Array, ...]]  # by name in `Layer.rope`

NO_ADAPTERS = LoraConfig()
_LATENT_EPS = 1e-6  # of norms inside latent attention, whatever that of the others is
_NORMAL = nnx.initializers.normal(0.02)
_ZEROS = nnx.initializers.zeros_init()


@jax.custom_vjp
def product(x: Float[Array, "... I"], kernel: Float[Array, "I O"]) -> Float[Array, "... O"]:
    """Returns `x @ kernel`; its backward pass moves no array.

    The gradient of the kernel is one contraction over all positions. With autodiff, XLA on CPU
    would write the incoming gradient transposed first.
    """
    return x @ kernel


def _product_forward(x, kernel):
    return x @ kernel, (x, kernel)


def _product_backward(residuals, bar):
    x, kernel = residuals
    of_x = bar @ kernel.T
    of_kernel = jax.lax.platform_dependent(x, bar, of_x, cpu=_narrower_first, default=_afterwards)
    return of_x, of_kernel


def _afterwards(x, bar, of_x):
    """The contraction, after the gradient of `x`, which is the last to need the kernel."""
    bar, _ = jax.lax.optimization_barrier((bar, of_x))
    return jnp.einsum("...i,...o->io", x, bar)


def _narrower_first(x, bar, _):
    """The same contraction; XLA on CPU writes the first operand transposed: the narrower one."""
    if x.shape[-1] <= bar.shape[-1]:
        return jnp.einsum("...i,...o->io", x, bar)
    # Without the barrier the compiler swaps the operands again.
    return jax.lax.optimization_barrier(jnp.einsum("...o,...i->oi", bar, x)).T


product.defvjp(_product_forward, _product_backward)


def float32_logits(
    hidden: Float[Array, "... D"], weight: Float[Array, "V D"]
) -> Float[Array, "... V"]:
    """Returns `hidden @ weight.T`, summed in float32 whatever the dtype of the operands."""
    return jnp.einsum("...d,vd->...v", hidden, weight, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class Products:
    """The functions a network multiplies with; the defaults are XLA's own matmuls.

    A `Linear` with at least `min_transposed` inputs and outputs stores its kernel as [out, in] and
    calls `product(x, kernel)`; 0: all kernels are [in, out] and `product` is not used.
    """

    product: Callable[[Array, Array], Array] = product
    logits: Callable[[Array, Array], Array] = float32_logits
    # mlp(x, gate, up, down) of plain kernels; None: three products.
    mlp: Callable[[Array, Array, Array, Array], Array] | None = None
    # Of decode steps, as `rollout.cache.attention`; None: that function.
    attention: Callable[..., Array] | None = None
    min_transposed: int = 0

    def transposes(self, in_size: int, out_size: int) -> bool:
        """Returns whether a kernel of this size is stored as [out, in]."""
        return 0 < self.min_transposed <= min(in_size, out_size)


PLAIN = Products()


@jax.custom_vjp
def gated(gate: Float[Array, "... F"], up: Float[Array, "... F"]) -> Float[Array, "... F"]:
    """Returns `silu(gate) * up`; its backward pass keeps the two inputs alone.

    With autodiff it would keep the sigmoid and `silu(gate)` as well.
    """
    return jax.nn.silu(gate) * up


def _gated_forward(gate, up):
    return jax.nn.silu(gate) * up, (gate, up)


def _gated_backward(residuals, bar):
    gate, up = residuals
    sigmoid = jax.nn.sigmoid(gate)
    return bar * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), bar * gate * sigmoid


gated.defvjp(_gated_forward, _gated_backward)


@dataclasses.dataclass(frozen=True)
class Build:
    """What modules make their parameters with."""

    rngs: nnx.Rngs
    dtype: Any
    lora: LoraConfig = NO_ADAPTERS
    products: Products = PLAIN

    def param(self, init, shape: tuple[int, ...], axes: tuple[str, ...], dtype=None) -> nnx.Param:
        return nnx.Param(init(self.rngs.params(), shape, dtype or self.dtype), logical_axes=axes)

    def normal(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
        return self.param(_NORMAL, shape, axes)

    def zeros(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
        return self.param(_ZEROS, shape, axes)


def as_peft(key: jax.Array, shape: tuple[int, ...], dtype) -> Float[Array, "I rank"]:
    """Returns the first factor of an adapter, uniform as `peft` draws it; the second is zero."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


class Linear(nnx.Module):
    """`x @ kernel (+ bias)`; the products say whether the kernel is stored transposed.

    With adapters of rank r, `x @ lora_a @ lora_b * alpha / r` is added (arXiv:2106.09685, Eq. 3).
    """

    def __init__(
        self,
        build: Build,
        name: str,
        in_size: int,
        out_size: int,
        axes: tuple[str, str],
        bias: bool = False,
    ):
        sizes, names = (in_size, out_size), axes
        self.product: Callable[[Array, Array], Array] = product
        if build.products.transposes(in_size, out_size):
            sizes, names, self.product = sizes[::-1], names[::-1], build.products.product
        self.kernel = build.normal(sizes, names)
        if bias:
            self.bias = build.zeros((out_size,), axes[1:])
        lora = build.lora
        if lora.rank and name in lora.targets:
            # float32 whatever the dtype of the frozen kernel: few numbers, and small steps.
            first, second = (axes[0], "rank"), ("rank", axes[1])
            self.lora_a = build.param(as_peft, (in_size, lora.rank), first, jnp.float32)
            self.lora_b = build.param(_ZEROS, (lora.rank, out_size), second, jnp.float32)
            self.scale = lora.scale

    def weight(self, dtype) -> Float[Array, "I O"]:
        """Returns the matrix that `x` is multiplied with, adapters included."""
        kernel = self.kernel[...].astype(dtype)
        if self.product is not product:
            kernel = kernel.T
        if hasattr(self, "lora_a"):
            a, b = self.lora_a[...].astype(dtype), self.lora_b[...].astype(dtype)
            kernel = kernel + a @ b * self.scale
        return kernel

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        y = self.product(x, self.kernel[...].astype(x.dtype))
        if hasattr(self, "lora_a"):
            inner = x @ self.lora_a[...].astype(x.dtype)
            y = y + inner @ self.lora_b[...].astype(x.dtype) * self.scale
        return y + self.bias[...].astype(x.dtype) if hasattr(self, "bias") else y


class RMSNorm(nnx.Module):
    """Root mean square normalization over the last dim, computed in float32 (arXiv:1910.07467)."""

    def __init__(self, build: Build, size: int, shape: Shape):
        # At first it multiplies with one.
        init = nnx.initializers.constant(1.0 - shape.norm_offset)
        self.scale = build.param(init, (size,), ("norm",))
        self.eps, self.offset = shape.norm_eps, shape.norm_offset

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        scale = self.scale[...].astype(jnp.float32)
        if self.offset:
            scale = scale + self.offset
        return (unit(x.astype(jnp.float32), self.eps) * scale).astype(x.dtype)


def unit(x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    """Returns `x` scaled to a mean square of 1 over its last dim."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + eps)


def rotary_frequencies(size: int, theta: float, scaling: RopeScaling) -> Float[Array, " half"]:
    """Returns the angle per position of every pair (arXiv:2104.09864), float32."""
    frequencies = theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    if scaling.factor != 1.0:
        keep = _kept_frequencies(frequencies, theta, scaling)
        frequencies = frequencies * (keep + (1.0 - keep) / scaling.factor)
    return frequencies


def rotary_table(
    positions: Int[Array, "B T"], size: int, theta: float, scaling: RopeScaling
) -> tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]]:
    """Returns cosine and sine of every position's rotation angles, float32."""
    frequencies = rotary_frequencies(size, theta, scaling)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if scaling.magnitude != 1.0:
        cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
    return cos, sin


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
        self.shape, self.layer = shape, layer

    def __call__(
        self, x: Float[Array, "B T D"], rotary: Rotary, attend: Attend, compressed: bool = False
    ):
        shape, layer = self.shape, self.layer
        heads = (*x.shape[:-1], -1, shape.head_size)
        q, k, v = (f(x).reshape(heads) for f in (self.q, self.k, self.v))
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
        self.shape, self.latent = shape, latent

    def __call__(
        self, x: Float[Array, "B T D"], rotary: Rotary, attend: Attend, compressed: bool = False
    ):
        shape, latent = self.shape, self.latent
        plain, rank = latent.plain_size, latent.kv_rank
        table, pairs = rotary["main"], shape.rope_interleaved
        q = self.q_b(self.q_norm(self.q_a(x))) if latent.q_rank else self.q(x)
        q = q.reshape(*x.shape[:-1], -1, shape.head_size)
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


class MLP(nnx.Module):
    """Gated MLP: `down(silu(gate(x)) * up(x))` (arXiv:2002.05202), or with GELU."""

    def __init__(self, build: Build, shape: Shape, size: int):
        d = shape.hidden_size
        self.gate = Linear(build, "gate", d, size, ("embed", "mlp"))
        self.up = Linear(build, "up", d, size, ("embed", "mlp"))
        self.down = Linear(build, "down", size, d, ("mlp", "embed"))
        adapted = any(hasattr(linear, "lora_a") for linear in (self.gate, self.up, self.down))
        self.fused = None if adapted or shape.act != "silu" else build.products.mlp
        self.act = shape.act

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        if self.fused is not None:
            linears = (self.gate, self.up, self.down)
            return self.fused(x, *(linear.kernel[...].astype(x.dtype) for linear in linears))
        gate = checkpoint_name(self.gate(x), "gate")
        up = checkpoint_name(self.up(x), "up")
        inner = gated(gate, up) if self.act == "silu" else jax.nn.gelu(gate) * up
        return self.down(constrain(inner, "batch", "length", "mlp"))
