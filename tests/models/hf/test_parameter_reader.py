"""Parameters from remote files: every byte once, whatever the shards."""

import math

import fsspec
import hf_checkpoints
import jax
import numpy as np
import pytest
from flax import traverse_util

from jaxrl_llm.config import MeshConfig
from jaxrl_llm.models.hf import checkpoint, parameter_reader, safetensors_file
from jaxrl_llm.models.hf.safetensors_file import contiguous_range
from jaxrl_llm.models.hf.tensor_names import tensor_names
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.sharding.mesh import TRAIN, make_mesh, shardings
from jaxrl_llm.storage import bucket, model_folder


@pytest.fixture
def remote(tmp_path):
    hf_checkpoints.make(tmp_path / "a", "qwen2")
    files = fsspec.filesystem("memory")
    files.put(f"{tmp_path / 'a'}/", "/parameters/a/", recursive=True)
    yield tmp_path / "a", "memory://parameters/a"
    files.rm("/parameters", recursive=True)
    model_folder.forget_folders()


def mesh_shardings(network, **sizes):
    mesh = make_mesh(MeshConfig(**sizes))
    units = network.sharding_units
    return shardings(network.abstract_params(), network.logical_axes(), mesh, TRAIN, units)


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 2, "tensor": 4}, {"data": 2, "fsdp": 4}])
def test_one_process_reads_each_byte_once(remote, monkeypatch, sizes):
    folder, address = remote
    network = Network(checkpoint.read_architecture(folder))
    places = mesh_shardings(network, **sizes)
    expected = checkpoint.load(folder, network, places)
    checkpoint.check(address, network)
    ranges = []
    read_range = bucket.read_range

    def counted(address, name, begin, end):
        ranges.append((begin, end))
        return read_range(address, name, begin, end)

    monkeypatch.setattr(bucket, "read_range", counted)
    params = checkpoint.load(address, network, places)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    size = (folder / "model.safetensors").stat().st_size
    header = min(size, safetensors_file._FIRST_READ_BYTES)
    assert sum(end - begin for begin, end in ranges) <= size + header


def test_a_parameter_too_large_for_the_host_is_read_in_its_blocks(remote, monkeypatch):
    folder, address = remote
    network = Network(checkpoint.read_architecture(folder))
    places = mesh_shardings(network)
    monkeypatch.setattr(parameter_reader, "MAX_SHARED_BYTES", 0)
    params = checkpoint.load(address, network, places)
    jax.tree.map(np.testing.assert_array_equal, params, checkpoint.load(folder, network, places))


def test_stripes_are_contiguous_in_the_files(remote):
    folder, _ = remote
    network = Network(checkpoint.read_architecture(folder))
    stored = safetensors_file.open_folder(folder)
    leaves = traverse_util.flatten_dict(network.abstract_params())
    places = traverse_util.flatten_dict(mesh_shardings(network, tensor=8, fsdp=1))
    for name in tensor_names(network.shape):
        shape, tensors = leaves[name.path].shape, [stored[file] for file in name.file_names]
        stripes = parameter_reader._stripe_sharding(name, shape, places[name.path])
        blocks = parameter_reader._holders(shape, stripes.devices_indices_map(shape))
        sizes = [parameter_reader._range_size(name, tensors, block) for block in blocks]
        assert sum(sizes) == math.prod(shape), name


def test_the_range_of_a_block():
    array = np.arange(4 * 6 * 8).reshape(4, 6, 8)
    everything = slice(None)
    for block, size in [
        ((everything, everything, everything), 192),
        ((slice(1, 3), everything, everything), 96),
        ((slice(1, 2), slice(2, 5), everything), 24),
        ((slice(1, 2), slice(2, 3), slice(3, 5)), 2),
        ((slice(1, 2), slice(2, 3), slice(3, 4)), 1),
        ((slice(1, 3), slice(2, 3), slice(3, 4)), 96),
        ((slice(0, 4, 2), everything, slice(1, 2)), 192),
        ((slice(2, 2), everything, everything), 0),
    ]:
        begin, shape, within = contiguous_range(block, array.shape)
        assert math.prod(shape) == size
        part = array.reshape(-1)[begin : begin + size].reshape(shape)[within]
        np.testing.assert_array_equal(part, array[block])
