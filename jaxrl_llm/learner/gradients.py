"""The loss of a batch and its gradient: microbatches one after the other, or on stages.

On stages (`models/pipeline.py`) all microbatches pass the layers; each turn of them then has its
loss, and the gradient of what stages made; at last all gradients go back through the stages. A
vision tower that learns (`eyes`) has its own pass before and after all microbatches.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_llm.data import packing
from jaxrl_llm.data.packing import Microbatch, PackedBatch
from jaxrl_llm.learner.eyes import Eyes
from jaxrl_llm.learner.predict import Reader
from jaxrl_llm.models import casting, pipeline
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.sharding import mesh as mesh_lib

Found = tuple[Float[Array, ""], Mapping[str, Any]]
# loss(params, microbatch) -> (its part of the batch's loss, arrays to be summed by name)
Loss = Callable[[Params, Microbatch], Found]


def of_batch(
    reader: Reader,
    whole: Callable[[Params], Params],
    params: Params,
    packed: PackedBatch,
    loss: Loss,
    compute_dtype: str,
) -> tuple[Found, Params]:
    """Returns (loss, metrics) of a batch and the gradient by `params`, sums in float32.

    `whole` adds to the parameters what stages, or a tower, read beside them.
    """
    if reader.eyes is not None:
        return _of_eyes(reader.eyes, whole, params, packed, loss, compute_dtype)
    if reader.stages > 1:
        return _on_stages(reader, whole, params, packed, loss)

    def of_variables(variables: Params, microbatch: Microbatch) -> Found:
        return loss(casting.bound(params, variables), microbatch)

    gradient = jax.value_and_grad(of_variables, has_aux=True)
    return _summed(packed, gradient, casting.variables(params, compute_dtype))


def _summed(packed: PackedBatch, gradient: Callable[..., Any], *by: Any) -> tuple[Found, Any]:
    """Returns the sums of `gradient(*by, microbatch)` over a batch."""
    like = jax.eval_shape(gradient, *by, packed.at(0))
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), like)
    return packing.accumulate(packed, functools.partial(gradient, *by), like)


def _of_eyes(
    eyes: Eyes,
    whole: Callable[[Params], Params],
    params: Params,
    packed: PackedBatch,
    loss: Loss,
    compute_dtype: str,
) -> tuple[Found, Params]:
    """Returns `of_batch` where a tower learns: it reads all images of the batch once.

    Its gradient is by what the sum over microbatches says of their vectors.
    """
    assert packed.shown is not None
    shown, body = packed.shown, {k: v for k, v in params.items() if k != "vision"}

    def look(tower: Params) -> Array:
        return eyes.see(whole({**params, "vision": tower})["vision"], shown)

    vectors, back = jax.vjp(look, params["vision"])

    def of_variables(variables: Params, vectors: Array, microbatch: Microbatch) -> Found:
        microbatch = dataclasses.replace(microbatch, vectors=vectors)
        return loss(casting.bound(body, variables), microbatch)

    gradient = jax.value_and_grad(of_variables, argnums=(0, 1), has_aux=True)
    seen = dataclasses.replace(packed, vectors=vectors)
    found, (summed, bars) = _summed(seen, gradient, casting.variables(body, compute_dtype), vectors)
    (of_tower,) = back(bars.astype(vectors.dtype))
    return found, {**summed, "vision": jax.tree.map(lambda g: g.astype(jnp.float32), of_tower)}


@mesh_lib.in_stages()
def _on_stages(
    reader: Reader,
    whole: Callable[[Params], Params],
    params: Params,
    packed: PackedBatch,
    loss: Loss,
) -> tuple[Found, Params]:
    turned = packed.on_stages(reader.stages)
    made, back = jax.vjp(lambda p: reader.made(whole(p), turned, packed.count), params)
    after = {stack.name for group in pipeline.Phases.of(reader.network).after for stack in group}
    layers = params["layers"]
    # What microbatches meet after the stages.
    late = {**params, "layers": {name: layers[name] for name in after & layers.keys()}}
    leaves, structure = jax.tree.flatten(made)
    # Experts that were visited are no floats and have no gradient.
    floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def mixed(floats: list[Array], others: list[Any]) -> pipeline.Passed:
        kinds = {True: iter(floats), False: iter(others)}
        return jax.tree.unflatten(structure, [next(kinds[is_float]) for is_float in floating])

    def of_turn(late: Params, floats: list[Array], others: list[Array], turn: Microbatch) -> Found:
        known = {**late, "layers": {**layers, **late["layers"]}}
        each = mesh_lib.on_stages(lambda microbatch: loss(known, microbatch))
        found = each(dataclasses.replace(turn, passed=mixed(floats, others)))
        return jax.tree.map(lambda a: a.sum(0), found)

    gradient = jax.value_and_grad(of_turn, argnums=(0, 1), has_aux=True)
    floats = [leaf for leaf, is_float in zip(leaves, floating, strict=True) if is_float]
    others = [leaf for leaf, is_float in zip(leaves, floating, strict=True) if not is_float]

    def of(number: Any) -> Any:
        given = floats, others, turned.microbatches
        return gradient(late, *jax.tree.map(lambda a: a[number], given))

    def body(i, carry):
        sums, bars = carry
        found, (of_late, of_floats) = of(i)
        sums = jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, (found, of_late))
        return sums, [a.at[i].set(b) for a, b in zip(bars, of_floats, strict=True)]

    like, (of_late, _) = jax.eval_shape(of, 0)
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), (like, of_late))
    start = zeros, [jnp.zeros_like(a) for a in floats]
    (found, of_late), bars = jax.lax.fori_loop(0, turned.count, body, start)
    nothing = [np.zeros(a.shape, jax.dtypes.float0) for a in others]
    (total,) = back(mixed(bars, nothing))
    total = jax.tree.map(lambda a: a.astype(jnp.float32), total)
    return found, _added(total, of_late)


def _added(total: Any, part: Any) -> Any:
    """Returns a tree of dicts with sums wherever `part` has something too."""
    if not isinstance(part, dict):
        return total + part
    return {**total, **{name: _added(total[name], each) for name, each in part.items()}}
