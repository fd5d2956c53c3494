"""Devices shared out to roles, and arrays that cross from one share to another."""

import jax
import numpy as np
import pytest
import tiny
from jax._src.array import ArrayImpl
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.config import ConfigError, MeshConfig, PlacementConfig, PoolConfig
from jaxrl_llm.config.placement import CHOICES, ROLES
from jaxrl_llm.sharding import device_pools
from jaxrl_llm.sharding.mesh import AXES


def places(choice="split", used=ROLES, mesh=None, devices=None, **settings):
    placement = PlacementConfig(choice=choice, **settings)
    return device_pools.role_meshes(placement, mesh or MeshConfig(), used, devices or jax.devices())


def numbers(mesh):
    return [device.id for device in mesh.devices.flat]


def by_hand(**sizes):
    """Returns the settings of one pool for the policy and what goes with it, one for the rest."""
    roles = {role: "b" if role in ("critic", "reward") else "a" for role in ROLES}
    return {"choice": "by_hand", "pools": sizes, "roles": roles}


def test_split_gives_each_half_the_same_axes():
    found = places()
    assert numbers(found["policy"]) == [0, 1, 2, 3] == numbers(found["reference"])
    assert numbers(found["critic"]) == [4, 5, 6, 7] == numbers(found["reward"])
    assert found["policy"].axis_names == found["critic"].axis_names
    assert found["rollout"] is found["policy"]
    assert device_pools.all_devices(found.values()) == jax.devices()


def test_standalone_gives_nothing_to_roles_that_the_run_does_not_have():
    found = places("standalone", used=("policy", "rollout"))
    assert numbers(found["policy"]) == [0, 1, 2, 3]
    assert numbers(found["rollout"]) == [4, 5, 6, 7]
    assert found["critic"] is found["policy"]


def test_pools_by_hand_have_meshes_of_their_own():
    sizes = {"a": PoolConfig(devices=-1, tensor=2), "b": PoolConfig(devices=2)}
    found = places(**by_hand(**sizes))
    ones = dict.fromkeys(AXES, 1)
    assert dict(found["policy"].shape) == {**ones, "fsdp": 3, "tensor": 2}
    assert dict(found["critic"].shape) == {**ones, "fsdp": 2}


def test_a_pool_takes_as_many_devices_of_every_host():
    devices = tiny.hosts(2, 4)
    found = places(devices=devices)
    assert numbers(found["policy"]) == [0, 1, 4, 5] and numbers(found["critic"]) == [2, 3, 6, 7]
    with pytest.raises(ConfigError, match=r"pools.b: 3 devices cannot be as many of each of 2"):
        places(devices=devices, **by_hand(a=PoolConfig(), b=PoolConfig(devices=3)))
    roles = {**dict.fromkeys(ROLES, "a"), "rollout": "b"}
    sizes = {"a": PoolConfig(devices=4), "b": PoolConfig(devices=4)}
    own = {"choice": "by_hand", "hosts": "own", "pools": sizes, "roles": roles}
    found = places(devices=devices, **own)
    assert numbers(found["policy"]) == [0, 1, 2, 3] and numbers(found["rollout"]) == [4, 5, 6, 7]
    for changes, message in (
        ({"pools": {"a": PoolConfig(devices=6), "b": PoolConfig()}}, "6 devices are not whole ho"),
        ({"roles": {**roles, "policy": "b", "rollout": "a"}}, "'a' is first, but process 0 must"),
        ({"roles": {**roles, "critic": "b"}}, "a critic on one host that the policy is not on"),
    ):
        with pytest.raises(ConfigError, match=message):
            places(devices=devices, **(own | changes))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"choice": "standalone"}, "'standalone' does not share the 8 devices out to 5 pools"),
        (by_hand(a=PoolConfig(devices=8), b=PoolConfig()), "does not share the 8 devices"),
        (by_hand(a=PoolConfig(devices=4), b=PoolConfig(devices=3)), "devices for each pool"),
        (by_hand(a=PoolConfig(tensor=3), b=PoolConfig(devices=4)), "placement: pool 'a': .*fill"),
    ],
)
def test_devices_that_cannot_be_shared_out_are_an_error(settings, message):
    with pytest.raises(ConfigError, match=message):
        places(**settings)


