"""Every test sees eight fake CPU devices, and programs that compile fast rather than run fast."""

import os
import pathlib

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"

MAPS = pathlib.Path("/proc/self/maps")
MANY_MAPS = 20_000  # Linux allows a process 65,530; a compiled program takes several


@pytest.fixture(scope="session")
def torch():
    """What tests marked `parity` compare with, live, besides transformers and peft."""
    try:
        import peft  # noqa: F401
        import torch
    except ModuleNotFoundError as error:
        pytest.fail(f"{error}; this test needs pip install -e '.[parity]'")
    return torch


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Lets go of the programs of earlier test files before memory maps run out."""
    import jax  # after the platform is chosen

    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY_MAPS:
        jax.clear_caches()
