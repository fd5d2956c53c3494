"""Layers on stages: microbatches pass them one after another, in one program.

An item is one microbatch in one round. Stage s works on item t - s in step t and sends the result
to its neighbour; the last stage sends to the first, where the next round of a microbatch begins.
So there are at least as many microbatches as stages. With M microbatches, S stages and R rounds,
M R + S - 1 steps do the work of M R: in the others a stage has no item (arXiv:2104.04473, Sec. 2.2;
here all forward steps come before all backward steps).

A stage keeps the inputs of its items alone. The backward pass takes the steps in reverse order and
computes the layers of an item again. Sums of gradients over microbatches are float32.

Microbatches come and go as [turns, stages, ...]: those of a turn are on different stages.
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
from jaxrl_llm.models import reading as reading_lib
from jaxrl_llm.models.reading import Reading
from jaxrl_llm.models.router import Routed
from jaxrl_llm.models.shape import Stack
from jaxrl_llm.models.stage_moves import Item, Moves
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.sharding import mesh as mesh_lib

ByStack = dict[str, Routed]  # what routers did, by stack


class Phases(NamedTuple):
    """The groups of a network's layers: before, on, and after the stages."""

    before: tuple[tuple[Stack, ...], ...]
    staged: tuple[Stack, ...]
    after: tuple[tuple[Stack, ...], ...]

    @classmethod
    def of(cls, network: Network) -> "Phases":
        """Returns the phases of a network with more than one stage."""
        groups = network.shape.groups
        at = next(i for i, group in enumerate(groups) if group[0].stages > 1)
        return cls(groups[:at], groups[at], groups[at + 1 :])


class Passed(NamedTuple):
    """What all stages made of microbatches."""

    hidden: Float[Array, "*turns R W D"]
    routed: ByStack


def passed(
    network: Network,
    params: Params,
    tokens: Int[Array, "turns stages R W"],
    reading: Reading,  # of as many microbatches
    count: Int[Array, ""],  # of them that hold tokens, the first ones
    vectors: Float[Array, "vectors D"] | None = None,  # of images; `reading` has none
) -> Passed:
    """Returns what stages make of packed rows, from where `finished` goes on.

    What is computed of microbatches without tokens means nothing.
    """
    phases = Phases.of(network)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def begin(params: Params, tokens: Array, reading: Reading) -> tuple[Array, ByStack]:
        sights = reading.sights
        if sights is not None and vectors is not None:
            sights = sights._replace(vectors=vectors)
        x = network.begin(params, tokens, sights)
        routes = reading_lib.routes_by_stack(network.shape, reading.routing.given)
        return network.through(phases.before, params["layers"], x, reading, routes)

    with mesh_lib.in_stages():
        one_turn = mesh_lib.on_stages(begin, (None, 0, 0))
        x, before = lax.map(lambda turn: one_turn(params, *turn), (tokens, reading))
        layers = {stack.name: params["layers"][stack.name] for stack in phases.staged}
        together = jax.tree.map(lambda a: lax.collapse(a, 0, 2), reading)
        schedule = _Schedule.of(network, phases.staged, x, layers)
        hidden, routed = _flowed(schedule, layers, x, together, count)
    return Passed(hidden, before | routed)


def finished(
    network: Network, params: Params, found: Passed, reading: Reading
) -> tuple[Float[Array, "R W D"], Routed | None]:
    """Returns what `Network.read` does, for one microbatch that has passed the stages."""
    routes = reading_lib.routes_by_stack(network.shape, reading.routing.given)
    after = Phases.of(network).after
    x, routed = network.through(after, params["layers"], found.hidden, reading, routes)
    everything = reading_lib.in_layer_order(network.shape, found.routed | routed)
    return network.norm(params, x), everything


def busy_steps(microbatches: int, stages: int, rounds: int) -> tuple[int, int]:
    """Returns the steps in which a stage has an item, and all steps, of one direction."""
    busy = max(microbatches, stages) * rounds
    return busy, busy + stages - 1


