"""Pipeline parallelism: the microbatches of a step pass the layers stage by stage, in one program.

An item of the schedule is one microbatch in one round (MaxText: a circular pipeline's repeat). In
step t stage s computes item t - s and sends the result to the next stage; the last stage sends to
the first, where the next round of a microbatch begins. So there must be at least as many
microbatches as stages. With M microbatches, S stages and R rounds, M R + S - 1 steps do the work
of M R; in the others a stage idles, the pipeline bubble (arXiv:2104.04473, Sec. 2.2; here all
forward steps come before all backward steps).

A stage saves only the inputs of its items. The backward pass runs the steps in reverse order and
recomputes the layers of each item. Gradients are accumulated over microbatches in float32.

Microbatches enter and leave as [M / S, S, ...]: stage m % S stores microbatch m.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from jaxrl_llm.models import lora
from jaxrl_llm.models import packed_inputs as inputs_lib
from jaxrl_llm.models.architecture import LayerStack
from jaxrl_llm.models.moe.router import RouterOutputs
from jaxrl_llm.models.packed_inputs import PackedInputs
from jaxrl_llm.models.pipeline.stage_transfers import ScheduleItem, StageTransfers
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.sharding import mesh as mesh_lib

RoutedByStack = dict[str, RouterOutputs]  # router outputs, by the name of the layer stack


class PipelinePartition(NamedTuple):
    """The groups of a network's layers before, on and after the pipeline stages."""

    before: tuple[tuple[LayerStack, ...], ...]
    staged: tuple[LayerStack, ...]
    after: tuple[tuple[LayerStack, ...], ...]

    @classmethod
    def from_network(cls, network: Network) -> "PipelinePartition":
        """Splits the layer groups of a network with more than one stage."""
        groups = network.shape.layer_groups
        staged = next(i for i, group in enumerate(groups) if group[0].stages > 1)
        return cls(groups[:staged], groups[staged], groups[staged + 1 :])


class StageOutputs(NamedTuple):
    """The result of all stages for some microbatches, from which `run_after_stages` continues."""

    hidden: Float[Array, "*M R W D"]
    routed: RoutedByStack


def run_stages(
    network: Network,
    params: Params,
    tokens: Int[Array, "per_stage stages R W"],
    inputs: PackedInputs,  # of the same microbatches
    num_microbatches: Int[Array, ""],  # that hold tokens: the first ones
    image_features: Float[Array, "vectors D"] | None = None,  # of images; `inputs` has none
) -> StageOutputs:
    """Runs packed microbatches through the layers before the stages and all stages.

    Results of microbatches without tokens are undefined.
    """
    phases = PipelinePartition.from_network(network)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def embed_and_run_before(
        params: Params, tokens: Array, inputs: PackedInputs
    ) -> tuple[Array, RoutedByStack]:
        sights = inputs.image_inputs
        if sights is not None and image_features is not None:
            sights = sights._replace(features=image_features)
            inputs = inputs._replace(image_inputs=sights)
        x = network.embed_sharded(params, tokens, sights)
        routes = inputs_lib.routes_by_stack(network.shape, inputs.routing.replayed)
        return network.run_layers(phases.before, params["layers"], x, inputs, routes)

    with mesh_lib.in_stages():
        one_per_stage = mesh_lib.vmap_over_stages(embed_and_run_before, (None, 0, 0))
        x, before = lax.map(lambda args: one_per_stage(params, *args), (tokens, inputs))
        layers = {stack.name: params["layers"][stack.name] for stack in phases.staged}
        flat_inputs = jax.tree.map(lambda a: lax.collapse(a, 0, 2), inputs)
        schedule = _Schedule.from_layers(network, phases.staged, x, layers)
        hidden, routed = _run_schedule(schedule, layers, x, flat_inputs, num_microbatches)
    return StageOutputs(hidden, before | routed)


def run_after_stages(
    network: Network, params: Params, stage_outputs: StageOutputs, inputs: PackedInputs
) -> tuple[Float[Array, "R W D"], RouterOutputs | None]:
    """Runs the layers after the stages and the final norm for one microbatch.

    Returns the same as `Network.forward`: normalized hidden states and all router outputs.
    """
    routes = inputs_lib.routes_by_stack(network.shape, inputs.routing.replayed)
    after = PipelinePartition.from_network(network).after
    x, routed = network.run_layers(after, params["layers"], stage_outputs.hidden, inputs, routes)
    all_routed = inputs_lib.routed_in_layer_order(network.shape, stage_outputs.routed | routed)
    return network.norm(params, x), all_routed


