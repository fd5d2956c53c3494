"""Table of accelerators: memory, peak FLOP/s, memory and link bandwidth.

Figures are the vendors' for dense 16-bit arithmetic, and for all links of one JAX device together
in one direction. Memory is the part that a program may use: on TPUs the compiler's limit, on GPUs
nine tenths of the installed memory.
"""

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.config import ConfigError

GIB = 2**30

_PROCESS_BYTES = 3 * GIB // 2  # Python, libraries, compiler leftovers: measured in docs/memory.md


class GpuChip(NamedTuple):
    """Facts that the compiler needs of a GPU that is not attached, from vendors' data sheets."""

    title: str  # the driver's name for it
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    units: int  # float32 units per multiprocessor
    clock_ghz: float
    cache_mib: int  # L2
    memory_mib: int  # total
    shared_kib: int  # shared memory per multiprocessor; a block may use all but 1 KiB


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator, counted like JAX devices; bandwidths are in bytes/s."""

    name: str
    memory_bytes: int
    flops: float  # per second, 16 bits; 0: unknown, no times are predicted
    memory_bandwidth: float
    link_bandwidth: float  # within its domain
    domain: int  # number of devices connected by fast links
    network_bandwidth: float  # per device, between domains
    jax_kind: str = ""  # regular expression that matches JAX's `device_kind`
    process_bytes: int = 0  # CPU only: its share of the process's memory besides arrays

    @property
    def chip(self) -> GpuChip | None:
        """Facts for its compiler, if programs can compile for it where it is not attached."""
        return _CHIPS.get(self.name)

    @property
    def backend(self) -> str:  # the compiler that a plan assumes
        if self.name == "cpu":
            return "cpu"
        return "tpu" if self.jax_kind.startswith("TPU") else "gpu"


def _tpu(name, pattern, memory_gib, teraflops, memory_gbs, link_gbs, domain) -> Device:
    speeds = teraflops * 1e12, memory_gbs * 1e9, link_gbs * 1e9
    return Device(name, int(memory_gib * GIB), *speeds, domain, 6.25e9, pattern)


def _gpu(name, pattern, memory_gb, teraflops, memory_gbs, link_gbs, network_gbs) -> Device:
    speeds = teraflops * 1e12, memory_gbs * 1e9, link_gbs * 1e9
    return Device(name, int(0.9 * memory_gb * 1e9), *speeds, 8, network_gbs * 1e9, pattern)


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (  # the first whose `jax_kind` matches wins
        _tpu("v4", "TPU v4", 30.5, 275, 1228, 150, 4096),
        _tpu("v5e", "TPU v5 ?(lite|e)", 15.75, 197, 819, 100, 256),
        _tpu("v5p", "TPU v5", 95.73, 459, 2765, 300, 8960),
        _tpu("v6e", "TPU v6", 31.24, 918, 1640, 224, 256),
        # Half of a chip, which has 2307 teraflops (docs.cloud.google.com/tpu/docs/tpu7x).
        _tpu("tpu7x", "TPU7|TPU v7", 94.74, 1153.5, 3690, 300, 9216),
        _gpu("a100-40", "A100.*40GB", 40, 312, 1555, 300, 25),
        _gpu("a100", "A100", 80, 312, 2039, 300, 25),
        _gpu("h100-pcie", "H100 PCIe", 80, 756, 2000, 64, 25),
        _gpu("h100", "H100", 80, 989, 3350, 450, 50),
        _gpu("h200", "H200", 141, 989, 4800, 450, 50),
        _gpu("b200", "B200", 180, 2250, 8000, 900, 50),
        _gpu("l40s", "L40S", 48, 362, 864, 32, 25),
        _gpu("l4", r"L4\b", 24, 121, 300, 32, 12.5),
        _gpu("a10g", "A10G", 24, 70, 600, 32, 12.5),
        # Single cards, by half of the PCIe bandwidth in both directions; tensor cores that sum in
        # float32.
        _gpu("rtx4090", "RTX 4090", 24, 165, 1008, 32, 12.5),
        _gpu("rtx4080", "RTX 4080", 16, 97.5, 717, 32, 12.5),
        _gpu("rtx3090", "RTX 3090", 24, 71, 936, 32, 12.5),
        # In float16; it computes bfloat16 in float32 units, several times slower.
        _gpu("t4", r"T4\b", 16, 65, 320, 16, 12.5),
    )
}


_CHIPS: Mapping[str, GpuChip] = {
    "a100": GpuChip("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 40, 81_251, 164),
    "h100": GpuChip("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 50, 81_008, 228),
    "h200": GpuChip("NVIDIA H200", (9, 0), 132, 128, 1.98, 50, 143_771, 228),
    "b200": GpuChip("NVIDIA B200", (10, 0), 148, 128, 1.965, 126, 183_359, 228),
}


def device_by_name(name: str) -> Device:
    """The table row by name; raises ConfigError if there is none."""
    if name.lower() not in DEVICES:
        raise ConfigError(f"device: unknown {name!r}; known: {', '.join(DEVICES)}")
    return DEVICES[name.lower()]


def device_of_kind(device_kind: str) -> Device | None:
    """The table row for JAX's `device_kind`, or None."""
    return next((d for d in DEVICES.values() if re.search(d.jax_kind, device_kind, re.I)), None)


def local_device(devices: Sequence[Any]) -> Device | None:
    """The row for these devices, or None; each CPU device gets its share of the host's memory."""
    first = devices[0]
    if first.platform != "cpu":
        return device_of_kind(first.device_kind)
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    local = sum(device.process_index == first.process_index for device in devices)
    no_speeds = 0.0, 0.0, 0.0, len(devices), 0.0
    return Device("cpu", memory_bytes // local, *no_speeds, process_bytes=_PROCESS_BYTES // local)


def peak_flops(devices: Sequence[Any]) -> float:
    """Peak 16-bit FLOP/s of all these devices together; NaN if unknown."""
    device = device_of_kind(devices[0].device_kind)
    return device.flops * len(devices) if device else math.nan


def topology_devices(topology: str) -> tuple[Device, int]:
    """The device and number of devices of a TPU topology: "v5e:4x4" has 16.

    In several slices, "2*v5e:4x4", links connect only the devices within one.

    Raises ConfigError if the text is malformed or the device unknown.
    """
    match = re.fullmatch(r"(?:([1-9]\d*)\*)?(\w+):(\d+(?:x\d+)*)", topology)
    if not match:
        raise ConfigError(
            f"topology: {topology!r}; write it as 'v5e:4x4' or 'v5p:2x2x4', two slices of it as"
            " '2*v5p:2x2x4'"
        )
    device, slices = device_by_name(match[2]), int(match[1] or 1)
    chips = math.prod(int(side) for side in match[3].split("x"))
    slice_devices = chips * (2 if device.name == "tpu7x" else 1)
    if slices > 1:
        device = dataclasses.replace(device, domain=slice_devices)
    return device, slices * slice_devices
