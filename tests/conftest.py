"""Every test sees eight fake CPU devices, and programs that compile fast rather than run fast.

A program is compiled once for all processes of a session, those that tests start included: they
share a folder, that of `JAX_COMPILATION_CACHE_DIR` or one that goes with the session.
"""

import os
import pathlib
import shutil
import tempfile
import uuid
from collections.abc import Iterator

import bucket_servers
import jaxtyping
import pytest
import quick_compiler
from jax import monitoring

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"  # names are of the stand-in in `hub_server.py`, if of any hub
os.environ["XLA_FLAGS"] = quick_compiler.flags(8, os.environ.get("XLA_FLAGS", ""))

COMPILED = "JAX_COMPILATION_CACHE_DIR"  # read by jax, here and in every process below this one
OWN_FOLDER = None if os.environ.get(COMPILED) else tempfile.mkdtemp(prefix="compiled-")
if OWN_FOLDER:
    os.environ[COMPILED] = OWN_FOLDER
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# Shapes are checked here.
CHECKED = ("algorithms", "checkpoint", "data", "learner", "metrics", "models", "planning")
CHECKED += ("rewards", "rollout", "serving", "sharding", "trainer", "types")
jaxtyping.install_import_hook([f"jaxrl_llm.{name}" for name in CHECKED], "shape_checks.typechecked")

MAPS = pathlib.Path("/proc/self/maps")
MANY_MAPS = 20_000  # Linux allows a process 65,530; a compiled program takes several


def pytest_unconfigure():
    if OWN_FOLDER:
        shutil.rmtree(OWN_FOLDER, ignore_errors=True)


@pytest.fixture(scope="session")
def cache() -> pathlib.Path:
    """Compiled programs, shared by all processes of the session."""
    return pathlib.Path(os.environ[COMPILED])


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The address of moto's S3 server."""
    pytest.importorskip("moto")
    with bucket_servers.running_server("s3") as endpoint:
        yield endpoint


@pytest.fixture
def s3_folder(s3_endpoint, monkeypatch) -> pathlib.Path:
    """A new folder in a bucket of moto, for code that runs in this process."""
    from jaxrl_llm.storage import files

    for name, value in bucket_servers.client_environment("s3", s3_endpoint).items():
        monkeypatch.setenv(name, value)
    return files.run_path(f"s3://{bucket_servers.BUCKET}/{uuid.uuid4().hex}/run")


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """The names of the programs that were compiled so far."""
    found: list[str] = []

    def listen(event: str, seconds: float, **about) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(str(about.get("fun_name")))

    monitoring.register_event_duration_secs_listener(listen)
    yield found
    monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="session")
def torch():
    """What tests marked `parity` compare with, live, besides transformers and peft."""
    try:
        import peft  # noqa: F401
        import torch
    except ModuleNotFoundError as error:
        pytest.fail(f"{error}; this test needs pip install -e '.[parity]'")
    return torch


@pytest.fixture
def tpu_devices(monkeypatch):
    """Returns `devices(topology)`, for which the TPU's compiler works without a TPU."""
    pytest.importorskip("libtpu", reason="the TPU compiler is in the wheel libtpu")
    import jax
    from jax.experimental import topologies

    jax.devices()  # reads XLA_FLAGS, which end the process if libtpu reads them too
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    return lambda name: list(topologies.get_topology_desc(name, platform="tpu").devices)


@pytest.fixture
def gpu_devices(monkeypatch):
    """Returns `devices(kind, count)`, for which the GPU's compiler works without a GPU."""
    reason = "the GPU compiler is in the wheels of jax[cuda12]"
    pytest.importorskip("jax_plugins.xla_cuda12", reason=reason)
    import jax

    from jaxrl_llm.planning import compile_only_devices

    jax.devices()  # reads XLA_FLAGS, of which those of tests are for CPUs
    monkeypatch.delenv("XLA_FLAGS")
    return lambda kind, count: list(compile_only_devices.devices_by_name(kind, count))


@pytest.fixture
def one_device():
    """Runs of the test have one device: eight on two cores would wait for each other."""
    import jax

    from jaxrl_llm.sharding import mesh as mesh_lib

    with mesh_lib.use_devices(jax.devices()[:1]):
        yield


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Lets go of the programs of earlier test files before memory maps run out."""
    import jax  # after the platform is chosen

    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY_MAPS:
        jax.clear_caches()
