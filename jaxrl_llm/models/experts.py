"""Mixture of experts: a router chooses a few MLPs for each token; no token is dropped.

Products with the experts' weights are grouped: tokens are sorted by expert, and each expert
multiplies its own. Where the mesh splits experts over devices, tokens are sent to their experts and
back in rounds of a fixed size, so that memory is that of a balanced load whatever the load is.
"""

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

from jaxrl_llm.models import casting, grouped_product, low_precision
from jaxrl_llm.models.layers import MLP, Build, as_peft, gated
from jaxrl_llm.models.router import Routed, Router, Routing
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.sharding import mesh as mesh_lib

_SLACK = 1.25  # room of a round, relative to what a balanced load needs
_GATHERED_BYTES = 2**30  # of a layer's experts, split for memory alone, that are whole at one time
_LIMIT, _STEEPNESS = 7.0, 1.702  # of gpt-oss's activation

Weights = dict[str, dict[str, Array]]  # of "gate", "up" and "down": kernel, bias, adapters


class GroupedLinear(nnx.Module):
    """The matrices of all experts, [E, in, out], with biases and adapters of each."""

    def __init__(self, build: Build, name: str, sizes: tuple[int, int, int], axes, bias: bool):
        num, inner, outer = sizes
        self.kernel = build.kernel(sizes, ("experts", *axes))
        if build.products.quantization != "none":
            self.kernel_steps = build.zeros((num, outer), ("experts", axes[1]), jnp.float32)
        if bias:
            self.bias = build.zeros((num, outer), ("experts", axes[1]))
        lora = build.lora
        if lora.rank and name in lora.targets:
            first = functools.partial(_each_as_peft, num)
            sizes_a, sizes_b = (num, inner, lora.rank), (num, lora.rank, outer)
            self.lora_a = build.param(first, sizes_a, ("experts", axes[0], "rank"), jnp.float32)
            zeros = nnx.initializers.zeros_init()
            self.lora_b = build.param(zeros, sizes_b, ("experts", "rank", axes[1]), jnp.float32)
        self.axes = axes

    def arrays(self) -> dict[str, Array]:
        """Returns the parameters by name."""
        names = ("kernel", low_precision.STEPS, "bias", "lora_a", "lora_b")
        return {name: getattr(self, name)[...] for name in names if hasattr(self, name)}

    def dims(self) -> dict[str, tuple[str | None, ...]]:
        """Returns the logical dims of the parameters."""
        first, second = self.axes
        found: dict[str, tuple[str | None, ...]] = {
            "kernel": ("experts", first, second),
            low_precision.STEPS: ("experts", second),
            "bias": ("experts", second),
            "lora_a": ("experts", first, None),
            "lora_b": ("experts", None, second),
        }
        return {name: found[name] for name in self.arrays()}


def _each_as_peft(num: int, key: jax.Array, shape: tuple[int, ...], dtype) -> Array:
    draw = lambda k: as_peft(k, shape[1:], dtype)  # noqa: E731
    return jax.vmap(draw)(jax.random.split(key, num))


class ExpertMLP(nnx.Module):
    """The sum of what a token's experts return, and of the shared MLP's result."""

    def __init__(self, build: Build, shape: Shape):
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
        self.experts, self.lora = experts, build.lora

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing | None
    ) -> tuple[Float[Array, "B T D"], Routed]:
        linears = {"gate": self.gate, "up": self.up, "down": self.down}
        weights, routed = self.router(x, routing)
        scale = self.lora.scale if self.lora.rank else 0.0
        y = visit(
            x,
            weights,
            routed.chosen,
            {name: linear.arrays() for name, linear in linears.items()},
            {name: linear.dims() for name, linear in linears.items()},
            _Kind(
                self.experts.act == "clamped",
                self.experts.weighs_input,
                scale,
                mesh_lib.is_in_stages(),
            ),
        )
        if self.experts.shared_size:
            y = y + self.shared(x)
        return y, routed


class _Kind(NamedTuple):
    """What sets the experts of one network apart."""

    clamped: bool
    weighs_input: bool
    lora_scale: float
    staged: bool


