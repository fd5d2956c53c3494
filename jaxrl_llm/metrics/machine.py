"""Numbers about the machine: what it could do at best, and how full its memory is."""

import pathlib
import resource
from collections.abc import Mapping, Sequence
from typing import Any

import jax

GIB = 2**30

# Dense products of 16-bit numbers, operations a second of one JAX device, as the makers say.
# A longer name is looked for first: "TPU v5 lite" is not "TPU v5". A chip of TPU7x does 2307e12 and
# is two devices (docs.cloud.google.com/tpu/docs/tpu7x); on v5p one device is both cores.
PEAK_FLOPS: Mapping[str, float] = {
    "TPU7": 1153.5e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v4": 275e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
}


def peak_flops(device_kind: str) -> float:
    """Returns the most operations a second of a device, or NaN if the device is not known.

    Of one device as JAX counts them, which may be half a chip.
    """
    known = sorted(PEAK_FLOPS, key=len, reverse=True)
    return next(
        (PEAK_FLOPS[name] for name in known if name.lower() in device_kind.lower()), float("nan")
    )


def utilization(flops: float, seconds: float, devices: Sequence[Any]) -> float:
    """Returns the share of the devices' best that so much work in so much time is; NaN unknown."""
    best = peak_flops(devices[0].device_kind) * len(devices)
    return flops / (seconds * best) if seconds > 0 else float("nan")


def memory(devices: Sequence[Any]) -> dict[str, float]:
    """Returns the memory in use, in GiB: of the fullest device of this process, and of the host.

    `perf/max_memory_allocated_gb` is the peak of the devices since the process began,
    `perf/max_memory_reserved_gb` what the allocator may have; both are left out where the
    platform does not tell (CPU). `perf/cpu_memory_used_gb` is what the process holds now,
    `perf/max_cpu_memory_used_gb` its peak.
    """
    here = [d for d in devices if d.process_index == jax.process_index()]
    stats = [found for device in here if (found := device.memory_stats())]
    used = {
        "perf/max_memory_allocated_gb": "peak_bytes_in_use",
        "perf/max_memory_reserved_gb": "bytes_limit",
    }
    found = {
        name: max(s[key] for s in stats) / GIB
        for name, key in used.items()
        if stats and all(key in s for s in stats)
    }
    found["perf/max_cpu_memory_used_gb"] = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    )
    pages = pathlib.Path("/proc/self/statm")
    if pages.exists():
        resident = int(pages.read_text().split()[1]) * resource.getpagesize()
        found["perf/cpu_memory_used_gb"] = resident / GIB
    return found
