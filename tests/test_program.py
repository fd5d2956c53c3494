"""How a program begins: flags of the compiler; how it ends: with a message or a trace."""

import errno
import logging
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from jaxrl_llm import program
from jaxrl_llm.config import ConfigError
from jaxrl_llm.errors import UserError, raise_flag_problems


@pytest.fixture
def run():
    return program.run


def raising(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    "error, message",
    [
        (UserError("give another folder"), "give another folder"),
        (ConfigError(["config.seed: too large"]), "1 problem in this config:\n  config.seed"),
        (OSError(errno.ENOSPC, "No space left on device", "/a/b"), "'/a/b'; check free space"),
        (PermissionError(errno.EACCES, "Permission denied", "/a"), "Permission denied: '/a'"),
    ],
)
def test_user_errors_are_printed_without_a_traceback(run, capsys, error, message):
    with pytest.raises(SystemExit) as ended:
        run(raising(error))
    assert ended.value.code == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and message in shown and "Traceback" not in shown


def test_a_library_is_not_missed_that_is_not_used():
    record = logging.makeLogRecord({"msg": "PyTorch was not found. Models won't be available"})
    assert not logging.getLogger("transformers").filter(record)
    assert logging.getLogger("transformers").filter(logging.makeLogRecord({"msg": "other"}))


@pytest.mark.parametrize("error", [KeyError("x"), FileNotFoundError(errno.ENOENT, "no", "x")])
def test_a_fault_of_the_program_keeps_its_trace(run, capsys, error):
    with pytest.raises(SystemExit) as ended:
        run(raising(error))
    assert ended.value.code == 70
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "in main\n    raise error" in shown


INTERRUPTED = """
import sys, threading
from jaxrl_llm import program
from jaxrl_llm.errors import Interrupted

def main():
    threading.Thread(target=threading.Event().wait).start()
    sys.stdout.write("said")
    raise Interrupted("SIGTERM", 75)

sys.argv = ["program"]
program.run(main)
"""


def test_no_thread_holds_up_a_requested_end():
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        capture_output=True,
        cwd=pathlib.Path(__file__).parents[1],
        timeout=100,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (75, b"said"), ended.stderr.decode()


def test_a_good_end_is_silent(run, caplog):
    assert run(lambda: None) is None
    assert not caplog.records


def test_problems_of_flags_are_reported_together():
    raise_flag_problems([])
    with pytest.raises(ConfigError) as error:
        raise_flag_problems([("samples", "must be 1"), ("prompt", "too long")])
    assert error.value.problems == ("--samples: must be 1", "--prompt: too long")


@pytest.fixture
def cache_setting():
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield lambda: jax.config.jax_compilation_cache_dir
    for name, value in before.items():
        jax.config.update(name, value)


def test_compiled_programs_stay_beside_the_folder(monkeypatch, tmp_path, cache_setting):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    program.enable_compilation_cache(tmp_path / "runs" / "a")
    assert cache_setting() == str(tmp_path / "runs" / ".jax_cache")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("named", ["", "/somewhere"])
def test_the_environment_decides_first(monkeypatch, tmp_path, cache_setting, named):
    before = cache_setting()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", named)
    program.enable_compilation_cache(tmp_path / "a")
    assert cache_setting() == before


def test_flags_of_the_user_stay():
    mine = "--xla_gpu_enable_pipelined_all_gather=false --xla_dump_to=here"
    environment = {"JAX_PLATFORMS": "cuda,cpu", "XLA_FLAGS": mine}
    program.set_xla_flags(environment)
    assert environment["XLA_FLAGS"].startswith(mine + " ")
    assert environment["XLA_FLAGS"].count("pipelined_all_gather") == 1
    assert "latency_hiding_scheduler=true" in environment["XLA_FLAGS"]
    before = dict(environment)
    program.set_xla_flags(environment)  # twice is once
    assert environment == before


def test_each_platform_has_its_own():
    variables = {"tpu": "LIBTPU_INIT_ARGS", "gpu": "XLA_FLAGS", "cpu": "XLA_FLAGS"}
    for platform, variable in variables.items():
        environment = {"JAX_PLATFORMS": platform}
        program.set_xla_flags(environment)
        assert set(environment) == {"JAX_PLATFORMS", variable}
    environment = {"JAX_PLATFORMS": "rocket"}
    program.set_xla_flags(environment)
    assert environment == {"JAX_PLATFORMS": "rocket"}


def test_a_notebook_has_them_before_there_are_devices():
    script = """
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
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    for name, value in program.XLA_FLAGS["gpu"]["XLA_FLAGS"].items():
        assert f"--{name}={value}" in found.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_compiler_knows_the_flags(platform):
    # It ends the process at a flag that it does not know, on any platform.
    xla_flags = program.XLA_FLAGS[platform]["XLA_FLAGS"]
    text = " ".join(f"--{name}={value}" for name, value in xla_flags.items())
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": text}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_every_tpu_compiles_with_the_flags(topology, tpu_devices):
    xla_flags = program.XLA_FLAGS["tpu"]["LIBTPU_INIT_ARGS"]
    text = " ".join(f"--{name}={value}" for name, value in xla_flags.items())
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
