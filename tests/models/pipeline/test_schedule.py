"""Layers on stages: they compute what one device does, and send to neighbours alone."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import kinds_of_layers
import numpy as np
import pytest
import tiny

from jaxrl_llm.models import architecture
from jaxrl_llm.models.architecture import Experts, LayerType
from jaxrl_llm.models.moe.router import RouterInputs
from jaxrl_llm.models.packed_inputs import PackedInputs
from jaxrl_llm.models.pipeline import schedule as schedule_lib
from jaxrl_llm.models.pipeline import stage_transfers
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.sharding import mesh as mesh_lib

R, W = 2, 8
COUNT = 3  # of microbatches with tokens; the others hold nothing that counts
DENSE = dataclasses.replace(tiny.SHAPE, num_layers=5)
# A layer of another kind before the stages, and one more than they can share.
MIXED = dataclasses.replace(
    tiny.SHAPE,
    num_layers=6,
    layers=(LayerType(), *(LayerType(experts=True),) * 5),
    experts=Experts(4, 2, 16),
)

STATES = dataclasses.replace(
    kinds_of_layers.NETWORKS["states"],
    num_layers=4,
    layers=(kinds_of_layers.DELTA, LayerType()) * 2,
)


def on_stages(of, stages, rounds=1, **settings):
    return Network(dataclasses.replace(of, stages=stages, rounds=rounds), **settings)


def by_layer(network, tree):
    """Returns parameters with a tree for each layer."""
    layers = {
        number: jax.tree.map(lambda a, i=i: np.asarray(a[i]), tree["layers"][name])
        for name, stack in network.shape.layer_stacks.items()
        for i, number in enumerate(stack.layer_indices)
    }
    return jax.tree.map(np.asarray, {**tree, "layers": layers})


def stacked(network, tree):
    """Returns what `by_layer` was given, as another network stacks it."""
    layers = {
        name: jax.tree.map(
            lambda *a: np.stack(a), *(tree["layers"][n] for n in stack.layer_indices)
        )
        for name, stack in network.shape.layer_stacks.items()
    }
    return {**tree, "layers": layers}


@functools.cache
def rows(stages, number=4, width=W):
    """Returns tokens of microbatches in turns, and what is read with them."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 96, (number // stages, stages, R, width)).astype(np.int32)
    segments = np.ones_like(tokens)
    segments[..., width // 2 :] = 2
    positions = np.broadcast_to(np.arange(width) % (width // 2), tokens.shape).astype(np.int32)
    nothing = np.zeros((*tokens.shape[:3], 0), np.int32)
    members = segments[..., None] == np.arange(1, 3)
    routing = RouterInputs(segments != 0, sequences=members)
    return tokens, PackedInputs(positions, segments, nothing, nothing[..., None], routing)


def objective(hidden, routed, number):
    """Returns a number that every hidden state and router of a microbatch has a part in."""
    weights = jnp.cos(jnp.arange(hidden.size).reshape(hidden.shape) + number)
    value = jnp.sum(hidden * weights)
    if routed is not None:
        value += routed.balance_loss.sum() + 0.1 * routed.z_loss.sum()
    return jnp.where(number < COUNT, value, 0.0)


@functools.cache
def of_one_device(of):
    """Returns parameters by layer, the objective of all microbatches, and its gradient."""
    network = Network(of)
    params = tiny.params(network, scale=4.0)
    tokens, reading = jax.tree.map(lambda a: a.reshape(4, *a.shape[2:]), rows(1))

    @jax.jit
    @jax.value_and_grad
    def whole(params):
        found = [
            objective(
                *network.forward(params, tokens[m], *jax.tree.map(lambda a, m=m: a[m], reading)), m
            )
            for m in range(COUNT)
        ]
        return sum(found)

    value, gradient = whole(params)
    return by_layer(network, params), value, by_layer(network, gradient)


def lowered(network, mesh, number=4, width=W):
    """Returns the program of the objective and its gradient by all layers and ends."""
    tokens, reading = rows(network.shape.stages, number, width)
    numbers = np.arange(number).reshape(tokens.shape[:2])

    def whole(params):
        found = schedule_lib.run_stages(network, params, tokens, reading, jnp.int32(COUNT))

        def one(found, reading, number):
            return objective(
                *schedule_lib.run_after_stages(network, params, found, reading), number
            )

        return jax.vmap(mesh_lib.vmap_over_stages(one))(found, reading, numbers).sum()

    shardings = mesh_lib.shardings(
        network.abstract_params(),
        network.logical_axes(),
        mesh,
        mesh_lib.TRAIN,
        network.sharding_units,
    )
    like = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        network.abstract_params(),
        shardings,
    )
    with jax.set_mesh(mesh):
        return jax.jit(jax.value_and_grad(whole)).lower(like)


CASES = {
    "two stages, a layer over": (DENSE, 2, 1, {"stage": 2}),
    "four stages x data": (DENSE, 4, 1, {"stage": 4, "data": 2}),
    "rounds x fsdp x tensor": (DENSE, 2, 2, {"stage": 2, "fsdp": 2, "tensor": 2}),
    "experts x rounds": (MIXED, 2, 2, {"stage": 2, "fsdp": 2, "expert": 2}),
    "states x fsdp": (STATES, 2, 1, {"stage": 2, "fsdp": 2}),
}
EVERY_CHANGE = ("rounds x fsdp x tensor",)


def neighbours(hlo, mesh):
    """Returns the pairs of stages that permutes of a compiled program go between."""
    stage = {d.id: int(at[0]) for at, d in np.ndenumerate(mesh.devices)}
    pairs = set()
    for found in re.findall(r"collective-permute[^\n]*source_target_pairs=\{\{(.*?)\}\}", hlo):
        for pair in found.split("},{"):
            source, target = map(int, pair.split(","))
            pairs.add((stage[source], stage[target]))
    return {pair for pair in pairs if pair[0] != pair[1]}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c in EVERY_CHANGE else pytest.mark.slow) for c in CASES],
)
def test_stages_compute_what_one_device_does(case):
    of, stages, rounds, sizes = CASES[case]
    mesh, network = tiny.make_mesh(**sizes), on_stages(of, stages, rounds)
    params, wanted, gradient = of_one_device(of)
    program = lowered(network, mesh).compile()
    with jax.set_mesh(mesh):
        value, found = program(tiny.sharded(stacked(network, params), mesh, network))
    assert float(value) == pytest.approx(float(wanted), rel=1e-6)
    for a, b in zip(
        jax.tree.leaves(by_layer(network, found)), jax.tree.leaves(gradient), strict=True
    ):
        # Sums in another order: relative to the largest gradient of each array.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(np.abs(b).max(), 1e-3))
    # Of each direction one permute, to the neighbour and back, whatever the rounds.
    onward = {(s, (s + 1) % stages) for s in range(stages)}
    back = {(b, a) for a, b in onward}
    assert neighbours(program.as_text(), mesh) == onward | back


