"""Compile-only devices: TPU topologies and GPUs that are not attached.

Programs compile for them as for attached devices, but cannot run. TPUs need the package `libtpu`
(extra `[tpu]`), GPUs the package `jax[cuda12]` (extra `[cuda]`); neither needs the device.
"""

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

from jax._src import xla_bridge
from jax.experimental import topologies

from jaxrl_llm.config import ConfigError
from jaxrl_llm.planning import accelerators

_GPUS_PER_HOST = 8


# XLA's target description of these GPUs, with the library versions of `jax[cuda12]`.
_GPU_DESCRIPTION = """
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
  shared_memory_per_block_optin: {block_bytes}
  shared_memory_per_core: {shared_bytes}
  core_count: {chip.cores}
  fpus_per_core: {chip.units}
  clock_rate_ghz: {chip.clock_ghz}
  l2_cache_size: {cache_bytes}
  memory_bandwidth: {bandwidth:.0f}
  device_memory_size: {memory_bytes}
  cuda_compute_capability {{ major: {chip.capability[0]} minor: {chip.capability[1]} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{chip.title}"
"""


def devices_by_name(name: str, num_devices: int = 0) -> Sequence[Any]:
    """Devices of a TPU topology such as "v5e:4x4", or `num_devices` GPUs of a kind ("h100").

    Raises ConfigError if their compiler is not installed or does not know them.
    """
    known = {device.name: device for device in accelerators.DEVICES.values() if device.chip}
    if name in known:
        return _gpu_devices(known[name], num_devices)
    if ":" not in name:
        raise ConfigError(
            f"--compile: {name} devices are not here, and how to compile for them is not known;"
            f" give a TPU --topology, or a --device of {', '.join(known)}"
        )
    return _topology_devices(name)


def _topology_devices(topology: str) -> Sequence[Any]:
    # Do not query the metadata server; allow another process to load the compiler too.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    slices, slice_topology = topology.rpartition("*")[::2]
    try:
        slice_options = {"num_slices": int(slices)} if slices else {}
        return topologies.get_topology_desc(slice_topology, platform="tpu", **slice_options).devices
    except Exception as error:  # the plugin raises types of its own
        raise ConfigError(
            f"topology {topology!r}: {str(error).splitlines()[0]}; write it as 'v5e:4x4',"
            " and install the TPU compiler with pip install 'jaxrl_llm[tpu]'"
        ) from error


def _gpu_devices(device: accelerators.Device, num_devices: int) -> Sequence[Any]:
    chip, hosts = device.chip, max(1, -(-num_devices // _GPUS_PER_HOST))
    assert chip is not None
    if num_devices < 1 or (hosts > 1 and num_devices % _GPUS_PER_HOST):
        raise ConfigError(
            f"devices: {num_devices} x {device.name}; use 1 to {_GPUS_PER_HOST}, or a number of"
            f" whole hosts of {_GPUS_PER_HOST}"
        )
    text = _GPU_DESCRIPTION.format(
        chip=chip,
        bandwidth=device.memory_bandwidth,
        cache_bytes=chip.cache_mib << 20,
        memory_bytes=chip.memory_mib << 20,
        shared_bytes=chip.shared_kib << 10,
        block_bytes=(chip.shared_kib - 1) << 10,
    )
    try:
        return topologies.get_topology_desc(
            platform="cuda", target_config=text, topology=f"1x{hosts}x{num_devices // hosts}"
        ).devices
    except Exception as error:  # the plugin raises types of its own
        raise ConfigError(
            f"device {device.name!r}: {str(error).splitlines()[0]}; install the GPU compiler with"
            " pip install 'jaxrl_llm[cuda]'"
        ) from error


@contextlib.contextmanager
def gpu_as_cuda() -> Iterator[None]:
    """A context in which programs with platform-dependent code lower for absent GPUs.

    Lowering resolves the platform "gpu" to CUDA or ROCm by the attached devices, and fails without
    any (jax-ml/jax issue 23971). Here it then resolves to CUDA, the only one that `devices_by_name`
    offers.
    """
    original = xla_bridge.canonicalize_platform

    @functools.wraps(original)
    def canonicalize(platform: str) -> str:
        try:
            return original(platform)
        except RuntimeError:
            if platform == "gpu":
                return "cuda"
            raise

    xla_bridge.canonicalize_platform = canonicalize
    try:
        yield
    finally:
        xla_bridge.canonicalize_platform = original