def busy_steps(microbatches: int, stages: int, rounds: int) -> tuple[int, int]:
    """The steps in which a stage has an item, and all steps, of one direction."""
    busy = max(microbatches, stages) * rounds
    return busy, busy + stages - 1


@dataclasses.dataclass(frozen=True)
class _Schedule:
    """The forward and backward steps of the staged layers over microbatches of one shape."""

    network: Network
    group: tuple[LayerStack, ...]
    moves: StageTransfers
    has_adapters: bool

    @classmethod
    def from_layers(
        cls, network: Network, group: tuple[LayerStack, ...], x: Array, layers: Params
    ) -> "_Schedule":
        row_spec = mesh_lib.activation_spec(x.shape[2:], ("batch", "length", "embed"))
        moves = StageTransfers(network.shape.stages, network.shape.rounds, x.shape[0], row_spec)
        return cls(network, group, moves, lora.has_adapters(layers))

    def weight_specs(self, layers: Params) -> Params:
        """The partition specs of the layers' parameters."""
        all_axes = self.network.stacked_axes("adapted" if self.has_adapters else "block")
        mesh, units = jax.sharding.get_abstract_mesh(), self.network.sharding_units
        axes = {name: all_axes[name] for name in layers}
        shardings = mesh_lib.shardings(layers, axes, mesh, mesh_lib.TRAIN, units)
        return jax.tree.map(lambda sharding: sharding.spec, shardings)

    def num_slots(self, keep: bool) -> int:
        """The number of inputs that a stage's buffer holds.

        With `keep` (for the backward pass) those of all items. Without it, one slot is enough for
        one round, as an item arrives just when the one before it has been computed; with several
        rounds an item waits for a whole round, so there is a slot for each microbatch.
        """
        moves = self.moves
        return (
            moves.max_microbatches * moves.rounds
            if keep
            else moves.max_microbatches
            if moves.rounds > 1
            else 1
        )

    def num_steps(self, count: Int[Array, ""]) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """The microbatches of a round (at least one per stage), and the steps of all rounds."""
        moves = self.moves
        count = jnp.clip(count, moves.stages, moves.max_microbatches)
        return count, count * moves.rounds + moves.stages - 1

    def stage_forward(self, weights: Params, x: Array, inputs: PackedInputs, part: Int[Array, ""]):
        """One stage's layers applied to one item; `part` is stage * rounds + round."""
        shape = self.network.shape
        routes = inputs_lib.routes_by_stack(shape, inputs.routing.replayed)

        def routes_of_part(a: Array | None) -> Array | None:
            if a is None:
                return None
            return a.reshape(shape.stages * shape.rounds, -1, *a.shape[1:])[part]

        stage_routes = {stack.name: routes_of_part(routes[stack.name]) for stack in self.group}
        return self.network.run_layers((self.group,), weights, x, inputs, stage_routes)

    def stage_arguments(
        self, layers: Params, inputs: PackedInputs, item: ScheduleItem
    ) -> tuple[Params, PackedInputs, Array]:
        """The arguments of `stage_forward` for each stage's item, beside hidden states."""
        dtype, moves = self.network.compute_dtype, self.moves
        weights = moves.round_weights(layers, self.weight_specs(layers), item.round, dtype)
        item_inputs = jax.tree.map(lambda a: a[item.microbatch], inputs)
        return weights, item_inputs, jnp.arange(moves.stages) * moves.rounds + item.round

    def forward(self, layers: Params, x: Array, inputs: PackedInputs, count: Array, keep: bool):
        """Hidden states, router outputs, and the buffer of stage inputs (of all items: `keep`).

        Without `keep` all rounds share the slots of the buffer, and one slot is enough for one
        round: an input is no longer needed when the next one arrives.
        """
        moves, stage = self.moves, jnp.arange(self.moves.stages)
        count, steps = self.num_steps(count)
        all_stages_forward = mesh_lib.vmap_over_stages(self.stage_forward)
        last, slots = moves.rounds - 1, self.num_slots(keep)

        def compute(item: ScheduleItem, x: Array):
            weights, item_inputs, part = self.stage_arguments(layers, inputs, item)
            return all_stages_forward(weights, x, item_inputs, part)

        def step(t, carry):
            buffer, pending, out, routed = carry
            item = ScheduleItem.from_number(t - stage, count, moves.rounds)
            injected = ScheduleItem.from_number(t, count, moves.rounds).only_in_round(0)
            index = moves.slot_index(item)
            buffer, pending = moves.inject(
                buffer, pending, index % slots, injected, 0, direction=-1
            )
            y, routed_now = compute(item, moves.read_slots(buffer, index % slots))
            routed = moves.write_slots(routed, routed_now, index, item.valid)
            drained = ScheduleItem.from_number(
                t - (moves.stages - 1), count, moves.rounds
            ).only_in_round(last)
            out = moves.drain(out, y, drained, moves.stages - 1, direction=-1)
            # Rounds run one after another would each pay a bubble of S - 1 steps. So the stages are
            # a ring: the first one stores the last one's results, one round on, until their turn
            # (M - S + 1 steps later); `busy_steps` counts one bubble in all. `received` is the item
            # that comes to each stage, from stage s - 1; results of the last round only leave.
            received = ScheduleItem.from_number(t - (stage - 1) % moves.stages, count, moves.rounds)
            is_stored = received.valid & ((stage > 0) | (received.round < last))
            received = received._replace(round=received.round + (stage == 0))
            buffer = moves.write_slots(
                buffer, y, moves.slot_index(received) % slots, is_stored, direction=1
            )
            return buffer, pending, out, routed

        first = ScheduleItem.from_number(-stage, count, moves.rounds)
        like = jax.eval_shape(lambda: compute(first, x[0]))[1]
        items = moves.rounds * moves.max_microbatches
        blank = jax.tree.map(lambda a: jnp.zeros((a.shape[0], items, *a.shape[1:]), a.dtype), like)
        start = moves.empty_buffer(slots, x), x, jnp.zeros_like(x), blank
        buffer, _, out, routed = lax.fori_loop(0, steps, step, start)
        out = moves.rotate_partial_row(out, count, direction=-1)
        return (out, jax.tree.map(self._by_microbatch, routed)), buffer

    def backward(
        self,
        layers: Params,
        trainable: tuple[bool, ...],  # for each leaf of layers
        stage_inputs: Array,  # the buffer of `forward` with `keep`
        inputs: PackedInputs,
        count: Array,
        bars: tuple[Array, dict[str, list[Array]]],  # of hidden states, of router outputs
    ) -> tuple[Params, Array]:
        """The gradients of layers (None where frozen), and of `x` as `forward` takes it."""
        moves, stage = self.moves, jnp.arange(self.moves.stages)
        count, steps = self.num_steps(count)
        hidden_bar, routed_bar = bars[0], jax.tree.map(self._by_item, bars[1])
        structure = jax.tree.structure(layers)
        like = _selected_leaves(layers, trainable)
        specs = _selected_leaves(self.weight_specs(layers), trainable)
        sums = [jnp.zeros(a.shape, jnp.float32) for a in like]
        last, slots = moves.rounds - 1, self.num_slots(keep=False)

        def stage_vjp(weights, x, inputs, part, y_bar, item_routed_bar):
            def recompute(trainable_weights: list[Array], x: Array):
                remaining = iter(trainable_weights)
                leaves = [
                    next(remaining) if learns else leaf
                    for leaf, learns in zip(jax.tree.leaves(weights), trainable, strict=True)
                ]
                y, routed = self.stage_forward(
                    jax.tree.unflatten(structure, leaves), x, inputs, part
                )
                return y, _float_leaves(routed)

            return jax.vjp(recompute, _selected_leaves(weights, trainable), x)[1](
                (y_bar, item_routed_bar)
            )

        backward_of_stages = mesh_lib.vmap_over_stages(stage_vjp)

        # The mirror image of `forward`'s steps: t counts down, gradients are injected at the last
        # stage, travel against the ring (`direction` is -1) and are drained at the first.
        def step(number, carry):
            buffer, pending, out, sums = carry
            t = steps - 1 - number
            item = ScheduleItem.from_number(t - stage, count, moves.rounds)
            index = moves.slot_index(item)
            injected = ScheduleItem.from_number(
                t - (moves.stages - 1), count, moves.rounds
            ).only_in_round(last)
            buffer, pending = moves.inject(
                buffer, pending, index % slots, injected, moves.stages - 1, direction=1
            )
            item_bars = moves.read_slots(buffer, index % slots), moves.read_slots(routed_bar, index)

            # In the bubble a stage computes on stale slots all the same, as all devices run one
            # program; their gradient would be added to the weights. A vjp is linear, so that a
            # zero cotangent adds nothing.
            def zero_if_idle(a: Array) -> Array:
                return jnp.where(item.valid.reshape(-1, *(1,) * (a.ndim - 1)), a, 0)

            weights, item_inputs, part = self.stage_arguments(layers, inputs, item)
            layers_bar, x_bar = backward_of_stages(
                weights,
                moves.read_slots(stage_inputs, index),
                item_inputs,
                part,
                *jax.tree.map(zero_if_idle, item_bars),
            )
            sums = moves.accumulate_gradients(sums, layers_bar, specs, item.round)
            drained = ScheduleItem.from_number(t, count, moves.rounds).only_in_round(0)
            out = moves.drain(out, x_bar, drained, 0, direction=1)
            received = ScheduleItem.from_number(t - (stage + 1) % moves.stages, count, moves.rounds)
            buffer = moves.write_slots(
                buffer, x_bar, moves.slot_index(received) % slots, received.valid, direction=-1
            )
            return buffer, pending, out, sums

        pending = moves.rotate_partial_row(hidden_bar, count, direction=1)
        start = moves.empty_buffer(slots, hidden_bar), pending, jnp.zeros_like(hidden_bar), sums
        _, _, out, sums = lax.fori_loop(0, steps, step, start)
        gradients = iter(a.astype(b.dtype) for a, b in zip(sums, like, strict=True))
        leaves = [next(gradients) if learns else None for learns in trainable]
        return jax.tree.unflatten(structure, leaves), out

    def _by_microbatch(self, a: Array) -> Array:
        """Reorders [S, items, n, ...] of items to [M / S, S, L, ...] of microbatches."""
        moves = self.moves
        a = a.reshape(moves.stages, moves.rounds, moves.max_microbatches, *a.shape[2:])
        a = jnp.moveaxis(a, 2, 0)  # then stage, round, n: as layers are stacked
        return a.reshape(moves.microbatches_per_stage, moves.stages, -1, *a.shape[4:])

    def _by_item(self, a: Array) -> Array:
        """The inverse of `_by_microbatch`."""
        moves = self.moves
        a = a.reshape(moves.max_microbatches, moves.stages, moves.rounds, -1, *a.shape[3:])
        return jnp.moveaxis(a, 0, 2).reshape(moves.stages, -1, *a.shape[3:])


