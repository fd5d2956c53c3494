"""Meshes and the rules from dim names to their axes."""

import jax
import numpy as np
import pytest
import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxrl_llm.config import ConfigError, MeshConfig
from jaxrl_llm.sharding import mesh as mesh_lib


def test_the_rest_goes_to_the_open_axis():
    mesh = mesh_lib.make_mesh(MeshConfig(data=2, fsdp=-1, tensor=2))
    ones = dict.fromkeys(mesh_lib.AXES, 1)
    assert dict(mesh.shape) == {**ones, "data": 2, "fsdp": 2, "tensor": 2}
    mesh = mesh_lib.make_mesh(MeshConfig(fsdp=2, tensor=-1))
    assert dict(mesh.shape) == {**ones, "fsdp": 2, "tensor": 4}


def test_all_meshes_have_the_same_flat_device_order():
    for config in (MeshConfig(), MeshConfig(tensor=8), MeshConfig(data=2, sequence=2, tensor=2)):
        assert list(mesh_lib.make_mesh(config).devices.flat) == jax.devices()


@pytest.mark.parametrize(
    "sizes", [{"fsdp": 4}, {"fsdp": 16}, {"tensor": 3}, {"data": 16, "fsdp": -1}], ids=str
)
def test_sizes_that_do_not_fill_the_devices_are_refused(sizes):
    with pytest.raises(ConfigError, match=r"does not fill the\s+8 devices; set one axis to -1"):
        mesh_lib.make_mesh(MeshConfig(**sizes))


def test_a_hosts_value_is_whole_on_every_device():
    mesh = mesh_lib.make_mesh(MeshConfig(fsdp=4, tensor=2))
    for value in (np.int32(3), np.arange(6.0, dtype=np.float32).reshape(2, 3)):
        put = mesh_lib.replicate_host_value(value, mesh)
        assert put.committed and put.sharding == mesh_lib.replicated(mesh)
        assert put.dtype == value.dtype and len(put.addressable_shards) == 8
        for shard in put.addressable_shards:
            np.testing.assert_array_equal(shard.data, value)


def spec(shape, names, rules=mesh_lib.TRAIN, units=None, **sizes):
    sizes = {"data": 1, "fsdp": 1, "sequence": 1, "tensor": 1} | sizes
    return mesh_lib.partition_spec(shape, names, rules, sizes, units or {})


def test_partition_spec_by_hand():
    assert spec((96, 32), ("vocab", "embed"), fsdp=4, tensor=2) == P(("tensor", "fsdp"), None)
    assert spec((96, 32), ("vocab", "embed"), tensor=2) == P("tensor", None)
    assert spec((96, 32), ("vocab", None)) == P(None, None)
    # 98 is 2 x 49: tensor divides it, fsdp does not divide the rest.
    assert spec((98,), ("vocab",), fsdp=4, tensor=2) == P("tensor")
    # 97 divides by neither; 99 by fsdp alone.
    assert spec((97,), ("vocab",), fsdp=3, tensor=2) == P(None)
    assert spec((99,), ("vocab",), fsdp=3, tensor=2) == P("fsdp")


def test_the_tensor_axis_takes_whole_heads():
    # Two heads of 8: over two devices, not over four; fsdp does not compute and cuts anywhere.
    units = {"kv_heads": 8}
    assert spec((16,), ("kv_heads",), units=units, tensor=2) == P("tensor")
    assert spec((16,), ("kv_heads",), units=units, tensor=4) == P(None)
    assert spec((16,), ("kv_heads",), units=units, fsdp=8) == P("fsdp")
    assert spec((16,), ("kv_heads",), units=units, tensor=2, fsdp=4) == P(("tensor", "fsdp"))


