"""Two processes load a model from the hub: each downloads the bytes of its own shards."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import hub_server
import jax
import pytest
import quick_compiler

from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.models.transformer import Network

# 26 million parameters, 105 MB in float32.
NETWORK = Network(Architecture("qwen2", 8192, 512, 8, 8, 4, 64, 1280, qkv_bias=True))
# Each of the two processes has two devices.
MESHES = {
    "fsdp": {},
    "tensor": {"fsdp": 1, "tensor": 4},
    "both": {"fsdp": 2, "tensor": 2},
    "copies": {"data": 2, "fsdp": 2},
}
PROGRAM = """
import json, os, sys
import jax
import numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
rank = int(sys.argv[2])
jax.distributed.initialize(sys.argv[1], 2, rank)
from test_hub_multihost import MESHES, NETWORK
from jaxrl_llm.config import MeshConfig
from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.sharding.mesh import TRAIN, make_mesh, shardings
from huggingface_hub import constants
from jaxrl_llm.config import ModelConfig, RLConfig
from jaxrl_llm.planning.model_names import pin_models
endpoint = constants.ENDPOINT
os.environ["HF_TOKEN"] = ""
if rank:  # the first process resolves names for all
    constants.ENDPOINT = "http://127.0.0.1:9"
pinned = pin_models(RLConfig(model=ModelConfig(path="org/name"))).model.path
constants.ENDPOINT = endpoint
assert pinned == sys.argv[5], pinned
for name, sizes in MESHES.items():
    os.environ["HF_TOKEN"] = f"hf_{name}_{rank}"
    mesh = make_mesh(MeshConfig(**sizes))
    axes, units = NETWORK.logical_axes(), NETWORK.sharding_units
    places = shardings(NETWORK.abstract_params(), axes, mesh, TRAIN, units)
    params = checkpoint.load(pinned, NETWORK, places)
    local = checkpoint.load(sys.argv[3], NETWORK, places)
    share = 0
    for array, expected in zip(jax.tree.leaves(params), jax.tree.leaves(local), strict=True):
        assert array.sharding == expected.sharding, (array.sharding, expected.sharding)
        blocks = {}
        for one, other in zip(array.addressable_shards, expected.addressable_shards, strict=True):
            np.testing.assert_array_equal(one.data, other.data)
            blocks[str(one.index)] = one.data.nbytes
        share += sum(blocks.values())
    with open(f"{sys.argv[4]}/{name}_{rank}.json", "w") as file:
        json.dump(share, file)
"""


@pytest.mark.multihost
def test_each_process_downloads_its_own_shards(tmp_path):
    params = NETWORK.init(jax.random.key(0))
    checkpoint.save(tmp_path / "source", NETWORK, params, max_shard_bytes=20_000_000)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    tokens = {f"hf_{name}_{rank}": f"{name}_{rank}" for name in MESHES for rank in range(2)}
    with hub_server.HubServer(tokens) as hub:
        commit = hub.add("org/name", tmp_path / "source")
        paths = [pathlib.Path(__file__).parent, *(path for path in sys.path if path)]
        common = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        common["XLA_FLAGS"] = quick_compiler.flags(2)
        pinned = f"hf://org/name@main#{commit}"
        arguments = [str(tmp_path / "source"), str(tmp_path), pinned]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, address, str(rank), *arguments],
                env={**common, **hub_server.hub_environment(hub, tmp_path / f"hf{rank}")},
            )
            for rank in range(2)
        ]
        try:
            assert [process.wait(timeout=480) for process in processes] == [0, 0]
        finally:
            for process in processes:
                process.kill()
        for name in MESHES:
            for rank in range(2):
                share = json.loads((tmp_path / f"{name}_{rank}.json").read_text())
                sent = hub.traffic[f"{name}_{rank}"]
                print(f"{name} {rank}: {sent.file_bytes / share:.4f} of {share / 1e6:.1f} MB,"
                      f" {sent.requests} requests")  # fmt: skip
                assert share / 2 < sent.file_bytes <= 1.1 * share, (name, rank)
