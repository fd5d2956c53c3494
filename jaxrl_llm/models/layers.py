"""The layers of a decoder block as Flax modules, which exist only during a trace.

Every parameter has the logical names of its dims in the metadata `logical_axes` (see
`sharding/mesh.py`). Activations that a remat policy may save are named (see
`remat.REMAT_POLICIES`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.models import quantization as quantization_lib
from jaxrl_llm.models.architecture import Architecture, VisionArchitecture
from jaxrl_llm.models.quantization import Quantization
from jaxrl_llm.models.quantized import kernels
from jaxrl_llm.sharding.mesh import constrain

NO_ADAPTERS = LoraConfig()
_LAYER_NORM_EPS = 1e-6  # of indexers and vision encoders, independent of the model's `norm_eps`
_NORMAL = nnx.initializers.normal(0.02)
_ZEROS = nnx.initializers.zeros_init()


@jax.custom_vjp
def matmul(x: Float[Array, "... I"], kernel: Float[Array, "I O"]) -> Float[Array, "... O"]:
    """`x @ kernel`, with a backward pass that transposes no array in memory.

    The gradient of the kernel is one contraction over all positions. With autodiff, XLA on CPU
    would first write out the transposed incoming gradient.
    """
    return x @ kernel


def _product_forward(x, kernel):
    return x @ kernel, (x, kernel)


def _product_backward(residuals, bar):
    x, kernel = residuals
    x_bar = bar @ kernel.T
    kernel_bar = jax.lax.platform_dependent(
        x, bar, x_bar, cpu=_kernel_gradient_on_cpu, default=_kernel_gradient
    )
    return x_bar, kernel_bar


def _kernel_gradient(x, bar, x_bar):
    """The contraction, scheduled after the gradient of `x`, the last use of the kernel."""
    bar, _ = jax.lax.optimization_barrier((bar, x_bar))
    return jnp.einsum("...i,...o->io", x, bar)


def _kernel_gradient_on_cpu(x, bar, _):
    """The same; the narrower array is the first operand, which XLA on CPU transposes in memory."""
    if x.shape[-1] <= bar.shape[-1]:
        return jnp.einsum("...i,...o->io", x, bar)
    # Without the barrier the compiler swaps the operands again.
    return jax.lax.optimization_barrier(jnp.einsum("...o,...i->oi", bar, x)).T


matmul.defvjp(_product_forward, _product_backward)


def float32_logits(
    hidden: Float[Array, "... D"], weight: Float[Array, "V D"]
) -> Float[Array, "... V"]:
    """`hidden @ weight.T`, accumulated in float32 whatever the dtype of the operands."""
    return jnp.einsum("...d,vd->...v", hidden, weight, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class MatmulImpl:
    """The matmul implementations of a network; the defaults are XLA's.

    A `Linear` with at least `min_transposed` inputs and outputs stores its kernel as [out, in] and
    calls `matmul(x, kernel)`; 0: all kernels are [in, out] and `matmul` is not used.
    """

    product: Callable[[Array, Array], Array] = matmul
    logits: Callable[[Array, Array], Array] = float32_logits
    # Fused mlp(x, gate, up, down) of plain kernels; None: three matmuls.
    mlp: Callable[[Array, Array, Array, Array], Array] | None = None
    # Paged attention of decode steps, as `on_cpu.kernels.attention`; None: XLA's.
    attention: Callable[..., Array] | None = None
    # Applied to the q, k and v projections before they are split into heads.
    after_qkv_projection: Callable[[Array], Array] = lambda y: y
    min_transposed: int = 0
    quantization: Quantization = "none"  # of kernels, see `models/quantized/`

    def transposes(self, in_size: int, out_size: int) -> bool:
        """Whether a kernel of this size is stored as [out, in]."""
        can_transpose = self.quantization != "nf4"  # its blocks run along the inputs
        return can_transpose and 0 < self.min_transposed <= min(in_size, out_size)


DEFAULT_MATMULS = MatmulImpl()


@jax.custom_vjp
def swiglu(gate: Float[Array, "... F"], up: Float[Array, "... F"]) -> Float[Array, "... F"]:
    """SwiGLU, `silu(gate) * up`; only the two inputs are saved for the backward pass.

    Autodiff would save the sigmoid and `silu(gate)` as well.
    """
    return jax.nn.silu(gate) * up


def _gated_forward(gate, up):
    return jax.nn.silu(gate) * up, (gate, up)


def _gated_backward(residuals, bar):
    gate, up = residuals
    sigmoid = jax.nn.sigmoid(gate)
    return bar * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), bar * gate * sigmoid


swiglu.defvjp(_gated_forward, _gated_backward)


@dataclasses.dataclass(frozen=True)
class ParamFactory:
    """Creates the parameters of modules, with their logical dims."""

    rngs: nnx.Rngs
    dtype: Any
    lora: LoraConfig = NO_ADAPTERS
    products: MatmulImpl = DEFAULT_MATMULS
    num_adapters: int = 0  # of each projection, see `Network`

    def param(self, init, shape: tuple[int, ...], axes: tuple[str, ...], dtype=None) -> nnx.Param:
        return nnx.Param(init(self.rngs.params(), shape, dtype or self.dtype), logical_axes=axes)

    def normal(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
        return self.param(_NORMAL, shape, axes)

    def kernel(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
        """The kernel of a matmul, or zeros in the quantized dtype where weights are quantized."""
        dtype = quantization_lib.quantized_dtype(self.products.quantization)
        return self.zeros(shape, axes, dtype) if dtype else self.normal(shape, axes)

    def zeros(self, shape: tuple[int, ...], axes: tuple[str, ...], dtype=None) -> nnx.Param:
        return self.param(_ZEROS, shape, axes, dtype)


def init_as_peft(key: jax.Array, shape: tuple[int, ...], dtype) -> Float[Array, "I rank"]:
    """Initializes the A factor of an adapter, uniform as in `peft`; B is zero."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


