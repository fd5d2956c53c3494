"""Arrays that cross to other devices: every target has its own shard, and no sender is a queue."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.sharding import cross_host_transfer

DEVICES = np.array(jax.devices())
ARRAY = np.arange(32, dtype=np.float32).reshape(8, 4)


def sharding(devices, spec, axes=("x",)):
    return NamedSharding(Mesh(DEVICES[devices], axes), spec)


SENDERS, RECEIVERS = [0, 1, 2, 3], [4, 5, 6, 7]
CASES = {
    "shard to shard": (sharding(SENDERS, P("x")), sharding(RECEIVERS, P("x"))),
    "in another order": (sharding(SENDERS, P("x")), sharding([6, 4, 7, 5], P("x"))),
    "columns": (sharding(SENDERS, P(None, "x")), sharding(RECEIVERS, P(None, "x"))),
    "whole to shards": (sharding(SENDERS, P()), sharding(RECEIVERS, P("x"))),
    "whole to more devices": (sharding([2, 3], P()), sharding([4, 5, 6, 7], P())),
    "shards to copies of them": (
        sharding([0, 1], P("x")),
        sharding([[4, 5], [6, 7]], P("x"), ("copy", "x")),
    ),
    "to fewer devices": (sharding(SENDERS, P()), sharding([4, 5], P("x"))),
}


@pytest.mark.parametrize("name", CASES)
def test_the_array_arrives_in_the_target_layout(name):
    source, target = CASES[name]
    array = jax.device_put(ARRAY, source)
    crossed = cross_host_transfer.cross_host_device_put(array, target)
    assert crossed.sharding == target and crossed.dtype == array.dtype
    for shard in crossed.addressable_shards:
        np.testing.assert_array_equal(shard.data, ARRAY[shard.index])
    np.testing.assert_array_equal(array, ARRAY)  # the source is not consumed


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.bool_])
def test_bits_are_kept_in_every_dtype(dtype):
    values = jnp.asarray(ARRAY % 3).astype(dtype)
    array = jax.device_put(values, sharding(SENDERS, P("x")))
    crossed = cross_host_transfer.cross_host_device_put(array, sharding(RECEIVERS, P("x")))
    assert crossed.dtype == dtype
    np.testing.assert_array_equal(crossed, values)


def test_a_scalar_crosses():
    array = jax.device_put(jnp.float32(2.5), sharding([0, 1], P()))
    crossed = cross_host_transfer.cross_host_device_put(array, sharding([6, 7], P()))
    assert crossed.shape == () and float(crossed) == 2.5


def test_holders_are_found_by_the_part_they_hold():
    halves = jax.device_put(ARRAY, sharding([[0, 1], [2, 3]], P("x"), ("x", "copy")))
    parts, full = cross_host_transfer._holders(halves)
    first, second = ((0, 4, 1), (0, 4, 1)), ((4, 8, 1), (0, 4, 1))
    assert {part: [d.id for d in devices] for part, devices in parts.items()} == {
        first: [0, 1],
        second: [2, 3],
    }
    assert full == []
    copies = jax.device_put(ARRAY, sharding([5, 6], P()))
    assert [device.id for device in cross_host_transfer._holders(copies)[1]] == [5, 6]


@pytest.fixture
def exchanges(monkeypatch):
    """The (sender, receiver) pairs of each collective, as device ids."""
    rounds: list[list[tuple[int, int]]] = []
    exchange = cross_host_transfer._exchange

    def recorded(array, local_shards, pairs):
        rounds.append([(source.id, device.id) for source, device, _ in pairs])
        return exchange(array, local_shards, pairs)

    monkeypatch.setattr(cross_host_transfer, cross_host_transfer._exchange.__name__, recorded)
    return rounds


@pytest.mark.parametrize(
    "name, num_rounds",
    [("shard to shard", 1), ("whole to shards", 1), ("whole to more devices", 2),
     ("shards to copies of them", 2), ("to fewer devices", 1)],
)  # fmt: skip
def test_senders_share_the_work(exchanges, name, num_rounds):
    """With k times as many receivers as senders there are k collectives, each of all senders."""
    source, target = CASES[name]
    cross_host_transfer.cross_host_device_put(jax.device_put(ARRAY, source), target)
    assert len(exchanges) == num_rounds
    for pairs in exchanges:
        senders, receivers = zip(*pairs, strict=True)
        # A permute may name each device once on either side.
        assert len(set(senders)) == len(senders) and len(set(receivers)) == len(receivers)
    receivers = collections.Counter(device for pairs in exchanges for _, device in pairs)
    assert receivers == collections.Counter(device.id for device in target.device_set)


def test_a_receive_buffer_lies_on_its_device():
    buffer = cross_host_transfer._receive_buffer((2, 3), jnp.dtype(jnp.int16), DEVICES[5])()
    assert buffer.shape == (1, 2, 3) and buffer.dtype == jnp.int16
    assert buffer.sharding == SingleDeviceSharding(DEVICES[5])