@settings(max_examples=200, deadline=None)
@given(
    dim=st.integers(1, 512),
    unit=st.sampled_from([1, 4, 8]),
    fsdp=st.sampled_from([1, 2, 3, 4, 8]),
    tensor=st.sampled_from([1, 2, 3, 4, 8]),
    sequence=st.sampled_from([1, 2, 4]),
    name=st.sampled_from(sorted(mesh_lib.TRAIN)),
    layout=st.sampled_from(sorted(mesh_lib.ROLLOUT_WEIGHTS)),
)
@example(dim=8, unit=4, fsdp=4, tensor=1, sequence=2, name="heads", layout="all_tensor")
def test_rollout_is_a_prefix_of_training(dim, unit, fsdp, tensor, sequence, name, layout):
    sizes = {"fsdp": fsdp, "tensor": tensor, "sequence": sequence}

    def axes(rules, computing):
        (found,) = mesh_lib.partition_spec((dim,), (name,), rules, sizes, {name: unit}, computing)
        return (found,) if isinstance(found, str) else found or ()

    train = axes(mesh_lib.TRAIN, ("tensor",))
    rollout = axes(mesh_lib.ROLLOUT_WEIGHTS[layout], mesh_lib.COMPUTE_AXES[layout])
    assert train[: len(rollout)] == rollout
    parts = 1
    for axis in train:
        parts *= sizes[axis]
    assert dim % parts == 0


def test_rules_name_the_same_dims():
    assert set(mesh_lib.ROLLOUT) == set(mesh_lib.TRAIN)
    layouts = set(MeshConfig.__dataclass_fields__["rollout"].type.__args__)
    for table in (mesh_lib.ROLLOUT_WEIGHTS, mesh_lib.COMPUTE_AXES, mesh_lib.ROLLOUT_ACTIVATIONS):
        assert set(table) == layouts


def test_parameters_are_split_by_name():
    mesh = tiny.make_mesh(fsdp=2, tensor=4)
    network = tiny.NETWORK
    found = mesh_lib.shardings(
        network.abstract_params(),
        network.logical_axes(),
        mesh,
        mesh_lib.TRAIN,
        network.sharding_units,
    )
    both = ("tensor", "fsdp")
    assert found["embed"].spec == P(both, None)
    attention = found["layers"]["0"]["attention"]
    assert attention["q"]["kernel"].spec == P(None, None, both)
    assert attention["k"]["kernel"].spec == P(None, None, "fsdp")  # 2 heads, 4 tensor devices
    assert attention["k"]["bias"].spec == P(None, "fsdp")
    assert found["layers"]["0"]["mlp"]["down"]["kernel"].spec == P(None, both, None)
    assert found["norm"]["scale"].spec == P(None)


def test_constrain_without_a_mesh_is_nothing():
    x = jax.numpy.ones((4, 6))
    assert mesh_lib.constrain(x, "batch", "embed") is x
    with jax.set_mesh(tiny.make_mesh()):
        assert mesh_lib.constrain(x, "batch", "embed") is x
    mesh = tiny.make_mesh(fsdp=4)
    with jax.set_mesh(mesh):
        split = jax.jit(lambda x: mesh_lib.constrain(x, "batch", "embed"))(x)
    assert split.sharding.is_equivalent_to(
        mesh_lib.activation_sharding(x.shape, ("batch", "embed"), mesh), 2
    )
    assert split.sharding.shard_shape(x.shape) == (1, 6)


def test_runs_get_the_devices_in_use():
    every = jax.devices()
    with pytest.raises(RuntimeError), mesh_lib.use_devices(every[2:5]):
        assert mesh_lib.run_devices() == every[2:5]
        assert mesh_lib.make_mesh(MeshConfig()).devices.ravel().tolist() == every[2:5]
        with mesh_lib.use_devices(every[:1]):
            assert mesh_lib.make_mesh(MeshConfig()).devices.ravel().tolist() == every[:1]
        assert mesh_lib.run_devices() == every[2:5]
        # Devices that are named are those that are taken.
        assert mesh_lib.make_mesh(MeshConfig(), every).size == len(every)
        raise RuntimeError("a run that fails")
    assert mesh_lib.run_devices() == every


def test_the_fixture_of_one_device_reaches_a_run(one_device):
    assert mesh_lib.run_devices() == jax.devices()[:1]
    assert mesh_lib.make_mesh(MeshConfig()).size == 1
