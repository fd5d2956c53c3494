"""Files of shards: read back in any other sharding, and damage is found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.checkpoint.shard_file import Regions, ShardFile, write


@pytest.fixture
def mesh():
    types = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=types)


def arrays(mesh):
    def put(values, *spec):
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))

    return {
        "matrix": put(jnp.arange(64.0).reshape(8, 8), "a", "b"),
        "columns": put(jnp.arange(48, dtype=jnp.bfloat16).reshape(6, 8), None, "a"),
        "scalar": put(jnp.array(7, jnp.int32)),
        "flags": put(jnp.arange(8) % 3 == 0, "b"),
        "empty": put(jnp.zeros((0, 3))),
    }


def test_shards_are_read_in_another_sharding(mesh, tmp_path):
    leaves = arrays(mesh)
    expected = {name: np.array(leaf) for name, leaf in arrays(mesh).items()}
    complete = write(tmp_path / "1.0-1", leaves, {"meta": {"step": 1}})
    # The copy does not hinder a donation, and does not see it.
    for leaf in leaves.values():
        if leaf.size and leaf.dtype != bool:
            jax.jit(lambda x: x * 0, donate_argnums=0)(leaf)
            assert leaf.is_deleted()
    complete()
    file = ShardFile(tmp_path / "1.0-1")
    assert file.is_intact and file.header["meta"] == {"step": 1}
    # Replicas are written once: 64 floats, 48 halves, a number, 8 flags in two parts, each aligned.
    assert file.header["bytes"] == 8 * 64 + 4 * 64 + 64 + 2 * 64
    for cut in (PartitionSpec("b", "a"), PartitionSpec(("a", "b")), PartitionSpec()):
        regions, wanted = Regions(), []
        for name, values in expected.items():
            spec = PartitionSpec(*cut[: values.ndim]) if values.size > 48 else PartitionSpec()
            sharding = NamedSharding(mesh, spec)
            for index in sharding.addressable_devices_indices_map(values.shape).values():
                regions.want(name, index, values.shape, values.dtype)
                wanted.append((name, index))
        assert not regions.is_complete
        file.fill(regions)
        file.fill(regions)  # the same shards from another host: counted once
        assert regions.is_complete
        for name, index in wanted:
            values = expected[name]
            np.testing.assert_array_equal(regions.get(name, index, values.shape), values[index])


def test_missing_shards_are_noticed(mesh, tmp_path):
    leaves = arrays(mesh)
    write(tmp_path / "file", {"matrix": leaves["matrix"]}, {})()
    regions = Regions()
    regions.want("matrix", (slice(None), slice(None)), (8, 8), np.float32)
    regions.want("scalar", (), (), np.int32)
    ShardFile(tmp_path / "file").fill(regions)
    assert not regions.is_complete


@pytest.mark.parametrize("damage", ["bit", "cut", "longer"])
def test_damage_is_found(mesh, tmp_path, damage):
    path = tmp_path / "file"
    write(path, arrays(mesh), {})()
    content = bytearray(path.read_bytes())
    if damage == "bit":
        content[-100] ^= 4
    content = {"bit": content, "cut": content[:-1], "longer": content + b"0"}[damage]
    path.write_bytes(content)
    assert not ShardFile(path).is_intact
    path.write_bytes(b"something else, longer than a header")
    with pytest.raises(ValueError, match="not a file of shards"):
        ShardFile(path)