def visit(
    x: Float[Array, "B T D"],
    weights: Float[Array, "B T k"],
    chosen: Int[Array, "B T k"],
    arrays: Weights,
    dims: Mapping[str, Mapping[str, tuple[str | None, ...]]],
    kind: _Kind,
) -> Float[Array, "B T D"]:
    """Returns the weighted sum of what each token's experts return.

    On a mesh each device works for its own tokens; `dims` are the logical dims of the weights.
    """
    mesh = jax.sharding.get_abstract_mesh()
    arrays = casting.cast(arrays, x.dtype)
    if mesh.empty or AxisType.Manual in mesh.axis_types or mesh.size == 1:
        return _local(x, weights, chosen, lambda _: arrays, 1, kind, "", ())

    def specs(spec: Callable[..., P]) -> dict[str, dict[str, P]]:
        return {
            name: {part: spec(array.shape, dims[name][part]) for part, array in of.items()}
            for name, of in arrays.items()
        }

    held, computed = specs(mesh_lib.weight_spec), specs(mesh_lib.activation_spec)
    kernel, sizes = computed["gate"]["kernel"], arrays["gate"]["kernel"].shape
    expert_axis, inner_axes = kernel[0] or "", _axes(kernel[2])
    tokens = mesh_lib.activation_spec(x.shape, ("batch", "length", None))
    used = {axis for entry in tokens for axis in _axes(entry)}
    # Too few rows to be split over the devices of the axis: each works for all of them.
    alone = bool(expert_axis) and expert_axis not in used
    whole_bytes = sum(
        math.prod(NamedSharding(mesh, spec).shard_shape(a.shape)) * a.dtype.itemsize
        for a, spec in zip(jax.tree.leaves(arrays), jax.tree.leaves(computed), strict=True)
    )
    inner = NamedSharding(mesh, held["gate"]["kernel"]).shard_shape(sizes)[2]
    exchanges = bool(expert_axis) and not alone
    count = 1 if exchanges or held == computed else num_pieces(whole_bytes, inner)
    summed = (expert_axis, *inner_axes) if alone else inner_axes

    def local(x, weights, chosen, arrays):
        def piece(number) -> Weights:
            part = arrays if count == 1 else _cut(arrays, dims, number, count)
            return jax.tree.map(_gathered, part, held, computed)

        if alone:
            here = arrays["gate"]["kernel"].shape[0]
            chosen = chosen - lax.axis_index(expert_axis) * here
            chosen = jnp.where((chosen >= 0) & (chosen < here), chosen, here)
        axis = expert_axis if exchanges else ""
        out = _local(x, weights, chosen, piece, count, kind, axis, inner_axes)
        return lax.psum(out, summed) if summed else out

    return jax.shard_map(
        local, in_specs=(tokens, tokens, tokens, held), out_specs=tokens, check_vma=False
    )(x, weights, chosen, arrays)