def _selected_leaves(tree: Any, selected: tuple[bool, ...]) -> list[Any]:
    return [leaf for leaf, is_in in zip(jax.tree.leaves(tree), selected, strict=True) if is_in]


def _float_leaves(routed: RoutedByStack) -> dict[str, list[Any]]:
    """The differentiable leaves of router outputs, or of their cotangents, by stack."""

    def is_float(a: Any) -> bool:
        return jnp.issubdtype(getattr(a, "aval", a).dtype, jnp.floating)

    return {
        name: [a for a in jax.tree.leaves(outputs) if is_float(a)]
        for name, outputs in routed.items()
    }


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _TrainableLeaves:
    """Which parameters of layers have a gradient, in the order of their tree's leaves."""

    mask: tuple[bool, ...]


# Autodiff of the loop of steps would save the weights, cast and sliced, and the activations of
# every step. The rule below saves the inputs of the stages alone and runs the steps backwards;
# with `symbolic_zeros` it also sees which weights are frozen and computes no gradient for them.
# tests/models/pipeline/test_schedule.py compares it with the gradients of the unpipelined network.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_schedule(
    schedule: _Schedule, layers: Params, x: Array, inputs: PackedInputs, count: Array
):
    """Hidden states after the stages, and the router outputs there."""
    with mesh_lib.in_stages():
        return schedule.forward(layers, x, inputs, count, keep=False)[0]


def _run_schedule_forward(schedule: _Schedule, *primals: Any):
    trainable = _TrainableLeaves(tuple(a.perturbed for a in jax.tree.leaves(primals[0])))
    layers, x, inputs, count = jax.tree.map(lambda a: a.value, primals)
    with mesh_lib.in_stages():
        outputs, stage_inputs = schedule.forward(layers, x, inputs, count, keep=True)
    return outputs, (trainable, layers, stage_inputs, inputs, count)


def _run_schedule_backward(schedule: _Schedule, residuals, bars):
    trainable, layers, stage_inputs, inputs, count = residuals

    def materialized(bar: Any) -> Array:
        zero = isinstance(bar, SymbolicZero)
        return jnp.zeros(bar.aval.shape, bar.aval.dtype) if zero else bar

    dense_bars = jax.tree.map(materialized, (bars[0], _float_leaves(bars[1])))
    with mesh_lib.in_stages():
        gradients = schedule.backward(
            layers, trainable.mask, stage_inputs, inputs, count, dense_bars
        )
    return *gradients, None, None


_run_schedule.defvjp(_run_schedule_forward, _run_schedule_backward, symbolic_zeros=True)
