"""Devices that are not attached, as their compilers know them: TPU topologies, and GPUs.

Programs compile for them as for devices that are here; they cannot run. TPUs need the package
`libtpu` (extra `[tpu]`), GPUs the package `jax[cuda12]` (extra `[cuda]`); neither needs the device.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax._src import xla_bridge
from jax.experimental import topologies

from jaxrl_llm.config import ConfigError
from jaxrl_llm.planning import devices

_GPUS_OF_HOST = 8


@dataclasses.dataclass(frozen=True)
class _Chip:
    """What the compiler asks of a GPU beside `planning.devices`; from vendors' data sheets."""

    title: str  # as the driver names it
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    units: int  # float32 units of each
    clock_ghz: float
    cache_bytes: int  # of the second level
    memory_bytes: int  # all of it
    shared_bytes: int  # of a core
    block_bytes: int  # of these, most that a block may ask for


def _chip(title, capability, cores, units, clock_ghz, cache_mib, memory_mib, shared_kib) -> _Chip:
    shared, reserved = shared_kib << 10, 1 << 10
    sizes = cache_mib << 20, memory_mib << 20, shared, shared - reserved
    return _Chip(title, capability, cores, units, clock_ghz, *sizes)


_CHIPS: Mapping[str, _Chip] = {
    "a100": _chip("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 40, 81_251, 164),
    "h100": _chip("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 50, 81_008, 228),
    "h200": _chip("NVIDIA H200", (9, 0), 132, 128, 1.98, 50, 143_771, 228),
    "b200": _chip("NVIDIA B200", (10, 0), 148, 128, 1.965, 126, 183_359, 228),
}

# Of all these GPUs, with the libraries that `jax[cuda12]` brings.
_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {chip.block_bytes}
  shared_memory_per_core: {chip.shared_bytes}
  core_count: {chip.cores}
  fpus_per_core: {chip.units}
  clock_rate_ghz: {chip.clock_ghz}
  l2_cache_size: {chip.cache_bytes}
  memory_bandwidth: {bandwidth:.0f}
  device_memory_size: {chip.memory_bytes}
  cuda_compute_capability {{ major: {chip.capability[0]} minor: {chip.capability[1]} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{chip.title}"
"""


def named(name: str, num_devices: int = 0) -> Sequence[Any]:
    """Returns the devices of a TPU topology such as "v5e:4x4", or so many GPUs of a kind ("h100").

    Raises ConfigError if their compiler is not installed or does not know them.
    """
    if name in _CHIPS:
        return _gpus(name, num_devices)
    if ":" not in name:
        raise ConfigError(
            f"--compile: {name} devices are not here, and how to compile for them is not known;"
            f" give a TPU --topology, or a --device of {', '.join(_CHIPS)}"
        )
    return _topology(name)


def _topology(topology: str) -> Sequence[Any]:
    # Without a request for the machine's metadata; another process may use the compiler too.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    slices, each = topology.rpartition("*")[::2]
    try:
        several = {"num_slices": int(slices)} if slices else {}
        return topologies.get_topology_desc(each, platform="tpu", **several).devices
    except Exception as error:  # the plugin raises types of its own
        raise ConfigError(
            f"topology {topology!r}: {str(error).splitlines()[0]}; write it as 'v5e:4x4',"
            " and install the TPU compiler with pip install 'jaxrl_llm[tpu]'"
        ) from error


def _gpus(name: str, num_devices: int) -> Sequence[Any]:
    chip, hosts = _CHIPS[name], max(1, -(-num_devices // _GPUS_OF_HOST))
    if num_devices < 1 or (hosts > 1 and num_devices % _GPUS_OF_HOST):
        raise ConfigError(
            f"devices: {num_devices} x {name}; use 1 to {_GPUS_OF_HOST}, or a number of whole hosts"
            f" of {_GPUS_OF_HOST}"
        )
    text = _DESCRIPTION.format(chip=chip, bandwidth=devices.named(name).memory_bandwidth)
    try:
        return topologies.get_topology_desc(
            platform="cuda", target_config=text, topology=f"1x{hosts}x{num_devices // hosts}"
        ).devices
    except Exception as error:  # the plugin raises types of its own
        raise ConfigError(
            f"device {name!r}: {str(error).splitlines()[0]}; install the GPU compiler with"
            " pip install 'jaxrl_llm[cuda]'"
        ) from error


@contextlib.contextmanager
def platforms_known() -> Iterator[None]:
    """Within it, programs that choose by platform lower for absent GPUs.

    They ask what the platform "gpu" stands for, CUDA or ROCm, and JAX answers by the devices that
    are attached (jax-ml/jax issue 23971). Without any it is CUDA, the one that `named` knows.
    """
    found = xla_bridge.canonicalize_platform

    @functools.wraps(found)
    def canonical(platform: str) -> str:
        try:
            return found(platform)
        except RuntimeError:
            if platform == "gpu":
                return "cuda"
            raise

    xla_bridge.canonicalize_platform = canonical
    try:
        yield
    finally:
        xla_bridge.canonicalize_platform = found
