"""Import and export by two processes that each hold half of every parameter."""

import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
import quick_compiler

from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.models.transformer import Network

NETWORK = Network(Architecture("qwen2", 96, 32, 2, 4, 2, 8, 48, qkv_bias=True))
PROGRAM = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from test_huggingface_multihost import NETWORK
from jaxrl_llm.config import MeshConfig
from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.sharding.mesh import TRAIN, make_mesh, shardings
mesh = make_mesh(MeshConfig())
axes, units = NETWORK.logical_axes(), NETWORK.sharding_units
places = shardings(NETWORK.abstract_params(), axes, mesh, TRAIN, units)
params = checkpoint.load(sys.argv[3], NETWORK, places)
assert not params["embed"].is_fully_addressable
checkpoint.save(sys.argv[4], NETWORK, params, max_shard_bytes=20_000)
"""


@pytest.mark.multihost
def test_two_processes_export_what_they_imported(tmp_path):
    params = NETWORK.init(jax.random.key(0))
    checkpoint.save(tmp_path / "source", NETWORK, params)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    paths = [str(pathlib.Path(__file__).parent), *(p for p in sys.path if p)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment["XLA_FLAGS"] = quick_compiler.flags(2)
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                PROGRAM,
                address,
                str(rank),
                tmp_path / "source",
                tmp_path / "o",
            ],
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=480) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    again = checkpoint.load(tmp_path / "o", NETWORK)
    jax.tree.map(np.testing.assert_array_equal, again, params)