def test_programs_do_not_grow_with_microbatches_or_layers():
    mesh = tiny.make_mesh(stage=2)

    def size(layers, number):
        of = dataclasses.replace(DENSE, num_layers=layers)
        return lowered(on_stages(of, 2), mesh, number).as_text().count(" = ")

    # With as many microbatches as layers two small functions are the same one.
    assert size(4, 8) == size(4, 16) == size(12, 8)


@pytest.mark.slow
def test_a_microbatch_costs_the_inputs_of_its_items():
    """And its places in the queues; what layers make exists of one item at a time."""
    width, rounds = 64, 2
    of = dataclasses.replace(DENSE, num_layers=4, mlp_size=1024)
    network, mesh = on_stages(of, 2, rounds), tiny.make_mesh(stage=2)
    few, many = (
        lowered(network, mesh, number, width).compile().memory_analysis().temp_size_in_bytes
        for number in (4, 12)
    )
    carry = R * width * of.hidden_size * 4
    # On each stage: an input in each round, a gradient that waits, halves of four queues, and as
    # much again for the objective here, which is of all microbatches at once.
    assert (many - few) / 8 < (rounds + 1 + 4) * carry
    assert carry * of.mlp_size / of.hidden_size > 2 * (many - few) / 8


def test_the_bubble_is_that_of_the_formula():
    """Counted from the items that stages have, step by step."""
    for count, stages, rounds in [(4, 2, 1), (8, 4, 1), (8, 4, 5), (3, 4, 2)]:
        busy, steps = schedule_lib.busy_steps(count, stages, rounds)
        held = max(count, stages)
        items = [
            schedule_lib.ScheduleItem.from_number(t - jnp.arange(stages), jnp.int32(held), rounds)
            for t in range(steps)
        ]
        seen = np.sum([item.valid for item in items], 0)
        assert seen.tolist() == [busy] * stages
        if count >= stages:
            idle = 1 - busy / steps
            assert idle == pytest.approx((stages - 1) / (rounds * count + stages - 1))
        # Every stage sees every microbatch in every round, once.
        pairs = {
            (int(r[s]), int(m[s]))
            for valid, r, m in items
            for s in range(stages)
            if valid[s] and s == stages - 1
        }
        assert len(pairs) == busy


