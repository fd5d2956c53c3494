"""Pipeline communication by hand: microbatch m holds the number m + 1, and arrives where due."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.models.pipeline.stage_transfers import ScheduleItem, StageTransfers

STAGES, TURNS = 4, 2
HIDDEN = (2, 1, 3)  # R, W, D
MOVES = StageTransfers(STAGES, 1, TURNS, P("fsdp", None, None))
MESH = tiny.make_mesh(stage=STAGES, fsdp=2)
FORWARD = {"first": 0, "last": STAGES - 1, "onward": -1}  # how the queues rotate
BACKWARD = {"first": STAGES - 1, "last": 0, "onward": 1}
DIRECTIONS = pytest.mark.parametrize("direction", [FORWARD, BACKWARD], ids=["forward", "backward"])


def hidden(numbers):
    """Hidden states that hold one number each: [..., R, W, D]."""
    numbers = np.asarray(numbers, np.float32)
    return np.broadcast_to(numbers[..., None, None, None], (*numbers.shape, *HIDDEN)).copy()


def numbers_of(states):
    """The inverse of `hidden`; fails if one hidden state holds several numbers."""
    states = np.asarray(states)
    np.testing.assert_array_equal(states, hidden(states[..., 0, 0, 0]))
    return states[..., 0, 0, 0].astype(int).tolist()


def full_queue():
    return hidden(np.arange(1, MOVES.max_microbatches + 1).reshape(TURNS, STAGES))


def item(microbatch, valid=True):
    return ScheduleItem(jnp.bool_(valid), jnp.int32(0), jnp.int32(microbatch))


@functools.partial(jax.jit, static_argnames=("stage", "onward"))
def entered(buffer, queue, slot, item, stage, onward):
    return MOVES.inject(buffer, queue, slot, item, stage, direction=onward)


@functools.partial(jax.jit, static_argnames=("stage", "onward"))
def left(queue, values, item, stage, onward):
    return MOVES.drain(queue, values, item, stage, direction=onward)


@functools.partial(jax.jit, static_argnames="onward")
def aligned(queue, count, onward):
    return MOVES.rotate_partial_row(queue, count, direction=onward)


@functools.partial(jax.jit, static_argnames="onward")
def put(buffers, values, slot, valid, onward):
    return MOVES.write_slots(buffers, values, slot, valid, direction=onward)


def test_items_are_numbered_round_by_round():
    # Two rounds of three microbatches: numbers 0 to 5; before and after them a stage is idle.
    items = ScheduleItem.from_number(jnp.array([-1, 0, 2, 3, 5, 6]), jnp.int32(3), 2)
    assert items.valid.tolist() == [False, True, True, True, True, False]
    assert items.round.tolist()[1:-1] == [0, 0, 1, 1]
    assert items.microbatch.tolist()[1:-1] == [0, 2, 0, 2]
    assert items.only_in_round(1).valid.tolist() == [False, False, False, True, True, False]
    assert items.only_in_round(0).valid.tolist() == [False, True, True, False, False, False]


def test_every_item_has_a_slot_of_its_own():
    moves = StageTransfers(STAGES, 3, TURNS, P())
    items = ScheduleItem.from_number(
        jnp.arange(3 * 6), jnp.int32(6), 3
    )  # six of the eight microbatches hold tokens
    slots = moves.slot_index(items).tolist()
    assert slots == [*range(6), *range(8, 14), *range(16, 22)]


@DIRECTIONS
@pytest.mark.parametrize("count", [8, 6, 5])
def test_the_injecting_stage_receives_every_microbatch_in_order(direction, count):
    first, onward = direction["first"], direction["onward"]
    order = range(count) if onward < 0 else reversed(range(count))
    slot = np.arange(STAGES, dtype=np.int32) % 2  # another slot on each stage
    with jax.set_mesh(MESH):
        queue, buffer = full_queue(), hidden(np.full((STAGES, 2), -7))
        if onward > 0:
            queue = aligned(queue, jnp.int32(count), onward=onward)
        for microbatch in order:
            buffer, queue = entered(
                buffer, queue, slot, item(microbatch), stage=first, onward=onward
            )
            expected = np.full((STAGES, 2), -7)
            expected[first, slot[first]] = microbatch + 1
            assert numbers_of(buffer) == expected.tolist()
    full_rows = count // STAGES
    assert numbers_of(queue)[:full_rows] == numbers_of(full_queue())[:full_rows]


@DIRECTIONS
@pytest.mark.parametrize("count", [8, 6, 5])
def test_drained_microbatches_end_on_their_stages(direction, count):
    last, onward = direction["last"], direction["onward"]
    order = range(count) if onward < 0 else reversed(range(count))
    with jax.set_mesh(MESH):
        queue = hidden(np.zeros((TURNS, STAGES)))
        for microbatch in order:
            values = np.full(STAGES, -7)  # of the other stages, not to be drained
            values[last] = microbatch + 1
            queue = left(queue, hidden(values), item(microbatch), stage=last, onward=onward)
        if onward < 0:
            queue = aligned(queue, jnp.int32(count), onward=onward)
    # Microbatch m is in row m // S on stage m % S; what has no tokens stays empty.
    expected = [m + 1 if m < count else 0 for m in range(MOVES.max_microbatches)]
    assert numbers_of(np.reshape(queue, (MOVES.max_microbatches, *HIDDEN))) == expected


@DIRECTIONS
def test_idle_steps_change_nothing(direction):
    queue, buffer = full_queue(), hidden(np.full((STAGES, 2), -7))
    onward = direction["onward"]
    with jax.set_mesh(MESH):
        idle = item(1, valid=False)
        slot = np.zeros(STAGES, np.int32)
        same = entered(buffer, queue, slot, idle, stage=direction["first"], onward=onward)
        drained = left(
            queue, hidden(np.full(STAGES, -7)), idle, stage=direction["last"], onward=onward
        )
    np.testing.assert_array_equal(same[0], buffer)
    np.testing.assert_array_equal(same[1], queue)
    np.testing.assert_array_equal(drained, queue)


def test_a_full_row_needs_no_alignment():
    for onward in (-1, 1):
        with jax.set_mesh(MESH):
            queue = aligned(full_queue(), jnp.int32(8), onward=onward)
        np.testing.assert_array_equal(queue, full_queue())


@pytest.mark.parametrize(
    "onward, sender", [(0, [0, 1, 2, 3]), (1, [3, 0, 1, 2]), (-1, [1, 2, 3, 0])]
)
def test_values_reach_the_slot_of_their_receiver(onward, sender):
    values = {
        "hidden": hidden(np.arange(1, 5)),
        "experts": np.arange(1, 5, dtype=np.int16).reshape(4, 1, 1, 1, 1) * np.ones(
            (4, 2, 2, 1, 2), np.int16
        ),  # [stages, n, R, W, k]
        "balance": np.arange(1, 5, dtype=np.float32).reshape(4, 1),
    }  # fmt: skip
    buffers = jax.tree.map(lambda a: np.zeros((4, 3, *a.shape[1:]), a.dtype), values)
    slot, valid = np.array([0, 1, 2, 0], np.int32), np.array([True, True, False, True])
    with jax.set_mesh(MESH):
        buffers = put(buffers, values, slot, valid, onward=onward)
        taken = jax.jit(MOVES.read_slots)(buffers, slot)
    for name, buffer in buffers.items():
        expected = np.zeros_like(buffer)
        for stage in (0, 1, 3):  # stage 2 is not valid
            expected[stage, slot[stage]] = values[name][sender[stage]]
        np.testing.assert_array_equal(buffer, expected)
        np.testing.assert_array_equal(taken[name], expected[np.arange(4), slot])


def test_values_are_stored_in_the_dtype_of_the_buffer():
    slot, valid = np.zeros(STAGES, np.int32), np.ones(STAGES, bool)
    with jax.set_mesh(MESH):
        buffer = MOVES.empty_buffer(2, jnp.zeros((TURNS, STAGES, *HIDDEN), jnp.bfloat16))
        stored = put(buffer, hidden(np.arange(4) + 1 / 1024), slot, valid, onward=0)
    assert buffer.shape == (STAGES, 2, *HIDDEN) and not np.asarray(buffer).any()
    assert buffer.sharding.spec[:3] == ("stage", None, "fsdp")
    assert stored.dtype == jnp.bfloat16


# Two stages of two rounds of two layers. Layers are stacked by stage, then by round.
ROUNDS = StageTransfers(2, 2, 1, P())
ROUNDS_MESH = tiny.make_mesh(stage=2)
LAYER_OF = {(0, 0): [0, 1], (0, 1): [2, 3], (1, 0): [4, 5], (1, 1): [6, 7]}  # by (stage, round)
LAYERS = {
    "kernel": np.arange(8, dtype=np.float32).reshape(8, 1, 1) + np.full((8, 2, 3), 1 / 1024),
    "scale": np.arange(8, dtype=np.float32).reshape(8, 1),
}
SPECS = {"kernel": P("stage", None, None), "scale": P("stage", None)}


@pytest.mark.parametrize("rounds", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_stages_compute_with_the_layers_of_their_round(rounds):
    with jax.set_mesh(ROUNDS_MESH):
        weights = jax.jit(
            lambda layers, rounds: ROUNDS.round_weights(layers, SPECS, rounds, "bfloat16")
        )(LAYERS, jnp.array(rounds))
    for stage, round in enumerate(rounds):
        layers = LAYER_OF[stage, round]
        np.testing.assert_array_equal(weights["scale"][stage], LAYERS["scale"][layers])
        expected = jnp.asarray(LAYERS["kernel"][layers]).astype(jnp.bfloat16)
        np.testing.assert_array_equal(weights["kernel"][stage], expected)
    # Matrices are cast to the compute dtype, the scales of norms never.
    assert weights["kernel"].dtype == jnp.bfloat16 and weights["scale"].dtype == jnp.float32


@pytest.mark.parametrize("rounds", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_gradients_are_added_to_the_layers_of_their_round(rounds):
    gradients = np.arange(1, 5, dtype=np.float32).reshape(2, 2, 1)  # [stages, n, D]
    shardings = NamedSharding(ROUNDS_MESH, P("stage", None))
    sums = jax.device_put(np.full((8, 1), 100, np.float32), shardings)
    with jax.set_mesh(ROUNDS_MESH):
        (total,) = jax.jit(
            lambda sums, gradients, rounds: ROUNDS.accumulate_gradients(
                [sums], [gradients.astype(jnp.bfloat16)], [SPECS["scale"]], rounds
            )
        )(sums, gradients, jnp.array(rounds))
    expected = np.full(8, 100.0)
    for stage, round in enumerate(rounds):
        expected[LAYER_OF[stage, round]] += gradients[stage, :, 0]
    assert total[:, 0].tolist() == expected.tolist()
    assert total.dtype == jnp.float32
