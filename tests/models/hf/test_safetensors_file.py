"""The file format against its reference implementation, and every way a file can be broken."""

import json
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm.models.hf import safetensors_file
from jaxrl_llm.models.hf.config_reader import CheckpointFormatError
from jaxrl_llm.models.hf.safetensors_file import TensorToWrite


def write(path, **arrays):
    safetensors_file.write_file(
        path,
        [TensorToWrite(k, v.dtype, v.shape, lambda v=v: v) for k, v in arrays.items()],
        {"format": "pt"},
    )


@pytest.fixture
def arrays():
    random = np.random.default_rng(0).normal(size=(5, 7))
    kinds = {"a": np.float32, "b": jnp.bfloat16, "c": np.float16, "d": np.float64}
    return {name: random.astype(kind) for name, kind in kinds.items()}


def test_reads_what_the_library_writes(tmp_path, arrays):
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors", {"k": "v"})
    tensors, metadata = safetensors_file.read_header(tmp_path / "x.safetensors")
    assert metadata == {"k": "v"} and set(tensors) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(tensors[name].view(), array)
        np.testing.assert_array_equal(tensors[name].view()[2:4, 1:], array[2:4, 1:])


def test_the_library_reads_what_is_written(tmp_path, arrays):
    write(tmp_path / "x.safetensors", **arrays, e=arrays["a"].T)  # not contiguous
    found = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(found["e"], arrays["a"].T)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_tensors_are_asked_for_one_at_a_time(tmp_path):
    # What is handed over for one tensor is let go before the next is asked for.
    alive = []

    def contents():
        assert not alive, "the last tensor is still on the host"
        array = np.zeros((3,), np.float32)
        alive.append(1)
        weakref.finalize(array, alive.pop)
        return array

    kind = np.dtype(np.float32)
    many = [TensorToWrite(str(i), kind, (3,), contents) for i in range(10)]
    assert sum(t.num_bytes for t in many) == 120
    safetensors_file.write_file(tmp_path / "x.safetensors", many, {})


def test_broken_files_are_named(tmp_path, arrays):
    path = tmp_path / "x.safetensors"

    def refused(contents, message):
        path.write_bytes(contents)
        with pytest.raises(CheckpointFormatError, match=message) as error:
            safetensors_file.read_header(path)
        assert str(path) in str(error.value)

    write(path, **arrays)
    whole = path.read_bytes()
    refused(whole[:-1], "cut short: d ends at byte")
    refused(whole[:100], "not a complete safetensors file")
    refused(b"", "not a complete safetensors file")
    refused(b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull")
    refused((8).to_bytes(8, "little") + b"not json", "header is not valid")
    nested = b"[" * 100_000
    refused(len(nested).to_bytes(8, "little") + nested, "header is not valid: RecursionError")

    def with_entry(**entry):
        header = json.dumps({"a": entry}).encode()
        return len(header).to_bytes(8, "little") + header + bytes(64)

    refused(with_entry(dtype="F32", shape=[4]), "header is not valid: KeyError 'data_offsets'")
    refused(
        with_entry(dtype="F32", shape=[4], data_offsets=[0, 8]), r"a F32\[4\] needs 16 bytes.* 8"
    )
    with pytest.raises(CheckpointFormatError, match="no such file"):
        safetensors_file.read_header(tmp_path / "y.safetensors")
