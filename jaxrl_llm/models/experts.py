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
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.layers import MLP, Build, as_peft, gated
from jaxrl_llm.models.shape import Experts, Shape
from jaxrl_llm.sharding import mesh as mesh_lib

_SLACK = 1.25  # room of a round, relative to what a balanced load needs
_LIMIT, _STEEPNESS = 7.0, 1.702  # of gpt-oss's activation

Weights = dict[str, dict[str, Array]]  # of "gate", "up" and "down": kernel, bias, adapters


class Routing(NamedTuple):
    """What a router is told of its tokens."""

    counted: Bool[Array, "B T"]  # tokens that its numbers are about
    given: Int[Array, "B T k"] | None = None  # experts to visit; -1: the router's own choice


class Routed(NamedTuple):
    """What a router did. Sums are over counted tokens; `None` without a `Routing`."""

    chosen: Int[Array, "B T k"]  # experts that were visited
    load: Float[Array, " E"] | None = None  # visits of each expert
    scores: Float[Array, " E"] | None = None  # sum of scores, those of a token sum to 1
    squares: Float[Array, ""] | None = None  # sum of the squared log of the sum of exp(logits)
    equal: Float[Array, ""] | None = None  # tokens of which the router's own choice is the given


class Router(nnx.Module):
    """Chooses experts and weighs them, in float32."""

    def __init__(self, build: Build, shape: Shape, experts: Experts):
        d, count = shape.hidden_size, experts.num
        self.kernel = build.normal((d, count), ("whole", "router"))
        if experts.bias:
            self.bias = build.zeros((count,), ("router",))
        if experts.selection_bias:
            self.selection_bias = build.zeros((count,), ("router",))
        self.experts = experts

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing | None
    ) -> tuple[Float[Array, "B T k"], Routed]:
        """Returns the weights of each token's experts, and which they are."""
        experts = self.experts
        kernel = self.kernel[...].astype(jnp.float32)
        wide = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
        logits = jnp.einsum("btd,de->bte", x.astype(jnp.float32), kernel, **wide)
        if experts.bias:
            logits = logits + self.bias[...].astype(jnp.float32)
        by = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[experts.scores]
        scores = by(logits)
        wanted = lax.stop_gradient(scores)
        if experts.selection_bias:
            wanted = wanted + lax.stop_gradient(self.selection_bias[...].astype(jnp.float32))
        own = chosen = _likeliest(wanted, experts)
        if routing is not None and routing.given is not None:
            chosen = jnp.where(routing.given < 0, own, routing.given)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if experts.normalized:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        weights = weights * experts.scale
        if routing is None:
            return weights, Routed(chosen)
        counted = routing.counted[..., None].astype(jnp.float32)
        visits = jax.nn.one_hot(chosen, experts.num, dtype=jnp.float32).sum(-2)
        shares = scores / scores.sum(-1, keepdims=True)
        squares = jnp.square(jax.nn.logsumexp(logits, -1)) * counted[..., 0]
        same = (jnp.sort(own, -1) == jnp.sort(chosen, -1)).all(-1) & routing.counted
        return weights, Routed(
            chosen,
            (visits * counted).sum((0, 1)),
            (shares * counted).sum((0, 1)),
            squares.sum(),
            same.sum().astype(jnp.float32),
        )


def _likeliest(scores: Float[Array, "B T E"], experts: Experts) -> Int[Array, "B T k"]:
    """Returns the experts with the highest scores, of the best groups alone.

    A group is as good as its two best experts together (arXiv:2412.19437, Sec. 2.1.2).
    """
    if experts.groups > 1:
        grouped = scores.reshape(*scores.shape[:-1], experts.groups, -1)
        best = lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
        within = lax.top_k(best, experts.top_groups)[1]
        allowed = jax.nn.one_hot(within, experts.groups, dtype=bool).any(-2)
        scores = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(scores.shape)
    return lax.top_k(scores, experts.per_token)[1]


class GroupedLinear(nnx.Module):
    """The matrices of all experts, [E, in, out], with biases and adapters of each."""

    def __init__(self, build: Build, name: str, sizes: tuple[int, int, int], axes, bias: bool):
        num, inner, outer = sizes
        self.kernel = build.normal(sizes, ("experts", *axes))
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
        names = ("kernel", "bias", "lora_a", "lora_b")
        return {name: getattr(self, name)[...] for name in names if hasattr(self, name)}

    def dims(self) -> dict[str, tuple[str | None, ...]]:
        """Returns the logical dims of the parameters."""
        first, second = self.axes
        found: dict[str, tuple[str | None, ...]] = {
            "kernel": ("experts", first, second),
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
            _Kind(self.experts.act == "clamped", self.experts.weighs_input, scale),
        )
        if self.experts.shared_size:
            y = y + self.shared(x)
        return y, routed