class Linear(nnx.Module):
    """`x @ kernel (+ bias)`; `MatmulImpl` decides whether the kernel is stored transposed.

    With adapters of rank r, `x @ lora_a @ lora_b * alpha / r` is added (arXiv:2106.09685, Eq. 3).

    Of several adapters, `lora_a` [in, N r] and `lora_b` [N r, out] hold the factors side by side,
    and `lora_index` [B, T] is the number of each token's adapter, from 1; 0: none. Between the two
    products everything but the r columns of that adapter is zeroed, so that tokens of any adapters
    share one batch.

    In training several adapters have a dim of their own, `lora_a` [N, in, r] and `lora_b`
    [N, r, out], and each an Nth of the rows of a batch, in their order. So each has its own
    gradient, and a gradient costs what that of one adapter costs.
    """

    def __init__(
        self,
        build: ParamFactory,
        name: str,
        in_size: int,
        out_size: int,
        axes: tuple[str, str],
        bias: bool = False,
    ):
        sizes, names = (in_size, out_size), axes
        self.product: Callable[[Array, Array], Array] = matmul
        if build.products.transposes(in_size, out_size):
            sizes, names, self.product = sizes[::-1], names[::-1], build.products.product
        self.quantization = build.products.quantization
        if self.quantization == "none":
            self.kernel = build.normal(sizes, names)
        else:
            stored = kernels.FORMATS[self.quantization].arrays((in_size, out_size), axes)
            if self.product is not matmul:
                stored["kernel"] = stored["kernel"]._replace(shape=sizes, axes=names)
            self.kernel_arrays = tuple(stored)
            for array_name, array in stored.items():
                setattr(self, array_name, build.zeros(*array))
        if bias:
            self.bias = build.zeros((out_size,), axes[1:])
        lora = build.lora
        if lora.rank and name in lora.targets:
            # float32 whatever the frozen kernel's dtype: adapters are small, and so are updates.
            a_axes, b_axes = (axes[0], "rank"), ("rank", axes[1])
            rank = lora.rank * (build.num_adapters or 1)
            self.lora_a = build.param(init_as_peft, (in_size, rank), a_axes, jnp.float32)
            self.lora_b = build.param(_ZEROS, (rank, out_size), b_axes, jnp.float32)
            self.scale = lora.scale
            if build.num_adapters:
                self.lora_index = build.zeros((1, 1), ("batch", "length"), jnp.int32)
                self.num_adapters, self.rank = build.num_adapters, lora.rank

    def weight(self, dtype) -> Float[Array, "I O"]:
        """The effective kernel [in, out]: dequantized, and with adapters merged."""
        if self.quantization != "none" and self.product is matmul:
            kernel = self._quantized().dequantize(dtype)
        else:
            kernel = self.kernel[...].astype(dtype)
            if self.product is not matmul:
                kernel = kernel.T
            if self.quantization != "none":
                kernel = quantization_lib.apply_scales(kernel, self._scales)
        if hasattr(self, "lora_a"):
            a, b = self.lora_a[...].astype(dtype), self.lora_b[...].astype(dtype)
            kernel = kernel + a @ b * self.scale
        return kernel

    @property
    def _scales(self) -> Float[Array, " O"]:
        """Of the outputs of a kernel in 8 bits."""
        scales: Float[Array, " O"] = getattr(self, quantization_lib.SCALES)[...]
        return scales

    def _quantized(self) -> kernels.QuantizedKernel:
        arrays = {name: getattr(self, name)[...] for name in self.kernel_arrays}
        return kernels.QuantizedKernel(arrays, self.quantization)

    def _product(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """`x @ kernel`, of whatever format the kernel is."""
        if self.quantization == "none":
            return self.product(x, self.kernel[...].astype(x.dtype))
        if self.product is matmul:
            return kernels.matmul(x, self._quantized())
        y = self.product(x, self.kernel[...].astype(x.dtype))
        return quantization_lib.apply_scales(y, self._scales)

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        y = self._product(x)
        if hasattr(self, "lora_a"):
            a, b = self.lora_a[...].astype(x.dtype), self.lora_b[...].astype(x.dtype)
            num_blocks = a.shape[0] if a.ndim > 2 else 0
            inner = (x.reshape(num_blocks, -1, x.shape[-1]) if num_blocks else x) @ a
            if hasattr(self, "lora_index"):
                adapter_of_column = np.repeat(1 + np.arange(self.num_adapters), self.rank)
                inner = jnp.where(self.lora_index[...][..., None] == adapter_of_column, inner, 0)
            y = y + (inner @ b).reshape(y.shape) * self.scale
        return y + self.bias[...].astype(x.dtype) if hasattr(self, "bias") else y


class RMSNorm(nnx.Module):
    """Root mean square normalization over the last dim, computed in float32 (arXiv:1910.07467)."""

    def __init__(self, build: ParamFactory, size: int, shape: Architecture | VisionArchitecture):
        # The effective scale, `scale + offset`, starts at 1.
        init = nnx.initializers.constant(1.0 - shape.norm_offset)
        self.scale = build.param(init, (size,), ("norm",))
        self.eps, self.offset = shape.norm_eps, shape.norm_offset

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        scale = self.scale[...].astype(jnp.float32)
        if self.offset:
            scale = scale + self.offset
        return (rms_normalized(x.astype(jnp.float32), self.eps) * scale).astype(x.dtype)


def rms_normalized(x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    """`x` divided by its root mean square over the last dim."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + eps)


class LayerNorm(nnx.Module):
    """Layer normalization over the last dim with scale and bias, computed in float32."""

    def __init__(self, build: ParamFactory, size: int):
        self.scale = build.param(nnx.initializers.ones_init(), (size,), ("norm",))
        self.bias = build.zeros((size,), ("norm",))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        wide = x.astype(jnp.float32)
        wide = wide - wide.mean(-1, keepdims=True)
        scale, bias = (a[...].astype(jnp.float32) for a in (self.scale, self.bias))
        return (rms_normalized(wide, _LAYER_NORM_EPS) * scale + bias).astype(x.dtype)


class MLP(nnx.Module):
    """Gated MLP: `down(silu(gate(x)) * up(x))` (arXiv:2002.05202), or with GELU."""

    def __init__(
        self,
        build: ParamFactory,
        shape: Architecture | VisionArchitecture,
        size: int,
        bias: bool = False,
    ):
        d = shape.hidden_size
        self.gate = Linear(build, "gate", d, size, ("embed", "mlp"), bias)
        self.up = Linear(build, "up", d, size, ("embed", "mlp"), bias)
        self.down = Linear(build, "down", size, d, ("mlp", "embed"), bias)
        adapted = any(hasattr(linear, "lora_a") for linear in (self.gate, self.up, self.down))
        is_quantized = build.products.quantization != "none"
        can_fuse = not (adapted or bias or is_quantized or shape.act != "silu")
        self.fused = build.products.mlp if can_fuse else None
        self.act = shape.act

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        if self.fused is not None:
            linears = (self.gate, self.up, self.down)
            return self.fused(x, *(linear.kernel[...].astype(x.dtype) for linear in linears))
        gate = checkpoint_name(self.gate(x), "gate")
        up = checkpoint_name(self.up(x), "up")
        hidden = swiglu(gate, up) if self.act == "silu" else jax.nn.gelu(gate) * up
        return self.down(constrain(hidden, "batch", "length", "mlp"))