def schedule(stages, rounds, turns):
    of = on_stages(dataclasses.replace(DENSE, num_layers=stages * rounds), stages, rounds)
    moves = stage_transfers.StageTransfers(stages, rounds, turns, jax.sharding.PartitionSpec())
    return schedule_lib._Schedule(
        of, schedule_lib.PipelinePartition.from_network(of).staged, moves, has_adapters=False
    )


@pytest.mark.parametrize("stages, rounds, turns", [(2, 1, 2), (4, 1, 2), (4, 5, 3), (2, 3, 1)])
def test_a_schedule_has_the_steps_of_its_count(stages, rounds, turns):
    made = schedule(stages, rounds, turns)
    for count in range(stages * turns + 1):
        held, steps = (int(n) for n in made.num_steps(jnp.int32(count)))
        assert held == max(count, stages)  # a round has at least a microbatch for each stage
        assert steps == schedule_lib.busy_steps(count, stages, rounds)[1]
    # More than there is room for cannot be: the arrays are full then.
    assert int(made.num_steps(jnp.int32(99))[0]) == stages * turns


def test_inputs_are_kept_for_as_long_as_they_wait():
    # For the backward pass all items; else one, or with rounds one of each microbatch.
    assert schedule(2, 1, 3).num_slots(keep=True) == 6
    assert schedule(2, 1, 3).num_slots(keep=False) == 1
    assert schedule(2, 2, 3).num_slots(keep=True) == 12
    assert schedule(2, 2, 3).num_slots(keep=False) == 6


def test_router_outputs_are_sorted_by_microbatch_and_layer():
    """As stacked: by stage, then round, then layer of the round."""
    stages, rounds, turns, layers = 2, 3, 2, 2
    made = schedule(stages, rounds, turns)
    stage, round, microbatch, layer = np.indices((stages, rounds, stages * turns, layers))
    names = 1000 * microbatch + 100 * stage + 10 * round + layer
    by_item = names.reshape(stages, rounds * stages * turns, layers)
    found = made._by_microbatch(jnp.asarray(by_item))
    assert found.shape == (turns, stages, stages * rounds * layers)
    order = [100 * s + 10 * r + n for s in range(2) for r in range(3) for n in range(2)]
    for m in range(stages * turns):
        assert found[m // stages, m % stages].tolist() == [1000 * m + n for n in order]
    np.testing.assert_array_equal(made._by_item(found), by_item)


def test_phases_split_the_layers_around_the_stages():
    phases = schedule_lib.PipelinePartition.from_network(on_stages(MIXED, 2, 2))
    numbers = lambda groups: [stack.layer_indices for group in groups for stack in group]  # noqa: E731
    # Layer 0 is of another kind; 1 and 3 are of stage 0, 2 and 4 of stage 1; one is over.
    assert numbers(phases.before) == [(0,)]
    assert [stack.layer_indices for stack in phases.staged] == [(1, 3, 2, 4)]
    assert numbers(phases.after) == [(5,)]


def test_layers_that_are_too_few_are_refused():
    assert architecture.stage_split_problem(DENSE, 4, 1) == ""
    assert architecture.stage_split_problem(DENSE, 2, 4) == (
        "2 stages x 4 rounds need as many layers that are alike, and the model has 5 layers; use"
        " mesh.stage_rounds=2"
    )
    assert "use mesh.stage=5, mesh.stage_rounds=1" in architecture.stage_split_problem(DENSE, 6, 1)
    pattern = (*(LayerType(window=4),) * 2, LayerType()) * 3
    windows = dataclasses.replace(tiny.SHAPE, num_layers=9, layers=pattern)
    assert "3 repeated patterns of 2 kinds of layers" in architecture.stage_split_problem(
        windows, 4, 1
    )


def test_stacks_on_stages_have_every_layer_once():
    pattern = (*(LayerType(window=4),) * 2, LayerType()) * 5
    windows = dataclasses.replace(tiny.SHAPE, num_layers=15, layers=pattern, stages=2, rounds=2)
    stacks = windows.layer_stacks
    # Patterns 0 and 2 are of stage 0, 1 and 3 of stage 1, and the last one is left over.
    assert stacks["0"].layer_indices == (0, 1, 6, 7, 3, 4, 9, 10)
    assert stacks["1"].layer_indices == (2, 8, 5, 11)
    assert sorted(n for stack in stacks.values() for n in stack.layer_indices) == list(range(15))
    assert [stack.stages for stack in stacks.values()] == [2, 2, 1, 1]