@dataclasses.dataclass(frozen=True)
class _Schedule:
    """The steps of a network's layers over microbatches of one shape."""

    network: Network
    group: tuple[Stack, ...]
    moves: Moves
    adapted: bool  # whether layers have adapters

    @classmethod
    def of(
        cls, network: Network, group: tuple[Stack, ...], x: Array, layers: Params
    ) -> "_Schedule":
        rows = mesh_lib.activation_spec(x.shape[2:], ("batch", "length", "embed"))
        moves = Moves(network.shape.stages, network.shape.rounds, x.shape[0], rows)
        return cls(network, group, moves, lora.present(layers))

    def specs(self, layers: Params) -> Params:
        """Returns how the parameters of layers are split."""
        axes = self.network.stacked_axes("adapted" if self.adapted else "block")
        mesh, units = jax.sharding.get_abstract_mesh(), self.network.units
        mine = {name: axes[name] for name in layers}
        split = mesh_lib.shardings(layers, mine, mesh, mesh_lib.TRAIN, units)
        return jax.tree.map(lambda sharding: sharding.spec, split)

    def slots(self, keep: bool) -> int:
        """Returns the inputs that a stage holds: to `keep` all, else until their items have come.

        In one round an item comes right after the one before it; in several it waits for a round.
        """
        moves = self.moves
        return moves.most * moves.rounds if keep else moves.most if moves.rounds > 1 else 1

    def steps(self, count: Int[Array, ""]) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Returns the microbatches of a round, and the steps of all rounds."""
        moves = self.moves
        count = jnp.clip(count, moves.stages, moves.most)
        return count, count * moves.rounds + moves.stages - 1

    def work(self, weights: Params, x: Array, reading: Reading, part: Int[Array, ""]):
        """Returns what one stage does in one step; `part` counts stages, then rounds."""
        shape = self.network.shape
        routes = reading_lib.routes_by_stack(shape, reading.routing.given)

        def here(a: Array | None) -> Array | None:
            if a is None:
                return None
            return a.reshape(shape.stages * shape.rounds, -1, *a.shape[1:])[part]

        mine = {stack.name: here(routes[stack.name]) for stack in self.group}
        return self.network.through((self.group,), weights, x, reading, mine)

    def given(self, layers: Params, reading: Reading, item: Item) -> tuple[Params, Reading, Array]:
        """Returns what `work` takes of each stage's item beside hidden states."""
        dtype, moves = self.network.compute_dtype, self.moves
        weights = moves.in_round(layers, self.specs(layers), item.round, dtype)
        chosen = jax.tree.map(lambda a: a[item.microbatch], reading)
        return weights, chosen, jnp.arange(moves.stages) * moves.rounds + item.round

    def forward(self, layers: Params, x: Array, reading: Reading, count: Array, keep: bool):
        """Returns hidden states, what routers did, and the inputs of all items, if to `keep`.

        Without `keep` all rounds have the same slots, and one slot is enough for one round: an
        input is not needed when its result comes.
        """
        moves, stage = self.moves, jnp.arange(self.moves.stages)
        count, steps = self.steps(count)
        work = mesh_lib.on_stages(self.work)
        last, slots = moves.rounds - 1, self.slots(keep)

        def did(item: Item, x: Array):
            weights, chosen, part = self.given(layers, reading, item)
            return work(weights, x, chosen, part)

        def step(t, carry):
            held, queue, out, routed = carry
            item = Item.of(t - stage, count, moves.rounds)
            begins = Item.of(t, count, moves.rounds).within(0)
            place = moves.place(item)
            held, queue = moves.entered(held, queue, place % slots, begins, 0, onward=-1)
            y, of_routers = did(item, moves.taken(held, place % slots))
            routed = moves.put(routed, of_routers, place, item.valid)
            ends = Item.of(t - (moves.stages - 1), count, moves.rounds).within(last)
            out = moves.left(out, y, ends, moves.stages - 1, onward=-1)
            # The first stage gets the results of the last one, for the next round.
            came = Item.of(t - (stage - 1) % moves.stages, count, moves.rounds)
            goes_on = came.valid & ((stage > 0) | (came.round < last))
            came = came._replace(round=came.round + (stage == 0))
            held = moves.put(held, y, moves.place(came) % slots, goes_on, onward=1)
            return held, queue, out, routed

        first = Item.of(-stage, count, moves.rounds)
        like = jax.eval_shape(lambda: did(first, x[0]))[1]
        items = moves.rounds * moves.most
        blank = jax.tree.map(lambda a: jnp.zeros((a.shape[0], items, *a.shape[1:]), a.dtype), like)
        start = moves.blank(slots, x), x, jnp.zeros_like(x), blank
        held, _, out, routed = lax.fori_loop(0, steps, step, start)
        out = moves.aligned(out, count, onward=-1)
        return (out, jax.tree.map(self._by_turn, routed)), held

    def backward(
        self,
        layers: Params,
        learning: tuple[bool, ...],  # of the leaves of layers
        held: Array,
        reading: Reading,
        count: Array,
        bars: tuple[Array, dict[str, list[Array]]],  # of hidden states, of what routers did
    ) -> tuple[Params, Array]:
        """Returns the gradients of layers (None: they do not learn), and of `forward`'s `x`."""
        moves, stage = self.moves, jnp.arange(self.moves.stages)
        count, steps = self.steps(count)
        of_hidden, of_routed = bars[0], jax.tree.map(self._by_item, bars[1])
        structure = jax.tree.structure(layers)
        like = _picked(layers, learning)
        specs = _picked(self.specs(layers), learning)
        sums = [jnp.zeros(a.shape, jnp.float32) for a in like]
        last, slots = moves.rounds - 1, self.slots(keep=False)

        def one(weights, x, reading, part, bar, of_routers):
            def again(mine: list[Array], x: Array):
                mixed = iter(mine)
                leaves = [
                    next(mixed) if learns else leaf
                    for leaf, learns in zip(jax.tree.leaves(weights), learning, strict=True)
                ]
                y, did = self.work(jax.tree.unflatten(structure, leaves), x, reading, part)
                return y, _floats(did)

            return jax.vjp(again, _picked(weights, learning), x)[1]((bar, of_routers))

        work = mesh_lib.on_stages(one)

        def step(number, carry):
            line, queue, out, sums = carry
            t = steps - 1 - number
            item = Item.of(t - stage, count, moves.rounds)
            place = moves.place(item)
            ends = Item.of(t - (moves.stages - 1), count, moves.rounds).within(last)
            line, queue = moves.entered(
                line, queue, place % slots, ends, moves.stages - 1, onward=1
            )
            bar = moves.taken(line, place % slots), moves.taken(of_routed, place)

            def real(a: Array) -> Array:  # without an item: the gradient of zero
                return jnp.where(item.valid.reshape(-1, *(1,) * (a.ndim - 1)), a, 0)

            weights, chosen, part = self.given(layers, reading, item)
            given = weights, moves.taken(held, place), chosen, part
            of_layers, back = work(*given, *jax.tree.map(real, bar))
            sums = moves.added(sums, of_layers, specs, item.round)
            begins = Item.of(t, count, moves.rounds).within(0)
            out = moves.left(out, back, begins, 0, onward=1)
            came = Item.of(t - (stage + 1) % moves.stages, count, moves.rounds)
            line = moves.put(line, back, moves.place(came) % slots, came.valid, onward=-1)
            return line, queue, out, sums

        queue = moves.aligned(of_hidden, count, onward=1)
        start = moves.blank(slots, of_hidden), queue, jnp.zeros_like(of_hidden), sums
        _, _, out, sums = lax.fori_loop(0, steps, step, start)
        found = iter(a.astype(b.dtype) for a, b in zip(sums, like, strict=True))
        leaves = [next(found) if learns else None for learns in learning]
        return jax.tree.unflatten(structure, leaves), out

    def _by_turn(self, a: Array) -> Array:
        """Returns [stages, items, n, ...] of items as [turns, stages, L, ...] of microbatches."""
        moves = self.moves
        a = a.reshape(moves.stages, moves.rounds, moves.most, *a.shape[2:])
        a = jnp.moveaxis(a, 2, 0)  # then stage, round, n: as layers are stacked
        return a.reshape(moves.turns, moves.stages, -1, *a.shape[4:])

    def _by_item(self, a: Array) -> Array:
        """Returns what `_by_turn` was given."""
        moves = self.moves
        a = a.reshape(moves.most, moves.stages, moves.rounds, -1, *a.shape[3:])
        return jnp.moveaxis(a, 0, 2).reshape(moves.stages, -1, *a.shape[3:])


