"""Handing weights over: the right numbers, in place, over the right collectives only."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.config import MeshConfig, RolloutConfig
from jaxrl_llm.sampling import policy_sampler
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.sharding import reshard

MESHES = [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"tensor": 8}, {"data": 2, "fsdp": 2, "tensor": 2}]


def assert_is_cast(got, weights, dtype):
    cast = lambda tree: jax.tree.map(lambda a: np.asarray(a.astype(dtype)), tree)  # noqa: E731
    stacked = weights["layers"]["0"]
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
        (MESHES[3], "all_tensor"),
    ],
    ids=str,
)
def test_reshard_is_the_plain_cast(sizes, layout, compilations):
    mesh = tiny.make_mesh(**sizes)
    mover = tiny.resharder(mesh, dtype="bfloat16", layout=layout)
    weights = [tiny.params(seed=seed) for seed in (0, 1)]
    train = [tiny.sharded(w, mesh) for w in weights]
    with jax.set_mesh(mesh):
        # From memory to memory: after the set-up nothing passes through the host.
        empty = jax.block_until_ready(mover.zeros())
        with jax.transfer_guard("disallow_explicit"):
            first = mover.reshard(empty, train[0])
        assert all(a.is_deleted() for a in jax.tree.leaves(empty))
        num_before = len(compilations)
        assert_is_cast(first, weights[0], "bfloat16")
        kept = jax.tree.map(lambda a: a.sharding, first)
        places = addresses(first)
        with jax.transfer_guard("disallow_explicit"):
            second = mover.reshard(first, train[1])
    assert all(a.is_deleted() for a in jax.tree.leaves(first))
    assert addresses(second) == places
    assert_is_cast(second, weights[1], "bfloat16")
    assert jax.tree.map(lambda a: a.sharding, second) == kept
    assert compilations[num_before:] == []
    # The training weights are still there.
    assert not any(a.is_deleted() for tree in train for a in jax.tree.leaves(tree))

    one = second["layers"][0]["attention"]["q"]["kernel"].sharding
    tensor = mesh.shape["tensor"] if mesh.shape["tensor"] <= 4 else 1  # 4 heads
    both = tensor * mesh.shape["fsdp"]
    ways = {"tensor": tensor, "train": both, "all_tensor": both, "replicas": 1}
    assert 32 // one.shard_shape((32, 32))[1] == ways[layout]


def addresses(tree):
    return [
        shard.data.unsafe_buffer_pointer()
        for a in jax.tree.leaves(tree)
        for shard in a.addressable_shards
    ]


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        ({"fsdp": 8}, "tensor"),
        ({"fsdp": 4, "tensor": 2}, "tensor"),
        ({"sequence": 2, "fsdp": 2, "tensor": 2}, "tensor"),
        ({"fsdp": 4, "tensor": 2}, "replicas"),
        ({"fsdp": 4, "tensor": 2}, "train"),
        ({"data": 2, "fsdp": 2, "tensor": 2}, "all_tensor"),
        ({"tensor": 4}, "tensor"),
    ],
    ids=str,
)
def test_only_missing_shards_move(sizes, layout):
    mesh = tiny.make_mesh(**sizes)
    # Four whole key heads: every layout can split them as it likes.
    network = tiny.with_sizes(num_kv_heads=4)
    report = tiny.resharder(mesh, network, layout=layout).report()
    shapes = network.abstract_params()
    weights = sum(
        np.prod(a.shape) * 4
        for a, names in zip(
            jax.tree.leaves(shapes),
            jax.tree.leaves(network.logical_axes(), is_leaf=lambda n: isinstance(n, tuple)),
            strict=True,
        )
        if set(names) & set(mesh_lib.TRAIN)
    )
    held = mesh.shape["tensor"] * mesh.shape["fsdp"] * mesh.shape["sequence"]
    parts = {"tensor": mesh.shape["tensor"], "replicas": 1, "train": held, "all_tensor": held}
    assert report.lower_bound_bytes == weights / parts[layout] - weights / held
    # Only gathers; biases may go as sums of zeros and one part, which counts double.
    assert report.lower_bound_bytes <= report.bytes_moved <= 1.02 * report.lower_bound_bytes
    assert report.metrics()["reshard/bytes_moved"] == report.bytes_moved


@pytest.mark.parametrize(
    ("sizes", "layout"), [({"fsdp": 2, "tensor": 2}, "tensor"), ({"fsdp": 4}, "train")], ids=str
)
def test_kernels_that_come_first_are_transposed_on_the_way(sizes, layout):
    mesh = tiny.make_mesh(**sizes)
    movers = {
        network: tiny.resharder(mesh, tiny.WIDE, layout=layout, rollout=network)
        for network in (tiny.WIDE, tiny.WIDE_FIRST)
    }
    weights = tiny.sharded(tiny.params(tiny.WIDE), mesh, tiny.WIDE)
    with jax.set_mesh(mesh):
        plain, first = (mover.reshard(mover.zeros(), weights) for mover in movers.values())
    wanted = jax.tree.map(lambda a: a.shape[1:], tiny.WIDE_FIRST.abstract_params()["layers"]["0"])
    kernels = 0
    for before, after in zip(plain["layers"], first["layers"], strict=True):
        assert jax.tree.map(lambda a: a.shape, after) == wanted
        for (path, a), b in zip(
            jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True
        ):
            turned = path[-1].key == "kernel"
            kernels += turned
            np.testing.assert_array_equal(a.T if turned else a, b)
            # Each device holds the same part.
            part = a.sharding.shard_shape(a.shape)
            assert b.sharding.shard_shape(b.shape) == (part[::-1] if turned else part)
    assert kernels == 2 * 7
    plain_report, report = (mover.report() for mover in movers.values())
    assert report.lower_bound_bytes == plain_report.lower_bound_bytes
    assert report.bytes_moved == plain_report.bytes_moved


LINES = {
    "all-gather(%x), replica_groups={{0,1},{2,3}}, dimensions={0}": ("f32[6]{0}", 12),
    "all-gather(%x), replica_groups=[1,4]<=[4], dimensions={0}": ("bf16[8]{0}", 12),
    "all-gather(%x), replica_groups=mesh['a'=4,'b'=2] {'b'}, dimensions={0}": ("bf16[8]", 8),
    "all-gather(%x), replica_groups=mesh['a'=4,'b'=2], device_ids=([4,2]T(1,0)) {'a'}": (
        "bf16[8]",
        12,
    ),
    "all-reduce(%x), replica_groups={}, to_apply=%add": ("f32[8]", 56),
    "reduce-scatter(%x), replica_groups=[2,4]<=[8], dimensions={0}": ("f32[2]", 24),
    "all-to-all(%x), replica_groups=[2,4]<=[8], dimensions={0}": ("s8[16]", 12),
    "collective-permute(%x), source_target_pairs={{0,1},{1,0}}": ("f32[4,2]{1,0}", 32),
    # What began and was waited for counts once; the start names what goes in, too.
    "all-gather-start(%x), replica_groups=[2,4]<=[8]": ("(bf16[2]{0}, bf16[8]{0})", 12),
    "all-gather-done(%y)": ("bf16[8]{0}", 0),
    "fusion(%all-gather.3), kind=kLoop": ("bf16[8]{0}", 0),
}


@pytest.mark.parametrize("line", LINES)
def test_received_bytes_by_hand(line):
    result, wanted = LINES[line]
    hlo = f"HloModule m, num_partitions=8\n  %a.1 = {result} {line}\n"
    assert sum(c.received_bytes for c in reshard.collectives(hlo)) == wanted


def test_missing_elements_of_a_device_by_hand():
    mesh = tiny.make_mesh(fsdp=2, tensor=2)

    def missing(source, target):
        place = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))  # noqa: E731
        return reshard.missing_elements((4, 6), place(*source), place(*target))

    assert missing([("tensor", "fsdp")], ["tensor"]) == 12 - 6
    assert missing([("tensor", "fsdp")], []) == 24 - 6
    assert missing(["tensor"], [("tensor", "fsdp")]) == 0
    # Columns instead of rows: a quarter of what is wanted is there already.
    assert missing([None, "tensor"], ["tensor"]) == 6
    # The wrong order of axes: two devices of four hold nothing of what they want.
    assert missing([("tensor", "fsdp")], [("fsdp", "tensor")]) == 3


def test_a_real_program_is_counted():
    mesh = tiny.make_mesh(fsdp=8)
    x = jax.ShapeDtypeStruct(
        (16, 4), "float32", sharding=NamedSharding(mesh, PartitionSpec("fsdp"))
    )
    out = NamedSharding(mesh, PartitionSpec())
    text = jax.jit(lambda x: x + 1, out_shardings=out).lower(x).compile().as_text()
    (found,) = reshard.collectives(text)
    assert (found.kind, found.dtypes, found.received_bytes) == ("all-gather", ("f32",), 14 * 4 * 4)


WIRES = [
    ({"fsdp": 4, "tensor": 2}, "tensor"),
    ({"fsdp": 8}, "tensor"),
    ({"fsdp": 4, "tensor": 2}, "replicas"),
    ({"sequence": 2, "fsdp": 2, "tensor": 2}, "tensor"),
    ({"data": 2, "fsdp": 2, "tensor": 2}, "all_tensor"),
    ({"fsdp": 4, "tensor": 2}, "train"),
]


@pytest.mark.parametrize(
    ("topology", "sizes", "layout"),
    [
        pytest.param(
            topology,
            *wire,
            marks=pytest.mark.nightly if i and topology == "v6e:2x4" else pytest.mark.slow,
        )
        for topology in ("v5e:2x4", "v6e:2x4")
        for i, wire in enumerate(WIRES)
    ],
    ids=str,
)
def test_the_wire_of_a_tpu(topology, sizes, layout, tpu_devices):
    mesh = mesh_lib.make_mesh(MeshConfig(**{"fsdp": 1, **sizes}), tpu_devices(topology))
    network = tiny.with_sizes(
        hidden_size=512, num_kv_heads=4, head_size=128, mlp_size=1024, vocab_size=2048, num_layers=4
    )
    mover = tiny.resharder(mesh, network, dtype="bfloat16", layout=layout)
    report = mover.report()
    assert "f32" not in report.dtypes
    assert report.bytes_moved <= 1.1 * report.lower_bound_bytes
    assert bool(report.bytes_moved) == (layout in ("tensor", "replicas"))
    layer = sum(
        np.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
        for a in jax.tree.leaves(mover.abstract()["layers"][0])
    )
    assert report.extra_bytes <= layer


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x4"])
def test_rounded_weights_need_half_the_memory(topology, tpu_devices):
    """Of a layer that a TPU makes: on the wire, and at the peak beside what training holds."""
    mesh = mesh_lib.make_mesh(MeshConfig(fsdp=4, tensor=2), tpu_devices(topology))
    network = tiny.with_sizes(
        hidden_size=512, num_kv_heads=4, head_size=128, mlp_size=1024, vocab_size=2048
    )
    network = dataclasses.replace(network, compute_dtype="bfloat16")
    found = {}
    for quantization in ("none", "int8", "fp8"):
        settings = RolloutConfig(quantization=quantization)
        rollout = policy_sampler.rollout_network(settings, network, mesh)
        mover = policy_sampler.resharder(network, rollout, mesh, "tensor")
        layer = sum(
            np.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
            for a in jax.tree.leaves(mover.abstract()["layers"][0])
        )
        report = mover.report()
        found[quantization] = report.bytes_moved, layer + report.extra_bytes
    for quantization in ("int8", "fp8"):
        sent, peak = (a / b for a, b in zip(found[quantization], found["none"], strict=True))
        assert sent <= 0.6 and peak <= 0.6, (quantization, sent, peak)
