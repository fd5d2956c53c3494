"""Handing weights over: the right numbers, in place, over the right collectives only."""

import re

import jax
import numpy as np
import pytest
import tiny

from jaxrl_llm.config import MeshConfig
from jaxrl_llm.sharding import mesh as mesh_lib

MESHES = [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"tensor": 8}, {"data": 2, "fsdp": 2, "tensor": 2}]


def assert_is_cast(got, weights, dtype):
    cast = lambda tree: jax.tree.map(lambda a: np.asarray(a.astype(dtype)), tree)  # noqa: E731
    stacked = weights["layers"]
    ends = {k: v for k, v in weights.items() if k != "layers"}
    assert jax.tree.all(
        jax.tree.map(np.array_equal, cast(ends), {k: v for k, v in got.items() if k != "layers"})
    )
    for i, layer in enumerate(got["layers"]):
        want = cast(jax.tree.map(lambda a, i=i: a[i], stacked))
        assert jax.tree.all(jax.tree.map(np.array_equal, want, layer))


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        *((sizes, "tensor") for sizes in MESHES),
        (MESHES[0], "train"),
        (MESHES[1], "train"),
        (MESHES[1], "replicas"),
    ],
    ids=str,
)
def test_reshard_is_the_plain_cast(sizes, layout):
    mesh = tiny.make_mesh(**sizes)
    mover = tiny.resharder(mesh, dtype="bfloat16", layout=layout)
    weights = [tiny.params(seed=seed) for seed in (0, 1)]
    train = [tiny.sharded(w, mesh) for w in weights]
    with jax.set_mesh(mesh):
        # From memory to memory: after the set-up nothing passes through the host.
        empty = jax.block_until_ready(mover.empty())
        with jax.transfer_guard("disallow_explicit"):
            first = mover.reshard(empty, train[0])
        assert all(a.is_deleted() for a in jax.tree.leaves(empty))
        compilations = mover._move_layer._cache_size(), mover._move_ends._cache_size()
        assert_is_cast(first, weights[0], "bfloat16")
        kept = jax.tree.map(lambda a: a.sharding, first)
        places = addresses(first)
        with jax.transfer_guard("disallow_explicit"):
            second = mover.reshard(first, train[1])
    assert all(a.is_deleted() for a in jax.tree.leaves(first))
    assert addresses(second) == places
    assert_is_cast(second, weights[1], "bfloat16")
    assert jax.tree.map(lambda a: a.sharding, second) == kept
    assert compilations == (mover._move_layer._cache_size(), mover._move_ends._cache_size())
    assert compilations == (1, 1)
    # The training weights are still there.
    assert not any(a.is_deleted() for tree in train for a in jax.tree.leaves(tree))

    one = second["layers"][0]["attention"]["q"]["kernel"].sharding
    tensor = mesh.shape["tensor"] if mesh.shape["tensor"] <= 4 else 1  # 4 heads
    ways = {"tensor": tensor, "train": tensor * mesh.shape["fsdp"], "replicas": 1}
    assert 32 // one.shard_shape((32, 32))[1] == ways[layout]


def addresses(tree):
    return [
        shard.data.unsafe_buffer_pointer()
        for a in jax.tree.leaves(tree)
        for shard in a.addressable_shards
    ]


COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("
)


def collectives(mover, mesh, train):
    abstract = lambda tree, shardings: jax.tree.map(  # noqa: E731
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings
    )
    text = ""
    index = jax.ShapeDtypeStruct((), np.int32, sharding=mesh_lib.replicated(mesh))
    layers = abstract(mover._layer, mover._layer_shardings)
    ends = abstract(mover._ends, mover._end_shardings)
    with jax.set_mesh(mesh):
        text += mover._move_layer.lower(layers, train["layers"], index).compile().as_text()
        rest = {k: v for k, v in train.items() if k != "layers"}
        text += mover._move_ends.lower(ends, rest).compile().as_text()
    return COLLECTIVE.findall(text)


def abstract_train(mesh, network=tiny.NETWORK):
    shapes = network.abstract()
    shardings = mesh_lib.shardings(
        shapes, network.logical_axes(), mesh, mesh_lib.TRAIN, network.units
    )
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings
    )


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_only_gathers(sizes):
    mesh = tiny.make_mesh(**sizes)
    train = abstract_train(mesh)
    mover = tiny.resharder(mesh, dtype="bfloat16")
    kinds = {kind for _, kind in collectives(mover, mesh, train)}
    assert kinds == ({"all-gather"} if mesh.shape["fsdp"] > 1 else set())
    # What stays split as it is needs no collective at all.
    mover = tiny.resharder(mesh, dtype="bfloat16", layout="train")
    assert not collectives(mover, mesh, train)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}], ids=str)
@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:2x4"])
def test_the_wire_of_a_tpu_carries_bfloat16(topology, sizes, monkeypatch):
    pytest.importorskip("libtpu", reason="the TPU compiler is in the wheel libtpu")
    from jax.experimental import topologies

    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = mesh_lib.make_mesh(MeshConfig(**{"fsdp": 1, **sizes}), list(devices))
    network = tiny.with_sizes(hidden_size=512, head_size=128, mlp_size=1024, vocab_size=2048)
    mover = tiny.resharder(mesh, network, dtype="bfloat16")
    found = collectives(mover, mesh, abstract_train(mesh, network))
    assert found
    for result, kind in found:
        assert kind == "all-gather"
        assert "f32" not in result.replace("bf16", "")
