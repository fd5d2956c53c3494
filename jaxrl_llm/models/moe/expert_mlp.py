"""Mixture of experts: a router chooses a few MLPs for each token; dropless.

Tokens are sorted by expert, and the experts' matmuls are grouped (`lax.ragged_dot`). With expert
parallelism tokens are dispatched to their experts and back by all-to-alls of a fixed capacity, as
many rounds of them as the load needs: memory is that of a balanced load whatever the load is.

A visit is one (token, expert) pair; a token has k of them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxrl_llm.models import mixed_precision, quantization
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.layers import DEFAULT_MATMULS, MLP, Linear, ParamFactory, init_as_peft, swiglu
from jaxrl_llm.models.moe import grouped_matmul
from jaxrl_llm.models.moe.router import Router, RouterInputs, RouterOutputs
from jaxrl_llm.sharding import mesh as mesh_lib

_CAPACITY_FACTOR = 1.25  # capacity of a round, relative to a balanced load
_GATHERED_BYTES = 2**30  # of a layer's FSDP-sharded experts that are gathered at one time
_SWIGLU_LIMIT, _SWIGLU_ALPHA = 7.0, 1.702  # of gpt-oss's activation

Weights = dict[str, dict[str, Array]]  # of "gate", "up" and "down": kernel, bias, adapters


class GroupedLinear(nnx.Module):
    """One projection of all experts, [E, in, out], with bias and adapter of each expert."""

    def __init__(
        self, build: ParamFactory, name: str, sizes: tuple[int, int, int], axes, bias: bool
    ):
        num, inner, outer = sizes
        self.kernel = build.kernel(sizes, ("experts", *axes))
        if build.products.quantization != "none":
            self.kernel_steps = build.zeros((num, outer), ("experts", axes[1]), jnp.float32)
        if bias:
            self.bias = build.zeros((num, outer), ("experts", axes[1]))
        lora = build.lora
        # Of several adapters (`Network.num_adapters`), experts have none.
        if lora.rank and name in lora.targets and not build.num_adapters:
            init_a = functools.partial(_init_each_as_peft, num)
            sizes_a, sizes_b = (num, inner, lora.rank), (num, lora.rank, outer)
            self.lora_a = build.param(init_a, sizes_a, ("experts", axes[0], "rank"), jnp.float32)
            init_b = nnx.initializers.zeros_init()
            self.lora_b = build.param(init_b, sizes_b, ("experts", "rank", axes[1]), jnp.float32)
        self.axes = axes

    def arrays(self) -> dict[str, Array]:
        """The parameters by name."""
        names = ("kernel", quantization.SCALES, "bias", "lora_a", "lora_b")
        return {name: getattr(self, name)[...] for name in names if hasattr(self, name)}

    def dims(self) -> dict[str, tuple[str | None, ...]]:
        """The logical dim names of the parameters."""
        first, second = self.axes
        all_dims: dict[str, tuple[str | None, ...]] = {
            "kernel": ("experts", first, second),
            quantization.SCALES: ("experts", second),
            "bias": ("experts", second),
            "lora_a": ("experts", first, None),
            "lora_b": ("experts", None, second),
        }
        return {name: all_dims[name] for name in self.arrays()}


def _init_each_as_peft(num: int, key: jax.Array, shape: tuple[int, ...], dtype) -> Array:
    draw = lambda k: init_as_peft(k, shape[1:], dtype)  # noqa: E731
    return jax.vmap(draw)(jax.random.split(key, num))


class ExpertMLP(nnx.Module):
    """The weighted sum of a token's experts, plus the shared expert if there is one."""

    def __init__(self, build: ParamFactory, shape: Architecture):
        experts = shape.experts
        assert experts is not None
        d, num, inner = shape.hidden_size, experts.num, experts.size
        self.router = Router(build, shape, experts)
        into, out_of = ("embed", "mlp"), ("mlp", "embed")
        self.gate = GroupedLinear(build, "gate", (num, d, inner), into, experts.bias)
        self.up = GroupedLinear(build, "up", (num, d, inner), into, experts.bias)
        self.down = GroupedLinear(build, "down", (num, inner, d), out_of, experts.bias)
        if experts.shared_size:
            self.shared = MLP(build, shape, experts.shared_size)
        if experts.shared_gate:
            plain = dataclasses.replace(build, products=DEFAULT_MATMULS)  # never quantized
            self.shared_gate = Linear(plain, "", d, 1, ("whole", "router"))
        self.experts, self.lora = experts, build.lora

    def __call__(
        self, x: Float[Array, "B T D"], routing: RouterInputs | None
    ) -> tuple[Float[Array, "B T D"], RouterOutputs]:
        linears = {"gate": self.gate, "up": self.up, "down": self.down}
        weights, routed = self.router(x, routing)
        scale = self.lora.scale if self.lora.rank else 0.0
        y = apply_experts(
            x,
            weights,
            routed.chosen,
            {name: linear.arrays() for name, linear in linears.items()},
            {name: linear.dims() for name, linear in linears.items()},
            _ExpertOptions(
                self.experts.act == "clamped",
                self.experts.weighs_input,
                scale,
                mesh_lib.is_in_stages(),
            ),
        )
        if self.experts.shared_gate:
            y = y + jax.nn.sigmoid(self.shared_gate(x)) * self.shared(x)
        elif self.experts.shared_size:
            y = y + self.shared(x)
        return y, routed


