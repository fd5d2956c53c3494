"""The memory that a worker maps holds the tensors that an export writes, byte for byte."""

import dataclasses
import math
import pathlib

import jax
import numpy as np
import pytest
import tiny

from jaxrl_llm.models.architecture import Experts, LayerType
from jaxrl_llm.models.cpu_kernels import matmuls
from jaxrl_llm.models.hf import checkpoint, safetensors_file
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout.vllm_engine.exported_weights import ExportedWeights

MOE = dataclasses.replace(
    tiny.SHAPE,
    family="mixtral",
    qkv_bias=False,
    tie_embeddings=False,
    layers=(LayerType(experts=True),) * 2,
    experts=Experts(num=4, per_token=2, size=48),
)
SHAPES = {
    "qwen2": tiny.SHAPE,
    "llama": dataclasses.replace(tiny.SHAPE, family="llama", qkv_bias=False, tie_embeddings=False),
    "qwen3": dataclasses.replace(tiny.SHAPE, family="qwen3", qkv_bias=False, qk_norm=True),
    "mixtral": MOE,
}


def stored_tensors(folder: pathlib.Path):
    """The bytes of each tensor of a model folder by name."""
    files = safetensors_file.open_folder(folder)
    return {
        name: np.asarray(tensor.view()[(slice(None),) * len(tensor.shape)]).tobytes()
        for name, tensor in files.items()
    }


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("products", [None, matmuls.WEIGHT_FIRST, matmuls.CUSTOM_KERNELS])
def test_memory_holds_the_tensors_of_an_export(family, products, tmp_path):
    network, mesh = Network(SHAPES[family]), tiny.make_mesh()
    params = tiny.params(network)
    rollout = network if products is None else dataclasses.replace(network, matmuls=products)
    resharder = tiny.resharder(mesh, network, rollout=rollout)
    rollout_params = resharder.reshard(resharder.zeros(), tiny.sharded(params, mesh, network))
    weights = ExportedWeights(rollout)
    weights.write(rollout_params)
    checkpoint.save(tmp_path / "export", network, jax.device_put(params))
    expected, memory = stored_tensors(tmp_path / "export"), weights.memory
    table = {row["name"]: row for row in weights.table()}
    assert table.keys() == expected.keys()
    for name, row in table.items():
        size = math.prod(row["shape"]) * np.dtype(row["dtype"]).itemsize
        assert bytes(memory[row["offset"] : row["offset"] + size]) == expected[name], name
    # The same through the path by which other processes open it.
    assert pathlib.Path(weights.path).read_bytes() == bytes(memory)
    memory.release()
    weights.close()
