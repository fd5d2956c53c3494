"""Flags of XLA for programs that compile fast rather than run fast: tests compile all day."""

import os
from collections.abc import Iterable
from typing import Any

# Code of elementwise operations by the older generator takes a quarter of the time to compile, and
# one piece of code a program less than one for each core.
FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)


def flags(devices: int, given: str = "") -> str:
    """Returns `XLA_FLAGS` of a process with as many CPU devices; what is `given` stays."""
    wanted = (f"--xla_force_host_platform_device_count={devices}", *FLAGS)
    missing = [flag for flag in wanted if flag.partition("=")[0] not in given]
    return " ".join([*given.split(), *missing])


def environment(
    devices: int, cache: Any, paths: Iterable[Any], inherits_paths: bool = True
) -> dict[str, str]:
    """Returns the environment of a process with as many CPU devices.

    Args:
      devices: Of the process.
      cache: Keeps compiled programs.
      paths: Folders of modules, before those of this process unless `inherits_paths` is False.
    """
    inherited = os.environ.get("PYTHONPATH", "") if inherits_paths else ""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [*map(str, paths), inherited])),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags(devices),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