class _ExpertOptions(NamedTuple):
    """Static options of the experts' computation."""

    clamped: bool  # gpt-oss's activation
    weighs_input: bool
    lora_scale: float
    staged: bool  # inside pipeline stages


def apply_experts(
    x: Float[Array, "B T D"],
    weights: Float[Array, "B T k"],
    chosen: Int[Array, "B T k"],
    arrays: Weights,
    dims: Mapping[str, Mapping[str, tuple[str | None, ...]]],
    options: _ExpertOptions,
) -> Float[Array, "B T D"]:
    """The weighted sum of each token's experts, computed on each device for its own tokens.

    `dims` are the logical dim names of the weights.
    """
    mesh = jax.sharding.get_abstract_mesh()
    arrays = mixed_precision.cast(arrays, x.dtype)
    if mesh.empty or AxisType.Manual in mesh.axis_types or mesh.size == 1:
        return _local(x, weights, chosen, lambda _: arrays, 1, options, "", ())

    def specs(spec: Callable[..., P]) -> dict[str, dict[str, P]]:
        return {
            name: {part: spec(array.shape, dims[name][part]) for part, array in parts.items()}
            for name, parts in arrays.items()
        }

    stored, computed = specs(mesh_lib.weight_spec), specs(mesh_lib.activation_spec)
    kernel, sizes = computed["gate"]["kernel"], arrays["gate"]["kernel"].shape
    expert_axis, inner_axes = kernel[0] or "", _axes(kernel[2])
    tokens = mesh_lib.activation_spec(x.shape, ("batch", "length", None))
    used = {axis for entry in tokens for axis in _axes(entry)}
    # Too few rows to shard over the expert axis, as in a small decode step: its devices all have
    # the same tokens, compute their own experts and add up; no tokens are dispatched.
    replicated = bool(expert_axis) and expert_axis not in used
    gathered_bytes = sum(
        math.prod(NamedSharding(mesh, spec).shard_shape(a.shape)) * a.dtype.itemsize
        for a, spec in zip(jax.tree.leaves(arrays), jax.tree.leaves(computed), strict=True)
    )
    inner = NamedSharding(mesh, stored["gate"]["kernel"]).shard_shape(sizes)[2]
    dispatches = bool(expert_axis) and not replicated
    count = 1 if dispatches or stored == computed else num_weight_chunks(gathered_bytes, inner)
    summed = (expert_axis, *inner_axes) if replicated else inner_axes

    def local(x, weights, chosen, arrays):
        def chunk_weights(index) -> Weights:
            part = arrays if count == 1 else _inner_chunk(arrays, dims, index, count)
            return jax.tree.map(_all_gathered, part, stored, computed)

        if replicated:
            num_local = arrays["gate"]["kernel"].shape[0]
            chosen = chosen - lax.axis_index(expert_axis) * num_local
            chosen = jnp.where((chosen >= 0) & (chosen < num_local), chosen, num_local)
        axis = expert_axis if dispatches else ""
        out = _local(x, weights, chosen, chunk_weights, count, options, axis, inner_axes)
        return lax.psum(out, summed) if summed else out

    return jax.shard_map(
        local, in_specs=(tokens, tokens, tokens, stored), out_specs=tokens, check_vma=False
    )(x, weights, chosen, arrays)