@pytest.mark.parametrize(
    "placement, message",
    [
        (PlacementConfig(pools={"a": PoolConfig()}), "'colocate' names no pools"),
        (PlacementConfig(choice="by_hand"), "no pool; 'by_hand' says where every role lives"),
        (PlacementConfig(choice="by_hand", roles={"actor": "a"}), "unknown role; known: policy"),
        (PlacementConfig(choice="by_hand", roles={"policy": "x"}), "no pool is called 'x'"),
        (
            PlacementConfig(choice="by_hand", pools={"a": PoolConfig()}, roles={}),
            "no role lives there",
        ),
    ],
)
def test_a_map_that_cannot_work_says_why(placement, message):
    assert any(message in text for _, text in placement.problems())


def test_ready_made_choices_place_every_role_once():
    for groups in CHOICES.values():
        assert sorted(role for group in groups for role in group) == sorted(ROLES)


@pytest.fixture
def no_host_bounce(monkeypatch):
    """An array that is read by the host while this is on ends the test."""

    def forbidden(array):
        raise AssertionError("an array passed through the host's memory")

    def switch():
        monkeypatch.setattr(ArrayImpl, "_value", property(forbidden))
        return monkeypatch.undo

    return switch


MESHES = {
    "halves": ({"fsdp": 4}, {"fsdp": 4}),
    "other shape": ({"fsdp": 4}, {"fsdp": 2, "tensor": 2}),
    "to fewer": ({"devices": 6, "fsdp": 3, "tensor": 2}, {"devices": 2, "fsdp": 2}),
    "to more": ({"devices": 2, "fsdp": 2}, {"devices": 6, "fsdp": 3, "tensor": 2}),
    "uneven": ({"devices": 3, "fsdp": 3}, {"devices": 5, "fsdp": 5}),
}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize(
    "source_spec, target_spec",
    [
        (PartitionSpec("fsdp"), PartitionSpec(None, "fsdp")),
        (PartitionSpec(), PartitionSpec("fsdp", "tensor")),
        (PartitionSpec(("tensor", "fsdp")), PartitionSpec()),
    ],
)
def test_an_array_crosses_whole_and_not_through_the_host(
    name, source_spec, target_spec, no_host_bounce
):
    here, there = ({"devices": 4, **sizes} for sizes in MESHES[name])
    found = places(**by_hand(a=PoolConfig(**here), b=PoolConfig(**there)))
    values = np.arange(30 * 60, dtype=np.float32).reshape(30, 60)
    if any(30 % size for mesh in found.values() for size in mesh.shape.values()):
        values = np.arange(60 * 60, dtype=np.float32).reshape(60, 60)
    array = jax.device_put(values, NamedSharding(found["policy"], source_spec))
    target = NamedSharding(found["critic"], target_spec)
    allow = no_host_bounce()
    moved = device_pools.move_to_pool({"w": array}, target)["w"]
    allow()
    assert moved.sharding == target
    np.testing.assert_array_equal(moved, values)
    back = device_pools.move_to_pool(moved, array.sharding)
    np.testing.assert_array_equal(back, values)


def test_arrays_in_the_pool_or_uncommitted_are_not_moved():
    found = places()
    target = NamedSharding(found["critic"], PartitionSpec())
    there = jax.device_put(np.ones(4), NamedSharding(found["critic"], PartitionSpec("fsdp")))
    nowhere, of_host = jax.numpy.ones(4), np.ones(4)
    moved = device_pools.move_to_pool([there, nowhere, of_host], target)
    assert moved[0] is there and moved[1] is nowhere and moved[2] is of_host
