"""The gated delta net layer of Qwen3-Next and Qwen3.5 (arXiv:2412.06464, Sec. 3.4)."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.context_parallel import SEQUENCE_AXIS
from jaxrl_llm.models.layers import DEFAULT_MATMULS, Linear, ParamFactory, rms_normalized
from jaxrl_llm.models.recurrent.gated_delta_rule import (
    gated_delta_rule,
    gated_delta_step,
    l2_normalized,
    mask_padding,
)
from jaxrl_llm.models.recurrent.short_convolution import causal_convolution, convolution_tail
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.sharding.mesh import constrain

LayerState = dict[str, Array]  # by `SequenceMemory.state`, each [B, ...]

_NO_ADAPTERS = ""  # `LoraConfig.targets` names the projections of attention and MLP
_CONVOLVED = ("q", "k", "v")


@dataclasses.dataclass(frozen=True)
class GatedDeltaInputs:
    """Projections of one layer's tokens: what it makes of them depends on what came before.

    As `AttentionInputs` do, they go to the function that knows the other tokens: those of packed
    rows, or the state that a sequence has left.
    """

    q: Float[Array, "B T G K"]  # before the convolution, as k and v
    k: Float[Array, "B T G K"]
    v: Float[Array, "B T N V"]
    log_decay: Float[Array, "B T N"]  # float32, as beta
    beta: Float[Array, "B T N"]
    kernels: dict[str, Float[Array, "width _ _"]]  # of the convolutions, by "q", "k", "v"

    def over_rows(self, segment_ids: Int[Array, "B T"]) -> Float[Array, "B T N V"]:
        """Outputs of packed rows, float32; the state is zero where a segment begins.

        Rows whose length is sharded are resharded by heads with an all-to-all, as attention does in
        `context_parallel`; where heads do not divide, each device computes whole rows.
        """
        if mesh_lib.axis_sizes().get(SEQUENCE_AXIS, 1) == 1:
            q, k, v = (constrain(a, "batch", None, "heads", None) for a in (self.q, self.k, self.v))
            inputs = dataclasses.replace(self, q=q, k=k, v=v)
            return constrain(inputs._whole_rows(segment_ids), "batch", None, "heads", None)
        return _over_sharded_rows(self, segment_ids)

    def _whole_rows(self, segment_ids: Int[Array, "B T"]) -> Float[Array, "B T N V"]:
        before = jnp.pad(segment_ids, ((0, 0), (1, 0)))[:, :-1]
        is_token = segment_ids != 0
        starts = is_token & (segment_ids != before)
        q, k, v, log_decay, beta = self._convolved(is_token, starts)
        return gated_delta_rule(q, k, v, log_decay, beta, starts)[0]

    def after_state(
        self, state: LayerState, is_token: Bool[Array, "B T"]
    ) -> tuple[Float[Array, "B T N V"], LayerState]:
        """Outputs of tokens that continue the sequence of each row, and its state after them.

        Tokens come first in their rows, then padding, which leaves the state unchanged.
        """
        starts = jnp.zeros_like(is_token)
        q, k, v, log_decay, beta = self._convolved(is_token, starts, state)
        memory = state["memory"]
        if is_token.shape[1] == 1:
            outputs, memory = gated_delta_step(
                q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], beta[:, 0], memory
            )
            outputs = outputs[:, None]
        else:
            outputs, memory = gated_delta_rule(q, k, v, log_decay, beta, starts, memory)
        count = is_token.sum(axis=1)
        tails = {
            name: convolution_tail(getattr(self, name), state[name], count) for name in _CONVOLVED
        }
        return outputs, {**tails, "memory": memory}

    def _convolved(
        self,
        is_token: Bool[Array, "B T"],
        starts: Bool[Array, "B T"],
        tails: LayerState | None = None,
    ) -> tuple[Array, Array, Array, Array, Array]:
        """The arguments of the recurrence: zero where there is no token."""
        q, k, v = (
            jax.nn.silu(
                causal_convolution(
                    mask_padding(is_token, getattr(self, name))[0],
                    self.kernels[name],
                    starts,
                    tails[name] if tails else None,
                )
            )
            for name in _CONVOLVED
        )
        q, k = l2_normalized(q) * q.shape[-1] ** -0.5, l2_normalized(k)
        q, k, v = (checkpoint_name(x, name) for x, name in zip((q, k, v), _CONVOLVED, strict=True))
        q, k, v, log_decay, beta = mask_padding(is_token, q, k, v, self.log_decay, self.beta)
        return q, k, v, log_decay, beta


def _over_sharded_rows(
    inputs: GatedDeltaInputs, segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T N V"]:
    """`GatedDeltaInputs.over_rows` of rows whose length is sharded over the sequence axis."""
    sizes = mesh_lib.axis_sizes()
    shards, tensor = sizes[SEQUENCE_AXIS], sizes.get("tensor", 1)
    groups = inputs.q.shape[2]
    heads = "heads" if groups % tensor == 0 else None
    local_groups = groups // tensor if heads else groups
    exchanges = local_groups % shards == 0
    rows, head_axes = mesh_lib.activation_spec(inputs.q.shape, ("batch", "length", heads, None))[
        1:3
    ]
    batch = mesh_lib.activation_spec(segment_ids.shape, ("batch", "length"))[0]
    spec = PartitionSpec(batch, rows, head_axes)
    # Kernels of the heads that a device computes: of its tensor shard, then of its sequence shard.
    kernel_axes = (head_axes, SEQUENCE_AXIS) if head_axes else (SEQUENCE_AXIS,)
    kernel_spec = PartitionSpec(None, kernel_axes if exchanges else head_axes)

    def local(by_token: tuple[Array, ...], kernels: dict[str, Array], ids: Array) -> Array:
        whole_ids = lax.all_gather(ids, SEQUENCE_AXIS, axis=1, tiled=True)
        if exchanges:
            whole = [
                lax.all_to_all(a, SEQUENCE_AXIS, split_axis=2, concat_axis=1, tiled=True)
                for a in by_token
            ]
        else:
            whole = [lax.all_gather(a, SEQUENCE_AXIS, axis=1, tiled=True) for a in by_token]
        q, k, v, log_decay, beta = whole
        outputs = GatedDeltaInputs(q, k, v, log_decay, beta, kernels)._whole_rows(whole_ids)
        if exchanges:
            return lax.all_to_all(outputs, SEQUENCE_AXIS, split_axis=1, concat_axis=2, tiled=True)
        length = ids.shape[1]
        return lax.dynamic_slice_in_dim(
            outputs, lax.axis_index(SEQUENCE_AXIS) * length, length, axis=1
        )

    by_token = inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta
    in_specs = spec, kernel_spec, PartitionSpec(batch, rows)
    mapped = jax.shard_map(local, in_specs=in_specs, out_specs=spec, check_vma=False)
    return mapped(by_token, inputs.kernels, segment_ids)


class ShortConvolution(nnx.Module):
    """The kernel of a depthwise convolution, [width, 1, channels] as Hugging Face transposed."""

    def __init__(self, build: ParamFactory, width: int, channels: int):
        self.weight = build.normal((width, 1, channels), ("one", "one", "norm"))

    def by_head(self, head_size: int) -> Float[Array, "width heads size"]:
        weight = self.weight[...]
        return weight.reshape(weight.shape[0], -1, head_size)


class DecayRate(nnx.Module):
    """The decay of every head: `log_decay = -exp(log_rate) * softplus(x + bias)`, float32.

    These parameters are never rounded to 16 bits for sampling: a state sums its errors up.
    """

    def __init__(self, build: ParamFactory, num_heads: int):
        def log_uniform(key, shape, dtype):
            # As transformers does; no head forgets everything or nothing at the start.
            return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.01, 16.0)).astype(dtype)

        self.log_rate = build.param(log_uniform, (num_heads,), ("norm",))
        self.bias = build.param(nnx.initializers.ones_init(), (num_heads,), ("norm",))

    def __call__(self, x: Float[Array, "B T N"]) -> Float[Array, "B T N"]:
        rate, bias = (a[...].astype(jnp.float32) for a in (self.log_rate, self.bias))
        return -jnp.exp(rate) * jax.nn.softplus(x.astype(jnp.float32) + bias)


class GatedDeltaNet(nnx.Module):
    """A gated delta net: short convolutions, the gated delta rule, and a gated norm."""

    def __init__(self, build: ParamFactory, shape: Architecture):
        sizes = shape.gated_delta
        assert sizes is not None
        d, keys, values = shape.hidden_size, sizes.key_dims, sizes.value_dims
        into_keys, into_values = ("embed", "delta_keys"), ("embed", "delta_values")
        self.q = Linear(build, _NO_ADAPTERS, d, keys, into_keys)
        self.k = Linear(build, _NO_ADAPTERS, d, keys, into_keys)
        self.v = Linear(build, _NO_ADAPTERS, d, values, into_values)
        self.z = Linear(build, _NO_ADAPTERS, d, values, into_values)
        # Narrow: sharded by inputs and never quantized, as routers are.
        plain = dataclasses.replace(build, products=DEFAULT_MATMULS)
        self.b = Linear(plain, _NO_ADAPTERS, d, sizes.num_value_heads, ("whole", "router"))
        self.a = Linear(plain, _NO_ADAPTERS, d, sizes.num_value_heads, ("whole", "router"))
        self.q_conv = ShortConvolution(build, sizes.convolution_tokens, keys)
        self.k_conv = ShortConvolution(build, sizes.convolution_tokens, keys)
        self.v_conv = ShortConvolution(build, sizes.convolution_tokens, values)
        self.decay = DecayRate(build, sizes.num_value_heads)
        self.norm_scale = build.param(nnx.initializers.ones_init(), (sizes.value_size,), ("norm",))
        self.o = Linear(build, _NO_ADAPTERS, values, d, ("delta_values", "embed"))
        self.sizes, self.eps = sizes, shape.norm_eps

    def __call__(self, x: Float[Array, "B T D"], rotary, attend, compressed: bool = False):
        """The output, and the second result of `attend`, which gets `GatedDeltaInputs`."""
        del rotary, compressed  # positions are in the order of the tokens alone
        sizes = self.sizes
        by_key, by_value = ((*x.shape[:-1], -1, n) for n in (sizes.key_size, sizes.value_size))
        q, k = self.q(x).reshape(by_key), self.k(x).reshape(by_key)
        v, z = self.v(x).reshape(by_value), self.z(x).reshape(by_value)
        kernels = {
            "q": self.q_conv.by_head(sizes.key_size),
            "k": self.k_conv.by_head(sizes.key_size),
            "v": self.v_conv.by_head(sizes.value_size),
        }
        beta = jax.nn.sigmoid(self.b(x).astype(jnp.float32))
        mixed, kept = attend(GatedDeltaInputs(q, k, v, self.decay(self.a(x)), beta, kernels))
        y = rms_normalized(mixed.astype(jnp.float32), self.eps)
        y = y * self.norm_scale[...].astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))
        y = checkpoint_name(y.astype(x.dtype), "mixed")
        return self.o(y.reshape(*x.shape[:-1], -1)), kept
