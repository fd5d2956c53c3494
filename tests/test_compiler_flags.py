"""Flags of the compiler: added where they are missing, never in the place of the user's."""

import os
import subprocess
import sys

import pytest

from jaxrl_llm import compiler_flags


def test_flags_of_the_user_stay():
    mine = "--xla_gpu_enable_pipelined_all_gather=false --xla_dump_to=here"
    environment = {"JAX_PLATFORMS": "cuda,cpu", "XLA_FLAGS": mine}
    compiler_flags.set_defaults(environment)
    assert environment["XLA_FLAGS"].startswith(mine + " ")
    assert environment["XLA_FLAGS"].count("pipelined_all_gather") == 1
    assert "latency_hiding_scheduler=true" in environment["XLA_FLAGS"]
    before = dict(environment)
    compiler_flags.set_defaults(environment)  # twice is once
    assert environment == before


def test_each_platform_has_its_own():
    for platform, variable in {"tpu": "LIBTPU_INIT_ARGS", "gpu": "XLA_FLAGS"}.items():
        environment = {"JAX_PLATFORMS": platform}
        compiler_flags.set_defaults(environment)
        assert set(environment) == {"JAX_PLATFORMS", variable}
    environment = {"JAX_PLATFORMS": "cpu"}
    compiler_flags.set_defaults(environment)
    assert environment == {"JAX_PLATFORMS": "cpu"}


def test_a_notebook_has_them_before_there_are_devices():
    program = """
import os
import jaxrl_llm
from jax._src import xla_bridge
from jaxrl_llm.trainer import rl

def train(config, workdir):
    assert not xla_bridge.backends_are_initialized()
    print(os.environ["XLA_FLAGS"])

rl.train = train
config = jaxrl_llm.default_config()
config.rewards.functions.answer = {"function": "arithmetic"}
jaxrl_llm.train(config, "nowhere")
"""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cuda",
        "XLA_FLAGS": "",
        "JAX_COMPILATION_CACHE_DIR": "",
    }
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    for name, value in compiler_flags.FLAGS["gpu"]["XLA_FLAGS"].items():
        assert f"--{name}={value}" in found.stdout.split()


@pytest.mark.slow
def test_the_compiler_knows_the_flags_of_gpus():
    # It ends the process at a flag that it does not know, on any platform.
    flags = compiler_flags.FLAGS["gpu"]["XLA_FLAGS"]
    text = " ".join(f"--{name}={value}" for name, value in flags.items())
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": text}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_every_tpu_compiles_with_the_flags(topology, tpu_devices):
    flags = compiler_flags.FLAGS["tpu"]["LIBTPU_INIT_ARGS"]
    text = " ".join(f"--{name}={value}" for name, value in flags.items())
    gather = f"""
import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
devices = topologies.get_topology_desc("{topology}", platform="tpu").devices
mesh = jax.sharding.Mesh(devices, ("fsdp",))
split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp",), ()))
weight = jax.ShapeDtypeStruct((1024, 1024), "float32", sharding=split)
jax.jit(lambda w: w, out_shardings=whole).lower(weight).compile()
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": text}
    command = [sys.executable, "-c", gather]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