def _axes(entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _gathered(array: Array, held: P, computed: P) -> Array:
    """Returns a weight that is split for memory alone, as it is computed with."""
    for dim, (now, wanted) in enumerate(zip(held, computed, strict=True)):
        more = tuple(axis for axis in _axes(now) if axis not in _axes(wanted))
        if more:
            array = lax.all_gather(array, more, axis=dim, tiled=True)
    return array


def num_pieces(whole_bytes: float, inner: int) -> int:
    """Returns in how many pieces of the inner dim a device gathers a layer's experts.

    `whole_bytes` are all that it gathers; `inner` is its own part of the inner dim.
    """
    enough = (n for n in range(1, inner) if inner % n == 0 and n * _GATHERED_BYTES >= whole_bytes)
    return next(enough, inner)


def _cut(arrays: Weights, dims, number: Int[Array, ""], count: int) -> Weights:
    """Returns a piece of the inner dim of all experts; results of all pieces add up."""

    def cut(array: Array, names: tuple[str | None, ...]) -> Array:
        if "mlp" not in names:
            return array
        dim = names.index("mlp")
        size = array.shape[dim] // count
        return lax.dynamic_slice_in_dim(array, number * size, size, dim)

    part = {
        name: {n: cut(array, dims[name][n]) for n, array in of.items()}
        for name, of in arrays.items()
    }
    if "bias" in part["down"]:
        part["down"]["bias"] *= number == 0
    return part


def _local(x, weights, chosen, piece, count: int, kind: _Kind, axis: str, inner_axes):
    """Returns what `visit` does for the tokens of one device.

    `piece(number)` are the experts' weights, of `count` pieces of the inner dim. Experts that are
    not among them return zero. With an `axis`, tokens are sent to the devices of their experts.
    """
    shape, k = x.shape, chosen.shape[-1]
    rows, experts = x.reshape(-1, shape[-1]), chosen.reshape(-1)
    factors = weights.reshape(-1).astype(x.dtype)
    order = jnp.argsort(experts)
    token = order // k  # of each visit, visits in order of experts
    if axis:
        visits = _Visits(token, factors[order], experts[order])
        return _exchanged(axis, inner_axes, kind, rows, visits, piece(0)).reshape(shape)
    given = rows[token], factors[order], experts[order]

    def compute(number):
        arrays = piece(number)
        here = arrays["gate"]["kernel"].shape[0]
        y = _mlp(*given, jnp.bincount(experts, length=here), arrays, kind, inner_axes)
        # Grouped products say nothing of rows beyond all groups.
        return jnp.where(given[2][:, None] < here, y, 0)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def add(total, number):
        return total + compute(number).astype(jnp.float32), None

    if count == 1:
        y = compute(0)
    else:
        start = jnp.zeros(given[0].shape, jnp.float32)
        y = lax.scan(add, start, jnp.arange(count))[0].astype(x.dtype)
    return jnp.zeros_like(rows).at[token].add(y).reshape(shape)


def _mlp(rows, factors, owners, sizes, arrays: Weights, kind: _Kind, inner_axes):
    """Returns the experts' results for rows sorted by expert; those beyond all sizes are zero."""
    if kind.weighs_input:
        rows = rows * factors[:, None]
    multiply = functools.partial(_product, owners=owners, sizes=sizes, kind=kind)
    gate = multiply(rows, arrays["gate"])
    up = multiply(rows, arrays["up"])
    inner = _clamped(gate, up) if kind.clamped else gated(gate, up)
    down = dict(arrays["down"])
    if "bias" in down and inner_axes:  # once, though every device of the axes adds its part
        first = sum(lax.axis_index(name) for name in inner_axes) == 0
        down["bias"] = jnp.where(first, down["bias"], 0)
    y = multiply(inner, down)
    return y if kind.weighs_input else y * factors[:, None]


def _product(x, arrays: dict[str, Array], owners, sizes, kind: _Kind):
    grouped = grouped_product.on_stages if kind.staged else lax.ragged_dot
    dot = lambda a, kernel: grouped(a, kernel, sizes)  # noqa: E731
    y = dot(x, arrays["kernel"].astype(x.dtype))
    if low_precision.STEPS in arrays:
        steps = arrays[low_precision.STEPS]
        y = low_precision.multiplied(y, steps.at[owners].get(mode="clip"))
    if "lora_a" in arrays:
        y = y + dot(dot(x, arrays["lora_a"]), arrays["lora_b"]) * kind.lora_scale
    if "bias" in arrays:
        bias = arrays["bias"]
        y = y + jnp.where(owners[:, None] < len(bias), bias.at[owners].get(mode="clip"), 0)
    return y


def _clamped(gate: Float[Array, "... F"], up: Float[Array, "... F"]) -> Float[Array, "... F"]:
    """Returns gpt-oss's `(up + 1) gate sigmoid(1.702 gate)` of clamped inputs."""
    gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(up, -_LIMIT, _LIMIT)
    return (up + 1.0) * gate * jax.nn.sigmoid(gate * _STEEPNESS)


class _Visits(NamedTuple):
    """Visits of a device's tokens to experts, in order of experts."""

    token: Int[Array, " m"]
    factor: Float[Array, " m"]
    expert: Int[Array, " m"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _exchanged(axis, inner_axes, kind, rows, visits, arrays):
    """Returns the sums for a device's tokens, whose experts are on the devices of an axis.

    A round takes from each device to each other one a fixed number of visits; there are as many
    rounds as the fullest pair of devices needs. The backward pass repeats each round.
    """
    return _exchange_forward(axis, inner_axes, kind, rows, visits, arrays)[0]


def room_of_round(num_visits: int, shards: int) -> int:
    """Returns how many visits a round takes from a device to each of so many, itself included."""
    return min(num_visits, -(-math.ceil(num_visits / shards * _SLACK) // 8) * 8)


def _rounds(axis, rows, visits: _Visits, arrays: Weights):
    """Returns room of a round, experts of a device, first visit to each device, rounds."""
    shards, here = lax.axis_size(axis), arrays["gate"]["kernel"].shape[0]
    room = room_of_round(visits.token.shape[0], shards)
    starts = jnp.searchsorted(visits.expert, jnp.arange(shards + 1) * here)
    fullest = (starts[1:] - starts[:-1]).max()
    names = jax.sharding.get_abstract_mesh().axis_names
    return room, here, starts, lax.pmax(-(-fullest // room), names)


def _one_round(axis, inner_axes, kind, room, here, starts, number, rows, factor, visits, arrays):
    """Returns one round's part of the result."""
    shards = lax.axis_size(axis)
    send = functools.partial(lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0)
    at = starts[:-1, None] + number * room + jnp.arange(room)  # [shards, room]
    going = at < starts[1:, None]
    at = jnp.minimum(at, visits.token.shape[0] - 1)
    token = visits.token[at]
    local = jnp.where(going, visits.expert[at] - jnp.arange(shards)[:, None] * here, here)
    weight = jnp.where(going, factor[at], 0)
    came = send(jnp.where(going[..., None], rows[token], 0)).reshape(shards * room, -1)
    of, with_weight = send(local).reshape(-1), send(weight).reshape(-1)
    order = jnp.argsort(of)
    sizes = jnp.bincount(of, length=here)
    y = _mlp(came[order], with_weight[order], of[order], sizes, arrays, kind, inner_axes)
    y = jnp.where((of[order] < here)[:, None], y, 0)  # grouped products say nothing of other rows
    back = jnp.zeros_like(y).at[order].set(y, unique_indices=True)
    y = send(back.reshape(shards, room, -1))
    return jnp.zeros_like(rows).at[token.reshape(-1)].add(y.reshape(shards * room, -1))


def _exchange_forward(axis, inner_axes, kind, rows, visits, arrays):
    room, here, starts, rounds = _rounds(axis, rows, visits, arrays)
    once = functools.partial(_one_round, axis, inner_axes, kind, room, here, starts)

    def body(carry):
        number, out = carry
        return number + 1, out + once(number, rows, visits.factor, visits, arrays)

    _, out = lax.while_loop(lambda c: c[0] < rounds, body, (0, jnp.zeros_like(rows)))
    return out, (rows, visits, arrays)


def _exchange_backward(axis, inner_axes, kind, residuals, bar):
    rows, visits, arrays = residuals
    room, here, starts, rounds = _rounds(axis, rows, visits, arrays)

    def body(carry):
        number, bars = carry
        once = functools.partial(_one_round, axis, inner_axes, kind, room, here, starts, number)
        _, backward = jax.vjp(
            lambda rows, factor, arrays: once(rows, factor, visits, arrays),
            rows,
            visits.factor,
            arrays,
        )
        return number + 1, jax.tree.map(jnp.add, bars, backward(bar))

    zeros = jax.tree.map(jnp.zeros_like, (rows, visits.factor, arrays))
    _, (of_rows, of_factor, of_arrays) = lax.while_loop(lambda c: c[0] < rounds, body, (0, zeros))
    none = lambda a: np.zeros(a.shape, jax.dtypes.float0)  # noqa: E731
    of_visits = _Visits(none(visits.token), of_factor, none(visits.expert))  # type: ignore[arg-type]
    return of_rows, of_visits, of_arrays


_exchanged.defvjp(_exchange_forward, _exchange_backward)
