"""The pieces of a decoder block as Flax modules, which exist only during a trace.

Every parameter has the logical names of its dims in the metadata `logical_axes` (see
`sharding/mesh.py`). Activations that a backward pass may keep are named (see
`remat.REMAT_POLICIES`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.models import low_precision
from jaxrl_llm.models.low_precision import Quantization
from jaxrl_llm.models.shape import Shape, Vision
from jaxrl_llm.sharding.mesh import constrain

NO_ADAPTERS = LoraConfig()
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
    # Of decode steps, over pages of a cache, as `on_cpu.kernels.attention`; None: XLA's.
    attention: Callable[..., Array] | None = None
    # What comes between the projections to queries, keys and values and their split into heads.
    projected: Callable[[Array], Array] = lambda y: y
    min_transposed: int = 0
    quantization: Quantization = "none"  # of kernels, see `low_precision`

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

    def kernel(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
        """Returns the matrix of a product; where weights are rounded, room for one."""
        dtype = low_precision.dtype_of(self.products.quantization)
        return self.zeros(shape, axes, dtype) if dtype else self.normal(shape, axes)

    def zeros(self, shape: tuple[int, ...], axes: tuple[str, ...], dtype=None) -> nnx.Param:
        return self.param(_ZEROS, shape, axes, dtype)


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
        self.kernel = build.kernel(sizes, names)
        if build.products.quantization != "none":
            self.kernel_steps = build.zeros((out_size,), axes[1:], jnp.float32)
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
        if hasattr(self, "kernel_steps"):
            kernel = low_precision.multiplied(kernel, self.kernel_steps[...])
        if hasattr(self, "lora_a"):
            a, b = self.lora_a[...].astype(dtype), self.lora_b[...].astype(dtype)
            kernel = kernel + a @ b * self.scale
        return kernel

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        y = self.product(x, self.kernel[...].astype(x.dtype))
        if hasattr(self, "kernel_steps"):
            y = low_precision.multiplied(y, self.kernel_steps[...])
        if hasattr(self, "lora_a"):
            inner = x @ self.lora_a[...].astype(x.dtype)
            y = y + inner @ self.lora_b[...].astype(x.dtype) * self.scale
        return y + self.bias[...].astype(x.dtype) if hasattr(self, "bias") else y


class RMSNorm(nnx.Module):
    """Root mean square normalization over the last dim, computed in float32 (arXiv:1910.07467)."""

    def __init__(self, build: Build, size: int, shape: Shape | Vision):
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


class MLP(nnx.Module):
    """Gated MLP: `down(silu(gate(x)) * up(x))` (arXiv:2002.05202), or with GELU."""

    def __init__(self, build: Build, shape: Shape | Vision, size: int, bias: bool = False):
        d = shape.hidden_size
        self.gate = Linear(build, "gate", d, size, ("embed", "mlp"), bias)
        self.up = Linear(build, "up", d, size, ("embed", "mlp"), bias)
        self.down = Linear(build, "down", size, d, ("mlp", "embed"), bias)
        adapted = any(hasattr(linear, "lora_a") for linear in (self.gate, self.up, self.down))
        rounds = build.products.quantization != "none"
        plain = not (adapted or bias or rounds or shape.act != "silu")
        self.fused = build.products.mlp if plain else None
        self.act = shape.act

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        if self.fused is not None:
            linears = (self.gate, self.up, self.down)
            return self.fused(x, *(linear.kernel[...].astype(x.dtype) for linear in linears))
        gate = checkpoint_name(self.gate(x), "gate")
        up = checkpoint_name(self.up(x), "up")
        inner = gated(gate, up) if self.act == "silu" else jax.nn.gelu(gate) * up
        return self.down(constrain(inner, "batch", "length", "mlp"))