def _picked(tree: Any, which: tuple[bool, ...]) -> list[Any]:
    return [leaf for leaf, wanted in zip(jax.tree.leaves(tree), which, strict=True) if wanted]


def _floats(routed: ByStack) -> dict[str, list[Any]]:
    """Returns what routers did that may have a gradient, or its gradients."""

    def has(a: Any) -> bool:
        return jnp.issubdtype(getattr(a, "aval", a).dtype, jnp.floating)

    return {name: [a for a in jax.tree.leaves(of) if has(a)] for name, of in routed.items()}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Learning:
    """Which parameters of layers have a gradient, in the order of their tree's leaves."""

    which: tuple[bool, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flowed(schedule: _Schedule, layers: Params, x: Array, reading: Reading, count: Array):
    """Returns hidden states after the stages, and what routers did there."""
    with mesh_lib.in_stages():
        return schedule.forward(layers, x, reading, count, keep=False)[0]


def _flowed_forward(schedule: _Schedule, *marked: Any):
    learning = _Learning(tuple(a.perturbed for a in jax.tree.leaves(marked[0])))
    layers, x, reading, count = jax.tree.map(lambda a: a.value, marked)
    with mesh_lib.in_stages():
        found, held = schedule.forward(layers, x, reading, count, keep=True)
    return found, (learning, layers, held, reading, count)


def _flowed_backward(schedule: _Schedule, residuals, bars):
    learning, layers, held, reading, count = residuals

    def real(bar: Any) -> Array:
        zero = isinstance(bar, SymbolicZero)
        return jnp.zeros(bar.aval.shape, bar.aval.dtype) if zero else bar

    known = jax.tree.map(real, (bars[0], _floats(bars[1])))
    with mesh_lib.in_stages():
        found = schedule.backward(layers, learning.which, held, reading, count, known)
    return *found, None, None


_flowed.defvjp(_flowed_forward, _flowed_backward, symbolic_zeros=True)