def _axes(entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _all_gathered(array: Array, stored: P, computed: P) -> Array:
    """All-gathers a weight over the axes that shard only its storage."""
    for dim, (before, after) in enumerate(zip(stored, computed, strict=True)):
        gathered_axes = tuple(axis for axis in _axes(before) if axis not in _axes(after))
        if gathered_axes:
            array = lax.all_gather(array, gathered_axes, axis=dim, tiled=True)
    return array


def num_weight_chunks(whole_bytes: float, inner: int) -> int:
    """The number of chunks of the inner dim in which a device gathers a layer's experts.

    `whole_bytes` is the size of all that it gathers; `inner` is its own part of the inner dim.
    """
    enough = (n for n in range(1, inner) if inner % n == 0 and n * _GATHERED_BYTES >= whole_bytes)
    return next(enough, inner)


def _inner_chunk(arrays: Weights, dims, index: Int[Array, ""], count: int) -> Weights:
    """One chunk of the inner dim of all experts' weights; the results of all chunks add up."""

    def chunk_of(array: Array, names: tuple[str | None, ...]) -> Array:
        if "mlp" not in names:
            return array
        dim = names.index("mlp")
        size = array.shape[dim] // count
        return lax.dynamic_slice_in_dim(array, index * size, size, dim)

    chunk = {
        name: {n: chunk_of(array, dims[name][n]) for n, array in parts.items()}
        for name, parts in arrays.items()
    }
    if "bias" in chunk["down"]:
        chunk["down"]["bias"] *= index == 0
    return chunk


def _local(
    x, weights, chosen, chunk_weights, count: int, options: _ExpertOptions, axis: str, inner_axes
):
    """`apply_experts` for the tokens of one device.

    `chunk_weights(index)` are the experts' weights in one of `count` chunks of the inner dim.
    Experts that are not among them contribute zero. With an `axis`, tokens are dispatched to the
    devices of their experts.
    """
    shape, k = x.shape, chosen.shape[-1]
    rows, experts = x.reshape(-1, shape[-1]), chosen.reshape(-1)
    factors = weights.reshape(-1).astype(x.dtype)
    order = jnp.argsort(experts)
    token = order // k  # of each visit; visits are sorted by expert
    if axis:
        visits = _Visits(token, factors[order], experts[order])
        return _expert_parallel(axis, inner_axes, options, rows, visits, chunk_weights(0)).reshape(
            shape
        )
    sorted_rows, sorted_factors, sorted_experts = rows[token], factors[order], experts[order]

    def compute(index):
        arrays = chunk_weights(index)
        num_local = arrays["gate"]["kernel"].shape[0]
        y = _grouped_mlp(
            sorted_rows,
            sorted_factors,
            sorted_experts,
            sizes=jnp.bincount(experts, length=num_local),
            arrays=arrays,
            options=options,
            inner_axes=inner_axes,
        )
        # `ragged_dot` leaves rows beyond all groups undefined.
        return jnp.where(sorted_experts[:, None] < num_local, y, 0)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def add(total, index):
        return total + compute(index).astype(jnp.float32), None

    if count == 1:
        y = compute(0)
    else:
        start = jnp.zeros(sorted_rows.shape, jnp.float32)
        y = lax.scan(add, start, jnp.arange(count))[0].astype(x.dtype)
    return jnp.zeros_like(rows).at[token].add(y).reshape(shape)


def _grouped_mlp(
    rows, factors, owners, sizes, arrays: Weights, options: _ExpertOptions, inner_axes
):
    """The experts' MLPs on rows sorted by expert; rows beyond all sizes are undefined."""
    if options.weighs_input:
        rows = rows * factors[:, None]
    multiply = functools.partial(_grouped_linear, owners=owners, sizes=sizes, options=options)
    gate = multiply(rows, arrays["gate"])
    up = multiply(rows, arrays["up"])
    inner = _clamped_swiglu(gate, up) if options.clamped else swiglu(gate, up)
    down = dict(arrays["down"])
    if "bias" in down and inner_axes:
        # On one device only, as the results of all devices of the axes are summed.
        first = sum(lax.axis_index(name) for name in inner_axes) == 0
        down["bias"] = jnp.where(first, down["bias"], 0)
    y = multiply(inner, down)
    return y if options.weighs_input else y * factors[:, None]


def _grouped_linear(x, arrays: dict[str, Array], owners, sizes, options: _ExpertOptions):
    grouped = grouped_matmul.staged_ragged_dot if options.staged else lax.ragged_dot
    dot = lambda a, kernel: grouped(a, kernel, sizes)  # noqa: E731
    y = dot(x, arrays["kernel"].astype(x.dtype))
    if quantization.SCALES in arrays:
        scales = arrays[quantization.SCALES]
        y = quantization.apply_scales(y, scales.at[owners].get(mode="clip"))
    if "lora_a" in arrays:
        y = y + dot(dot(x, arrays["lora_a"]), arrays["lora_b"]) * options.lora_scale
    if "bias" in arrays:
        bias = arrays["bias"]
        y = y + jnp.where(owners[:, None] < len(bias), bias.at[owners].get(mode="clip"), 0)
    return y


def _clamped_swiglu(
    gate: Float[Array, "... F"], up: Float[Array, "... F"]
) -> Float[Array, "... F"]:
    """gpt-oss's activation: `(up + 1) gate sigmoid(1.702 gate)` of clamped inputs."""
    gate, up = jnp.minimum(gate, _SWIGLU_LIMIT), jnp.clip(up, -_SWIGLU_LIMIT, _SWIGLU_LIMIT)
    return (up + 1.0) * gate * jax.nn.sigmoid(gate * _SWIGLU_ALPHA)


class _Visits(NamedTuple):
    """The visits of a device's tokens, sorted by expert."""

    token: Int[Array, " m"]
    factor: Float[Array, " m"]
    expert: Int[Array, " m"]


# An all-to-all has a static shape: one for the worst case (all tokens to one device) takes the
# memory of all devices' tokens, a smaller one drops tokens. So a small one runs in a while loop
# until all visits are sent; autodiff cannot reverse such a loop, hence the custom vjp.
# tests/models/test_moe.py compares meshes under uneven loads.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _expert_parallel(axis, inner_axes, options, rows, visits, arrays):
    """The weighted sums for a device's tokens, with experts sharded over the devices of an axis.

    A round moves a fixed number of visits from each device to each other one; there are as many
    rounds as the fullest pair of devices needs. The backward pass recomputes each round.
    """
    return _expert_parallel_forward(axis, inner_axes, options, rows, visits, arrays)[0]


def round_capacity(num_visits: int, shards: int) -> int:
    """The visits that a round moves from a device to each of `shards`, itself included."""
    return min(num_visits, -(-math.ceil(num_visits / shards * _CAPACITY_FACTOR) // 8) * 8)


def _round_plan(axis, rows, visits: _Visits, arrays: Weights):
    """Capacity of a round, experts per device, first visit to each device, number of rounds."""
    shards, num_local = lax.axis_size(axis), arrays["gate"]["kernel"].shape[0]
    capacity = round_capacity(visits.token.shape[0], shards)
    starts = jnp.searchsorted(visits.expert, jnp.arange(shards + 1) * num_local)
    fullest = (starts[1:] - starts[:-1]).max()
    names = jax.sharding.get_abstract_mesh().axis_names
    return capacity, num_local, starts, lax.pmax(-(-fullest // capacity), names)


def _round_output(
    axis,
    inner_axes,
    options,
    capacity,
    num_local,
    starts,
    round_number,
    rows,
    factor,
    visits,
    arrays,
):
    """One round's contribution to the weighted sums."""
    shards = lax.axis_size(axis)
    all_to_all = functools.partial(lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0)
    index = starts[:-1, None] + round_number * capacity + jnp.arange(capacity)  # [shards, capacity]
    is_sent = index < starts[1:, None]
    index = jnp.minimum(index, visits.token.shape[0] - 1)
    token = visits.token[index]
    expert_ids = jnp.where(
        is_sent, visits.expert[index] - jnp.arange(shards)[:, None] * num_local, num_local
    )
    sent_factors = jnp.where(is_sent, factor[index], 0)
    received = all_to_all(jnp.where(is_sent[..., None], rows[token], 0)).reshape(
        shards * capacity, -1
    )
    local_experts = all_to_all(expert_ids).reshape(-1)
    factors = all_to_all(sent_factors).reshape(-1)
    order = jnp.argsort(local_experts)
    sizes = jnp.bincount(local_experts, length=num_local)
    y = _grouped_mlp(
        received[order], factors[order], local_experts[order], sizes, arrays, options, inner_axes
    )
    # `ragged_dot` leaves rows beyond all groups undefined.
    y = jnp.where((local_experts[order] < num_local)[:, None], y, 0)
    unsorted = jnp.zeros_like(y).at[order].set(y, unique_indices=True)
    y = all_to_all(unsorted.reshape(shards, capacity, -1))
    return jnp.zeros_like(rows).at[token.reshape(-1)].add(y.reshape(shards * capacity, -1))


def _expert_parallel_forward(axis, inner_axes, options, rows, visits, arrays):
    capacity, num_local, starts, rounds = _round_plan(axis, rows, visits, arrays)
    one_round = functools.partial(
        _round_output, axis, inner_axes, options, capacity, num_local, starts
    )

    def body(carry):
        round_number, out = carry
        return round_number + 1, out + one_round(round_number, rows, visits.factor, visits, arrays)

    _, out = lax.while_loop(lambda c: c[0] < rounds, body, (0, jnp.zeros_like(rows)))
    return out, (rows, visits, arrays)


def _expert_parallel_backward(axis, inner_axes, options, residuals, bar):
    rows, visits, arrays = residuals
    capacity, num_local, starts, rounds = _round_plan(axis, rows, visits, arrays)

    def body(carry):
        round_number, bars = carry
        one_round = functools.partial(
            _round_output, axis, inner_axes, options, capacity, num_local, starts, round_number
        )
        _, backward = jax.vjp(
            lambda rows, factor, arrays: one_round(rows, factor, visits, arrays),
            rows,
            visits.factor,
            arrays,
        )
        return round_number + 1, jax.tree.map(jnp.add, bars, backward(bar))

    zeros = jax.tree.map(jnp.zeros_like, (rows, visits.factor, arrays))
    _, (rows_bar, factor_bar, arrays_bar) = lax.while_loop(
        lambda c: c[0] < rounds, body, (0, zeros)
    )
    no_gradient = lambda a: np.zeros(a.shape, jax.dtypes.float0)  # noqa: E731
    visits_bar = _Visits(no_gradient(visits.token), factor_bar, no_gradient(visits.expert))  # type: ignore[arg-type]
    return rows_bar, visits_bar, arrays_bar


_expert_parallel.defvjp(_expert_parallel_forward, _expert_parallel_backward)