class _Kind(NamedTuple):
    """What sets the experts of one network apart."""

    clamped: bool
    weighs_input: bool
    lora_scale: float


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
    arrays = {name: {n: a.astype(x.dtype) for n, a in of.items()} for name, of in arrays.items()}
    if mesh.empty or AxisType.Manual in mesh.axis_types or mesh.size == 1:
        return _local(x, weights, chosen, arrays, kind, "", ())

    def specs(spec: Callable[..., P]) -> dict[str, dict[str, P]]:
        return {
            name: {part: spec(array.shape, dims[name][part]) for part, array in of.items()}
            for name, of in arrays.items()
        }

    held, computed = specs(mesh_lib.weight_spec), specs(mesh_lib.activation_spec)
    kernel = computed["gate"]["kernel"]
    expert_axis, inner_axes = kernel[0] or "", _axes(kernel[2])
    tokens = mesh_lib.activation_spec(x.shape, ("batch", "length", None))
    used = {axis for entry in tokens for axis in _axes(entry)}
    if expert_axis and expert_axis not in used:
        raise ValueError(
            f"{x.shape[0]} rows do not divide by the devices that exchange tokens between experts:"
            f" {dict(mesh.shape)}; use a multiple of their number"
        )

    def local(x, weights, chosen, arrays):
        whole = jax.tree.map(_gathered, arrays, held, computed)
        return _local(x, weights, chosen, whole, kind, expert_axis, inner_axes)

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


def _local(x, weights, chosen, arrays: Weights, kind: _Kind, axis: str, inner_axes):
    """Returns what `visit` does for the tokens of one device."""
    shape, k = x.shape, chosen.shape[-1]
    rows, experts = x.reshape(-1, shape[-1]), chosen.reshape(-1)
    factors = weights.reshape(-1).astype(x.dtype)
    order = jnp.argsort(experts)
    token = order // k  # of each visit, visits in order of experts
    if not axis:
        sizes = jnp.bincount(experts, length=arrays["gate"]["kernel"].shape[0])
        y = _mlp(rows[token], factors[order], experts[order], sizes, arrays, kind, inner_axes)
        out = jnp.zeros_like(rows).at[token].add(y)
    else:
        visits = _Visits(token, factors[order], experts[order])
        out = _exchanged(axis, inner_axes, kind, rows, visits, arrays)
    if inner_axes:
        out = lax.psum(out, inner_axes)
    return out.reshape(shape)


def _mlp(rows, factors, owners, sizes, arrays: Weights, kind: _Kind, inner_axes):
    """Returns the experts' results for rows sorted by expert; those beyond all sizes are zero."""
    if kind.weighs_input:
        rows = rows * factors[:, None]
    multiply = functools.partial(_product, owners=owners, sizes=sizes, scale=kind.lora_scale)
    gate = multiply(rows, arrays["gate"])
    up = multiply(rows, arrays["up"])
    inner = _clamped(gate, up) if kind.clamped else gated(gate, up)
    down = dict(arrays["down"])
    if "bias" in down and inner_axes:  # once, though every device of the axes adds its part
        first = sum(lax.axis_index(name) for name in inner_axes) == 0
        down["bias"] = jnp.where(first, down["bias"], 0)
    y = multiply(inner, down)
    return y if kind.weighs_input else y * factors[:, None]


def _product(x, arrays: dict[str, Array], owners, sizes, scale: float):
    dot = functools.partial(lax.ragged_dot, group_sizes=sizes)
    y = dot(x, arrays["kernel"])
    if "lora_a" in arrays:
        y = y + dot(dot(x, arrays["lora_a"]), arrays["lora_b"]) * scale
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


def _rounds(axis, rows, visits: _Visits, arrays: Weights):
    """Returns room of a round, experts of a device, first visit to each device, rounds."""
    shards, here = lax.axis_size(axis), arrays["gate"]["kernel"].shape[0]
    num = visits.token.shape[0]
    room = min(num, -(-math.ceil(num / shards * _SLACK) // 8) * 8)
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
