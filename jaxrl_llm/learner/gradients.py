"""The loss of a batch and its gradient: microbatches one after the other, or through a pipeline.

With pipeline stages (`models/pipeline/schedule.py`) all microbatches pass the layers first; then
each turn (one microbatch per stage) has its loss and the gradient by the stage outputs; at last all
these gradients go back through the stages. A trainable vision tower (`vision_encoder`) runs forward
before all microbatches and backward after them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_llm.learner.predict import ForwardSpec
from jaxrl_llm.learner.vision.trainable_encoder import TrainableVisionEncoder
from jaxrl_llm.models import mixed_precision
from jaxrl_llm.models.pipeline import schedule
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.packing import packed_batch
from jaxrl_llm.packing.packed_batch import Microbatch, PackedBatch
from jaxrl_llm.sharding import mesh as mesh_lib

LossAndSums = tuple[Float[Array, ""], Mapping[str, Any]]
# loss(params, microbatch) -> (its part of the batch's loss, arrays to be summed by name)
MicrobatchLoss = Callable[[Params, Microbatch], LossAndSums]


def loss_and_gradients(
    forward: ForwardSpec,
    merge_params: Callable[[Params], Params],
    params: Params,
    packed: PackedBatch,
    loss: MicrobatchLoss,
    compute_dtype: str,
) -> tuple[LossAndSums, Params]:
    """The (loss, metrics) of a batch and the gradient by `params`, both summed in float32.

    `merge_params` adds the frozen parameters that pipeline stages or a vision tower read beside the
    trained ones.
    """
    if forward.vision_encoder is not None:
        return _gradients_with_vision(
            forward.vision_encoder, merge_params, params, packed, loss, compute_dtype
        )
    if forward.stages > 1:
        return _pipelined_gradients(forward, merge_params, params, packed, loss)

    def microbatch_loss(variables: Params, microbatch: Microbatch) -> LossAndSums:
        return loss(mixed_precision.attach_grad_proxies(params, variables), microbatch)

    gradient = jax.value_and_grad(microbatch_loss, has_aux=True)
    return _accumulated_gradients(
        packed, gradient, mixed_precision.grad_proxies(params, compute_dtype)
    )


def _accumulated_gradients(
    packed: PackedBatch, gradient: Callable[..., Any], *wrt: Any
) -> tuple[LossAndSums, Any]:
    """The float32 sums of `gradient(*wrt, microbatch)` over the microbatches of a batch."""
    like = jax.eval_shape(gradient, *wrt, packed.microbatch(0))
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), like)
    return packed_batch.accumulate(packed, functools.partial(gradient, *wrt), like)


def _gradients_with_vision(
    vision_encoder: TrainableVisionEncoder,
    merge_params: Callable[[Params], Params],
    params: Params,
    packed: PackedBatch,
    loss: MicrobatchLoss,
    compute_dtype: str,
) -> tuple[LossAndSums, Params]:
    """`loss_and_gradients` with a trainable vision tower, which encodes all images of the batch
    once.

    Its backward pass runs once too, on the gradient by the image features summed over all
    microbatches.
    """
    assert packed.images is not None
    images, decoder = packed.images, {k: v for k, v in params.items() if k != "vision"}

    def encode(tower: Params) -> Array:
        return vision_encoder.encode(merge_params({**params, "vision": tower})["vision"], images)

    features, tower_vjp = jax.vjp(encode, params["vision"])

    def microbatch_loss(variables: Params, features: Array, microbatch: Microbatch) -> LossAndSums:
        microbatch = dataclasses.replace(microbatch, image_features=features)
        return loss(mixed_precision.attach_grad_proxies(decoder, variables), microbatch)

    gradient = jax.value_and_grad(microbatch_loss, argnums=(0, 1), has_aux=True)
    with_features = dataclasses.replace(packed, image_features=features)
    loss_and_metrics, (decoder_gradients, feature_gradients) = _accumulated_gradients(
        with_features, gradient, mixed_precision.grad_proxies(decoder, compute_dtype), features
    )
    (tower_gradients,) = tower_vjp(feature_gradients.astype(features.dtype))
    tower_gradients = jax.tree.map(lambda g: g.astype(jnp.float32), tower_gradients)
    return loss_and_metrics, {**decoder_gradients, "vision": tower_gradients}


@mesh_lib.in_stages()
def _pipelined_gradients(
    forward: ForwardSpec,
    merge_params: Callable[[Params], Params],
    params: Params,
    packed: PackedBatch,
    loss: MicrobatchLoss,
) -> tuple[LossAndSums, Params]:
    """`loss_and_gradients` with the layers on pipeline stages, in three passes.

    1. All microbatches go forward through the stages once, under `jax.vjp`.
    2. Turn by turn (one microbatch on each stage) the layers after the stages, the head and the
       loss run forward and backward: this gives the gradient by those late parameters and the
       cotangents of the stage outputs.
    3. One backward pass through the stages takes the cotangents of all turns.

    Parameters that are read in both passes have the sum of both gradients.
    """
    # A vjp inside the loop would fill and drain the pipeline for every turn. Outside it, the stages
    # see all microbatches at once and idle only at both ends: `schedule.busy_steps` counts these
    # steps. The price is the outputs of all microbatches, and as much again for their cotangents.
    staged = packed.to_stages(forward.stages)
    outputs, pipeline_vjp = jax.vjp(
        lambda p: forward.stage_outputs(merge_params(p), staged, packed.count), params
    )
    stacks_after = {
        stack.name
        for group in schedule.PipelinePartition.from_network(forward.network).after
        for stack in group
    }
    layers = params["layers"]
    # A gradient by all of `params` in the loop below would add zeros for the staged layers, nearly
    # the whole model, in every turn. So it is taken by the late parameters alone: the layers after
    # the stages and all that is outside the layers (norm, head, embeddings).
    late_layers = {name: layers[name] for name in stacks_after & layers.keys()}
    late_params = {**params, "layers": late_layers}
    # The stage outputs hold integers too, the experts visited, and `jax.grad` refuses integers.
    # So the leaves are split: floats are differentiated, the others passed as constants, and
    # `merged` puts both back in the order of the tree.
    leaves, structure = jax.tree.flatten(outputs)
    float_flags = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def merge_partitions(floats: list[Array], integers: list[Any]) -> schedule.StageOutputs:
        kinds = {True: iter(floats), False: iter(integers)}
        return jax.tree.unflatten(structure, [next(kinds[is_float]) for is_float in float_flags])

    def turn_loss(
        late_params: Params, floats: list[Array], integers: list[Array], turn: Microbatch
    ) -> LossAndSums:
        all_params = {**late_params, "layers": {**layers, **late_params["layers"]}}
        stage_losses = mesh_lib.vmap_over_stages(lambda microbatch: loss(all_params, microbatch))
        losses = stage_losses(
            dataclasses.replace(turn, stage_outputs=merge_partitions(floats, integers))
        )
        return jax.tree.map(lambda a: a.sum(0), losses)

    gradient = jax.value_and_grad(turn_loss, argnums=(0, 1), has_aux=True)
    floats = [leaf for leaf, is_float in zip(leaves, float_flags, strict=True) if is_float]
    integers = [leaf for leaf, is_float in zip(leaves, float_flags, strict=True) if not is_float]

    def turn_gradient(index: Any) -> Any:
        turn_inputs = jax.tree.map(lambda a: a[index], (floats, integers, staged.microbatches))
        return gradient(late_params, *turn_inputs)

    def accumulate_turn(i, carry):
        sums, cotangents = carry
        turn_losses, (late_part, float_cotangents) = turn_gradient(i)
        sums = jax.tree.map(
            lambda total, part: total + part.astype(total.dtype), sums, (turn_losses, late_part)
        )
        # Each turn fills its own entry: cotangents are of one microbatch and never summed.
        return sums, [a.at[i].set(b) for a, b in zip(cotangents, float_cotangents, strict=True)]

    losses_like, (late_like, _) = jax.eval_shape(turn_gradient, 0)
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), (losses_like, late_like))
    initial = zeros, [jnp.zeros_like(a) for a in floats]
    (loss_and_metrics, late_gradients), cotangents = jax.lax.fori_loop(
        0, staged.count, accumulate_turn, initial
    )
    # A vjp wants a cotangent for every output: that of an integer is of dtype float0.
    integer_cotangents = [np.zeros(a.shape, jax.dtypes.float0) for a in integers]
    (stage_gradients,) = pipeline_vjp(merge_partitions(cotangents, integer_cotangents))
    stage_gradients = jax.tree.map(lambda a: a.astype(jnp.float32), stage_gradients)
    return loss_and_metrics, _tree_sum(stage_gradients, late_gradients)


def _tree_sum(total: Any, part: Any) -> Any:
    """A tree of dicts with the entries of `part` added where it has them."""
    if not isinstance(part, dict):
        return total + part
    return {**total, **{name: _tree_sum(total[name], each) for name, each in part.items()}}
